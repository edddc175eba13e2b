"""fullshard, TRL's SFTTrainer under Accelerate FSDP2, and a plain fully_shard loop on the same rows, interleaved.

    python benchmarks/trl.py [--steps 30] [--rounds 2] [--precision bf16] [--quick]

Makes TRL's environment in benchmarks/peers/.venv (peers/trl_requirements.txt, about 2 GB), looks for TRL's fastest
setting (peers/trl_recipe.yaml), then runs the three in turn on 2 ranks of one thread: one round of --steps steps for
the loss curves, then short rounds. SmolLM2-135M, GSM8K, full fine-tuning in fp32; bf16 too where the CPU has bf16
products. All see the same token ids, rows and targets in the same order. Speed is non-padding tokens over the median
seconds of a step. About 20 minutes on 2 quiet cores with the defaults (12 of them for TRL's 30 steps). Writes
results/trl_HARDWARE_DATE.json; --quick: 3 steps, a result that is printed and not kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import (
    MODEL,
    NUM_PARAMETERS,
    ROOT,
    hardware,
    has_fast_bf16,
    one_core_each,
    product_rate,
    run_quietly,
    spread,
    train,
    write,
)

PEERS = Path(__file__).parent / "peers"
GSM8K = [ROOT / "shared/data/gsm8k_train.jsonl", ROOT.parent / "shared/data/gsm8k_train.jsonl"]
SHORT_STEPS = 4


def peer_python(venv: Path) -> Path:
    """The peer's Python; its environment is made where it is missing."""
    python = venv / "bin" / "python"
    done = venv / ".installed"
    if not done.is_file():
        print(f"installing TRL in {venv}")
        run_quietly([sys.executable, "-m", "venv", str(venv)], venv.parent)
        run_quietly([str(python), "-m", "pip", "install", "-q", "-r", str(PEERS / "trl_requirements.txt")], venv.parent)
        done.touch()
    return python


def our_recipe(settings: dict[str, Any], rows: Path, steps: int, precision: str) -> dict[str, Any]:
    return {
        "model": {"path": str(MODEL)},
        "data": {
            "train": str(rows), "columns": {"question": "user", "answer": "assistant"}, "packing": True,
            "max_length": settings["max_length"], "too_long": "drop",
        },
        "method": "full",
        "train": {
            "global_batch": f"{settings['rows_per_step']} rows", "max_steps": steps, "precision": precision,
            "learning_rate": settings["learning_rate"], "schedule": "constant", "warmup": 0,
        },
    }  # fmt: skip


def write_rows(settings: dict[str, Any], source: Path, folder: Path, steps: int) -> tuple[Path, Path, list[int]]:
    """(the rows as given to fullshard, their token ids in its order for the others, non-padding tokens a step)."""
    from fullshard.config import config_from_dict
    from fullshard.data.pack import windows_of_run
    from fullshard.data.prepared import open_prepared, prepare

    given, tokens = folder / "rows.jsonl", folder / "tokens.jsonl"
    count = steps * settings["rows_per_step"]
    given.write_text("".join(source.read_text().splitlines(keepends=True)[:count]))
    config = config_from_dict({**our_recipe(settings, given, steps, "fp32"), "output": str(folder / "none")})
    prepare(config, folder / "prepared")
    data = open_prepared(folder / "prepared", "train")
    lines, sizes = [], []
    for _, window in windows_of_run(data.lengths, config.train):
        sizes.append(int(data.lengths[window].sum()))
        for row in window:
            ids, supervised = data.row(int(row))
            lines.append(json.dumps({"ids": ids.tolist(), "supervised": [int(value) for value in supervised]}))
    tokens.write_text("\n".join(lines))
    return given, tokens, sizes


def run_other(name: str, python: Path, settings: dict[str, Any], job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of TRL (a candidate's name) or of the raw loop ("raw"): seconds and losses of its steps, peak a rank."""
    import yaml

    folder.mkdir(parents=True)
    candidate = settings["candidates"].get(name, {"attention": "sdpa", "sft": {}})
    job = {
        **job, "folder": str(folder), "model": str(MODEL), "rows_a_rank": settings["rows_per_step"] // 2,
        "learning_rate": settings["learning_rate"], "max_length": settings["max_length"],
        "attention": candidate["attention"], "sft": {**settings["sft"], **candidate["sft"]},
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    if name == "raw":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(PEERS / "raw_worker.py"), str(folder / "job.json")]
    else:
        accelerate = {**settings["accelerate"], "mixed_precision": "bf16" if job["precision"] == "bf16" else "no"}
        (folder / "accelerate.yaml").write_text(yaml.safe_dump(accelerate))
        command = [str(python), "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
        command += ["--main_process_port", "0", str(PEERS / "trl_worker.py"), str(folder / "job.json")]
    run_quietly(one_core_each(command, 2), folder)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return {**found[0], "peak_bytes": max(rank["peak_bytes"] for rank in found)}


def run_ours(settings: dict[str, Any], rows: Path, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = train(our_recipe(settings, rows, job["steps"], job["precision"]), 2, folder)
    steps = found["steps"]
    return {
        "seconds": [step["seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "peak_bytes": found["peak_bytes"],
    }


def tokens_per_second(run: dict[str, Any], sizes: list[int]) -> list[float]:
    """Of each step after the first, which warms up. TRL packed: its own rows of tokens, two to a step."""
    return [size / seconds for size, seconds in list(zip(sizes, run["seconds"], strict=False))[1:]]


def compare(precision: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import yaml

    settings = yaml.safe_load((PEERS / "trl_recipe.yaml").read_text())
    source = next(path for path in [arguments.rows, *GSM8K] if path and path.is_file())
    given, tokens, sizes = write_rows(settings, source, folder, arguments.steps)
    python = peer_python(arguments.venv)
    short = {"rows": str(tokens), "precision": precision, "steps": min(SHORT_STEPS, arguments.steps)}
    tried: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in settings["candidates"]:
        try:
            run = run_other(name, python, settings, short, folder / f"try_{name}")
        except RuntimeError as error:
            print(f"TRL {name}: {str(error).splitlines()[-1]}")
            refused[name] = str(error).splitlines()[-1]
            continue
        used = sizes
        if run["used_tokens"]:  # packed rows in their order, as many a rank as rows before
            each = settings["rows_per_step"]
            used = [sum(run["used_tokens"][at : at + each]) for at in range(0, len(run["used_tokens"]), each)]
        speeds = tokens_per_second(run, used)
        tried[name] = statistics.median(speeds) if speeds else 0.0
        print(f"TRL {name}: {tried[name]:.0f} tokens/s")
    best = max((name for name in tried if name != "packing"), key=lambda name: tried[name])
    runs: dict[str, list[dict[str, Any]]] = {"fullshard": [], "trl": [], "raw": []}
    for number in range(arguments.rounds):
        job = {**short, "steps": arguments.steps if number == 0 else short["steps"]}
        for name in runs:
            place = folder / f"round{number}_{name}"
            if name == "fullshard":
                run = run_ours(settings, given, job, place)
            else:
                run = run_other(best if name == "trl" else "raw", python, settings, job, place)
            runs[name].append(run)
            print(f"round {number + 1} {name}: {statistics.median(tokens_per_second(run, sizes)):.0f} tokens/s, "
                  f"{run['peak_bytes'] / 1e9:.2f} GB a rank")  # fmt: skip
    speeds = {name: [v for run in each for v in tokens_per_second(run, sizes)] for name, each in runs.items()}
    ours = runs["fullshard"][0]["losses"]
    gaps = {
        name: max(abs(a / b - 1) for a, b in zip(runs[name][0]["losses"], ours, strict=True)) for name in ("trl", "raw")
    }
    median = {name: statistics.median(values) for name, values in speeds.items()}
    best_of_trl = max([median["trl"], tried.get("packing", 0.0)])
    peaks = {name: max(run["peak_bytes"] for run in each) for name, each in runs.items()}
    return {
        "trl_settings_tried_tokens_per_second": tried,
        "trl_settings_that_failed": refused,
        "trl_setting": best,
        "tokens_per_second": {name: spread(values) for name, values in speeds.items()},
        "times_trl": median["fullshard"] / best_of_trl,
        "times_raw": median["fullshard"] / median["raw"],
        "peak_bytes_a_rank": peaks,
        "peak_of_trl": peaks["fullshard"] / peaks["trl"],
        "losses": {name: runs[name][0]["losses"] for name in runs},
        "largest_loss_gap": gaps,
        "share_of_peak": median["fullshard"] * 6 * NUM_PARAMETERS / (2 * product_rate(precision)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="gsm8k_train.jsonl")
    parser.add_argument("--venv", type=Path, default=PEERS / ".venv")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="one of them only")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.rounds = 3, 1
    found: dict[str, Any] = {"hardware": hardware()}
    folder = Path(tempfile.mkdtemp(prefix="fullshard_trl_"))
    try:
        both = ("fp32", "bf16") if has_fast_bf16() else ("fp32",)
        for precision in (arguments.precision,) if arguments.precision else both:
            (folder / precision).mkdir()
            found[precision] = compare(precision, arguments, folder / precision)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if "bf16" not in found and not has_fast_bf16():
        found["bf16"] = "not measured: this CPU has no bf16 products (neither AVX-512 BF16 nor AMX)"
    print(json.dumps(found, indent=1) if arguments.quick else "")
    if not arguments.quick:
        packages = ("fullshard", "torch", "transformers")
        print(write("trl", "python benchmarks/trl.py " + " ".join(sys.argv[1:]), found, packages))


if __name__ == "__main__":
    main()
