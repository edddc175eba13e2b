"""The ranks of one run: process group, mesh, sums over ranks, output of rank 0."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
import torch
import torch.distributed as dist
from fullshard.device import HOST_BACKEND, collective_backend, num_cores, select_device
from fullshard.errors import TrainError, UserError, refusal
from fullshard.frozen import Frozen

COLLECTIVE_TIMEOUT_SECONDS = 600
SEEN_WITHIN_SECONDS = 10  # a network file system may show a new file late
BEAT_SECONDS = 5.0  # between two signs of life of a rank that others wait for
stop_ranks = dist.destroy_process_group


class Ranks(Frozen):
    """This process's place among the ranks. ``host``: the gloo group of objects and barriers; None: the default one."""

    rank: int
    num_ranks: int
    local_rank: int
    device: torch.device
    mesh: dist.DeviceMesh
    host: Any = None

    is_first = property(lambda self: self.rank == 0)  # the one that prints and writes

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

    def mesh_of(self, replicas: int) -> dist.DeviceMesh:
        """All ranks, cut into so many groups: parameters are sharded inside one and the same in all (HSDP)."""
        if replicas == 1:
            return self.mesh
        if self.num_ranks % replicas:  # a run resumed on other ranks; else the plan has said it
            raise refusal("replicas_resumed", replicas=replicas, ranks=self.num_ranks, double=2 * replicas)
        shape = (replicas, self.num_ranks // replicas)
        return dist.init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host)

    def agree(self, task: Callable[[], Any] | None = None) -> list[Any]:
        """Run ``task``, wait for all; their results. A UserError or OSError rises on all, TrainError if one is lost."""
        finished, mine = threading.Event(), [socket.gethostname()]
        with ThreadPoolExecutor(1) as pool:
            exchange = pool.submit(self._exchange, finished, mine)
            try:
                mine += [None, task() if task else None]
            except UserError as error:
                mine.append(error)
            except OSError as error:
                mine.append(refusal("unusable_path", path=error.filename, why=error.strerror))
            finally:
                finished.set()
        try:
            outcomes = exchange.result()
        except RuntimeError as error:
            raise refusal("rank_lost", error=error) from None
        for rank, (node, *outcome) in enumerate(outcomes):
            if len(outcome) < 2:
                problem = outcome[0] if outcome else TrainError(f"Rank {rank} failed.", "Its own output says why.")
                if node != outcomes[0][0]:
                    problem.message = f"{node}: {problem.message}"
                self.refuse(problem)
        return [outcome[-1] for outcome in outcomes]

    def _exchange(self, finished: threading.Event, mine: list[Any]) -> list[list[Any]]:
        """Beside a task: a sum every few seconds, so that no collective waits longer; then everyone's outcome."""
        while self.maximum(not finished.wait(BEAT_SECONDS)):
            pass
        return self.gather_objects(mine)

    def who_sees(self, folder: Path) -> list[tuple[str, bool]]:
        """Each rank's host with its path of ``folder``, and whether a new file of rank 0 in it is seen there."""
        token = folder / f".{self.gather_objects(os.urandom(16).hex())[0]}"

        def put() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()

        def look() -> tuple[str, bool]:
            deadline = time.monotonic() + SEEN_WITHIN_SECONDS
            while not (seen := token.is_file()) and time.monotonic() < deadline:
                time.sleep(0.1)
            return f"{socket.gethostname()} ({folder.absolute()})", seen

        self.agree(put if self.is_first else None)
        places = self.agree(look)
        if self.is_first:
            token.unlink()
        return places

    def refuse(self, problem: UserError) -> None:
        """Raise what all ranks have found. One rank of each node tells it; none ends before all are here."""
        problem.told = self.local_rank > 0
        with suppress(RuntimeError):  # the first to leave breaks the others' connections
            self.maximum(0)
        raise problem


def start_ranks(limit_seconds: float = COLLECTIVE_TIMEOUT_SECONDS) -> Ranks:
    """Join the process group that the launcher's environment variables describe. CPU threads: cores // local ranks."""
    local, limit = int(os.environ.get("LOCAL_RANK", "0")), timedelta(seconds=limit_seconds)
    device = select_device(local)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    torch.set_num_threads(max(1, num_cores() // local_ranks))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's flight recorder
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    try:
        if not dist.is_initialized():
            store, rank, num_ranks = next(dist.rendezvous("env://", timeout=limit))
            store.set_timeout(limit)
            store = dist.PrefixStore(_name_attempt(store, rank, num_ranks, limit_seconds), store)
            backend = collective_backend(device.type)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        host = None if device.type == "cpu" else dist.new_group(backend=f"cpu:{HOST_BACKEND}", timeout=limit)
    except RuntimeError as error:  # the others connected and died, or never came
        raise refusal("rank_lost", error=error) from None
    return Ranks(dist.get_rank(), dist.get_world_size(), local, device, mesh, host)


def _name_attempt(store: dist.Store, rank: int, num_ranks: int, limit_seconds: float) -> str:
    """A new name that all ranks of this attempt know: an elastic restart keeps the store (torch 2.13) with addresses of
    ranks that are gone, and restart counts may differ. Each rank asks with a word of its own; rank 0 answers all."""
    if rank:
        question = os.urandom(16).hex()
        store.set(f"question/{rank}", question)
        name = store.get(f"answer/{question}").decode()
        store.set(f"{name}/{rank}", "heard")
        return name
    name, deadline = os.urandom(16).hex(), time.monotonic() + limit_seconds
    while missing := [other for other in range(1, num_ranks) if not store.check([f"{name}/{other}"])]:
        for key in [f"question/{other}" for other in missing]:
            if store.check([key]):
                store.set(f"answer/{store.get(key).decode()}", name)
        if time.monotonic() > deadline:
            raise TrainError(f"Ranks {missing} have not joined.", "The output of their nodes says why.")
        time.sleep(0.02)
    return name
