"""Tensors of foreign files, read by position: torch's distributed checkpoints (DCP), pickled state dicts, safetensors.
Nothing in them is executed and nothing is mapped: what is not read costs no memory."""

import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from transformers.modeling_utils import str_to_torch_dtype

from fullshard.errors import Blame, MergeError

DCP = ".metadata"
AGAIN = "Copy the whole folder again, or merge another checkpoint."
ALLOWED = {  # all that a .metadata may name, beside torch's dtypes
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A block of a tensor: where it lies in the tensor and, ``position`` bytes from the start, in a file. ``size`` in
    bytes where that is a file of torch.save inside the file (DCP); ``stride`` where it is not contiguous."""

    file: Path
    position: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    size: int | None = None

    def rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [first, last) of the part."""
        if self.size is not None:
            found = _in_file(self.file, self.position, self.size)
            if (found.dtype, tuple(found.shape) or (1,)) != (dtype, self.shape):
                raise MergeError(f"{self.file} holds other tensors than {DCP} says.", AGAIN)
            return _part(self.file, found, self.offsets, self.position).rows(first, last, dtype)
        if self.stride is not None:
            span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            return self._values(0, span, dtype).as_strided(self.shape, self.stride)[first:last]
        width = math.prod(self.shape[1:])
        return self._values(first * width, last * width, dtype).view(last - first, *self.shape[1:])

    def _values(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        size, position = (stop - start) * dtype.itemsize, self.position + start * dtype.itemsize
        with Blame(MergeError, f"{self.file} cannot be read", AGAIN):
            found = np.fromfile(self.file, np.uint8, size, offset=position)
        if found.size != size:
            raise MergeError(f"{self.file} is cut short: {size} bytes are needed from {position} on.", AGAIN)
        return torch.from_numpy(found).view(dtype)


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor: its shape, dtype and the parts that make it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d. MergeError where its parts do not cover them once."""
        shape = self.shape or (1,)
        width, stop = max(1, math.prod(shape[1:])), math.prod(shape) if stop is None else stop
        first, last = start // width, -(-stop // width)
        rows, missing = torch.empty(last - first, *shape[1:], dtype=self.dtype), (last - first) * math.prod(shape[1:])
        for part in self.parts:
            (above, *before), (height, *sizes) = part.offsets, part.shape
            low, high = max(first, above), min(last, above + height)
            if low < high:
                found = part.rows(low - above, high - above, self.dtype)
                inner = (slice(offset, offset + size) for offset, size in zip(before, sizes, strict=True))
                rows[(slice(low - first, high - first), *inner)] = found
                missing -= found.numel()
        if missing:
            raise MergeError(f"{self.parts[0].file.parent}: the parts of a tensor {shape} do not cover it.", AGAIN)
        return rows.reshape(-1)[start - first * width : stop - first * width]


def read_dcp(folder: Path) -> dict[str, ForeignTensor]:
    """The tensors of a DCP folder, by their names in it. MergeError where it is damaged or names anything but data."""
    with Blame(MergeError, f"{folder / DCP} cannot be read", AGAIN), open(folder / DCP, "rb") as file:
        metadata = _PlainData(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        tensors = {}
        for name, facts in metadata.state_dict_metadata.items():
            if isinstance(facts, TensorStorageMetadata):
                parts = []
                for chunk in facts.chunks:
                    info = places[name, tuple(chunk.offsets)]
                    block = tuple(chunk.offsets) or (0,), tuple(chunk.sizes) or (1,)
                    parts.append(Part(inside(folder, info.relative_path), info.offset, *block, size=info.length))
                tensors[name] = ForeignTensor(tuple(facts.size), facts.properties.dtype, tuple(parts))
    return tensors


class _PlainData(pickle.Unpickler):
    """Reads pickles of DCP's own data classes; whatever else one names is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise MergeError(f"It names {module}.{name}, which is no plain data: nothing of it was run.", AGAIN)


DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def read_pickles(files: Iterable[Path]) -> dict[str, ForeignTensor]:
    """The tensors of torch.save's files (pytorch_model.bin, .pt), nested names joined by dots."""
    tensors = {}
    for path in files:
        values = [("", _in_file(path, 0, path.stat().st_size))]
        for name, value in values:  # grows while it is read
            if isinstance(value, dict):
                values += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
            elif isinstance(value, torch.Tensor):
                part = _part(path, value, (0,) * max(1, value.dim()), 0)
                tensors[name] = ForeignTensor(tuple(value.shape), value.dtype, (part,))
    return tensors


def read_safetensors(files: Iterable[Path]) -> dict[str, ForeignTensor]:
    """The tensors of safetensors files. MergeError where a header does not fit its file."""
    tensors = {}
    for path in files:
        with Blame(MergeError, f"{path} is damaged", AGAIN), open(path, "rb") as file:
            start = 8 + (length := int.from_bytes(file.read(8), "little"))
            if start > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            for name, facts in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    shape, (low, high) = tuple(facts["shape"]), facts["data_offsets"]
                    dtype = str_to_torch_dtype[facts["dtype"]]
                    if high - low != math.prod(shape) * dtype.itemsize or low < 0:
                        raise ValueError(f"{name} has {high - low} bytes for {shape}")
                    part = Part(path, start + low, (0,) * max(1, len(shape)), shape or (1,))
                    tensors[name] = ForeignTensor(shape, dtype, (part,))
    return tensors


@cache
def _in_file(path: Path, position: int, size: int) -> Any:
    """What torch.save wrote there: its tensors without values, which know where in the file these lie."""
    again = "It may be from before torch 1.6: load it there, save it anew. Else copy it again."
    blame = Blame(MergeError, f"{path} cannot be read without running it", again)
    with blame, open(path, "rb") as file, FakeTensorMode():
        return torch.load(_create_file_view(file, position, size), weights_only=True, map_location="cpu")


def _part(path: Path, value: torch.Tensor, offsets: tuple[int, ...], start: int) -> Part:
    """A tensor that ``_in_file`` found, where torch.save's file begins ``start`` bytes from the start."""
    position = start + value.untyped_storage()._checkpoint_offset + value.storage_offset() * value.dtype.itemsize
    stride = None if value.is_contiguous() else tuple(value.stride())
    return Part(path, position, offsets, tuple(value.shape) or (1,), stride)


def inside(folder: Path, name: str) -> Path:
    """A file that lies in ``folder``, whatever links say. MergeError where it does not."""
    if not (path := folder / name).resolve().is_relative_to(folder.resolve()):
        raise MergeError(f"{folder} names {name}, which lies outside of it.", AGAIN)
    return path
