"""JSON files of a run that a crash or an editor has damaged are named, never a traceback."""

from __future__ import annotations

import json

import pytest

from fullshard.checkpoint.format import COMPLETE, MANIFEST, hash_file, read_manifest
from fullshard.errors import CheckpointError, ConfigError, UserError
from fullshard.run_folder import read_json, write_json

WHOLE = {"format": 2, "step": 1, "method": "full", "base_model": "/m", "tensors": [], "files": {}}


def put(folder, values):
    (folder / MANIFEST).write_text(json.dumps(values))
    write_json(folder / COMPLETE, {MANIFEST: hash_file(folder / MANIFEST)})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\0", b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
        read_json(path)


@pytest.mark.parametrize(
    "change", [{"tensors": None}, {"tensors": [{}]}, {"tensors": [3]}, {"files": []}, {"step": ...}]
)
def test_a_manifest_of_the_wrong_shape_is_named(tmp_path, change):
    values = {key: value for key, value in {**WHOLE, **change}.items() if value is not ...}
    put(tmp_path, WHOLE)
    assert read_manifest(tmp_path).step == 1
    put(tmp_path, values)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)


def test_a_file_outside_the_checkpoint_is_refused(tmp_path):
    (tmp_path / "other").write_text("x")
    folder = tmp_path / "step"
    folder.mkdir()
    put(folder, {**WHOLE, "files": {"../other": {"bytes": 1, "xxh3": ""}}})
    with pytest.raises(UserError, match="damaged"):
        read_manifest(folder)
