"""Several processes write one merge: the same bytes, also where one is killed; no process outlives the merge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_by_hand import change_base_dtype, full_run, load_fp32, lora_run, rehash
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_tokenizer

from fullshard.errors import MergeError
from fullshard.merge import job
from fullshard.merge.job import merge_run

SHARD_BYTES = 8_000


@pytest.fixture
def base(tmp_path) -> Path:
    return make_tokenizer(make_model(tmp_path / "base"))


@pytest.fixture
def started(monkeypatch) -> list:
    """Merges of any size are written by three processes; the children as they are started."""
    children, start = [], job.subprocess.Popen
    monkeypatch.setattr(job, "ALONE_BYTES", 0)
    monkeypatch.setattr(job, "num_cores", lambda: 3)
    monkeypatch.setattr(job.subprocess, "Popen", lambda *a, **k: children.append(start(*a, **k)) or children[-1])
    return children


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


@pytest.mark.parametrize("kind", ["full", "LoRA in bf16", "another tool's"])
def test_the_same_bytes(tmp_path, monkeypatch, base, started, kind):
    place, more = tmp_path / "run", {"shard_bytes": SHARD_BYTES, "dtype": "fp32"}
    if kind == "full":
        full_run(place, base)
    elif kind == "LoRA in bf16":
        change_base_dtype(base, torch.bfloat16)
        lora_run(place, base, "all-linear")
        more = {"shard_bytes": SHARD_BYTES // 2}
    else:
        tuned = load_fp32(base)
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.mul_(1.1)
        place.mkdir()
        torch.save(tuned.state_dict(), place / "pytorch_model.bin")
        more["base"] = str(base)
    several = files_of(merge_run(place, tmp_path / "several", **more).folder)
    assert len(started) == 2 and [child.returncode for child in started] == [0, 0]
    monkeypatch.setattr(job, "num_cores", lambda: 1)
    assert files_of(merge_run(place, tmp_path / "alone", **more).folder) == several and len(several) > 4
    assert len(started) == 2


def test_what_a_killed_child_leaves_is_written_here(tmp_path, base, started, monkeypatch):
    """It had begun a file, which the parent leaves to it until it is gone."""
    _, tensors = full_run(tmp_path / "run", base)
    write, how = job.weights.write_weights, {"dtype": "fp32", "shard_bytes": SHARD_BYTES}
    with monkeypatch.context() as patch:
        patch.setattr(job, "num_cores", lambda: 1)
        alone = files_of(merge_run(tmp_path / "run", tmp_path / "alone", **how).folder)
    second, begun = sorted(name for name in alone if name.endswith(".safetensors"))[1], []

    def kill_first(folder, *given, **how):
        for child in started:
            child.kill()
            child.wait()
        if not how.get("alone", True):
            (folder / f"{second}.part").write_bytes(b"begun")
            begun.append(folder)
        return write(folder, *given, **how)

    monkeypatch.setattr(job.weights, "write_weights", kill_first)
    merged = merge_run(tmp_path / "run", **how).folder
    assert [child.returncode for child in started] == [-9, -9] and len(begun) == 1
    assert files_of(merged) == alone
    merged = load_fp32(merged)
    assert all(torch.equal(value, tensors[name]) for name, value in merged.named_parameters())


def test_what_a_child_refuses_is_said_here(tmp_path, base, started):
    """Values too large for fp16 in a file of the second process only."""
    checkpoint, _ = full_run(tmp_path / "run", base)
    for part in checkpoint.glob("part_*"):
        large = {name: value * 1e6 if "layers.0.mlp.up" in name else value for name, value in load_file(part).items()}
        save_file(large, part)
    rehash(checkpoint)
    with pytest.raises(MergeError, match=r"layers\.0\.mlp\.up_proj.*float16"):
        merge_run(tmp_path / "run", dtype="fp16", shard_bytes=SHARD_BYTES)
    assert started and all(child.poll() is not None for child in started)
    assert not [path for path in (tmp_path / "run").iterdir() if "merged" in path.name]


def test_a_child_whose_parent_is_gone_ends(tmp_path, base):
    full_run(tmp_path / "run", base)
    (tmp_path / "out").mkdir()
    given = json.dumps([str(tmp_path / "run"), 3, None, str(tmp_path / "out"), "fp32", SHARD_BYTES])
    command = [sys.executable, "-c", "from fullshard.merge.job import be_writer; be_writer()", given]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 1
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.wait() == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 4
