"""What a step is held to and what is said of it: schedules, decay, spikes, fallbacks of the loss, shares and lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rank_pool import pool
from test_step_numbers import records_of, train
from test_training import ENGINE, SGD, make_run, weights_of
from tiny_models import make_model, make_tokenizer

from fullshard.config import config_from_dict
from fullshard.train.optimizer import learning_rate_at
from fullshard.train.precision import precision_of

IDS = torch.arange(8, 20)[None]


def test_schedules_by_hand():
    """Ten steps, two of them warm-up, peak 1: cosine and linear reach 1/8 of their way a step; constant stays."""
    for warmup in (2, 0.2):
        rates = {
            name: [learning_rate_at(step, 10, 1.0, name, warmup) for step in range(1, 11)]
            for name in ("constant", "linear", "cosine")
        }
        assert rates["constant"] == [0.5] + [1.0] * 9
        assert rates["linear"] == pytest.approx([0.5, 1.0] + [1 - i / 8 for i in range(8)])
        assert rates["cosine"] == pytest.approx([0.5, 1.0] + [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)])
    assert learning_rate_at(1, 10, 3.0, "cosine", 0) == 3.0  # no warm-up: the peak at once


def recipe(path: Path, engine: str, **train):
    values = {"model": {"path": str(path)}, "data": {"train": "x"}, "output": "y", "method": "full"}
    return config_from_dict({**values, "engine": engine, "train": {"learning_rate": 0.1, **train}})


def step_without_gradient(ranks, path: str, engine: str, optimizer_name: str):
    """Shards before and after a step whose gradients are zero: what moved is weight decay's."""
    from fullshard.train.optimizer import build_optimizer, take_step
    from fullshard.train.setup import build_sharded

    config = recipe(Path(path), engine, optimizer=optimizer_name, weight_decay=0.5)
    built = build_sharded(config, ranks, precision_of("fp32"), False)
    optimizer, _ = build_optimizer(config, built.sharded)
    with built.sharded.microbatch(True):
        (built.loss_model(IDS, torch.roll(IDS, -1, 1)) * 0).backward()
    before = {shard.name: (shard.full_shape, shard.value.clone()) for shard in built.sharded.shards()}
    take_step(optimizer, built.sharded.shards(), "")
    after = {shard.name: shard.value for shard in built.sharded.shards()}
    return [(name, len(shape), value, after[name].clone()) for name, (shape, value) in before.items() if len(value)]


@pytest.mark.parametrize("engine", ["torch", "simple"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_decay_spares_norms_and_biases(tmp_path, engine, optimizer):
    """Rate 0.1, decay 0.5: matrices shrink by 5 %, norms and biases (phi has both) stay bit for bit."""
    path = make_model(tmp_path / "model", "phi")
    seen = set()
    for parts in pool(2).run(step_without_gradient, str(path), engine, optimizer):
        for name, dimensions, before, after in parts:
            factor = 0.95 if dimensions > 1 else 1.0
            assert torch.allclose(after, before * factor, atol=1e-7, rtol=1e-6), name
            seen.add((dimensions, name.rpartition(".")[2]))
    assert seen >= {(2, "weight"), (1, "weight"), (1, "bias")}


def train_with_a_spike(ranks, run: str, config: dict, step: int):
    """As ``train``, but the loss of one step is tenfold."""
    from fullshard.train import loop

    patch, calls = pytest.MonkeyPatch(), []
    real = loop.batch_loss

    def spiked(*arguments):
        calls.append(1)
        return real(*arguments) * (10 if len(calls) == step + 1 else 1)  # call 1 is the trial step

    patch.setattr(loop, "batch_loss", spiked)
    try:
        return train(ranks, run, config, [64, "tokens"])
    finally:
        patch.undo()


@pytest.mark.parametrize("engine", ["torch", "simple"])
def test_a_spike_is_named_and_the_state_before_it_kept(tmp_path, monkeypatch, engine):
    """Step 10 of 12: its rows are printed, the run goes on, and the weights of step 9 stay, whatever is saved later."""
    monkeypatch.setitem(ENGINE, "engine", engine)
    model = make_tokenizer(make_model(tmp_path / "model"))
    settings = {**SGD, "epochs": 3, "save_every": 12, "keep_last": 1}
    config = make_run(tmp_path / "run", model, **settings)
    said = pool(2).run(train_with_a_spike, str(tmp_path / "run"), config.model_dump(exclude_unset=True), 10)
    [bad] = records_of(tmp_path / "run", "bad_step")
    assert bad["step"] == 10 and bad["rows"] and all("rows.jsonl:" in row for row in bad["rows"])
    for lines in said:
        assert any(line.startswith("step 10: loss ") and "a spike" in line and bad["rows"][0] in line for line in lines)
        assert f"the state before it is kept in {tmp_path / 'run' / 'before_step_000010'}" in lines
    steps = records_of(tmp_path / "run", "train")
    assert [record["step"] for record in steps] == list(range(1, 13))
    for record in steps:
        assert record["share_of_peak"] > 0 and record["memory_bytes"] > 0 and record["row_ids"]
        assert record["tokens_per_second"] > 0 and "gradient_norm" in record and "learning_rate" in record
    short = make_run(tmp_path / "short", model, **settings, max_steps=9)
    pool(2).run(train, str(tmp_path / "short"), short.model_dump(exclude_unset=True), [64, "tokens"])
    manifest = json.loads((tmp_path / "run" / "before_step_000010" / "manifest.json").read_text())
    assert manifest["trainer"]["step"] == 9
    (tmp_path / "run" / "checkpoints" / "step_000009").symlink_to(tmp_path / "run" / "before_step_000010")
    kept, wanted = weights_of(tmp_path / "run", 9), weights_of(tmp_path / "short", 9)
    assert all(torch.equal(kept[name], value) for name, value in wanted.items())


def check_strange_model(ranks, path: str, strange: str):
    """The start's line about the loss, and a loss on 12 tokens, for a model whose own logits or loss are others."""
    from fullshard.train.setup import build_sharded, check_loss_path

    built = build_sharded(recipe(Path(path), "auto"), ranks, precision_of("fp32"), False)
    causal_lm = built.loss_model.causal_lm
    forward, own_loss = causal_lm.forward, causal_lm.loss_function

    def other_forward(*arguments, **named):
        output = forward(*arguments, **named)
        output.logits = output.logits * 3
        return output

    if strange == "logits":
        causal_lm.forward = other_forward
    elif strange == "loss":
        causal_lm.loss_function = lambda *arguments, **named: own_loss(*arguments, **named) + 1
    line = check_loss_path(built, IDS, precision_of("fp32"))
    with torch.no_grad():
        loss = float(built.loss_model(IDS, torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)))
        logits = built.loss_model(IDS, None, own_logits=True)
    built.sharded.after_step()
    right = float(torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:], reduction="sum"))
    return line, loss, right, built.report


def test_where_our_loss_path_is_not_the_models_own_that_is_said(tmp_path):
    path = str(make_model(tmp_path / "model"))
    equal, other, added = (pool(2).run(check_strange_model, path, kind) for kind in ("", "logits", "loss"))
    for line, loss, right, report in equal:
        assert line.startswith("loss path: equal to the model's own on 12 tokens")
        assert loss == pytest.approx(right, rel=1e-5)
        assert "torch.compile: off (docs/performance.md says what it costs and brings)" in report
    for line, loss, right, _ in other:  # then its own logits count
        assert line.startswith("loss path: ours differs from the model's own (logits by 6.7e-01, loss by ")
        assert line.endswith("; the model's own logits are used, whole")
        assert loss == pytest.approx(right, rel=1e-5)
    for line, loss, right, _ in added:
        assert line.startswith("loss path: ours differs from the model's own (logits by ")
        assert line.endswith("; cross-entropy of its logits is used") and loss == pytest.approx(right, rel=1e-5)


def report_of(ranks, path: str, router_loss: bool):
    from fullshard.train.setup import build_sharded

    return build_sharded(recipe(Path(path), "auto", router_loss=router_loss), ranks, precision_of("fp32"), False).report


@pytest.mark.parametrize(
    ("asked", "said"), [(False, "router loss: off; "), (True, "router loss: part of the training")]
)
def test_what_the_router_loss_does_is_said(tmp_path, asked, said):
    path = make_model(tmp_path / "model", "mixtral", router_aux_loss_coef=0.5)
    for report in pool(1).run(report_of, str(path), asked):
        assert [line for line in report if line.startswith(said)]
