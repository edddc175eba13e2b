"""Fold LoRA adapters into their base weights: W + scale * B A, in fp32, a block of rows at a time. Shapes as in
model/adapters.py; an embedding's W is (tokens, width), its A (rank, tokens), its B (width, rank). DoRA: m * V / |V|."""

from dataclasses import replace
from pathlib import Path
from typing import Any
import torch
from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.errors import MergeError, refusal
from fullshard.frozen import Frozen
from fullshard.merge.readers.foreign import ForeignCheckpoint
from fullshard.model.adapters import AdapterPlace, adapter_places, inject_adapters
from fullshard.model.blocks import PEFT_PREFIX, is_adapter, stored_name
from fullshard.model.load import WeightFiles, build_on_meta
from fullshard.model.weight_map import WeightMap

ASK_BASE = "Is this the base that the run was trained on?"
Source = OwnCheckpoint | ForeignCheckpoint  # ``weights`` by name, ``read(name, start, stop)``


class ModelNames:
    """Names and adapters of a model's parameters, and its weights in the base's files."""

    def __init__(self, base: Path, lora: Any = None, new_ids: tuple[int, ...] = ()) -> None:
        """Build ``base``, or ModelError; ``lora``: a recipe's section or PEFT's config; ``new_ids``: added tokens."""
        self.model = model = build_on_meta(base, max(new_ids, default=-1) + 1)
        self.weights = WeightMap(model, WeightFiles(base), str(base), new_ids)
        self.vocabulary_size: int = model.config.get_text_config().vocab_size
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # every parameter name, tied ones included -> the name it is trained under
        self.canonical = {name: self.weights.aliases.get(name, (name,))[0] for name in parameters}
        self.vocabulary = {self.canonical[name] for name in self.weights.vocabulary}
        self.frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}  # by the model
        self.places: dict[str, AdapterPlace] = {}  # by the module's name in PEFT's files
        self.adapter_shapes: dict[str, tuple[int, ...]] = {}  # by the tensor's name in PEFT's files
        if lora:
            inject_adapters(model, lora)
            self.places = {PEFT_PREFIX + place.module: place for place in adapter_places(model)}
            added = ((name, value) for name, value in model.named_parameters() if is_adapter(name))
            self.adapter_shapes = {stored_name(name): tuple(value.shape) for name, value in added}


class Adapter(Frozen):
    """The update of one weight, fp32: ``left`` (rows, rank) @ ``right`` (rank, columns) * ``scale``; stacked experts
    have one dimension more in front. ``factor`` (rows, 1) or (1, columns) multiplies the sum (DoRA)."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float
    has_moved: bool  # from its start, B A = 0
    factor: torch.Tensor | None = None

    def fold(self, weight_rows: torch.Tensor, first_row: int) -> torch.Tensor:
        """Rows ``first_row ...`` of the folded weight in fp32; ``weight_rows`` (rows, ...) in the base's dtype."""
        rows = slice(first_row, first_row + weight_rows.shape[0])
        right = self.right[rows] if self.right.dim() == 3 else self.right
        folded = weight_rows.float() + self.scale * (self.left[rows] @ right)
        if self.factor is not None:
            folded *= self.factor[rows] if len(self.factor) > 1 else self.factor
        return folded


def read_adapters(checkpoint: Source, names: ModelNames) -> dict[str, Adapter]:
    """Adapters by the parameter they change. MergeError where one does not fit, there is none, or none moved."""
    if not (found := [name for name in checkpoint.weights if ".lora_" in name or name.startswith(PEFT_PREFIX)]):
        raise MergeError(f"{checkpoint.folder} holds no adapter tensors.", "Use another step, or train again.")
    for name in found:
        if (shape := checkpoint.weights[name].shape) != (expected := names.adapter_shapes.get(name)):
            raise MergeError(f"{name} has shape {shape}; this base needs {expected or 'no such adapter'}.", ASK_BASE)
    if absent := [name for name in names.adapter_shapes if name not in checkpoint.weights]:
        raise MergeError(f"{absent[0]} is missing ({len(absent)} such tensors).", "Use another step.")
    adapters = {}
    for module, place in names.places.items():
        if place.parameter in names.weights.aliases:
            raise refusal("shared_weight", module=module, weight=place.parameter.removesuffix(".weight"))
        adapters[names.canonical[place.parameter]] = _read_one(module, place, checkpoint, names)
    if not any(adapter.has_moved for adapter in adapters.values()):
        raise refusal("never_moved", count=len(adapters), place=checkpoint.folder)
    return adapters


def _read_one(module: str, place: AdapterPlace, checkpoint: Source, names: ModelNames) -> Adapter:
    """One adapter; it has moved where its B A is not zero (an embedding starts from A = 0, the others from B = 0)."""
    suffixes = ("embedding_A", "embedding_B") if place.layout == "embedding" else ("A.weight", "B.weight")
    stored = [f"{module}.lora_{suffix}" for suffix in suffixes]
    down, up = (checkpoint.read(name).view(names.adapter_shapes[name]).float() for name in stored)
    moved = bool(up.count_nonzero()) and bool(down.count_nonzero())
    if place.layout in ("experts", "experts_in_out"):
        experts = names.weights.shapes[place.parameter][0]
        down = down.reshape(experts, -1, down.shape[-1])  # (experts, rank, in)
        up = up.reshape(up.shape[0], -1, experts).permute(2, 0, 1)  # (experts, out, rank)
    left, right = up, down
    if place.layout not in ("linear", "experts"):
        left, right = down.transpose(-2, -1), up.transpose(-2, -1)
    adapter = Adapter(left, right, place.scale, moved)
    if not place.has_magnitude:
        return adapter
    magnitude = checkpoint.read(f"{module}.lora_magnitude_vector").float()
    whole, over = adapter.fold(names.weights.read_whole(place.parameter), 0), 0 if place.layout == "conv1d" else 1
    return replace(adapter, factor=(magnitude / whole.norm(dim=over)).unsqueeze(over))
