"""The precision of a run: what rests, computes and crosses the wire."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.shard.interface import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
