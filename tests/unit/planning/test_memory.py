"""Memory by formulas, against values worked out by hand and against what autograd keeps."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.config import LoraSection
from fullshard.planning.memory import (
    DEVICE_CONTEXT_BYTES,
    MOMENTS,
    Job,
    block_bytes_per_token,
    gathered_parameters,
    largest_unit,
    memory_lines,
    moment_peaks,
)
from fullshard.planning.shape import add_adapter_shape, shape_of

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
K1 = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def on_meta(family, **settings):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))


def job(**changes):
    values = {
        "method": "full",
        "optimizer": "adamw",
        "num_ranks": 2,
        "precision": "fp32",
        "micro_tokens": 128,
        "longest": 32,
        "recompute": False,
        "accumulates": False,
        "adapters": 0,
        "on_cpu": True,
    }
    return Job(**(values | changes))


def by_cause(shape, **changes):
    return {line.cause: line.bytes for line in memory_lines(shape, job(**changes))}


@pytest.fixture(scope="module")
def llama():
    return shape_of(on_meta("llama", **LLAMA_8B))


@pytest.fixture(scope="module")
def k1():
    return shape_of(on_meta("llama", **K1))


def test_llama_8b_counts(llama):
    assert llama.parameters == 8_030_261_248
    # a block: q and o 2 x 4096^2, k and v 2 x 4096 x 1024, three MLP matrices 4096 x 14336, two norms
    assert llama.block == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096 == 218_112_000
    assert llama.embedding == 128256 * 4096 == 525_336_576
    assert llama.head == 525_336_576 + 4096
    assert llama.blocks + llama.embedding + llama.head == llama.parameters
    assert llama.active_block_matrices == llama.blocks - 32 * 2 * 4096
    assert (llama.num_layers, llama.vocab_size, llama.key_value_width, llama.tied) == (32, 128256, 1024, False)


def test_k1_counts_by_hand(k1):
    # a block: 4 x 16 x 16 attention, 3 x 16 x 32 MLP, 2 norms of 16
    assert k1.block == 4 * 256 + 3 * 512 + 32 == 2592
    assert k1.embedding == 64 * 16
    assert k1.head == 64 * 16 + 16
    assert k1.parameters == 2 * 2592 + 1024 + 1040 == 7248


def test_tied_weights_are_one_unit():
    tied = shape_of(on_meta("llama", **K1, tie_word_embeddings=True))
    assert tied.tied
    assert tied.parameters == 7248 - 1024
    assert tied.head == 16
    assert tied.head_matrix == 1024
    assert largest_unit(tied) == 2592
    assert gathered_parameters(tied) == 1024 + 16 + 2 * 2592


def test_states_of_llama_8b_on_64_ranks(llama):
    """16 bytes a parameter over 64 ranks: 1,914.6 MiB, as traced for fully_shard."""
    found = by_cause(llama, num_ranks=64, precision="bf16", on_cpu=False)
    assert found["fp32 masters"] == found["fp32 gradients"] == 4 * 8_030_261_248 // 64 == 501_891_328
    assert found["optimizer state"] == 8 * 8_030_261_248 // 64
    assert found["gathered weights"] == 2 * 2 * 525_340_672  # the head twice, bf16
    assert found["gradient reduction"] == 4 * 525_340_672
    assert "kept gradients" not in found


def test_llama_8b_on_64_ranks_is_near_the_traced_peak(llama):
    """fully_shard, embedding and [norm, head] apart, checkpointing, 1 x 2048 tokens: traced at 6,056 MiB."""
    wanted = job(num_ranks=64, precision="bf16", micro_tokens=2048, longest=2048, recompute=True, on_cpu=False)
    peak = (moment_peaks(llama, wanted)["train"] - DEVICE_CONTEXT_BYTES) / 2**20
    assert 6056 <= peak <= 1.35 * 6056


def test_k1_full_by_hand(k1):
    found = by_cause(k1)
    assert found["fp32 masters"] == 4 * 7248 // 2
    assert found["fp32 gradients"] == 4 * 7248 // 2
    assert found["optimizer state"] == 8 * 7248 // 2
    assert found["gathered weights"] == 4 * (1040 + 2 * 2592)
    assert found["gradient reduction"] == 2 * 4 * 2592  # a block's, and what arrives
    assert found["head's gradient"] == found["embedding's gradient"] == 4 * 1024
    # c (2h + n + 4a + 4f) + 4n with c 4, h 16, n 32, a 16, f 32
    assert found["activations"] == 128 * 2 * (4 * (32 + 32 + 64 + 128) + 4 * 32)
    small_head = 2.125 * 4 * 1024  # below 32 MiB: it stays in the heap
    assert found["allocator slack"] == int(0.29 * (found["activations"] + found["around the blocks"]) + small_head)
    kept = found["activations"] + found["around the blocks"] + found["allocator slack"]
    assert found["memory not given back"] == kept - found["fp32 gradients"]
    assert found["logits chunk"] == 128 * 64 * 4
    assert found["around the blocks"] == 5 * 128 * 32
    assert "optimizer temporary" not in found  # fused
    low = by_cause(k1, precision="bf16")  # smaller tensors leave more holes
    assert low["allocator slack"] == int(0.47 * (low["activations"] + low["around the blocks"]) + small_head / 2)


def test_sgd_has_no_state(k1):
    assert "optimizer state" not in by_cause(k1, optimizer="sgd")


def test_tied_weights_have_two_gradients_and_their_sum():
    tied = shape_of(on_meta("llama", **K1, tie_word_embeddings=True))
    assert by_cause(tied)["embedding's gradient"] == 3 * 4 * 1024
    assert by_cause(tied, accumulates=True)["embedding's gradient"] == (3 + 1) * 4 * 1024
    assert "embedding's gradient" not in by_cause(tied, method="lora", adapters=100)


def test_adapters_leave_holes_and_few_positions_have_logits(k1):
    plain, adapted = (by_cause(k1, method="lora", adapters=100, adapted_outputs=outputs) for outputs in (0, 40))
    assert adapted["activations"] == plain["activations"]
    assert adapted["allocator slack"] - plain["allocator slack"] == pytest.approx(1.19 * 128 * 2 * 4 * 40, abs=1)
    assert by_cause(k1, supervised=0.5)["logits chunk"] == 64 * 64 * 4


def test_the_torch_engine_holds_copies_on_cpu_only(k1):
    def copies(**changes):
        return by_cause(k1, engine="torch", **changes).get("copies of fully_shard", 0)

    blocks, head = 4 * 2 * 2592, 4 * 1024
    assert copies() == int(0.5 * blocks + 0.6 * head)
    assert copies(num_ranks=1) == int(0.6 * head)  # nothing is gathered, but the head's gradient is reduced
    assert copies(num_ranks=1, method="lora", adapters=9) == 0
    assert copies(accumulates=True) == int(0.5 * blocks + 0.6 * head + 1.1 * 4 * 7248)
    assert copies(precision="bf16") == int(0.5 * blocks + 3.9 * head)  # gradients are cast to fp32 for their sums
    assert copies(precision="bf16", method="lora", adapters=9) == int(0.7 * blocks / 2 + 1.1 * head)
    assert copies(on_cpu=False) == 0


def test_a_large_head_leaves_the_heap_when_it_is_freed():
    """glibc maps what has 32 MiB and more apart: 16 x 524,288 numbers of 4 bytes are 32 MiB."""
    under, over = (shape_of(on_meta("llama", **K1 | {"vocab_size": size})) for size in (524_287, 524_288))
    slack = [by_cause(shape, micro_tokens=1)["allocator slack"] for shape in (under, over)]
    assert slack[0] - slack[1] == pytest.approx(2.125 * 4 * 16 * 524_287, abs=2)


def test_several_micro_batches_keep_whole_gradients(k1):
    assert by_cause(k1, accumulates=True)["kept gradients"] == 4 * 7248
    assert by_cause(k1, accumulates=True, num_ranks=4)["kept gradients"] == 4 * 7248
    assert "kept gradients" not in by_cause(k1, accumulates=True, method="lora", adapters=100)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_lora_shares_the_base_and_repeats_the_adapters(k1, num_ranks):
    found = by_cause(k1, method="lora", adapters=1000, num_ranks=num_ranks, precision="bf16")
    assert found["frozen base"] == 2 * 7248 // num_ranks
    assert found["adapters"] == 16 * 1000
    assert not {"fp32 masters", "fp32 gradients", "optimizer state", "gradient reduction"} & set(found)


def test_recomputation_keeps_one_block_and_the_inputs(k1):
    found = by_cause(k1, recompute=True)
    per_token = block_bytes_per_token(k1, 4, 32)
    assert found["block inputs"] == 128 * 2 * 4 * 16
    assert found["recomputed block"] == 128 * per_token
    assert "activations" not in found


def test_peak_is_the_states_and_the_larger_of_backward_and_step(k1):
    lines = memory_lines(k1, job())
    total = {when: sum(line.bytes for line in lines if line.when == when) for when in MOMENTS}
    passing = sum(line.bytes for line in lines if line.cause in ("gathered weights", "gradient reduction"))
    peaks = moment_peaks(k1, job())
    assert total["step"] == total["block"] == 0
    assert peaks["train"] == total["always"] + max(total["backward"] + total["head"], total["late"] + passing)
    assert set(peaks) == {"load", "train", "eval", "save", "merge"}
    assert peaks["load"] == 440_000_000 + 4 * 7248 // 2 + 4 * 1024 + 30_000_000
    # by hand: a block has 2,592 parameters, the head and its norm 1,040; both and one block more are gathered at once
    assert peaks["save"] == total["always"] + 4 * (1040 + 2 * 2592)
    low = memory_lines(k1, job(precision="bf16"))
    always = sum(line.bytes for line in low if line.when == "always")
    assert moment_peaks(k1, job(precision="bf16"))["save"] == always + 2 * (1040 + 2 * 2592) + 4 * 2592
    assert peaks["merge"] == 440_000_000 + 4 * 2592 + 100_000_000


def test_experts_count_only_the_chosen_ones():
    settings = K1 | {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
    shape = shape_of(on_meta("qwen3_moe", **settings))
    experts_of_a_block = 4 * 3 * 16 * 8
    matrices = shape.blocks - 2 * (2 * 16 + 2 * 8)  # without the norms
    assert shape.active_block_matrices == matrices - 2 * experts_of_a_block * 3 // 4
    assert shape.intermediate_size == 8


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapter_size_by_hand(targets):
    found = add_adapter_shape(on_meta("llama", **K1), LoraSection(rank=2, targets=targets))
    # rank x (in + out): q, k, v, o are 16 + 16; gate, up, down are 16 + 32
    if targets == "all-linear":
        assert found.parameters == 2 * 2 * (4 * 32 + 3 * 48)
    else:
        assert found.parameters == 2 * 2 * 2 * 32


FAMILIES = {
    "llama": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {
        "hidden_size": 128,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 128, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def kept_per_token(model, num_tokens):
    """Bytes that autograd keeps of a forward, beside the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    input_ids = torch.zeros(4, num_tokens // 4, dtype=torch.long)
    mask = torch.ones_like(input_ids)
    mask[0, 50:] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids, attention_mask=mask, use_cache=False).logits
    assert logits.requires_grad
    return sum(size for size, _ in kept.values()) / num_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_activation_formula_is_near_what_autograd_keeps(family, dtype):
    counts = []
    for num_layers in (1, 3):
        layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": num_layers}
        settings = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2} | FAMILIES[family] | layers
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=dtype)
        counts.append(kept_per_token(model, 256))
    measured = (counts[1] - counts[0]) / 2
    predicted = block_bytes_per_token(shape_of(model), 4 if dtype == torch.float32 else 2, 64)
    assert 0.9 * measured <= predicted <= 1.2 * measured


@pytest.mark.parametrize(
    ("precision", "held"), [("fp32", 16), ("tf32", 16), ("bf16", 16), ("fp16", 16), ("bf16_pure", 12)]
)
def test_bytes_of_a_trained_parameter(k1, precision, held):
    """Weight, gradient and moments at rest, full and adapters; docs/precision.md has the same table."""
    full = by_cause(k1, precision=precision, num_ranks=1)
    states = [size for cause, size in full.items() if cause.endswith(("masters", "gradients", "optimizer state"))]
    assert sum(states) == held * 7248
    assert by_cause(k1, precision=precision, method="lora", adapters=1000)["adapters"] == held * 1000
    compute = 4 if precision in ("fp32", "tf32") else 2
    assert full["gathered weights"] == compute * (1040 + 2 * 2592)
    loaded = (
        moment_peaks(k1, job(precision=precision, num_ranks=1))["load"] - moment_peaks(k1, job(num_ranks=1))["load"]
    )
    products = 10_000_000 if compute == 2 else 0  # torch's and oneDNN's, kept by shape
    assert loaded == ((2 if precision == "bf16_pure" else 4) - 4) * 7248 + products
