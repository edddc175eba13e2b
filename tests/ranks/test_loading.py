"""Sharded loading against a plain load, on 1, 2 and 4 ranks: every parameter, every buffer, step-1 gradients."""

from __future__ import annotations

import pytest
import torch
from rank_pool import pool
from tiny_models import make_model

from fullshard.config import config_from_dict

FAMILIES = [("llama", False), ("llama", True), ("qwen2", True), ("gpt2", True), ("olmo2", False), ("gemma2", True)]
UNEVEN = {"vocab_size": 65, "hidden_size": 20, "intermediate_size": 33}


def recipe(path, method="full", engine="auto", **train):
    values = {"model": {"path": str(path)}, "data": {"train": "-"}, "method": method, "train": train, "output": "-"}
    return config_from_dict(values | {"engine": engine})


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, 64, (3, 11), generator=generator)
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    labels[0, :7] = -100
    return ids, labels


def load_everything(ranks, path, method, compute, engine="auto"):
    from fullshard.train.precision import precision_of
    from fullshard.train.setup import build_sharded

    built = build_sharded(recipe(path, method, engine), ranks, precision_of(compute), False)
    full = {}
    for shard in built.sharded.shards():
        whole = torch.zeros(shard.full_shape).reshape(-1)
        if built.sharded.replicas(shard.name) == 1 or ranks.is_first:
            whole[shard.start : shard.stop] = shard.value
        full[shard.name] = ranks.sum(whole).reshape(shard.full_shape).to(shard.value.dtype)
    buffers = {name.removeprefix("causal_lm."): buffer.clone() for name, buffer in built.loss_model.named_buffers()}
    ids, labels = batch()
    share = slice(ranks.rank, None, ranks.num_ranks)
    mine = (ids[share], labels[share]) if ranks.rank < 3 else (ids[:1], torch.full_like(labels[:1], -100))
    with built.sharded.microbatch(last=True):
        loss = built.loss_model(*mine)
        loss.backward()
    total = float(ranks.sum(loss.detach().clone()))
    gradients = {}
    for shard in built.sharded.shards():
        if shard.gradient is not None:
            whole = torch.zeros(shard.full_shape).reshape(-1)
            whole[shard.start : shard.stop] = shard.gradient
            if built.sharded.replicas(shard.name) > 1 and not ranks.is_first:
                whole.zero_()
            gradients[shard.name] = ranks.sum(whole).reshape(shard.full_shape)
    rest = [shard.value.untyped_storage() for shard in built.sharded.shards()]
    held = {storage.data_ptr(): storage.nbytes() // 4 for storage in rest}  # fp32 numbers at rest, padding included
    return full, buffers, total, gradients, sum(held.values())


def plain(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    ids, labels = batch()
    logits = model(ids).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return model, float(loss.detach())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_parameters_buffers_and_gradients_equal_a_plain_load(tmp_path, num_ranks, family, tied):
    changes = UNEVEN if family == "llama" and not tied else {}
    path = make_model(tmp_path / "model", family, tied, **changes)
    model, loss = plain(path)
    answers = pool(num_ranks).run(load_everything, str(path), "full", "fp32")
    wanted = dict(model.named_parameters())
    for full, buffers, total, gradients, _ in answers:
        assert set(full) == set(wanted)
        for name, value in full.items():
            assert torch.equal(value, wanted[name]), name
        assert set(buffers) == set(dict(model.named_buffers()))
        for name, value in model.named_buffers():
            assert torch.equal(buffers[name], value) and buffers[name].dtype == value.dtype, name
        assert total == pytest.approx(loss, rel=1e-5)
        for name, parameter in wanted.items():
            assert torch.allclose(gradients[name], parameter.grad, atol=2e-5, rtol=1e-5), name


def test_lora_leaves_the_base_frozen_and_every_rank_holds_the_same_adapter(tmp_path):
    path = make_model(tmp_path / "model")
    _, loss = plain(path)
    one = pool(1).run(load_everything, str(path), "lora", "fp32")[0]
    for full, _, total, gradients, _ in pool(2).run(load_everything, str(path), "lora", "fp32"):
        assert total == pytest.approx(loss, rel=1e-5)  # B is zero: the adapted model is the base
        assert gradients and all(".lora_" in name for name in gradients)
        for name, value in full.items():
            assert torch.equal(value, one[0][name]), name
        for name, value in gradients.items():
            assert torch.allclose(value, one[3][name], atol=1e-5), name
            assert (".lora_B." in name) == bool(value.abs().sum() > 0), name


@pytest.mark.parametrize(("engine", "padding"), [("torch", 0), ("simple", 3 * 256)])
def test_sharding_divides_the_parameters(tmp_path, engine, padding):
    """K1's sizes all divide by 4; the simple engine pads each of three groups (two blocks, the rest) to 256 a rank."""
    path = make_model(tmp_path / "model")
    whole = sum(value.numel() for value in plain(path)[0].parameters())
    for answer in pool(4).run(load_everything, str(path), "full", "fp32", engine):
        assert whole // 4 <= answer[4] <= whole // 4 + padding
