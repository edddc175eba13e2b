"""Runs that are stopped, killed, hung or disturbed at odd moments."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from test_launch import ENDED_WITHIN_SECONDS, ENVIRONMENT, FULLSHARD, call, ranks_alive
from tiny_models import make_job

from fullshard.run_folder import checkpoint_path, list_checkpoints


def hook(job, code):
    """An environment in which every process of a run begins with ``code``."""
    folder = job / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    path = os.pathsep.join([str(folder), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    return {**ENVIRONMENT, "PYTHONPATH": path}


def run(job, *arguments, env=ENVIRONMENT):
    return subprocess.run([*FULLSHARD, *arguments], cwd=job, env=env, capture_output=True, text=True, timeout=120)


def test_asked_to_stop_before_the_ranks_are_there(tmp_path):
    job = make_job(tmp_path, 12)
    code = """
        import os, signal, sys
        if "RANK" not in os.environ and "train" in sys.orig_argv:
            from torch.distributed.launcher.api import elastic_launch
            start = elastic_launch.__call__
            def ask_first(*arguments):
                os.kill(os.getpid(), signal.SIGTERM)
                return start(*arguments)
            elastic_launch.__call__ = ask_first
        """
    done = run(job, "train", "recipe.yaml", env=hook(job, code))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not ranks_alive(job)


def test_ranks_end_with_a_launcher_that_dies_while_they_start(tmp_path):
    job = make_job(tmp_path, 12)
    code = """
        import os, signal
        if os.environ.get("RANK") == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        """
    process = subprocess.Popen(
        [*FULLSHARD, "train", "recipe.yaml"],
        cwd=job, env=hook(job, code), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    process.wait(60)
    left = ranks_alive(job)
    _, alive = psutil.wait_procs(left, timeout=15)
    for one in alive:
        one.kill()
    assert not alive


@pytest.mark.slow
def test_a_hung_rank_is_named_at_the_shipped_limits(tmp_path):
    """Both limits at a fiftieth."""
    job = make_job(tmp_path, 12)
    code = """
        import os
        if "RANK" in os.environ:
            import time
            import fullshard.ranks as ranks
            import fullshard.train.guard as guard
            ranks.start_ranks.__defaults__ = (ranks.COLLECTIVE_TIMEOUT_SECONDS / 50,)
            guard.LEAST_SECONDS, guard.SLOWER = guard.LEAST_SECONDS / 50, 0
            beat, count = guard.Guard.beat, []
            def hang(self, saving=False):
                beat(self, saving)
                count.append(1)
                time.sleep(600 * (len(count) == 3 and os.environ["RANK"] == "1"))
            guard.Guard.beat = hang
        """
    done = run(job, "train", "recipe.yaml", env=hook(job, code))
    assert done.returncode == 2 and "rank_1 hung" in done.stderr, done.stderr


def test_a_second_resume_is_refused_and_does_not_disturb_the_first(tmp_path):
    job = make_job(tmp_path, 12)
    process = subprocess.Popen(
        [*FULLSHARD, "train", "recipe.yaml", "train.epochs=4000", "train.save_every=2"],
        cwd=job, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        deadline = time.monotonic() + ENDED_WITHIN_SECONDS
        while not list_checkpoints(job / "run"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        second = call(job, "resume", "run")
        assert second.returncode == 2 and "is being trained now, by process" in second.stderr, second.stderr
        found = {path.name for path in (job / "run/errors").iterdir()}
        next(one for one in ranks_alive(job) if one.environ().get("RANK") == "0").kill()
        _, errors = process.communicate(timeout=ENDED_WITHIN_SECONDS)
        assert {"rank_0.stacks", "rank_1.stacks"} <= found
        assert "Rank 0 was ended by signal 9" in errors, errors
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_spike_may_be_met_twice(tmp_path):
    """As by a run that was killed after a spike, resumed before it."""
    from fullshard.train.loop import Trainer

    kept = checkpoint_path(tmp_path, 16)
    kept.mkdir(parents=True)
    (kept / "complete").write_text("x")
    quiet = SimpleNamespace(record=lambda *_, **__: None, say=lambda *_: None)
    trainer = SimpleNamespace(
        data=SimpleNamespace(origin=str), log=quiet, run=tmp_path,
        ranks=SimpleNamespace(is_first=True), saver=SimpleNamespace(wait=lambda: None),
    )  # fmt: skip
    for _ in range(2):
        Trainer._keep_state_before(trainer, 17, np.array([3]), "loss 9, a spike", aside=True)
    shutil.rmtree(kept)
    assert (tmp_path / "before_step_000017/complete").read_text() == "x"


def test_a_disk_that_is_full_while_training_is_named(tmp_path):
    job = make_job(tmp_path, 12)
    code = """
        import os
        if os.environ.get("RANK") == "0":
            import errno, pathlib
            import fullshard.train.metrics as metrics
            record, write_text, full = metrics.MetricsLog.record, pathlib.Path.write_text, []
            def no_room(log, kind, **values):
                if values["step"] == 3:
                    full.append(OSError(errno.ENOSPC, "No space left on device"))
                    raise full[0]
                record(log, kind, **values)
            def no_room_for_errors(path, *arguments, **named):
                if full:
                    raise full[0]
                return write_text(path, *arguments, **named)
            metrics.MetricsLog.record, pathlib.Path.write_text = no_room, no_room_for_errors
        """
    done = run(job, "train", "recipe.yaml", env=hook(job, code))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "No space left on device" in done.stderr and "fullshard resume run" in done.stderr


def test_the_exception_of_the_rank_that_failed_first_is_the_headline_with_step_and_rows(tmp_path):
    """Rank 0 then loses rank 1, or waits for it; that is not what is told. 12 rows, 4 a step, 2 epochs."""
    job = make_job(tmp_path, 12)
    code = """
        import os
        if os.environ.get("RANK") == "1":
            import fullshard.train.loop as loop
            batch_loss, step = loop.batch_loss, loop.Trainer._step
            def at_step(self, number, *others):
                def broken(*given):
                    if number == 3:
                        raise RuntimeError("a product went wrong")
                    return batch_loss(*given)
                loop.batch_loss = broken
                return step(self, number, *others)
            loop.Trainer._step = at_step
        """
    started = time.monotonic()
    done = run(job, "train", "recipe.yaml", "train.save_every=1", env=hook(job, code))
    assert time.monotonic() - started < 2 * ENDED_WITHIN_SECONDS and not ranks_alive(job)
    headline = done.stderr.splitlines()[0]
    found = re.fullmatch(
        r"Error: Rank 1 raised RuntimeError: a product went wrong; step 3, this rank's rows: (.*)", headline
    )
    assert done.returncode == 2 and found, done.stderr
    places = re.findall(r"(\d+) \(rows\.jsonl:(\d+)\)", found[1])
    assert places and all(int(line) == int(row) + 1 for row, line in places)
    again = call(job, "resume", "run")
    # the save of step 2 may still have been under way, beside step 3
    assert again.returncode == 0 and re.search("resumed at step [12]\\b", again.stdout), again.stdout
