"""Fold LoRA adapters into their base weights: W + scale * B A, in fp32, a block of rows at a time.

Shapes: a linear's W is (out, in), A (rank, in), B (out, rank). gpt2's Conv1D keeps W as (in, out), so the update is
transposed. An embedding's W is (tokens, width), its A (rank, tokens), its B (width, rank), its update transposed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import MergeError
from fullshard.merge.names import ModelNames
from fullshard.merge.readers.own import OwnCheckpoint

ADAPTER_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?:(?P<linear>[AB])\.weight|embedding_(?P<embedding>[AB]))"
)
OTHER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Adapter:
    """The update of one weight: ``left`` (rows, rank) @ ``right`` (rank, columns) * ``scale``, all fp32."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    def fold(self, weight_rows: torch.Tensor, first_row: int) -> torch.Tensor:
        """Rows ``first_row ...`` of the folded weight in fp32; ``weight_rows`` (rows, columns) in the base's dtype."""
        update = self.left[first_row : first_row + weight_rows.shape[0]] @ self.right
        return weight_rows.float() + self.scale * update


@dataclass(frozen=True)
class AdapterSet:
    """All adapters of a checkpoint by the parameter they change, and how many have moved from their start (B A = 0)."""

    by_parameter: dict[str, Adapter]
    num_moved: int

    @property
    def line(self) -> str:
        """One line for the user."""
        return f"adapters: {self.num_moved} of {len(self.by_parameter)} have moved (B A is not zero)"


def adapter_scale(settings: dict[str, Any]) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA, as in PEFT."""
    rank, alpha = settings["rank"], settings["alpha"]
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def read_adapters(checkpoint: OwnCheckpoint, names: ModelNames) -> AdapterSet:
    """Read every adapter and check it against the base model.

    Raises MergeError naming the first tensor that does not fit (unknown name, no such module, wrong shape, half a
    pair, a tied weight), where there is no adapter at all, and where no adapter has moved.
    """
    settings = checkpoint.manifest.trainer.get("adapter")
    if not settings:
        raise MergeError(f"{checkpoint.folder} names no adapter settings (rank, alpha).", "Use another step.")
    pairs: dict[str, dict[str, str]] = {}
    for name in checkpoint.weights:
        match = ADAPTER_NAME.fullmatch(name)
        if not match or any(wrapper in name for wrapper in OTHER_WRAPPERS):
            raise MergeError(
                f"{name} is not the name of a LoRA tensor (base_model.model.MODULE.lora_A.weight).", "Use another step."
            )
        pairs.setdefault(match["module"], {})[match["linear"] or match["embedding"]] = name
    if not pairs:
        raise MergeError(f"{checkpoint.folder} holds no adapter tensors.", "Use another step, or train again.")
    scale = adapter_scale(settings)
    adapters, num_moved = {}, 0
    for module, pair in pairs.items():
        _check_pair(module, pair, names, checkpoint, settings["rank"])
        down, up = checkpoint.read(pair["A"]).float(), checkpoint.read(pair["B"]).float()
        num_moved += bool(up.count_nonzero()) and bool(down.count_nonzero())  # an embedding starts from A = 0
        left, right = (up, down) if names.module_kind(module) == "linear" else (down.T, up.T)
        adapters[names.canonical[f"{module}.weight"]] = Adapter(left, right, scale)
    if not num_moved:
        raise MergeError(
            f"The adapter never moved: all {len(adapters)} B matrices of step {checkpoint.manifest.step} are zero, so "
            "the result would be the base model.",
            "Look at the loss and the learning rate in metrics.jsonl, then train again.",
        )
    return AdapterSet(adapters, num_moved)


def _check_pair(module: str, pair: dict[str, str], names: ModelNames, checkpoint: OwnCheckpoint, rank: int) -> None:
    first = next(iter(pair.values()))
    if len(pair) != 2:
        raise MergeError(f"{first} has no partner: A and B belong together.", "Use another step.")
    parameter = f"{module}.weight"
    kind = names.module_kind(module)
    if parameter not in names.shapes or kind == "other":
        raise MergeError(
            f"{first} does not fit the base model: it has no linear layer or embedding {module}.",
            "Is this the base that the run was trained on?",
        )
    if names.is_tied(parameter):
        raise MergeError(
            f"{first} adapts {module}, whose weight the embedding and the head share; folding would change both.",
            "Train again without this target.",
        )
    rows, columns = names.shapes[parameter]
    num_out, num_in = (rows, columns) if kind == "linear" else (columns, rows)
    for key, expected in (("A", (rank, num_in)), ("B", (num_out, rank))):
        shape = checkpoint.weights[pair[key]].shape
        if shape != expected:
            raise MergeError(
                f"{pair[key]} has shape {shape}; rank {rank} on the base model's {module} needs {expected}.",
                "Is this the base that the run was trained on?",
            )
