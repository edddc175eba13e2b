"""What is a folder and what is an id; ModelScope through a stand-in of its package; reasons without secrets.

The real package, modelscope 1.40.2, was run once against a server on loopback: see docs/sources.md.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fullshard.config import config_from_dict
from fullshard.errors import ModelError
from fullshard.model import fetch
from fullshard.model.fetch import WAYS, fetch_model, with_model_folder


@pytest.fixture(autouse=True)
def nothing_remembered():
    fetch._download.cache_clear()


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*asked):
        raise AssertionError(f"a hub was asked for {asked}")

    monkeypatch.setattr(fetch, "_download", refuse)


def test_a_folder_wins_over_an_id(tmp_path, k1_folder, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny").symlink_to(k1_folder)
    assert fetch_model("acme/tiny") == fetch_model("acme/tiny", "modelscope") == Path("acme/tiny")
    with pytest.raises(ModelError, match="revision is v1, but acme/tiny is a local folder"):
        fetch_model("acme/tiny", revision="v1")


@pytest.mark.parametrize("path", ["./smol", "../smol", "/data/x", "~/smol", "smol", "a/b/c", "acme/tiny/", "acme/"])
def test_a_misspelt_folder_is_no_id(tmp_path, monkeypatch, no_hub, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="No model folder at") as refused:
        fetch_model(path)
    assert "owner/name" in refused.value.hint


def test_a_file_is_no_folder(tmp_path, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/smol.gguf").write_text("")
    with pytest.raises(ModelError, match=r"No model folder at models/smol\.gguf"):
        fetch_model("models/smol.gguf")


def test_weights_are_needed_unless_said_otherwise(tmp_path, k1_folder):
    folder = tmp_path / "model"
    shutil.copytree(k1_folder, folder)
    (folder / "model.safetensors").unlink()
    assert fetch_model(folder, weights=False) == folder
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        fetch_model(folder)


def test_every_door_takes_an_id(tmp_path, k1_folder, monkeypatch):
    from fullshard.data.prepared import prepare
    from fullshard.evaluate import evaluate_run
    from fullshard.infer.generate import generate_text
    from fullshard.planning.search import make_plan
    from fullshard.quickstart import propose_recipe

    asked = []
    monkeypatch.setattr(fetch, "_download", lambda *arguments: asked.append(arguments) or k1_folder)
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]}] * 12
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe, _ = propose_recipe("acme/tiny", "rows.jsonl")
    assert 'model: {path: "acme/tiny"}' in recipe and str(k1_folder) not in recipe
    config = config_from_dict(
        {
            "model": {"path": "acme/tiny", "source": "modelscope", "revision": "v1"},
            "data": {"train": "rows.jsonl", "max_length": 32},
            "output": "run",
        }
    )
    make_plan(config, ranks=1)
    prepare(config, tmp_path / "prepared")
    assert ("acme/tiny", "modelscope", "v1", True) not in asked  # neither needs the weights
    assert asked[-2:] == [("acme/tiny", "modelscope", "v1", False)] * 2
    assert generate_text("acme/tiny", ["red"], max_new_tokens=1) and asked[-1] == (
        "acme/tiny",
        "huggingface",
        None,
        True,
    )
    result = evaluate_run("acme/tiny", "rows.jsonl", base="acme/other", limit=1, max_new_tokens=1)
    assert result.model == "acme/tiny" and result.base.model == "acme/other" and result.loss == result.base.loss
    assert [arguments[0] for arguments in asked[-2:]] == ["acme/other", "acme/tiny"]
    found = with_model_folder(config)
    assert found.model.path == str(k1_folder) and found.model.revision is None
    assert with_model_folder(found) == found


class HubError(Exception):
    """Stands for modelscope_hub.errors.HubError, which derives from Exception alone."""


@pytest.fixture
def modelscope(monkeypatch, tmp_path, k1_folder):
    """A stand-in with the calls and parameters of modelscope 1.40.2; ``calls`` holds the asked patterns."""
    state = SimpleNamespace(calls=[], size=None, error=None, folder=tmp_path / "models/acme--tiny/snapshots/master")
    served = {file.name: file for file in k1_folder.iterdir()}

    def snapshot_download(model_id=None, revision=None, cache_dir=None, *, allow_patterns=None):
        if state.error:
            raise state.error
        state.calls.append((model_id, revision, allow_patterns))
        state.folder.mkdir(parents=True, exist_ok=True)
        for name, file in served.items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                shutil.copy(file, state.folder / name)
        return str(state.folder)

    class HubApi:
        def list_repo_files(self, repo_id, repo_type, *, revision=None, recursive=True):
            assert repo_type == "model"
            return [SimpleNamespace(path=name, size=state.size or file.stat().st_size) for name, file in served.items()]

    contents = {
        "modelscope": {},
        "modelscope.hub": {},
        "modelscope.hub.snapshot_download": {"snapshot_download": snapshot_download},
        "modelscope_hub": {"HubApi": HubApi},
        "modelscope_hub.errors": {"HubError": HubError},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return state


def test_modelscope(modelscope, k1_folder):
    folder = fetch_model("acme/tiny", "modelscope", "v1")
    assert folder == modelscope.folder
    assert {file.name for file in folder.iterdir()} == {file.name for file in k1_folder.iterdir()}
    (first, revision, small), (second, _, whole) = modelscope.calls
    assert first == second == "acme/tiny" and revision == "v1"
    assert "model.safetensors" not in small and whole[-1] == "model.safetensors"
    assert not any(
        fnmatch(name, pattern) for name in ("pytorch_model.bin", "x.gguf", "onnx/a.onnx") for pattern in whole
    )


def test_modelscope_weights_only_where_asked_and_where_there_is_room(modelscope):
    assert not (fetch_model("acme/tiny", "modelscope", weights=False) / "model.safetensors").exists()
    modelscope.size = 10**18
    with pytest.raises(ModelError, match=r"1,000,000,000\.0 GB of weights") as refused:
        fetch_model("acme/tiny", "modelscope")
    assert refused.value.hint == WAYS and not (modelscope.folder / "model.safetensors").exists()


def test_modelscope_errors(modelscope):
    response = SimpleNamespace(status_code=404)
    for error, words in (
        (HubError("[E1020] Connection failed"), "HubError: .E1020. Connection failed"),
        (type("HTTPError", (OSError,), {"response": response})("not found"), "no such model is there .* 404"),
        (OSError(errno.ENOSPC, "No space left on device"), r"OSError: \[Errno 28\] No space left on device"),
    ):
        modelscope.error = error
        with pytest.raises(ModelError, match=f"acme/tiny could not be fetched from ModelScope: {words}") as refused:
            fetch_model("acme/tiny", "modelscope")
        assert refused.value.hint == WAYS


def test_without_the_modelscope_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelError, match="not installed") as refused:
        fetch_model("acme/tiny", "modelscope")
    assert "pip install 'fullshard[modelscope]'" in refused.value.hint


def test_reasons_carry_no_secret():
    secrets = "https://me:word@mirror.example/a?X-Signature=abc hf_AbCdEf123 ms-12ab-34cd"
    reason = fetch._reason(ConnectionError(f"refused at {secrets}"))
    assert reason == "ConnectionError: refused at https://mirror.example/a hf_*** ms-***"
