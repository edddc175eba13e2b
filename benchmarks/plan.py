"""Planned beside measured on this CPU: a rank's peak memory over its start, and seconds of a step after a probe.

    python benchmarks/plan.py [--repeats 3] [--only WORD] [--no-time] [--quick]

Models of 12 to 135 M parameters with random weights, SmolLM2's tokenizer, GSM8K; 1, 2 and 4 ranks, both engines, full
and LoRA, fp32 and bf16, with and without recomputation: 58 configurations. Measured: VmHWM of the hungriest rank less
what it had before the model (metrics.jsonl: memory_bytes, start_bytes). Planned: the larger of the moments load and
train, less what torch, transformers, peft and gloo take before the model. A peak varies by some percent between runs:
all configurations take turns --repeats times, their medians count, all runs are kept. Time: ``probe_run`` against the
median step of a run of 8 steps started afterwards, in the first turn.
About 37 minutes on 2 quiet cores for the first turn, 25 for each other. Writes results/plan_HARDWARE_DATE.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import MODEL, hardware, high, spread, train, write
from trl import GSM8K

from fullshard import UserError
from fullshard.planning.memory import CPU_PROCESS_BYTES

NAMED = ("model", "ranks", "engine", "method", "recompute", "precision", "tokens")
PARTS = Path("/tmp/plan_rows.json")  # what has been measured so far
SIZES = {  # hidden, layers, heads, key heads, MLP, tied, family
    "12M": (192, 6, 3, 3, 512, True, "llama"),
    "30M": (320, 12, 5, 5, 864, True, "llama"),
    "45M": (320, 10, 5, 1, 1280, False, "qwen2"),
    "60M": (512, 12, 8, 4, 1408, True, "llama"),
    "135M": (576, 30, 9, 3, 1536, True, "llama"),
}


def configurations() -> list[dict[str, Any]]:
    """One dictionary a configuration; ``timed``: its step time is measured, too."""
    found = []
    for ranks, engine, method, recompute in itertools.product(
        (1, 2, 4), ("simple", "torch"), ("full", "lora"), ("none", "blocks")
    ):
        found.append({"model": "30M", "ranks": ranks, "engine": engine, "method": method, "recompute": recompute})
    for model, engine, method in itertools.product(
        ("12M", "45M", "60M", "135M"), ("simple", "torch"), ("full", "lora")
    ):
        found.append({"model": model, "ranks": 2, "engine": engine, "method": method, "recompute": "none"})
    of_bf16 = (("12M", 256, "none"), ("30M", 1024, "none"), ("30M", 1024, "blocks"), ("135M", 512, "none"))
    for (model, tokens, recompute), engine, method in itertools.product(of_bf16, ("simple", "torch"), ("full", "lora")):
        found.append({"model": model, "ranks": 2, "engine": engine, "method": method, "recompute": recompute})
        found[-1] |= {"precision": "bf16", "tokens": tokens}
    found += [{"model": "30M", "ranks": 2, "engine": engine, "method": "full", "recompute": "none", "windows": 3}
              for engine in ("simple", "torch")]  # fmt: skip
    for one in found:
        one["timed"] = "windows" in one or (
            one["ranks"] == 2 and one["recompute"] == "none" and one["engine"] == "simple"
        )
        one.setdefault("precision", "fp32")
        one.setdefault("tokens", 1024 if one["model"] in ("12M", "30M", "45M") else 512)
    return found


def make_model(name: str, folder: Path) -> Path:
    """Random weights in fp32 with SmolLM2's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder.is_dir():
        return folder
    hidden, layers, heads, key_heads, mlp, tied, family = SIZES[name]
    settings = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 49_152}
    settings |= {"num_key_value_heads": key_heads, "intermediate_size": mlp, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings, bos_token_id=1, eos_token_id=2, max_position_embeddings=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in MODEL.iterdir():
        if "token" in file.name or file.suffix == ".jinja" or file.name in ("merges.txt", "vocab.json"):
            shutil.copy(file, folder / file.name)
    return folder


def recipe(one: dict[str, Any], model: Path, rows: Path) -> dict[str, Any]:
    """What the configuration means as a recipe."""
    tokens = one["tokens"] * one["ranks"] * one.get("windows", 1)
    return {
        "model": {"path": str(model)}, "engine": one["engine"], "method": one["method"],
        "data": {
            "train": str(rows), "columns": {"question": "user", "answer": "assistant"}, "packing": True,
            "max_length": one["tokens"] // 2, "too_long": "drop",
        },
        "train": {
            "global_batch": f"{tokens} tokens", "micro_batch": f"{one['tokens']} tokens", "recompute": one["recompute"],
            "precision": one["precision"], "max_steps": 3, "learning_rate": 1e-5,
        },
    }  # fmt: skip


def measure(one: dict[str, Any], model: Path, rows: Path, folder: Path, probes: bool) -> dict[str, Any]:
    """The configuration's planned and measured bytes; ``probes``: of a timed one seconds, too."""
    import yaml

    given = recipe(one, model, rows)
    probed = None
    if one["timed"]:
        given["train"]["max_steps"] = 8
    if one["timed"] and probes:
        from fullshard import probe_run

        folder.mkdir(parents=True)
        (folder / "probe.yaml").write_text(yaml.safe_dump({**given, "output": str(folder / "probe")}))
        probed = statistics.harmonic_mean(probe_run(folder / "probe.yaml", (), one["ranks"]).tokens_per_second)
    run = train(given, one["ranks"], folder / "run")
    plan = json.loads((folder / "run" / "run" / "plan.json").read_text())
    last = run["steps"][-1]
    found = {**one, "planned_bytes": max(plan["moments"]["load"], plan["moments"]["train"]) - CPU_PROCESS_BYTES}
    found |= {"start_bytes": last["start_bytes"], "measured_runs": [last["memory_bytes"] - last["start_bytes"]]}
    found["lines"] = {line["cause"]: line["bytes"] for line in plan["lines"]}
    if probed:
        speed = statistics.median(step["tokens_per_second"] for step in run["steps"][1:])
        found |= {"probed_tokens_per_second": probed, "tokens_per_second": speed, "time_error": probed / speed - 1}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each configuration; their median counts")
    parser.add_argument("--only", default="", help="configurations whose description has this word")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--quick", action="store_true", help="four configurations once, printed and not kept")
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    source = next(path for path in [arguments.rows, *GSM8K] if path and path.is_file())
    folder = Path(tempfile.mkdtemp(prefix="fullshard_plan_"))
    chosen = [one for one in configurations() if arguments.only in " ".join(map(str, one.values()))]
    chosen = chosen[:: max(1, len(chosen) // 4)] if arguments.quick else chosen
    rows, found = folder / "rows.jsonl", [dict(one) for one in chosen]
    rows.write_text("".join(source.read_text().splitlines(keepends=True)[:300]))
    try:
        for turn, number in itertools.product(range(1 if arguments.quick else arguments.repeats), range(len(chosen))):
            one, kept = chosen[number], found[number]
            words = " ".join(str(one[key]) for key in NAMED)
            try:
                model = make_model(one["model"], folder / one["model"])
                last = measure(one, model, rows, folder / f"{number}", probes=turn == 0 and not arguments.no_time)
            except (RuntimeError, UserError) as error:  # a fact too; the others go on
                kept["failed"] = str(error)
                print(f"{words}: {error}", flush=True)
                continue
            finally:
                shutil.rmtree(folder / f"{number}", ignore_errors=True)
                PARTS.write_text(json.dumps(found, indent=1))
            runs = kept.get("measured_runs", []) + last["measured_runs"]
            kept |= {**last, **kept, "measured_runs": runs, "measured_bytes": statistics.median(runs)}
            kept["error"] = kept["planned_bytes"] / kept["measured_bytes"] - 1
            line = f"{words}: planned {last['planned_bytes'] / 1e6:.0f} MB, measured {runs[-1] / 1e6:.0f}"
            line += f" (median {kept['error']:+.1%})"
            print(line + (f", step time {last['time_error']:+.1%}" if "time_error" in last else ""), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summarise(found, keep=not arguments.quick and not arguments.only)


def summarise(found: list[dict[str, Any]], keep: bool) -> None:
    """Print the errors' median and 95th percentile; ``keep``: write the results file, else PARTS."""
    result: dict[str, Any] = {"hardware": hardware(), "num_configurations": len(found)}
    for name, key in (("memory", "error"), ("step_time", "time_error")):
        if errors := [abs(one[key]) for one in found if key in one]:
            result[name] = spread(errors) | {"p95": high(errors)}
            print(f"{name}: median {result[name]['median']:.1%}, 95th percentile {result[name]['p95']:.1%}")
    result["configurations"] = found
    if keep:
        command = "python benchmarks/plan.py " + " ".join(sys.argv[1:])
        print(write("plan", command.strip(), result, ("fullshard", "torch", "transformers", "peft")))
    else:
        PARTS.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
