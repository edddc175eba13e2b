"""Checkpoints of other tools become the same folder as the model that was saved: DCP of one process, pickles,
safetensors, PEFT adapters; names as wrappers leave them; damaged and hostile files."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_by_hand import load_fp32, logits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_tokenizer

from fullshard.errors import MergeError
from fullshard.merge.job import merge_run
from fullshard.merge.readers.foreign import read_pickles
from fullshard.model.load import FileTensor, Part

DCP_WARNING = "ignore:.*torch.distributed is (disabled|unavailable).*"
pytestmark = [pytest.mark.filterwarnings(DCP_WARNING), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tokenizer(make_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def tuned(base):
    """``base`` with every weight moved."""
    model, draw = load_fp32(base), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return model


def merged_logits(place, base, output, **more):
    return logits_of(load_fp32(merge_run(place, output, base=str(base), **more).folder))


def save_dcp(model, folder, prefix="model", **more):
    nested = {name: value.detach().clone() for name, value in model.state_dict().items()}
    dcp.save(({prefix: nested} if prefix else nested) | more, checkpoint_id=folder)
    return folder


WRAPPINGS = {
    "plain": lambda name: name,
    "compiled": lambda name: f"_orig_mod.{name}",
    "ddp": lambda name: f"module.{name}",
    "fsdp1": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "recomputed": lambda name: name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."),
    "all": lambda name: f"_orig_mod.module.{name}".replace("layers.", "layers._fsdp_wrapped_module."),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("kind", ["bin", "pt", "safetensors", "dcp"])
def test_full_checkpoints(tmp_path, base, tuned, kind, wrapping):
    state = {WRAPPINGS[wrapping](name): value.detach().clone() for name, value in tuned.state_dict().items()}
    place = tmp_path / "saved"
    place.mkdir()
    if kind == "dcp":
        dcp.save({"app": {"model": state, "epoch": 3}}, checkpoint_id=place)
    elif kind == "bin":
        torch.save(state, place / "pytorch_model.bin")
    elif kind == "pt":
        place = place / "model.pt"
        torch.save({"model": state, "step": 4}, place)
    else:
        save_file(state, place / "model.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = merge_run(place, tmp_path / "out", base=str(base))
    assert torch.equal(logits_of(load_fp32(result.folder)), logits_of(tuned))
    assert before == {path: path.read_bytes() for path in before}
    assert (result.folder / "tokenizer.json").is_file()


def test_as_accelerate_and_trainer_leave_it(tmp_path, base, tuned):
    save_dcp(tuned, tmp_path / "checkpoint-7/pytorch_model_fsdp_0")
    save_dcp(tuned, tmp_path / "checkpoint-7/optimizer_0", prefix="optimizer")
    got = merged_logits(tmp_path / "checkpoint-7", base, tmp_path / "out")
    assert torch.equal(got, logits_of(tuned))


def test_optimizer_state_beside_the_weights_is_left_out(tmp_path, base, tuned):
    moments = {f"state.{name}.exp_avg": torch.ones_like(value) for name, value in tuned.state_dict().items()}
    save_dcp(tuned, tmp_path / "step-10", prefix="", optimizer=moments, lr_scheduler={"last_epoch": torch.tensor(3)})
    assert torch.equal(merged_logits(tmp_path / "step-10", base, tmp_path / "out"), logits_of(tuned))


def test_sharded_bin(tmp_path, base, tuned):
    state, files = list(tuned.state_dict().items()), {}
    for number in range(3):
        files |= dict.fromkeys(dict(state[number::3]), f"pytorch_model-{number + 1:05d}-of-00003.bin")
        torch.save(dict(state[number::3]), tmp_path / f"pytorch_model-{number + 1:05d}-of-00003.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(merged_logits(tmp_path, base, tmp_path / "out"), logits_of(tuned))
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(MergeError, match="1 of 3 files are missing, first pytorch_model-00002"):
        merge_run(tmp_path, tmp_path / "again", base=str(base))


def test_bf16_and_tied(tmp_path):
    base = make_tokenizer(make_model(tmp_path / "base", tied=True))
    model = load_fp32(base).to(torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # both names, one storage
    got = load_fp32(merge_run(tmp_path / "pytorch_model.bin", tmp_path / "out", base=str(base)).folder)
    assert torch.equal(got.lm_head.weight, model.lm_head.weight.float())
    wanted = load_fp32(base)
    wanted.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    assert torch.equal(logits_of(got), logits_of(wanted))


def test_two_values_of_one_tied_weight_are_refused(tmp_path):
    base = make_model(tmp_path / "base", tied=True)
    state = {name: value.clone() for name, value in load_fp32(base).state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(MergeError, match="two values of"):
        merge_run(tmp_path / "model.pt", tmp_path / "out", base=str(base))


def test_a_grown_vocabulary(tmp_path, base, tuned):
    wide = load_fp32(base)
    wide.resize_token_embeddings(67, mean_resizing=False)
    torch.save(wide.state_dict(), tmp_path / "model.pt")
    got = load_fp32(merge_run(tmp_path / "model.pt", tmp_path / "out", base=str(base)).folder)
    assert got.config.vocab_size == 67
    assert torch.equal(logits_of(got), logits_of(wide))


@pytest.mark.parametrize("kind", ["missing", "strange", "shape", "empty"])
def test_what_does_not_fit_is_named(tmp_path, base, tuned, kind):
    state = dict(tuned.state_dict())
    wanted = {
        "missing": r"lacks 1 of the model's parameters: model\.layers\.1\.mlp\.up_proj\.weight",
        "strange": r"2 names are no parameter of the base model: model\.layers\.7\.extra, visual\.weight",
        "shape": r"model\.norm\.weight \(17,\) does not fit",
        "empty": "0 names are no parameter",
    }[kind]
    if kind == "missing":
        del state["model.layers.1.mlp.up_proj.weight"]
    elif kind == "strange":
        state |= {"model.layers.7.extra": torch.ones(2), "visual.weight": torch.ones(2)}
    elif kind == "shape":
        state["model.norm.weight"] = torch.ones(17)
    else:
        state = {}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(MergeError, match=wanted):
        merge_run(tmp_path / "model.pt", tmp_path / "out", base=str(base))
    assert not (tmp_path / "out").exists()


PEFT_KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 9}},
    "head": {"modules_to_save": ["lm_head"]},
}


def peft_adapter(base, folder, **settings):
    """A LoRA adapter saved by PEFT; its own model, unmerged."""
    from peft import LoraConfig, get_peft_model

    model = load_fp32(base)
    if grown := settings.pop("grown", 0):
        model.resize_token_embeddings(grown, mean_resizing=False)
    config = LoraConfig(r=2, lora_alpha=6.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        tuned = get_peft_model(model, config).eval()
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_B" in name or "modules_to_save" in name:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
    tuned.save_pretrained(folder, save_embedding_layers=bool(grown))
    return tuned


@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_peft_adapters(tmp_path, base, kind):
    tuned = peft_adapter(base, tmp_path / "adapter", **PEFT_KINDS[kind])
    result = merge_run(tmp_path / "adapter", base=str(base))
    assert result.folder == tmp_path / "adapter_merged"
    assert "adapters: 4 of 4 have moved" in "\n".join(result.lines)
    assert torch.allclose(logits_of(load_fp32(result.folder)), logits_of(tuned), atol=2e-6)
    own = tuned.merge_and_unload().state_dict()
    for name, value in load_fp32(result.folder).state_dict().items():
        assert torch.allclose(value, own[name], atol=1e-7), name


def test_peft_adapter_with_new_tokens(tmp_path, base):
    tuned = peft_adapter(base, tmp_path / "adapter", grown=66)
    merged = load_fp32(merge_run(tmp_path / "adapter", base=str(base)).folder)
    assert merged.config.vocab_size == 66
    assert torch.allclose(logits_of(merged), logits_of(tuned), atol=2e-6)


def test_adapter_names_the_base_itself(tmp_path, base):
    peft_adapter(base, tmp_path / "adapter")
    assert merge_run(tmp_path / "adapter", tmp_path / "out").folder.is_dir()


def test_lora_of_fsdp_in_a_dcp_folder(tmp_path, base):
    tuned = peft_adapter(base, tmp_path / "checkpoint-3")
    os.remove(tmp_path / "checkpoint-3/adapter_model.safetensors")
    save_dcp(tuned, tmp_path / "checkpoint-3/pytorch_model_fsdp_0")
    got = merged_logits(tmp_path / "checkpoint-3", base, tmp_path / "out")
    assert torch.allclose(got, logits_of(tuned), atol=2e-6)


@pytest.mark.parametrize("change", ["pissa", "shifted", "wide", "zero", "empty"])
def test_adapters_that_do_not_fit(tmp_path, base, change):
    home = base if change != "wide" else make_tokenizer(make_model(tmp_path / "wide", hidden_size=32))
    peft_adapter(home, tmp_path / "adapter")
    file, config = tmp_path / "adapter/adapter_model.safetensors", tmp_path / "adapter/adapter_config.json"
    weights = load_file(file)
    if change == "pissa":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"init_lora_weights": "pissa"}))
    elif change == "shifted":
        weights = {
            name.replace("layers.1", "layers.2").replace("layers.0", "layers.1"): v for name, v in weights.items()
        }
    elif change == "zero":
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}
    elif change == "empty":
        weights = {}
    save_file(weights, file)
    wanted = {
        "pissa": "cannot be folded into the base as it is: pissa",
        "shifted": r"4 names are no parameter of the base model: base_model\.model\.model\.layers\.2",
        "wide": r"layers\.0\.self_attn\.q_proj\.lora_A\.weight has shape \(2, 32\)",
        "zero": "never moved: all 4 B matrices",
        "empty": "0 names are no parameter",
    }[change]
    with pytest.raises(MergeError, match=wanted):
        merge_run(tmp_path / "adapter", tmp_path / "out", base=str(base))


def test_deepspeed_is_named_with_its_converter(tmp_path, base):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds/zero_to_fp32.py").touch()
    with pytest.raises(MergeError, match="DeepSpeed") as caught:
        merge_run(tmp_path / "ds", base=str(base))
    assert "zero_to_fp32.py" in caught.value.hint


def test_nothing_that_can_be_merged(tmp_path, base):
    with pytest.raises(MergeError, match="no checkpoint that can be merged"):
        merge_run(tmp_path, tmp_path / "out", base=str(base))
    with pytest.raises(MergeError, match="nothing at"):
        merge_run(tmp_path / "absent", base=str(base))
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(MergeError, match="does not say which model"):
        merge_run(tmp_path / "x.pt")


class Bomb:
    """Leaves a file behind where a pickle is run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["dtensor", "unknown class", "folder"])
def test_a_ranks_own_file_is_named(tmp_path, base, tuned, kind):
    """What FSDP's sharded state dicts are in a file of torch.save: DTensors, or classes that are not looked up."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    place = tmp_path / "pytorch_model_fsdp_0_rank1.bin"
    if kind == "unknown class":
        torch.save({"model.norm.weight": Bomb(tmp_path / "was_run")}, place)
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            state = {name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in tuned.state_dict().items()}
            torch.save(state, place)
        finally:
            dist.destroy_process_group()
    with pytest.raises(MergeError, match="no plain tensors; nothing of it was run") as caught:
        merge_run(tmp_path if kind == "folder" else place, tmp_path / "out", base=str(base))
    assert "full state dict, or by torch.distributed.checkpoint" in caught.value.hint
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("kind", ["metadata", "chunk", "bin"])
def test_nothing_in_a_file_is_run(tmp_path, base, tuned, kind):
    place, proof = tmp_path / "saved", tmp_path / "was_run"
    save_dcp(tuned, place)
    if kind == "metadata":
        (place / ".metadata").write_bytes(pickle.dumps(Bomb(proof)))
    else:
        shutil.rmtree(place)
        place = tmp_path / "pytorch_model.bin"
        torch.save({"w": Bomb(proof)}, place)
    if kind == "chunk":
        place = save_dcp(tuned, tmp_path / "chunked")
        held = (place / ".metadata").read_bytes()
        evil = tmp_path / "evil.pt"
        torch.save(Bomb(proof), evil)
        (place / "__0_0.distcp").write_bytes(evil.read_bytes().ljust(1 << 20, b"\0"))
        (place / ".metadata").write_bytes(held)
    with pytest.raises(MergeError, match=r"cannot be read|no plain data|nothing of it was run"):
        merge_run(place, tmp_path / "out", base=str(base))
    assert not proof.exists()


def test_every_cut_of_a_dcp_file_is_found(tmp_path, base, tuned):
    place = save_dcp(tuned, tmp_path / "saved")
    whole = (place / "__0_0.distcp").read_bytes()
    for share in (0.0, 0.3, 0.9):
        (place / "__0_0.distcp").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(MergeError, match=r"__0_0\.distcp"):
            merge_run(place, tmp_path / "out", base=str(base))
    os.remove(place / "__0_0.distcp")
    with pytest.raises(MergeError, match=r"__0_0\.distcp"):
        merge_run(place, tmp_path / "out", base=str(base))


def test_paths_may_not_leave_the_folder(tmp_path, base, tuned):
    torch.save(tuned.state_dict(), tmp_path / "secret.bin")
    (tmp_path / "saved").mkdir()
    index = {"weight_map": dict.fromkeys(tuned.state_dict(), "../secret.bin")}
    (tmp_path / "saved/pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(MergeError, match="outside"):
        merge_run(tmp_path / "saved", tmp_path / "out", base=str(base))
    index = {"weight_map": dict.fromkeys(tuned.state_dict(), "link.bin")}
    (tmp_path / "saved/pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "saved/link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(MergeError, match="outside"):
        merge_run(tmp_path / "saved", tmp_path / "out", base=str(base))


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, data=st.data())
def test_any_range_of_any_layout(tmp_path_factory, shape, data):
    """A tensor saved transposed, expanded or as a part of a larger storage reads as itself, from any range."""
    folder = tmp_path_factory.mktemp("layout")
    size = 1
    for length in shape:
        size *= length
    value = (torch.arange(7 + size)[5 : 5 + size].float() * 1.5).reshape(shape)
    if value.dim() > 1 and data.draw(st.booleans()):
        value = value.transpose(0, -1)
    torch.save({"x": value, "y": [1, "text"], "z": {"deep": value + 1}}, folder / "a.pt")
    found = read_pickles(folder / "a.pt")
    assert found.keys() == {"x", "z.deep"}
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    assert torch.equal(found["x"].read(start, stop), value.reshape(-1)[start:stop])
    assert torch.equal(found["z.deep"].read(), (value + 1).reshape(-1))


def test_parts_that_do_not_cover_are_found(tmp_path):
    (tmp_path / "raw").write_bytes(bytes(64))
    one = Part(tmp_path / "raw", 0, (0, 0), (2, 4), kind=MergeError)
    with pytest.raises(MergeError, match="do not cover"):
        FileTensor((3, 4), torch.float32, (one,)).read()


def test_check_repeats_the_proof(tmp_path, base, tuned):
    torch.save(tuned.state_dict(), tmp_path / "model.pt")
    merged = merge_run(tmp_path / "model.pt", tmp_path / "out", base=str(base))
    again = merge_run(merged.folder, check=True)
    assert again.line == merged.line and "is what was merged" in "\n".join(again.lines)
    file = merged.folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(MergeError, match=r"model\.safetensors has changed"):
        merge_run(merged.folder, check=True)
    content[-3] ^= 1
    file.write_bytes(content)
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(MergeError, match=r"0 names are no parameter|has changed"):
        merge_run(merged.folder, check=True)
