"""A run that is asked to stop, is killed, hangs or finds a damaged checkpoint loses nothing that was saved."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest
from rank_pool import free_port
from test_launch import ENDED_WITHIN_SECONDS, ENVIRONMENT, FULLSHARD, call, losses, ranks_alive
from tiny_models import make_job

from fullshard.checkpoint.format import newest_good, verify
from fullshard.errors import CheckpointError
from fullshard.run_folder import list_checkpoints

LONG = ["train.epochs=400", "train.max_steps=300", "train.save_every=100000", "train.eval_every=100000"]


STARTED: list[subprocess.Popen] = []


@pytest.fixture
def job(tmp_path):
    yield make_job(tmp_path, 12)
    for process in STARTED:  # of a test that failed
        if process.poll() is None:
            process.kill()
            process.communicate()
    STARTED.clear()


def start(job, *arguments, command=FULLSHARD, env=ENVIRONMENT):
    """A run that has taken its first step."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *arguments], cwd=job, env=env, **pipes)
    STARTED.append(process)
    for line in process.stdout:
        if line.startswith("step 1/"):
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_saves_and_goes_on_as_if_it_had_not(job, number, code):
    process = start(job, "train", "recipe.yaml", *LONG)
    process.send_signal(number)
    _, errors = process.communicate(timeout=ENDED_WITHIN_SECONDS)
    ((step, _),) = list_checkpoints(job / "run")
    assert process.returncode == code, errors
    assert f"Stopped as asked: step {step} is saved." in errors and "fullshard resume run" in errors
    assert len(losses(job / "run")) == step and not ranks_alive(job)
    if number == signal.SIGINT:
        return
    assert call(job, "resume", "run").returncode == 0
    assert call(job, "train", "recipe.yaml", *LONG, "output=straight").returncode == 0
    assert losses(job / "run") == losses(job / "straight")


def test_a_second_ctrl_c_ends_at_once(job):
    hang = job / "hang"
    hang.mkdir()
    (hang / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '1':\n"
        "    import time\n    import fullshard.train.guard as guard\n    beat, count = guard.Guard.beat, []\n"
        "    def slow(self, saving=False):\n        beat(self, saving)\n        count.append(1)\n"
        "        time.sleep(600 * (len(count) == 3))\n"
        "    guard.Guard.beat = slow\n"
    )
    process = start(job, "train", "recipe.yaml", *LONG, env={**ENVIRONMENT, "PYTHONPATH": _path(hang)})
    process.send_signal(signal.SIGINT)
    assert any("finishing the step" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=ENDED_WITHIN_SECONDS)
    assert process.returncode == 130 and not ranks_alive(job)
    assert not list_checkpoints(job / "run")


def test_torchrun_passes_a_stop_on(job):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    process = start(job, "-m", "fullshard", "train", "recipe.yaml", *LONG, command=command)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=2 * ENDED_WITHIN_SECONDS)
    ((step, _),) = list_checkpoints(job / "run")
    assert f"step {step} is saved" in errors and not ranks_alive(job)


def _path(folder):
    return os.pathsep.join([str(folder), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])


@pytest.mark.parametrize("where", ["training", "saving"])
def test_a_rank_that_hangs_is_named_with_the_stacks_of_all(job, where):
    hang = job / "hang"
    hang.mkdir()
    (hang / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import os, sys
            if "RANK" in os.environ:
                import time
                import fullshard.train.guard as guard
                guard.LEAST_SECONDS, guard.SLOWER, guard.SAVING_SECONDS = 6.0, 0, 6.0
                def the_place_where_it_hangs(*_):
                    time.sleep(600)
                if {where == "training"}:
                    beat, count = guard.Guard.beat, []
                    def slow(self, saving=False):
                        beat(self, saving)
                        count.append(1)
                        if os.environ["RANK"] == "1" and len(count) == 3:
                            the_place_where_it_hangs()
                    guard.Guard.beat = slow
                elif os.environ["RANK"] == "1":
                    import fullshard.checkpoint.ranges as ranges
                    ranges._write_file = the_place_where_it_hangs
            """
        )
    )
    every = ["train.save_every=2"] if where == "saving" else []
    process = start(job, "train", "recipe.yaml", *LONG, *every, env={**ENVIRONMENT, "PYTHONPATH": _path(hang)})
    _, errors = process.communicate(timeout=2 * ENDED_WITHIN_SECONDS)
    assert process.returncode == 2 and "No sign of life within the limit" in errors, errors
    assert "the_place_where_it_hangs" in (job / "run/errors/rank_1.stacks").read_text()
    assert {"training": "_step", "saving": "save"}[where] in (job / "run/errors/rank_0.stacks").read_text()
    assert not ranks_alive(job)


def test_resume_falls_back_to_the_newest_whole_checkpoint(job):
    assert call(job, "train", "recipe.yaml", "train.keep_last=3").returncode == 0
    straight = losses(job / "run")
    assert verify(job / "run").healthy and len(verify(job / "run").found) == 3
    (job / "run/checkpoints/step_000006/complete").unlink()
    part = next((job / "run/checkpoints/step_000004").glob("part_*"))
    part.write_bytes(part.read_bytes()[:-1])
    found = call(job, "verify", "run")
    assert found.returncode == 2 and found.stdout.count("DAMAGED") == 2 and part.name in found.stdout
    with pytest.raises(CheckpointError, match=part.name):
        newest_good(job / "run", 4)  # asked for by its number
    done = call(job, "resume", "run")
    assert done.returncode == 0, done.stderr
    assert f"{part.name} is damaged" in done.stdout and "complete is missing" in done.stdout
    assert losses(job / "run")[6:] == straight[2:]
    assert verify(job / "run").healthy


def test_another_number_of_steps_needs_a_flag_and_names_both_learning_rates(job):
    """HO-12. Linear from 0.01 without warm-up: step s of n has 0.01 (1 - (s - 1) / n)."""
    linear = ["train.schedule=linear", "train.warmup=0", "train.learning_rate=0.01"]
    linear += ["train.save_every=1", "train.max_steps=4"]
    assert call(job, "train", "recipe.yaml", "train.epochs=9", *linear).returncode == 0
    finished = call(job, "resume", "run")
    assert finished.returncode == 2 and "fullshard resume run --steps N" in finished.stderr
    config = json.loads((job / "run/config.json").read_text())
    config["train"]["max_steps"] = 8
    (job / "run/config.json").write_text(json.dumps(config))
    manifest = list_checkpoints(job / "run")[-1][1] / "manifest.json"
    assert json.loads(manifest.read_text())["trainer"]["num_steps"] == 4
    (job / "earlier").mkdir()
    os.rename(job / "run/checkpoints/step_000004", job / "earlier/step_000004")  # go on from step 3
    refused = call(job, "resume", "run")
    assert refused.returncode == 2
    assert "planned for 4 steps, 8 are meant now" in refused.stderr
    assert "step 4 was 0.0025 and would be 0.00625" in refused.stderr, refused.stderr
    done = call(job, "resume", "run", "--steps", "8")
    assert done.returncode == 0, done.stderr
    assert "8 steps instead of 4: the learning rate of step 4 was 0.0025 and is 0.00625" in done.stdout
    rates = {record["step"]: record["learning_rate"] for record in _records(job / "run") if record["kind"] == "train"}
    assert [rates[step] for step in (3, 4, 8)] == pytest.approx([0.005, 0.00625, 0.00125])


def test_best_checkpoint_stays(job):
    changes = ["train.keep_last=1", "train.keep_best=true", "train.eval_every=2", "data.eval=rows.jsonl"]
    assert call(job, "train", "recipe.yaml", *changes, "train.learning_rate=0.5").returncode == 0
    records = [record for record in _records(job / "run") if record["kind"] == "eval" and record["step"]]
    best = min(records, key=lambda record: record["loss"])["step"]
    assert {step for step, _ in list_checkpoints(job / "run")} == {best, 6}
    assert best != 6  # a learning rate that spoils the model


def _records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    job = make_job(tmp_path_factory.mktemp("lora"), 12)
    done = call(job, "train", "recipe.yaml", "method=lora", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    return job / "run"


def test_lora_checkpoints_open_in_peft(lora_run):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = list_checkpoints(lora_run)[-1][1]
    base = AutoModelForCausalLM.from_pretrained(lora_run.parent / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder).eval()
    proof = load_file(folder / "proof.safetensors")
    with torch.no_grad():
        assert torch.allclose(model(input_ids=proof["tokens"]).logits[0], proof["logits"], atol=1e-5)
    assert any(bool(value.any()) for name, value in model.named_parameters() if "lora_B" in name)


def test_every_damage_is_found_and_named(lora_run):
    """Flips of one byte, cuts, deletions and strangers, at random over all files of a LoRA checkpoint."""
    folder, draw = list_checkpoints(lora_run)[-1][1], random.Random(0)
    files = sorted(folder.iterdir())
    assert {path.name for path in files} >= {"manifest.json", "complete", "adapter_model.safetensors"}
    for number in range(150):
        path = files[number % len(files)]
        content = path.read_bytes()
        place = draw.randrange(len(content))
        kind = draw.choice(["flip", "cut", "delete", "stranger"])
        if kind == "flip":
            path.write_bytes(content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :])
        elif kind == "cut":
            path.write_bytes(content[:place])
        elif kind == "delete":
            path.unlink()
        else:
            path = folder / "part_00009.safetensors"
            path.write_bytes(content)
        ((_, problem),) = verify(folder).found
        assert path.name in problem, (kind, path.name, place, problem)
        path.unlink(missing_ok=True) if kind == "stranger" else path.write_bytes(content)
    assert verify(folder).healthy
