"""Preparing whole files: accounting, policies, splits, and batches out of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import K2_TEMPLATE, make_model, make_tokenizer

from fullshard.config import RunConfig, config_from_dict
from fullshard.data.chat import choose_pad_id, load_tokenizer
from fullshard.data.pack import lay_out, windows
from fullshard.data.prepared import make_batch, open_prepared, prepare, preview
from fullshard.errors import DataError

SHORT = ("red blue", "green")
LONG = (" ".join(["sun"] * 30), "one two three")


def write_rows(path: Path, *pairs: tuple[str, str]) -> Path:
    rows = [{"question": question, "answer": answer} for question, answer in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(model: Path, train: Path, seed: int = 0, **data) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(model)},
            "data": {"train": str(train), "max_length": 24} | data,
            "train": {"seed": seed},
            "output": str(train.parent / "run"),
        }
    )


@pytest.fixture
def ho1(tmp_path) -> Path:
    return write_rows(tmp_path / "ho1.jsonl", SHORT, LONG, SHORT, SHORT)


def test_truncation_that_eats_the_answer_stops(k1_folder, ho1, tmp_path):
    """HO-1: bos, role, 30 words, end, role = 34 tokens come before the answer."""
    for policy in ("stop", "cut"):
        with pytest.raises(DataError) as caught:
            prepare(recipe(k1_folder, ho1, too_long=policy), tmp_path / "prepared")
        assert "ho1.jsonl:2: 34 tokens come before the first supervised one" in caught.value.message
        assert "max_length is 24" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["ho1.jsonl"]  # nothing is left behind


def test_dropped_rows_are_counted(k1_folder, ho1, tmp_path):
    """HO-1 with the policy drop."""
    result = prepare(recipe(k1_folder, ho1, too_long="drop"), tmp_path / "prepared")
    assert result["train"]["used"] == 3
    assert result["train"]["dropped"] == {"no supervised token": 1}
    assert result["report"] == [
        "train (question+answer): 4 rows: 3 used; 24 tokens, 6 supervised (25%), longest row 38 of 24",
        "train: supervised stop tokens: 3 (<|end|>)",
        f"train: 1 of 4 dropped: no supervised token ({ho1}:2)",
        "train: 62 tokens in = 24 used + 38 dropped + 0 cut",
        f"train: 2 rows repeat an earlier one ({ho1}:3 = {ho1}:1, {ho1}:4 = {ho1}:1)",
    ]
    data = open_prepared(tmp_path / "prepared", "train")
    assert data.lengths.tolist() == [8, 8, 8]
    assert data.supervised.tolist() == [2, 2, 2]
    assert [data.origin(i) for i in range(len(data))] == [f"{ho1}:{line}" for line in (1, 3, 4)]
    assert result["stop_ids"] == [7]
    assert result["train"]["supervised_tokens"] == 6
    assert result["train"]["longest_written"] == 8


@pytest.mark.parametrize("policy", ["stop", "drop", "cut"])
def test_no_row_left(k1_folder, tmp_path, policy):
    """HO-1: the long row alone is refused under every policy."""
    path = write_rows(tmp_path / "ho1.jsonl", LONG)
    with pytest.raises(DataError, match=r"ho1\.jsonl:1"):
        prepare(recipe(k1_folder, path, too_long=policy), tmp_path / "prepared")


def test_rows_over_max_length_by_policy(k1_folder, tmp_path):
    """13 tokens at length 10, with an answer that begins before the limit."""
    path = write_rows(
        tmp_path / "a.jsonl", ("red", "one two three four five six seven"), ("red", "blue two three four")
    )
    with pytest.raises(DataError, match="1 row is longer than") as caught:
        prepare(recipe(k1_folder, path, max_length=10), tmp_path / "prepared")
    assert f"{path}:1; the longest has 13" in caught.value.message
    assert "data.max_length=13" in caught.value.hint
    dropped = prepare(recipe(k1_folder, path, max_length=10, too_long="drop"), tmp_path / "dropped")
    assert dropped["train"]["dropped"] == {"longer than max_length": 1}
    assert "train: 23 tokens in = 10 used + 13 dropped + 0 cut" in dropped["report"]
    cut = prepare(recipe(k1_folder, path, max_length=10, too_long="cut"), tmp_path / "cut")
    assert open_prepared(tmp_path / "cut", "train").lengths.tolist() == [10, 10]
    assert cut["train"]["stop_tokens"] == 1  # the cut row lost its end
    assert "train: 23 tokens in = 20 used + 0 dropped + 3 cut" in cut["report"]


def test_empty_answers_have_nothing_to_learn(k1_folder, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", SHORT, ("red", ""), ("blue", " "))
    with pytest.raises(DataError, match=r"a\.jsonl:2: none of 6 tokens is supervised.*1 more row is like it"):
        prepare(recipe(k1_folder, path), tmp_path / "prepared")


def test_expanded_rows_keep_their_origin(tmp_path):
    """HO-2b through the whole preparation."""
    template = K2_TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last or message['role'] == 'user' }}"
    )
    model = make_tokenizer(make_model(tmp_path / "model"), chat_template=template)
    turns = [("user", "red blue"), ("assistant", "green"), ("user", "one two"), ("assistant", "three four")]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    result = prepare(recipe(model, path), tmp_path / "prepared")
    data = open_prepared(tmp_path / "prepared", "train")
    assert data.supervised.tolist() == [2, 3]
    assert [data.origin(0), data.origin(1)] == [f"{path}:1", f"{path}:1"]
    assert (
        "train: 1 rows became 2, one per answer, because the chat template rewrites earlier turns" in result["report"]
    )
    assert preview(tmp_path / "prepared", "train", load_tokenizer(model), 1) == [
        "<bos> <|user|> red blue <|end|> <|assistant|>⟦green <|end|>⟧"
    ]


def test_plain_text_rows(k1_folder, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("red blue green\n\none two\n")
    result = prepare(recipe(k1_folder, path), tmp_path / "prepared")
    data = open_prepared(tmp_path / "prepared", "train")
    assert data.row(0)[0].tolist() == [8, 9, 10, 2]
    assert data.supervised.tolist() == [3, 2]  # nothing predicts a row's first token
    assert result["train"]["targets"] == 5
    assert result["stop_ids"] == [2]


def test_long_texts_are_split_and_that_is_said(k1_folder, tmp_path):
    """11 words and eos in rows of at most 5: three even pieces of 4; the cut text is the first 5."""
    path = tmp_path / "a.txt"
    path.write_text("red blue green one two three four five six seven sun\n\none two\n")
    result = prepare(recipe(k1_folder, path, max_length=5), tmp_path / "prepared")
    data = open_prepared(tmp_path / "prepared", "train")
    assert [data.row(number)[0].tolist() for number in range(4)] == [
        [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 2], [11, 12, 2]
    ]  # fmt: skip
    assert data.supervised.tolist() == [3, 3, 3, 2] and result["train"]["targets"] == 11
    assert [data.origin(number) for number in range(4)] == [f"{path}:1"] * 3 + [f"{path}:3"]
    assert result["train"]["used"] == 2 and result["train"]["tokens"] == 15
    assert f"train: 1 texts longer than 5 tokens split into 3 ({path}:1)" in result["report"]
    cut = prepare(recipe(k1_folder, path, max_length=5, too_long="cut"), tmp_path / "cut")
    assert cut["train"]["prepared"] == 2 and cut["train"]["tokens_cut"] == 7


def test_rows_without_answer_are_dropped_as_bad_ones_are(k1_folder, ho1, tmp_path):
    result = prepare(recipe(k1_folder, ho1, on_bad="drop"), tmp_path / "prepared")
    assert result["train"]["used"] == 3 and result["train"]["dropped"] == {"no supervised token": 1}


def test_content_may_be_parts_of_text(k1_folder, tmp_path):
    """As in OpenAI's files; anything but text is refused."""
    path, parts = tmp_path / "a.jsonl", [{"type": "text", "text": "red "}, {"type": "text", "text": "blue"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "green"}]}
    path.write_text(json.dumps(row) + "\n")
    prepare(recipe(k1_folder, path), tmp_path / "prepared")
    assert open_prepared(tmp_path / "prepared", "train").row(0)[0].tolist() == [1, 4, 8, 9, 7, 5, 10, 7]
    parts[1] = {"type": "image", "text": "blue"}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="content is no string"):
        prepare(recipe(k1_folder, path), tmp_path / "other")


def test_a_share_is_set_apart_by_the_seed(k1_folder, tmp_path):
    words = ["one", "two", "three", "four", "five", "six", "seven", "sun", "moon", "star"]
    path = write_rows(tmp_path / "a.jsonl", *[(word, "green") for word in words])

    def origins(seed: int, split: str) -> list[str]:
        folder = tmp_path / f"prepared{seed}"
        prepare(recipe(k1_folder, path, seed=seed, eval=0.3), folder)
        data = open_prepared(folder, split)
        return [data.origin(i) for i in range(len(data))]

    assert len(origins(0, "eval")) == 3
    assert sorted(origins(0, "train") + origins(0, "eval")) == sorted(f"{path}:{i}" for i in range(1, 11))
    assert origins(0, "eval") != origins(1, "eval")


def test_rows_in_both_files_are_counted(k1_folder, tmp_path):
    train = write_rows(tmp_path / "a.jsonl", SHORT, ("one", "two"), SHORT)
    held_out = write_rows(tmp_path / "b.jsonl", SHORT, ("two", "one"))
    result = prepare(recipe(k1_folder, train, eval=str(held_out)), tmp_path / "prepared")
    assert result["overlap"]["rows"] == 2
    assert result["eval"]["prepared"] == 2
    assert any(line.startswith("2 training rows also occur in eval") for line in result["report"])
    with pytest.raises(DataError, match="leaves nothing to train on"):
        prepare(recipe(k1_folder, held_out, eval=0.9), tmp_path / "other")


def test_a_known_preparation_is_kept_and_a_changed_one_replaced(k1_folder, ho1, tmp_path):
    folder = tmp_path / "prepared"
    first = prepare(recipe(k1_folder, ho1, too_long="drop"), folder)
    stamp = (folder / "train" / "tokens.safetensors").stat().st_mtime_ns
    assert prepare(recipe(k1_folder, ho1, too_long="drop"), folder) == first
    assert (folder / "train" / "tokens.safetensors").stat().st_mtime_ns == stamp
    write_rows(ho1, ("red blue", "moon"))
    assert prepare(recipe(k1_folder, ho1, too_long="drop"), folder)["hash"] != first["hash"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="holds something else"):
        prepare(recipe(k1_folder, ho1), foreign)
    assert (foreign / "notes.txt").read_text() == "mine"


def test_ids_outside_the_embedding_are_refused(tmp_path, ho1):
    """HO-3b in the preparation: before training, whatever the batch size."""
    model = make_tokenizer(make_model(tmp_path / "model", vocab_size=10))
    with pytest.raises(DataError, match=r"ho1\.jsonl:1: token id 10 is outside the model's embedding of 10 rows"):
        prepare(recipe(model, ho1, too_long="drop"), tmp_path / "prepared")


def test_pad_may_equal_eos(tmp_path):
    """HO-3a: rows of 6 and 9 tokens whose answers end in eos; fills are known by length, not by id."""
    template = K2_TEMPLATE.replace("{{ '<|end|>' }}", "{{ '<|end|>' if message['role'] == 'user' else eos_token }}")
    model = make_tokenizer(make_model(tmp_path / "model"), chat_template=template, pad_token="<eos>")
    path = write_rows(tmp_path / "a.jsonl", ("", "green"), ("red", "one two three"))
    result = prepare(recipe(model, path), tmp_path / "prepared")
    assert "train: supervised stop tokens: 2 (<eos>)" in result["report"]
    pad_id = choose_pad_id(load_tokenizer(model))
    assert pad_id == 2
    data = open_prepared(tmp_path / "prepared", "train")
    assert data.lengths.tolist() == [6, 9]
    batch = make_batch(data, [[0], [1]], pad_id)
    assert batch.input_ids[0].tolist() == [1, 4, 7, 5, 10, 2, 2, 2, 2]
    assert batch.attention_mask[0].tolist() == [1] * 6 + [0] * 3
    assert batch.labels[0].tolist() == [-100, -100, -100, 10, 2, -100, -100, -100, -100]
    assert batch.labels[1].tolist() == [-100, -100, -100, -100, 11, 12, 13, 2, -100]


def test_a_packed_batch_by_hand(k1_folder, tmp_path):
    """HO-4, the layout: rows of 6 and 7 tokens, all supervised, in one sequence of 13: 5 + 6 targets."""
    path = tmp_path / "a.txt"
    path.write_text("one two three four five\n\none two three four five six\n")
    prepare(recipe(k1_folder, path), tmp_path / "prepared")
    data = open_prepared(tmp_path / "prepared", "train")
    assert data.lengths.tolist() == [6, 7]
    batch = make_batch(data, [[0, 1]], 0)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 2, 11, 12, 13, 14, 15, 16, 2]]
    assert batch.labels.tolist() == [[12, 13, 14, 15, 2, -100, 12, 13, 14, 15, 16, 2, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.lengths == [[6, 7]]
    assert batch.attention_mask.sum() == 13
    assert (batch.labels != -100).sum() == data.supervised.sum() == 11
    apart = make_batch(data, [[0], [1]], 0)
    assert (apart.labels != -100).sum() == 11
    assert apart.lengths == [[6], [7]] and apart.attention_mask[0].tolist() == [1] * 6 + [0]


def test_the_fill_batch_weighs_nothing(k1_folder, ho1, tmp_path):
    prepare(recipe(k1_folder, ho1, too_long="drop"), tmp_path / "prepared")
    batch = make_batch(open_prepared(tmp_path / "prepared", "train"), [], 0)
    assert batch.input_ids.shape == (1, 8)
    assert batch.lengths == [[8]]
    assert (batch.labels == -100).all()


def test_every_layout_has_the_same_targets(k1_folder, tmp_path):
    """Any ranks, packed or not: the batches of an epoch hold the same rows and the same number of targets."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "sun", "moon", "star"]
    path = write_rows(tmp_path / "a.jsonl", *[("red", " ".join(words[: 1 + i % 9])) for i in range(23)])
    prepare(recipe(k1_folder, path), tmp_path / "prepared")
    data = open_prepared(tmp_path / "prepared", "train")
    for packing in (False, True):
        for num_ranks in (1, 2, 3):
            rows, targets = [], 0
            for window in windows(data.lengths, 0, 0, (8, "rows")):
                for ranks in lay_out(window, data.lengths, num_ranks, (2, "rows"), packing, 24):
                    batches = [make_batch(data, sequences, 0) for sequences in ranks]
                    rows += [row for sequences in ranks for sequence in sequences for row in sequence]
                    targets += sum(int((batch.labels != -100).sum()) for batch in batches)
                    for batch, sequences in zip(batches, ranks, strict=True):
                        of_rows = [[int(data.lengths[row]) for row in sequence] for sequence in sequences]
                        assert not sequences or batch.lengths == of_rows
            assert sorted(rows) == list(range(23))
            assert targets == data.supervised.sum() == np.sum([2 + i % 9 for i in range(23)])


def test_prepare_never_replaces_a_run_folder_or_a_folder_of_the_user(tmp_path, k1_folder):
    """Both may hold a data.json; what lies beside it would be deleted."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "red blue"}\n')
    values = {"model": {"path": str(k1_folder)}, "data": {"train": str(rows)}, "output": str(tmp_path / "x")}
    config = config_from_dict(values)
    run, mine = tmp_path / "run", tmp_path / "mine"
    prepare(config, run)
    (run / "checkpoints").mkdir()
    changed = config_from_dict(values | {"train": {"seed": 5}})
    mine.mkdir()
    (mine / "data.json").write_text('{"a": 1}')
    (tmp_path / "file").write_text("x")
    for folder in (run, mine, tmp_path / "file"):
        for recipe in (config, changed):
            with pytest.raises(DataError, match="holds something else"):
                prepare(recipe, folder)
    assert (run / "checkpoints").is_dir() and (mine / "data.json").is_file()
    (run / "checkpoints").rmdir()
    assert prepare(changed, run)["key"] != prepare(config, run)["key"]  # prepared data itself is made anew
