"""What the rest of the product may know of a sharding engine. A rank's share of a parameter is one contiguous range
[start, stop) of its flattened elements. Gradients are *sums* over micro-batches and ranks, there after the last."""

from contextlib import AbstractContextManager
from typing import Any, Protocol
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from fullshard.frozen import Frozen


class Shard(Frozen):
    """This rank's range of one parameter. ``value`` and ``gradient`` are flat local views; read them afresh."""

    name: str
    full_shape: tuple[int, ...]
    start: int
    stop: int
    value: torch.Tensor  # (stop - start,) in the storage dtype
    gradient: torch.Tensor | None  # (stop - start,) fp32 after the last micro-batch, None before and for frozen ones
    trainable: bool
    is_copy: bool  # another rank has the same range, and writes it


class ShardedModel(Protocol):
    """A model whose parameters, gradients and optimizer state are split over the ranks."""

    module: nn.Module

    def shards(self) -> list[Shard]:
        """This rank's ranges, in parameter order, tied parameters once."""

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around one forward and backward; ``last``: reduce the gradients over the ranks on leaving."""

    def after_step(self) -> None:
        """After the optimizer changed the shards, or after a forward without gradients: back to rest."""

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Groups for a torch optimizer: ``params`` as (name, tensor) pairs and ``decay`` (bool), stable over a run."""

    def replicas(self, name: str) -> int:
        """On how many ranks an element of this parameter lives: 1 where sharded, all where replicated."""


def in_later_replica(mesh: DeviceMesh) -> bool:
    """Whether another rank has all that this one has, and comes first (HSDP: the mesh's first dimension replicates)."""
    return mesh.ndim > 1 and mesh.get_coordinate()[0] > 0


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local, flat view of a tensor laid out like a shard (a parameter, its gradient, an optimizer moment)."""
    return getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
