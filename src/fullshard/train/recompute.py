"""Recomputation of activations: the model's own, non-reentrant, block by block."""

from __future__ import annotations

from torch import nn

from fullshard.errors import ConfigError


def set_recompute(model: nn.Module, wanted: bool) -> None:
    """Switch recomputation of each block on or off. ConfigError where the model has none."""
    if not wanted:
        return
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"This model cannot recompute activations: {error}", "Set train.recompute=off") from None
