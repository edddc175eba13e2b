"""Tensors in files, read by position: nothing is mapped, so that what is not read costs no memory."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.modeling_utils import str_to_torch_dtype

from fullshard.errors import Blame, ModelError, UserError

AGAIN = "Copy or download this file again."
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}  # safetensors' names: F32, BF16, ...


@dataclass(frozen=True)
class Part:
    """A block of a tensor: its place in it and, ``position`` bytes on, in a file; ``stride`` (elements) or dense."""

    file: Path
    position: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    kind: type[UserError] = ModelError  # raised where the file does not hold it

    def rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [first, last) of the part."""
        if self.stride is not None:
            span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            return self._values(0, span, dtype).as_strided(self.shape, self.stride)[first:last]
        width = math.prod(self.shape[1:])
        return self._values(first * width, last * width, dtype).view(last - first, *self.shape[1:])

    def _values(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        size, position = (stop - start) * dtype.itemsize, self.position + start * dtype.itemsize
        with Blame(self.kind, f"{self.file} cannot be read", AGAIN):
            found = np.fromfile(self.file, np.uint8, size, offset=position)
        if found.size != size:
            raise self.kind(f"{self.file} is cut short: {size} bytes are needed from {position} on.", AGAIN)
        return torch.from_numpy(found).view(dtype)


@dataclass(frozen=True)
class FileTensor:
    """One tensor: its shape, dtype and the parts that make it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def whole(self) -> torch.Tensor:
        """All of it, in its shape."""
        return self.read().view(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d. Part.kind where the parts do not cover them once."""
        shape = self.shape or (1,)
        width, stop = max(1, math.prod(shape[1:])), math.prod(shape) if stop is None else stop
        first, last = start // width, -(-stop // width)
        if len(self.parts) == 1 and self.parts[0].shape == shape:
            return self.parts[0].rows(first, last, self.dtype).reshape(-1)[start - first * width : stop - first * width]
        rows, missing = torch.empty(last - first, *shape[1:], dtype=self.dtype), (last - first) * width
        for part in self.parts:
            (above, *before), (height, *sizes) = part.offsets, part.shape
            low, high = max(first, above), min(last, above + height)
            if low < high:
                found = part.rows(low - above, high - above, self.dtype)
                inner = (slice(offset, offset + size) for offset, size in zip(before, sizes, strict=True))
                rows[(slice(low - first, high - first), *inner)] = found
                missing -= found.numel()
        if missing:
            part = self.parts[0]
            raise part.kind(f"{part.file.parent}: the parts of a tensor {shape} do not cover it.", AGAIN)
        return rows.reshape(-1)[start - first * width : stop - first * width]


def read_header(path: Path, kind: type[UserError] = ModelError) -> dict[str, FileTensor]:
    """The tensors of a safetensors file. Raises ``kind`` where its header does not fit it."""
    tensors = {}
    with Blame(kind, f"{path} is damaged", AGAIN), open(path, "rb") as file:
        size, start = path.stat().st_size, 8 + (length := int.from_bytes(file.read(8), "little"))
        if start > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        for name, facts in json.loads(file.read(length)).items():
            if name != "__metadata__":
                shape, dtype, (low, high) = tuple(facts["shape"]), facts["dtype"], facts["data_offsets"]
                wanted = math.prod(shape) * str_to_torch_dtype[dtype].itemsize
                if not 0 <= low <= high <= size - start or high - low != wanted:
                    raise ValueError(f"{name} has bytes {low} to {high} of {size - start}, and needs {wanted}")
                part = Part(path, start + low, (0,) * max(1, len(shape)), shape or (1,), kind=kind)
                tensors[name] = FileTensor(shape, str_to_torch_dtype[dtype], (part,))
    return tensors
