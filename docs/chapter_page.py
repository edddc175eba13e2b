"""Writes docs/chapter.md, docs/chapter.zh-CN.md and their figures from the templates and the stored outputs.

``python docs/chapter_page.py`` fills the templates; ``python docs/chapter_page.py --run`` first runs every command of
the pages, in a new folder, and stores what each prints in docs/chapter_outputs. The text is in docs/templates, where every
{name} comes from here: a command, an excerpt of an output, or a number found in one. tests/product/test_chapter_page.py
holds that the pages are as this script writes them and that the commands run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import chapter_figures

ROOT = Path(__file__).parents[1]
OUTPUTS = ROOT / "docs" / "chapter_outputs"
TUNING = "method=lora train.learning_rate=0.01 output=runs/chapter/run"

# The commands of the pages in their order; a later one needs the files of an earlier one.
COMMANDS = {
    "precision": "python examples/learn/precision.py",
    "model": "python examples/chapter_model.py runs/chapter",
    "memory": "python examples/learn/memory.py runs/chapter/qwen3_8b --ranks 8",
    "fsdp_torch": "torchrun --nproc-per-node 2 examples/learn/fsdp_torch.py",
    "fsdp_from_scratch": "torchrun --nproc-per-node 2 examples/learn/fsdp_from_scratch.py",
    "doctor": "fullshard doctor",
    "init": "fullshard init runs/chapter/model runs/chapter/chat.jsonl --output runs/chapter/recipe.yaml",
    "plan": f"fullshard plan runs/chapter/recipe.yaml {TUNING} --ranks 2",
    "train": f"fullshard train runs/chapter/recipe.yaml {TUNING} --ranks 2",
    "lora": "python examples/learn/lora_from_scratch.py",
    "merge": "fullshard merge runs/chapter/run",
    "generate_base": 'fullshard generate runs/chapter/model "red cat sun" "sea star wind"',
    "generate": 'fullshard generate runs/chapter/run/merged "red cat sun" "sea star wind"',
    "eval": "fullshard eval runs/chapter/run/merged runs/chapter/new.jsonl --base runs/chapter/model --show 3",
}
LEARN = tuple(name for name, command in COMMANDS.items() if "examples/learn/" in command)

# What the pages show of an output: from the first line that starts so to before the first that starts so.
EXCERPTS = {
    "show_formats": ("precision", "== 1.", "== 3."),
    "show_rates": ("precision", "== 7.", None),
    "show_update": ("precision", "== 3.", "== 5."),
    "show_scale": ("precision", "== 5.", "step 120"),
    "show_curves": ("precision", "== 6.", "== 7."),
    "show_model": ("model", "", None),
    "show_parameters": ("memory", "== 1.", "the real count of the whole"),
    "show_ddp": ("memory", "DDP holds", "ZeRO-1"),
    "show_zero3": ("memory", "ZeRO-3 divides", "== 3."),
    "show_activations": ("memory", "checkpointed activations", "== 4."),
    "show_total": ("memory", "ZeRO-3 on", None),
    "show_torch": ("fsdp_torch", "", None),
    "show_scratch": ("fsdp_from_scratch", "torch.bfloat16, DDP", None),
    "show_doctor": ("doctor", "ok    cores", "ok    interfaces"),
    "show_ready": ("doctor", "ok    ranks", "ok    shared folder"),
    "show_recipe": ("init", "# Every key", "Written to"),
    "show_plan": ("plan", "Plan:", "Memory of"),
    "show_fits": ("plan", "Peaks:", "Note:"),
    "show_rows": ("train", "train (messages)", "plan:"),
    "show_checks": ("train", "2 buffers", "step 15/"),
    "show_trained": ("train", "trained ", None),
    "show_lora": ("lora", "14 layers", None),
    "show_merge": ("merge", "adapters:", "Next:"),
    "show_base": ("generate_base", "", None),
    "show_tuned": ("generate", "", None),
    "show_eval": ("eval", "", None),
}

# Numbers of the text: an output and where they stand in it; a name for each group.
NUMBERS = {
    "exponent_fp32 mantissa_fp32 spacing_fp32": ("precision", r"^FP32 +1 \+ (\d+) \+ (\d+) .* (\S+)$"),
    "bits_tf32": ("precision", r"^TF32.* = (\d+) "),
    "mantissa_bf16 spacing_bf16": ("precision", r"^BF16 +1 \+ \d+ \+ (\d+) .* (\S+)$"),
    "mantissa_fp16 largest_fp16 least_fp16 spacing_fp16": (
        "precision",
        r"^FP16 +1 \+ \d+ \+ (\d+) = 16 +(\S+) +\S+ +(\S+) +(\S+)$",
    ),
    "infinite": ("precision", r"^(\d+) +FP16 holds inf"),
    "update": ("precision", r"learning rate x gradient = (\S+)"),
    "updates_fp16": ("precision", r"^FP16 weight.*\n +after (\d+) such"),
    "updates_bf16": ("precision", r"^BF16 weight.*\n +after (\d+) such"),
    "flushed": ("precision", r"^FP16, loss scale 1 .*\((\S+)\)"),
    "rescued": ("precision", r"^FP16, loss scale \d{2,} .*\((\S+)\)"),
    "curve_fp32 curve_bf16 curve_bf16_copy curve_fp16 curve_fp16_scale": (
        "precision",
        r"^step 250 +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$",
    ),
    "parameters": ("memory", r"the whole model.*\n.*\n +MODEL .* = (\S+) parameters"),
    "formula": ("memory", r"the blocks' matrices.*\n.*\n +MODEL .* = (\S+) parameters"),
    "blocks": ("memory", r"the real count of the blocks.*\n.*\n +MODEL .* = (\S+) parameters"),
    "ddp": ("memory", r"DDP holds.*\n.*\n +MODEL .*; (\S+) GiB"),
    "zero3": ("memory", r"ZeRO-3 divides.*\n.*\n +MODEL .*; (\S+) GiB"),
    "eager sdpa": ("memory", r"'eager'.* MODEL (\S+)\n.*'sdpa'.* MODEL (\S+)"),
    "total": ("memory", r"= (\S+) GiB\Z"),
    "forward_gathers backward_gathers": ("fsdp_torch", r"ZeRO-3, .*; (\d+) all-gathers.*\n +(\d+) in backward"),
    "kept": ("fsdp_torch", r"ZeRO-2, .*\n.* between the two: (\S+) bytes"),
    "freed": ("fsdp_torch", r"ZeRO-3, .*\n.* between the two: (\S+) bytes"),
    "saved_loss": ("fsdp_torch", r"with both: loss (\S+) and"),
    "held_ddp held_formula": ("fsdp_from_scratch", r"bfloat16, DDP.*\n  held (\S+) bytes; (.*) ="),
    "sent_ddp": ("fsdp_from_scratch", r"bfloat16, DDP.*\n.*\n  sent (\S+) bytes"),
    "held_zero3": ("fsdp_from_scratch", r"bfloat16, ZeRO-3.*\n  held (\S+) bytes"),
    "sent_zero3": ("fsdp_from_scratch", r"bfloat16, ZeRO-3.*\n.*\n  sent (\S+) bytes"),
    "unit_bytes": ("fsdp_from_scratch", r"at most (\S+) bytes more"),
    "rows held_rows": ("train", r"train \(messages\): (\S+) rows(?:.*\n)*?eval \(messages\): (\S+) rows"),
    "supervised": ("train", r"supervised \((\S+)\)"),
    "steps": ("train", r"^trained (\d+) steps"),
    "before": ("train", r"^step 0: held-out loss (\S+)"),
    "after": ("train", r"^trained .*held-out loss ([\d.]+)"),
    "adapters adapter_parameters": ("lora", r"^(\d+) layers get .*: (\S+) of"),
    "moved folded": ("lora", r"by up to (\S+); folded .* by (\S+) at most"),
    "moved_adapters": ("merge", r"adapters: (\d+ of \d+)"),
    "logit_difference": ("merge", r"largest logit difference (\S+)"),
    "base_match": ("eval", r"^base: .*exact match (\d+) of"),
    "tuned_match questions": ("eval", r"^model: .*exact match (\d+) of (\d+)"),
}


def workplace(folder: Path) -> Path:
    """``folder`` made to look like the repository's root to the commands, with a ``runs`` of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("examples", "src"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_command(command: str, folder: Path) -> str:
    """What the command prints on stdout, run in ``folder``; RuntimeError with its errors where it fails."""
    program, *arguments = shlex.split(command)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = {
        "python": [],
        "torchrun": ["-m", "torch.distributed.run", f"--master-port={port}"],
        "fullshard": ["-m", "fullshard"],
    }[program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *start, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def script_hashes() -> dict[str, str]:
    """SHA-256 of every script that the commands run; some of them train on their own text, so that every letter counts."""
    found = {}
    for path in re.findall(r"\S+\.py", " ".join(COMMANDS.values())):
        found[path] = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
    return found


def run_all() -> None:
    """Run every command in its order and store the outputs, and which scripts they come from."""
    OUTPUTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = workplace(Path(place) / "fullshard")
        for name, command in COMMANDS.items():
            print(f"$ {command}", flush=True)
            text = "\n".join(line.rstrip() for line in run_command(command, folder).rstrip().splitlines())
            (OUTPUTS / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    (OUTPUTS / "scripts.json").write_text(json.dumps(script_hashes(), indent=1) + "\n", encoding="utf-8")


def stored_outputs() -> dict[str, str]:
    """What each command printed when it was last run, by its name."""
    return {name: (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8").rstrip() for name in COMMANDS}


def excerpt(text: str, first: str, stop: str | None) -> str:
    """The lines from the one that starts with ``first`` to before the next that starts with ``stop``."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    end = len(lines)
    if stop is not None:
        end = next(number for number in range(begin + 1, len(lines)) if lines[number].startswith(stop))
    return "\n".join(lines[begin:end]).strip("\n")


def numbers_of(outputs: dict[str, str]) -> dict[str, str]:
    """The numbers of the text, each as an output prints it."""
    found = {}
    for names, (output, pattern) in NUMBERS.items():
        match = re.search(pattern, outputs[output], re.M)
        if match is None:
            raise ValueError(f"{names}: {pattern!r} is not in {output}.txt")
        found |= dict(zip(names.split(), match.groups(), strict=True))
    return found


def counted(text: str) -> float:
    """A printed number as a number."""
    return float(text.replace(",", ""))


def values() -> dict[str, str]:
    """Everything that the templates name: commands, excerpts and numbers."""
    outputs = stored_outputs()
    found = {f"run_{name}": command for name, command in COMMANDS.items()}
    found |= {name: excerpt(outputs[output], *ends) for name, (output, *ends) in EXCERPTS.items()}
    found |= numbers_of(outputs)
    found["formula_off"] = f"{counted(found['formula']) / counted(found['blocks']) - 1:+.1%}"
    found["eager_times"] = f"{counted(found['eager']) / counted(found['sdpa']):.1f}"
    found["sent_times"] = f"{counted(found['sent_zero3']) / counted(found['sent_ddp']):.1f}"
    return found


def block_sizes() -> dict[str, int]:
    """Elements of each parameter of a block of fsdp_from_scratch.py, in the order of its flat buffer."""
    text = (ROOT / "examples" / "learn" / "fsdp_from_scratch.py").read_text(encoding="utf-8")
    names, sizes = (side.split(", ") for side in re.search(r"^B, T, D.*$", text, re.M)[0].split(" = "))
    width = int(dict(zip(names, sizes, strict=True))["D"])
    with torch.device("meta"):
        block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0, batch_first=True, bias=False)
    return {name.removesuffix(".weight").removesuffix("_weight"): p.numel() for name, p in block.named_parameters()}


def pages() -> dict[Path, str]:
    """Both pages and their figures by their file."""
    docs, found, filled, outputs, block = ROOT / "docs", {}, values(), stored_outputs(), block_sizes()
    for ending, words in (("", chapter_figures.ENGLISH), (".zh-CN", chapter_figures.CHINESE)):
        template = (docs / "templates" / f"chapter{ending}.md").read_text(encoding="utf-8")
        found[docs / f"chapter{ending}.md"] = template.format(**filled)
        for name, drawing in chapter_figures.figures(outputs, block, words).items():
            found[docs / "figures" / f"{name}{ending}.svg"] = drawing
    return found


if __name__ == "__main__":
    if "--run" in sys.argv[1:]:
        run_all()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
