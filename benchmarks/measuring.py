"""What the speed benchmarks share: GSM8K in our form, runs of the product, the rate of a matrix product, results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MODEL = Path.home() / ".cache" / "fullshard" / "SmolLM2-135M-Instruct"  # made by make quickstart
MODEL = Path(os.environ.get("BENCHMARK_MODEL") or MODEL)  # a smaller one, to try the scripts
NUM_PARAMETERS = 134_515_008
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def product_rate(precision: str) -> float:
    """Operations per second of one core: the best of 20 products of 1,024 x 1,024 matrices."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(1024, 1024, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    best, repeats = float("inf"), 20 if precision == "fp32" or has_fast_bf16() else 3
    for _ in range(repeats):
        started = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - started)
    return 2 * 1024**3 / best


def has_fast_bf16() -> bool:
    """Whether the CPU has bf16 products of its own (AVX-512 BF16 or AMX)."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    return bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", flags))


def train(recipe: dict[str, Any], num_ranks: int, folder: Path) -> dict[str, Any]:
    """One run of ``fullshard train`` on CPU ranks of one thread each: its steps and its peak memory a rank."""
    import yaml

    folder.mkdir(parents=True)
    recipe = {**recipe, "output": str(folder / "run")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    started = time.perf_counter()
    command = [sys.executable, "-m", "fullshard", "train", str(folder / "recipe.yaml"), "--ranks", str(num_ranks)]
    run_quietly(one_core_each(command, num_ranks), folder)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    result = json.loads((folder / "run" / "result.json").read_text())
    return {"steps": steps, "peak_bytes": result["peak_memory_bytes"], "wall_seconds": time.perf_counter() - started}


def one_core_each(command: list[str], num_ranks: int) -> list[str]:
    """The command on as many cores as ranks: ranks share what they may use, so each gets one thread."""
    return ["taskset", "-c", f"0-{num_ranks - 1}", *command]


def run_quietly(command: list[str], folder: Path, **more: str) -> None:
    """Run a command with its output in FOLDER/output.txt; RuntimeError with the first error in it where it fails."""
    output = folder / "output.txt"
    with open(output, "w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env={**ENVIRONMENT, **more}).returncode
    if code:
        lines = output.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*:", line)] or lines[-15:]
        raise RuntimeError(f"failed with {code}: {' '.join(command)}\n{errors[0]}")


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def high(values: list[float]) -> float:
    """The 95th percentile: the value itself, none between two."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def hardware() -> dict[str, Any]:
    """The machine, for the result's name and its facts."""
    model = "cpu"
    if Path("/proc/cpuinfo").is_file():
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        model = found.group(1).strip() if found else model
    return {"cpu": model, "cores": os.cpu_count(), "load_before": os.getloadavg()[0], "system": platform.platform()}


def hardware_name() -> str:
    """How a result's file names the machine: "cpu2", or "cpu2-bf16" where the CPU multiplies bf16 itself."""
    return f"cpu{os.cpu_count()}{'-bf16' if has_fast_bf16() else ''}"


def write(topic: str, command: str, found: dict[str, Any], packages: tuple[str, ...]) -> Path:
    """Write benchmarks/results/TOPIC_HARDWARE_DATE.json and return its path."""
    today = datetime.date.today()
    place = RESULTS / f"{topic}_{hardware_name()}_{today:%Y%m%d}.json"
    versions = {package: metadata.version(package) for package in packages}
    head = {"topic": topic, "command": command, "date": f"{today:%Y-%m-%d}", "versions": versions}
    place.write_text(json.dumps({**head, **found}, indent=2) + "\n", encoding="utf-8")
    return place
