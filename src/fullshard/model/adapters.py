"""LoRA adapters through PEFT: injection, start values that are the same on every rank, settings for the export."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn

from fullshard.config import LoraSection
from fullshard.errors import ModelError
from fullshard.model.names import ADAPTER, is_adapter


def add_adapters(model: nn.Module, lora: LoraSection) -> None:
    """Inject LoRA layers (fp32, trainable) into a model on the meta device and freeze everything else, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora.targets if isinstance(lora.targets, str) and lora.targets == "all-linear" else _as_list(lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        linear = sorted({name.split(".")[-1] for name, module in model.named_modules() if _is_linear(module)})
        raise ModelError(
            f"lora.targets = {lora.targets!r} does not fit {type(model).__name__}: {str(error).splitlines()[0]}",
            f"Linear modules of this model: {', '.join(linear)}",
        ) from None
    _refuse_embeddings(model, lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def _refuse_embeddings(model: nn.Module, lora: LoraSection) -> None:
    """An adapter on the embedding, or on a head tied to it, could not be merged into one weight: refused before training."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    adapted_head = hasattr(head, "base_layer") and head.base_layer.weight is getattr(embedding, "weight", None)
    if hasattr(embedding, "base_layer") or adapted_head:
        raise ModelError(
            f"lora.targets = {lora.targets!r} adapts the {'tied head' if adapted_head else 'embedding'}.",
            "Name other modules, or train with method: full.",
        )


def _as_list(targets: str | list[str]) -> list[str]:
    return [targets] if isinstance(targets, str) else list(targets)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def start_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Start value of one adapter matrix, fp32 on CPU: zeros for B; for A uniform in +-1/sqrt(in), as PEFT's default.

    A function of (seed, name) only, so that every rank and every number of ranks starts from the same adapter.
    """
    if ".lora_A." not in name:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % (1 << 63))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def adapter_settings(lora: LoraSection) -> dict[str, Any]:
    """What a checkpoint keeps of the adapter's settings: rank, alpha, targets, use_rslora."""
    targets = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": targets, "use_rslora": False}
