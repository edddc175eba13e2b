"""The streaming writer writes what the safetensors library reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fullshard.errors import MergeError
from fullshard.merge import weights
from fullshard.merge.weights import OutputTensor, row_blocks, write_weights
from fullshard.model.load import DTYPE_NAMES


def output_of(name: str, value: torch.Tensor, dtype: torch.dtype | None = None) -> OutputTensor:
    def blocks():
        if not value.dim():
            yield value.reshape(-1)
            return
        for start, stop in row_blocks(tuple(value.shape)):
            yield value[start:stop]

    return OutputTensor(name, tuple(value.shape), dtype or value.dtype, blocks, value.dtype)


def test_every_dtype_and_shape_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 5)
    tensors = {
        f"{dtype}.{number}": (torch.arange(7 * 3 * 2).reshape(7, 3, 2)[:rows] % 2).to(dtype)
        for dtype in DTYPE_NAMES
        for number, rows in enumerate((7, 1))
    }
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    names = write_weights(tmp_path, [output_of(name, value) for name, value in tensors.items()])
    assert names == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert torch.equal(
            found[name].view(torch.uint8) if value.dim() else found[name],
            value.view(torch.uint8) if value.dim() else value,
        ), name


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_files_hold_every_tensor_once_within_the_limit(sizes, shard_bytes):
    tensors = [output_of(str(number), torch.full((size,), float(number))) for number, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder:
        names = write_weights(Path(folder), tensors, shard_bytes)
        files = {name: load_file(Path(folder, name)) for name in names if name.endswith(".safetensors")}
    found = [(name, value) for file in files.values() for name, value in file.items()]
    assert sorted(name for name, _ in found) == sorted(tensor.name for tensor in tensors)
    assert all(value.numel() == sizes[int(name)] and bool((value == float(name)).all()) for name, value in found)
    assert all(len(file) == 1 or sum(value.nbytes for value in file.values()) <= shard_bytes for file in files.values())
    assert ("model.safetensors.index.json" in names) == (len(files) > 1)


@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 100))
def test_row_blocks_cover_every_row_once(num_rows, num_columns, limit):
    before, weights.BLOCK_ELEMENTS = weights.BLOCK_ELEMENTS, limit
    try:
        blocks = list(row_blocks((num_rows, num_columns)))
    finally:
        weights.BLOCK_ELEMENTS = before
    assert [place for start, stop in blocks for place in range(start, stop)] == list(range(num_rows * num_columns))
    assert all(not start % num_columns and stop - start <= max(limit, num_columns) for start, stop in blocks)


def test_rounding_happens_in_the_writer_and_overflow_is_refused(tmp_path):
    value = torch.tensor([1.0, 1.0 + 2**-9, 3.0e38])
    write_weights(tmp_path, [output_of("a", value, torch.bfloat16)])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], value.to(torch.bfloat16))
    (tmp_path / "other").mkdir()
    with pytest.raises(MergeError, match="a holds values that are not finite in float16"):
        write_weights(tmp_path / "other", [output_of("a", value, torch.float16)])


def test_the_largest_file_may_be_a_size_in_words(tmp_path):
    values, kind = torch.ones(500), torch.float32
    tensors = [OutputTensor(str(number), (500,), kind, lambda: iter([values]), kind) for number in range(4)]
    assert len(write_weights(tmp_path, tensors, "4KB")) == 3  # two of 2,000 bytes a file, and the index
    with pytest.raises(MergeError, match=r"--max-shard-size 4 apples cannot be used"):
        write_weights(tmp_path, tensors, "4 apples")
