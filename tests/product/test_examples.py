"""Every recipe in examples/ loads, and all but those for named cards train on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fullshard

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
FOR_CARDS = [path for path in EXAMPLES if path.stem.startswith("qwen3_8b")]  # planned in unit/planning/test_devices.py
SMALL = [path for path in EXAMPLES if path not in FOR_CARDS]


def test_there_are_examples():
    assert {"full", "lora", "text", "single_rank"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_loads(path):
    config = fullshard.load_config(path)
    assert config.output.startswith("runs/")
    assert path.read_text().startswith("# "), "an example says in its first line what it shows"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working folder with the model and the data files that the examples name."""
    from tiny_models import WORDS, make_model, make_tokenizer

    make_model(tmp_path / "models" / "base", max_position_embeddings=1024)
    make_tokenizer(tmp_path / "models" / "base")
    pairs = [(f"{WORDS[i]} {WORDS[i + 1]}", f"{WORDS[i + 2]}") for i in range(40)]
    chat = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs]
    columns = [{"question": q, "answer": a} for q, a in pairs]
    files = {
        "chat": chat,
        "questions": columns,
        "questions_held_out": columns[:4],
        "text": [{"text": f"{q} {a}"} for q, a in pairs],
    }
    (tmp_path / "data").mkdir()
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_for_cards_name_their_plan():
    from fullshard.planning.hardware import parse_devices

    assert len(FOR_CARDS) == 3
    for path in FOR_CARDS:
        command = path.read_text(encoding="utf-8").splitlines()[0].rpartition(": ")[2]
        assert command.startswith(f"fullshard plan examples/{path.name} --devices ")
        assert parse_devices(command.split()[-1])[0] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_example_trains(path, workplace):
    config = fullshard.load_config(path, ["train.max_steps=2"])
    result = fullshard.train_run(config, ranks=1 if path.stem == "single_rank" else 2, quiet=True)
    assert result.steps >= 1
    assert result.eval_loss == pytest.approx(result.eval_loss)  # a number, not NaN
    assert (Path(result.run) / "checkpoints").is_dir()
    merged = fullshard.merge_run(result.run)
    assert (Path(merged.folder) / "model.safetensors").is_file()
