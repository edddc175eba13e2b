"""The recipe: units, suggestions, every problem at once, YAML's own habits."""

from __future__ import annotations

import pytest

from fullshard.config import config_from_dict, load_config, parse_quantity
from fullshard.errors import ConfigError

BASE = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "output": "run"}


def test_defaults_by_method():
    assert config_from_dict(BASE).learning_rate == 1e-4
    assert config_from_dict({**BASE, "method": "full"}).learning_rate == 1e-5


@pytest.mark.parametrize(("text", "wanted"), [("64 rows", (64, "rows")), ("65_536 tokens", (65536, "tokens"))])
def test_quantities(text, wanted):
    assert parse_quantity(text) == wanted


@pytest.mark.parametrize("value", ["64", 64, "0 rows", "64 cows", "-1 rows"])
def test_a_batch_needs_a_count_and_its_unit(value):
    with pytest.raises(ConfigError, match="64 rows"):
        config_from_dict({**BASE, "train": {"global_batch": value}})


def test_every_problem_is_reported_at_once_with_the_nearest_name():
    wrong = {"modle": {"path": "m"}, "data": {"train": "d", "evall": 1}, "train": {"epochs": "x"}, "learning_rate": 1}
    with pytest.raises(ConfigError) as caught:
        config_from_dict(wrong)
    text = caught.value.message
    for part in ("model is missing", "output is missing", "did you mean model?", "did you mean data.eval?",
                 "train.epochs", "did you mean train.learning_rate?"):  # fmt: skip
        assert part in text, text


def test_overrides_apply(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: m}\ndata: {train: d}\ntrain: {recompute: none}\noutput: run\n", encoding="utf-8")
    config = load_config(path, ["train.epochs=3", "train.recompute=blocks", "output=other"])
    assert config.train.recompute == "blocks" and config.train.epochs == 3 and config.output == "other"
    with pytest.raises(ConfigError, match="not an override"):
        load_config(path, ["train.epochs"])


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"epochs": float("inf")}},
        {"train": {"seed": 2**70}},
        {"output": ""},
        {"data": {"train": []}},
        {"lora": {"targets": []}},
    ],
)
def test_values_that_would_hang_or_crash_later_are_refused(change):
    with pytest.raises(ConfigError):
        config_from_dict({**BASE, **change})


GOOD = "model: {path: m}\ndata: {train: a.jsonl}\noutput: run\n"
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nmethod: *b\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "output: other\n", "the key output stands here twice"),
        (GOOD + "train: {seed: 1, seed: 2}\n", "the key seed stands here twice"),
        (GOOD + BOMB, "aliases (*name) are not read"),
        (GOOD + "train: &a {<<: *a}\n", "aliases (*name) are not read"),
        (GOOD + "train: " + "[" * 5000, "not readable YAML"),
        (GOOD + "train: !!int x\n", "not readable YAML"),
        (GOOD + "train: !!bool x\n", "not readable YAML"),
        (GOOD + "train: 2024-13-45\n", "not readable YAML"),
        (GOOD + "lora: {rank: true}\n", "lora.rank: needs a value of its own, not true"),
        (GOOD + "train: {max_steps: yes}\n", "train.max_steps: needs a value of its own, not true"),
        (GOOD + "train: {epochs: 1000000000}\n", "less than or equal to 10000"),
        (GOOD.replace("run", '"a\\0b"'), "output: holds a NUL character"),
        (GOOD.replace("a.jsonl}", "a.jsonl, columns: {}}"), "data.columns is empty"),
        (GOOD.replace("output: run", "output: m/run"), "lies in the model folder m"),
        (GOOD + "engine: torch\ntrain: {sharding: replicate}\n", "train.sharding=replicate needs engine=simple"),
    ],
)
def test_recipes_that_could_be_read_in_two_ways_are_refused(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in caught.value.message


def test_a_wrong_value_is_shown_in_short(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + f"method: {[list(range(1000))] * 50}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.message) < 300 + len(str(path))


def test_1e_4_is_a_number_and_a_section_is_not_replaced(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace("a.jsonl}", "a.jsonl, eval: 1e-2}"))
    assert load_config(path).data.eval == 0.01
    assert load_config(path, ["data.eval=5e-1"]).data.eval == 0.5
    path.write_text(GOOD.replace("data: {train: a.jsonl}", "data: 3"))
    with pytest.raises(ConfigError, match="data is 3 in the recipe, not a section"):
        load_config(path, ["data.train=a.jsonl"])
    for override in ("a..b=1", ".=1", "=1"):
        with pytest.raises(ConfigError, match="is not an override"):
            load_config(path, [override])
