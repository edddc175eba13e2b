import json
import shutil

import pytest
import yaml

from fullshard import quickstart
from fullshard.config import config_from_dict, load_config
from fullshard.errors import ConfigError, DataError, ModelError, PlanError
from fullshard.planning import search
from fullshard.planning.search import Machine
from fullshard.planning.speed import Rates
from fullshard.quickstart import choose_batch, choose_eval, propose_recipe, write_recipe


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use_memory(monkeypatch, 20_000_000_000)
    return tmp_path


def use_memory(monkeypatch, count):
    machine = Machine("cpu", count, Rates(80e9, 1e9, 2))
    monkeypatch.setattr(search, "read_machine", lambda: machine)


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(here):
    rows = [{"question": "red " * (1 + number % 20), "answer": "green sun"} for number in range(100)]
    return write_rows(here / "questions.jsonl", rows)


def parse(text):
    return config_from_dict(yaml.safe_load(text))


def test_recipe_is_short_commented_and_loads(k1_folder, questions, here):
    text, path = propose_recipe(k1_folder, questions)
    assert str(path) == "recipe.yaml"
    assert not path.exists()
    assert len(text.splitlines()) <= 15
    assert max(len(line) for line in text.splitlines()) <= 160
    config = parse(text)
    assert config.model.path == str(k1_folder)
    assert config.data.train == str(questions)
    assert config.data.eval == 0.1
    # longest: bos, role, 20 words, end, role, 2 words, end = 27 tokens
    assert config.data.max_length == 32
    assert "longest sampled row 27" in text
    assert "100 rows, read as question+answer" in text
    assert config.output == "runs/questions"
    assert config.train.global_batch == "4 rows"
    assert config.train.epochs == 3


@pytest.mark.parametrize(
    ("name", "content", "shape"),
    [
        (
            "chat.jsonl",
            '{"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "sun"}]}',
            "messages",
        ),
        ("pairs.json", '[{"prompt": "red", "completion": "sun"}]', "prompt+completion"),
        ("story.txt", "red blue\n\nsun moon\n", "text"),
    ],
)
def test_shapes_are_recognised(k1_folder, here, name, content, shape):
    (here / name).write_text(content)
    text, _ = propose_recipe(k1_folder, here / name)
    assert f"read as {shape}" in text
    assert parse(text).data.eval is None  # too few rows


def test_written_recipe_prepares_and_plans(k1_folder, questions, here):
    from fullshard.data.prepared import prepare

    printed = write_recipe(k1_folder, questions, "jobs/mine.yaml")
    assert "fullshard plan jobs/mine.yaml" in printed
    config = load_config(here / "jobs" / "mine.yaml")
    account = prepare(config, here / "prepared")
    assert account["train"]["longest"] == 27
    assert search.make_plan(config, ranks=2).num_steps > 0


def test_nothing_is_overwritten(k1_folder, questions, here):
    (here / "recipe.yaml").write_text("mine")
    for call in (propose_recipe, write_recipe):
        with pytest.raises(ConfigError, match=r"recipe\.yaml exists"):
            call(k1_folder, questions)
    assert (here / "recipe.yaml").read_text() == "mine"


def test_an_existing_run_folder_is_not_proposed_again(k1_folder, questions, here):
    (here / "runs" / "questions").mkdir(parents=True)
    text, _ = propose_recipe(k1_folder, questions)
    assert parse(text).output == "runs/questions-2"


def test_unwritable_place(k1_folder, questions, here):
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_recipe(k1_folder, questions, "file/recipe.yaml")


def test_missing_or_incomplete_model(k1_folder, questions, here):
    with pytest.raises(ModelError):
        propose_recipe(here / "nowhere", questions)
    shutil.copytree(k1_folder, here / "broken")
    (here / "broken" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="incomplete"):
        propose_recipe(here / "broken", questions)


def test_missing_empty_or_unknown_data(k1_folder, here):
    with pytest.raises(DataError):
        propose_recipe(k1_folder, here / "nowhere.jsonl")
    (here / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="empty"):
        propose_recipe(k1_folder, here / "empty.jsonl")
    with pytest.raises(DataError, match="columns"):
        propose_recipe(k1_folder, write_rows(here / "odd.jsonl", [{"apple": "red", "pear": "green"}]))


def test_rows_over_the_models_positions_are_dropped_in_words(k1_folder, here):
    rows = [{"question": "red " * (70 if number == 3 else 2), "answer": "sun"} for number in range(20)]
    text, _ = propose_recipe(k1_folder, write_rows(here / "long.jsonl", rows))
    config = parse(text)
    assert (config.data.max_length, config.data.too_long) == (64, "drop")
    assert "1 sampled rows are longer" in text
    assert len(text.splitlines()) <= 15


def test_full_where_it_fits_else_lora(k1_folder, questions, monkeypatch):
    assert parse(propose_recipe(k1_folder, questions)[0]).method == "full"

    class Fits:
        peak_bytes, usable_bytes = 9_000_000_000, 10_000_000_000

    monkeypatch.setattr(quickstart, "_plan_of", lambda values, method: Fits() if method == "full" else None)
    monkeypatch.setattr(search, "make_plan", lambda config, ranks=None: None)
    # full would need 90 % of the memory, and lora does not fit
    assert quickstart.choose_method({})[:2] == ("lora", None)


def test_a_job_that_does_not_fit_is_still_written_and_says_so(k1_folder, questions, monkeypatch):
    use_memory(monkeypatch, 500_000_000)
    text, _ = propose_recipe(k1_folder, questions)
    assert "does not fit this machine" in text
    with pytest.raises(PlanError):
        search.make_plan(parse(text))


@pytest.mark.parametrize(
    ("rows", "share"),
    [(1, None), (9, None), (10, 0.2), (50, 0.2), (100, 0.1), (200, 0.05), (40_000, 0.05), (1_000_000, 0.002)],
)
def test_share_set_apart(rows, share):
    assert choose_eval(rows) == share


@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (100, 4), (200, 8), (400, 16), (700, 32), (100_000, 32)])
def test_rows_a_step(rows, batch):
    assert choose_batch(rows) == batch


def test_odd_paths_survive_yaml(k1_folder, here):
    folder = here / 'my: "data" #1'
    folder.mkdir()
    path = write_rows(folder / "rows.jsonl", [{"text": "red blue"}] * 12)
    assert parse(propose_recipe(k1_folder, path)[0]).data.train == str(path)
