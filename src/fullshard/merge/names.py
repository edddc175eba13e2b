"""Which name in the base's weight files is which parameter of the transformers model, and which parameters are one.

The model is built on the meta device, so this costs no memory. A name in a file may lack the model's
``base_model_prefix`` ("h.0.ln_1.weight" in gpt2's own file) or have it where the model does not.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fullshard.model.load import build_on_meta


class ModelNames:
    """Names, shapes and kinds of a model's parameters."""

    def __init__(self, base: Path) -> None:
        """Build the model of ``base/config.json``. Raises ModelError where transformers cannot."""
        model = build_on_meta(base)
        self.prefix: str = model.base_model_prefix
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.canonical: dict[str, str] = {}  # every parameter name, tied ones included -> the name it is trained under
        by_identity: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.shapes[name] = tuple(parameter.shape)
            self.canonical[name] = by_identity.setdefault(id(parameter), name)
        self._modules = dict(model.named_modules())

    def parameter_of(self, file_name: str) -> str | None:
        """The parameter stored under ``file_name``, or None (a buffer, or a tensor that the model ignores)."""
        for candidate in (file_name, f"{self.prefix}.{file_name}", file_name.removeprefix(f"{self.prefix}.")):
            if candidate in self.shapes:
                return candidate
        return None

    def is_tied(self, name: str) -> bool:
        """Whether the parameter is shared by two modules."""
        return sum(canonical == self.canonical[name] for canonical in self.canonical.values()) > 1

    def module_kind(self, module_name: str) -> str:
        """``linear`` (weight is (out, in)), ``conv1d`` ((in, out)), ``embedding`` or ``other``."""
        from transformers.pytorch_utils import Conv1D

        match self._modules.get(module_name):
            case torch.nn.Linear():
                return "linear"
            case Conv1D():
                return "conv1d"
            case torch.nn.Embedding():
                return "embedding"
        return "other"
