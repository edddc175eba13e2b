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


def test_yaml_reads_on_as_a_truth_value_and_overrides_apply(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: m}\ndata: {train: d}\ntrain: {recompute: on}\noutput: run\n", encoding="utf-8")
    config = load_config(path, ["train.epochs=3", "output=other"])
    assert config.train.recompute == "on" and config.train.epochs == 3 and config.output == "other"
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
