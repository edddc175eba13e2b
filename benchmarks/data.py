"""Speed, fill and memory of the data stage on GSM8K. Writes benchmarks/results/data_HARDWARE_DATE.json.

    python benchmarks/data.py [--gsm8k FILE] [--copies 10] [--repeats 5] [--memory 1,10,100] [--only PARTS]

speed: `prepare`, from file to prepared data, against the tokenizer's own `encode_batch` on the same rendered texts and
the same cores; the two take turns. fill: tokens over places in packed sequences, windows of 32k tokens, 1 to 4 ranks.
memory: peak resident memory of `prepare` in a fresh process and of its workers, while the file grows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
from measuring import hardware, hardware_name

from fullshard.config import config_from_dict
from fullshard.data.chat import Renderer, load_tokenizer
from fullshard.data.pack import area_of, lay_out, windows
from fullshard.data.prepared import open_prepared, prepare
from fullshard.data.sources import iterate_rows
from fullshard.model.fetch import ensure_default_model

HERE = Path(__file__).parent
PARTS = "fill,speed,memory"
BATCH_TEXTS = 1000  # of one encode_batch call: more only takes memory


def recipe(model: Path, data: Path, max_length: int = 1024):
    return config_from_dict(
        {
            "model": {"path": str(model)},
            "data": {"train": str(data), "max_length": max_length},
            "output": str(data.with_suffix(".run")),
        }
    )


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure_speed(model: Path, data: Path, repeats: int) -> dict:
    """Interleaved: the tokenizer alone, then prepare, and again. The first pair warms up and is not counted."""
    config = recipe(model, data)
    tokenizer = load_tokenizer(model)
    renderer = Renderer(tokenizer)
    texts = [renderer.text(row.messages) for row in iterate_rows(str(data), config.data)]
    num_bytes = sum(len(text.encode()) for text in texts)
    encode = tokenizer.backend_tokenizer.encode_batch
    alone, whole = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for start in range(0, len(texts), BATCH_TEXTS):
            encode(texts[start : start + BATCH_TEXTS], add_special_tokens=False)
        alone.append(time.perf_counter() - started)
        out = data.with_suffix(".prepared")
        shutil.rmtree(out, ignore_errors=True)
        started = time.perf_counter()
        result = prepare(config, out)
        whole.append(time.perf_counter() - started)
    shares = [one / other for one, other in zip(alone[1:], whole[1:], strict=True)]
    return {
        "rows": len(texts),
        "rendered_bytes": num_bytes,
        "tokens": result["train"]["tokens"],
        "tokenizer_seconds": spread(alone[1:]),
        "prepare_seconds": spread(whole[1:]),
        "tokenizer_mb_per_second": num_bytes / 1e6 / statistics.median(alone[1:]),
        "prepare_mb_per_second": num_bytes / 1e6 / statistics.median(whole[1:]),
        "share_of_tokenizer": spread(shares),
    }


def measure_fill(model: Path, data: Path) -> dict:
    """Over an epoch of windows of 32,768 tokens (the last one is a part and left out), tokens over three things.
    ``of_sequences``: sequences x max_length. ``of_computed_positions``: where attention needs masks, so that a batch is
    as long as its longest sequence. ``of_slowest_rank``: ranks x tokens of the rank that has most in each micro-batch,
    for which the others wait (by document: without pads)."""
    found = {}
    for max_length in (1024, 2048):
        out = data.with_suffix(f".{max_length}")
        prepare(recipe(model, data, max_length), out)
        lengths = open_prepared(out, "train").lengths
        for num_ranks in (1, 2, 3, 4):
            shares, counts, started = [], [], time.perf_counter()
            for window in windows(lengths, 0, 0, (32768, "tokens"))[:-1]:
                layout = lay_out(window, lengths, num_ranks, (4, "rows"), True, max_length)
                sizes = [[[int(lengths[rows].sum()) for rows in cell] for cell in micro] for micro in layout]
                computed = [[len(cell) * max(cell, default=0) for cell in micro] for micro in sizes]
                most = sum(max(area_of(cell, lengths, packing=True) for cell in micro) for micro in layout)
                tokens, slowest = int(lengths[window].sum()), num_ranks * most
                counts.append(sum(len(cell) for micro in sizes for cell in micro))
                shares.append([tokens / (counts[-1] * max_length), tokens / sum(map(sum, computed)), tokens / slowest])
            names = ("of_sequences", "of_computed_positions", "of_slowest_rank")
            parts = dict(zip(names, zip(*shares, strict=True), strict=True))
            found[f"max_length {max_length}, ranks {num_ranks}"] = {
                "windows_by_sequences": {str(count): counts.count(count) for count in sorted(set(counts))},
                "milliseconds_a_window": 1000 * (time.perf_counter() - started) / len(shares),
                **{name: {"mean": float(np.mean(part)), "low": min(part)} for name, part in parts.items()},
            }
    return found


def measure_memory(model: Path, data: Path) -> dict:
    """Peaks in bytes: of a fresh process that prepares (VmHWM), and of each of its workers."""
    command = [sys.executable, __file__, "--one", str(model), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        workers: dict[int, int] = {}
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                try:
                    for child in psutil.Process(job.pid).children(recursive=True):
                        workers[child.pid] = max(workers.get(child.pid, 0), peak_of(child.pid))
                except (psutil.Error, OSError):
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        output, _ = job.communicate()
        done.set()
        watcher.join()
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {job.returncode}")
    before, peak = json.loads(output.splitlines()[-1])
    return {
        "file_bytes": data.stat().st_size,
        "before_bytes": before,  # after the imports
        "peak_bytes": peak,
        "workers_peak_bytes": sorted(workers.values()),
    }


def peak_of(process: int | str) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def prepare_once(model: Path, data: Path) -> None:
    """What the fresh process does."""
    load_tokenizer(model)
    before, out = peak_of("self"), data.with_suffix(".once")
    shutil.rmtree(out, ignore_errors=True)
    prepare(recipe(model, data), out)
    print(json.dumps([before, peak_of("self")]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=HERE.parent / ".." / "shared" / "data" / "gsm8k_train.jsonl")
    parser.add_argument("--copies", type=int, default=10, help="how often the file is repeated for the speed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", default="1,10,100", help="how often the file is repeated for the memory")
    parser.add_argument("--only", default=PARTS, help="which of them (only speed needs a quiet machine)")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--one", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        prepare_once(*given.one)
        return
    model = ensure_default_model()
    rows = given.gsm8k.read_bytes()
    rows += b"" if rows.endswith(b"\n") else b"\n"
    result = {
        "command": " ".join(["python", "benchmarks/data.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware() | {"memory": psutil.virtual_memory().total},
        "versions": {name: version(name) for name in ("fullshard", "tokenizers", "transformers", "numpy")},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def repeated(copies: int) -> Path:
            path = folder / f"x{copies}.jsonl"
            path.write_bytes(rows * copies)
            return path

        if "fill" in given.only:
            result["fill"] = measure_fill(model, repeated(1))
        if "speed" in given.only:
            result["speed"] = measure_speed(model, repeated(given.copies), given.repeats)
        for copies in map(int, given.memory.split(",") if "memory" in given.only else ()):
            result.setdefault("memory", {})[f"x{copies}"] = measure_memory(model, repeated(copies))
            print(json.dumps(result["memory"]), flush=True)
    given.output.mkdir(parents=True, exist_ok=True)
    part = "" if given.only == PARTS else "_" + given.only.replace(",", "_")
    path = given.output / f"data{part}_{hardware_name()}_{datetime.date.today():%Y%m%d}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(path)


if __name__ == "__main__":
    main()
