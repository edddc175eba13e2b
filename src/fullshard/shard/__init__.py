"""``shard_model`` is the only door to the sharding engines."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import ConfigError
from fullshard.shard.interface import Shard, ShardedModel, local_part
from fullshard.train.precision import Precision

__all__ = ["Shard", "ShardedModel", "local_part", "shard_model"]


def shard_model(
    model: nn.Module,
    units: list[list[nn.Module]],
    replicated: set[nn.Parameter],
    mesh: DeviceMesh,
    precision: Precision,
    engine: str,
) -> ShardedModel:
    """Shard ``model`` in place: ``units`` are gathered and freed together, innermost first, the rest with the root.
    Meta parameters become empty shards. ``replicated`` ones (adapters) stay whole. Storage dtypes must be set before.
    """
    match engine:
        case "torch":
            from fullshard.shard.torch_engine import TorchShardedModel

            return TorchShardedModel(model, units, replicated, mesh, precision)
        case "simple":
            from fullshard.shard.simple.engine import SimpleShardedModel

            return SimpleShardedModel(model, units, replicated, mesh, precision)
        case _:
            raise ConfigError(f"Unknown engine {engine!r}; torch and simple fit.", "Set engine: torch")
