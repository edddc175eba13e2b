"""Attention by document (HO-4): packed rows are what each is alone, in every family; who cannot is refused."""

from __future__ import annotations

import json

import pytest
import torch
from families import FAMILIES
from rank_pool import pool
from test_training import SGD, losses_of, make_run, train_on_ranks, weights_of
from tiny_models import make_model, make_tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from fullshard.data.prepared import Batch
from fullshard.errors import ConfigError
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.model.load import attention_for, read_config
from fullshard.run_folder import METRICS
from fullshard.train.loss import LossModel, batch_loss

ROWS = [torch.arange(8, 14), torch.arange(20, 27)]  # A of 6 tokens, B of 7
POSITIONS = torch.cat([torch.arange(len(row)) for row in ROWS])[None]
MASKS_INSTEAD = {"stablelm", "nemotron", "falcon", "gpt_neo"}  # their attention does not reach ours; masks serve
REFUSED = {"bloom", "mpt", "lfm2"}  # positions by bias, convolutions


def shifted(row: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[1:], torch.tensor([-100])])


def packed_and_apart(model: LossModel, documents: Documents | None) -> float:
    """Largest difference of logits, relative to the largest."""
    with torch.no_grad():
        apart = torch.cat([model(row[None], None) for row in ROWS], 1)
        packed = model(torch.cat(ROWS)[None], None, POSITIONS, documents=documents)
    return float((packed - apart).abs().max() / apart.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    path = make_model(tmp_path, family)
    way = attention_for(read_config(path), packing=True)
    model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=way)).eval()
    documents = Documents([[6, 7]]) if way == BY_DOCUMENT else None
    difference = packed_and_apart(model, documents)
    isolated = difference < 1e-5 and (documents is None or len(documents.layers) == 2)
    if family in MASKS_INSTEAD | REFUSED:
        assert not isolated or documents is None
        model.causal_lm.set_attn_implementation(attention_for(read_config(path)))
        assert (packed_and_apart(model, None) < 1e-5) == (family in MASKS_INSTEAD)
    else:
        assert isolated and documents is not None


@pytest.mark.parametrize(("way", "computed"), [(BY_DOCUMENT, (1, 13)), ("sdpa", (2, 7))])
def test_no_pad_is_computed_where_documents_are_attended_apart(tmp_path, way, computed):
    """Two sequences of one document each, 6 and 7 tokens: the loss is that of both alone, whatever is computed."""
    path = make_model(tmp_path, "llama")
    model, seen = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=way)), []
    model.causal_lm.model.register_forward_pre_hook(
        lambda _, given, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    columns = (ROWS, [shifted(row) for row in ROWS], [torch.arange(len(row)) for row in ROWS])
    columns += ([torch.ones_like(row) for row in ROWS],)
    padded = [pad_sequence(column, True, value) for column, value in zip(columns, (0, -100, 0, 0), strict=True)]
    loss = batch_loss(model, Batch(*padded, [[6], [7]]), torch.device("cpu"))
    assert seen == [computed]
    apart = sum(model(row[None], shifted(row)[None]) for row in ROWS)
    assert float(loss.detach()) == pytest.approx(float(apart.detach()), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "qwen2"])
def test_one_document_equals_the_familys_own_attention_and_its_gradients(tmp_path, family):
    """Windows shorter than the row, soft-caps and sinks against transformers' eager code, loss and gradients."""
    path = make_model(
        tmp_path, family, **({"sliding_window": 4} if family in ("gemma2", "gemma3_text", "gpt_oss") else {})
    )
    row = torch.arange(8, 24)
    found = []
    for way in ("eager", BY_DOCUMENT):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=way)).eval()
        loss = model(row[None], shifted(row)[None])
        loss.backward()
        found.append((float(loss), {name: value.grad for name, value in model.named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_packed_gradients_equal_the_separate_ones(tmp_path, family):
    """HO-4: 5 + 6 = 11 targets in both forms; summed loss and gradients equal; nothing predicts B's first token from
    A."""
    path = make_model(tmp_path, family)
    labels = [shifted(row) for row in ROWS]
    assert sum(int((label != -100).sum()) for label in labels) == 11
    found = []
    for packed in (False, True):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=BY_DOCUMENT)).eval()
        if packed:
            arguments = (torch.cat(ROWS)[None], torch.cat(labels)[None], POSITIONS)
            loss = model(*arguments, documents=Documents([[6, 7]]))
        else:
            loss = sum(model(row[None], label[None]) for row, label in zip(ROWS, labels, strict=True))
        loss.backward()
        found.append((float(loss), {name: value.grad for name, value in model.named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_cost_is_the_sum_of_squared_document_lengths(tmp_path, family, monkeypatch):
    """What PyTorch's kernel is called with on CPU: one document at a time, never the whole sequence."""
    path = make_model(tmp_path, family)
    model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=BY_DOCUMENT)).eval()
    sizes, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def watch(query, key, value, **settings):
        sizes.append((query.shape[2], key.shape[2]))
        return kernel(query, key, value, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    model(torch.cat(ROWS)[None], None, POSITIONS, documents=Documents([[6, 7]]))
    assert sizes == [(6, 6), (7, 7)] * 2  # two layers


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "falcon"])
def test_packed_and_unpacked_runs_are_one_on_1_to_4_ranks(tmp_path, family):
    """Losses and gradient norms of two steps, and the weights after them (SGD: their change is the gradients)."""
    words = make_tokenizer(make_model(tmp_path / "words"))
    make_tokenizer(make_model(tmp_path / "model", family))
    wanted = None
    for num_ranks in (1, 2, 3, 4):
        for packing in (False, True):
            run = tmp_path / f"run_{num_ranks}_{packing}"
            values = make_run(run, words, packing=packing, max_steps=2, **SGD).model_dump(exclude_unset=True)
            values["model"]["path"] = str(tmp_path / "model")
            pool(num_ranks).run(train_on_ranks, str(run), values, [64, "tokens"])
            records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
            steps = [record for record in records if record["kind"] == "train"]
            wanted = wanted or (steps, weights_of(run, 2))
            for key in ("loss", "gradient_norm"):
                found = [step[key] for step in steps]
                assert found == pytest.approx([step[key] for step in wanted[0]], rel=1e-5), (num_ranks, packing, key)
            assert [step["row_ids"] for step in steps] == [step["row_ids"] for step in wanted[0]]
            for name, value in weights_of(run, 2).items():
                torch.testing.assert_close(value, wanted[1][name], rtol=0, atol=1e-6, msg=f"{name} {num_ranks}")


def refusal(ranks, run: str, values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        train_on_ranks(ranks, run, values, [64, "tokens"])
    return caught.value.message


def test_a_model_that_mixes_rows_is_refused_with_both_ways_named(tmp_path):
    words = make_tokenizer(make_model(tmp_path / "words"))
    make_tokenizer(make_model(tmp_path / "model", "lfm2"))
    values = make_run(tmp_path / "run", words, packing=True, **SGD).model_dump(exclude_unset=True)
    values["model"]["path"] = str(tmp_path / "model")
    for message in pool(2).run(refusal, str(tmp_path / "run"), values):
        assert "Packing does not keep rows apart in Lfm2ForCausalLM" in message
        assert "attention by document: 1 of 2 blocks reached" in message and "; masks: " in message


def packed_where_proven(ranks, run: str, values: dict) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.train.metrics.MetricsLog.say", lambda log, line: said.append(line))
        train_on_ranks(ranks, run, values, [64, "tokens"])
    return said


def test_auto_packs_only_where_rows_stay_apart(tmp_path):
    """The same run with packing auto and false: lfm2 trains unpacked, with the reason said; the losses are equal."""
    words = make_tokenizer(make_model(tmp_path / "words"))
    make_tokenizer(make_model(tmp_path / "model", "lfm2"))
    for packing in ("auto", False):
        values = make_run(tmp_path / f"{packing}", words, packing=packing, **SGD).model_dump(exclude_unset=True)
        values["model"]["path"] = str(tmp_path / "model")
        said = pool(2).run(packed_where_proven, str(tmp_path / f"{packing}"), values)[0]
        off = [line for line in said if line.startswith("packing is off: Packing does not keep rows apart in Lfm2")]
        assert len(off) == (packing == "auto")
    assert losses_of(tmp_path / "auto") == losses_of(tmp_path / "False")
