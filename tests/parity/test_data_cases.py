"""The cases HO-1 to HO-6 (data), each value as the case states it, from the file to the trained model.

Masks and batches by hand: tests/unit/data; attention by document: test_packing.py; stops: test_stop_tokens.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rank_pool import pool
from test_training import SGD, train_on_ranks, weights_of
from tiny_models import K2_TEMPLATE, WORDS, make_model, make_tokenizer
from transformers import AttentionInterface, AutoModelForCausalLM

import fullshard
from fullshard import cli, launch
from fullshard.config import RunConfig, config_from_dict
from fullshard.data.pack import lay_out, windows_of_run
from fullshard.data.prepared import open_prepared, prepare
from fullshard.errors import ConfigError, DataError
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.run_folder import METRICS, PREPARED
from fullshard.train.loss import LossModel
from fullshard.train.precision import precision_of
from fullshard.train.setup import check_packing

SHORT = [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": "green"}]
LONG = [{"role": "user", "content": " ".join(["sun"] * 30)}, {"role": "assistant", "content": "one two three"}]
TWO_TURNS = [*SHORT, {"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}]


def write_chats(path: Path, *conversations: list[dict]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def write_texts(path: Path, *num_words: int) -> Path:
    """Plain text: a row of so many words is followed by eos, and each token but the first is a target."""
    rows = [{"text": " ".join(WORDS[7 * i : 7 * i + count])} for i, count in enumerate(num_words)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BOTH_ENGINES = pytest.mark.parametrize("engine", ["torch", "simple"])


def recipe(folder: Path, model: Path, rows: Path, data: dict | None = None, engine="torch", **train) -> RunConfig:
    values = {
        "engine": engine,
        "model": {"path": str(model)},
        "data": {"train": str(rows), "max_length": 32, **(data or {})},
        "method": "full",
        "train": train,
        "output": str(folder),
    }
    rows.with_name("recipe.yaml").write_text(yaml.safe_dump(values))
    return config_from_dict(values)


def train(config: RunConfig, num_ranks: int, micro: list, function=train_on_ranks) -> tuple[Path, list]:
    """Prepare and train in ``config.output``; returns it and what each rank gave back."""
    run = Path(config.output)
    run.mkdir()
    prepare(config, run / PREPARED)
    return run, pool(num_ranks).run(function, str(run), config.model_dump(exclude_unset=True), micro)


def records_of(run: Path, kind: str) -> list[dict]:
    records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def command(capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and all that one command prints."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    printed = capsys.readouterr()
    return stopped.value.code or 0, " ".join((printed.out + printed.err).split())


def oracle(model: Path, rows: list[tuple[list[int], list[bool]]]):
    """K4: all rows in one batch, plain transformers: loss, gradient norm and weights after one step of SGD 0.1."""
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    size = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), size, dtype=torch.long)
    labels = torch.full((len(rows), size), -100)
    for place, (ids, supervised) in enumerate(rows):
        input_ids[place, : len(ids)] = torch.tensor(ids)
        for position in range(1, len(ids)):
            if supervised[position]:
                labels[place, position - 1] = ids[position]
    logits = causal_lm(input_ids).logits
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = total / (labels != -100).sum()
    loss.backward()
    gradients = [parameter.grad for parameter in causal_lm.parameters()]
    norm = math.sqrt(sum(float(gradient.pow(2).sum()) for gradient in gradients))
    weights = {name: (value - 0.1 * value.grad).detach() for name, value in causal_lm.named_parameters()}
    return loss.item(), norm, weights


def rows_of(run: Path, split: str = "train") -> list[tuple[list[int], list[bool]]]:
    data = open_prepared(run / PREPARED, split)
    return [(ids.tolist(), supervised.tolist()) for ids, supervised in map(data.row, range(len(data)))]


# HO-1


def test_truncation_that_eats_the_answer_ends_the_command(tmp_path, k1_folder, capsys, monkeypatch):
    """HO-1: the message holds file, line, 34 and 24; line 2 alone is refused under both policies, with no rank or
    model started."""
    monkeypatch.setattr(launch, "_launch", None)
    rows = write_chats(tmp_path / "ho1.jsonl", SHORT, LONG, SHORT, SHORT)
    recipe(tmp_path / "run", k1_folder, rows, {"max_length": 24})
    for verb in ("prepare", "train"):
        code, said = command(capsys, verb, str(tmp_path / "recipe.yaml"))
        assert code == 2
        assert "ho1.jsonl:2: 34 tokens come before the first supervised one, but data.max_length is 24" in said
    code, said = command(capsys, "prepare", str(tmp_path / "recipe.yaml"), "data.too_long=drop")
    assert code == 0
    assert "4 rows: 3 used" in said and "1 of 4 dropped: no supervised token" in said
    write_chats(rows, LONG)
    for policy in ("stop", "drop"):
        for verb in ("prepare", "train"):
            code, said = command(capsys, verb, str(tmp_path / "recipe.yaml"), f"data.too_long={policy}")
            assert code == 2 and "ho1.jsonl:1" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ho1.jsonl", "recipe.yaml"]


def test_no_step_has_a_loss_of_nothing(tmp_path, k1_folder):
    """HO-1: three rows of four are used, and no log shows a loss of 0.0 or NaN."""
    rows = write_chats(tmp_path / "ho1.jsonl", SHORT, LONG, SHORT, SHORT)
    config = recipe(
        tmp_path / "run", k1_folder, rows, {"max_length": 24, "too_long": "drop"}, global_batch="1 rows", epochs=2
    )
    run, _ = train(config, 2, [1, "rows"])
    losses = [record["loss"] for record in records_of(run, "train")]
    assert len(losses) == 6 and all(math.isfinite(loss) and loss > 0.1 for loss in losses)


# HO-2


def test_the_preview_command_prints_the_supervised_text(tmp_path, capsys):
    """HO-2 (a), (b) and (c) as the user meets them."""
    last_only = K2_TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last or message['role'] == 'user' }}"
    )
    nothing = K2_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] if message['role'] == 'user' }}")
    rows = write_chats(tmp_path / "ho2.jsonl", TWO_TURNS)
    found = []
    for number, template in enumerate((K2_TEMPLATE, last_only, nothing)):
        model = make_tokenizer(make_model(tmp_path / f"model{number}"), chat_template=template)
        recipe(tmp_path / "run", model, rows)
        found.append(command(capsys, "prepare", str(tmp_path / "recipe.yaml")))
    (_, nested), (_, rewritten), (code, refused) = found
    assert "<|assistant|>⟦green <|end|>⟧<|user|> one two <|end|> <|assistant|>⟦three four <|end|>⟧" in nested
    assert "<bos> <|user|> red blue <|end|> <|assistant|>⟦green <|end|>⟧" in rewritten
    assert "<|assistant|> <|end|> <|user|> one two <|end|> <|assistant|>⟦three four <|end|>⟧" in rewritten
    assert code == 2 and "ho2.jsonl:1: The chat template writes nothing of an assistant turn" in refused


# HO-4

A, B = torch.arange(8, 14), torch.arange(20, 27)  # 6 and 7 tokens
RESTARTING = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]])
LABELS = [torch.cat([row[1:], torch.tensor([-100])]) for row in (A, B)]


@pytest.mark.parametrize("attention", ["eager", "sdpa", BY_DOCUMENT])
def test_packed_rows_are_what_each_is_alone(tmp_path, attention):
    """HO-4: B's logits, the summed loss of 5 + 6 targets and every gradient; 1e-5."""
    path = make_model(tmp_path)
    found = []
    for packed in (True, False):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention)).eval()
        documents = Documents([[6, 7]]) if attention == BY_DOCUMENT else None
        if packed:
            ids, labels = torch.cat([A, B])[None], torch.cat(LABELS)[None]
            assert int((labels != -100).sum()) == 11
            logits = model(ids, None, RESTARTING, documents=documents)[:, 6:]
            loss = model(ids, labels, RESTARTING, documents=documents)
        else:
            logits = model(B[None], None)
            loss = model(A[None], LABELS[0][None]) + model(B[None], LABELS[1][None])
        loss.backward()
        found.append((logits, float(loss.detach()), {name: value.grad for name, value in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    for name, gradient in found[1][2].items():
        torch.testing.assert_close(found[0][2][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def attend_without_masks(module, query, key, value, attention_mask, scaling=None, **unused):
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def test_an_attention_that_cannot_isolate_is_refused(tmp_path):
    """HO-4: a kind that is causal and right for single rows, but does not look at masks."""
    AttentionInterface.register("without_masks", attend_without_masks)
    path = make_model(tmp_path)
    rows = [A.tolist(), B.tolist()]
    for attention in ("eager", "sdpa", "without_masks"):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention))
        built = SimpleNamespace(loss_model=model, sharded=SimpleNamespace(after_step=lambda: None))
        if attention != "without_masks":
            assert "rows kept apart by masks" in check_packing(built, rows, precision_of("fp32"), torch.device("cpu"))
            continue
        with pytest.raises(ConfigError, match="Packing does not keep rows apart in LlamaForCausalLM") as caught:
            check_packing(built, rows, precision_of("fp32"), torch.device("cpu"))
        assert "data.packing=false" in caught.value.hint


def test_a_row_over_the_length_leaves_no_tail_in_a_packed_run(tmp_path, k1_folder):
    """HO-4: 13 and 10 tokens at length 10: in = used + dropped, and no window holds a piece of the long row."""
    rows = write_texts(tmp_path / "ho4.jsonl", 12, 9)
    config = recipe(tmp_path / "run", k1_folder, rows, {"max_length": 10, "packing": True})
    said = prepare(config, tmp_path / "split")["report"]  # plain text without a policy: even pieces, and that is said
    assert f"train: 1 texts longer than 10 tokens split into 2 ({rows}:1)" in said
    assert open_prepared(tmp_path / "split", "train").lengths.tolist() == [6, 7, 10]
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": " ".join(WORDS[:8])}]
    chat = write_chats(tmp_path / "chat.jsonl", turns)
    with pytest.raises(DataError, match="1 row is longer than"):
        prepare(recipe(tmp_path / "run", k1_folder, chat, {"max_length": 10}), tmp_path / "refused")
    dropped = recipe(tmp_path / "run", k1_folder, rows, {"max_length": 10, "packing": True, "too_long": "drop"})
    report = prepare(dropped, tmp_path / "prepared")["report"]
    assert "train: 23 tokens in = 10 used + 13 dropped + 0 cut" in report
    data = open_prepared(tmp_path / "prepared", "train")
    assert data.lengths.tolist() == [10]
    ((_, window),) = windows_of_run(data.lengths, dropped.train)
    assert lay_out(window, data.lengths, 1, (4, "rows"), True, 10) == [[[[0]]]]


# HO-5

LAYOUTS = [(1, 1, [4, "rows"]), (1, 4, [1, "rows"]), (2, 2, [1, "rows"]), (2, 1, [2, "rows"])]
MEANS = {1: 4.0, 7: 2.0, 3: 3.0, 5: 1.0}  # targets of a row -> its mean token loss, for the arithmetic control


@BOTH_ENGINES
@pytest.mark.parametrize(("num_ranks", "accumulation", "micro"), LAYOUTS)
def test_one_loss_for_every_layout_of_four_rows(tmp_path, k1_folder, engine, num_ranks, accumulation, micro):
    """HO-5: 1, 7, 3 and 5 targets; loss, gradient norm and weights are the oracle's."""
    rows = write_texts(tmp_path / "ho5.jsonl", *MEANS)
    config = recipe(tmp_path / "run", k1_folder, rows, engine=engine, global_batch="4 rows", **SGD)
    run, _ = train(config, num_ranks, micro)
    data = open_prepared(run / PREPARED, "train")
    assert data.supervised.tolist() == [1, 7, 3, 5]
    ((_, window),) = windows_of_run(data.lengths, config.train)
    assert len(lay_out(window, data.lengths, num_ranks, tuple(micro), False, 32)) == accumulation
    loss, norm, weights = oracle(k1_folder, rows_of(run))
    (step,) = records_of(run, "train")
    assert step["supervised_tokens"] == 16
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert step["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    for name, value in weights_of(run, 1).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6, msg=name)


def train_with_stubbed_loss(ranks, run: str, config: dict, micro: list) -> None:
    from fullshard.train import loop

    def stub(loss_model, batch, device):
        targets = (batch.labels != -100).sum(1).tolist()
        return real(loss_model, batch, device) * 0 + sum(MEANS[count] * count for count in targets if count)

    real, loop.batch_loss = loop.batch_loss, stub
    try:
        train_on_ranks(ranks, run, config, micro)
    finally:
        loop.batch_loss = real


@BOTH_ENGINES
@pytest.mark.parametrize(("num_ranks", "accumulation", "micro"), LAYOUTS)
def test_the_loss_is_no_mean_of_row_means(tmp_path, k1_folder, engine, num_ranks, accumulation, micro):
    """HO-5: (4 + 14 + 9 + 5) / 16 = 2.0; 2.5 would be the mean of row means. It is logged nowhere."""
    rows = write_texts(tmp_path / "ho5.jsonl", *MEANS)
    config = recipe(tmp_path / "run", k1_folder, rows, engine=engine, global_batch="4 rows", **SGD)
    run, _ = train(config, num_ranks, micro, train_with_stubbed_loss)
    (step,) = records_of(run, "train")
    assert step["loss"] == pytest.approx(2.0, rel=1e-6)
    assert not [key for key, value in step.items() if value == pytest.approx(2.5)]


# HO-6


def train_and_watch(ranks, run: str, config: dict, micro: list) -> list[tuple[int, ...]]:
    """Train; the rows of each micro-batch that this rank went through in training steps, in order."""
    from fullshard.train import loop

    seen, steps = [], []

    def watch(data, sequences, pad_id):
        if steps:
            seen.append(tuple(row for sequence in sequences for row in sequence))
        return real(data, sequences, pad_id)

    def step(trainer, *arguments):
        steps.append(arguments)
        real_step(trainer, *arguments)
        steps.clear()

    real, loop.make_batch = loop.make_batch, watch
    real_step, loop.Trainer._step = loop.Trainer._step, step
    try:
        train_on_ranks(ranks, run, config, micro)
    finally:
        loop.make_batch, loop.Trainer._step = real, real_step
    return seen


@BOTH_ENGINES
def test_five_rows_on_two_ranks(tmp_path, k1_folder, engine):
    """HO-6: 2 ranks in step, each row once and its id logged, fills weigh nothing, eval is the oracle's over 5 rows."""
    rows = write_texts(tmp_path / "ho6.jsonl", 1, 7, 3, 5, 6)
    config = recipe(tmp_path / "run", k1_folder, rows, {"eval": str(rows)}, engine, global_batch="4 rows", **SGD)
    run, seen = train(config, 2, [2, "rows"], train_and_watch)
    assert len(seen[0]) == len(seen[1]) == 2  # micro-batches: one in each of two steps
    assert sorted(row for rank in seen for micro in rank for row in micro) == [0, 1, 2, 3, 4]
    steps = records_of(run, "train")
    assert [len(step["row_ids"]) for step in steps] == [4, 1]
    assert sorted(row for step in steps for row in step["row_ids"]) == [0, 1, 2, 3, 4]
    for number, step in enumerate(steps):
        assert sorted(step["row_ids"]) == sorted(seen[0][number] + seen[1][number])
    everything = rows_of(run)
    first, _, weights = oracle(k1_folder, [everything[row] for row in steps[0]["row_ids"]])
    assert steps[0]["loss"] == pytest.approx(first, rel=1e-5)
    stepped = AutoModelForCausalLM.from_pretrained(k1_folder, dtype=torch.float32)
    stepped.load_state_dict(weights, strict=False)
    stepped.save_pretrained(tmp_path / "stepped")
    second, _, weights = oracle(tmp_path / "stepped", [everything[row] for row in steps[1]["row_ids"]])
    assert steps[1]["loss"] == pytest.approx(second, rel=1e-5)
    stepped.load_state_dict(weights, strict=False)
    stepped.save_pretrained(tmp_path / "stepped")
    evals = records_of(run, "eval")
    assert [record["rows"] for record in evals] == [5, 5]
    assert evals[0]["loss"] == pytest.approx(oracle(k1_folder, everything)[0], rel=1e-5)
    assert evals[-1]["loss"] == pytest.approx(oracle(tmp_path / "stepped", everything)[0], rel=1e-5)


@BOTH_ENGINES
def test_one_row_on_two_ranks(tmp_path, k1_folder, engine):
    """HO-6: one rank has no row and no weight."""
    rows = write_texts(tmp_path / "ho6.jsonl", 5)
    config = recipe(tmp_path / "run", k1_folder, rows, engine=engine, global_batch="4 rows", **SGD)
    run, seen = train(config, 2, [2, "rows"], train_and_watch)
    assert sorted(seen) == [[()], [(0,)]]
    (step,) = records_of(run, "train")
    loss, norm, weights = oracle(k1_folder, rows_of(run))
    assert (step["row_ids"], step["loss"]) == ([0], pytest.approx(loss, rel=1e-5))
    assert step["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    for name, value in weights_of(run, 1).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6, msg=name)


def test_no_full_window_is_refused_before_any_rank_starts(tmp_path, k1_folder, capsys, monkeypatch):
    """HO-6: three rows, global batch 8, drop-last on."""
    monkeypatch.setattr(launch, "_launch", None)  # a start of ranks would be a TypeError
    rows = write_texts(tmp_path / "ho6.jsonl", 1, 2, 3)
    config = recipe(tmp_path / "run", k1_folder, rows, global_batch="8 rows", drop_last=True)
    for verb in ("plan", "train"):
        code, said = command(capsys, verb, str(tmp_path / "recipe.yaml"))
        assert code == 2 and "0 steps: 3 rows < 8" in said and "train.drop_last=false" in said
    with pytest.raises(ConfigError, match="0 steps: 3 rows < 8"):
        fullshard.train_run(config, quiet=True)
    assert not (tmp_path / "run").exists()


def test_windows_that_are_not_full_are_left_out_when_asked(tmp_path, k1_folder):
    rows = write_texts(tmp_path / "ho6.jsonl", 1, 7, 3, 5, 6)
    config = recipe(tmp_path / "run", k1_folder, rows, global_batch="2 rows", drop_last=True, epochs=2)
    run, _ = train(config, 2, [2, "rows"])
    steps = records_of(run, "train")
    assert [(step["epoch"], len(set(step["row_ids"]))) for step in steps] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_the_place_in_the_data_is_two_integers_in_the_checkpoint(tmp_path, k1_folder):
    """Epoch and how many of its windows are done; a recipe that means another place is not resumed."""
    rows = write_texts(tmp_path / "rows.jsonl", 1, 7, 3, 5)
    config = recipe(tmp_path / "run", k1_folder, rows, global_batch="2 rows", epochs=2, save_every=1, keep_last=9)
    run, _ = train(config, 2, [2, "rows"])
    places = [
        json.loads((run / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text())["trainer"]["position"]
        for step in (1, 2, 3, 4)
    ]
    assert places == [[0, 1], [0, 2], [1, 1], [1, 2]]
    other = recipe(tmp_path / "run", k1_folder, rows, global_batch="1 rows", epochs=1)  # 4 steps too
    (said,) = pool(1).run(refusal, str(run), other.model_dump(exclude_unset=True), [2, "rows"], 3)
    assert "has done [1, 1]" in said and "[0, 3]" in said


def refusal(ranks, run: str, config: dict, micro: list, step: int) -> str:
    with pytest.raises(ConfigError) as caught:
        train_on_ranks(ranks, run, config, micro, step)
    return caught.value.message
