"""Models by hub id, as a user meets them: other processes that download from a hub on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_server import COMMIT, FULLSHARD, TOKEN, HubServer, Served, environment
from rank_pool import free_port
from tiny_models import WORDS, make_model, make_tokenizer

FETCH = """
import json, sys
from fullshard.errors import ModelError
from fullshard.model.fetch import fetch_model
for asked in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"folder": str(fetch_model(**asked))}), flush=True)
    except ModelError as error:
        print(json.dumps({"message": error.message, "hint": error.hint}), flush=True)
"""
WAYS = ("HF_ENDPOINT=https://hf-mirror.com", "pip install 'fullshard[modelscope]'", "model.source=modelscope", "FOLDER")
NEEDED = {"chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
NEEDED |= {"LICENSE", "README.md"}
NOT_NEEDED = ("pytorch_model.bin", "tiny-q4.gguf", "consolidated.safetensors", "onnx/model.onnx", "onnx/config.json")


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory) -> Path:
    """A model as hubs hold them: two weight files with an index, and much that training does not need."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "tiny"
    make_tokenizer(make_model(folder))
    (folder / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(make_model(folder.parent / "k1")).config, dtype=torch.float32
    )
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model-00002-of-00002.safetensors").is_file()
    for name in (*NOT_NEEDED, "LICENSE", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"not JSON: {name}")
    return folder


def fetch(variables: dict[str, str], where: Path, *asked: dict | str) -> list[dict]:
    """What fetch_model returns or refuses for each of ``asked``, in a process of its own."""
    arguments = [one if isinstance(one, dict) else {"path": one} for one in asked]
    command = [sys.executable, "-c", FETCH, json.dumps(arguments)]
    done = subprocess.run(command, cwd=where, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_refused(result: dict, *words: str) -> None:
    for word in words:
        assert word in result["message"], result
    for way in WAYS:
        assert way in result["hint"], result


def same_files(folder: Path, original: Path) -> bool:
    return all((folder / file.name).read_bytes() == (original / file.name).read_bytes() for file in folder.iterdir())


def test_the_needed_files_once(tmp_path, hub_folder):
    with HubServer({"acme/tiny": hub_folder}) as hub:
        variables = environment(tmp_path / "home", hub.address)
        small, whole = fetch(variables, tmp_path, {"path": "acme/tiny", "weights": False}, "acme/tiny")
        folder = Path(whole["folder"])
        weights = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
        assert small == whole and folder == tmp_path / "home/hub/models--acme--tiny/snapshots" / COMMIT
        assert {file.name for file in folder.iterdir()} == NEEDED | weights | {"model.safetensors.index.json"}
        assert sorted(hub.downloads()) == sorted(file.name for file in folder.iterdir())
        assert set(hub.downloads()[-2:]) == weights  # the weights last
        assert same_files(folder, hub_folder)

        hub.requests.clear()
        asked = {"path": "acme/tiny", "revision": "main"}
        assert fetch(variables, tmp_path, asked) == [whole]
        assert len(hub.requests) <= 2 and not hub.downloads()  # which commit is main?
    offline, again = variables | {"HF_HUB_OFFLINE": "1"}, variables
    assert fetch(offline, tmp_path, "acme/tiny") == [whole]
    assert fetch(again, tmp_path, "acme/tiny") == [whole]  # the hub is gone, the cache is not


def test_a_broken_transfer(tmp_path, hub_folder):
    file = "model-00001-of-00002.safetensors"
    large = tmp_path / "large"
    shutil.copytree(hub_folder, large)
    (large / "LICENSE").write_bytes(bytes(range(256)) * (24 << 12))  # 24 MiB; huggingface_hub keeps pieces of 10 MiB
    models = {
        "acme/once": Served(large, cut="LICENSE"),
        "acme/twice": Served(hub_folder, cut=file, down_after_cut=1),
    }
    with HubServer(models) as hub:
        variables = environment(tmp_path / "home", hub.address)
        once, broken = fetch(variables, tmp_path, "acme/once", "acme/twice")
        ranges = [asked for _, path, asked in hub.requests if path.startswith("/acme/once") and asked]
        assert ranges == [f"bytes={10 << 20}-"] and same_files(Path(once["folder"]), large)
        check_refused(broken, "acme/twice", hub.address, "503")

        hub.requests.clear()
        (after,) = fetch(variables, tmp_path, "acme/twice")
        assert same_files(Path(after["folder"]), hub_folder)
        assert file in hub.downloads() and set(hub.downloads()) <= {file, file.replace("00001", "00002", 1)}


def test_what_a_hub_refuses(tmp_path, hub_folder, k1_folder):
    pickled = tmp_path / "pickled"
    shutil.copytree(k1_folder, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "a.gguf").write_text("")
    models = {
        "acme/private": Served(hub_folder, refuse=(401, "")),
        "acme/gated": Served(hub_folder, refuse_files=(403, "GatedRepo")),
        "acme/down": Served(hub_folder, refuse=(503, "")),
        "acme/huge": Served(hub_folder, size=10**18),
        "acme/pickled": pickled,
        "acme/nothing": tmp_path / "nothing",
        "acme/tiny": hub_folder,
    }
    with HubServer(models) as hub:
        variables = environment(tmp_path / "home", hub.address)
        ids = ["acme/unknown", *models]
        results = dict(
            zip(ids, fetch(variables, tmp_path, *ids[:-1], {"path": "acme/tiny", "revision": "v9"}), strict=True)
        )
        for name, result in results.items():
            check_refused(result, name, hub.address)
        check_refused(results["acme/unknown"], "no such model", "nor a folder")
        check_refused(results["acme/private"], "private", "login", "401")
        check_refused(results["acme/gated"], "gated", "terms")
        check_refused(results["acme/down"], "503")
        check_refused(results["acme/huge"], "2,000,000,000.0 GB", "free", "HF_HOME")
        check_refused(results["acme/pickled"], "model.safetensors", "only safetensors")
        check_refused(results["acme/nothing"], "config.json")
        check_refused(results["acme/tiny"], "revision v9")
        assert "model-00001-of-00002.safetensors" not in hub.downloads()


def test_no_way_to_a_hub(tmp_path):
    closed = f"http://user:secret@127.0.0.1:{free_port()}"
    (nowhere,) = fetch(environment(tmp_path, closed), tmp_path, "acme/tiny")
    check_refused(nowhere, "acme/tiny", closed.replace("user:secret@", ""), ": ConnectError: ")
    assert "secret" not in str(nowhere)
    variables = environment(tmp_path, "http://hub.invalid", HTTP_PROXY=closed, http_proxy=closed)
    (proxy,) = fetch(variables, tmp_path, "acme/tiny")
    check_refused(proxy, "acme/tiny", "http://hub.invalid")
    assert "secret" not in str(proxy)
    (offline,) = fetch(environment(tmp_path, closed, HF_HUB_OFFLINE="1"), tmp_path, "acme/tiny")
    check_refused(offline, "acme/tiny", "HF_HUB_OFFLINE is set, and the cache does not hold all of it")


@pytest.fixture
def job(tmp_path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]} for word in WORDS[:12]
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    recipe = {
        "model": {"path": "acme/tiny", "revision": "main"},
        "data": {"train": "rows.jsonl", "max_length": 32},
        "train": {"max_steps": 1, "global_batch": "4 rows"},
        "output": "run",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path


def call(job: Path, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*FULLSHARD, *arguments], cwd=job, env=variables, capture_output=True, text=True, timeout=180)


def test_from_an_id_to_a_trained_model(job, hub_folder):
    with HubServer({"acme/tiny": hub_folder}) as hub:
        variables = environment(job / "home", hub.address)
        planned = call(job, variables, "plan", "recipe.yaml")
        assert planned.returncode == 0, planned.stderr
        assert hub.downloads() and not [name for name in hub.downloads() if name.startswith("model-")]

        trained = call(job, variables, "train", "recipe.yaml", "--ranks", "1")
        assert trained.returncode == 0, trained.stderr
        assert len([name for name in hub.downloads() if name.startswith("model-")]) == 2
        assert "Fetching" in trained.stderr  # huggingface_hub's bar
    folder = job / "home/hub/models--acme--tiny/snapshots" / COMMIT
    config = json.loads((job / "run" / "config.json").read_text())
    assert config["model"]["path"] == str(folder)
    assert config["asked_model"]["path"] == "acme/tiny" and config["asked_model"]["revision"] == "main"
    assert f"model: acme/tiny is {folder}" in trained.stdout
    assert yaml.safe_load((job / "run" / "recipe.yaml").read_text())["model"]["path"] == "acme/tiny"
    assert TOKEN not in "".join(file.read_text() for file in (job / "run").glob("*.json"))


def test_a_refused_train_leaves_nothing(job):
    variables = environment(job / "home", f"http://127.0.0.1:{free_port()}")
    done = call(job, variables, "train", "recipe.yaml", "--ranks", "1")
    assert done.returncode == 2 and "acme/tiny, revision main," in done.stderr and "Traceback" not in done.stderr
    assert all(way in done.stderr for way in WAYS) and not (job / "run").exists()
