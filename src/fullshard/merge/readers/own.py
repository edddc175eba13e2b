"""Read the weights of a fullshard checkpoint, range by range, without any process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fullshard.checkpoint.format import PROOF, Manifest, StoredTensor, hash_file, overlap, read_manifest
from fullshard.errors import CheckpointError


class OwnCheckpoint:
    """The trained weights of one checkpoint folder. Files are memory-mapped; nothing is kept in memory."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``. Raises CheckpointError where it is incomplete or does not fit its manifest."""
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.weights: dict[str, StoredTensor] = {
            stored.name: stored for stored in self.manifest.tensors if stored.kind == "weight"
        }
        self._open_files: dict[str, Any] = {}

    def check_hashes(self) -> dict[str, str]:
        """Hash every file of the checkpoint and return name -> hash. CheckpointError where one was changed."""
        hashes = {}
        for name, facts in self.manifest.files.items():
            hashes[name] = hash_file(self.folder / name)
            if hashes[name] != facts["blake2b"]:
                raise CheckpointError(
                    f"{self.folder / name} is damaged: its hash is {hashes[name]}, expected {facts['blake2b']}.",
                    "Use another step.",
                )
        return hashes

    def read_range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened weight ``name``, 1-d, in its stored dtype (fp32)."""
        parts = []
        for piece in self.weights[name].pieces:
            first, last = overlap(piece, start, stop)
            if first < last:
                values = self._file(piece.file).get_slice(piece.key)
                if values.get_shape() != [piece.stop - piece.start]:
                    raise CheckpointError(
                        f"{self.folder / piece.file}: {piece.key} has shape {values.get_shape()}, the manifest says "
                        f"[{piece.stop - piece.start}].",
                        "Use another step.",
                    )
                parts.append(values[first - piece.start : last - piece.start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(self, name: str) -> torch.Tensor:
        """The whole weight ``name`` in its full shape."""
        stored = self.weights[name]
        return self.read_range(name, 0, stored.num_elements).reshape(stored.shape)

    def proof(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The proof: tokens (1, T) int64 and the training state's logits (T, vocabulary) fp32."""
        if not (self.folder / PROOF).is_file():
            raise CheckpointError(
                f"{self.folder} has no {PROOF}, so a merge of it cannot be proven.", "Use another step, or train again."
            )
        file = self._file(PROOF)
        tokens, logits = file.get_tensor("tokens"), file.get_tensor("logits").float()
        if tokens.ndim != 2 or logits.ndim != 2 or tokens.shape != (1, logits.shape[0]):
            raise CheckpointError(
                f"{self.folder / PROOF}: tokens {tuple(tokens.shape)} do not fit logits {tuple(logits.shape)}.",
                "Use another step.",
            )
        return tokens, logits

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                self._open_files[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / name} is not readable: {error}", "Use another step.") from None
        return self._open_files[name]
