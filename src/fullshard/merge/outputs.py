"""Decide, for every tensor of the merged folder, where its values come from: copied, trained, or folded.

The merged folder holds the names of the base's weight files, in their order: a name of a tied weight gets the same
trained values as its twin, so that no stale copy can untie them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fullshard.errors import MergeError
from fullshard.merge.adapter import Adapter, AdapterSet
from fullshard.merge.names import ModelNames
from fullshard.merge.readers.own import OwnCheckpoint
from fullshard.merge.writer import SAFETENSORS_DTYPES, OutputTensor, row_blocks
from fullshard.model.load import WeightFiles

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


def plan_outputs(
    files: WeightFiles,
    names: ModelNames,
    checkpoint: OwnCheckpoint,
    adapters: AdapterSet | None,
    dtype: torch.dtype | None,
) -> list[OutputTensor]:
    """One OutputTensor per name in the base's weight files.

    ``adapters`` is None for full fine-tuning. ``dtype`` replaces the dtype of floating-point tensors; None keeps the
    base's own, tensor by tensor. Raises MergeError where a trained tensor has no place in the base or another shape.
    """
    trained = set() if adapters else _check_trained(names, checkpoint)
    folded = set(adapters.by_parameter) if adapters else set()
    outputs, placed = [], set()
    for name in files.names():
        if files.dtype(name) not in TORCH_DTYPES:
            raise MergeError(f"{name} of the base has dtype {files.dtype(name)}, which cannot be copied.", "")
        base_dtype = TORCH_DTYPES[files.dtype(name)]
        stored_dtype = dtype if dtype and base_dtype.is_floating_point else base_dtype
        parameter = names.parameter_of(name)
        canonical = names.canonical[parameter] if parameter else None
        if parameter and files.shape(name) != names.shapes[parameter]:
            expected = names.shapes[parameter]
            raise MergeError(f"{name} of the base has shape {files.shape(name)}, its model needs {expected}.", "")
        if canonical in trained:
            blocks, exact_dtype = _trained_blocks(checkpoint, canonical), torch.float32
        elif canonical in folded:
            blocks, exact_dtype = _folded_blocks(files, name, adapters.by_parameter[canonical]), torch.float32
        else:
            blocks, exact_dtype = _copied_blocks(files, name), base_dtype
        placed.add(canonical)
        outputs.append(OutputTensor(name, files.shape(name), stored_dtype, blocks, exact_dtype))
    lost = sorted((trained | folded) - placed)
    if lost:
        raise MergeError(
            f"{lost[0]} was trained, but the base's weight files hold no tensor of that name ({len(lost)} such names).",
            "Models whose weights do not map one to one cannot be merged yet.",
        )
    return outputs


def _check_trained(names: ModelNames, checkpoint: OwnCheckpoint) -> set[str]:
    for name, stored in checkpoint.weights.items():
        if names.canonical.get(name) != name or stored.shape != names.shapes[name]:
            known = name in names.shapes
            expected = f"it has shape {names.shapes[name]} there" if known else "it has no such parameter"
            raise MergeError(
                f"{name} {stored.shape} of the checkpoint does not fit the base model: {expected}.",
                "Is this the base that the run was trained on?",
            )
    absent = [name for name in dict.fromkeys(names.canonical.values()) if name not in checkpoint.weights]
    if absent:
        raise MergeError(
            f"The checkpoint of a full fine-tuning lacks {absent[0]} ({len(absent)} of the model's parameters).",
            "Use another step.",
        )
    return set(checkpoint.weights)


def _trained_blocks(checkpoint: OwnCheckpoint, name: str):
    def blocks() -> Iterator[torch.Tensor]:
        shape = checkpoint.weights[name].shape
        row_size = checkpoint.weights[name].num_elements // shape[0] if shape else 1
        for start, stop in row_blocks(shape):
            yield checkpoint.read_range(name, start * row_size, stop * row_size)

    return blocks


def _folded_blocks(files: WeightFiles, name: str, adapter: Adapter):
    def blocks() -> Iterator[torch.Tensor]:
        for start, stop in row_blocks(files.shape(name)):
            yield adapter.fold(files.read(name, start, stop), start).reshape(-1)

    return blocks


def _copied_blocks(files: WeightFiles, name: str):
    def blocks() -> Iterator[torch.Tensor]:
        if not files.shape(name):
            yield files.read(name).reshape(-1)
            return
        for start, stop in row_blocks(files.shape(name)):
            yield files.read(name, start, stop).reshape(-1)

    return blocks
