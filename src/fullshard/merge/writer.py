"""Where the values of each tensor of a merged folder come from (copied, trained or folded), and safetensors files as a
stream. Wider dtypes come first, so that each tensor starts at a multiple of its element size."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from fullshard.errors import MergeError, refusal
from fullshard.frozen import Frozen
from fullshard.merge.adapter import ASK_BASE, Adapter, ModelNames, Source
from fullshard.model.blocks import base_name, is_adapter, stored_name
from fullshard.model.load import DTYPE_NAMES, INDEX

SHARD_BYTES = 4 * 10**9
BLOCK_ELEMENTS = 1 << 19  # 2 MB in fp32: larger ones leave holes in glibc's heap


@contextmanager
def one_thread() -> Iterator[None]:
    """Blocks are too small to be shared: on busy cores torch's threads wait for each other, 20 s instead of 3 (LOG)."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield


class OutputTensor(Frozen):
    """A tensor to write. ``blocks()`` yields its flattened values in order, exact (before rounding to ``dtype``)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[torch.Tensor]]
    exact_dtype: torch.dtype  # of the blocks; equal to dtype where writing rounds nothing
    parameters: tuple[str, ...] = ()  # or buffers, that it is a part of

    num_bytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)  # in the file


def row_blocks(shape: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Row ranges [start, stop) of at most BLOCK_ELEMENTS elements (at least one row) that cover a tensor."""
    num_rows = shape[0] if shape else 1
    rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    return ((start, min(start + rows, num_rows)) for start in range(0, num_rows, rows))


class ExactWeights:
    """The exact value of every parameter after training: as trained, folded in fp32, or the base's own."""

    def __init__(self, names: ModelNames, checkpoint: Source, adapters: dict[str, Adapter] | None) -> None:
        """``adapters``: None for a full fine-tuning, which must hold all parameters. MergeError: one does not fit."""
        self.names, self._checkpoint, self._folded = names, checkpoint, adapters or {}
        self._trained = {name for name in checkpoint.weights if ".lora_" not in name}
        for name in sorted(self._trained):
            found, shape = tuple(checkpoint.weights[name].shape), names.weights.shapes.get(name)
            if names.canonical.get(name, name) != name or found != shape:
                expected = f"it has shape {shape} there" if shape else "it has no such parameter"
                raise MergeError(f"{name} {found} does not fit the base model: {expected}.", ASK_BASE)
        changed = self._trained | self._folded.keys()
        self.changed = {name for name, canonical in names.canonical.items() if canonical in changed}
        wanted = [name for name in names.canonical.values() if name not in names.frozen]
        if adapters is None and (absent := dict.fromkeys(name for name in wanted if name not in self._trained)):
            raise refusal("lacking", names=", ".join([*absent][:5]), count=len(absent))

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The flattened exact values in order, a block of rows at a time."""
        canonical, weights = self.names.canonical.get(name, name), self.names.weights
        shape = weights.shapes[name]
        row_size = math.prod(shape[1:])
        for first, last in row_blocks(shape):
            source, stored = (self._checkpoint, canonical) if canonical in self._trained else (weights, name)
            rows = source.read(stored, start=first * row_size, stop=last * row_size)
            if canonical in self._folded:
                rows = self._folded[canonical].fold(rows.view(last - first, *shape[1:]), first).reshape(-1)
            yield rows

    def whole(self, name: str) -> torch.Tensor:
        """The exact values of a parameter in its shape, fp32."""
        made = torch.empty(self.names.weights.shapes[name])
        rest = made.view(-1)
        for block in self.blocks(name):
            rest[: block.numel()] = block
            rest = rest[block.numel() :]
        return made

    def unmerged(self, name: str) -> torch.Tensor:
        """A parameter of the model that ``names`` wrapped in adapters, whole and in its shape: nothing is folded."""
        if is_adapter(name):
            stored = stored_name(name)
            return self._checkpoint.read(stored).view(self.names.adapter_shapes[stored])
        canonical = self.names.canonical.get(plain := base_name(name), plain)
        source = self._checkpoint if canonical in self._trained else self.names.weights
        return source.read(canonical).view(self.names.weights.shapes[plain])


def plan_outputs(exact: ExactWeights, dtype: torch.dtype | None) -> list[OutputTensor]:
    """One OutputTensor per name in the base's weight files; ``dtype`` (None: the base's own) is that of floats."""
    weights, outputs = exact.names.weights, []
    for name, tensor in weights.files.tensors.items():
        stored_dtype = dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype
        group = weights.groups.get(name)
        parameters = tuple(group.outputs) if group else ()
        changed = not exact.changed.isdisjoint(parameters)
        if group and group.converter is None:
            shape, blocks = weights.shapes[parameters[0]], partial(exact.blocks, parameters[0])  # grown by new tokens
        else:
            read = partial(weights.restore, name, exact.blocks) if changed else tensor.read
            shape, blocks = tensor.shape, partial(lambda read: iter([read().reshape(-1)]), read)
        exact_dtype = torch.float32 if changed else tensor.dtype
        outputs.append(OutputTensor(name, shape, stored_dtype, blocks, exact_dtype, parameters))
    return outputs


@one_thread()
def write_weights(folder: Path, tensors: list[OutputTensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write ``tensors`` in Hugging Face's layout, but files that are there; their names. MergeError: not finite."""
    by_name = {tensor.name: tensor for tensor in tensors}
    sizes = {"get_storage_size": lambda tensor: tensor.num_bytes, "max_shard_size": shard_bytes}
    plan = split_state_dict_into_shards_factory(by_name, filename_pattern="model{suffix}.safetensors", **sizes)
    for file, names in plan.filename_to_tensors.items():
        if not (folder / file).is_file():  # else of a merge that was killed: a file gets its name when it is whole
            _write_file(folder / f"{file}.part", [by_name[name] for name in names])
            os.replace(folder / f"{file}.part", folder / file)
    if not plan.is_sharded:
        return list(plan.filename_to_tensors)
    index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*plan.filename_to_tensors, INDEX]


def _write_file(path: Path, tensors: list[OutputTensor]) -> None:
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        place = [position, position + tensor.num_bytes]
        facts = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        header[tensor.name], position = facts, place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in tensor.blocks():
                stored = block.to(tensor.dtype).reshape(-1).contiguous()
                if stored.dtype.is_floating_point and stored.dtype.itemsize > 1 and not torch.isfinite(stored).all():
                    raise refusal("not_finite", name=tensor.name, dtype=str(tensor.dtype).removeprefix("torch."))
                file.write(memoryview(stored.view(torch.uint8).numpy()))
        assert file.tell() == 8 + len(text) + position, f"{path}: the blocks of a tensor are not its size"
