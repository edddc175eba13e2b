"""The merged folder: equal to the training state, complete, published whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_by_hand import change_base_dtype, full_run, load_fp32, logits_of, lora_run, proof_tokens, rehash
from safetensors.torch import load_file, save_file
from tiny_models import ONE_RANK, make_model, make_tokenizer

from fullshard.checkpoint.format import verify
from fullshard.checkpoint.ranges import PROOF, Saver
from fullshard.errors import CheckpointError, MergeError
from fullshard.merge.job import merge_run
from fullshard.run_folder import list_checkpoints, publish_folder
from fullshard.shard import Shard


@pytest.fixture
def base(tmp_path) -> Path:
    return make_tokenizer(make_model(tmp_path / "base"))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False), ("gpt_neox", True)]
)
def test_full_weights_equal_the_training_state(tmp_path, family, tied):
    base = make_tokenizer(make_model(tmp_path / "base", family, tied=tied))
    _, weights = full_run(tmp_path / "run", base, num_parts=3)
    result = merge_run(tmp_path / "run")
    merged = load_fp32(result.folder)
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert stored_tensors(result.folder).keys() == stored_tensors(base).keys()
    assert result.proof.max_difference < 1e-5 and result.proof.same_top == 16 and result.step == 3
    assert result.line.startswith("proof: largest logit difference") and "16 of 16 positions" in result.line
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied


def test_the_export_keeps_the_bases_names(tmp_path):
    """gpt_neox's files say embed_out where the model says lm_head; mixtral's have a tensor an expert, the model a
    stack."""
    for family, name in (
        ("gpt_neox", "embed_out.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
    ):
        base = make_tokenizer(make_model(tmp_path / family, family))
        _, weights = full_run(tmp_path / f"{family}_run", base)
        folder = merge_run(tmp_path / f"{family}_run").folder
        assert set(stored_tensors(folder)) == set(stored_tensors(base)) and name in stored_tensors(base)
        for parameter, value in load_fp32(folder).named_parameters():
            assert torch.equal(value, weights[parameter]), parameter


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["down_proj", "embed_tokens", "lm_head"]),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("gpt_neox", ["query_key_value", "dense_h_to_4h"]),
    ],
)
def test_lora_equals_pefts_own_merge(tmp_path, family, targets):
    base = make_tokenizer(make_model(tmp_path / "base", family, tied=family == "gpt2"))
    _, adapters, oracle = lora_run(tmp_path / "run", base, targets)
    result = merge_run(tmp_path / "run")
    merged, original = load_fp32(result.folder), load_fp32(base)
    expected, before = dict(oracle.named_parameters()), dict(original.named_parameters())
    moved = 0
    for name, parameter in merged.named_parameters():
        assert (parameter - expected[name]).abs().max() <= 1e-6, name
        moved += not torch.equal(parameter, before[name])
    assert moved == len(adapters) // 2
    assert f"adapters: {moved} of {moved} have moved" in "\n".join(result.lines)
    assert (logits_of(merged) - logits_of(original)).abs().max() > 1e-3


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16_base_is_rounded_once(tmp_path, method, tied):
    base = make_tokenizer(make_model(tmp_path / "base", tied=tied))
    change_base_dtype(base, torch.bfloat16)
    if method == "full":
        _, weights = full_run(tmp_path / "run", base)
    else:
        _, _, oracle = lora_run(tmp_path / "run", base, ["q_proj", "v_proj"])
        weights = dict(oracle.named_parameters())
    result = merge_run(tmp_path / "run")
    tensors = stored_tensors(result.folder)
    assert tensors.keys() == stored_tensors(base).keys()
    for name, value in tensors.items():
        assert value.dtype == torch.bfloat16
        difference = (value.float() - weights[name].to(torch.bfloat16).float()).abs()
        assert (difference > 0).float().mean() <= (0 if method == "full" else 0.01), name
    assert json.loads((result.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert result.proof.max_difference > 1e-6  # rounding shows
    whole = merge_run(tmp_path / "run", tmp_path / "fp32", dtype="fp32")
    assert whole.proof.max_difference < 1e-5 < result.proof.max_difference
    assert {value.dtype for value in stored_tensors(whole.folder).values()} == {torch.float32}
    assert json.loads((whole.folder / "config.json").read_text())["dtype"] == "float32"


def test_mixed_dtypes_stay_as_the_base_has_them(tmp_path, base):
    tensors = stored_tensors(base)
    mixed = {name: value if "norm" in name else value.to(torch.bfloat16) for name, value in tensors.items()}
    save_file(mixed, base / "model.safetensors", {"format": "pt"})
    lora_run(tmp_path / "run", base, ["q_proj"])
    merged = stored_tensors(merge_run(tmp_path / "run").folder)
    assert {name: value.dtype for name, value in merged.items()} == {name: value.dtype for name, value in mixed.items()}
    assert "is what was merged" in merge_run(tmp_path / "run" / "merged", check=True).lines[-1]


def test_names_of_the_files_may_lack_the_prefix_and_tied_copies_are_not_stale(tmp_path):
    base = make_tokenizer(make_model(tmp_path / "base", "gpt2", tied=True))
    tensors = {name.removeprefix("transformer."): value for name, value in stored_tensors(base).items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    _, weights = full_run(tmp_path / "run", base)
    merged = stored_tensors(merge_run(tmp_path / "run").folder)
    assert merged.keys() == tensors.keys() and "h.0.ln_1.weight" in merged
    assert torch.equal(merged["lm_head.weight"], weights["transformer.wte.weight"])
    assert torch.equal(merged["wte.weight"], weights["transformer.wte.weight"])


def test_several_files_with_an_index(tmp_path, base):
    _, weights = full_run(tmp_path / "run", base)
    folder = merge_run(tmp_path / "run", shard_bytes=6000).folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(value.numel() * 4 for value in weights.values())
    assert set(index["weight_map"].values()) == set(files)
    assert all(torch.equal(value, weights[name]) for name, value in stored_tensors(folder).items())


def flip(checkpoint: Path, name: str) -> None:
    """Negate the largest value of a weight's last piece."""
    part = checkpoint / "part_00001.safetensors"
    tensors = load_file(part)
    values = tensors[f"weight/{name}"]
    values[values.abs().argmax()] *= -1
    save_file(tensors, part)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_flipped_value_fails_the_proof(tmp_path, base, dtype):
    checkpoint, _ = full_run(tmp_path / "run", base)
    flip(checkpoint, "model.layers.1.mlp.down_proj.weight")
    rehash(checkpoint)  # as if the value had been wrong when it was written
    with pytest.raises(MergeError, match=r"not the training state.*logit difference"):
        merge_run(tmp_path / "run", dtype=dtype)
    assert [path.name for path in (tmp_path / "run").iterdir() if "merged" in path.name] == []


def test_a_damaged_file_is_found_by_its_hash(tmp_path, base):
    checkpoint, _ = full_run(tmp_path / "run", base)
    flip(checkpoint, "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match=r"part_00001\.safetensors is damaged"):
        merge_run(tmp_path / "run")


def test_a_changed_base_fails_the_proof_of_lora(tmp_path, base):
    lora_run(tmp_path / "run", base, ["q_proj", "v_proj"])
    shutil.rmtree(base)
    make_tokenizer(make_model(base, seed=8))
    with pytest.raises(MergeError, match="not the training state"):
        merge_run(tmp_path / "run")


def logits_of_rounded(weights, base, dtype):
    """fp32 products of the weights as they are in ``dtype``."""
    model = load_fp32(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].to(dtype))
    return logits_of(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "bf16_pure"])
@pytest.mark.parametrize("stored", ["bf16", "fp32"])
def test_the_training_state_is_what_training_computed_with(tmp_path, base, precision, stored):
    """Masters in fp32 and products of 16-bit weights: the proof's logits are those of the rounded weights, to fp32's
    digits; the folder holds the masters, rounded or not."""
    compute = {"fp16": torch.float16, "fp32": torch.float32}.get(precision, torch.bfloat16)
    checkpoint, weights = full_run(tmp_path / "run", base, precision=precision)
    kept = {dtype: logits_of_rounded(weights, base, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for dtype, logits in kept.items():
        save_file({"tokens": proof_tokens(), "logits": logits}, checkpoint / PROOF)
        rehash(checkpoint)
        if dtype == compute:
            folder = merge_run(tmp_path / "run", overwrite=True, dtype=stored).folder
            proof = json.loads((folder / "merge.json").read_text())
            assert proof["proof_computed"]["relative"] < 1e-5
            assert (proof["proof"]["max_difference"] < 1e-5) == (str(compute).endswith(proof["dtype"]))
        elif torch.bfloat16 in (dtype, compute):  # fp16 is near fp32
            with pytest.raises(MergeError, match="not the training state"):
                merge_run(tmp_path / "run", overwrite=True, dtype=stored)


@pytest.mark.parametrize(("noise", "passes"), [(1e-6, True), (1e-3, False)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_logits_may_differ_by_the_order_of_fp32_sums_only(tmp_path, base, precision, noise, passes):
    checkpoint, weights = full_run(tmp_path / "run", base, precision=precision)
    exact = logits_of_rounded(weights, base, {"bf16": torch.bfloat16}.get(precision, torch.float32))
    draw = noise * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    save_file({"tokens": proof_tokens(), "logits": exact + draw * (exact.max() - exact.min())}, checkpoint / PROOF)
    rehash(checkpoint)
    if passes:
        assert merge_run(tmp_path / "run").proof.mean_kl < 1e-3
    else:
        with pytest.raises(MergeError, match="not the training state"):
            merge_run(tmp_path / "run")


def test_rounding_that_changes_answers_is_refused(tmp_path, base, monkeypatch):
    """What bf16 takes from this model is 3e-7 nats: the bound is set below that."""
    monkeypatch.setattr("fullshard.merge.weights.MEAN_KL", 1e-8)
    full_run(tmp_path / "run", base)
    with pytest.raises(MergeError) as caught:
        merge_run(tmp_path / "run", dtype="bf16")
    assert "Rounding the weights" in caught.value.message and "--dtype fp32" in caught.value.hint
    assert merge_run(tmp_path / "run").proof.relative < 1e-5


def test_no_proof_no_merge(tmp_path, base):
    checkpoint, _ = full_run(tmp_path / "run", base)
    (checkpoint / PROOF).unlink()
    rehash(checkpoint)
    with pytest.raises(CheckpointError, match=PROOF):
        merge_run(tmp_path / "run")


def test_existing_output_is_kept_unless_it_is_a_merge_to_be_replaced(tmp_path, base):
    full_run(tmp_path / "run", base)
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(MergeError, match=r"exists already|not made by a merge"):
            merge_run(tmp_path / "run", other, overwrite=overwrite)
    assert (other / "precious.txt").read_text() == "mine"
    merge_run(tmp_path / "run")
    with pytest.raises(MergeError, match="exists already"):
        merge_run(tmp_path / "run")
    assert merge_run(tmp_path / "run", overwrite=True).folder.is_dir()
    with pytest.raises(MergeError, match="base model or the checkpoint lies"):
        merge_run(tmp_path / "run", base, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if "merged" in path.name) == ["merged"]


def test_what_cannot_be_done_is_said(tmp_path, base):
    full_run(tmp_path / "run", base)
    (tmp_path / "file").write_text("")
    with pytest.raises(MergeError, match="cannot be written"):
        merge_run(tmp_path / "run", tmp_path / "file" / "out")
    with pytest.raises(MergeError, match="fp8"):
        merge_run(tmp_path / "run", dtype="fp8")
    with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
        merge_run(tmp_path / "run", step=9)
    with pytest.raises(MergeError, match="no checkpoint that can be merged"):
        merge_run(tmp_path)
    shutil.rmtree(base)
    with pytest.raises(MergeError, match="is gone"):
        merge_run(tmp_path / "run")


def test_disk_too_small_is_said_before_writing(tmp_path, base, monkeypatch):
    full_run(tmp_path / "run", base)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(MergeError, match="GB free"):
        merge_run(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".merged*"))


def test_values_too_large_for_fp16_are_refused(tmp_path, base):
    _, weights = full_run(tmp_path / "run", base)
    assert max(value.abs().max() for value in weights.values()) < 65504
    merge_run(tmp_path / "run", dtype="fp16")
    tensors = stored_tensors(base)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    full_run(tmp_path / "large", base)
    with pytest.raises(MergeError, match=r"model\.norm\.weight holds values that are not finite in float16"):
        merge_run(tmp_path / "large", dtype="fp16")


def save(run: Path, step: int) -> None:
    """As a training run with keep_last=1 does."""
    shard = Shard("w", (4,), 0, 4, torch.ones(4), None, trainable=True, is_copy=False)
    sharded = SimpleNamespace(shards=lambda: [shard])
    Saver(run, ONE_RANK, 1).save(step, sharded, {}, {"method": "full", "base_model": "/m", "trainer": {}}, {})


def test_a_run_that_prunes_beside_a_merge_leaves_its_checkpoint(tmp_path, base):
    run, later = tmp_path / "run", iter((4, 5))
    full_run(run, base)
    result = merge_run(run, progress=lambda text: save(run, next(later)))
    assert result.step == 3 and next(later, None) is None
    assert [step for step, _ in list_checkpoints(run)] == [3, 5] and verify(run).healthy
    assert merge_run(result.folder, check=True, progress=print).line == result.line
    save(run, 6)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000006"]


def test_a_checkpoint_written_anew_while_it_is_merged_is_not_mixed(tmp_path, base):
    """As by a run that was resumed from an earlier step."""
    run = tmp_path / "run"
    full_run(run, base)
    merge_run(run, tmp_path / "once")

    def write_anew(text):
        shutil.copytree(run / "checkpoints/step_000003", tmp_path / "anew", dirs_exist_ok=True)
        publish_folder(tmp_path / "anew", run / "checkpoints/step_000003")

    with pytest.raises(CheckpointError, match="step_000003 was written anew, or removed, while it was read"):
        merge_run(run, tmp_path / "twice", progress=write_anew)
    assert not (tmp_path / "twice").exists()
    save(run, 4)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000004"]
