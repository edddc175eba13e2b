"""JSON files of a run that a crash or an editor has damaged are named, never a traceback."""

from __future__ import annotations

import json

import pytest

from fullshard.checkpoint.format import MANIFEST, read_manifest
from fullshard.errors import CheckpointError, ConfigError, UserError
from fullshard.run_folder import read_json

WHOLE = {"format": 1, "step": 1, "method": "full", "base_model": "/m", "tensors": [], "files": {}}


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
    (tmp_path / MANIFEST).write_text(json.dumps(WHOLE))
    assert read_manifest(tmp_path).step == 1
    (tmp_path / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)


def test_a_file_outside_the_checkpoint_is_refused(tmp_path):
    (tmp_path / "other").write_text("x")
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({**WHOLE, "files": {"../other": {"bytes": 1, "blake2b": ""}}}))
    with pytest.raises(UserError, match="damaged"):
        read_manifest(folder)
