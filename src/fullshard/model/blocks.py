"""The units of sharding; and the names of one parameter in the model, in our checkpoints, in PEFT's adapter files."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
import torch
from torch import nn
from fullshard.errors import ModelError

ADAPTER, PEFT_PREFIX = "default", "base_model.model."
PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"


def find_blocks(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder and its list of repeated blocks: the ModuleList with the most parameters. ModelError if none."""
    children = ((owner, child) for owner in model.modules() for child in owner.children())
    if not (lists := [(owner, child) for owner, child in children if isinstance(child, nn.ModuleList) and len(child)]):
        raise ModelError(f"{type(model).__name__} has no list of repeated blocks.", "It cannot be sharded yet.")
    return max(lists, key=lambda found: sum(parameter.numel() for parameter in found[1].parameters()))


def find_decoder(model: nn.Module) -> nn.Module:
    """The part of a causal language model before its head."""
    decoder = model.get_decoder()
    return decoder if decoder is not model else find_blocks(model)[0]  # llama4_text's prefix names no attribute


def is_tied(model: nn.Module) -> bool:
    """Whether embedding and head are one parameter."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def find_units(model: nn.Module) -> list[list[nn.Module]]:
    """What is gathered together: each block; the embedding; [final norm, head]. Tied ones and the rest: the root."""
    owner, blocks = find_blocks(model)
    units: list[list[nn.Module]] = [[block] for block in blocks]
    if is_tied(model):
        return units
    children = list(owner.children())
    after_blocks = children[children.index(blocks) + 1 :]
    norms = [child for child in after_blocks if list(child.parameters()) and "norm" in type(child).__name__.lower()]
    return [*units, [model.get_input_embeddings()], [*norms, model.get_output_embeddings()]]


@contextmanager
def exchanged(model: nn.Module, units: list[nn.Module], other: Callable[..., torch.Tensor]) -> Iterator[None]:
    """While the forward of one of ``units`` runs (of the rest: the model's), ``other(name, parameter)`` stand in for
    its parameters, once for tied ones. Hooks run before and after."""
    owners = {unit: [*unit.named_modules(prefix=name)] for name, unit in model.named_modules() if unit in units}
    inner = {module for modules in owners.values() for _, module in modules}
    owners[model] = [(name, module) for name, module in model.named_modules() if module not in inner]

    def run(unit: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        slots = [(*one, *slot) for one in owners[unit] for slot in one[1]._parameters.items() if slot[1] is not None]
        once = {value: f"{place}.{name}" for place, _, name, value in slots}
        others = {value: nn.Parameter(other(name, value), requires_grad=False) for value, name in once.items()}
        for _, owner, name, value in slots:
            owner._parameters[name] = others[value]
        output = forward(*given, **named)
        for _, owner, name, value in slots:
            owner._parameters[name] = value
        return output

    with ExitStack() as stack:
        for unit in owners:
            stack.callback(setattr, unit, "forward", unit.forward)
            unit.forward = partial(run, unit, unit.forward)
        yield


def base_name(name: str) -> str:
    """The name without PEFT's wrapping: ``q_proj.base_layer.weight`` -> ``q_proj.weight``."""
    return name.replace(".base_layer", "")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """The name in our checkpoints: PEFT's file name for adapters, the plain model's name for the rest."""
    if is_adapter(name):  # PEFT drops .weight from DoRA's magnitudes
        name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
        return PEFT_PREFIX + re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name)
    return base_name(name)
