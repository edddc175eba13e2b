"""HO-7 and HO-10: a bf16 base with fp32 norms under LoRA, and buffers that no file holds, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_pool import pool
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_tokenizer

from fullshard.config import config_from_dict
from fullshard.data.prepared import prepare
from fullshard.model.blocks import is_adapter
from fullshard.run_folder import PREPARED
from fullshard.train.precision import precision_of

SCALES = (0.0, 0.1, 0.2, 0.3)
IDS = torch.arange(8, 20)[None]


def recipe(path, method: str, engine: str = "torch"):
    lora = {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}} if method == "lora" else {}
    values = {"model": {"path": str(path)}, "data": {"train": "x"}, "output": "y", "method": method, **lora}
    return config_from_dict(values | {"engine": engine, "train": {"optimizer": "sgd", "learning_rate": 0.5}})


def one_bf16_step(ranks, path: str, engine: str):
    """Build, take one SGD step, and say what every shard is: (dtype, trained, has gradient, changed) by name."""
    from fullshard.train.optimizer import build_optimizer
    from fullshard.train.setup import build_sharded

    config = recipe(path, "lora", engine)
    built = build_sharded(config, ranks, precision_of("bf16"), False)
    optimizer, _ = build_optimizer(config, built.sharded)
    computed = set()
    for name, module in built.loss_model.named_modules():
        if name.endswith(("lora_A.default", "mlp.up_proj")):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: computed.add((name.split(".")[-1], str(output.dtype)))
            )
    before = {shard.name: shard.value.clone() for shard in built.sharded.shards()}
    labels = torch.roll(IDS, -1, 1)
    gradients = {}
    for _ in range(2):  # B starts at zero, so that A has a gradient from the second step on
        with built.sharded.microbatch(True):
            built.loss_model(IDS, labels).backward()
        gradients = {shard.name: shard.gradient is not None for shard in built.sharded.shards()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        built.sharded.after_step()
    facts = {}
    for shard in built.sharded.shards():
        changed = not torch.equal(shard.value, before[shard.name])
        facts[shard.name] = (str(shard.value.dtype), shard.trainable, gradients[shard.name], changed)
    return built.report, facts, sorted(computed)


@pytest.mark.parametrize("engine", ["torch", "simple"])
def test_mixed_dtypes_with_lora(tmp_path, engine):
    """HO-7: adapters stay fp32 and move; the base stays bit for bit and has no gradient; the table says what shards
    are."""
    path = make_tokenizer(make_model(tmp_path / "base"))
    tensors = load_file(path / "model.safetensors")
    tensors = {name: value if "norm" in name else value.bfloat16() for name, value in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (report, facts, computed), (_, other, _) = pool(2).run(one_bf16_step, str(path), engine)
    assert facts == other or engine == "simple"  # which also splits the adapters: some ranges are empty
    facts = {name: (*fact[:3], fact[3] or other[name][3]) for name, fact in facts.items()}
    for name, (dtype, trained, has_gradient, changed) in facts.items():
        expected = ("torch.float32", True, True, True) if is_adapter(name) else ("torch.bfloat16", False, False, False)
        assert (dtype, trained, has_gradient, changed) == expected, name
    table = [line.split() for line in report if line.split()[0] in ("adapters", "matrices", "norms")]
    assert table == [
        ["matrices", "16", "bf16", "bf16", "bf16", "-", "frozen"],
        ["adapters", "8", "-", "fp32", "bf16", "fp32", "yes"],
        ["norms", "and", "biases", "5", "f32", "bf16", "bf16", "-", "frozen"],
    ]
    assert computed == [("default", "torch.bfloat16"), ("up_proj", "torch.bfloat16")]  # what the table says
    assert sum(is_adapter(name) for name in facts) == 8 and len(facts) == 16 + 8 + 5


def chunked_step(ranks, path: str, micro_tokens: int):
    """One bf16 forward and backward with chunks of 3 rows: this rank's gradients, and dtypes sent by unit."""
    from fullshard.shard.simple.unit import Group
    from fullshard.train import loss, setup

    sent, start, chunk_bytes = {}, Group.start_reduce, loss.CHUNK_LOGIT_BYTES
    loss.CHUNK_LOGIT_BYTES = 4 * 64 * 3

    def watched(group) -> None:
        start(group)
        sent.setdefault(group.unit.name.removeprefix("causal_lm."), set()).add(str(group._sent_WS.dtype))

    Group.start_reduce = watched
    try:
        built = setup.build_sharded(
            recipe(path, "full", "simple"), ranks, precision_of("bf16"), False, micro_tokens=micro_tokens
        )
        with built.sharded.microbatch(True):
            built.loss_model(IDS + ranks.rank, torch.roll(IDS, -1, 1) + ranks.rank).backward()
    finally:
        Group.start_reduce, loss.CHUNK_LOGIT_BYTES = start, chunk_bytes
    return {shard.name: (shard.start, shard.stop, shard.gradient.clone()) for shard in built.sharded.shards()}, sent


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_summed_in_fp32_travels_in_fp32(tmp_path, tied):
    """The head's, where its loss is computed in chunks, with one micro-batch: equal to the fp32 sum over ranks of what
    each rank summed in fp32. Where a micro-batch fits one chunk, nothing is summed, and bf16 travels."""
    from transformers import AutoModelForCausalLM

    from fullshard.train.loss import LossModel

    path = make_tokenizer(make_model(tmp_path / "base", tied=tied))
    wanted = 0.0
    for rank in range(2):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)).train()
        model.chunk_rows, head = 3, model.causal_lm.lm_head.weight
        head.grad_dtype = None
        model(IDS + rank, torch.roll(IDS, -1, 1) + rank).backward()
        assert head.grad.dtype == torch.float32
        wanted = wanted + head.grad
    holder = "the rest" if tied else "model.norm + lm_head"
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    for micro_tokens, dtype in ((12, "torch.float32"), (3, "torch.bfloat16")):
        answers = pool(2).run(chunked_step, str(path), micro_tokens)
        found = torch.cat([gradients[name][2] for gradients, _ in answers]).view_as(wanted)
        error = float((found - wanted).norm() / wanted.norm())
        assert error < 1e-6 if micro_tokens == 12 else 1e-4 < error < 1e-2
        for _, sent in answers:
            assert sent[holder] == {dtype}
            assert sent["model.layers.0"] == {"torch.bfloat16"}


def run_in_small_chunks(ranks, run: str, config: dict) -> set[str]:
    """A bf16 run in micro-batches of 4 tokens, chunks of 8 rows; the dtypes in which the head's gradient was sent."""
    from fullshard.shard.simple.unit import Group
    from fullshard.train import loop, loss

    sent, start, chunk_bytes = set(), Group.start_reduce, loss.CHUNK_LOGIT_BYTES

    def watched(group) -> None:
        start(group)
        if "lm_head" in group.unit.name:
            sent.add(str(group._sent_WS.dtype))

    plan = {"micro_batch": [4, "tokens"], "precision": "bf16", "recompute": False}
    Group.start_reduce, loss.CHUNK_LOGIT_BYTES = watched, 4 * 64 * 8
    try:
        loop.run_rank(Path(run), config_from_dict(config), plan, ranks, None, True)
    finally:
        Group.start_reduce, loss.CHUNK_LOGIT_BYTES = start, chunk_bytes
    return sent


def test_a_row_longer_than_a_micro_batch_has_its_head_summed_in_fp32(tmp_path):
    """It goes alone, in several chunks, though a micro-batch of the plan would fit one: the sums travel in fp32."""
    model = make_tokenizer(make_model(tmp_path / "base", tied=False))
    turns = [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": " ".join(["green"] * 20)}]
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 2))
    config = config_from_dict(
        {
            "model": {"path": str(model)},
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "packing": False},
            "train": {"global_batch": "2 rows", "epochs": 1},
            "output": str(tmp_path),
            "method": "full",
            "engine": "simple",
        }
    )
    prepare(config, tmp_path / PREPARED)
    answers = pool(2).run(run_in_small_chunks, str(tmp_path), config.model_dump(exclude_unset=True))
    assert answers == [{"torch.float32"}] * 2


def test_a_parameter_that_is_no_float_is_named(tmp_path):
    """HO-7, last part: int8 in the files or in the model itself, fp8 in the model."""
    from fullshard.errors import ConfigError, ModelError
    from fullshard.model.load import WeightFiles, build_on_meta
    from fullshard.model.weight_map import WeightMap
    from fullshard.train.precision import set_storage

    path = make_tokenizer(make_model(tmp_path / "base"))
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path / "model.safetensors", {"format": "pt"})
    model = build_on_meta(str(path))
    with pytest.raises(ModelError, match=f"{name} is stored as I8"):
        WeightMap(model, WeightFiles(str(path)), str(path), ())
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weight = torch.empty(32, 16, dtype=dtype, device="meta")
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ConfigError, match=f"Parameter {name} is {dtype}"):
            set_storage(model, precision_of("bf16"))


def register_k1_with_buffer() -> None:
    """A family of its own in this process: llama plus the buffer [0, .1, .2, .3]."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, initialization
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "k1_with_buffer" in CONFIG_MAPPING:
        return

    class K1Config(LlamaConfig):
        model_type = "k1_with_buffer"

    class K1Model(LlamaForCausalLM):
        config_class = K1Config

        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("scales", torch.tensor(SCALES), persistent=False)

        def _init_weights(self, module):
            super()._init_weights(module)
            if hasattr(module, "scales"):
                initialization.copy_(module.scales, torch.tensor(SCALES))

    AutoConfig.register("k1_with_buffer", K1Config)
    AutoModelForCausalLM.register(K1Config, K1Model)


def buffers_after_loading(ranks, path: str, precision: str, engine: str):
    """Poison the allocator with NaN blocks of the buffers' sizes, load sharded, return buffers, logits, report."""
    from fullshard.train.setup import build_sharded

    register_k1_with_buffer()
    poison = [torch.full((size,), float("nan")) for size in (4, 4, 4, 8, 8) for _ in range(50)]
    del poison
    built = build_sharded(recipe(path, "full", engine), ranks, precision_of(precision), False)
    with torch.no_grad():
        logits = built.loss_model(IDS, None)
    buffers = {name.removeprefix("causal_lm."): value.clone() for name, value in built.loss_model.named_buffers()}
    return buffers, logits, built.report


@pytest.mark.parametrize("engine", ["torch", "simple"])
def test_buffers_after_deferred_loading(tmp_path, engine):
    """HO-10: fp32 and bit for bit those of a plain load on every rank; logits agree over ranks and with one process."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    register_k1_with_buffer()
    source = LlamaForCausalLM.from_pretrained(make_model(tmp_path / "llama"))
    config = source.config.to_dict() | {"model_type": "k1_with_buffer", "architectures": ["K1Model"]}
    path = tmp_path / "k1"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes((tmp_path / "llama" / "model.safetensors").read_bytes())
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = dict(plain.named_buffers())
    assert sorted(wanted) == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq", "scales"]
    with torch.no_grad():
        expected = plain(IDS).logits
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 1e-2)):
        answers = pool(2).run(buffers_after_loading, str(path), precision, engine)
        for buffers, logits, report in answers:
            assert sorted(buffers) == sorted(wanted)
            for name, value in buffers.items():
                assert value.dtype == torch.float32 and torch.equal(value, wanted[name]), name
            assert torch.allclose(logits, expected, atol=tolerance, rtol=0)
            assert torch.equal(logits, answers[0][1])
            assert "3 buffers verified on 2 ranks" in report


def names_written(ranks, path: str, recompute: bool):
    from fullshard.model.blocks import stored_name
    from fullshard.train.setup import build_sharded

    built = build_sharded(recipe(path, "lora"), ranks, precision_of("fp32"), recompute)
    return [stored_name(shard.name) for shard in built.sharded.shards() if shard.trainable]


def test_names_are_the_same_with_and_without_recomputation(tmp_path):
    """HO-13, last part: what a run writes is named as PEFT names it, whatever wraps the model."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    path = make_tokenizer(make_model(tmp_path / "base"))
    plain = AutoModelForCausalLM.from_pretrained(path)
    peft = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    expected = sorted(get_peft_model_state_dict(peft))
    for num_ranks, recompute in ((1, False), (2, False), (2, True)):
        for names in pool(num_ranks).run(names_written, str(path), recompute):
            assert sorted(names) == expected
    assert len(expected) == 8
