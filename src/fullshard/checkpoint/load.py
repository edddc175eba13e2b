"""Loading: each rank reads the ranges it holds, whatever wrote them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fullshard.checkpoint.format import PROOF, Manifest, read_manifest
from fullshard.errors import Blame, CheckpointError
from fullshard.model.names import stored_name
from fullshard.shard import ShardedModel


class RangeReader:
    """Ranges of the stored tensors of one checkpoint folder. Memory maps: only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``. Raises CheckpointError where it is incomplete or does not fit its manifest."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._handles: dict[str, Any] = {}
        self._stored = {(stored.name, stored.kind): stored for stored in self.manifest.tensors}

    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d, in its stored dtype."""
        stored = self._stored.get((name, kind))
        if stored is None:
            raise CheckpointError(f"Step {self.manifest.step} has no {kind} of {name}.", "fullshard verify RUN")
        parts = []
        for piece in stored.pieces:
            low, high = max(piece.start, start), piece.stop if stop is None else min(piece.stop, stop)
            if low < high:
                values = self.open_file(piece.file).get_slice(piece.key)
                found, size = values.get_shape(), piece.stop - piece.start
                if found != [size]:
                    place = f"{self.folder / piece.file}: {piece.key}"
                    raise CheckpointError(f"{place} has shape {found}, not [{size}].", "Use another step.")
                parts.append(values[low - piece.start : high - piece.start])
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def open_file(self, name: str) -> Any:
        """The safetensors handle of one of its files."""
        if name not in self._handles:
            with Blame(CheckpointError, f"{self.folder / name} is not readable", "Use another step."):
                self._handles[name] = safe_open(self.folder / name, framework="pt")
        return self._handles[name]


class OwnCheckpoint(RangeReader):
    """The trained weights of one checkpoint folder, and the proof that lies beside them."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``. Raises CheckpointError where it is incomplete or does not fit its manifest."""
        super().__init__(folder)
        self.weights = {name: stored for (name, kind), stored in self._stored.items() if kind == "weight"}

    def whole(self, name: str) -> torch.Tensor:
        """The whole weight ``name`` in its full shape, in its stored dtype (fp32)."""
        return self.read(name).reshape(self.weights[name].shape)

    def proof(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The proof: tokens (1, T) int64 and the training state's logits (T, vocabulary) fp32."""
        place = self.folder / PROOF
        if not place.is_file():
            raise CheckpointError(f"{place} is missing: a merge cannot be proven.", "Use another step.")
        file = self.open_file(PROOF)
        tokens, logits = file.get_tensor("tokens"), file.get_tensor("logits").float()
        if tokens.ndim != 2 or logits.ndim != 2 or tokens.shape != (1, logits.shape[0]):
            shapes = f"tokens {tuple(tokens.shape)} do not fit logits {tuple(logits.shape)}"
            raise CheckpointError(f"{place}: {shapes}.", "Use another step.")
        return tokens, logits


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
