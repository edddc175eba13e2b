"""The figures of docs/precision.md: errors of one product and of a sum, and one training in every mode of this machine.

Run: ``python docs/precision_runs.py`` (two minutes on two CPU cores). It makes the model and the data of docs/chapter.md in
``runs/precision``, trains it once a mode with the command that it prints, and writes docs/figures/precision_loss.svg;
with ``--redraw`` it only reads those runs again.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from memory_figures import BLUE, GREEN, GREY, INK, ORANGE, label, line, picture

ROOT = Path(__file__).parents[1]
RUNS = Path("runs/precision")
MODES = ("fp32", "tf32", "bf16", "fp16", "bf16_pure")
SETTINGS = "method=full train.learning_rate=0.0005 train.global_batch='8 rows' train.max_steps=50"
SHOWN = (1, 10, 20, 30, 40, 50)
TERMS = 4096
COLOURS = dict(zip(MODES, (INK, GREY, BLUE, GREEN, ORANGE), strict=True))


def print_errors() -> None:
    """Relative errors against fp64, mean over many trials; inputs are exact in each format, so only the operation errs."""
    print(f"{'format':<8}{'one product':>14}{f'sum of {TERMS}':>16}{'same, fp32 sum':>18}{'largest':>12}")
    generator = torch.Generator().manual_seed(0)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        left, right = (torch.rand(64, TERMS, generator=generator).to(dtype) + 0.5 for _ in range(2))
        exact = left.double() * right.double()
        product = (((left * right).double() - exact) / exact).abs().mean().item()
        total, wide = torch.zeros(64, dtype=dtype), torch.zeros(64)
        for column in left.T:  # one after another, as an accumulator of that format would
            total, wide = total + column, wide + column.float()
        true = left.double().sum(1)
        errors = [((value.double() - true) / true).abs().mean().item() for value in (total, wide)]
        print(f"{name:<8}{product:>14.1e}{errors[0]:>16.1e}{errors[1]:>18.1e}{torch.finfo(dtype).max:>12.3g}")


def train(mode: str) -> tuple[dict[int, float], float, list[str]] | None:
    """Losses by step, the last held-out loss and the log of one run; None where this chip refuses the mode."""
    command = f"fullshard train {RUNS}/recipe.yaml {SETTINGS} train.precision={mode} output={RUNS}/{mode} --ranks 2"
    print(f"$ {command}", flush=True)
    log = RUNS / f"{mode}.log"
    if not log.is_file():
        done = subprocess.run(f"{sys.executable} -m {command}", shell=True, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr.strip())
            return None
        log.write_text(done.stdout, encoding="utf-8")
    records = [json.loads(text) for text in (RUNS / mode / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    held_out = [record["loss"] for record in records if record["kind"] == "eval"][-1]
    words = ("precision ", "FP32 copy", "fp32 weights", "bf16 weights", "skipped step")
    lines = log.read_text(encoding="utf-8").splitlines()
    return losses, held_out, [text for text in lines if text.startswith(words) or "parameter groups" in text]


def draw(curves: dict[str, dict[int, float]]) -> str:
    """Losses over steps, one line a mode."""
    top = max(max(losses.values()) for losses in curves.values())
    parts = [line(60, 260, 660, 260, GREY), line(60, 40, 60, 260, GREY)]
    for share in (0, 0.5, 1):
        parts.append(label(52, 264 - 220 * share, f"{top * share:.1f}", anchor="end"))
    for step in SHOWN:
        parts.append(label(60 + 12 * step, 278, str(step), anchor="middle"))
    for number, (mode, losses) in enumerate(curves.items()):
        points = [(60 + 12 * step, 260 - 220 * loss / top) for step, loss in losses.items()]
        parts += [line(*start, *end, COLOURS[mode]) for start, end in itertools.pairwise(points)]
        parts += [line(500, 60 + 18 * number, 530, 60 + 18 * number, COLOURS[mode])]
        parts += [label(538, 64 + 18 * number, mode)]
    return picture(290, "loss / step", parts)


def main() -> None:
    """Print what the pages show."""
    print_errors()
    if "--redraw" not in sys.argv:
        shutil.rmtree(RUNS, ignore_errors=True)
        for command in (
            f"{ROOT}/examples/chapter_model.py {RUNS}",
            f"-m fullshard init {RUNS}/model {RUNS}/chat.jsonl --output {RUNS}/recipe.yaml",
        ):
            subprocess.run(f"{sys.executable} {command}", shell=True, check=True, capture_output=True)
    found = {mode: result for mode in MODES if (result := train(mode))}
    print("\n".join(text for _, _, log in found.values() for text in log))
    print(f"{'loss of step':<12}" + "".join(f"{step:>8}" for step in SHOWN) + f"{'held out':>10}")
    for mode, (losses, held_out, _) in found.items():
        shown = [f"{losses[step]:.4f}" if step in losses else "skipped" for step in SHOWN]
        print(f"{mode:<12}" + "".join(f"{text:>8}" for text in shown) + f"{held_out:>10.4f}")
    curves = {mode: losses for mode, (losses, _, _) in found.items()}
    (ROOT / "docs" / "figures" / "precision_loss.svg").write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
