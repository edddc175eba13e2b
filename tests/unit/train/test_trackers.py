"""metrics.jsonl always; trackers through one function each, told of what is missing before any work."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from fullshard.errors import ConfigError
from fullshard.train.metrics import MetricsLog

STEP = {"loss": 2.5, "tokens_per_second": 10.0, "share_of_peak": 0.5, "memory_bytes": 1, "seconds": 1.0, "note": "text"}


def stand_in(name: str, calls: list) -> ModuleType:
    """A wandb or swanlab that notes what it is asked for."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    log = lambda values, step: calls.append((name, step, values))  # noqa: E731
    finish = lambda: calls.append((name, "finish"))  # noqa: E731
    module.init = lambda **settings: calls.append((name, "init", settings)) or SimpleNamespace(log=log, finish=finish)
    module.log, module.finish = log, finish
    return module


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_tracker_gets_every_number_of_a_record(tmp_path, monkeypatch, name):
    calls: list = []
    monkeypatch.setitem(sys.modules, name, stand_in(name, calls))
    log = MetricsLog(tmp_path / "metrics.jsonl", 2, 0, True, True, [name])
    log.step(step=1, **STEP)
    log.record("eval", step=1, loss=3.0, rows=4)
    log.close()
    assert [call[1] for call in calls] == ["init", 1, 1, "finish"]
    assert calls[0][2]["project"] == "fullshard"
    assert calls[1][2]["train/loss"] == 2.5 and "train/note" not in calls[1][2]
    assert calls[2][2]["eval/loss"] == 3.0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "eval"]  # the file has everything, with or without trackers


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    log = MetricsLog(tmp_path / "metrics.jsonl", 1, 0, True, True, ["tensorboard"])
    log.step(step=1, **STEP)
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_what_is_not_installed_is_said_with_the_command(tmp_path, monkeypatch):
    """On every rank, also on those that write nothing."""
    for name in ("tensorboard", "wandb", "swanlab"):
        monkeypatch.setitem(sys.modules, name, None)
        for active in (True, False):
            with pytest.raises(ConfigError) as caught:
                MetricsLog(tmp_path / "metrics.jsonl", 1, 0, active, True, [name])
            assert name in caught.value.message and f"pip install {name}" in caught.value.hint
    MetricsLog(tmp_path / "metrics.jsonl", 1, 0, True, True, []).close()


def test_only_the_first_rank_starts_trackers(tmp_path, monkeypatch):
    calls: list = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in("wandb", calls))
    MetricsLog(tmp_path / "metrics.jsonl", 1, 0, False, True, ["wandb"]).close()
    assert not calls
