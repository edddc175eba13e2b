"""The trace of a model's activations on fake tensors, against what autograd keeps of the real model with values."""

from __future__ import annotations

import pytest
import torch
from families import CORE, FAMILIES
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig

from fullshard.config import LoraSection
from fullshard.model.adapters import add_adapters
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.model.blocks import find_decoder, is_adapter
from fullshard.model.load import build_from_config
from fullshard.planning.activations import trace_model
from fullshard.planning.search import Machine
from fullshard.planning.speed import Rates
from fullshard.train.precision import MODES

K1 = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
K1 |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
LENGTH = 24
GPU = Machine("cuda", 80_000_000_000, Rates(20e12, 150e12, 1))


def build(family, packing=False, lora=None, **changes):
    """On meta, as the engines build it."""
    settings = K1 | FAMILIES[family] | changes
    model = build_from_config(AutoConfig.for_model(family, **settings), family, packing)
    if lora:
        add_adapters(model, lora)
    return model


def real(model, mode):
    """With values, in the dtypes that forward sees."""
    made = {}
    for path, module in model.train().named_modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                dtype = torch.float32 if is_adapter(f".{path}.{name}") else mode.compute
                fresh = torch.nn.Parameter(0.1 * torch.randn(weight.shape).to(dtype), weight.requires_grad)
                module._parameters[name] = made.setdefault(id(weight), fresh)
    return model


def kept_by(model, call):
    """Bytes of all storages that autograd keeps of a call, but for the weights."""
    weights, kept = {weight.untyped_storage().data_ptr() for weight in model.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call()
    assert output is not None
    return {place: tensor for place, tensor in kept.items() if place not in weights}


def forward(model, rows, packing):
    given, shape = {}, (rows, LENGTH)
    if packing and model.config._attn_implementation == BY_DOCUMENT:
        given, shape = {"documents": Documents([[LENGTH] * rows])}, (1, rows * LENGTH)
        given["position_ids"] = torch.arange(LENGTH).repeat(rows)[None]
    elif packing:
        given = {"attention_mask": torch.ones(rows, 1, LENGTH, LENGTH, dtype=torch.bool)}
    return find_decoder(model)(input_ids=torch.zeros(shape, dtype=torch.long), use_cache=False, **given)


def total(trace, rows):
    return trace.bytes_of(rows * LENGTH, [*trace.blocks, trace.around])[0]


def compare(family, mode, packing=False, lora=None, **changes):
    trace = trace_model(build(family, packing, lora, **changes), mode, LENGTH, packing)
    model = real(build(family, packing, lora, **changes), mode)
    kept = kept_by(model, lambda: forward(model, 5, packing))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return total(trace, 5), measured


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", CORE)
def test_the_trace_is_what_autograd_keeps(family, packing):
    traced, measured = compare(family, MODES["bf16"], packing)
    assert traced == measured


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_with_adapters(family, variant, mode):
    traced, measured = compare(family, MODES[mode], True, LoraSection(rank=2, variant=variant), num_hidden_layers=5)
    assert traced == measured
