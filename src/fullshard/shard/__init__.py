"""``shard_model`` is the only door to the sharding engines."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.shard.interface import Shard, ShardedModel, local_part
from fullshard.train.precision import Precision

__all__ = ["Shard", "ShardedModel", "local_part", "shard_model"]


def shard_model(
    model: nn.Module, units: list[list[nn.Module]], replicated: set[nn.Parameter], mesh: DeviceMesh,
    precision: Precision, engine: str, strategy: str = "full", reduce_each: bool = False,
) -> ShardedModel:  # fmt: skip
    """Shard ``model`` in place: ``units`` are gathered and freed together, innermost first, the rest with the root.
    Meta parameters become empty shards; ``replicated`` ones stay whole. Storage dtypes must be set before. ``mesh``:
    one dimension; or two, of which the first replicates (HSDP). ``strategy``: full | keep | replicate, of the blocks
    (shard/simple/unit.py: Unit). ``reduce_each``: gradients are reduced after each micro-batch, not only the last."""
    if engine == "torch":
        from fullshard.shard.torch_engine import TorchShardedModel as Engine
    else:
        from fullshard.shard.simple.engine import SimpleShardedModel as Engine
    return Engine(model, units, replicated, mesh, precision, strategy, reduce_each)
