"""One resident pool of gloo ranks per world size: starting ranks costs seconds, so all multi-rank tests share them.

``pool(2).run(function, *arguments)`` calls a module-level function on every rank with a ``Ranks`` first, and returns
the results in rank order. An exception on any rank is raised here with its traceback.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

TIMEOUT_SECONDS = 240
PATIENCE_SECONDS = 20  # for the other ranks, after one has failed
_pools: dict[int, RankPool] = {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, num_ranks: int, port: int, connection: Any, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    from fullshard.ranks import start_ranks

    ranks = start_ranks()
    torch.set_num_threads(1)
    while (task := connection.recv()) is not None:
        module, name, arguments = task
        try:
            answer = (True, getattr(importlib.import_module(module), name)(ranks, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
    os._exit(0)


class RankPool:
    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.connections, self.processes, self.is_broken = [], [], False
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, port, theirs, list(sys.path)), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((function.__module__, function.__name__, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        limit = time.monotonic() + TIMEOUT_SECONDS
        while len(answers) < len(self.connections):
            open_ones = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            ready = wait(open_ones, limit - time.monotonic())
            for connection in ready:
                try:
                    answers[open_ones[connection]] = connection.recv()
                except EOFError:
                    answers[open_ones[connection]] = (False, "the process is gone; its output says why")
                    self.is_broken = True
            failed = [f"rank {rank}:\n{value}" for rank, (fine, value) in sorted(answers.items()) if not fine]
            if failed:  # the others may wait for it for ever
                limit = min(limit, time.monotonic() + PATIENCE_SECONDS)
            if not ready or (self.is_broken and len(answers) == len(self.connections)):
                self.stop()
                raise (
                    AssertionError("\n".join(failed))
                    if failed
                    else TimeoutError(f"no answer from {open_ones.values()}")
                )
        for rank, (fine, value) in sorted(answers.items()):
            if not fine:
                raise AssertionError(f"rank {rank}:\n{value}")
        return [value for _, (_, value) in sorted(answers.items())]

    def stop(self) -> None:
        for connection in self.connections:
            try:
                connection.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for number, pool in list(_pools.items()):
            if pool is self:
                del _pools[number]


def pool(num_ranks: int) -> RankPool:
    """The resident pool of that size; made at first use, stopped at the end of the session."""
    if num_ranks not in _pools:
        _pools[num_ranks] = RankPool(num_ranks)
    return _pools[num_ranks]


def stop_all() -> None:
    for resident in list(_pools.values()):
        resident.stop()
