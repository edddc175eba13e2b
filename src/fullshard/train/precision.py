"""The precision of a run: what rests, computes and crosses the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Precision:
    """dtypes of a run: what rests (trainable ones are fp32 masters), computes, and crosses the wire in reduction."""

    compute: torch.dtype
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def frozen(self) -> torch.dtype:
        """Storage of frozen weights: the compute dtype."""
        return self.compute


def precision_of(name: str) -> Precision:
    """``fp32`` or ``bf16`` -> dtypes: fp32 masters and fp32 reduction either way."""
    return Precision(compute=DTYPES[name])


def set_storage(model: nn.Module, precision: Precision) -> None:
    """Trainable parameters rest as fp32 masters, frozen ones in the compute dtype. On the meta device: costs
    nothing."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.master if parameter.requires_grad else precision.frozen)


def describe(precision: Precision, method: str) -> str:
    """One line for the log."""
    frozen = f", frozen base {NAMES[precision.frozen]}" if method == "lora" else ""
    return f"fp32 masters{frozen}, compute {NAMES[precision.compute]}, reduce {NAMES[precision.reduce]}"


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
