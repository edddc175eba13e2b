"""Every family: two steps on two ranks, full and LoRA, merged; losses and logits equal the unsharded oracle's."""

from __future__ import annotations

import json

import pytest
import torch
from families import CORE, FAMILIES
from rank_pool import pool
from safetensors.torch import load_file, save_file
from test_training import SGD, losses_of, make_reference_vocabulary, make_run, oracle_model, train_on_ranks
from tiny_models import VOCABULARY, make_model, make_tokenizer

from fullshard.config import LoraSection, config_from_dict
from fullshard.data.chat import added_ids, load_tokenizer
from fullshard.data.prepared import prepare
from fullshard.errors import ConfigError, DataError, ModelError, UserError
from fullshard.merge.job import merge_run
from fullshard.model.adapters import add_adapters
from fullshard.model.load import REFUSED_FAMILIES, WeightFiles, build_on_meta
from fullshard.model.weight_map import WeightMap
from fullshard.run_folder import CONFIG, write_json

BY_TIER = [pytest.param(name, marks=[] if name in CORE else [pytest.mark.slow]) for name in FAMILIES]
TOKENS = (torch.arange(16) * 7 % 56 + 8)[None]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A folder whose tokenizer makes the data: some families' tokenizer classes would not keep K2's words."""
    return make_tokenizer(make_model(tmp_path_factory.mktemp("words")))


def train_and_merge(folder, words, method, **settings):
    """Two steps on two ranks of the model in ``folder``/model; returns losses, the oracle's, merged model,
    reference."""
    from transformers import AutoModelForCausalLM

    run = folder / "run"
    values = make_run(run, words, method, max_steps=2, **SGD).model_dump(exclude_unset=True)
    values["model"]["path"] = str(folder / "model")
    values |= settings
    write_json(run / CONFIG, values)
    pool(2).run(train_on_ranks, str(run), values, [64, "tokens"])
    expected, reference = oracle_model(run, config_from_dict(values))
    merged = AutoModelForCausalLM.from_pretrained(merge_run(run).folder, dtype=torch.float32)
    return losses_of(run), expected, merged.eval(), reference.eval()


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", BY_TIER)
def test_trains_merges_and_answers_like_the_oracle(tmp_path, words, family, method):
    make_tokenizer(make_model(tmp_path / "model", family))
    losses, expected, merged, reference = train_and_merge(tmp_path, words, method)
    assert losses == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", BY_TIER)
def test_one_bf16_step(tmp_path, words, family, method):
    """The default on accelerators: the loss is the fp32 oracle's within bf16's digits, on more ranks than some have
    rows; the proof's logits are those of the merged weights, since no forward in bf16 blurs them."""
    make_tokenizer(make_model(tmp_path / "model", family))
    run = tmp_path / "run"
    values = make_run(run, words, method, max_steps=1, **SGD).model_dump(exclude_unset=True)
    values["model"]["path"] = str(tmp_path / "model")
    pool(3).run(train_on_ranks, str(run), values, [64, "tokens"], None, "bf16")
    expected, _ = oracle_model(run, config_from_dict(values))
    assert losses_of(run) == pytest.approx(expected[:1], rel=1e-2)
    write_json(run / CONFIG, values)
    assert merge_run(run).proof.mean_kl < 1e-5


@pytest.mark.parametrize("variant", ["rslora", "dora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_variants(tmp_path, words, family, variant):
    make_tokenizer(make_model(tmp_path / "model", family))
    lora = {"rank": 4, "alpha": 8, "variant": variant}
    losses, expected, merged, reference = train_and_merge(tmp_path, words, "lora", lora=lora)
    assert losses == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("phi", False), ("mixtral", False)])
def test_added_tokens_grow_the_vocabulary_and_are_learnt(tmp_path, family, tied, method):
    """Two new words: the oracle resizes by transformers, starts them as the mean, trains embedding and head with
    LoRA."""
    make_tokenizer(make_model(tmp_path / "model", family, tied=tied))
    settings = {"path": str(tmp_path / "model"), "add_tokens": ["<|tool|>", "comet"]}
    losses, expected, merged, reference = train_and_merge(tmp_path, tmp_path / "model", method, model=settings)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert merged.config.vocab_size == merged.get_input_embeddings().weight.shape[0] == 66
    with torch.no_grad():
        ids = torch.cat([TOKENS, torch.tensor([[64, 65]])], 1)
        torch.testing.assert_close(merged(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)
    tokenizer = load_tokenizer(tmp_path / "run" / "merged")
    assert tokenizer("red comet <|tool|>")["input_ids"] == [8, 65, 64]
    start = make_reference_vocabulary(tmp_path / "model", settings["add_tokens"]).get_output_embeddings().weight
    moved = (merged.get_output_embeddings().weight - start).abs().amax(1)
    assert moved[64] > 0 and moved[65] > 0  # no row holds them, but the softmax pushes them down


def test_the_adapted_head_is_refused_with_added_tokens(tmp_path):
    make_tokenizer(make_model(tmp_path / "model"))
    model = build_on_meta(tmp_path / "model", 65)
    with pytest.raises(ModelError, match="adapts the head"):
        add_adapters(model, LoraSection(targets=["lm_head"]), trains_vocabulary=True)


def test_router_loss_is_the_familys_own(tmp_path, words):
    """One rank, one row a step: our loss is transformers' loss with output_router_logits; off by default."""
    from transformers import AutoModelForCausalLM

    from fullshard.train.loss import LossModel

    path = make_model(tmp_path / "model", "mixtral", router_aux_loss_coef=0.5)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    labels = torch.roll(TOKENS, -1, 1).masked_fill(torch.arange(16) == 15, -100)
    with_router = model(TOKENS, labels=TOKENS, output_router_logits=True).loss * 15
    plain = model(TOKENS, labels=TOKENS, output_router_logits=False).loss * 15
    real = torch.ones_like(TOKENS)
    assert float(with_router) > float(plain) + 1
    assert float(LossModel(model, True).train()(TOKENS, labels, real_BS=real)) == pytest.approx(
        float(with_router), 1e-5
    )
    assert float(LossModel(model).train()(TOKENS, labels, real_BS=real)) == pytest.approx(float(plain), rel=1e-5)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router loss"):
        LossModel(build_on_meta(make_model(tmp_path / "dense")), True)


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_refused_families_are_refused_by_name(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=f"{family} models are refused: .*{REFUSED_FAMILIES[family][:20]}"):
        build_on_meta(tmp_path)


def test_quantised_weights_are_refused_by_name(tmp_path):
    path = make_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match="quantised weights \\(mxfp4\\)"):
        build_on_meta(path)


def test_weights_that_are_no_floats_are_named(tmp_path):
    path = make_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"parameter model\.norm\.weight is stored as I8"):
        WeightMap(build_on_meta(path), WeightFiles(path), str(path))


def test_a_token_that_is_there_already_is_not_started_anew(tmp_path):
    make_tokenizer(make_model(tmp_path))
    with pytest.raises(ModelError, match=r"'<\|end\|>' is a token of the model already \(id 7\)"):
        load_tokenizer(tmp_path, ["<|end|>"])


def test_a_pad_token_beyond_the_table_is_refused_and_grows_by_the_recipe(tmp_path):
    """HO-3 (b): id 64 of 64 rows."""
    words = make_tokenizer(make_model(tmp_path / "model"), vocabulary=[*VOCABULARY, "<fill>"], pad_token="<fill>")
    with pytest.raises(DataError, match=r"id 64, .* 64 rows") as caught:
        make_run(tmp_path / "refused", words)
    assert "model.add_tokens" in caught.value.hint
    values = make_run(tmp_path / "seed", make_tokenizer(make_model(tmp_path / "plain"))).model_dump(exclude_unset=True)
    values["model"] = {"path": str(words), "add_tokens": ["<fill>"]}
    prepare(config_from_dict(values), tmp_path / "grown")
    tokenizer = load_tokenizer(words, ["<fill>"])
    assert added_ids(tokenizer, ["<fill>"]) == (64,) and tokenizer.pad_token_id == 64


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path):
    path = make_model(tmp_path, tied=True)
    tensors = load_file(path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2},
        path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"ties .*, but the files hold different values"):
        WeightMap(build_on_meta(path), WeightFiles(path), str(path))


def test_a_missing_expert_is_an_incomplete_folder(tmp_path):
    path = make_model(tmp_path, "mixtral")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"is incomplete: .*experts.gate_up_proj"):
        WeightMap(build_on_meta(path), WeightFiles(path), str(path))


def test_an_export_converts_each_expert_layer_once(tmp_path, monkeypatch):
    path = make_model(tmp_path, "mixtral")
    weights = WeightMap(build_on_meta(path), WeightFiles(path), str(path))
    counts = {"forward": 0, "reverse": 0}
    for kind in counts:
        inner = getattr(weights, f"_{kind}")
        monkeypatch.setattr(
            weights,
            f"_{kind}",
            lambda *given, kind=kind, inner=inner: counts.update({kind: counts[kind] + 1}) or inner(*given),
        )
    original = load_file(path / "model.safetensors")
    for name in weights.files.tensors:
        if weights.groups[name].converter is not None:
            assert torch.equal(weights.restore(name, lambda name: [weights.read(name)]), original[name])
    assert counts == {"forward": 4, "reverse": 4}  # two groups in each of two layers


def build(ranks, paths: list[str]) -> str:
    from fullshard.train.precision import precision_of
    from fullshard.train.setup import build_sharded

    values = {"model": {"path": paths[ranks.rank]}, "data": {"train": "x"}, "output": "y", "method": "full"}
    try:
        build_sharded(config_from_dict(values), ranks, precision_of("fp32"), False)
    except UserError as error:
        return error.message
    return ""


def test_ranks_with_other_weights_are_noticed(tmp_path):
    """Same config, same sizes, another seed: a mixture of two models would train without a word."""
    paths = [str(make_model(tmp_path / str(seed), seed=seed)) for seed in (7, 8)]
    assert all("is another model on rank" in message for message in pool(2).run(build, paths))


def test_a_model_that_looks_ahead_is_refused(tmp_path, words):
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertLMHeadModel(config).save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    values = make_run(run, words, **SGD).model_dump(exclude_unset=True)
    values["model"]["path"] = str(tmp_path / "model")
    with pytest.raises(AssertionError, match="BertLMHeadModel looks ahead"):
        pool(1).run(train_on_ranks, str(run), values, [64, "tokens"])
