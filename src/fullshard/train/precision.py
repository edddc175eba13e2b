"""The precision of a run: what rests, computes and crosses the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    """Trainable parameters rest as fp32 masters, frozen ones in the compute dtype. On the meta device: costs nothing."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.master if parameter.requires_grad else precision.frozen)


def describe(precision: Precision, method: str) -> str:
    """One line for the log."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    frozen = f", frozen base {names[precision.frozen]}" if method == "lora" else ""
    return f"fp32 masters{frozen}, compute {names[precision.compute]}, reduce {names[precision.reduce]}"
