"""What the planner needs to know of a model: its parameters by sharding unit, and the widths of one block.

The real parameter list is read from the model class built on the meta device, so no weight is loaded and no family is
guessed at.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config import LoraSection
from fullshard.errors import ModelError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelShape:
    """Counts are numbers of parameters (tied ones once); widths are features per token."""

    parameters: int
    num_layers: int
    block: int  # the largest repeated block
    blocks: int  # all blocks together
    embedding: int  # token and position embeddings; with tied weights this is also the head
    head: int  # final norm and head; 0 where the head is the embedding
    tied: bool
    active_block_matrices: int  # weights of all blocks that one token is multiplied with (experts: the chosen ones)
    head_matrix: int  # vocabulary x width
    vocab_size: int
    hidden_size: int
    attention_width: int  # heads x head_dim
    key_value_width: int  # key heads x head_dim
    intermediate_size: int  # active expert width where there are experts
    mlp_copies: int  # tensors of the MLP's width that autograd keeps: 4 gated, 2 with a fused activation, 7 without
    norm_width: int  # features of all norms in a block
    fused_norms: bool  # LayerNorm keeps its input only; RMSNorm in Python also an fp32 copy
    num_heads: int
    eager_attention: bool  # the family refuses fused attention, so scores of rows x rows exist
    max_positions: int | None
    largest_tensor: int


def read_shape(model_path: str | Path) -> ModelShape:
    """Shape of the model in a Hugging Face folder. Reads config.json only; raises ModelError where it can't be built."""
    return shape_of(build_on_meta(model_path))


def build_on_meta(model_path: str | Path) -> nn.Module:
    """The causal language model of a folder's config.json on the meta device: names and shapes, no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(model_path)
    if not (path / "config.json").is_file():
        given = "no such folder" if not path.is_dir() else "it has no config.json"
        raise ModelError(
            f"{path} is not a model folder: {given}.", "Pass the folder that holds config.json and *.safetensors."
        )
    try:
        settings = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings)
    except (ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} can't be built as a causal language model: {error}", "Check its config.json.") from None


def shape_of(model: nn.Module) -> ModelShape:
    """Shape of a built model, on any device."""
    import torch

    settings = model.config.get_text_config()
    blocks = find_blocks(model)
    block_sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    parameters = dict(model.named_parameters())  # tied weights appear once
    total = sum(parameter.numel() for parameter in parameters.values())
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is table
    outside = total - sum(block_sizes)
    head_matrix = output.weight.numel() if output is not None else table.numel()
    embeddings = sum(
        weight.numel() for name, weight in parameters.items() if weight is table or _is_position_table(name, weight)
    )
    intermediate = _first(settings, "moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    intermediate = intermediate or 4 * settings.hidden_size
    active = _first(settings, "num_experts_per_tok") or 1
    heads = settings.num_attention_heads
    head_dim = _first(settings, "head_dim") or settings.hidden_size // heads
    key_heads = _first(settings, "num_key_value_heads") or heads
    return ModelShape(
        parameters=total,
        num_layers=len(blocks),
        block=max(block_sizes),
        blocks=sum(block_sizes),
        embedding=embeddings,
        head=outside - embeddings,
        tied=tied,
        active_block_matrices=sum(_active_matrices(block, settings) for block in blocks),
        head_matrix=head_matrix,
        vocab_size=head_matrix // settings.hidden_size,
        hidden_size=settings.hidden_size,
        attention_width=heads * head_dim,
        key_value_width=key_heads * head_dim,
        intermediate_size=intermediate * active,
        mlp_copies=_mlp_copies(blocks[0], settings),
        norm_width=_norm_width(blocks[0], heads * head_dim, key_heads * head_dim),
        fused_norms=any(isinstance(module, torch.nn.LayerNorm) for module in blocks[0].modules()),
        num_heads=heads,
        eager_attention=getattr(model.config, "_attn_implementation", None) == "eager",
        max_positions=_first(settings, "max_position_embeddings", "n_positions"),
        largest_tensor=max(weight.numel() for weight in parameters.values()),
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the module list with the most parameters. ModelError where the model has none."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no list of repeated blocks.", "Such models can't be planned yet.")
    return list(max(lists, key=lambda modules: sum(weight.numel() for weight in modules.parameters())))


@dataclass(frozen=True)
class AdapterShape:
    """``parameters`` of all adapters together; ``inputs_per_block``: features that the adapted layers of a block read."""

    parameters: int
    inputs_per_block: int


def adapter_shape(model: nn.Module, lora: LoraSection) -> AdapterShape:
    """Size of the adapters: rank x (inputs + outputs) of each matched linear layer, by PEFT's rules.

    A list names modules by their last parts, one string is "all-linear" (all but the head) or a regular expression over
    whole names. ModelError where nothing matches.
    """
    head = model.get_output_embeddings()
    total = inputs = 0
    for name, module in model.named_modules():
        size = _linear_size(module)
        if size is None or (lora.targets == "all-linear" and module is head):
            continue
        if lora.targets == "all-linear" or _matches(name, lora.targets):
            total += lora.rank * sum(size)
            inputs += size[0]
    if not total:
        raise ModelError(
            f"lora.targets {lora.targets!r} fits no linear layer of {type(model).__name__}.",
            'Use "all-linear", or names such as: ' + ", ".join(sorted(_linear_names(model))),
        )
    return AdapterShape(total, math.ceil(inputs / len(find_blocks(model))))


def _matches(name: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _linear_names(model: nn.Module) -> set[str]:
    return {name.split(".")[-1] for name, module in model.named_modules() if _linear_size(module)}


def _linear_size(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a Linear or of transformers' transposed Conv1D; None for other modules."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return None


def _active_matrices(block: nn.Module, settings: Any) -> int:
    """Matrix weights of a block that one token meets; of stacked or listed experts only the chosen share."""
    chosen = _first(settings, "num_experts_per_tok")
    experts = _first(settings, "num_experts", "num_local_experts", "n_routed_experts")
    share = chosen / experts if chosen and experts else 1.0
    total = 0.0
    for name, weight in block.named_parameters():
        if weight.dim() >= 2:
            total += weight.numel() * (share if ".experts." in f".{name}" else 1.0)
    return math.ceil(total)


def _mlp_copies(block: nn.Module, settings: Any) -> int:
    names = [name for name, _ in block.named_parameters()]
    if any("gate_proj" in name or "gate_up_proj" in name or name.endswith("w3.weight") for name in names):
        return 4
    activation = getattr(settings, "hidden_act", None) or getattr(settings, "activation_function", None)
    return 7 if activation in ("gelu_new", "gelu_fast", "quick_gelu") else 2


def _norm_width(block: nn.Module, attention_width: int, key_value_width: int) -> int:
    """Features that all norms of a block see; norms of one head's queries or keys see every head."""
    total = 0
    for name, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and weight is not None and weight.dim() == 1:
            last = name.split(".")[-1]
            total += {"q_norm": attention_width, "k_norm": key_value_width}.get(last, weight.numel())
    return total


def _is_position_table(name: str, weight: Any) -> bool:
    return weight.dim() == 2 and re.search(r"(wpe|embed_positions|position_embeddings)\.weight$", name) is not None


def _first(settings: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(settings, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
