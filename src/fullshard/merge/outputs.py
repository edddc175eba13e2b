"""Where the values of every tensor of the base's weight files come from in a merge: copied, trained, or folded."""

import math
from collections.abc import Iterator
from functools import partial

import torch

from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.errors import MergeError
from fullshard.merge.adapter import ASK_BASE, AdapterSet, ModelNames
from fullshard.merge.writer import SAFETENSORS_DTYPES, OutputTensor, row_blocks

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class ExactWeights:
    """The exact value of every parameter after training: trained in fp32, folded in fp32, or the base's own."""

    def __init__(self, names: ModelNames, checkpoint: OwnCheckpoint, adapters: AdapterSet | None) -> None:
        """Raises MergeError where a trained tensor has no place in the base or another shape."""
        self._names, self._checkpoint, self._adapters = names, checkpoint, adapters
        self._trained = _check_trained(names, checkpoint, adapters is None)
        self._folded = set(adapters.by_parameter) if adapters else set()

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
                adapter = self._adapters.by_parameter[canonical]
                rows = adapter.fold(rows.view(last - first, *shape[1:]), first).reshape(-1)
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


def _check_trained(names: ModelNames, checkpoint: OwnCheckpoint, is_full: bool) -> set[str]:
    """Names of the base parameters that the checkpoint holds; for a full fine-tuning it must hold them all."""
    trained = {name: stored for name, stored in checkpoint.weights.items() if is_full or ".lora_" not in name}
    for name, stored in trained.items():
        shape = names.weights.shapes[name] if name in names.canonical else None
        if names.canonical.get(name) != name or stored.shape != shape:
            expected = f"it has shape {shape} there" if shape is not None else "it has no such parameter"
            raise MergeError(f"{name} {stored.shape} does not fit the base model: {expected}.", ASK_BASE)
    absent = [name for name in names.canonical.values() if name not in trained and name not in names.frozen]
    if is_full and absent:
        lacking = f"{absent[0]} ({len(set(absent))} of the model's parameters)"
        raise MergeError(f"The checkpoint of a full fine-tuning lacks {lacking}.", "Use another step.")
    return set(trained)


def _copied_blocks(names: ModelNames, name: str) -> Iterator[torch.Tensor]:
    shape = names.weights.files.shape(name)
    for start, stop in row_blocks(shape):
        yield names.weights.files.read(name, *((start, stop) if shape else ())).reshape(-1)
