"""The numbers of a step: chunks of the head, layouts (HO-5), recomputation, the reach of gradients, bad steps."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import pool
from safetensors.numpy import load_file, save_file
from test_training import SGD, losses_of, make_run, weights_of
from tiny_models import make_model, make_tokenizer

from fullshard.config import config_from_dict
from fullshard.data.pack import windows
from fullshard.data.prepared import prepare
from fullshard.errors import TrainError
from fullshard.run_folder import METRICS, PREPARED


def records_of(run: Path, kind: str) -> list[dict]:
    return [r for r in map(json.loads, (run / METRICS).read_text().splitlines()) if r["kind"] == kind]


def train(ranks, run: str, config: dict, micro_batch: list, recompute=False, stub: bool = False, poison: int = 0):
    """A run on resident ranks; returns what the log said. ``poison``: NaN in the loss of that step."""
    import torch

    from fullshard.train import loop, loss, metrics

    said: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(metrics.MetricsLog, "say", lambda self, line: said.append(line))
    if stub:
        patch.setattr(loop, "batch_loss", row_number_loss)
    calls = {"steps": 0}

    def spoiled(model, batch, device):
        calls["steps"] += 1
        return loss.batch_loss(model, batch, device) * (float("nan") if calls["steps"] == poison + 1 else 1)

    if poison:
        patch.setattr(loop, "batch_loss", spoiled)  # call 1 is the trial step
    plan = {"micro_batch": micro_batch, "precision": "fp32", "recompute": recompute}
    try:
        loop.run_rank(Path(run), config_from_dict(config), plan, ranks, None, True)
    except TrainError as error:
        if not poison:
            raise
        said.append(f"ended: {error}")
    finally:
        patch.undo()
    assert torch.is_grad_enabled()
    return said


def row_number_loss(model, batch, device):
    """HO-5's stubbed loss: every supervised token of a row costs the row's mean, which its number of tokens names."""
    means = {1: 4.0, 7: 2.0, 3: 3.0, 5: 1.0}
    real = model(batch.input_ids, batch.labels)
    cost = 0.0
    for labels, lengths in zip(batch.labels, batch.lengths, strict=True):
        for document in labels[: sum(lengths)].split(lengths):
            count = int((document != -100).sum())
            cost += count * means.get(count, 0.0)
    return real * 0 + cost


def ho5_run(folder: Path, model: Path, engine: str):
    """Four rows with 1, 7, 3 and 5 supervised tokens: as many words; the end after them is taken out."""
    folder.mkdir(parents=True)
    rows = [
        {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": " ".join(["sun"] * words)}]}
        for words in (1, 7, 3, 5)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = config_from_dict(
        {
            "model": {"path": str(model)}, "method": "full", "output": str(folder),
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 32},
            "train": {"global_batch": "4 rows", "epochs": 1, **SGD}, "engine": engine,
        }
    )  # fmt: skip
    prepare(config, folder / PREPARED)
    change_mask(folder / PREPARED / "train", lambda supervised, offsets: supervised.__setitem__(offsets[1:] - 1, False))
    return config


def change_mask(data: Path, change: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Change the mask of prepared rows, (supervised, offsets) in place, and what is counted of it."""
    mask, lengths = (load_file(data / f"{name}.safetensors")[name] for name in ("supervised", "lengths"))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    change(mask, offsets)
    targets = np.array([part[1:].sum() for part in np.split(mask, offsets[1:-1])], dtype=np.int32)
    save_file({"supervised": mask}, data / "supervised.safetensors")
    save_file({"targets": targets}, data / "targets.safetensors")


HO5 = [(1, [4, "rows"]), (1, [1, "rows"]), (2, [1, "rows"]), (2, [2, "rows"])]  # ranks, batch; the rest accumulates


def test_ho5_one_loss_for_every_layout_and_its_arithmetic_control(tmp_path):
    model = make_tokenizer(make_model(tmp_path / "model"))
    found, stubbed = [], []
    for engine, (num_ranks, micro_batch) in itertools.product(("torch", "simple"), HO5):
        for stub in (False, True)[: 1 + (engine == "simple")]:
            run = tmp_path / f"run{len(found)}{stub}"
            config = ho5_run(run, model, engine)
            pool(num_ranks).run(train, str(run), config.model_dump(exclude_unset=True), micro_batch, False, stub)
            if stub:
                stubbed += losses_of(run)
            else:
                [record] = records_of(run, "train")
                assert record["supervised_tokens"] == 16
                found.append((record["loss"], record["gradient_norm"], weights_of(run, 1)))
    assert stubbed == [2.0] * len(HO5)  # (4 + 14 + 9 + 5) / 16; the mean of the rows' means is 2.5
    for loss, norm, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5) and norm == pytest.approx(found[0][1], rel=1e-5)
        for name, value in found[0][2].items():
            assert torch.allclose(weights[name], value, atol=1e-6), name


def test_a_window_without_supervised_tokens_is_skipped_everywhere(tmp_path):
    """4 rows, one a window, loss on none of the first row's tokens: 3 steps, one said to be skipped."""
    model = make_tokenizer(make_model(tmp_path / "model"))
    config = make_run(tmp_path / "run", model, global_batch="1 rows", max_steps=4, **SGD)

    def empty_the_first(supervised: np.ndarray, offsets: np.ndarray) -> None:
        first = int(windows(np.diff(offsets), 0, 0, (1, "rows"))[0][0])
        supervised[offsets[first] : offsets[first + 1]] = False

    change_mask(tmp_path / "run" / PREPARED / "train", empty_the_first)
    said = pool(2).run(train, str(tmp_path / "run"), config.model_dump(exclude_unset=True), [4, "rows"])
    for lines in said:
        assert "skipped step 1: nothing in its 1 row is supervised" in lines
    assert [record["step"] for record in records_of(tmp_path / "run", "train")] == [2, 3, 4]
    assert len(records_of(tmp_path / "run", "skipped")) == 1
    assert {record["skipped_steps"] for record in records_of(tmp_path / "run", "train")} == {1}  # in fp32, too


@pytest.mark.parametrize("method", ["full", "lora"])
def test_recomputation_changes_no_gradient_and_reaches_every_adapter(tmp_path, method):
    model = make_tokenizer(make_model(tmp_path / "model", "qwen3"))
    wanted = None
    for recompute in (False, 1, True):
        run = tmp_path / f"run{recompute}"
        config = make_run(run, model, method, **SGD)
        said = pool(2).run(train, str(run), config.model_dump(exclude_unset=True), [64, "tokens"], recompute)[0]
        weights = weights_of(run, 4)
        wanted = wanted or weights
        assert all(torch.equal(weights[name], value) for name, value in wanted.items()), recompute
        count = len(weights)
        assert f"trainable tensors that received a gradient: {count} of {count}" in said
        lines = [line for line in said if line.startswith("recomputation")]
        number = 2 if recompute is True else recompute
        assert lines == ([f"recomputation: the first {number} of 2 blocks"] if number else [])


def test_recomputation_is_ours_alone():
    """The model's own switch goes off; every wrapped block's forward runs twice a step."""
    import transformers

    from fullshard.train.setup import recompute_blocks

    settings = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.LlamaForCausalLM(settings).train()
    model.gradient_checkpointing_enable()
    calls: list[int] = []
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(lambda *_, place=place: calls.append(place))
    lines = recompute_blocks(model, 2)
    assert lines[0].endswith("on and is now off") and lines[1] == "recomputation: the first 2 of 3 blocks"
    model(torch.arange(6)[None], labels=torch.arange(6)[None], use_cache=False).loss.backward()
    assert sorted(calls) == [0, 0, 1, 1, 2]


def test_an_adapter_that_took_part_without_a_gradient_is_an_error():
    from types import SimpleNamespace

    from fullshard.errors import TrainError
    from fullshard.shard import Shard
    from fullshard.train.setup import GradientReach

    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("used", "idle")})
    for layer in layers.values():
        for part in "AB":
            layer.add_module(f"lora_{part}", torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2, bias=False)}))
    names = [f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"]
    alone = SimpleNamespace(gather_objects=lambda value: [value])

    def report(values: dict[str, float], run: list[str]) -> str:
        reach = GradientReach(layers)
        for layer in run:
            layers[layer](torch.ones(1, 2))
        gradients = [torch.full((4,), values.get(name, 0.0)) for name in names]
        shards = [Shard(n, (2, 2), 0, 4, torch.ones(4), g, True, False) for n, g in zip(names, gradients, strict=True)]
        return reach.report(shards, alone)

    both = {names[1]: 1.0, names[3]: 1.0}
    assert report(both, ["used", "idle"]).endswith(": 4 of 4")
    assert report({names[1]: 1.0}, ["used"]).endswith(f": 2 of 4; the first that this step did not use: {names[2]}")
    with pytest.raises(TrainError, match=r"2 adapter tensors .* first idle\.lora_A"):
        report({names[1]: 1.0}, ["used", "idle"])


def test_rows_of_a_bad_step_are_named_and_the_state_before_it_is_kept(tmp_path):
    """NaN at step 3 of 4: the checkpoint of step 2 is there, with the weights of an undisturbed run of 2 steps."""
    model = make_tokenizer(make_model(tmp_path / "model"))
    config = make_run(tmp_path / "run", model, **SGD)
    arguments = (config.model_dump(exclude_unset=True), [64, "tokens"])
    said = pool(2).run(train, str(tmp_path / "run"), *arguments, False, False, 3)
    [bad] = records_of(tmp_path / "run", "bad_step")
    assert bad["step"] == 3 and len(bad["rows"]) == 4 and all("rows.jsonl:" in row for row in bad["rows"])
    for lines in said:
        assert any(line.startswith("step 3: loss nan") and bad["rows"][0] in line for line in lines)
        assert any("the state before it is kept in" in line and "step_000002" in line for line in lines)
        assert lines[-1].startswith("ended: Step 3")
    short = make_run(tmp_path / "short", model, max_steps=2, **SGD)
    pool(2).run(train, str(tmp_path / "short"), short.model_dump(exclude_unset=True), [64, "tokens"])
    kept, wanted = weights_of(tmp_path / "run", 2), weights_of(tmp_path / "short", 2)
    assert all(torch.equal(kept[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"tied": True}), ("gemma2", {}), ("granite", {}), ("cohere", {}), ("phi", {})],
)
def test_chunks_keep_loss_and_gradients_of_every_head(tmp_path, family, changes):
    """Ties, head biases (phi), scaled and capped logits: chunks of 3 rows against the model's own loss, 1e-5."""
    from transformers import AutoModelForCausalLM

    from fullshard.train.loss import LossModel

    path = make_model(tmp_path / "model", family, **changes)
    ids = torch.randint(8, 64, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    found = []
    for own in (True, False):
        model = LossModel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        model.chunk_rows = 3
        loss = model(ids, labels, own_logits=own)
        (loss * 0.5).backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, value in found[0][1].items():
        assert torch.allclose(found[1][1][name], value, atol=1e-5), name


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gemma2", "float32"), ("gemma2", "bfloat16")])
@pytest.mark.parametrize("chunks", [1, 8])
def test_whole_logits_never_exist(family, dtype, chunks):
    """All that lives at once, weights' gradients included: at most 2 chunks of fp32 logits, of one or of 8 chunks."""
    import weakref

    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    from fullshard.train.loss import LossModel

    class Live(TorchDispatchMode):
        """Bytes of the storages that operators have made and that live."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes, self.peak = {}, 0

        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            out = operator(*arguments, **(keywords or {}))
            for value in out if isinstance(out, list | tuple) else [out]:
                if isinstance(value, torch.Tensor) and (storage := value.untyped_storage())._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
            self.peak = max(self.peak, sum(self.sizes.values()))
            return out

    settings = transformers.AutoConfig.for_model(
        family, vocab_size=8192, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=4, intermediate_size=16,
    )  # fmt: skip
    model = LossModel(transformers.AutoModelForCausalLM.from_config(settings).to(getattr(torch, dtype)))
    model.chunk_rows = 1024 // chunks
    ids = torch.randint(0, 8192, (32, 32))  # short rows: attention is small beside logits
    late: list[int] = []

    def watch(module, inputs, embedded) -> None:
        embedded.register_hook(lambda _: late.append(sum(live.sizes.values())))

    model.causal_lm.get_input_embeddings().register_forward_hook(watch)
    with Live() as live:
        model(ids, ids).backward()
    chunk_bytes = 4 * 8192 * model.chunk_rows
    assert late[-1] < 4 * 8192 * 1024 / 4, "the logits' gradient lives on while the blocks go back"
    assert chunk_bytes / 2 < live.peak <= 2 * chunk_bytes, live.peak / chunk_bytes


def test_the_heads_gradient_is_summed_over_chunks_in_fp32():
    """256 rows that each add the same to a bf16 gradient: summed in bf16 they would stop at 256 times the step."""
    import transformers

    from fullshard.train.loss import LossModel

    settings = transformers.LlamaConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    exact = LossModel(transformers.LlamaForCausalLM(settings).bfloat16().float())
    rounded = LossModel(copy.deepcopy(exact.causal_lm).bfloat16())
    ids = torch.full((1, 1024), 5)
    for model in (exact, rounded):
        model.chunk_rows = 1
        model(ids, ids).backward()
    wanted, found = (model.causal_lm.lm_head.weight.grad.float() for model in (exact, rounded))
    assert float((found - wanted).norm() / wanted.norm()) < 0.01
