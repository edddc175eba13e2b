"""Loading: each rank reads the ranges it holds, whatever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fullshard.checkpoint.format import Manifest, StoredTensor, overlap, read_manifest
from fullshard.model.names import stored_name
from fullshard.shard import ShardedModel


class RangeReader:
    """Ranges of the stored tensors of one checkpoint folder. Memory maps: only what is asked for is read."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or read_manifest(folder)
        self._folder = folder
        self._handles: dict[str, Any] = {}
        self._stored = {(stored.name, stored.kind): stored for stored in self.manifest.tensors}

    def stored(self, name: str, kind: str = "weight") -> StoredTensor:
        """The description of one tensor; CheckpointError where it is missing."""
        return self._stored.get((name, kind)) or self.manifest.tensor(name, kind)

    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d, in its stored dtype."""
        stored = self.stored(name, kind)
        stop = stored.num_elements if stop is None else stop
        parts = []
        for piece in stored.pieces:
            low, high = overlap(piece, start, stop)
            if low < high:
                handle = self._handle(piece.file)
                parts.append(handle.get_slice(piece.key)[low - piece.start : high - piece.start])
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(self._folder / file, framework="pt")
        return self._handles[file]


@torch.no_grad()
def load_checkpoint(folder: Path, sharded: ShardedModel, moments: dict[tuple[str, str], torch.Tensor]) -> Manifest:
    """Copy weights and moments of a checkpoint into this rank's shards, bit for bit. Returns the manifest."""
    reader = RangeReader(folder)
    for shard in sharded.shards():
        if not shard.trainable or shard.start == shard.stop:
            continue
        name = stored_name(shard.name)
        shard.value.copy_(reader.read(name, "weight", shard.start, shard.stop))
        for (owner, moment), value in moments.items():
            if owner == shard.name:
                value.copy_(reader.read(name, moment, shard.start, shard.stop))
    return reader.manifest
