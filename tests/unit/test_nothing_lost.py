"""Attacks on checkpoints: what a dying disk, another run or a stranger's hand leaves is refused by name, and no rule of
keeping loses what is good."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import ONE_RANK, make_model, make_tokenizer

from fullshard.checkpoint import format as checkpoint_format
from fullshard.checkpoint.format import COMPLETE, MANIFEST, hash_file, newest_good, verify
from fullshard.checkpoint.ranges import OwnCheckpoint, Saver, load_checkpoint
from fullshard.errors import CheckpointError, DataError, ModelError, UserError
from fullshard.model.load import WeightFiles, read_header
from fullshard.run_folder import checkpoint_path, list_checkpoints, write_json
from fullshard.shard import Shard


def model_of(size, value=0.0):
    shard = Shard("w", (size,), 0, size, torch.full((size,), value), None, trainable=True, is_copy=False)
    return SimpleNamespace(shards=lambda: [shard], value=shard.value)


def save(run, step, loss=None, keep_last=1, keep_best=False, size=100, value=0.0):
    facts = {"method": "full", "base_model": "/m", "trainer": {"last_eval": loss}}
    Saver(run, ONE_RANK, keep_last, keep_best).save(step, model_of(size, value), {}, facts, {})


def steps(run):
    return [step for step, _ in list_checkpoints(run)]


def flip(folder):
    part = next(folder.glob("part_*"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x01")


def remark(folder, **changes):
    """Change a manifest, with the mark that fits it: no damage, but a stranger's hand."""
    values = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(values))
    write_json(folder / COMPLETE, {MANIFEST: hash_file(folder / MANIFEST)})


# What is kept


def test_keep_best_lives_with_a_folder_that_a_kill_left_half_deleted(tmp_path):
    for step, loss in ((2, 1.0), (4, 2.0)):
        save(tmp_path, step, loss, keep_last=2, keep_best=True)
    (checkpoint_path(tmp_path, 2) / COMPLETE).unlink()
    save(tmp_path, 6, 3.0, keep_last=2, keep_best=True)
    assert steps(tmp_path)[-2:] == [4, 6]


def test_a_loss_that_is_nan_is_not_the_best(tmp_path):
    for step, loss in enumerate((math.nan, 1.0, 2.0, 3.0), 1):
        save(tmp_path, step, loss, keep_best=True)
    assert steps(tmp_path) == [2, 4]


def test_what_was_just_saved_is_never_removed(tmp_path):
    """Step 6 is damaged, so that the run went on from the best, step 2, and is stopped at step 3."""
    save(tmp_path, 2, 1.0, keep_best=True)
    save(tmp_path, 6, 2.0, keep_best=True)
    flip(checkpoint_path(tmp_path, 6))
    assert newest_good(tmp_path)[0] == 2
    save(tmp_path, 3, 2.0, keep_best=True)
    assert newest_good(tmp_path)[0] == 3


def test_an_older_checkpoint_moved_to_another_disk_does_not_end_the_run(tmp_path):
    save(tmp_path, 1)
    shutil.move(checkpoint_path(tmp_path, 1), tmp_path / "elsewhere")
    checkpoint_path(tmp_path, 1).symlink_to(tmp_path / "elsewhere")
    save(tmp_path, 2)
    assert steps(tmp_path)[-1] == 2 and (tmp_path / "elsewhere").is_dir()


def test_what_another_process_reads_is_pruned_after_a_later_save(tmp_path):
    save(tmp_path, 1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(checkpoint_path(tmp_path, 1))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        save(tmp_path, 2)
        save(tmp_path, 3)
        assert steps(tmp_path) == [1, 3] and verify(tmp_path).healthy
    finally:
        holder.kill()
        holder.communicate()
    save(tmp_path, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


HOLD = """
import sys
from pathlib import Path
from fullshard.run_folder import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_checkpoint_that_is_pruned_while_a_run_is_verified_is_no_damage(tmp_path, monkeypatch):
    save(tmp_path, 1, keep_last=2)
    save(tmp_path, 2, keep_last=2)
    read = checkpoint_format.read_manifest

    def pruned(folder, hashes=False):
        if folder.name == "step_000001":
            shutil.rmtree(folder)
        return read(folder, hashes)

    monkeypatch.setattr(checkpoint_format, "read_manifest", pruned)
    found = verify(tmp_path)
    assert found.healthy and [Path(place).name for place, _ in found.found] == ["step_000002"]


# A full disk


def test_a_disk_that_is_full_at_the_nth_write_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    """Each write, fsync and rename of a save in turn, half done where it can be: a limit of a file's size
    (tests/ranks/test_saving.py) falls into the largest file alone, which is written first."""
    from fullshard.checkpoint import ranges

    extra = {"proof.safetensors": {"tokens": torch.zeros(4)}, "adapter_config.json": "{}"}
    facts = {"method": "lora", "base_model": "/m", "trainer": {}}
    calls, failed = [], []

    def at_most(allowed, call, half):
        def limited(*arguments, **named):
            calls.append(call.__name__)
            if len(calls) > allowed:
                half(*arguments)
                failed.append(str(arguments[0] if isinstance(arguments[0], Path) else arguments[-1]))
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments, **named)

        return limited

    for allowed in range(40):
        run = tmp_path / str(allowed)
        save(run, 1)
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(
                Path, "write_text", at_most(allowed, Path.write_text, lambda path, *_: path.write_bytes(b"{"))
            )
            patched.setattr(
                ranges, "save_file", at_most(allowed, save_file, lambda _, path, *__: path.write_bytes(b"x"))
            )
            patched.setattr(os, "fsync", at_most(allowed, os.fsync, lambda *_: None))
            patched.setattr(os, "replace", at_most(allowed, os.replace, lambda *_: None))
            try:
                Saver(run, ONE_RANK, 1).save(2, model_of(100, 2.0), {}, facts, extra)
                break
            except CheckpointError as error:
                assert "step_000002 cannot be written: No space left on device" in error.message
        assert verify(run).healthy and newest_good(run)[0] == steps(run)[-1], (allowed, calls)
    assert steps(run) == [2] and verify(run).healthy and allowed > 15
    hit = " ".join(failed)
    for name in (
        "part_00000",
        "proof",
        "adapter_config",
        "adapter_model",
        "rank_00000",
        MANIFEST,
        COMPLETE,
        "step_000002",
    ):
        assert name in hit


def test_a_save_that_does_not_fit_is_refused_before_it_is_written(tmp_path, monkeypatch):
    """100 elements of fp32 are 400 bytes; with PEFT's files beside them 800."""
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=399))
    with pytest.raises(CheckpointError, match=r"step_000002 needs .* Older checkpoints are as they were"):
        save(tmp_path, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=799))
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step_000004 needs"):
        Saver(tmp_path, ONE_RANK, 1).save(4, model_of(100), {}, {}, {"adapter_config.json": "{}"})
    assert steps(tmp_path) == [3] and verify(tmp_path).healthy


# What is loaded


@pytest.mark.parametrize("size", [60, 160])
def test_a_checkpoint_of_another_shape_is_refused(tmp_path, size):
    save(tmp_path, 1, size=size, value=1.0)
    with pytest.raises(CheckpointError):
        load_checkpoint(checkpoint_path(tmp_path, 1), model_of(100, 7.0), {})


def test_a_file_that_cannot_be_read_is_named_and_the_one_before_taken(tmp_path):
    save(tmp_path, 2, keep_last=2)
    save(tmp_path, 4, keep_last=2)
    mark = checkpoint_path(tmp_path, 4) / COMPLETE
    mark.unlink()
    mark.symlink_to("/proc/self/mem")  # a regular file whose first byte cannot be read
    number, _, problems = newest_good(tmp_path)
    assert number == 2 and COMPLETE in problems[0]
    assert not verify(tmp_path).healthy


def test_a_piece_lies_in_a_listed_file_of_the_folder(tmp_path):
    save(tmp_path, 1, value=3.0)
    folder = checkpoint_path(tmp_path, 1)
    shutil.move(folder / "part_00000.safetensors", tmp_path / "other.safetensors")
    (stored,) = json.loads((folder / MANIFEST).read_text())["tensors"]
    stored["pieces"][0]["file"] = "../../other.safetensors"
    remark(folder, files={}, tensors=[stored])
    assert not verify(folder).healthy
    with pytest.raises(CheckpointError):
        OwnCheckpoint(folder)


def test_a_link_that_leaves_a_checkpoint_is_refused(tmp_path):
    save(tmp_path, 1)
    part = checkpoint_path(tmp_path, 1) / "part_00000.safetensors"
    shutil.move(part, tmp_path / "other")
    part.symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="part_00000"):
        OwnCheckpoint(checkpoint_path(tmp_path, 1))


@pytest.mark.parametrize("name", ["../m/model.safetensors", "{}/m/model.safetensors"])
def test_a_models_index_names_files_of_its_folder(tmp_path, name):
    model, other = make_model(tmp_path / "m"), tmp_path / "other"
    other.mkdir()
    shutil.copy(model / "config.json", other)
    index = {"weight_map": dict.fromkeys(read_header(model / "model.safetensors"), name.format(tmp_path))}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        WeightFiles(other)


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": GOOD | {"data_offsets": [0, 17]}},
        {"a": GOOD | {"data_offsets": [-16, 0]}},
        {"a": GOOD | {"data_offsets": [16, 32]}},
        {"a": GOOD | {"data_offsets": [16, 0]}},
        {"a": GOOD | {"data_offsets": [0, 1 << 70], "shape": [1 << 68]}},
        {"a": GOOD | {"dtype": "F4"}},
        {"a": GOOD | {"dtype": ["F32"]}},
        {"a": "x"},
        {"a": {}},
        [1],
        None,
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [NaN, 16]}}',
        {"a": GOOD | {"shape": [-2, -2]}},
        {"a": GOOD | {"shape": [4.0]}},
    ],
)
def test_a_header_that_does_not_fit_its_file_is_named(tmp_path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "part.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=r"part\.safetensors is damaged"):
        read_header(path, CheckpointError)


@pytest.mark.parametrize("length", [17, 1 << 40, (1 << 64) - 1])
def test_a_headers_length_is_checked_before_it_is_read(tmp_path, length):
    path = tmp_path / "part.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + bytes(16))
    with pytest.raises(CheckpointError, match=f"a header of {length} bytes in a file of 24"):
        read_header(path, CheckpointError)


# What is verified


@pytest.mark.parametrize("place", ["", "nothing", "file", "/proc/self", "/dev/null", "a\0b"])
def test_strange_places_hold_nothing_to_verify(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="holds nothing that can be verified"):
        verify(place)


@pytest.mark.parametrize("facts", [{}, {"output_xxh3": None}, {"output_xxh3": []}])
def test_a_damaged_merge_json_is_named(tmp_path, facts):
    (tmp_path / "merge.json").write_text(json.dumps(facts))
    assert not verify(tmp_path).healthy


def test_a_run_without_checkpoints_is_not_healthy(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError):
        verify(tmp_path)


# Nothing is executed

SPY = "open({!r}, 'w').write('x')\nfrom transformers import LlamaConfig, PreTrainedTokenizerFast\n"


@pytest.mark.parametrize("what", ["config", "tokenizer"])
def test_code_in_a_model_folder_is_not_run_whatever_is_typed(tmp_path, monkeypatch, what):
    from fullshard.data.chat import load_tokenizer
    from fullshard.model.load import read_config

    folder, spy = make_tokenizer(make_model(tmp_path / "model")), tmp_path / "it_ran"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    code = (
        SPY.format(str(spy))
        + "class C(LlamaConfig):\n    model_type = 'c'\nclass T(PreTrainedTokenizerFast):\n    pass\n"
    )
    (folder / "code.py").write_text(code)
    file = folder / {"config": "config.json", "tokenizer": "tokenizer_config.json"}[what]
    changes = {
        "config": {"model_type": "c", "auto_map": {"AutoConfig": "code.C"}},
        "tokenizer": {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}},
    }[what]
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with contextlib.suppress(ModelError):
        read_config(folder) if what == "config" else load_tokenizer(folder)
    assert not spy.exists()


@pytest.mark.parametrize(
    "expression", ["''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os.mkdir(spy)"]
)
def test_a_chat_template_is_rendered_in_the_sandbox(tmp_path, expression):
    from fullshard.data.chat import Renderer, load_tokenizer

    spy = tmp_path / "it_ran"
    template = (
        "{% set spy = '" + str(spy) + "' %}{{ " + expression + " }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "model", chat_template=template))
    with pytest.raises(DataError, match=r"access to attribute '__(class|init)__' of '(str|type)' object is unsafe"):
        Renderer(tokenizer).prompt([{"role": "user", "content": "red"}])
    assert not spy.exists()
