"""Saving and loading: each rank writes and reads its own ranges; a folder gets its name only when it is whole."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.modeling_utils import str_to_torch_dtype

from fullshard.checkpoint.format import MANIFEST, FileFacts, Manifest, Piece, StoredTensor, hash_file, read_manifest
from fullshard.errors import Blame, CheckpointError, refusal
from fullshard.model.blocks import stored_name
from fullshard.ranks import Ranks
from fullshard.run_folder import checkpoint_path, list_checkpoints, publish_folder, sync_path, write_json
from fullshard.shard import Shard, ShardedModel

Moments = dict[tuple[str, str], torch.Tensor]  # (parameter name, moment) -> its local flat view, as the shard lies
PROOF = "proof.safetensors"
SAFETENSORS_DTYPES = {dtype: name for name, dtype in str_to_torch_dtype.items()}


def save_checkpoint(
    run: Path, step: int, sharded: ShardedModel, moments: Moments, ranks: Ranks,
    facts: dict[str, Any], proof: dict[str, torch.Tensor], keep_last: int,
) -> Path:  # fmt: skip
    """Write the checkpoint of ``step``; its folder, published whole. ``facts``: of the manifest. Collective."""
    final = checkpoint_path(run, step)
    temporary = final.with_name(f".{final.name}.tmp")
    written = Blame(CheckpointError, f"{final} cannot be written", f"Free the disk, then: fullshard resume {run}")
    if ranks.is_first:
        with written:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    ranks.barrier()
    part = f"part_{ranks.rank:05d}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    described = []  # what they are, each of one piece
    for name, kind, shard, value in _trained_ranges(sharded, moments):
        if not shard.is_copy:
            tensors[key := f"{kind}/{name}"] = value.to("cpu").contiguous()
            piece = Piece(part, key, shard.start, shard.stop)
            described.append(StoredTensor(name, kind, shard.full_shape, SAFETENSORS_DTYPES[value.dtype], (piece,)))
    parts = {part: tensors} if tensors else {}
    if ranks.is_first:
        parts[PROOF] = {name: value.contiguous() for name, value in proof.items()}
    files = {}
    for name, content in parts.items():
        with written:
            save_file(content, temporary / name)
            with safe_open(temporary / name, framework="pt") as file:
                found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            if found != {key: tuple(value.shape) for key, value in content.items()}:
                raise CheckpointError(f"{temporary / name} does not hold what was written.", "Check the disk.")
            sync_path(temporary / name)
            files[name] = FileFacts((temporary / name).stat().st_size, hash_file(temporary / name))
    gathered = ranks.gather_objects((described, files))
    if ranks.is_first:
        joined: dict[tuple[str, str], StoredTensor] = {}  # the whole tensors that the ranks' pieces make
        for piece in sorted((piece for pieces, _ in gathered for piece in pieces), key=lambda one: one.pieces[0].start):
            before = joined.get((piece.name, piece.kind))
            joined[piece.name, piece.kind] = replace(piece, pieces=before.pieces + piece.pieces) if before else piece
        all_files = {name: value for _, files in gathered for name, value in files.items()}
        manifest = Manifest(step=step, tensors=tuple(joined.values()), files=all_files, **facts)
        with written:
            write_json(temporary / MANIFEST, asdict(manifest))
            sync_path(temporary)
        publish_folder(temporary, final)
        for _, path in list_checkpoints(run)[:-keep_last]:
            shutil.rmtree(path)
    ranks.barrier()
    return final


def _trained_ranges(sharded: ShardedModel, moments: Moments) -> Iterator[tuple[str, str, Shard, torch.Tensor]]:
    """(stored name, kind, shard, its flat values) of all that this rank holds of the trained tensors."""
    for shard in sharded.shards():
        if shard.trainable and shard.start < shard.stop:
            name, owned = stored_name(shard.name), {"weight": shard.value}
            owned |= {moment: value for (owner, moment), value in moments.items() if owner == shard.name}
            yield from ((name, kind, shard, value) for kind, value in owned.items())


class OwnCheckpoint:
    """A checkpoint folder: ranges of its tensors (memory maps), its trained ``weights``, and the proof beside them."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``. Raises CheckpointError where it is incomplete or does not fit its manifest."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._handles: dict[str, Any] = {}
        self._stored = {(stored.name, stored.kind): stored for stored in self.manifest.tensors}
        self.weights = {name: stored for (name, kind), stored in self._stored.items() if kind == "weight"}

    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d, in its stored dtype."""
        if (stored := self._stored.get((name, kind))) is None:
            raise CheckpointError(f"Step {self.manifest.step} has no {kind} of {name}.", "fullshard verify RUN")
        parts = []
        for piece in stored.pieces:
            low, high = max(piece.start, start), piece.stop if stop is None else min(piece.stop, stop)
            if low < high:
                values, size = self.open_file(piece.file).get_slice(piece.key), piece.stop - piece.start
                if (found := values.get_shape()) != [size]:
                    raise refusal("piece_shape", file=self.folder / piece.file, key=piece.key, found=found, size=size)
                parts.append(values[low - piece.start : high - piece.start])
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def open_file(self, name: str) -> Any:
        """The safetensors handle of one of its files."""
        if name not in self._handles:
            with Blame(CheckpointError, f"{self.folder / name} is not readable", "Use another step."):
                self._handles[name] = safe_open(self.folder / name, framework="pt")
        return self._handles[name]

    def proof(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The proof: tokens (1, T) int64 and the training state's logits (T, vocabulary) fp32."""
        if not (place := self.folder / PROOF).is_file():
            raise CheckpointError(f"{place} is missing: a merge cannot be proven.", "Use another step.")
        file = self.open_file(PROOF)
        return file.get_tensor("tokens"), file.get_tensor("logits").float()


@torch.no_grad()
def load_checkpoint(folder: Path, sharded: ShardedModel, moments: Moments) -> Manifest:
    """Copy weights and moments of a checkpoint into this rank's shards, bit for bit. Returns the manifest."""
    checkpoint = OwnCheckpoint(folder)
    for name, kind, shard, value in _trained_ranges(sharded, moments):
        value.copy_(checkpoint.read(name, kind, shard.start, shard.stop))
    return checkpoint.manifest
