"""Several nodes: two torchrun agents on loopback, one rank each, and what the ranks agree on before they train."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from rank_pool import free_port, pool
from safetensors.torch import load_file
from tiny_models import make_job

from fullshard import load_config, merge_run
from fullshard.config import config_from_dict
from fullshard.launch import prepare_run
from fullshard.run_folder import CONFIG, PLAN, list_checkpoints, read_json
from fullshard.train.loop import run_rank

ENDED_WITHIN_SECONDS = 200  # of a busy machine
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a tiny model, data and a recipe of 4 steps."""
    return make_job(tmp_path, 8)


class Nodes:
    """Two launcher agents, as two machines would run them; ``folders`` are their working directories."""

    def __init__(self, arguments: list[str], folders: list[Path], backend: str = "c10d", restarts: int = 0) -> None:
        port = free_port()
        self.agents = []
        for node, folder in enumerate(folders):
            place = {
                "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"],
                "static": [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"],
            }[backend]
            with open(folder / f"out_{node}.txt", "w") as out, open(folder / f"errors_{node}.txt", "w") as errors:
                command = [*TORCHRUN, *place, f"--max-restarts={restarts}", "-m", "fullshard", *arguments]
                self.agents.append(subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=errors))
        self.folders = folders

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            for process in [*self.ranks(agent), agent]:
                process.kill()
            agent.wait()

    def ranks(self, agent: subprocess.Popen) -> list[psutil.Process]:
        try:
            return psutil.Process(agent.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait(self) -> list[int]:
        deadline = time.monotonic() + ENDED_WITHIN_SECONDS
        return [agent.wait(deadline - time.monotonic()) for agent in self.agents]

    def texts(self, name: str) -> list[str]:
        return [(folder / f"{name}_{node}.txt").read_text() for node, folder in enumerate(self.folders)]


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def train_run_of_pool(ranks, run: str) -> None:
    """A plain run: what a rank does once the launcher has prepared, without nodes."""
    folder = Path(run)
    values = {key: value for key, value in read_json(folder / CONFIG).items() if key != "asked_model"}
    run_rank(folder, config_from_dict(values), read_json(folder / PLAN), ranks, None, True)


def test_two_nodes_train_as_one(job, monkeypatch):
    with Nodes(["train", "recipe.yaml"], [job, job]) as nodes:
        assert nodes.wait() == [0, 0], nodes.texts("errors")
        out = nodes.texts("out")
    monkeypatch.chdir(job)
    prepare_run(load_config("recipe.yaml", ["output=plain"]), 2, True, "", [])
    pool(2).run(train_run_of_pool, str(job / "plain"))
    assert losses(job / "run") == pytest.approx(losses(job / "plain"), rel=1e-6)
    assert len(losses(job / "run")) == 4
    assert sorted(text.count("trained 4 steps") for text in out) == [0, 1]  # one rank speaks
    assert sorted(text.count("Next: fullshard merge run") for text in out) == [0, 1]
    assert [step for step, _ in list_checkpoints(job / "run")] == [2, 4]
    assert not [path for path in (job / "run").iterdir() if path.name.startswith(".")]
    merged, plain = (load_file(merge_run(job / run).folder / "model.safetensors") for run in ("run", "plain"))
    assert merged.keys() == plain.keys()
    assert all(torch.allclose(merged[name], plain[name], rtol=0, atol=1e-6) for name in merged)


def test_folders_that_are_not_shared_are_noticed_before_anything_is_prepared(job, tmp_path_factory):
    other = tmp_path_factory.mktemp("node1")
    shutil.copytree(job, other, dirs_exist_ok=True)
    with Nodes(["train", "recipe.yaml"], [job, other], backend="static") as nodes:
        assert nodes.wait() == [1, 1]
        errors = nodes.texts("errors")
    for text in errors:
        assert text.count("Error: The run folder of rank 0") == 1
        line = next(line for line in text.splitlines() if line.startswith("Error: The run folder"))
        assert f"{socket.gethostname()} ({other / 'run'})" in line and str(job / "run") in line
        assert "-> Put `output` on a file system that all nodes share" in text
    assert not (job / "run").exists() and not (other / "run").exists()


def test_an_error_of_one_node_ends_both_with_the_same_words(job, tmp_path_factory):
    """The second node has no model at the recipe's path."""
    other = tmp_path_factory.mktemp("node1")
    shutil.copy(job / "recipe.yaml", other)
    with Nodes(["train", "recipe.yaml", f"output={job / 'run'}"], [job, other], backend="static") as nodes:
        started = time.monotonic()
        assert nodes.wait() == [1, 1]
        assert time.monotonic() - started < ENDED_WITHIN_SECONDS
        errors = nodes.texts("errors")
    for text in errors:
        assert text.count("Error: No model folder at model") == 1
    assert not (job / "run").exists()


def test_an_elastic_restart_goes_on_in_the_same_run(job):
    recipe = ["train", "recipe.yaml", "train.epochs=15", "train.save_every=5"]
    with Nodes(recipe, [job, job], restarts=1) as nodes:
        deadline = time.monotonic() + ENDED_WITHIN_SECONDS
        while not list_checkpoints(job / "run"):
            assert time.monotonic() < deadline and nodes.agents[0].poll() is None, nodes.texts("errors")
            threading.Event().wait(0.02)
        (victim,) = nodes.ranks(nodes.agents[1])
        victim.send_signal(signal.SIGKILL)
        assert nodes.wait() == [0, 0], nodes.texts("errors")
        assert "resumed at step" in "".join(nodes.texts("out"))
    again = [*TORCHRUN[:3], f"--master-port={free_port()}", "-m", "fullshard", *recipe]
    refused = subprocess.run(again, cwd=job, env=ENVIRONMENT, capture_output=True, text=True)
    assert "The output folder run exists already." in refused.stderr  # a new launch is no restart
    assert list_checkpoints(job / "run")[-1][0] == 30
