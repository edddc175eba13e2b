"""The precision of a run: what rests, computes, crosses the wire and updates the weights. See docs/precision.md.

``MODES`` is the one table; the planner, the engines and the log read it. The optimizer's state is fp32 in every mode.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.model.blocks import find_units
from fullshard.model.names import is_adapter

if TYPE_CHECKING:
    from fullshard.shard import Shard

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
GROWTH_STEPS = 1000  # good steps in a row after which fp16's loss scale doubles


@dataclass(frozen=True)
class Precision:
    """A mode: dtypes of trained weights at rest (``master``), of products, of the wire in reduction."""

    name: str
    compute: torch.dtype  # frozen weights rest in it
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    fast_fp32: bool = False  # fp32 matrices are multiplied in TF32 (cuda) or HF32 (npu)
    loss_scale: float = 1.0  # at the first step; 1: none

    @property
    def line(self) -> str:
        """The log's line: storage, compute, reduce and optimizer dtypes."""
        compute = "tf32" if self.fast_fp32 else NAMES[self.compute]
        scaled = f", loss scale {self.loss_scale:,.0f} at first" if self.loss_scale > 1 else ""
        rounded = ", updates rounded stochastically" if self.master != torch.float32 else ""
        return (
            f"precision {self.name}: storage {NAMES[self.master]} (frozen {NAMES[self.compute]}), compute {compute},"
            f" reduce {NAMES[self.reduce]}, optimizer fp32{scaled}{rounded}"
        )


MODES = {
    mode.name: mode
    for mode in (
        Precision("fp32", torch.float32),
        Precision("tf32", torch.float32, fast_fp32=True),
        Precision("bf16", torch.bfloat16),
        Precision("fp16", torch.float16, loss_scale=2.0**16),
        Precision("bf16_pure", torch.bfloat16, master=torch.bfloat16),
    )
}


def precision_of(name: str) -> Precision:
    """The mode of that name."""
    return MODES[name]


@dataclass
class LossScale:
    """fp16's dynamic loss scale, and the steps that moved nothing. Powers of 2, so that scaling rounds nothing.

    Doubles after ``GROWTH_STEPS`` good steps in a row, halves at an overflow; the other modes keep 1.
    """

    value: float
    good_steps: int = 0
    skipped: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """What progress and metrics show; fp16 only."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped} if self.value > 1 else {}

    def grow(self) -> None:
        """A step was good."""
        self.good_steps += 1
        if self.value > 1 and self.good_steps % GROWTH_STEPS == 0:
            self.value *= 2

    def back_off(self) -> bool:
        """Gradients overflowed: halve, count the skipped step. False where there is no scale left to lower."""
        self.value, self.good_steps, self.skipped = self.value / 2, 0, self.skipped + 1
        return self.value > 1


def set_storage(model: nn.Module, precision: Precision) -> None:
    """Trainable parameters rest as masters, frozen ones in the compute dtype. On the meta device: costs nothing.

    ConfigError names a parameter that is no floating-point number.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(f"Parameter {name} is {kind}; weights must be fp32, bf16 or fp16.", "Use such a model.")
        parameter.data = parameter.data.to(precision.master if parameter.requires_grad else precision.compute)


def storage_table(rows: list[tuple[str, str, torch.dtype, torch.dtype, bool]], precision: Precision) -> list[str]:
    """Lines for the log: per group of parameters the dtypes in the files, at rest, in compute and in reduction.

    ``rows``: (group, dtype in the files, dtype at rest, dtype of compute, trained) of each parameter.
    """
    counts = Counter(rows)
    lines = ["parameters        tensors  files  at rest  compute  reduce  trained"]
    for (group, file_dtype, dtype, compute, trained), count in counts.items():
        reduced = NAMES[precision.reduce] if trained else "-"
        lines.append(
            f"{group:17} {count:7}  {file_dtype.lower():5}  {NAMES[dtype]:7}  {NAMES[compute]:7}"
            f"  {reduced:6}  {'yes' if trained else 'frozen'}"
        )
    return lines


def held_line(causal_lm: nn.Module, shards: list[Shard], precision: Precision) -> str:
    """The log's line of what exists of the weights on this rank: at rest, and at most while units are gathered."""
    resting: Counter[str] = Counter()
    for shard in shards:
        kind, place = NAMES[shard.value.dtype], "whole" if is_adapter(shard.name) else "sharded"
        copy = shard.trainable and shard.value.dtype != precision.compute
        what = f"{kind.upper()} copy" if copy else f"{kind} weights"
        resting[f"{what} {{}} on this rank ({place}{'' if shard.trainable else ', frozen'})"] += shard.value.nbytes
    sizes = {shard.name: math.prod(shard.full_shape) for shard in shards if not is_adapter(shard.name)}
    places = {module: f"{name}." for name, module in causal_lm.named_modules()}
    units = [
        sum(size for name, size in sizes.items() if name.startswith(tuple(places[module] for module in unit)))
        for unit in find_units(causal_lm)
    ]
    root = sum(sizes.values()) - sum(units)
    gathered = (root + sum(sorted(units)[-2:])) * precision.compute.itemsize
    also = " and what stands outside the blocks" if root else ""
    parts = [text.format(_size(count)) for text, count in resting.items()]
    parts.append(f"{NAMES[precision.compute]} weights exist whole only while gathered, at most 2 units{also}")
    return "; ".join(parts) + f", {_size(gathered)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


def round_stochastically(values: torch.Tensor, start: int, key: str) -> torch.Tensor:
    """fp32 (n,) -> bf16, up or down with probabilities by the distance, so that the mean stays.

    The random bits are a hash of ``key`` and the element's place in the whole parameter, ``start`` + i: the same on
    any device and any number of ranks, with nothing to store.
    """
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
    bits = torch.arange(start, start + len(values), device=values.device)
    for factor, shift in ((0x1E3779B97F4A7C15, 31), (0x3F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 29)):
        bits = (bits + seed) * factor
        bits ^= bits >> shift
    noise = (bits & 0xFFFF).int()  # what bf16 drops of fp32's 32 bits is the last 16
    return ((values.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


def unmoved(before: torch.Tensor, update: torch.Tensor) -> tuple[int, int]:
    """(elements that ``before`` + ``update``, rounded to nearest, would leave as they are; elements asked to move)."""
    asked = update != 0
    return int((asked & ((before.float() + update).to(before.dtype) == before)).sum()), int(asked.sum())


def unmoved_line(counts: Iterable[dict[str, tuple[int, int]]], rate: float) -> str:
    """The log's line from the ``unmoved`` counts of all ranks by parameter name, put together over the blocks."""
    still, asked = Counter[str](), Counter[str]()
    for of_rank in counts:
        for name, (number, total) in of_rank.items():
            group = re.sub(r"\.\d+\.", ".*.", name)
            still[group] += number
            asked[group] += total
    stuck = [f"{group} {still[group] / asked[group]:.0%}" for group in asked if 2 * still[group] > asked[group]]
    what = f"{len(stuck)} of {len(asked)} parameter groups could not move at learning rate {rate:g}"
    shares = f" (share of their elements: {', '.join(stuck)})" if stuck else ""
    return f"rounded to nearest, {what}{shares}; stochastic rounding moves them on average"
