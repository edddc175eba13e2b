"""A disk that takes no more: named, with the next command, and nothing half written is taken for whole."""

from __future__ import annotations

import errno
import resource
from types import SimpleNamespace

import pytest
import torch
from tiny_models import ONE_RANK

import fullshard
from fullshard import cli
from fullshard.checkpoint.ranges import PROOF, Saver
from fullshard.errors import CheckpointError
from fullshard.run_folder import list_checkpoints
from fullshard.shard import Shard

SHARD = Shard("w", (5000,), 0, 5000, torch.zeros(5000), None, trainable=True, is_copy=False)  # 20 kB
SHARDED = SimpleNamespace(shards=lambda: [SHARD])
FACTS = {"method": "full", "base_model": "/m", "trainer": {}}


def save(run, step):
    proof = {"tokens": torch.zeros(1, 2, dtype=torch.long), "logits": torch.zeros(2, 3)}
    return Saver(run, ONE_RANK, keep_last=2).save(step, SHARDED, {}, FACTS, {PROOF: proof})


@pytest.mark.parametrize("limit_bytes", [10_000, 200])
def test_a_checkpoint_that_does_not_fit_keeps_the_older_one(tmp_path, limit_bytes):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(CheckpointError, match="step_000002 cannot be written") as caught:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"fullshard resume {tmp_path}" in caught.value.hint
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    save(tmp_path, 2)  # once there is room
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 2]


def test_a_full_disk_is_the_users_to_solve(monkeypatch, capsys):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fullshard, "load_config", full, raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "recipe.yaml"])
    assert stopped.value.code == 2
    assert "The disk takes no more: No space left on device." in capsys.readouterr().err
