"""Loss and exact match on rows of data, next to the base."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import K2_TEMPLATE, VOCABULARY, ids_of, make_model, make_tokenizer

from fullshard.config import config_from_dict
from fullshard.data.prepared import open_prepared, prepare, write_held_out
from fullshard.errors import ConfigError, DataError
from fullshard.evaluate import _conclusion, evaluate_run, extract_number, judge_models, judge_recipe
from fullshard.infer.generate import generate_text, load_for_inference, prompt_tokens

QUESTIONS = ["red blue", "sun", "moon star sky", "one two three four five six"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and its base: two seeds."""
    root = tmp_path_factory.mktemp("models")
    return [make_tokenizer(make_model(root / str(seed), initializer_range=0.4, seed=seed)) for seed in (7, 8)]


@pytest.fixture
def data(tmp_path, folders):
    """Four rows; the model answers the first two right (its own answers are the expected ones)."""
    own = generate_text(folders[0], QUESTIONS, max_new_tokens=4)
    expected = [f" {own[0]}\n", own[1], "fig plum", "stone"]
    path = tmp_path / "rows.jsonl"
    rows = [{"question": question, "answer": text} for question, text in zip(QUESTIONS, expected, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loss_by_hand(folder, path) -> tuple[float, int]:
    """Mean cross-entropy over answer tokens and <|end|>, one row at a time, plain transformers."""
    answerer = load_for_inference(folder)
    total, count = 0.0, 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt = f"<bos><|user|>{row['question']}<|end|><|assistant|>"
        start = len(answerer.tokenizer(prompt)["input_ids"])
        ids = torch.tensor(answerer.tokenizer(f"{prompt}{row['answer']}<|end|>")["input_ids"])[None]
        with torch.no_grad():
            logits = answerer.model(input_ids=ids).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits[start - 1 : -1], ids[0, start:], reduction="sum"))
        count += ids.shape[1] - start
    return total / count, count


def test_loss_and_exact_match_next_to_the_base(folders, data):
    result = evaluate_run(folders[0], data, base=folders[1], max_new_tokens=4, batch_size=3)
    loss, count = loss_by_hand(folders[0], data)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert (result.rows, result.supervised_tokens) == (4, count)
    assert [answer.correct for answer in result.answers] == [True, True, False, False]
    assert result.exact_match == 0.5 and result.left_out == ()
    assert [answer.prompt for answer in result.answers] == QUESTIONS
    assert result.answers[0].origin.endswith("rows.jsonl:1")
    assert result.base.loss == pytest.approx(loss_by_hand(folders[1], data)[0], rel=1e-5)
    assert result.base.loss != pytest.approx(result.loss, rel=1e-3)
    value = json.loads(json.dumps(result.to_json()))
    assert value["exact_match"] == 0.5 and value["base"]["num_correct"] == result.base.num_correct


def test_limit_and_the_length_of_answers(folders, data):
    result = evaluate_run(folders[0], data, limit=1)
    assert (result.rows, result.num_answers) == (1, 1)
    with pytest.raises(DataError, match="limit"):
        evaluate_run(folders[0], data, limit=0)


def test_rows_without_room_are_left_out_and_said(folders, data):
    long = {"question": "red " * 58, "answer": "blue"}
    too_long = {"question": "red " * 70, "answer": "blue"}
    data.write_text(data.read_text() + json.dumps(long) + "\n" + json.dumps(too_long) + "\n")
    result = evaluate_run(folders[0], data, max_new_tokens=4)
    assert (result.rows, result.num_answers) == (5, 4)
    assert len(result.left_out) == 3
    assert "rows.jsonl:6: " in result.left_out[0] and "64 positions (loss)" in result.left_out[0]
    assert "rows.jsonl:5: " in result.left_out[1] and "no room for 4" in result.left_out[1]
    assert "left out: 3 rows, first " in judge_models([folders[0]], data, max_new_tokens=4).to_text()


def test_plain_text_has_a_loss_and_no_answers(tmp_path, folders):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "red blue green"}\n{"text": "sun"}\n')
    result = evaluate_run(folders[0], path)
    assert result.exact_match is None and result.supervised_tokens == 4
    assert "exact match" not in judge_models([folders[0]], path).to_text()


def test_rows_are_read_as_the_run_read_them(tmp_path, folders):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "red", "a": "blue"}\n')
    with pytest.raises(DataError, match="no known shape"):
        evaluate_run(folders[0], path)
    merged = tmp_path / "merged"
    make_tokenizer(make_model(merged))
    settings = {"columns": {"q": "user", "a": "assistant"}, "system": "sun", "max_length": 16}
    (merged / "merge.json").write_text(json.dumps({"settings": settings}))
    by_record = evaluate_run(merged, path)
    by_hand = evaluate_run(merged, path, settings={"columns": settings["columns"]})
    assert by_record.rows == 1
    assert by_record.loss != pytest.approx(by_hand.loss, rel=1e-6)  # the system message is in the prompt


def test_held_out_rows_of_a_run_with_columns(tmp_path):
    """A run writes them as messages or text; the columns of its own files are not looked for in them."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": word, "a": "blue"}) + "\n" for word in ("red", "sun", "sky", "sea")))
    merged = make_tokenizer(make_model(tmp_path / "merged"))
    columns = {"q": "user", "a": "assistant"}
    (merged / "merge.json").write_text(json.dumps({"settings": {"columns": columns, "system": "moon"}}))
    values = {"model": {"path": str(merged)}, "output": "run"}
    config = config_from_dict(
        values | {"data": {"train": str(data), "eval": 0.5, "columns": columns, "system": "moon"}}
    )
    write_held_out(config, tmp_path / "held_out.jsonl")
    found = evaluate_run(merged, tmp_path / "held_out.jsonl")
    assert (found.rows, found.num_answers) == (2, 2)
    assert evaluate_run(merged, data).rows == 4
    (tmp_path / "text.jsonl").write_text('{"text": "red blue"}\n')
    (merged / "merge.json").write_text(json.dumps({"settings": {"columns": {"body": "text"}}}))
    assert evaluate_run(merged, tmp_path / "text.jsonl").supervised_tokens == 2
    with pytest.raises(DataError, match="no known shape"):
        (tmp_path / "text.jsonl").write_text('{"other": "red blue"}\n')
        evaluate_run(merged, tmp_path / "text.jsonl")


def test_a_refused_system_text_is_the_same_for_training_eval_and_answers(tmp_path):
    """It stands at the start of the first user message, everywhere."""
    refusing = "{{ raise_exception('none') if messages[0]['role'] == 'system' }}" + K2_TEMPLATE
    model = make_tokenizer(make_model(tmp_path / "model", initializer_range=0.4), chat_template=refusing)
    (tmp_path / "rows.jsonl").write_text('{"question": "red", "answer": "blue"}\n')
    (tmp_path / "by_hand.jsonl").write_text('{"question": "sun\\n\\nred", "answer": "blue"}\n')
    section = {"train": str(tmp_path / "rows.jsonl"), "system": "sun", "max_length": 16}
    prepare(config_from_dict({"model": {"path": str(model)}, "data": section, "output": "run"}), tmp_path / "prepared")
    prompt = ids_of("<bos> <|user|> sun red <|end|> <|assistant|>")
    row = open_prepared(tmp_path / "prepared", "train").row(0)[0].tolist()
    assert row == [*prompt, *ids_of("blue <|end|>")]
    answerer = load_for_inference(model)
    assert prompt_tokens(answerer, "red", "sun") == prompt
    told = evaluate_run(answerer, tmp_path / "rows.jsonl", settings={"system": "sun"})
    by_hand = evaluate_run(answerer, tmp_path / "by_hand.jsonl", settings={})
    assert (told.loss, told.answers[0].answer) == (by_hand.loss, by_hand.answers[0].answer)


def test_rows_of_one_line_are_kept_apart(tmp_path, folders):
    """A .json list on one line: each row has its own expected answer; a tool call is compared as it is written."""
    calls = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": "", "tool_calls": [{"name": name}]}]
        for word, name in (("red", "sun"), ("blue", "moon"))
    ]
    template = (
        "{% for turn in messages %}{{ '<|' + turn.role + '|> ' + turn.content }}{% for call in turn.tool_calls %}"
    )
    template += "{{ call.name }}{% endfor %}{{ ' <|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|> "
    model = make_tokenizer(make_model(tmp_path / "model"), chat_template=template + "{% endif %}")
    (tmp_path / "rows.json").write_text(json.dumps([{"messages": messages} for messages in calls]))
    result = evaluate_run(model, tmp_path / "rows.json")
    assert [answer.expected for answer in result.answers] == ["sun", "moon"]
    assert {answer.origin.rpartition(":")[2] for answer in result.answers} == {"1"}


def test_reasoning_is_not_compared():
    assert _conclusion("<think>\n\n</think>\n\ngreen ") == _conclusion("<think>sun</think>green") == "green"
    assert _conclusion(" green\n") == "green"


def test_models_next_to_the_base_and_each_other(folders, data, tmp_path):
    """Losses and answers by row are those of the models alone; three comparisons, each with its verdict."""
    general = tmp_path / "general.jsonl"
    general.write_text("".join(json.dumps({"text": f"{word} sun"}) + "\n" for word in ("red", "blue", "sky")))
    base, model = map(str, reversed(folders))
    found = judge_models([model, base], data, base, general, max_new_tokens=4)
    assert [result.name for result in found.results] == ["base", model, base]
    pairs = [(each["before_name"], each["after_name"]) for each in found.comparisons]
    assert pairs == [("base", model), ("base", base), (model, base)]
    loss, count = loss_by_hand(model, data)
    nats = [each[2] for each in found.results[1].row_losses]
    assert sum(nats) / count == pytest.approx(loss, rel=1e-5) and len(nats) == 4
    first, same, _ = found.comparisons
    assert first["measures"]["loss"]["after"] == pytest.approx(loss, rel=1e-5)
    assert [place.rpartition(":")[2] for place in first["measures"]["exact"]["better"]] == ["1", "2"]
    assert first["general"]["rows"] == 3 and first["verdict"] == "none", "four rows can show nothing"
    assert same["measures"]["loss"]["difference"] == 0
    text = found.to_text()
    assert f"{model} against base" in text and "fewer than 6 rows can show nothing" in text
    lines = text.splitlines()
    assert lines[0].startswith("base: loss ") and f"{model}: loss {loss:.4f} over {count} supervised" in lines[1]
    assert "exact match 2 of 4 (50%)" in lines[1]
    json.dumps(found.to_json())


def test_a_users_scorer(folders, data, tmp_path):
    scorer = tmp_path / "mine.py"
    scorer.write_text(
        "def score(answer, row):\n    return len(row['question'].split()) + (answer == row['answer'].strip())\n"
    )
    found = judge_models([folders[0]], data, scorer=str(scorer), max_new_tokens=4)
    assert [answer.score for answer in found.results[0].answers] == [3, 2, 3, 6]
    assert "mean score 3.5 over 4 rows" in found.to_text() and f"{scorer} is your own file" in found.to_text()
    both = judge_models([folders[0]], data, folders[1], scorer=str(scorer), max_new_tokens=4)
    assert both.comparisons[0]["measure"] == "score"
    for text, problem in (
        ("def score(answer, row):\n    return row['none']\n", "rows.jsonl:1: 'none'"),
        ("def score(answer, row):\n    return float('nan')\n", "it is nan"),
        ("def other():\n    pass\n", "cannot be run: 'score'"),
        ("def score(:\n", "cannot be run"),
    ):
        scorer.write_text(text)
        with pytest.raises(ConfigError, match=r"mine\.py") as caught:
            judge_models([folders[0]], data, scorer=str(scorer), max_new_tokens=4)
        assert problem in caught.value.message and "def score" in caught.value.hint
    with pytest.raises(ConfigError, match=r"none.py cannot be run: No such file"):
        judge_models([folders[0]], data, scorer="none.py")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Tom has 3 + 4 = 7 apples.\n#### 1,234", 1234), ("#### $18.00", 18), ("#### -5", -5), ("it is 3-5", 5),
        ("#### 70\nQuestion 2: 5", 70), ("so 12, then 48.5.", 48.5), ("#### 1/2", 0.5), ("2,000,000 people", 2000000),
        ("1,2,3", 3), ("#### about 3 or 4", 4), ("答案是 42。", 42), ("#### none, but 9", 9), ("no number", None),
        ("####", None), (".5", 0.5), ("1/0", 0),
    ],
)  # fmt: skip
def test_numbers_are_extracted(text, number):
    assert extract_number(text) == number


def test_right_numbers_are_counted(tmp_path):
    """Expected answers with ####, or that are a number, have one; the model says words, so that none is right."""
    model = make_tokenizer(make_model(tmp_path / "model"))
    rows = [("red", "sun #### one"), ("blue", "sun #### 7"), ("sun", "moon 7 sky")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    found = judge_models([model], tmp_path / "rows.jsonl")
    assert [answer.number for answer in found.results[0].answers] == [None, False, None]
    assert "right numbers 0 of 1" in found.to_text()


def test_refusals_and_lengths(tmp_path, monkeypatch):
    vocabulary = [*VOCABULARY[:-2], "Sorry,", "抱歉，"]
    model = make_tokenizer(make_model(tmp_path / "model"), vocabulary=vocabulary)
    rows = [{"question": "red", "answer": "blue"}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = [[62, 9], [63, 9, 9], [9, 62], [9]]  # Sorry, blue | 抱歉，blue blue | blue Sorry, | blue
    monkeypatch.setattr("fullshard.evaluate.generate_ids", lambda *given, **more: said)
    found = evaluate_run(model, tmp_path / "rows.jsonl")
    assert [answer.refused for answer in found.answers] == [True, True, False, False]
    assert [answer.tokens for answer in found.answers] == [2, 3, 2, 1]


def test_what_cannot_be_judged(folders, data, tmp_path):
    with pytest.raises(ConfigError, match="no held-out rows") as caught:
        judge_models([folders[0]])
    assert "--data" in caught.value.hint
    with pytest.raises(ConfigError, match="lm-eval") as caught:
        judge_models([folders[0]], data, suite=["gsm8k"])
    assert "fullshard[suite]" in caught.value.hint
    run = tmp_path / "run"
    run.mkdir()
    for name in ("recipe.yaml", "config.json"):
        (run / name).write_text("{}")
    with pytest.raises(ConfigError, match="not merged yet") as caught:
        judge_models([run])
    assert caught.value.hint == f"First: fullshard merge {run}"


def test_a_suite_runs_through_lm_eval(folders, data, monkeypatch):
    """Called as lm-eval 0.4.13 has it (evaluator.simple_evaluate); its results are numbers by task."""
    asked = []

    def simple_evaluate(model, model_args=None, tasks=None, limit=None):
        asked.append((model, model_args, tasks, limit))
        return {"results": {"gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.25}}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    found = judge_models([folders[0]], data, suite=["gsm8k"], limit=2, max_new_tokens=4)
    assert asked == [("hf", {"pretrained": str(folders[0])}, ["gsm8k"], 2)]
    assert "lm-eval, model: gsm8k exact_match,strict-match 0.25" in found.to_text()


def test_the_base_before_a_run(folders, data, tmp_path):
    """As it is: the same as evaluate_run. With four rows in its prompt: as if these were written into the row."""
    train = tmp_path / "train.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]}
        for word in ["red", "blue", "sun", "moon", "sky"]
    ]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"train": str(train), "eval": str(data), "max_length": 64}
    config = config_from_dict({"model": {"path": str(folders[0])}, "data": section, "output": str(tmp_path / "run")})
    found = judge_recipe(config, max_new_tokens=4)
    alone, told = found.results
    assert alone.loss == pytest.approx(evaluate_run(folders[0], data, max_new_tokens=4).loss)
    by_hand = tmp_path / "by_hand.jsonl"
    with open(by_hand, "w") as file:
        for line in data.read_text().splitlines():
            row = json.loads(line)
            before = [message | {"train": False} for each in rows[:4] for message in each["messages"]]
            own = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": before + own}) + "\n")
    expected = evaluate_run(folders[0], by_hand, max_new_tokens=4)
    assert told.loss == pytest.approx(expected.loss) and told.supervised_tokens == alone.supervised_tokens
    assert [one.answer for one in told.answers] == [one.answer for one in expected.answers]
    assert "Before any training" in found.comparisons[0]["text"] and not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="no held-out rows apart"):
        judge_recipe(config.model_copy(update={"data": config.data.model_copy(update={"eval": None})}))
