"""Cells of the table of zero differences: a tiny model of a family is trained for two steps on two ranks, saved as our
checkpoint and as other tools save it, merged in fp32, and compared with the trained model as it stands in memory.

``train`` makes the files of one (family, kind), ``compare`` merges one of them. Adapters are rounded to multiples of
2^-10 before anything is saved: their products and sums then have fewer than 24 bits, so that fp32 adds s B A to W with
one rounding, and the merged weights must be, bit for bit, float64's W + s B A rounded once.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import WORDS, make_model, make_tokenizer

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "olmo2",
    "mixtral", "qwen3_moe",
)  # fmt: skip
KINDS = {  # (method, tied, added tokens)
    "full": ("full", False, []),
    "LoRA": ("lora", False, []),
    "LoRA, new tokens": ("lora", False, ["<|tool|>", "comet"]),
    "tied, full": ("full", True, []),
    "tied, LoRA": ("lora", True, []),
    "tied, LoRA, new tokens": ("lora", True, ["<|tool|>", "comet"]),
}
LEFT_OUT = ("qwen2", "new tokens")  # its tokenizer class cannot hold a word-level vocabulary (tiny_models.make_model)
RANK, ALPHA, STEP = 4, 8, 2.0**-10
TOKENS = (torch.arange(16) * 7 % 56 + 8)[None]


def sources_of(kind: str) -> list[str]:
    """What a kind is saved as. An adapter alone is what the transformers trainer asks Accelerate to save of PEFT."""
    return ["ours", "DCP"] + (["DCP, adapter only"] if "LoRA" in kind else [])


@dataclass
class Trained:
    """A trained model in memory: its logits, weights, and the folders it is saved in, by source."""

    base: Path
    logits: torch.Tensor  # (T, V)
    base_logits: torch.Tensor  # (T, old V)
    model: torch.nn.Module  # plain, or PEFT's, unmerged
    places: dict[str, Path]


def train(folder: Path, family: str, kind: str, words: Path, ranks: Any) -> Trained:
    """Two steps on two ranks; ``words``: a folder whose tokenizer makes the data; ``ranks``: rank_pool.pool(2)."""
    method, tied, added = KINDS[kind]
    base = make_tokenizer(make_model(folder / "base", family, tied=tied))
    home = base if added else words
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word} {WORDS[-number]}"}]}
        for number, word in enumerate(WORDS[:8])
    ]
    run = folder / "run"
    run.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe: dict[str, Any] = {
        "model": {"path": str(home), "add_tokens": added},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 32},
        "method": method,
        "train": {"global_batch": "4 rows", "max_steps": 2, "learning_rate": 0.02, "schedule": "constant"},
        "output": str(run),
    }
    if method == "lora":
        recipe["lora"] = {"rank": RANK, "alpha": ALPHA}
    from fullshard.config import config_from_dict
    from fullshard.data.prepared import prepare
    from fullshard.run_folder import CONFIG, PREPARED, write_json

    prepare(config_from_dict(recipe), run / PREPARED)
    recipe["model"]["path"] = str(base)
    write_json(run / CONFIG, recipe)
    state = ranks.run(train_rank, recipe)[0]
    model, start = reference(base, method, state, len(added))
    with torch.no_grad():
        found = Trained(base, logits_of(model, added), logits_of(start), model, {"ours": run})
    save_elsewhere(found, folder, kind, ranks)
    return found


def train_rank(ranks: Any, recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One rank of the run. Returns the trained tensors whole, gathered from the shards before they are saved."""
    from fullshard.config import config_from_dict
    from fullshard.model.blocks import is_adapter
    from fullshard.train import loop

    found: dict[str, torch.Tensor] = {}

    class Watched(loop.Trainer):
        def save(self, step: int) -> None:
            pieces = []
            with torch.no_grad():
                for shard in self.sharded.shards():
                    if is_adapter(shard.name):
                        shard.value.copy_((shard.value / STEP).round() * STEP)
                    if shard.trainable:
                        pieces.append((shard.name, shard.full_shape, shard.start, shard.value.detach().clone()))
            self.sharded.after_step()
            for name, shape, start, value in (piece for each in ranks.gather_objects(pieces) for piece in each):
                whole = found.setdefault(name, torch.full(shape, torch.nan))
                whole.view(-1)[start : start + value.numel()] = value
            super().save(step)

    plan = {"micro_batch": [64, "tokens"], "precision": "fp32", "recompute": False}
    inner, loop.Trainer = loop.Trainer, Watched
    try:
        loop.run_rank(Path(recipe["output"]), config_from_dict(recipe), plan, ranks, None, True)
    finally:
        loop.Trainer = inner
    return found if ranks.is_first else {}


def reference(base: Path, method: str, state: dict[str, torch.Tensor], num_new: int) -> tuple[Any, Any]:
    """The trained model in plain transformers (PEFT, unmerged), from the gathered tensors; and the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model = copy.deepcopy(start)
    if num_new:
        model.resize_token_embeddings(64 + num_new, mean_resizing=False)
    if method == "lora":
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        config.base_model_name_or_path = str(base)
        model = get_peft_model(model, config)
    of_model = dict(model.named_parameters(remove_duplicate=False))
    prefix = "base_model.model." if method == "lora" else ""
    trained = {prefix + name: value for name, value in state.items()}
    wanted = [name for name, value in model.named_parameters() if ".lora_" in name or method == "full"]
    wanted += [name for name in of_model if num_new and "lora_" not in name and len(of_model[name]) == 64 + num_new]
    assert set(trained) <= set(of_model) and {id(of_model[n]) for n in wanted} == {id(of_model[n]) for n in trained}
    with torch.no_grad():
        for name, value in trained.items():
            assert of_model[name].shape == value.shape and bool(torch.isfinite(value).all()), name
            of_model[name].copy_(value)
    return model.eval(), start


def logits_of(model: Any, added: Any = ()) -> torch.Tensor:
    """(T, V) on fixed tokens, the new ones among them."""
    ids = torch.cat([TOKENS, torch.arange(64, 64 + len(added))[None]], 1)
    return model(input_ids=ids).logits[0].float()


def save_elsewhere(trained: Trained, folder: Path, kind: str, ranks: Any) -> None:
    """The same tensors as DCP folders of two ranks, as Accelerate lays them out beside PEFT's config."""
    from peft import get_peft_model_state_dict

    for source in sources_of(kind)[1:]:
        place = trained.places[source] = folder / source.replace(", ", "_")
        place.mkdir()
        state = dict(trained.model.state_dict())
        if "adapter" in source:
            state = get_peft_model_state_dict(trained.model, adapter_name=trained.model.active_adapter)
        if "LoRA" in kind:
            trained.model.peft_config["default"].save_pretrained(place)
        state = {name: value.detach().clone() for name, value in state.items()}
        ranks.run(save_dcp, state, str(place / "pytorch_model_fsdp_0"))


def save_dcp(ranks: Any, state: dict[str, torch.Tensor], folder: str) -> None:
    """One rank of a DCP save, each tensor cut by rows over the ranks as fully_shard does it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    cut = {name: distribute_tensor(value, ranks.mesh, [Shard(0)]) for name, value in state.items() if value.dim()}
    dcp.save({"model": state | cut}, checkpoint_id=folder)


def compare(trained: Trained, source: str, output: Path) -> dict[str, Any]:
    """Merge, load with plain transformers, compare: see ``measure``."""
    from transformers import AutoModelForCausalLM

    from fullshard.merge.job import merge_run

    base = None if source == "ours" else str(trained.base)
    folder = merge_run(trained.places[source], output, dtype="fp32", base=base).folder
    merged, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        return measure(trained, merged.eval())


def measure(trained: Trained, merged: Any) -> dict[str, Any]:
    """``parameters`` that differ in a bit from float64's W + s B A rounded once (or from the trained ones);
    ``logits``: the largest difference from the unmerged model's as a share of their range; ``moved``: of the base's."""
    exact = exact_weights(trained.model)
    own = dict(merged.named_parameters(remove_duplicate=False))
    assert own.keys() == exact.keys(), set(own) ^ set(exact)
    wrong = [name for name, value in own.items() if value.detach().numpy().tobytes() != exact[name].tobytes()]
    found = logits_of(merged, range(len(trained.logits) - TOKENS.shape[1]))
    extent = float(trained.logits.max() - trained.logits.min())
    old = trained.logits[: len(trained.base_logits), : trained.base_logits.shape[1]]
    return {
        "parameters": len(own), "parameters_differ": wrong,
        "logits": float((found - trained.logits).abs().max()) / extent,
        "moved": float((old - trained.base_logits).abs().max()) / extent,
    }  # fmt: skip


def exact_weights(model: Any) -> dict[str, np.ndarray]:
    """Every parameter of the merged model, fp32, by numpy in float64 from the tensors in memory."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    values = {name: value.detach().numpy() for name, value in tensors.items()}
    whole = {}
    for name, value in values.items():
        if ".lora_" not in name:
            whole[name.removeprefix("base_model.model.").replace(".base_layer", "")] = value.astype(np.float64)
    for name, down in values.items():
        if not name.endswith(".lora_A.default.weight"):
            continue
        module = name.removesuffix(".lora_A.default.weight")
        down, up = down.astype(np.float64), values[f"{module}.lora_B.default.weight"].astype(np.float64)
        layer = model.get_submodule(module)
        leaf = getattr(layer, "parameter_name", "weight")
        target = f"{module}.{leaf}".removeprefix("base_model.model.").replace(".base_layer", "")
        if whole[target].ndim == 3:  # stacked experts: PEFT's A is (experts x rank, in), its B (out, rank x experts)
            experts = len(whole[target])
            down = down.reshape(experts, -1, down.shape[-1])
            up = up.reshape(len(up), -1, experts)  # (out, rank, experts)
            change = np.einsum("ore,eri->eoi", up, down)
        else:
            change = up @ down
        if change.shape != whole[target].shape or is_conv1d(layer):
            change = np.swapaxes(change, -1, -2)
        whole[target] = whole[target] + layer.scaling["default"] * change  # PEFT's own: gate and up have a double rank
    return {name: value.astype(np.float32) for name, value in whole.items()}


def is_conv1d(layer: Any) -> bool:
    """Whether a weight is (in, out), as gpt2's; square ones do not show it."""
    return type(layer.get_base_layer()).__name__ == "Conv1D"
