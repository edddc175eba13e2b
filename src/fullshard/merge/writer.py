"""Write safetensors files as a stream: 8 bytes of header length, a JSON header padded to a multiple of 8, then each
tensor in blocks. Wider dtypes come first, so that each tensor starts at a multiple of its element size."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from fullshard.errors import MergeError
from fullshard.model.load import INDEX

SHARD_BYTES = 4 * 10**9
BLOCK_ELEMENTS = 1 << 22  # 16 MB in fp32
SAFETENSORS_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.uint8: "U8"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write. ``blocks()`` yields its flattened values in order, exact (before rounding to ``dtype``)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[torch.Tensor]]
    exact_dtype: torch.dtype  # of the blocks; equal to dtype where writing rounds nothing

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def row_blocks(shape: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Row ranges [start, stop) of at most BLOCK_ELEMENTS elements (at least one row) that cover a tensor."""
    num_rows = shape[0] if shape else 1
    rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    return ((start, min(start + rows, num_rows)) for start in range(0, num_rows, rows))


def write_weights(folder: Path, tensors: list[OutputTensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write ``tensors`` in Hugging Face's layout; the names of the files. MergeError: not finite in a dtype."""
    by_name = {tensor.name: tensor for tensor in tensors}
    sizes = {"get_storage_size": lambda tensor: tensor.num_bytes, "max_shard_size": shard_bytes}
    plan = split_state_dict_into_shards_factory(by_name, filename_pattern="model{suffix}.safetensors", **sizes)
    for file, names in plan.filename_to_tensors.items():
        _write_file(folder / file, [by_name[name] for name in names])
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
        facts = {"dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        header[tensor.name], position = facts, place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in tensor.blocks():
                stored = block.to(tensor.dtype).reshape(-1).contiguous()
                if stored.dtype.is_floating_point and stored.dtype.itemsize > 1 and not torch.isfinite(stored).all():
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    message = f"{tensor.name} holds values that are not finite in {dtype}."
                    raise MergeError(message, "Merge another step, or with --dtype fp32.")
                file.write(memoryview(stored.view(torch.uint8).numpy()))
        assert file.tell() == 8 + len(text) + position, f"{path}: the blocks of a tensor are not its size"
        file.flush()
        os.fsync(file.fileno())
