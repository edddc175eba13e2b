"""What `make test-device` runs: does fullshard work on this machine's device? At most 20 minutes.

    python benchmarks/device_check.py [--only doctor,parity,precision,quickstart] [--output FOLDER]

- doctor: the checks of ``fullshard doctor``.
- parity: tiny random models, full and LoRA, in fp32: the losses of all ranks against one rank's on the same device
  (relative 1e-5); with a single accelerator a repeated run instead, bit for bit. On an accelerator also against this
  machine's CPU (relative 1e-4: other kernels).
- precision: fp32 and bf16 each train to a finite loss, bf16 within 0.2% of fp32; a mode that the device lacks is
  "refused".
- quickstart: ``fullshard quickstart``, the main job with a real model.

Writes FOLDER/device-NAME-DATE.json (default benchmarks/results), also when a step fails; exit code 1 then. README's
device table is made of these files by benchmarks/device_table.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

STEPS = ("doctor", "parity", "precision", "quickstart")
LIMIT_SECONDS = 1200
SAME_DEVICE, OTHER_DEVICE, BF16 = 1e-5, 1e-4, 2e-3  # largest relative difference of a loss
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}  # the CPU of the same machine


def train_tiny(method: str, precision: str, ranks: int, optimizer: str = "sgd") -> list[float]:
    """The losses of four steps of a tiny random llama, through the public API; raises what ``train_run`` raises."""
    from tiny_models import WORDS, make_model, make_tokenizer

    import fullshard
    from fullshard.config import config_from_dict

    with tempfile.TemporaryDirectory(prefix="device_check_") as name:
        folder = Path(name)
        model = make_tokenizer(make_model(folder / "model"))
        lines = []
        for number in range(16):
            asked = " ".join(WORDS[(number * 5 + i) % 56] for i in range(1 + number % 4))
            answered = " ".join(WORDS[(number * 3 + i) % 56] for i in range(1 + number * 2 % 7))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            lines.append(json.dumps({"messages": messages}))
        (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        recipe: dict[str, Any] = {
            "model": {"path": str(model)},
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 32},
            "method": method,
            "train": {
                "global_batch": "4 rows", "epochs": 1, "optimizer": optimizer,
                "learning_rate": 0.1 if optimizer == "sgd" else 1e-3,
                "schedule": "constant", "warmup": 0, "clip_norm": 0, "precision": precision,
            },
            "output": str(folder / "run"),
        }  # fmt: skip
        if method == "lora":
            recipe["lora"] = {"rank": 4, "alpha": 8}
        fullshard.train_run(config_from_dict(recipe), ranks=ranks, quiet=True)
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if record["kind"] == "train"]


def train_tiny_on_cpu(method: str) -> list[float]:
    """``train_tiny`` in fp32 on one rank of this machine's CPU: in a process that sees no accelerator."""
    program = f"import device_check, json; print('LOSSES', json.dumps(device_check.train_tiny({method!r}, 'fp32', 1)))"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **HIDDEN, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    if "LOSSES" not in done.stdout:
        raise RuntimeError(f"the CPU run failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.rpartition("LOSSES")[2])


def difference(losses: list[float], wanted: list[float]) -> float:
    """Largest relative difference; infinite where the numbers of steps differ or a loss is not finite."""
    if len(losses) != len(wanted) or not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, wanted, strict=True))


def check_doctor(context: dict[str, Any]) -> dict[str, Any]:
    """The doctor's own findings, without those that hold a path or an address of this machine's owner."""
    from fullshard.launch import check_machine

    report = check_machine()
    checks = [{"name": check.name, "ok": check.ok, "finding": check.finding} for check in report.checks]
    for check in checks:
        if re.search(r"(^|[\s(])/\w|\d+\.\d+\.\d+\.\d+", check["finding"]):
            del check["finding"]
    return {"ok": report.healthy, "checks": checks}


def check_parity(context: dict[str, Any]) -> dict[str, Any]:
    """Every rank against one rank, full and LoRA; on an accelerator also against the CPU."""
    ranks, found, fine = context["ranks"], {}, True
    for method in ("full", "lora"):
        one = train_tiny(method, "fp32", 1)
        all_ranks = difference(train_tiny(method, "fp32", ranks), one)
        limit = SAME_DEVICE if ranks > 1 else 0.0
        found[method] = {"losses": one, "against": f"{ranks} ranks" if ranks > 1 else "a repeated run"}
        found[method] |= {"difference": all_ranks, "limit": limit}
        fine &= all_ranks <= limit
        if context["kind"] != "cpu":
            cpu = difference(one, train_tiny_on_cpu(method))
            found[method] |= {"difference_to_cpu": cpu, "limit_to_cpu": OTHER_DEVICE}
            fine &= cpu <= OTHER_DEVICE
    return {"ok": fine, "ranks": ranks, **found}


def check_precision(context: dict[str, Any]) -> dict[str, Any]:
    """fp32 and bf16 on every rank with AdamW; ``modes`` maps each to ok, failed or refused."""
    from fullshard import UserError

    found: dict[str, Any] = {"modes": {}}
    wanted: list[float] | None = None
    for mode, limit in (("fp32", 0.0), ("bf16", BF16)):
        try:
            losses = train_tiny("full", mode, context["ranks"], "adamw")
        except UserError as error:
            found["modes"][mode], found[mode] = "refused", str(error)
            continue
        wanted = wanted or losses
        off = difference(losses, wanted)
        found["modes"][mode] = "ok" if off <= limit else "failed"
        found[mode] = {"losses": losses, "difference_to_fp32": off, "limit": limit}
    fine = "failed" not in found["modes"].values() and found["modes"]["fp32"] == "ok"
    return {"ok": fine, **found}


def check_quickstart(context: dict[str, Any]) -> dict[str, Any]:
    """The main job in a folder of its own, ended when the time of the whole check is over."""
    left = LIMIT_SECONDS - (time.monotonic() - context["started"])
    with tempfile.TemporaryDirectory(prefix="device_check_") as folder:
        command = [sys.executable, "-m", "fullshard", "quickstart"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=max(1.0, left))
        summary = Path(folder) / "runs" / "quickstart" / "quickstart.json"
        if done.returncode or not summary.is_file():
            return {"ok": False, "exit_code": done.returncode, "output": (done.stdout + done.stderr)[-2000:]}
        return {"ok": True, "figures": json.loads(summary.read_text(encoding="utf-8"))}


CHECKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "doctor": check_doctor,
    "parity": check_parity,
    "precision": check_precision,
    "quickstart": check_quickstart,
}


def device_facts() -> dict[str, Any]:
    """Kind, name, number and memory of the device that would train, and the versions that drive it."""
    from fullshard import device
    from fullshard.planning.hardware import read_host

    kind = device.device_kind()
    host = read_host()
    packages = ("fullshard", "torch", "transformers", "peft")
    return {
        "kind": kind,
        "name": f"CPU {host.processor}" if kind == "cpu" else device.device_name(),
        "count": host.cores if kind == "cpu" else device.num_devices(),  # cores of a CPU
        "memory_bytes": host.total_bytes if kind == "cpu" else device.device_memory()[1],
        "torch_build": device.torch_build(),
        "bf16": device.supports_bf16(),
        "versions": {name: metadata.version(name) for name in packages},
    }


def file_name(name: str, date: datetime.date) -> str:
    """``device-nvidia-h200-20261129.json``."""
    return f"device-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{date:%Y%m%d}.json"


def run_checks(steps: list[str], output: Path) -> tuple[Path, bool]:
    """Run ``steps`` in order, print one line each and write the record; returns its path and whether all are right."""
    from fullshard.device import default_ranks

    started, facts = time.monotonic(), device_facts()
    date = datetime.datetime.now(datetime.UTC).date()
    context = {"kind": facts["kind"], "ranks": default_ranks(), "started": started}
    print(f"{facts['name']}: {', '.join(steps)} on {context['ranks']} ranks")
    found: dict[str, Any] = {}
    for step in steps:
        begun = time.monotonic()
        try:
            found[step] = CHECKS[step](context)
        except Exception as error:  # a step that raises is a finding of this check
            traceback.print_exc()
            found[step] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[step]["seconds"] = round(time.monotonic() - begun, 1)
        print(f"{'ok    ' if found[step]['ok'] else 'FAILED'} {step}  {found[step]['seconds']} s", flush=True)
    record = {
        "topic": "device",
        "command": "make test-device" if steps == list(STEPS) else f"device_check.py --only {','.join(steps)}",
        "date": str(date),
        "device": facts,
        "seconds": round(time.monotonic() - started, 1),
        "steps": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    place = output / file_name(facts["name"], date)
    place.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return place, all(step["ok"] for step in found.values())


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, say where the record is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(STEPS), help="a comma-separated choice of the four steps")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    place, fine = run_checks([step for step in STEPS if step in options.only.split(",")], options.output)
    print(f"written: {place}\nREADME's device table: python benchmarks/device_table.py")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
