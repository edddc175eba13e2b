"""What a checkpoint costs: how long training stands still, bandwidth, memory; beside torch's DCP and the bare disk.

    python benchmarks/save.py [--megabytes 1600] [--repeats 5]

Two ranks on gloo hold a state of 30 units, fp32 weights with two AdamW moments, half each, and take turns: ours in the
foreground and beside training, ``dcp.save`` and ``dcp.async_save``, then loads. Stall: until the call returns. Copy: a
plain ``clone`` of the state. Disk: the same bytes in blocks of 16 MB with fsync; before reads the page cache is let
go of. Medians over ``--repeats``, of the slower rank. Written to benchmarks/results/save_HARDWARE_DATE.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import hardware, spread, write

NUM_RANKS, UNITS = 2, 30
FACTS = {"method": "full", "base_model": "/m", "trainer": {}}


def resident(field: str) -> int:
    """Resident bytes of this process, or their peak (VmHWM)."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rank_main(rank: int, folder: str, megabytes: int, repeats: int) -> None:
    """One rank: every way in turn, ``repeats`` times; rank 0 leaves times.json."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_PORT": Path(folder, "port").read_text()}
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Sharded

    from fullshard.checkpoint.ranges import Saver, load_checkpoint
    from fullshard.ranks import start_ranks, stop_ranks
    from fullshard.shard import Shard

    place, ranks = Path(folder), start_ranks()
    torch.set_num_threads(1)
    size = megabytes * 10**6 // (12 * UNITS) // NUM_RANKS
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    values = {(f"unit_{unit}", kind): torch.randn(size) for unit in range(UNITS) for kind in kinds}
    shards = [
        Shard(name, (NUM_RANKS * size,), rank * size, (rank + 1) * size, value, None, True, False)
        for (name, kind), value in values.items() if kind == "weight"
    ]  # fmt: skip
    moments = {key: value for key, value in values.items() if key[1] != "weight"}
    model = SimpleNamespace(shards=lambda: shards)
    state = {".".join(key): DTensor.from_local(value, ranks.mesh, [Sharded(0)]) for key, value in values.items()}
    found: dict[str, dict[str, list[float]]] = {}
    steps, tag = itertools.count(1), itertools.count(1)

    def timed(name: str, call: Callable[[], Any], then: Callable[[Any], Any] | None = None) -> None:
        os.sync()
        ranks.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before, started = resident("VmRSS"), time.perf_counter()
        made = call()
        stall = time.perf_counter() - started
        if then:
            then(made)
        whole, peak = time.perf_counter() - started, resident("VmHWM") - before
        book = found.setdefault(name, {"stall": [], "seconds": [], "memory": []})
        for key, value in {"stall": stall, "seconds": whole, "memory": peak}.items():
            book[key].append(ranks.maximum(value))

    def clone() -> list[torch.Tensor]:
        return [value.clone() for value in values.values()]

    def disk() -> None:
        with open(place / f"raw_{rank}", "wb") as file:
            for value in values.values():
                view = memoryview(value.numpy()).cast("B")
                for start in range(0, len(view), 16 << 20):
                    file.write(view[start : start + (16 << 20)])
            file.flush()
            os.fsync(file.fileno())

    def read_disk() -> None:
        with open(place / f"raw_{rank}", "rb") as file:
            block = bytearray(16 << 20)
            while file.readinto(block):
                pass

    saver = Saver(place / "ours", ranks, keep_last=1)
    for _ in range(repeats):
        timed("copy", clone)
        timed("disk write", disk)
        step = next(steps)
        timed("ours, foreground", lambda step=step: saver.save(step, model, moments, FACTS, {}))
        step = next(steps)
        inputs = step, model, moments, FACTS, {}, True
        timed("ours, beside", lambda inputs=inputs: saver.save(*inputs), lambda _: saver.wait())
        ours = place / "ours" / "checkpoints" / f"step_{step:06d}"
        theirs = place / f"dcp_{next(tag)}"
        timed("dcp.save", lambda theirs=theirs: dcp.save(state, checkpoint_id=theirs))
        other = place / f"dcp_{next(tag)}"
        start = lambda other=other: dcp.async_save(state, checkpoint_id=other)  # noqa: E731
        timed("dcp.async_save", start, lambda future: future.result())
        ranks.barrier()
        if rank == 0:
            forget(place)
        timed("disk read", read_disk)
        if rank == 0:
            forget(place)
        timed("ours, load", lambda ours=ours: load_checkpoint(ours, model, moments))
        if rank == 0:
            forget(place)
        timed("dcp.load", lambda theirs=theirs: dcp.load(state, checkpoint_id=theirs))
        if rank == 0:
            for old in (theirs, other):
                shutil.rmtree(old)
        ranks.barrier()
    if rank == 0:
        (place / "times.json").write_text(json.dumps(found))
    stop_ranks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1600)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="save_", dir=os.environ.get("BENCHMARK_DISK")) as folder:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            Path(folder, "port").write_text(str(probe.getsockname()[1]))
        torch.multiprocessing.spawn(rank_main, (folder, options.megabytes, options.repeats), NUM_RANKS)
        found = json.loads(Path(folder, "times.json").read_text())
    table = {name: {key: spread(values) for key, values in book.items()} for name, book in found.items()}
    size = options.megabytes * 1e6
    rates = {name: size / book["seconds"]["median"] for name, book in table.items()}
    facts = {
        "stall_over_copy": table["ours, beside"]["stall"]["median"] / table["copy"]["stall"]["median"],
        "save_over_disk": rates["ours, foreground"] / rates["disk write"],
        "load_over_disk": rates["ours, load"] / rates["disk read"],
    }
    for name, book in table.items():
        one = {key: round(values["median"], 3) for key, values in book.items()}
        print(f"{name:18} {one}  {rates[name] / 1e6:,.0f} MB/s")
    print(facts)
    command = f"python benchmarks/save.py --megabytes {options.megabytes} --repeats {options.repeats}"
    shared = {**hardware(), "bytes": size, "bytes_per_second": rates, **facts, "ways": table}
    write("save", command, shared, ("torch", "safetensors"))


if __name__ == "__main__":
    main()
