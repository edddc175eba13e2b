"""Where the values of every tensor of the base's weight files come from in a merge: copied, trained, or folded."""

import math
from collections.abc import Iterator
from functools import partial

import torch

from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.errors import MergeError
from fullshard.merge.adapter import ASK_BASE, Adapter, ModelNames
from fullshard.merge.writer import SAFETENSORS_DTYPES, OutputTensor, row_blocks

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class ExactWeights:
    """The exact value of every parameter after training: trained in fp32, folded in fp32, or the base's own."""

    def __init__(self, names: ModelNames, checkpoint: OwnCheckpoint, adapters: dict[str, Adapter] | None) -> None:
        """``adapters``: None for a full fine-tuning, which must hold all parameters. Raises MergeError where a trained
        tensor has no place in the base or another shape."""
        self._names, self._checkpoint, self._folded, is_full = names, checkpoint, adapters or {}, adapters is None
        self._trained = {name for name in checkpoint.weights if is_full or ".lora_" not in name}
        for name in sorted(self._trained):
            found, shape = checkpoint.weights[name].shape, names.weights.shapes.get(name)
            if names.canonical.get(name) != name or found != shape:
                expected = f"it has shape {shape} there" if name in names.canonical else "it has no such parameter"
                raise MergeError(f"{name} {found} does not fit the base model: {expected}.", ASK_BASE)
        wanted = [name for name in names.canonical.values() if name not in names.frozen]
        if is_full and (absent := [name for name in wanted if name not in self._trained]):
            lacking = f"{absent[0]} ({len(set(absent))} of the model's parameters)"
            raise MergeError(f"The checkpoint of a full fine-tuning lacks {lacking}.", "Use another step.")

    def is_changed(self, name: str) -> bool:
        """Whether training changed the parameter (its exact value is then fp32)."""
        canonical = self._names.canonical.get(name)
        return canonical in self._trained or canonical in self._folded

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The flattened exact values in order, a block of rows at a time."""
        canonical = self._names.canonical.get(name, name)
        shape = self._names.weights.shapes[name]
        row_size = math.prod(shape[1:])
        for first, last in row_blocks(shape):
            start, stop = first * row_size, last * row_size
            if canonical in self._trained:
                yield self._checkpoint.read(canonical, start=start, stop=stop)
                continue
            rows = self._names.weights.read(name, start, stop)
            if canonical in self._folded:
                rows = self._folded[canonical].fold(rows.view(last - first, *shape[1:]), first).reshape(-1)
            yield rows

    def whole(self, name: str) -> torch.Tensor:
        """The whole exact parameter in its shape."""
        return torch.cat(list(self.blocks(name))).view(self._names.weights.shapes[name])


def plan_outputs(names: ModelNames, exact: ExactWeights, dtype: torch.dtype | None) -> list[OutputTensor]:
    """One OutputTensor per name in the base's weight files; ``dtype`` (None: the base's own) is that of floats."""
    weights, files = names.weights, names.weights.files
    outputs = []
    for name in files.names():
        if files.dtype(name) not in TORCH_DTYPES:
            raise MergeError(f"{name} of the base has dtype {files.dtype(name)}, which cannot be copied.", "")
        base_dtype = TORCH_DTYPES[files.dtype(name)]
        stored_dtype = dtype if dtype and base_dtype.is_floating_point else base_dtype
        parameters = weights.parameters_of(name)
        changed = any(exact.is_changed(parameter) for parameter in parameters)
        shape, blocks = files.shape(name), partial(_copied_blocks, names, name)
        if parameters and not weights.is_converted(name):
            shape = weights.shapes[parameters[0]]  # grown where tokens were added
            blocks = partial(exact.blocks, parameters[0])
        elif changed:
            blocks = partial(lambda name: iter([weights.restore(name, exact.whole).reshape(-1)]), name)
        outputs.append(OutputTensor(name, shape, stored_dtype, blocks, torch.float32 if changed else base_dtype))
    return outputs


def _copied_blocks(names: ModelNames, name: str) -> Iterator[torch.Tensor]:
    shape = names.weights.files.shape(name)
    for start, stop in row_blocks(shape):
        yield names.weights.files.read(name, *((start, stop) if shape else ())).reshape(-1)
