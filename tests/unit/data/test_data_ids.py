"""Data set ids: fetched from a hub on loopback, from a stand-in of ModelScope's package, or not to be had."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from all_rows import read_source
from hub_server import HubServer, environment

from fullshard.config import DataSection
from fullshard.errors import DataError


def section(**keys) -> DataSection:
    return DataSection(train="unused", **keys)


@pytest.fixture
def offline(monkeypatch):
    """Both libraries read HF_HUB_OFFLINE once, when they are imported."""
    import datasets
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["owner/red-and-blue", "owner/red-and-blue:test", "owner/red-and-blue:main:test"])
def test_an_id_without_network(tmp_path, monkeypatch, offline, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        read_source(name, section())
    assert caught.value.message.startswith(
        "owner/red-and-blue is no file or folder here, and cannot be fetched from http"
    )
    for way in ("HF_ENDPOINT=", "data.source=modelscope", "data.train=FILE or FOLDER"):
        assert way in caught.value.hint


READ_IDS = """
import json, sys
from fullshard.config import DataSection
from fullshard.data.sources import hash_content, iterate_rows
for name in sys.argv[1:]:
    rows = [[row.origin, row.messages[0]["content"]] for row in iterate_rows(name, DataSection(train="unused"))]
    print(json.dumps([rows, len(list(hash_content(name, DataSection(train="unused"))))]))
"""


def test_an_id_is_fetched_from_a_hub(tmp_path):
    """The real ``datasets`` against a hub on loopback: train, another split, a subset; the second reading is cached."""
    (tmp_path / "served").mkdir()
    for name, words in (("train", "ab"), ("test", "c")):
        lines = [json.dumps({"question": word, "answer": "x"}) for word in words]
        (tmp_path / "served" / f"{name}.jsonl").write_text("\n".join(lines))
    names = ["acme/rows", "acme/rows:test", "acme/rows:default:test"]
    with HubServer({"acme/rows": tmp_path / "served"}) as hub:
        surroundings = environment(tmp_path / "home", hub.address)
        command = [sys.executable, "-c", READ_IDS, *names]
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr
        assert hub.downloads("datasets/acme/rows") == ["train.jsonl", "test.jsonl"]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [[["acme/rows:train:1", "a"], ["acme/rows:train:2", "b"]], 1],
        [[["acme/rows:test:1", "c"]], 1],
        [[["acme/rows:default:test:1", "c"]], 1],
    ]


def test_a_modelscope_id_is_its_folder(tmp_path, monkeypatch):
    """A stand-in for modelscope's package: what it downloads is read like a folder, subset and split included."""
    folder, asked = tmp_path / "snapshot", []
    (folder / "poems").mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl", "poems/train.jsonl", "poems/test.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}))
    download = SimpleNamespace(dataset_snapshot_download=lambda data_id: asked.append(data_id) or str(folder))
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "modelscope.hub", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)

    def texts(name: str) -> list[str]:
        return [row.text for row in read_source(name, section(source="modelscope")).rows]

    assert texts("owner/name:test") == ["poems/test.jsonl", "test.jsonl"]
    assert texts("owner/name") == ["poems/train.jsonl", "train.jsonl"]
    assert texts("owner/name:poems:test") == ["poems/test.jsonl"]
    assert set(asked) == {"owner/name"}
    with pytest.raises(DataError, match="no data of the split 'dev'"):
        texts("owner/name:dev")


def test_modelscope_without_its_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(DataError, match=r"owner/name is no file or folder here, and cannot be fetched from ModelScope"):
        read_source("owner/name", section(source="modelscope"))
