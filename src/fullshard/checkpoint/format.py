"""The checkpoint format, version 1: what is in a checkpoint folder. Imports no torch.

    step_000100/
      manifest.json            format, step, tensors, files (bytes and hash of each), trainer state
      part_00000.safetensors   1-d tensors: ranges of flattened parameters and of optimizer moments
      part_00001.safetensors
      proof.safetensors        "tokens" (1, T) int64 and "logits" (T, vocabulary) fp32 of the training state

A stored tensor is a set of pieces; a piece is a range [start, stop) of the flattened, row-major full tensor, kept as a
1-d tensor under ``key`` in ``file``. Pieces of one tensor do not overlap and cover it. Neither the number of ranks nor
the engine appears: any number of ranks can read its own ranges.

Only trained tensors are stored: everything for full fine-tuning, the adapters for LoRA (the base is named by path).
Tensor kinds: ``weight`` (fp32 master), ``exp_avg``, ``exp_avg_sq`` (AdamW moments, fp32).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.run_folder import read_json

FORMAT = 1
MANIFEST = "manifest.json"
PROOF = "proof.safetensors"
HASH_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Piece:
    """The range [start, stop) of a flattened tensor, stored 1-d under ``key`` in ``file``."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one kind: its full shape and the pieces that cover it, sorted by start."""

    name: str  # parameter name as in the transformers model, adapters as in PEFT's saved files
    kind: str  # weight | exp_avg | exp_avg_sq
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, ...
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the full tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says about itself."""

    step: int
    method: str  # full | lora
    base_model: str  # absolute path of the base model's folder
    tensors: tuple[StoredTensor, ...]
    files: dict[str, dict[str, Any]]  # name -> {"bytes": int, "blake2b": hex}
    trainer: dict[str, Any] = field(default_factory=dict)  # step, tokens seen, adapter settings, ...

    def tensor(self, name: str, kind: str = "weight") -> StoredTensor:
        """The stored tensor of that name and kind. Raises CheckpointError where it is missing."""
        for stored in self.tensors:
            if stored.name == name and stored.kind == kind:
                return stored
        raise CheckpointError(f"The checkpoint of step {self.step} has no {kind} of {name}.", "fullshard verify RUN")

    def to_json(self) -> dict[str, Any]:
        """A JSON value; ``manifest_from_json`` is its inverse."""
        return {"format": FORMAT, **asdict(self)}


def manifest_from_json(value: dict[str, Any]) -> Manifest:
    """Rebuild a Manifest. Raises CheckpointError for another format version."""
    if value.get("format") != FORMAT:
        raise CheckpointError(
            f"Checkpoint format {value.get('format')!r}; this version reads format {FORMAT}.", "Update fullshard."
        )
    tensors = tuple(
        StoredTensor(
            item["name"], item["kind"], tuple(item["shape"]), item["dtype"], tuple(Piece(**p) for p in item["pieces"])
        )
        for item in value["tensors"]
    )
    return Manifest(
        value["step"], value["method"], value["base_model"], tensors, value["files"], value.get("trainer", {})
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest: pieces must cover each tensor without overlap, files must be there."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no finished checkpoint: {MANIFEST} is missing.", "Use another step.")
    try:
        manifest = manifest_from_json(read_json(path))
        sizes = {name: int(facts["bytes"]) for name, facts in manifest.files.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.", "Use another step.") from None
    for name, size in sizes.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing.", "Use another step.")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} is damaged: {file.stat().st_size} bytes, the manifest says {size}.",
                "Use another step.",
            )
    for stored in manifest.tensors:
        check_cover(stored)
    return manifest


def check_cover(stored: StoredTensor) -> None:
    """Raise CheckpointError unless the pieces cover [0, number of elements) exactly once."""
    position = 0
    for piece in stored.pieces:
        if piece.start != position or piece.stop < piece.start:
            raise CheckpointError(
                f"{stored.kind} of {stored.name}: a piece starts at {piece.start}, expected {position}.",
                "Use another step.",
            )
        position = piece.stop
    if position != stored.num_elements:
        raise CheckpointError(
            f"{stored.kind} of {stored.name}: pieces end at {position} of {stored.num_elements}.", "Use another step."
        )


def overlap(piece: Piece, start: int, stop: int) -> tuple[int, int]:
    """The part of [start, stop) that ``piece`` holds, in full-tensor positions; empty when the first is not smaller."""
    return max(piece.start, start), min(piece.stop, stop)


def hash_file(path: Path) -> str:
    """BLAKE2b (128 bit) of a file, hexadecimal, read in blocks."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
