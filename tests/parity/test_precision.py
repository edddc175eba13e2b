"""Precision modes: HO-8 (overflow on one rank), HO-9 (clipping), bf16_pure's rounding, golden losses, what is held."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rank_pool import pool
from test_training import ENGINE, losses_of, make_run, train_on_ranks
from tiny_models import make_model, make_tokenizer

from fullshard.config import config_from_dict
from fullshard.run_folder import METRICS, checkpoint_path
from fullshard.train.precision import MODES, LossScale, Precision, log_text, precision_of, round_stochastically

GOLDEN = Path(__file__).with_name("golden_losses.json")
IDS = torch.arange(8, 20)[None]


def stored_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and moments, whole."""
    from fullshard.checkpoint.ranges import OwnCheckpoint

    reader = OwnCheckpoint(checkpoint_path(run, step))
    return {f"{stored.kind} {stored.name}": reader.read(stored.name, stored.kind) for stored in reader.manifest.tensors}


def records_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


def train_with_fault(ranks, run: str, config: dict, precision: str, step: int, value: float, resume_step=None):
    """Train; before step ``step``'s gradients are looked at, rank 0 puts ``value`` into one element of its first shard.

    Returns the log's lines, and scale, good steps and skipped steps at the end.
    """
    import fullshard.train.loop as loop
    from fullshard.errors import TrainError

    lines, scales, calls = [], [], []
    norm, say, make_scale = loop.updates.gradient_norm, loop.MetricsLog.say, loop.LossScale

    def poisoned(sharded, shards, *others):
        calls.append(1)
        if ranks.is_first and len(calls) + (resume_step or 0) == step:
            next(shard for shard in shards if shard.gradient is not None and shard.gradient.numel()).gradient[0] = value
        return norm(sharded, shards, *others)

    def small_scale(value, *others, **named):
        scales.append(make_scale(min(value, 1024.0) if not others and not named else value, *others, **named))
        return scales[-1]

    loop.updates.gradient_norm, loop.LossScale = poisoned, small_scale
    loop.MetricsLog.say = lambda log, line: lines.append(line)
    try:
        train_on_ranks(ranks, run, config, [32, "tokens"], resume_step, precision)
    except TrainError as error:
        lines.append(error.message)
    finally:
        loop.updates.gradient_norm, loop.LossScale, loop.MetricsLog.say = norm, make_scale, say
    return lines, (scales[-1].value, scales[-1].good_steps, scales[-1].skipped)


@pytest.mark.parametrize("engine", ["torch", "simple"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_overflow_on_one_rank(tmp_path, monkeypatch, method, engine):
    """HO-8: both ranks skip step 2, nothing moves, the scale halves; then all goes on, on resume too."""
    monkeypatch.setitem(ENGINE, "engine", engine)
    model = make_tokenizer(make_model(tmp_path / "model"))
    train = {"learning_rate": 1e-3, "warmup": 2, "save_every": 1, "keep_last": 9}
    config = make_run(tmp_path / "run", model, method, **train)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), "fp16", 2, math.inf)
    answers = pool(2).run(train_with_fault, *arguments)
    assert [scale for _, scale in answers] == [(512.0, 2, 1)] * 2
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A" if method == "lora" else "model.embed_tokens"
    name = first.removeprefix("base_model.model.") + (".default.weight" if method == "lora" else ".weight")
    for lines, _ in answers:
        assert f"skipped step 2: non-finite gradient (rank 0, {name})" in lines
    before, after = stored_tensors(tmp_path / "run", 1), stored_tensors(tmp_path / "run", 2)
    assert len(before) == (3 * 28 if method == "lora" else 3 * 21) and before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    later = stored_tensors(tmp_path / "run", 3)
    assert all(not torch.equal(later[name], value) for name, value in before.items() if name.startswith("exp_avg "))
    records = records_of(tmp_path / "run")
    steps = [record for record in records if record["kind"] == "train"]
    assert [(record["step"], record["loss_scale"], record["skipped_steps"]) for record in steps] == [
        (1, 1024, 0), (3, 512, 1), (4, 512, 1),
    ]  # fmt: skip
    skipped = next(record for record in records if record["kind"] == "skipped")
    assert (skipped["step"], skipped["loss_scale"], skipped["skipped_steps"]) == (2, 512, 1)
    rates = [record["learning_rate"] for record in steps]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])  # the schedule's first, second and third: none is left out
    assert all(math.isfinite(record["loss"]) for record in steps)

    # Resumed after the skipped step: the same scale, counters, learning rates, losses and bits.
    straight = stored_tensors(tmp_path / "run", 4)
    again = pool(2).run(train_with_fault, *arguments, 2)
    assert [scale for _, scale in again] == [(512.0, 2, 1)] * 2
    resumed = [record for record in records_of(tmp_path / "run") if record["kind"] == "train"][3:]
    for name in ("step", "loss", "learning_rate", "gradient_norm", "loss_scale"):
        assert [record[name] for record in resumed] == [record[name] for record in steps[1:]]
    found = stored_tensors(tmp_path / "run", 4)
    assert all(torch.equal(found[name], value) for name, value in straight.items())


@pytest.mark.parametrize("engine", ["torch", "simple"])
def test_nan_in_bf16_stops_the_run(tmp_path, monkeypatch, engine):
    """HO-8, last part: without a scale to lower, the run stops on every rank with the same naming; the state before is
    kept, and counts no step as skipped."""
    monkeypatch.setitem(ENGINE, "engine", engine)
    config = make_run(tmp_path / "run", make_tokenizer(make_model(tmp_path / "model")), save_every=9)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), "bf16", 2, math.nan)
    for lines, scale in pool(2).run(train_with_fault, *arguments):
        assert lines[-1] == "Step 2: non-finite gradient (rank 0, model.embed_tokens.weight)."
        assert scale == (1.0, 1, 0)
    manifest = json.loads((checkpoint_path(tmp_path / "run", 1) / "manifest.json").read_text())
    assert manifest["trainer"]["loss_scale"] == {"value": 1.0, "good_steps": 1, "skipped": 0}
    assert not checkpoint_path(tmp_path / "run", 2).exists()


def test_loss_scale_grows_and_has_an_end(monkeypatch):
    monkeypatch.setattr("fullshard.train.precision.GROWTH_STEPS", 3)
    scale = LossScale(8.0)
    assert all(scale.update(True) for _ in range(7)) and (scale.value, scale.good_steps) == (32, 7)
    assert scale.update(False) and (scale.value, scale.good_steps, scale.skipped) == (16, 0, 1)
    assert [scale.update(False) for _ in range(4)] == [True, True, True, False]  # 8, 4, 2: nothing left
    assert (scale.value, scale.skipped) == (2, 4)
    state = {"loss": 2.0, "tokens_per_second": 10.0, "share_of_peak": 0.5, "memory_bytes": 1e9}
    assert log_text("state", state) == "loss 2.0000  10 tok/s  50% of peak  1.0 GB"
    assert log_text("state", state | scale.metrics).endswith("1.0 GB  scale 2, 4 skipped")
    assert log_text("state", state | LossScale(1.0, 0, 3).metrics).endswith("1.0 GB  3 skipped")  # bf16: unsupervised
    fixed = LossScale(1.0)
    assert all(fixed.update(True) for _ in range(9)) and fixed.value == 1
    assert not fixed.update(False) and fixed.metrics == {}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_fp16_follows_fp32(tmp_path, num_ranks, method):
    """Sharded gradients on any number of ranks; scaled and unscaled by powers of 2, only rounding differs."""
    model, losses = make_tokenizer(make_model(tmp_path / "model")), {}
    for precision in ("fp32", "fp16", "bf16_pure"):
        run = tmp_path / precision
        config = make_run(run, model, method, learning_rate=1e-3)
        arguments = (str(run), config.model_dump(exclude_unset=True), [32, "tokens"], None, precision)
        pool(num_ranks).run(train_on_ranks, *arguments)
        losses[precision] = losses_of(run)
    assert losses["fp16"] != losses["fp32"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-3)
    assert losses["bf16_pure"] == pytest.approx(losses["fp32"], rel=2e-2)


def test_stochastic_rounding():
    """The mean stays, only the two neighbours occur, and the bits depend on key and place alone."""
    value = 1 + 0.3 / 128  # between 1 and 1 + 1/128
    values = torch.full((100_000,), value)
    for sign in (1, -1):
        rounded = round_stochastically(sign * values, 0, "0:1:w")
        assert rounded.dtype == torch.bfloat16
        assert sorted(set((sign * rounded.float()).tolist())) == [1.0, 1 + 1 / 128]
        up = (sign * rounded > 1).float().mean().item()
        assert up == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 100_000))
    whole = round_stochastically(values, 0, "0:1:w")
    parts = [round_stochastically(values[:700], 0, "0:1:w"), round_stochastically(values[700:], 700, "0:1:w")]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, round_stochastically(values, 0, "0:1:w"))
    for key in ("0:2:w", "1:1:w", "0:1:v"):  # another step, seed, tensor: about 42% differ
        assert (round_stochastically(values, 0, key) != whole).float().mean().item() == pytest.approx(0.42, abs=0.02)
    pairs = (whole[:-1] > 1) & (whole[1:] > 1)  # neighbours are independent
    assert pairs.float().mean().item() == pytest.approx(0.09, abs=0.01)
    exact = torch.tensor([1.0, -2.5, 0.0, 3e38, float("inf")])
    assert torch.equal(round_stochastically(exact, 5, "x")[[0, 1, 2, 4]].float(), exact[[0, 1, 2, 4]])


def test_bf16_pure_is_the_same_on_any_number_of_ranks(tmp_path):
    """The rounding is a function of (seed, step, tensor, element): same weights on 1 and 2 ranks, and on resume."""
    model, found = make_tokenizer(make_model(tmp_path / "model")), {}
    for num_ranks in (1, 2):
        run = tmp_path / f"run{num_ranks}"
        config = make_run(run, model, learning_rate=1e-3, save_every=2, keep_last=9)
        arguments = (str(run), config.model_dump(exclude_unset=True), [32, "tokens"])
        pool(num_ranks).run(train_on_ranks, *arguments, None, "bf16_pure")
        found[num_ranks] = stored_tensors(run, 4)
    weights = [name for name in found[1] if name.startswith("weight")]
    assert all(found[2][name].dtype == torch.bfloat16 for name in weights)
    assert all(value.dtype == torch.float32 for name, value in found[2].items() if name not in weights)
    same = sum(int((found[1][name] == found[2][name]).sum()) for name in weights)
    assert same >= 0.97 * sum(found[1][name].numel() for name in weights)  # gradients differ by summation order
    pool(2).run(train_on_ranks, *arguments, 2, "bf16_pure")
    assert all(torch.equal(stored_tensors(run, 4)[name], value) for name, value in found[2].items())


def test_groups_that_cannot_move_are_reported(tmp_path):
    """At 1e-6 the norms' ones (half a step of bf16 below 1: 0.002) stand still, and so do most matrices."""
    model, shares = make_tokenizer(make_model(tmp_path / "model")), {}
    for rate in (1e-6, 1e-1):
        config = make_run(tmp_path / f"run{rate}", model, learning_rate=rate)
        arguments = (str(tmp_path / f"run{rate}"), config.model_dump(exclude_unset=True), "bf16_pure", 0, 0.0)
        lines, _ = pool(2).run(train_with_fault, *arguments)[0]
        line = next(line for line in lines if "parameter groups" in line)
        shares[rate] = line.partition(" parameter groups")[0]
        if rate == 1e-6:
            assert "model.norm.weight 100%" in line and "model.layers.*.input_layernorm.weight 100%" in line
            assert "learning rate 1e-06" in line
    assert shares == {1e-6: "12 of 12", 1e-1: "0 of 12"}


def test_golden_losses(tmp_path):
    """K1, fp32, 2 ranks, 5 steps: the stored losses within 1e-5, and twice on one machine bit for bit the same."""
    model, found = make_tokenizer(make_model(tmp_path / "model")), []
    for name in ("first", "second"):
        config = make_run(tmp_path / name, model, learning_rate=1e-3, epochs=2, max_steps=5)
        pool(2).run(train_on_ranks, str(tmp_path / name), config.model_dump(exclude_unset=True), [32, "tokens"])
        found.append((losses_of(tmp_path / name), stored_tensors(tmp_path / name, 5)))
    (losses, tensors), (again, others) = found
    assert losses == again and all(torch.equal(others[name], value) for name, value in tensors.items())
    assert len(losses) == 5 and losses == pytest.approx(json.loads(GOLDEN.read_text())["losses"], rel=1e-5)


def log_of(ranks, run: str, config: dict, precision: str):
    """The log's lines, and the most weights that were whole at once in a forward and backward, measured in hooks."""
    from torch.distributed.fsdp import FSDPModule

    import fullshard.train.loop as loop

    lines, most = [], []
    say, trial = loop.MetricsLog.say, loop.Trainer._trial_step

    def measured_trial(trainer):
        def count(*_):
            whole = [
                parameter
                for module in trainer.built.loss_model.modules()
                if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
                for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params
                if parameter.unsharded_param.untyped_storage().nbytes()
            ]
            most.append(sum(parameter.unsharded_param.numel() * 2 for parameter in whole))

        with torch.no_grad():
            trainer.built.loss_model(IDS, None)  # gathered parameters exist from here on
        trainer.sharded.after_step()
        for module in trainer.built.loss_model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.register_forward_hook(count)
                module.register_full_backward_hook(count)
        trial(trainer)

    loop.MetricsLog.say, loop.Trainer._trial_step = (lambda log, line: lines.append(line)), measured_trial
    try:
        train_on_ranks(ranks, run, config, [32, "tokens"], None, precision)
    finally:
        loop.MetricsLog.say, loop.Trainer._trial_step = say, trial
    return lines, max(most)


@pytest.mark.parametrize(("tied", "method"), [(False, "full"), (True, "full"), (False, "lora")])
def test_what_is_held_is_printed(tmp_path, tied, method):
    """Real numbers of shards and units. K1: blocks of 2,592, embedding 1,024, norm and head 1,040; 7,248 in all."""
    model = make_tokenizer(make_model(tmp_path / "model", tied=tied))
    config = make_run(tmp_path / "run", model, method)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), "bf16")
    lines, most = pool(2).run(log_of, *arguments)[0]
    gathered = 2 * (2 * 2592 + (1040 if tied else 0))
    outside = " and what lies outside them" if tied else ""
    ending = f"bf16 weights exist only while gathered, at most 2 units{outside}, {gathered / 1e6:.3g} MB"
    rest = 4 * (7248 - (1024 if tied else 0)) / 2
    beginning = f"FP32 copy {rest / 1e6:.3g} MB on this rank (sharded); "
    if method == "lora":
        adapters = 2 * 4 * (4 * 32 + 3 * 48)
        beginning = f"bf16 weights {7248 / 1e6:.3g} MB on this rank (sharded); "
        beginning += f"FP32 copy {4 * adapters / 1e6:.3g} MB on this rank (whole); "
    assert beginning + ending in lines
    assert 0 < most <= gathered
    assert "precision bf16: storage fp32 (frozen bf16), compute bf16, reduce fp32, optimizer fp32" in lines


def test_one_line_a_mode():
    assert {name: log_text("mode", mode) for name, mode in MODES.items()} == {
        "fp32": "precision fp32: storage fp32 (frozen fp32), compute fp32, reduce fp32, optimizer fp32",
        "tf32": "precision tf32: storage fp32 (frozen fp32), compute tf32, reduce fp32, optimizer fp32",
        "bf16": "precision bf16: storage fp32 (frozen bf16), compute bf16, reduce fp32, optimizer fp32",
        "fp16": "precision fp16: storage fp32 (frozen fp16), compute fp16, reduce fp32, optimizer fp32"
        ", loss scale 4096 at first",
        "bf16_pure": "precision bf16_pure: storage bf16 (frozen bf16), compute bf16, reduce fp32, optimizer fp32"
        ", updates rounded stochastically",
    }
    assert precision_of("bf16") == Precision("bf16", torch.bfloat16)


def test_the_recipe_names_every_mode():
    recipe = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "output": "o"}
    for name in ("auto", *MODES):
        assert config_from_dict(recipe | {"train": {"precision": name}}).train.precision == name
