"""torchtitan's DCP folders: its names, and llama's rotary pairs, which it keeps side by side (as Meta did)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_by_hand import load_fp32, logits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import make_model, make_tokenizer

from fullshard.errors import MergeError
from fullshard.merge.job import merge_run
from fullshard.merge.readers.foreign import PairedRows
from fullshard.model.load import read_header

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is (disabled|unavailable).*"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
HEADS, KEY_HEADS, HEAD = 4, 2, 8  # more than two pairs a head: else the order is its own inverse
LLAMA = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD}
PER_LAYER = {
    "attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
}  # fmt: skip


def side_by_side(weight: torch.Tensor) -> torch.Tensor:
    """Row i and row i + HEAD / 2 of each head become neighbours, one row at a time."""
    rows = []
    for head in range(len(weight) // HEAD):
        for pair in range(HEAD // 2):
            rows += [weight[head * HEAD + pair], weight[head * HEAD + HEAD // 2 + pair]]
    return torch.stack(rows)


def torchtitans(model, paired: bool, is_new: bool = False) -> dict[str, torch.Tensor]:
    """A model's weights under torchtitan's names; ``is_new``: those since 2026."""
    state, found = model.state_dict(), {}
    found["tok_embeddings.weight"] = state["model.embed_tokens.weight"]
    found["norm.weight"] = state["model.norm.weight"]
    found["lm_head.weight" if is_new else "output.weight"] = state["lm_head.weight"]
    for layer in range(2):
        for theirs, ours in PER_LAYER.items():
            if (name := f"model.layers.{layer}.{ours}.weight") in state:
                turns = paired and theirs in ("attention.wq", "attention.wk")
                qkv = is_new and theirs in ("attention.wq", "attention.wk", "attention.wv")
                new = theirs.replace(".", ".qkv_linear.") if qkv else theirs
                found[f"layers.{layer}.{new}.weight"] = side_by_side(state[name]) if turns else state[name]
    assert len(found) == len(state)
    return {name: value.clone() for name, value in found.items()}


def moved(base):
    model, draw = load_fp32(base), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dense_models(tmp_path, family, is_new):
    base = make_tokenizer(make_model(tmp_path / "base", family, **LLAMA))
    tuned = moved(base)
    state = torchtitans(tuned, family == "llama", is_new)
    beside = {
        "optimizer": {f"state.{name}.exp_avg": value for name, value in state.items()},
        "train_state": {"step": torch.tensor(7)}, "lr_scheduler": {"last_epoch": 7},
        "freqs_cis": torch.ones(3, dtype=torch.complex64),
    }  # fmt: skip
    dcp.save(state | beside, checkpoint_id=tmp_path / "step-7")
    merged = load_fp32(merge_run(tmp_path / "step-7", tmp_path / "out", base=str(base)).folder)
    assert torch.equal(logits_of(merged), logits_of(tuned))
    for name, value in tuned.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name


def test_tied(tmp_path):
    base = make_tokenizer(make_model(tmp_path / "base", tied=True, **LLAMA))
    tuned = moved(base)
    dcp.save(torchtitans(tuned, True), checkpoint_id=tmp_path / "step-7")
    merged = load_fp32(merge_run(tmp_path / "step-7", tmp_path / "out", base=str(base)).folder)
    assert torch.equal(logits_of(merged), logits_of(tuned))


def test_the_merged_model_attends_as_the_pairs_say(tmp_path):
    """The first layer's attention from torchtitan's own tensors: neighbours are complex numbers that are turned."""
    base = make_tokenizer(make_model(tmp_path / "base", **LLAMA))
    state = torchtitans(moved(base), True)
    dcp.save(state, checkpoint_id=tmp_path / "step-7")
    merged = load_fp32(merge_run(tmp_path / "step-7", tmp_path / "out", base=str(base)).folder)
    merged.set_attn_implementation("eager")
    ids = torch.arange(9)[None] * 5
    with torch.no_grad():
        found = merged(input_ids=ids, output_attentions=True).attentions[0][0].double().numpy()
    own = {name: value.double().numpy() for name, value in state.items()}
    x = own["tok_embeddings.weight"][ids[0]]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + merged.config.rms_norm_eps) * own["layers.0.attention_norm.weight"]
    turn = np.exp(1j * np.outer(np.arange(9), 10_000.0 ** (-np.arange(0, HEAD, 2) / HEAD)))[:, None]

    def turned(kind):
        made = (x @ own[f"layers.0.attention.{kind}.weight"].T).reshape(9, -1, HEAD // 2, 2)
        return (made[..., 0] + 1j * made[..., 1]) * turn

    queries, keys = turned("wq"), np.repeat(turned("wk"), HEADS // KEY_HEADS, 1)
    scores = np.einsum("qhp,khp->hqk", queries, keys.conj()).real / np.sqrt(HEAD)
    scores[:, np.triu(np.ones((9, 9), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(found, weights / weights.sum(-1, keepdims=True), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(heads=st.integers(1, 3), width=st.integers(1, 4), data=st.data())
def test_any_range_of_paired_rows(tmp_path_factory, heads, width, data):
    path = tmp_path_factory.mktemp("rows") / "model.safetensors"
    whole = torch.arange(heads * HEAD * width).float().view(-1, width)
    save_file({"w": side_by_side(whole)}, path)
    stored = read_header(path)["w"]
    start = data.draw(st.integers(0, whole.numel() - 1))
    stop = data.draw(st.integers(start + 1, whole.numel()))
    found = PairedRows(stored.shape, stored.dtype, stored.parts, HEAD)
    assert torch.equal(found.read(start, stop), whole.view(-1)[start:stop])
    assert torch.equal(found.whole(), whole)


def test_other_models_are_named_with_torchtitans_converter(tmp_path):
    base = make_tokenizer(make_model(tmp_path / "base", "qwen3_moe"))
    dcp.save({"tok_embeddings.weight": torch.ones(64, 16)}, checkpoint_id=tmp_path / "step-7")
    wanted = "read for dense llama and qwen3 models; the base is of the family qwen3_moe"
    with pytest.raises(MergeError, match=wanted) as caught:
        merge_run(tmp_path / "step-7", tmp_path / "out", base=str(base))
    assert "convert_to_hf.py" in caught.value.hint and "last_save_in_hf" in caught.value.hint


def test_experts_on_a_dense_base_are_strange(tmp_path):
    base = make_tokenizer(make_model(tmp_path / "base", **LLAMA))
    state = torchtitans(moved(base), True) | {"layers.0.moe.router.gate.weight": torch.ones(2, 16)}
    dcp.save(state, checkpoint_id=tmp_path / "step-7")
    with pytest.raises(MergeError, match=r"1 names are no parameter of the base model: .*layers\.0\.moe\.router"):
        merge_run(tmp_path / "step-7", tmp_path / "out", base=str(base))
