"""LoRA adapters through PEFT: injection, start values, settings. Linear: W is (out, in), A (rank, in), B (out, rank);
gpt2's Conv1D: W (in, out). E stacked experts: W (E, out, in) or (E, in, out), A (rank x E, in), B (out, rank x E)."""

import hashlib
import json
import math
from copy import copy
from pathlib import Path
from typing import Any
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from fullshard.config import LoraSection, RunConfig
from fullshard.errors import ModelError, refusal
from fullshard.frozen import Frozen
from fullshard.model.blocks import ADAPTER, base_name, is_adapter, is_tied


class AdapterMatrix(nn.Linear):
    """A or B of an adapter: rests as an fp32 master and multiplies in its input's dtype, as sharded weights do."""

    follows_input = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), in the dtype of ``inputs``."""
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype))


def peft_config(model: nn.Module, lora: LoraSection) -> Any:
    """PEFT's config of what a recipe's section asks for."""
    from peft import LoraConfig

    # Routers that subclass Linear return a tuple, which PEFT's layer cannot wrap.
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    routers = [name for name, module in linear if "router" in type(module).__name__.lower()] or None
    targets = [lora.targets] if isinstance(lora.targets, str) and lora.targets != "all-linear" else lora.targets
    more = {"exclude_modules": routers, "use_rslora": lora.variant == "rslora", "use_dora": lora.variant == "dora"}
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, task_type="CAUSAL_LM", target_modules=targets, **more)


def inject_adapters(model: nn.Module, lora: Any) -> None:
    """Wrap modules of a model on meta in PEFT's LoRA layers, as a recipe's section or a LoraConfig says. ModelError."""
    from peft import inject_adapter_in_model

    config = peft_config(model, lora) if isinstance(lora, LoraSection) else copy(lora)
    config.modules_to_save, targets = None, getattr(lora, "targets", config.target_modules)  # those are plain weights
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        family = type(model).__name__
        if "use_dora" in str(error):
            raise refusal("dora_experts", family=family) from None
        leaves = {name.split(".")[-1] for name, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D)}
        message = f"lora.targets = {targets!r} does not fit {family}: {str(error).splitlines()[0]}"
        raise ModelError(message, f"Linear modules of this model: {', '.join(sorted(leaves))}") from None
    for place in adapter_places(model):
        if place.layout in ("linear", "conv1d") and not place.has_magnitude:
            layer = model.get_submodule(place.module)
            layer.cast_input_dtype_enabled = False  # PEFT would widen the input to the adapter's fp32
            for matrices in (layer.lora_A, layer.lora_B):
                matrices[ADAPTER].__class__ = AdapterMatrix


def add_adapters(model: nn.Module, lora: LoraSection, trains_vocabulary: bool = False) -> None:
    """Inject LoRA layers (fp32) into a model on meta; all else is frozen, but for a trained vocabulary."""
    inject_adapters(model, lora)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    adapted_head = hasattr(head, "base_layer") and (trains_vocabulary or is_tied(model))
    if hasattr(embedding, "base_layer") or adapted_head:  # not to be merged into one weight, or trained twice
        raise refusal("adapted", targets=lora.targets, part="head" if adapted_head else "embedding")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for module in (embedding, head) if trains_vocabulary else ():
        module.requires_grad_(True)


def peft_config_text(model: nn.Module, config: RunConfig) -> str:
    """PEFT's adapter_config.json for a model with a recipe's adapters."""
    settings = peft_config(model, config.lora)
    settings.base_model_name_or_path, settings.inference_mode = str(Path(config.model.path).resolve()), True
    plain = [place.module for place in adapter_places(model) if not place.layout.startswith("experts")]
    settings.target_modules = plain or settings.target_modules
    values = {key: sorted(one) if isinstance(one, set) else one for key, one in settings.to_dict().items()}
    return json.dumps(values, indent=2) + "\n"


class AdapterPlace(Frozen):
    """One adapter: its ``module`` in the wrapped model and the base's ``parameter`` that it changes."""

    module: str
    parameter: str
    layout: str  # linear | conv1d | embedding | experts (W as experts, out, in) | experts_in_out
    scale: float
    has_magnitude: bool  # DoRA


def adapter_places(model: nn.Module) -> list[AdapterPlace]:
    """Every adapter of a model that ``add_adapters`` (or PEFT) has wrapped."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    places = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or ADAPTER not in module.scaling:
            continue
        layout, leaf = "embedding" if ADAPTER in module.lora_embedding_A else "linear", "weight"
        if isinstance(module, ParamWrapper):
            leaf = module.parameter_name
            if module.num_experts > 1:
                layout = "experts" if module._did_swap_in_out_features else "experts_in_out"
        elif isinstance(module.get_base_layer(), Conv1D):
            layout = "conv1d"
        has_magnitude = ADAPTER in module.lora_magnitude_vector
        places.append(AdapterPlace(name, f"{base_name(name)}.{leaf}", layout, module.scaling[ADAPTER], has_magnitude))
    return places


def start_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """An adapter matrix at first, fp32: B zeros, A uniform in +-1/sqrt(in); by (seed, name) only, on any ranks."""
    if ".lora_A." not in name:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % (1 << 63))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
