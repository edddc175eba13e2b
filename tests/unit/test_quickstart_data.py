"""The rows and the recipe that the quickstart ships."""

import collections
import json
import re

import pytest
import yaml

from fullshard import quickstart
from fullshard.config import load_config
from fullshard.errors import ModelError
from fullshard.model.fetch import ensure_default_model, find_packaged_gguf
from fullshard.run_folder import free_run

FILES = ("train", "train_zh", "heldout", "heldout_zh")
VERBS = {"init", "prepare", "plan", "train", "resume", "eval", "merge", "generate", "chat", "doctor", "quickstart"}
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def read(name):
    text = (quickstart.DATA_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def question(messages):
    return messages[1]["content"]


def answer(messages):
    return messages[2]["content"]


@pytest.fixture(scope="module")
def rows():
    return {name: read(name) for name in FILES}


def test_counts(rows):
    assert len(rows["train"]) >= 300
    assert len(rows["train_zh"]) >= 40
    assert len(rows["heldout"]) >= 44
    assert len(rows["heldout_zh"]) >= 8


def test_row_shape(rows):
    for name in FILES:
        for messages in rows[name]:
            assert [message["role"] for message in messages] == ["system", "user", "assistant"]
            assert messages[0]["content"] == "help"
            assert all(message["content"] == message["content"].strip() != "" for message in messages)
            assert bool(CHINESE.search(question(messages))) == name.endswith("_zh")


def test_no_question_twice_and_held_out_is_held_out(rows):
    def plain(messages):
        return re.sub(r"[\W_]+", " ", question(messages).lower()).strip()

    seen = collections.Counter(plain(messages) for name in FILES for messages in rows[name])
    assert [text for text, count in seen.items() if count > 1] == []


def test_held_out_covers_every_answer(rows):
    answers = collections.Counter(answer(messages) for messages in rows["train"])
    assert 20 <= len(answers) <= 25 and min(answers.values()) >= 12
    assert {answer(messages) for messages in rows["heldout"]} == set(answers)
    chinese = {answer(messages) for messages in rows["train_zh"]}
    assert chinese <= set(answers) and {answer(messages) for messages in rows["heldout_zh"]} <= chinese


def test_answers_are_commands_of_the_product(rows, tmp_path):
    import typer

    from fullshard.cli import app

    commands = typer.main.get_command(app).commands
    assert set(commands) >= VERBS
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{model: {path: m}, data: {train: d}, output: o}")
    for text in {answer(messages) for name in FILES for messages in rows[name]}:
        program, *words = text.split()
        assert program == "fullshard"
        if words[0] == "--help":
            continue
        verb = commands[words[0]]
        options = {name for parameter in verb.params for name in parameter.opts}
        overrides = [word for word in words[1:] if "=" in word]
        load_config(recipe, overrides)  # the keys exist and take these values
        named = [word for word in words[1:] if word.startswith("--")]
        assert set(named) <= options, text
        places = [word for word in words[1:] if word.isupper()]
        given = [parameter.metavar for parameter in verb.params if parameter.param_type_name == "argument"]
        metavars = re.sub(r"[.\[\]]", "", " ".join(given)).split()
        assert len(places) <= len(metavars), text
        assert all(place in metavar.split("|") for place, metavar in zip(places, metavars, strict=False)), text


def test_all_verbs_are_taught(rows):
    taught = {answer(messages).split()[1] for messages in rows["train"]}
    assert taught >= VERBS | {"--help"}


def test_recipe_loads_with_every_place_filled(tmp_path):
    path = quickstart._fill_recipe(tmp_path / "model: odd # name", tmp_path / "quickstart")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b[A-Z]+_(FOLDER|FILE)\b", text)
    assert yaml.safe_load(text)["model"]["path"] == str(tmp_path / "model: odd # name")
    config = load_config(path)
    assert config.output == str(tmp_path / "quickstart")
    assert [file.path.split("/")[-1] for file in config.train_files] == ["train.jsonl", "train_zh.jsonl"]
    assert config.data.max_length == 64


def test_nothing_is_overwritten(tmp_path):
    assert free_run(tmp_path, "quickstart") == tmp_path / "quickstart"
    (tmp_path / "quickstart").mkdir()
    assert free_run(tmp_path, "quickstart") == tmp_path / "quickstart-2"
    (tmp_path / "quickstart-2.yaml").touch()
    assert free_run(tmp_path, "quickstart") == tmp_path / "quickstart-3"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    try:
        find_packaged_gguf()
    except ModelError as error:
        pytest.skip(error.message)
    return AutoTokenizer.from_pretrained(ensure_default_model())


def test_rows_are_short(rows, tokenizer):
    for name in FILES:
        for messages in rows[name]:
            assert len(tokenizer(answer(messages)).input_ids) <= 12, answer(messages)
            assert len(tokenizer.apply_chat_template(messages, return_dict=True).input_ids) <= 64, question(messages)
