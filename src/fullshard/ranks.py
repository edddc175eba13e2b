"""The ranks of one run: process group, mesh, sums over ranks, output of rank 0."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.device import HOST_BACKEND, collective_backend, num_cores, select_device, set_threads

COLLECTIVE_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. ``host``: the gloo group of objects and barriers; None: the default one."""

    rank: int
    num_ranks: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    host: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place and returned. Sums only: averages differ by backend."""
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value

    def maximum(self, value: float) -> float:
        """Largest of one number per rank, on every rank."""
        return max(self.gather_objects(float(value)))

    def gather_objects(self, value: Any) -> list[Any]:
        """One picklable value per rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.host)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host)


def under_torchrun() -> bool:
    """Whether a launcher has set this process's rank (torchrun, Slurm or Kubernetes wrappers, our own)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """This process's index on its node, from the launcher's environment."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def start_ranks() -> Ranks:
    """Join the process group that the launcher's environment variables describe. CPU threads: cores // local ranks."""
    local = local_rank()
    device = select_device(local)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    set_threads(num_cores() // local_ranks)
    if not dist.is_initialized():
        dist.init_process_group(collective_backend(device.type), timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS))
    return current_ranks(device, local)


def current_ranks(device: torch.device | None = None, local: int = 0) -> Ranks:
    """The Ranks of a process group that exists already; a collective call, since it makes the host group."""
    device = device or torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    host = None if device.type == "cpu" else dist.new_group(backend=f"cpu:{HOST_BACKEND}", timeout=timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), local, device, mesh, host)


def stop_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
