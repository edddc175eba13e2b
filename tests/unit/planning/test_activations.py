"""The trace of a model's activations on fake tensors, against what autograd keeps of the real model with values."""

from __future__ import annotations

import pytest
import torch
from families import CORE, FAMILIES
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig

from fullshard.config import LoraSection, config_from_dict
from fullshard.model.adapters import add_adapters
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.model.blocks import find_blocks, find_decoder, is_adapter
from fullshard.model.load import build_from_config
from fullshard.planning import search
from fullshard.planning.activations import trace_model
from fullshard.planning.memory import block_bytes_per_token
from fullshard.planning.shape import shape_of
from fullshard.train.precision import MODES

K1 = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
K1 |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
LENGTH = 24


def build(family, packing=False, lora=None, **changes):
    """On meta, as the engines build it."""
    settings = K1 | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | FAMILIES[family] | changes
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
                dtype = mode.master if is_adapter(f".{path}.{name}") else mode.compute
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
    elif packing:  # two documents a row
        given = {"position_ids": torch.arange(LENGTH // 2).repeat(2).expand(rows, -1)}
    return find_decoder(model)(input_ids=torch.zeros(shape, dtype=torch.long), use_cache=False, **given)


def total(trace, rows):
    return trace.bytes_of(rows * LENGTH, [*trace.blocks, trace.around])[0]


def compare(family, mode, packing=False, lora=None, **changes):
    trace = trace_model(build(family, packing, lora, **changes), mode, LENGTH, packing, "cpu")
    model = real(build(family, packing, lora, **changes), mode)
    kept = kept_by(model, lambda: forward(model, 5, packing))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return total(trace, 5), measured


@pytest.mark.parametrize(("family", "packing"), [(name, place % 2 > 0) for place, name in enumerate(CORE)])
def test_the_trace_is_what_autograd_keeps(family, packing):
    traced, measured = compare(family, MODES["bf16"], packing)
    assert traced == measured


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize(("family", "variant"), [("llama", "lora"), ("gemma3_text", "dora"), ("gpt2", "lora")])
def test_with_adapters(family, variant, mode):
    traced, measured = compare(family, MODES[mode], True, LoraSection(rank=2, variant=variant), num_hidden_layers=5)
    assert traced == measured


@pytest.mark.parametrize(
    ("family", "mode"), [("llama", "fp32"), ("gpt2", "fp32"), ("gpt2", "bf16"), ("qwen3_moe", "bf16")]
)
def test_a_recomputed_block_keeps_all_but_its_input(family, mode):
    """Against one block of the real model, called alone."""
    trace = trace_model(build(family), MODES[mode], LENGTH, False, "cpu")
    model, given = real(build(family), MODES[mode]), {}
    block = find_blocks(model)[1][1]
    hook = block.register_forward_pre_hook(lambda _, *inputs: given.update(inputs=inputs), with_kwargs=True)
    with torch.no_grad():
        forward(model, 3, False)
    hook.remove()
    (hidden, *others), named = given["inputs"]
    hidden = hidden.detach().requires_grad_()
    outside = [hidden, *others, *named.values(), *named.get("position_embeddings", ())]
    outside = {one.untyped_storage().data_ptr() for one in outside if isinstance(one, torch.Tensor)}
    kept = kept_by(model, lambda: block(hidden, *others, **named))
    measured = sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in outside)
    assert trace.bytes_of(3 * LENGTH, [trace.again[1]])[0] == measured


def test_alike_blocks_are_run_twice_and_count_as_often_as_they_are():
    """gemma3: five blocks with a window, then one without."""
    changes = {"num_hidden_layers": 13, "sliding_window": 8}
    traced, measured = compare("gemma3_text", MODES["bf16"], False, **changes)
    assert traced == measured
    trace = trace_model(build("gemma3_text", **changes), MODES["bf16"], LENGTH, False, "cpu")
    assert len(trace.blocks) == 13 and trace.blocks[1] == trace.blocks[12] and trace.blocks[11] != trace.blocks[6]


def test_the_packed_kernel_of_an_accelerator_joins_nothing_and_needs_no_window():
    changes = {"num_hidden_layers": 6, "sliding_window": 8}
    here, there = (
        trace_model(build("gemma3_text", True, **changes), MODES["bf16"], LENGTH, True, kind)
        for kind in ("cpu", "cuda")
    )
    joined, masks = 2 * LENGTH * 2 * 8, 2 * LENGTH * LENGTH  # bf16 x tokens x heads x features; a mask in bf16
    more = [one.row - other.row for one, other in zip(here.blocks, there.blocks, strict=True)]
    assert more[5] == joined and more[1] >= joined + masks
    assert trace_model(build("gemma3_text", True, **changes), MODES["fp32"], LENGTH, True, "cuda") == trace_model(
        build("gemma3_text", True, **changes), MODES["fp32"], LENGTH, True, "cpu"
    )


@pytest.mark.parametrize(
    ("family", "low", "high"),
    [("llama", 0.95, 1.0), ("qwen2", 0.95, 1.0), ("qwen3", 0.94, 1.0), ("gemma3_text", 1.0, 1.4), ("mixtral", 1.0, 1.6),
     ("qwen3_moe", 1.0, 1.6)],
)  # fmt: skip
def test_the_formula_is_near_the_trace(family, low, high):
    """What trainers of published runs are predicted by, on wide blocks: it repeats keys, and forgets gates' routing."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 1536, "num_attention_heads": 8}
    wide |= {"head_dim": 64, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts": 4}
    model = build(family, True, **wide)
    formula = block_bytes_per_token(shape_of(model), 2, 64)
    trace = trace_model(model, MODES["bf16"], 64, True, "cuda")
    assert low <= trace.blocks[1].row / 64 / formula <= high


def test_a_plan_says_where_nothing_could_be_traced(monkeypatch, tmp_path):
    build("llama", num_hidden_layers=3).config.save_pretrained(tmp_path)
    values = {"model": {"path": str(tmp_path)}, "data": {"train": "rows.jsonl", "max_length": 64}, "output": "run"}
    config = config_from_dict(values)
    known = search.make_plan(config, devices="2x4090", rows=100)
    assert not any("by a formula" in note for note in known.notes)

    def fail(*_):
        raise RuntimeError("reads values")

    monkeypatch.setattr(search, "trace_model", fail)
    formula = search.make_plan(config, devices="2x4090", rows=100)
    assert any("could not be traced: their activations are by a formula" in note for note in formula.notes)
    assert formula.moments["train"] != known.moments["train"]
