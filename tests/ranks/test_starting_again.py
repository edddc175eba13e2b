"""A run that is started again: after a kill before its first checkpoint, and by torchrun's elastic restart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from rank_pool import free_port
from test_launch import ENDED_WITHIN_SECONDS, ENVIRONMENT, FULLSHARD, call, losses, ranks_alive
from test_odd_moments import hook, run
from tiny_models import make_job

from fullshard.run_folder import list_checkpoints

DIES_ONCE = """
    import os
    if "RANK" in os.environ:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            import fullshard.train.loop as loop
            step = loop.Trainer._step
            def die_at_5(self, number, *others):
                if number == 5:
                    self.saver.wait()
                    os._exit(1)
                return step(self, number, *others)
            loop.Trainer._step = die_at_5
        else:  # the clock has been set forward by an hour
            import psutil
            started = psutil.Process.create_time
            psutil.Process.create_time = lambda self: started(self) + 3600
    """


def torchrun(job, *arguments, restarts=1):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += [f"--max-restarts={restarts}", "-m", "fullshard", *arguments]
    environment = hook(job, DIES_ONCE)
    return subprocess.run(command, cwd=job, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path, 12)


def test_a_run_killed_before_its_first_checkpoint_is_started_again(job):
    process = subprocess.Popen(
        [*FULLSHARD, "train", "recipe.yaml", "train.epochs=4000", "train.save_every=100000"],
        cwd=job, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert any(line.startswith("step 1/") for line in process.stdout)
        (job / "run" / "notes.txt").write_text("mine")
    finally:
        ranks = ranks_alive(job)
        process.kill()
        process.communicate()
    assert not psutil.wait_procs(ranks, timeout=ENDED_WITHIN_SECONDS)[1]
    before = losses(job / "run")
    (job / "run" / "checkpoints" / ".step_000100.tmp").mkdir(parents=True)  # a save that a kill has cut short
    done = call(job, "train", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    said = "starting anew in run: the last start there ended before its first checkpoint (its metrics: "
    assert done.stdout.splitlines()[0] == said + "metrics.before.jsonl)"
    assert len(losses(job / "run")) == 6 and losses(job / "run")[0] == before[0]
    kept = [json.loads(line)["loss"] for line in (job / "run" / "metrics.before.jsonl").read_text().splitlines()]
    assert kept == before and len(kept) >= 1
    assert (job / "run" / "notes.txt").read_text() == "mine"
    assert [path.name for path in sorted((job / "run" / "checkpoints").iterdir())] == ["step_000004", "step_000006"]
    shutil.rmtree(job / "run" / "checkpoints")  # a finished run is not trained over
    refused = call(job, "train", "recipe.yaml")
    assert refused.returncode == 2 and "The output folder run exists already." in refused.stderr


def test_a_start_whose_ranks_are_not_there_yet_is_not_disturbed(job):
    code = """
        import os, time
        while "RANK" in os.environ and not os.path.exists("go"):
            time.sleep(0.02)
        """
    process = subprocess.Popen(
        [*FULLSHARD, "train", "recipe.yaml"],
        cwd=job, env=hook(job, code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 2 * ENDED_WITHIN_SECONDS
        while not ranks_alive(job):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        refused = call(job, "train", "recipe.yaml")
        assert refused.returncode == 2 and "run is being trained now, by process" in refused.stderr
        (job / "go").touch()
        _, errors = process.communicate(timeout=2 * ENDED_WITHIN_SECONDS)
        assert process.returncode == 0, errors
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_restart_is_known_though_the_clock_was_set(job):
    done = torchrun(job, "train", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 4" in done.stdout and list_checkpoints(job / "run")[-1][0] == 6


def test_a_restart_of_a_resume_from_a_step_goes_on_from_what_it_has_saved(job):
    """Steps 5 and 6 of the first run are not it: they were there before."""
    assert run(job, "train", "recipe.yaml", "train.save_every=1", "train.keep_last=9").returncode == 0
    straight = losses(job / "run")
    done = torchrun(job, "resume", "run", "--step", "2")
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("resumed at step")]
    assert [line.split(":")[0] for line in found] == ["resumed at step 2", "resumed at step 4"]
    assert losses(job / "run") == straight + straight[2:]
