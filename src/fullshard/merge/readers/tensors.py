"""Tensors of torch's distributed checkpoints (DCP) and of pickled state dicts. Nothing in them is executed."""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from fullshard.errors import Blame, MergeError
from fullshard.model.tensor_files import FileTensor, Part

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
class SavedPart(Part):
    """A part that is a whole file of torch.save, ``size`` bytes from ``position`` of a DCP file."""

    size: int = 0

    def rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [first, last) of the part."""
        found = _in_file(self.file, self.position, self.size)
        if (found.dtype, tuple(found.shape) or (1,)) != (dtype, self.shape):
            raise MergeError(f"{self.file} holds other tensors than {DCP} says.", AGAIN)
        return _part(self.file, found, self.offsets, self.position).rows(first, last, dtype)


def read_dcp(folder: Path) -> dict[str, FileTensor]:
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
                    place = inside(folder, info.relative_path), info.offset
                    parts.append(SavedPart(*place, *block, kind=MergeError, size=info.length))
                tensors[name] = FileTensor(tuple(facts.size), facts.properties.dtype, tuple(parts))
    return tensors


class _PlainData(pickle.Unpickler):
    """Reads pickles of DCP's own data classes; whatever else one names is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise MergeError(f"It names {module}.{name}, which is no plain data: nothing of it was run.", AGAIN)


DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def read_pickles(files: Iterable[Path]) -> dict[str, FileTensor]:
    """The tensors of torch.save's files (pytorch_model.bin, .pt), nested names joined by dots."""
    tensors = {}
    for path in files:
        values = [("", _in_file(path, 0, path.stat().st_size))]
        for name, value in values:  # grows while it is read
            if isinstance(value, dict):
                values += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
            elif isinstance(value, torch.Tensor):
                part = _part(path, value, (0,) * max(1, value.dim()), 0)
                tensors[name] = FileTensor(tuple(value.shape), value.dtype, (part,))
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
    return Part(path, position, offsets, tuple(value.shape) or (1,), stride, MergeError)


def inside(folder: Path, name: str) -> Path:
    """A file that lies in ``folder``, whatever links say. MergeError where it does not."""
    if not (path := folder / name).resolve().is_relative_to(folder.resolve()):
        raise MergeError(f"{folder} names {name}, which lies outside of it.", AGAIN)
    return path
