"""Write run folders by hand in the checkpoint format, so that the merge is tested without any training code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fullshard.checkpoint.format import (
    COMPLETE,
    MANIFEST,
    FileFacts,
    Manifest,
    Piece,
    StoredTensor,
    hash_file,
    write_manifest,
)
from fullshard.checkpoint.ranges import PROOF
from fullshard.run_folder import CONFIG, DATA, checkpoint_path, write_json

PROOF_TOKENS = 16


def proof_tokens(vocabulary: int = 64) -> torch.Tensor:
    """(1, 16) token ids."""
    return (torch.arange(PROOF_TOKENS) * 7 % vocabulary)[None]


def write_run(
    run: Path,
    base: Path,
    weights: dict[str, torch.Tensor],
    logits: torch.Tensor,
    method: str,
    adapter: dict | None = None,
    stop_ids: tuple[int, ...] = (),
    num_parts: int = 2,
    step: int = 3,
    precision: str | None = None,
) -> Path:
    """A run folder with one checkpoint, its weights cut into ``num_parts`` uneven ranges; returns the checkpoint."""
    folder = checkpoint_path(run, step)
    folder.mkdir(parents=True)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_parts)]
    stored = []
    for name, value in weights.items():
        flat = value.detach().float().reshape(-1)
        borders = [flat.numel() * i * i // num_parts**2 for i in range(num_parts)] + [flat.numel()]
        pieces = []
        for part, (start, stop) in enumerate(itertools.pairwise(borders)):
            if start < stop:
                parts[part][f"weight/{name}"] = flat[start:stop].clone()
                pieces.append(Piece(f"part_{part:05d}.safetensors", f"weight/{name}", start, stop))
        stored.append(StoredTensor(name, "weight", tuple(value.shape), "F32", tuple(pieces)))
    for number, tensors in enumerate(parts):
        save_file(tensors, folder / f"part_{number:05d}.safetensors")
    save_file({"tokens": proof_tokens(logits.shape[1]), "logits": logits.float().contiguous()}, folder / PROOF)
    trainer = {"adapter": adapter} if adapter else {}
    if precision:
        trainer["precision"] = precision
    files = {path.name: FileFacts(0, "") for path in folder.glob("*.safetensors")}
    write_manifest(folder, Manifest(step, method, str(base), tuple(stored), files, trainer))
    rehash(folder)
    config = {"model": {"path": str(base)}, "data": {"train": "x.jsonl", "columns": None, "system": "red"}}
    write_json(run / CONFIG, config)
    write_json(run / DATA, {"stop_ids": list(stop_ids)})
    return folder


def rehash(folder: Path) -> None:
    """Make the manifest's sizes and hashes those of the files as they are."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {
        path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path)} for path in folder.glob("*.safetensors")
    }
    write_json(folder / MANIFEST, manifest)
    write_json(folder / COMPLETE, {MANIFEST: hash_file(folder / MANIFEST)})


def load_fp32(folder: Path):
    """The folder through plain transformers, fp32, eval mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    """(T, V) logits on the proof tokens."""
    return model(input_ids=proof_tokens(model.config.vocab_size)).logits[0].float()


def full_run(run: Path, base: Path, seed: int = 1, scale: float = 0.05, **more) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of full fine-tuning: every weight of ``base`` moved at random. Returns checkpoint and weights."""
    model = load_fp32(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return write_run(run, base, weights, logits_of(model), "full", **more), weights


def lora_run(
    run: Path, base: Path, targets, rank: int = 2, alpha: float = 6.0, zero: str = "", variant: str = "lora", **more
):
    """A run of LoRA through PEFT itself. Returns checkpoint, adapter weights, and PEFT's own merged model.

    ``zero``: "all" leaves every adapter at its start, "first" only the first one.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", use_rslora=variant == "rslora",
        use_dora=variant == "dora",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = get_peft_model(load_fp32(base), config).eval()
        with torch.no_grad():
            starts_at_zero = [p for n, p in model.named_parameters() if "lora_B" in n or "lora_embedding_A" in n]
            for number, parameter in enumerate(starts_at_zero):
                if zero == "all" or (zero == "first" and number == 0):
                    continue
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    weights = {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}
    weights = {name: value for name, value in weights.items() if ".lora_" in name}
    settings = {"rank": rank, "alpha": alpha, "targets": targets, "variant": variant}
    folder = write_run(run, base, weights, logits_of(model), "lora", adapter=settings, **more)
    return folder, weights, model.merge_and_unload()


def change_base_dtype(base: Path, dtype: torch.dtype) -> None:
    """Store ``base`` in ``dtype``, as transformers does."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(dtype)
    model.save_pretrained(base)
