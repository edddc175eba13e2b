"""Adapters that do not fit are refused with the first name that does not (HO-13)."""

from __future__ import annotations

import re

import pytest
import torch
from checkpoint_by_hand import load_fp32, logits_of, lora_run, rehash, write_run
from tiny_models import make_model, make_tokenizer

from fullshard.errors import MergeError
from fullshard.merge.job import merge_run

SETTINGS = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "v_proj"], "variant": "lora"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tokenizer(make_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, base):
    return lora_run(tmp_path_factory.mktemp("good") / "run", base, ["q_proj", "v_proj"])[1]


def merge_renamed(tmp_path, base, weights, settings=SETTINGS):
    write_run(tmp_path / "run", base, weights, logits_of(load_fp32(base)), "lora", adapter=settings)
    return merge_run(tmp_path / "run")


def test_eight_tensors_are_four_adapters(tmp_path, base):
    _, weights, _ = lora_run(tmp_path / "run", base, ["q_proj", "v_proj"])
    assert len(weights) == 8
    assert "adapters: 4 of 4 have moved" in "\n".join(merge_run(tmp_path / "run").lines)


def test_one_that_never_moved_is_counted(tmp_path, base):
    lora_run(tmp_path / "run", base, ["q_proj", "v_proj"], zero="first")
    assert "adapters: 3 of 4 have moved" in "\n".join(merge_run(tmp_path / "run").lines)


def test_none_that_moved_is_refused(tmp_path, base):
    lora_run(tmp_path / "run", base, ["q_proj", "v_proj"], zero="all")
    with pytest.raises(MergeError, match="The adapter never moved: all 4 B"):
        merge_run(tmp_path / "run")
    assert not (tmp_path / "run/merged").exists()


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: "_orig_mod." + name,
        lambda name: "module." + name,
        lambda name: name.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
        lambda name: name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
        lambda name: name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1."),
    ],
)
def test_names_of_other_wrappings_and_layers_are_refused(tmp_path, base, adapter, rename):
    weights = {rename(name): value for name, value in adapter.items()}
    with pytest.raises(MergeError) as caught:
        merge_renamed(tmp_path, base, weights)
    assert any(name in caught.value.message for name in weights)


def test_empty_and_halved_adapters_are_refused(tmp_path, base, adapter):
    with pytest.raises(MergeError, match="no adapter tensors"):
        merge_renamed(tmp_path / "empty", base, {})
    half = {name: value for name, value in adapter.items() if "lora_A" in name}
    with pytest.raises(
        MergeError, match=re.escape(next(iter(half)).replace("lora_A", "lora_B")) + r" is missing \(4 such"
    ):
        merge_renamed(tmp_path / "half", base, half)


def test_adapter_of_a_wider_base_is_refused(tmp_path, base):
    wide = make_tokenizer(make_model(tmp_path / "wide", hidden_size=32))
    _, weights, _ = lora_run(tmp_path / "wide_run", wide, ["q_proj", "v_proj"])
    with pytest.raises(MergeError, match=r"lora_A\.weight has shape \(2, 32\).*needs \(2, 16\)"):
        merge_renamed(tmp_path, base, weights)


def test_another_rank_than_said_is_refused(tmp_path, base, adapter):
    with pytest.raises(MergeError, match=r"needs \(4, 16\)"):
        merge_renamed(tmp_path, base, adapter, SETTINGS | {"rank": 4})


def test_an_adapter_on_a_shared_weight_is_refused(tmp_path):
    tied = make_tokenizer(make_model(tmp_path / "tied", tied=True))
    lora_run(tmp_path / "run", tied, ["embed_tokens"])
    with pytest.raises(MergeError, match=r"adapts model\.embed_tokens, whose weight the embedding and the head share"):
        merge_run(tmp_path / "run")


def test_a_wrong_scale_fails_the_proof(tmp_path, base):
    from fullshard.checkpoint.format import MANIFEST
    from fullshard.run_folder import read_json, write_json

    checkpoint, _, _ = lora_run(tmp_path / "run", base, ["q_proj", "v_proj", "down_proj"])
    manifest = read_json(checkpoint / MANIFEST)
    manifest["trainer"]["adapter"]["alpha"] = 5.0
    write_json(checkpoint / MANIFEST, manifest)
    rehash(checkpoint)
    with pytest.raises(MergeError, match="not the training state"):
        merge_run(tmp_path / "run")


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_what_is_folded_is_computed_again(tmp_path, base, monkeypatch, variant):
    """A fold that is off by 1e-4 of itself on one row, less than the logits show, is refused."""
    from fullshard.merge.weights import Adapter

    lora_run(tmp_path / "run", base, ["q_proj", "v_proj"], variant=variant)
    right = Adapter.fold

    def off(self, rows, first_row):
        folded = right(self, rows, first_row)
        if folded.dtype == torch.float32:
            folded[0] *= 1 + 1e-4
        return folded

    monkeypatch.setattr(Adapter, "fold", off)
    with pytest.raises(MergeError, match=r"q_proj\.weight: what was folded into it is not s B A"):
        merge_run(tmp_path / "run")


def test_folds_in_float64_are_by_hand():
    """W + s B A of experts stacked in front, a block of them, and with DoRA's factor."""
    from fullshard.merge.weights import Adapter

    left, right = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]]])
    second = Adapter(left, right, 0.5, True).fold(torch.ones(1, 2, 2, dtype=torch.float64), 1)
    assert second.dtype == torch.float64 and second.tolist() == [[[4.0, 31.0], [5.0, 41.0]]]
    factor = torch.tensor([[1.0], [2.0]])
    folded = Adapter(left[0], right[0], 1.0, True, factor).fold(torch.zeros(1, 2, dtype=torch.float64), 1)
    assert folded.tolist() == [[4.0, 40.0]]


def test_scales_of_the_variants(base):
    """alpha / rank; alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732)."""
    from fullshard.config import LoraSection
    from fullshard.merge.weights import ModelNames

    for variant, scale in (("lora", 2.0), ("rslora", 4.0), ("dora", 2.0)):
        names = ModelNames(base, LoraSection(**SETTINGS | {"rank": 4, "alpha": 8, "variant": variant}))
        assert {place.scale for place in names.places.values()} == {scale}
        assert {place.has_magnitude for place in names.places.values()} == {variant == "dora"}


@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_folding_equals_pefts_own_merge(tmp_path, family, variant):
    base = make_tokenizer(make_model(tmp_path / "base", family))
    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "down_proj"]
    _, _, merged = lora_run(tmp_path / "run", base, targets, variant=variant)
    ours = load_fp32(merge_run(tmp_path / "run").folder)
    for (name, value), expected in zip(ours.named_parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_full_checkpoint_of_another_model_is_refused(tmp_path, base):
    model = load_fp32(base)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    renamed = {name.replace("layers.1.", "layers.2."): value for name, value in weights.items()}
    write_run(tmp_path / "renamed", base, renamed, logits_of(model), "full")
    with pytest.raises(MergeError, match=r"model\.layers\.2\..* no such parameter"):
        merge_run(tmp_path / "renamed")
    weights.pop("model.norm.weight")
    write_run(tmp_path / "short", base, weights, logits_of(model), "full")
    with pytest.raises(MergeError, match=r"parameters: model\.norm\.weight"):
        merge_run(tmp_path / "short")
