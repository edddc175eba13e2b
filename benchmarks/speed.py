"""How fast a step is here: share of the measured matrix-product rate, 1 rank against 2, and where the time goes.

    python benchmarks/speed.py [--only share,scaling,profile] [--precision bf16] [--quick]

SmolLM2-135M, GSM8K packed to 1,024 tokens, 4 x 1,024 tokens a rank and micro-batch, fp32 (bf16 too where the CPU has
bf16 products), one thread a rank. Share of peak: 6 x parameters x tokens (full) or 4 x (LoRA) over the seconds of a
step, over the number of ranks times the best one-core product. Scaling: windows of 16,384 tokens (bf16 where it is
fast), 2 ranks against twice 1 rank, in the order 1, 2, 2, 1. Profile: one step of one rank under torch.profiler, by
cause. On 2 quiet cores with bf16 products about 30 minutes (--precision bf16: 18): share 13 (5), scaling 10, profile 6
(3). A share that fails is named in the result, and the rest goes on. Writes results/speed_HARDWARE_DATE.json, with
--only the parts' names after speed; --quick: 2,048 tokens, printed and not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from measuring import MODEL, NUM_PARAMETERS, hardware, has_fast_bf16, product_rate, spread, train, write
from trl import GSM8K

SIZES = {"full": (8_192, 16_384), "quick": (1_024, 2_048)}  # tokens of a window: share, scaling
CAUSES = {  # first match names the cause of an operator
    "collectives and their copies": (
        "gloo",
        "c10d",
        "all_gather",
        "reduce_scatter",
        "chunk_cat",
        "split_with_sizes_copy",
    ),
    "matrix products": ("mm", "bmm", "addmm", "linear"),
    "attention, forward and backward": ("scaled_dot_product", "flash_attention"),
    "loss": ("exp_", "amax", "gather", "scatter_add", "log_softmax"),
    "optimizer": ("adamw", "_foreach", "lerp", "addcdiv"),
    "copies": ("copy_", "cat", "clone", "fill_", "zero_", "slice_backward", "index", "embedding"),
    "element-wise": ("mul", "add", "silu", "pow", "neg", "div", "mean", "rsqrt", "sum", "sub", "cos", "sin", "sigmoid"),
}


def recipe(method: str, precision: str, rows: Path, window: int, steps: int) -> dict[str, Any]:
    return {
        "model": {"path": str(MODEL)},
        "data": {
            "train": str(rows), "columns": {"question": "user", "answer": "assistant"}, "packing": True,
            "max_length": 1024,
        },
        "method": method,
        "train": {
            "global_batch": f"{window} tokens", "micro_batch": f"{min(4096, window)} tokens", "max_steps": steps,
            "precision": precision, "learning_rate": 1e-5, "schedule": "constant", "warmup": 0,
        },
    }  # fmt: skip


def shares(rows: Path, folder: Path, window: int, precision: str) -> dict[str, Any]:
    """Full and LoRA on 2 ranks in turn, the product's rate timed before each."""
    found: dict[str, Any] = {}
    for method, factor in (("full", 6), ("lora", 4)):
        rate = product_rate(precision)
        try:
            run = train(recipe(method, precision, rows, window, 2), 2, folder / f"share_{method}_{precision}")
        except RuntimeError as error:  # too little memory for one of them is no reason to lose the others
            found[method] = {"failed": str(error)}
            print(f"{precision} {method}: {error}")
            continue
        speeds = [step["tokens_per_second"] for step in run["steps"]]
        share = [factor * NUM_PARAMETERS * speed / (2 * rate) for speed in speeds]
        found[method] = {
            "tokens_per_second": spread(speeds), "share_of_peak": spread(share), "core_flops_per_second": rate,
            "peak_bytes_a_rank": run["peak_bytes"], "planned_bytes": run["steps"][0].get("planned_bytes"),
        }  # fmt: skip
        print(f"{precision} {method}: {statistics.median(speeds):.0f} tokens/s, {statistics.median(share):.0%} of peak")
    return found


def scaling(rows: Path, folder: Path, window: int, precision: str) -> dict[str, Any]:
    """Ranks 1, 2, 2, 1, so that a drift counts for both, one window each: a step on 2 ranks over twice one rank's."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for number, num_ranks in enumerate((1, 2, 2, 1)):
        run = train(recipe("full", precision, rows, window, 1), num_ranks, folder / f"scaling_{number}")
        speeds[num_ranks] += [step["tokens_per_second"] for step in run["steps"]]
        print(f"{num_ranks} ranks, windows of {window:,} tokens: {speeds[num_ranks][-1]:.0f} tokens/s")
    efficiency = statistics.median(speeds[2]) / (2 * statistics.median(speeds[1]))
    return {
        "precision": precision,
        "window_tokens": window,
        "tokens_per_second": speeds,
        "share_of_twice_one_rank": efficiency,
    }


def profile(rows: Path, folder: Path, window: int, method: str, precision: str) -> dict[str, float]:
    """One rank's second step under torch.profiler: share of the time by cause."""
    import torch

    from fullshard.config import config_from_dict
    from fullshard.data.pack import lay_out, windows_of_run
    from fullshard.data.prepared import make_batch, open_prepared, prepare
    from fullshard.ranks import start_ranks, stop_ranks
    from fullshard.train.loss import batch_loss
    from fullshard.train.optimizer import build_optimizer, clip_gradients, gradient_norm
    from fullshard.train.precision import precision_of
    from fullshard.train.setup import build_sharded

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))  # fmt: skip
    config = config_from_dict({**recipe(method, precision, rows, window, 2), "output": str(folder / "none")})
    if not (folder / "prepared").is_dir():
        prepare(config, folder / "prepared")
    data = open_prepared(folder / "prepared", "train")
    ranks = start_ranks()
    torch.set_num_threads(1)
    built = build_sharded(config, ranks, precision_of(precision), False)
    optimizer, _ = build_optimizer(config, built.sharded)
    _, rows_of_step = windows_of_run(data.lengths, config.train)[0]
    layout = lay_out(rows_of_step, data.lengths, 1, (window, "tokens"), True, 1024)

    def step() -> None:
        for number, micro in enumerate(layout):
            with built.sharded.microbatch(number == len(layout) - 1):
                (batch_loss(built.loss_model, make_batch(data, micro[0], 0), ranks.device) / 1000).backward()
        shards = built.sharded.shards()
        clip_gradients(shards, gradient_norm(built.sharded, shards, ranks), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        built.sharded.after_step()

    step()
    started = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        step()
    seconds = time.perf_counter() - started
    times = dict.fromkeys([*CAUSES, "everything else"], 0.0)
    for event in recorded.key_averages():
        name = event.key.lower()
        cause = next((c for c, words in CAUSES.items() if any(word in name for word in words)), "everything else")
        times[cause] += event.self_cpu_time_total
    total = sum(times.values())
    stop_ranks()
    return {"seconds": seconds, **{cause: round(value / total, 4) for cause, value in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="share,scaling,profile")
    parser.add_argument("--rows", type=Path, help="gsm8k_train.jsonl")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile-in", type=Path, help=argparse.SUPPRESS)  # a child: one profile, in its own process
    parser.add_argument("--method", default="full", help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="one of them only")
    arguments = parser.parse_args()
    share_tokens, scaling_tokens = SIZES["quick" if arguments.quick else "full"]
    if arguments.profile_in:
        folder = arguments.profile_in
        found = profile(folder / "rows.jsonl", folder, min(4096, share_tokens), arguments.method, arguments.precision)
        (folder / f"profile_{arguments.method}.json").write_text(json.dumps(found))
        return
    source = next(path for path in [arguments.rows, *GSM8K] if path and path.is_file())
    folder = Path(tempfile.mkdtemp(prefix="fullshard_speed_"))
    precisions = ("fp32", "bf16") if has_fast_bf16() else ("fp32",)
    precisions = (arguments.precision,) if arguments.precision else precisions
    found: dict[str, Any] = {"hardware": hardware()}
    try:
        rows = folder / "rows.jsonl"
        rows.write_text("".join(source.read_text().splitlines(keepends=True)[:200]))
        if "share" in arguments.only:
            for precision in precisions:
                found[precision] = shares(rows, folder, share_tokens, precision)
        if "scaling" in arguments.only:
            found["scaling"] = scaling(rows, folder, scaling_tokens, precisions[-1])
        if "profile" in arguments.only:
            found["profile_of_one_rank"] = {}
            for method, precision in product(("full", "lora"), precisions):
                command = [sys.executable, __file__, "--profile-in", str(folder), "--method", method]
                command += ["--precision", precision]
                subprocess.run(command + ["--quick"] * arguments.quick, check=True)
                name = f"{method}, {precision}"
                found["profile_of_one_rank"][name] = json.loads((folder / f"profile_{method}.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.quick:
        print(json.dumps(found, indent=1))
    else:
        packages = ("fullshard", "torch", "transformers")
        parts = arguments.only.split(",")
        topic = "speed" if len(parts) == 3 else "_".join(["speed", *parts])  # not over one another
        print(write(topic, "python benchmarks/speed.py " + " ".join(sys.argv[1:]), found, packages))


if __name__ == "__main__":
    main()
