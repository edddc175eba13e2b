"""A merge that was killed goes on where it was, and never publishes what it finds unproven."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest
import torch
from checkpoint_by_hand import full_run, load_fp32
from tiny_models import make_model, make_tokenizer

from fullshard.errors import ConfigError, MergeError
from fullshard.merge.job import merge_run
from fullshard.run_folder import claim_run, write_json

SHARD_BYTES = 8_000
KILLED = f"""
import os, signal, sys
from fullshard.merge import job, weights
inner, count = weights._write_file, []
def write(path, tensors, mode):
    if len(count) == 2:
        path.write_bytes(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    count.append(inner(path, tensors, mode))
weights._write_file = write
job.merge_run(sys.argv[1], dtype="fp32", shard_bytes={SHARD_BYTES})
"""


def inodes(folder):
    return {path.name: path.stat().st_ino for path in sorted(folder.glob("*.safetensors*"))}


def test_it_goes_on_where_it_was_killed(tmp_path):
    base = make_tokenizer(make_model(tmp_path / "base"))
    run, partial = tmp_path / "run", tmp_path / "run/.merged.partial"
    _, weights = full_run(run, base)
    done = subprocess.run([sys.executable, "-c", KILLED, str(run)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = inodes(partial)
    assert len(left) == 3 and sum(name.endswith(".part") for name in left) == 1 and not (run / "merged").exists()
    shutil.copytree(partial, tmp_path / "kept")
    with claim_run(partial), pytest.raises(ConfigError, match="is being written now"):
        merge_run(run, dtype="fp32", shard_bytes=SHARD_BYTES)
    assert inodes(partial) == left
    merged = merge_run(run, dtype="fp32", shard_bytes=SHARD_BYTES).folder
    found = inodes(merged)
    assert len(found) > 4 and {name: found.get(name, 0) for name in left if "part" not in name}.items() <= left.items()
    assert not partial.exists() and not {"lock", "made_from.json"} & {path.name for path in merged.iterdir()}
    for name, value in load_fp32(merged).named_parameters():
        assert torch.equal(value, weights[name]), name
    # what was left is damaged: the proof refuses it, and it is not met again
    shutil.copytree(tmp_path / "kept", tmp_path / "run/.again.partial")
    path = next(place for place in (tmp_path / "run/.again.partial").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(MergeError, match="is not what was written"):
        merge_run(run, run / "again", dtype="fp32", shard_bytes=SHARD_BYTES)
    assert not list(run.glob("*again*")) and not list(run.glob(".again*"))
    merge_run(run, run / "again", dtype="fp32", shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("changed", ["dtype", "shard size", "input"])
def test_what_is_left_of_other_inputs_is_cleared(tmp_path, monkeypatch, changed):
    """The remains of a first merge, whose files would all be taken, are those of another."""
    from fullshard.merge import job

    base = make_tokenizer(make_model(tmp_path / "base"))
    run, partial = tmp_path / "run", tmp_path / "run/.merged.partial"
    full_run(run, base)
    recorded = []
    inner = job.unfinished_folder
    monkeypatch.setattr(job, "unfinished_folder", lambda *given: recorded.append(given[-1]) or inner(*given))
    settings = {"dtype": "fp32", "shard_bytes": SHARD_BYTES}
    merged = merge_run(run, **settings).folder
    shutil.copytree(merged, partial)
    shutil.rmtree(merged)
    write_json(partial / "made_from.json", {"made_from": recorded[0]})
    left = inodes(partial)
    if changed == "dtype":
        settings["dtype"] = "bf16"
    elif changed == "shard size":
        settings["shard_bytes"] = SHARD_BYTES * 2
    else:
        (base / "config.json").touch()
    written = []
    write = job.weights.write_weights
    monkeypatch.setattr(
        job.weights,
        "write_weights",
        lambda folder, *more, **how: written.append(inodes(folder)) or write(folder, *more, **how),
    )
    found = inodes(merge_run(run, **settings).folder)
    assert written[0] == {} and len(left) > 4 and found
    # and nothing of the same inputs is written twice
    shutil.copytree(run / "merged", partial)
    shutil.rmtree(run / "merged")
    write_json(partial / "made_from.json", {"made_from": recorded[-1]})
    left = inodes(partial)
    assert inodes(merge_run(run, **settings).folder) == left
