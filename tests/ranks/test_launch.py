"""The launcher from outside: a rank that fails or dies ends the run with one message; torchrun gives the same run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rank_pool import free_port
from safetensors.torch import load_file, save_file
from tiny_models import make_job

from fullshard.run_folder import claim_run

ENDED_WITHIN_SECONDS = 30
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
FULLSHARD = [sys.executable, "-m", "fullshard"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a tiny model, data and a recipe of 6 steps."""
    return make_job(tmp_path, 12)


def call(job: Path, *arguments: str, command: list[str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*(command or FULLSHARD), *arguments], cwd=job, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def ranks_alive(job: Path) -> list[psutil.Process]:
    """Those of this folder: others may run on the same machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if "fullshard.launch" in (process.info["cmdline"] or []) and process.info["cwd"] == str(job):
            found.append(process)
    return found


def test_a_value_that_is_not_finite_is_named_and_ends_every_rank(job):
    file = job / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(weights, file, metadata={"format": "pt"})
    done = call(job, "train", "recipe.yaml")
    assert done.returncode == 2, done.stderr
    again = call(job, "resume", "run")
    assert again.returncode == 2 and "-> Start it again: fullshard train run/recipe.yaml\n" in again.stderr
    again = call(job, "train", "run/recipe.yaml")
    said = [re.sub("this rank's rows: .*", "", text) for text in (again.stderr, done.stderr)]  # of whichever came first
    assert again.returncode == 2 and said[0] == said[1] and "starting anew in run" in again.stdout
    assert "non-finite" in done.stderr and "Step 1" in done.stderr and "Traceback" not in done.stderr
    assert not ranks_alive(job)


def test_a_killed_rank_ends_the_run(job):
    process = subprocess.Popen(
        [*FULLSHARD, "train", "recipe.yaml", "train.epochs=4000"],
        cwd=job, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    children = [child for child in psutil.Process(process.pid).children(recursive=True) if child in ranks_alive(job)]
    assert len(children) == 2
    children[1].send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=ENDED_WITHIN_SECONDS)
    assert process.returncode == 2, errors
    assert "Rank 1" in errors and "signal 9" in errors and "Traceback" not in errors
    assert not any(child.is_running() for child in children)


def test_ranks_end_with_a_launcher_that_is_killed(job):
    """SIGKILL leaves the launcher no time to end its ranks: the kernel does it."""
    process = subprocess.Popen(
        [*FULLSHARD, "train", "recipe.yaml", "train.epochs=4000"],
        cwd=job, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while "trial step" not in (line := process.stdout.readline()):
            assert line, "the run ended before its first step"
        ranks = ranks_alive(job)
    finally:
        process.kill()
        process.communicate()
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=ENDED_WITHIN_SECONDS)
    assert not alive


def test_torchrun_gives_the_same_run(job):
    own = call(job, "train", "recipe.yaml")
    assert own.returncode == 0, own.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    theirs = call(job, "-m", "fullshard", "train", "recipe.yaml", "output=run2", command=torchrun)
    assert theirs.returncode == 0, theirs.stderr
    assert losses(job / "run") == losses(job / "run2") and len(losses(job / "run")) == 6
    assert theirs.stdout.count("fullshard merge run2") == 1


def test_resume_after_a_kill_goes_on_bit_for_bit(job):
    assert call(job, "train", "recipe.yaml").returncode == 0
    straight = losses(job / "run")
    resumed = call(job, "resume", "run", "--step", "4")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(job / "run")[6:] == straight[4:]
    again = call(job, "resume", "run")
    assert again.returncode == 2 and "finished" in again.stderr


def test_a_damaged_checkpoint_is_refused(job):
    assert call(job, "train", "recipe.yaml").returncode == 0
    part = next((job / "run" / "checkpoints" / "step_000004").glob("part_*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    done = call(job, "resume", "run", "--step", "4")
    assert done.returncode == 2 and part.name in done.stderr and "damaged" in done.stderr


def test_a_damaged_model_file_is_named(job):
    file = job / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = call(job, "train", "recipe.yaml")
    assert done.returncode == 2 and "model.safetensors" in done.stderr and "Traceback" not in done.stderr
    assert not (job / "run").exists()  # refused before anything is written


def test_train_starts_again_where_a_start_was_killed(job):
    """kill -9 while the data is prepared leaves launch.json and no plan: the next start clears that; a living one is
    not disturbed."""
    run = job / "run"
    run.mkdir()
    for name in ("recipe.yaml", "launch.json", "config.json"):
        (run / name).write_text("{}")
    with claim_run(run, "prepared"):
        refused = call(job, "train", "recipe.yaml")
    assert refused.returncode == 2 and f"is being prepared now, by process {os.getpid()}" in refused.stderr
    assert (run / "config.json").read_text() == "{}"
    done = call(job, "train", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 6
