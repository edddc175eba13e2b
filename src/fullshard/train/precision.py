"""The precision of a run (docs/precision.md). The optimizer's state is fp32 in every mode."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import torch
from jinja2 import Template
from torch import nn
from fullshard.errors import ConfigError
from fullshard.frozen import Frozen
from fullshard.model.blocks import find_units, is_adapter

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LOG = Template(Path(__file__).with_name("log.txt").read_text("utf-8"), trim_blocks=True).make_module({"names": NAMES})
GROWTH_STEPS = 1000  # good steps in a row after which fp16's loss scale doubles


class Precision(Frozen):
    """A mode: dtypes of trained weights at rest (``master``), of frozen ones and products, of the reduction's wire."""

    name: str
    compute: torch.dtype
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    fast_fp32: bool = False  # fp32 matrices are multiplied in TF32 (cuda) or HF32 (npu)
    loss_scale: float = 1.0  # at the first step; 1: none


MODES = {
    "fp32": Precision("fp32", torch.float32),
    "tf32": Precision("tf32", torch.float32, fast_fp32=True),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16, loss_scale=2.0**12),
    "bf16_pure": Precision("bf16_pure", torch.bfloat16, master=torch.bfloat16),
}
precision_of = MODES.__getitem__


def log_text(macro: str, *facts: Any) -> str:
    """What the log says of ``facts``, by a macro of log.txt."""
    return getattr(LOG, macro)(*facts).strip()


@dataclass
class LossScale:
    """fp16's dynamic loss scale, a power of 2 (others keep 1), and the steps that moved nothing, in any mode."""

    value: float
    good_steps: int = 0
    skipped: int = 0

    def update(self, good: bool) -> bool:
        """Double after ``GROWTH_STEPS`` good steps in a row, halve at an overflow; False: none to lower, no change."""
        if not good and self.value <= 2:
            return False
        self.good_steps, self.skipped = (self.good_steps + 1) * good, self.skipped + (not good)
        if self.value > 1 and (not good or self.good_steps % GROWTH_STEPS == 0):
            self.value *= 2 if good else 0.5
        return True

    @property
    def metrics(self) -> dict[str, float]:
        """What a step's record shows of it: nothing where there is neither a scale nor a skipped step."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped} if self.value > 1 or self.skipped else {}


def set_storage(model: nn.Module, precision: Precision) -> None:
    """Trainable parameters rest as masters, frozen ones in the compute dtype. ConfigError: no float of 16 bits."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise ConfigError(f"Parameter {name} is {parameter.dtype}.", "Take the model's fp32, bf16 or fp16 weights.")
        parameter.data = parameter.data.to(precision.master if parameter.requires_grad else precision.compute)


def held_line(causal_lm: nn.Module, shards: list[Any], precision: Precision) -> str:
    """The log's line of what exists of the weights on this rank: at rest, and at most while units are gathered."""
    held: Counter[tuple[str, str]] = Counter()
    for shard in shards:
        dtype, place = NAMES[shard.value.dtype], "whole" if is_adapter(shard.name) else "sharded"
        is_copy = shard.trainable and shard.value.dtype != precision.compute
        held[f"{dtype.upper()} copy" if is_copy else f"{dtype} weights", place] += shard.value.nbytes
    units = [sum(_size_of_sharded(module) for module in unit) for unit in find_units(causal_lm)]
    root = _size_of_sharded(causal_lm) - sum(units)
    gathered = (root + sum(sorted(units)[-2:])) * precision.compute.itemsize
    return log_text("held", held, root > 0, gathered, precision.compute)


def _size_of_sharded(module: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in module.named_parameters() if not is_adapter(f".{name}"))


def round_stochastically(values: torch.Tensor, start: int, key: str) -> torch.Tensor:
    """fp32 (n,) -> bf16, up or down by the distance, so that the mean stays; the random bits are a hash of ``key`` and
    the element's place in the whole parameter: the same on any device and number of ranks."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
    bits = torch.arange(start, start + len(values), device=values.device)
    for factor, shift in ((0x1E3779B97F4A7C15, 31), (0x3F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 29)):
        bits = (bits + seed) * factor
        bits ^= bits >> shift
    return ((values.view(torch.int32) + (bits & 0xFFFF).int()) & -0x10000).view(torch.float32).bfloat16()  # drops 16


def unmoved_line(counts: Counter[tuple[str, str]], rate: float) -> str:
    """The log's line of ``take_step``'s counts: which groups' elements rounding to nearest would mostly leave."""
    share = {group: counts[group, "left"] / asked for (group, kind), asked in counts.items() if kind == "asked"}
    return log_text("unmoved", len(share), [f"{group} {left:.0%}" for group, left in share.items() if left > 0.5], rate)
