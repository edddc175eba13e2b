"""Training against an unsharded oracle that shares no code with it: same losses, same weights, whatever the layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from families import ROUTERS_LEFT_OUT
from rank_pool import pool
from safetensors.torch import load_file
from tiny_models import WORDS, make_model, make_tokenizer

from fullshard.config import RunConfig, config_from_dict
from fullshard.data.pack import windows
from fullshard.data.prepared import open_prepared, prepare
from fullshard.errors import ConfigError
from fullshard.run_folder import METRICS, PREPARED, checkpoint_path

SGD = {"optimizer": "sgd", "learning_rate": 0.1, "schedule": "constant", "warmup": 0, "clip_norm": 0}


def write_rows(path: Path, count: int = 14) -> Path:
    """Rows of uneven lengths: 1 to 7 supervised words."""
    lines = []
    for number in range(count):
        asked = " ".join(WORDS[(number * 5 + i) % 56] for i in range(1 + number % 4))
        answered = " ".join(WORDS[(number * 3 + i) % 56] for i in range(1 + number * 2 % 7))
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]})
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


ENGINE = {"engine": "torch"}


@pytest.fixture(autouse=True, params=["torch", "simple"])
def engine(request, monkeypatch):
    """Every test of this file runs on both engines."""
    monkeypatch.setitem(ENGINE, "engine", request.param)


def make_run(folder: Path, model: Path, method: str = "full", packing: bool = False, **train) -> RunConfig:
    folder.mkdir(parents=True)
    data = {"train": str(write_rows(folder / "rows.jsonl")), "max_length": 32, "packing": packing}
    config = config_from_dict(
        {
            "model": {"path": str(model)},
            "data": data,
            "method": method,
            **({"lora": {"rank": 4, "alpha": 8}} if method == "lora" else {}),
            "train": {"global_batch": "4 rows", "epochs": 1, **train},
            "output": str(folder),
            **ENGINE,
        }
    )
    prepare(config, folder / PREPARED)
    return config


def train_on_ranks(ranks, run, config: dict, micro_batch: list, resume_step=None, precision="fp32", reduce_each=False):
    from fullshard.train.loop import run_rank

    plan = {"micro_batch": micro_batch, "precision": precision, "recompute": False, "reduce_each": reduce_each}
    run_rank(Path(run), config_from_dict(config), plan, ranks, resume_step, True)


def losses_of(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The whole weights of ``stored``."""
    return {name: value for (kind, name), value in stored(run, step).items() if kind == "weight"}


def stored(run: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """By (kind, name): whole tensors put together from the parts by hand, by the manifest alone."""
    folder = checkpoint_path(run, step)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {piece["file"] for tensor in manifest["tensors"] for piece in tensor["pieces"]}
    files = {name: load_file(folder / name) for name in names}
    whole = {}
    for tensor in manifest["tensors"]:
        parts = [files[piece["file"]][piece["key"]] for piece in tensor["pieces"]]
        whole[tensor["kind"], tensor["name"]] = torch.cat(parts).reshape(tensor["shape"])
    return whole


def oracle(run: Path, config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and trained weights of ``oracle_model``."""
    from peft import get_peft_model_state_dict

    losses, model = oracle_model(run, config)
    if config.method == "lora":
        return losses, get_peft_model_state_dict(model)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def make_reference_vocabulary(path, add_tokens):
    """The model by plain transformers, its vocabulary resized for ``add_tokens``, each new row the mean of the old."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if add_tokens:
        old = model.get_input_embeddings().weight.shape[0]
        model.resize_token_embeddings(old + len(add_tokens), mean_resizing=False)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            for parameter in module.parameters():
                parameter.data[old:] = parameter.data[:old].mean(0)
    return model


def oracle_model(run: Path, config: RunConfig) -> tuple[list[float], torch.nn.Module]:
    """One process, no sharding, row by row: losses and the model after every window of one epoch (SGD 0.1)."""
    from peft import LoraConfig, get_peft_model

    from fullshard.model.adapters import start_value

    model = make_reference_vocabulary(config.model.path, config.model.add_tokens)
    if config.method == "lora":
        routers = [name for name, _ in model.named_modules() if name.endswith(".router")]
        left_out = routers if model.config.model_type in ROUTERS_LEFT_OUT else None
        lora = LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=left_out, task_type="CAUSAL_LM",
            use_rslora=config.lora.variant == "rslora", use_dora=config.lora.variant == "dora",
        )  # fmt: skip
        model = get_peft_model(model, lora)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                inner = name.removeprefix("base_model.model.")
                parameter.data.copy_(start_value(inner, tuple(parameter.shape), config.train.seed))
        if config.model.add_tokens:
            model.get_input_embeddings().requires_grad_(True)
            model.get_output_embeddings().requires_grad_(True)
    data = open_prepared(run / PREPARED, "train")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = []
    for window in windows(data.lengths, config.train.seed, 0, (4, "rows"))[: config.train.max_steps]:
        total, count = torch.zeros(()), 0
        for row in window:
            ids, supervised = data.row(int(row))
            ids = torch.tensor(ids.tolist())
            logits = model(ids[None]).logits[0].float()
            where = [place for place in range(1, len(ids)) if supervised[place]]
            total = total + torch.nn.functional.cross_entropy(
                logits[[p - 1 for p in where]], ids[where], reduction="sum"
            )
            count += len(where)
        loss = total / count
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in trained:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return losses, model


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("method", "tied"), [("full", False), ("full", True), ("lora", False), ("lora", True)])
def test_losses_and_weights_equal_the_unsharded_oracle(tmp_path, num_ranks, method, tied):
    odd = {"vocab_size": 65, "intermediate_size": 33} if not tied else {}
    model = make_tokenizer(make_model(tmp_path / "model", tied=tied, **odd))
    config = make_run(tmp_path / "run", model, method, **SGD)
    pool(num_ranks).run(train_on_ranks, str(tmp_path / "run"), config.model_dump(exclude_unset=True), [64, "tokens"])
    losses, weights = oracle(tmp_path / "run", config)
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    found = weights_of(tmp_path / "run", len(losses))
    assert set(found) == set(weights)
    for name, value in weights.items():
        assert torch.allclose(found[name], value, atol=1e-5, rtol=1e-5), name


LAYOUTS = [(1, [4, "rows"], False), (1, [1, "rows"], False), (2, [1, "rows"], False), (2, [4, "rows"], False),
           (1, [64, "tokens"], True), (2, [32, "tokens"], True)]  # fmt: skip


def test_one_loss_for_every_layout(tmp_path):
    """Ranks x accumulation x micro-batch x packing: the window decides, the layout does not."""
    model = make_tokenizer(make_model(tmp_path / "model", "llama"))
    wanted = None
    for number, (num_ranks, micro_batch, packing) in enumerate(LAYOUTS):
        run = tmp_path / f"run{number}"
        config = make_run(run, model, packing=packing, **SGD)
        pool(num_ranks).run(train_on_ranks, str(run), config.model_dump(exclude_unset=True), micro_batch)
        losses = losses_of(run)
        weights = weights_of(run, len(losses))
        wanted = wanted or oracle(run, config)
        assert losses == pytest.approx(wanted[0], rel=1e-5), (num_ranks, micro_batch, packing)
        for name, value in wanted[1].items():
            assert torch.allclose(weights[name], value, atol=1e-5), (name, num_ranks, micro_batch, packing)


def test_chunked_head_equals_the_whole_one(tmp_path, monkeypatch):
    """Chunks of one row of logits: same loss and gradients as in one piece."""
    from transformers import AutoModelForCausalLM

    from fullshard.train.loss import LossModel

    path = make_model(tmp_path / "model", "gemma2", True)
    ids = torch.randint(8, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    found = []
    for rows in (1000, 1, 3):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        model.chunk_rows = rows
        loss = model(ids, labels)
        loss.backward()
        found.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    own = LossModel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    own.uses_own_logits = True
    assert float(own(ids, labels).detach()) == pytest.approx(float(found[0][0]), rel=1e-6)
    for loss, gradients in found[1:]:
        assert float(loss) == pytest.approx(float(found[0][0]), rel=1e-6)
        for name, value in gradients.items():
            assert torch.allclose(value, found[0][1][name], atol=1e-6), name


def resume_and_look(ranks, run: str, config: dict, micro_batch: list, step: int) -> list[tuple]:
    """Resume; this rank's ranges as they were right after loading: (kind, name, start, values)."""
    from fullshard.train.loop import Trainer

    loaded = []

    def look(trainer, first_step):
        for shard in trainer.sharded.shards():
            loaded.append(("weight", shard.name, shard.start, shard.value.clone()))
            loaded.extend(
                (kind, name, shard.start, values.clone())
                for (name, kind), values in trainer.moments.items()
                if name == shard.name
            )
        return train(trainer, first_step)

    train, Trainer.train = Trainer.train, look
    try:
        train_on_ranks(ranks, run, config, micro_batch, step)
    finally:
        Trainer.train = train
    return loaded


@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1), (2, 3), (2, 4), (1, 2)])
def test_resume_goes_on_where_it_stopped(tmp_path, first, then):
    """HO-11, AdamW with warm-up and cosine: 6 steps, resumed after the fourth on other ranks; same ranks: bit for bit.
    Files hold exactly the parameters' elements, and what is loaded from them is what they hold."""
    model = make_tokenizer(make_model(tmp_path / "model", vocab_size=65, hidden_size=20, intermediate_size=33))
    train = {"learning_rate": 1e-3, "warmup": 2, "save_every": 2, "keep_last": 3, "epochs": 2, "max_steps": 6}
    config = make_run(tmp_path / "run", model, **train)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), [32, "tokens"])
    pool(first).run(train_on_ranks, *arguments)
    straight, wanted, saved = losses_of(tmp_path / "run"), weights_of(tmp_path / "run", 6), stored(tmp_path / "run", 4)
    sizes = {name: value.numel() for (kind, name), value in saved.items() if kind == "weight"}
    files = [
        load_file(path)
        for path in checkpoint_path(tmp_path / "run", 4).glob("*.safetensors")
        if "proof" not in path.name
    ]
    assert sum(value.numel() for file in files for value in file.values()) == 3 * sum(sizes.values())  # no padding
    covered = dict.fromkeys(saved, 0)
    for parts in pool(then).run(resume_and_look, *arguments, 4):
        for kind, name, start, values in parts:
            assert torch.equal(values, saved[kind, name].reshape(-1)[start : start + len(values)]), (kind, name)
            covered[kind, name] += len(values)
    assert covered == {key: value.numel() for key, value in saved.items()} and len(covered) == 3 * len(sizes)
    resumed, found = losses_of(tmp_path / "run")[6:], weights_of(tmp_path / "run", 6)
    assert len(straight) == 6 and len(resumed) == 2
    if first == then:
        assert resumed == straight[4:]
    assert resumed == pytest.approx(straight[4:], rel=1e-5)
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if first == then else torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_checkpoint_resumes_on_the_other_engine(tmp_path, method):
    """HO-11 across engines: 2 steps of 4 on one, the rest on the other and on another number of ranks."""
    model = make_tokenizer(make_model(tmp_path / "model", vocab_size=65, hidden_size=20, intermediate_size=33))
    config = make_run(tmp_path / "run", model, method, learning_rate=1e-3, warmup=2, save_every=2, keep_last=3)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), [32, "tokens"])
    pool(2).run(train_on_ranks, *arguments)
    straight, wanted = losses_of(tmp_path / "run"), weights_of(tmp_path / "run", 4)
    arguments[1]["engine"] = "simple" if ENGINE["engine"] == "torch" else "torch"
    pool(3).run(train_on_ranks, *arguments, 2)
    resumed, found = losses_of(tmp_path / "run")[4:], weights_of(tmp_path / "run", 4)
    assert len(resumed) == 2 and resumed == pytest.approx(straight[2:], rel=1e-5)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-5), name


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("sharding", "replicas", "reduce_each"), [("full", 2, False), ("keep", 2, True), ("replicate", 1, False)]
)
def test_every_way_of_sharding_gives_one_loss_and_one_checkpoint(tmp_path, method, sharding, replicas, reduce_each):
    """On 4 ranks against the oracle, whole weights from the checkpoint; resumed on 3 ranks that shard fully."""
    model = make_tokenizer(make_model(tmp_path / "model", vocab_size=65, hidden_size=20, intermediate_size=33))
    ways = {"sharding": sharding, "replicas": replicas, "save_every": 2, "keep_last": 3}
    if sharding == "replicate" and ENGINE["engine"] == "torch":  # fully_shard always frees after backward
        with pytest.raises(ConfigError, match=r"train\.sharding=replicate needs engine=simple"):
            make_run(tmp_path / "run", model, method, **SGD, **ways)
        return
    config = make_run(tmp_path / "run", model, method, **SGD, **ways)
    given = config.model_dump(exclude_unset=True)
    pool(4).run(train_on_ranks, str(tmp_path / "run"), given, [1, "rows"], None, "fp32", reduce_each)
    losses, weights = oracle(tmp_path / "run", config)
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    found = weights_of(tmp_path / "run", len(losses))
    assert set(found) == set(weights)
    given["train"] |= {"sharding": "full", "replicas": 1}
    pool(3).run(train_on_ranks, str(tmp_path / "run"), given, [1, "rows"], 2)
    assert losses_of(tmp_path / "run")[-2:] == pytest.approx(losses[2:], rel=1e-5)
    for name, value in weights.items():
        assert torch.allclose(found[name], value, atol=1e-5), name


def test_more_ranks_than_rows_and_a_partial_window(tmp_path):
    """14 rows in windows of 4: the last holds 2; on 4 ranks two ranks then run a zero-weight fill."""
    model = make_tokenizer(make_model(tmp_path / "model"))
    config = make_run(tmp_path / "run", model, **SGD)
    pool(4).run(train_on_ranks, str(tmp_path / "run"), config.model_dump(exclude_unset=True), [1, "rows"])
    records = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert [record["rows"] for record in records if record["kind"] == "train"] == [4, 4, 4, 2]
    data = open_prepared(tmp_path / "run" / PREPARED, "train")
    seen = np.concatenate(windows(data.lengths, 0, 0, (4, "rows")))
    assert sorted(seen.tolist()) == list(range(14))


def test_packing_is_proven_without_dropout_and_held_out_rows_are_written(tmp_path):
    """A model with dropout is not taken for one that mixes documents; the rows set apart can be given to eval."""
    from fullshard.data.prepared import write_held_out

    model = make_tokenizer(make_model(tmp_path / "model", "gpt2", True, attn_pdrop=0.3, resid_pdrop=0.3))
    config = make_run(tmp_path / "run", model, packing=True, **SGD)
    pool(2).run(train_on_ranks, str(tmp_path / "run"), config.model_dump(exclude_unset=True), [32, "tokens"])
    assert len(losses_of(tmp_path / "run")) == 4
    share = config.model_copy(update={"data": config.data.model_copy(update={"eval": 0.2})})
    write_held_out(share, tmp_path / "held_out.jsonl")
    lines = (tmp_path / "held_out.jsonl").read_text().splitlines()
    everything = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 3 and all(json.loads(line) in map(json.loads, everything) for line in lines)


def test_dropout_and_accumulation_resume_bit_for_bit(tmp_path):
    """HO-12: dropout 0.1, AdamW, warm-up 5 then cosine to 10 steps, accumulation 2; resumed after step 4 of 10."""
    model = make_tokenizer(make_model(tmp_path / "model", attention_dropout=0.1))
    train = {"learning_rate": 1e-3, "warmup": 5, "save_every": 4, "keep_last": 9, "epochs": 3, "max_steps": 10}
    config = make_run(tmp_path / "run", model, **train)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), [1, "rows"])

    def records():
        lines = (tmp_path / "run" / METRICS).read_text().splitlines()
        found = [record for record in map(json.loads, lines) if record["kind"] == "train"]
        return [[record[key] for key in ("step", "loss", "gradient_norm", "learning_rate")] for record in found]

    pool(2).run(train_on_ranks, *arguments)
    straight, wanted = records(), stored(tmp_path / "run", 10)
    rates = [rate for *_, rate in straight]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3]) and rates[5:] == sorted(rates[5:], reverse=True)
    shutil.rmtree(checkpoint_path(tmp_path / "run", 8))
    shutil.rmtree(checkpoint_path(tmp_path / "run", 10))
    pool(2).run(train_on_ranks, *arguments, 4)
    assert records()[10:] == straight[4:] and straight[4][0] == 5
    found = stored(tmp_path / "run", 10)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], value) for key, value in wanted.items())
    pool(1).run(train_on_ranks, *arguments, 4)
    assert [rate for *_, rate in records()[16:]] == rates[4:]
    plain = make_tokenizer(make_model(tmp_path / "plain"))
    other = make_run(tmp_path / "other", plain, **train)
    pool(2).run(train_on_ranks, str(tmp_path / "other"), other.model_dump(exclude_unset=True), [1, "rows"])
    assert losses_of(tmp_path / "other")[0] != straight[0][1]  # the dropout is there


def test_another_base_under_an_adapter_is_refused_on_resume(tmp_path):
    model = make_tokenizer(make_model(tmp_path / "model"))
    config = make_run(tmp_path / "run", model, "lora", learning_rate=1e-3, save_every=2, keep_last=9)
    arguments = (str(tmp_path / "run"), config.model_dump(exclude_unset=True), [32, "tokens"])
    pool(2).run(train_on_ranks, *arguments)
    make_model(tmp_path / "model", seed=8)
    with pytest.raises(AssertionError, match=r"(Checkpoint|Model|Config)Error: "):
        pool(2).run(train_on_ranks, *arguments, 2)
