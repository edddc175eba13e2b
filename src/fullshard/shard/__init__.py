"""``shard_model`` is the only door to the sharding engines."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from fullshard.shard.interface import Shard, ShardedModel, local_part
from fullshard.train.precision import Precision

__all__ = ["Shard", "ShardedModel", "choose_engine", "local_part", "shard_model"]


def choose_engine(asked: str, strategy: str, device_type: str) -> str:
    """The recipe's engine; auto: ours where it is faster and smaller (CPU) or alone (replicate), else fully_shard."""
    return asked if asked != "auto" else "simple" if device_type == "cpu" or strategy == "replicate" else "torch"


def shard_model(
    model: nn.Module, units: list[list[nn.Module]], replicated: set[nn.Parameter], mesh: DeviceMesh,
    precision: Precision, engine: str, strategy: str = "full", reduce_each: bool = False,
) -> ShardedModel:  # fmt: skip
    """Shard ``model`` in place: ``units`` are gathered and freed together, innermost first, the rest with the root.
    Meta parameters become empty shards; ``replicated`` ones stay whole. Storage dtypes must be set before. ``mesh``:
    one dimension; or two, of which the first replicates (HSDP). ``strategy``: full | keep | replicate, of the blocks
    (shard/simple/unit.py: Unit). ``reduce_each``: gradients are reduced after each micro-batch, not only the last."""
    if choose_engine(engine, strategy, mesh.device_type) == "torch":
        from fullshard.shard.torch_engine import TorchShardedModel as Engine
    else:
        from fullshard.shard.simple.engine import SimpleShardedModel as Engine
    return Engine(model, units, replicated, mesh, precision, strategy, reduce_each)
