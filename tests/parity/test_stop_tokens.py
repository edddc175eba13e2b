"""HO-3 to its end: pad equals eos, trained, merged, and greedy answers end in eos; a pad outside the table.

And one template argument for training, eval and answers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rank_pool import pool
from test_training import train_on_ranks
from tiny_models import END, EOS, K2_TEMPLATE, VOCABULARY, ids_of, make_model, make_tokenizer

from fullshard.config import config_from_dict
from fullshard.data.prepared import open_prepared, prepare
from fullshard.errors import DataError
from fullshard.evaluate import evaluate_run
from fullshard.infer.generate import generate_text, load_for_inference, prompt_tokens
from fullshard.merge.job import merge_run
from fullshard.model.load import stop_ids
from fullshard.run_folder import CONFIG, DATA, PREPARED, write_json

ENDS_IN_EOS = K2_TEMPLATE.replace("{{ '<|end|>' }}", "{{ '<|end|>' if message['role'] == 'user' else eos_token }}")
QUESTIONS = {"": "green", "red": "one two three"}  # rows of 6 and 9 tokens


def train_and_merge(
    folder: Path, base: Path, rows: list[dict], steps: int, add_tokens=None, batch="2 rows", **data
) -> Path:
    """A run on one rank of 2 rows a step, and its merged folder."""
    run = folder / "run"
    run.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(base), "add_tokens": add_tokens or []},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 32} | data,
        "method": "full",
        "train": {"global_batch": batch, "epochs": steps, "learning_rate": 1e-2, "save_every": steps},
        "output": str(run),
    }
    write_json(run / CONFIG, values)
    prepare(config_from_dict(values), run / PREPARED)
    shutil.copy(run / PREPARED / DATA, run / DATA)
    pool(1).run(train_on_ranks, str(run), values, [2, "rows"])
    return merge_run(run).folder


@pytest.mark.parametrize("steps", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_answers_end_in_eos_where_pad_equals_it(tmp_path, steps):
    """HO-3a."""
    base = make_tokenizer(make_model(tmp_path / "base"), chat_template=ENDS_IN_EOS, pad_token="<eos>")
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()]
    merged = train_and_merge(tmp_path, base, rows, steps)
    data = open_prepared(tmp_path / "run" / PREPARED, "train")
    assert data.lengths.tolist() == [6, 9]
    assert json.loads((tmp_path / "run" / DATA).read_text())["train"]["stop_tokens"] == 2
    assert EOS in stop_ids(merged)
    answerer = load_for_inference(merged)
    for question, answer in QUESTIONS.items():
        prompt = torch.tensor([prompt_tokens(answerer, question)])
        ids = answerer.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, eos_token_id=EOS
        )
        assert ids[0, prompt.shape[1] :].tolist() == [*ids_of(answer), EOS]
        assert generate_text(answerer, [question], 12) == [answer]


@pytest.mark.parametrize("changes", [{"pad_token": "<eos>"}, {"pad_token": "<|end|>", "eos_token": "<|end|>"}])
def test_the_supervised_end_of_turn_is_a_stop_id_of_the_export(tmp_path, changes):
    """<|end|> ends the answers: it stops the export beside the base's own ids, also where pad equals eos or it."""
    base = make_tokenizer(make_model(tmp_path / "base"), **changes)
    merged = train_and_merge(tmp_path, base, [{"question": "red", "answer": "blue"}], 40, batch="1 rows")
    for name in ("generation_config.json", "config.json"):
        assert {EOS, END} <= set(json.loads((merged / name).read_text())["eos_token_id"])
    answerer = load_for_inference(merged)
    assert {EOS, END} <= set(answerer.stop_ids)
    prompt = torch.tensor([prompt_tokens(answerer, "red")])
    ids = answerer.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, eos_token_id=63)
    assert ids[0, prompt.shape[1] :][:2].tolist() == [*ids_of("blue"), END]
    assert generate_text(answerer, ["red"], 9) == ["blue"]


def test_a_pad_token_outside_the_table(tmp_path):
    """HO-3b: refused before training, with rows of one length too; growing by config works."""
    vocabulary = [*VOCABULARY, "<fill>"]
    base = make_tokenizer(make_model(tmp_path / "base"), vocabulary=vocabulary, pad_token="<fill>")
    rows = [{"question": "red", "answer": "blue"}, {"question": "sun", "answer": "moon"}]
    for number, batch in enumerate(("1 rows", "2 rows")):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(DataError, match="id 64, but the model's embedding has 64 rows") as caught:
            train_and_merge(tmp_path / str(number), base, rows, 1, batch=batch)
        assert not (tmp_path / str(number) / "run" / PREPARED).exists()
    assert """model.add_tokens='["<fill>"]'""" in caught.value.hint
    merged = train_and_merge(tmp_path, base, rows, 1, add_tokens=["<fill>"])
    answerer = load_for_inference(merged)
    assert answerer.model.get_input_embeddings().weight.shape[0] == 65
    assert answerer.tokenizer.pad_token_id == 64


def test_one_template_argument_for_training_eval_and_answers(tmp_path):
    """``place`` is a word before each answer's place. The merged folder says it; the base may be told it."""
    template = K2_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>' + (place or '') + ' ' }}").replace(
        "{{ '<|' + message['role'] + '|>' }}",
        "{{ '<|' + message['role'] + '|>' + ((place or '') + ' ' if message['role'] == 'assistant' else '') }}",
    )
    base = make_tokenizer(make_model(tmp_path / "base", initializer_range=0.4), chat_template=template)
    rows = [{"question": "red", "answer": "one two"}, {"question": "blue", "answer": "three"}]
    merged = train_and_merge(tmp_path, base, rows, 40, template_arguments={"place": "sun"})
    data = open_prepared(tmp_path / "run" / PREPARED, "train")
    assert data.row(0)[0].tolist() == ids_of("<bos> <|user|> red <|end|> <|assistant|> sun one two <|end|>")
    assert data.supervised.tolist() == [3, 2]
    assert json.loads((merged / "merge.json").read_text())["settings"]["template_arguments"] == {"place": "sun"}
    asked = ids_of("<bos> <|user|> red <|end|> <|assistant|> sun")
    answerer = load_for_inference(merged)
    assert prompt_tokens(answerer, "red") == asked
    assert prompt_tokens(load_for_inference(answerer, {}), "red") == asked[:-1]
    assert prompt_tokens(load_for_inference(base), "red") == asked[:-1]
    assert prompt_tokens(load_for_inference(base, {"place": "sun"}), "red") == asked
    assert generate_text(merged, ["red", "blue"], 8) == ["one two", "three"]
    moon = generate_text(base, ["red"], 8, template_arguments={"place": "moon"})
    assert moon != generate_text(base, ["red"], 8), "the base must show that it heard"
    tuned = evaluate_run(merged, tmp_path / "rows.jsonl", base=base)
    assert tuned.num_correct == 2 and tuned.supervised_tokens == 5
    told = evaluate_run(base, tmp_path / "rows.jsonl", template_arguments={"place": "sun"})
    assert told.loss == pytest.approx(tuned.base.loss, rel=1e-6)
    assert evaluate_run(base, tmp_path / "rows.jsonl").loss != pytest.approx(told.loss, rel=1e-3)
    with pytest.raises(DataError, match="no chat template that reads plase"):
        evaluate_run(base, tmp_path / "rows.jsonl", template_arguments={"plase": "sun"})
