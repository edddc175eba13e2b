"""Saving and loading: each rank writes and reads its own ranges; a folder gets its name only when it is whole."""

import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from transformers.modeling_utils import str_to_torch_dtype
from fullshard import run_folder
from fullshard.checkpoint.format import Manifest, Piece, StoredTensor, hash_file, read_manifest, write_manifest
from fullshard.errors import Blame, CheckpointError, UserError, refusal
from fullshard.model.blocks import PEFT_CONFIG, PEFT_PREFIX, PEFT_TENSORS, is_adapter, stored_name
from fullshard.model.load import DTYPE_NAMES, FileTensor, read_header
from fullshard.ranks import Ranks
from fullshard.run_folder import checkpoint_path, list_checkpoints, publish_folder, read_json, sync_path, write_json
from fullshard.shard import Shard, ShardedModel

Facts = dict[str, Any]
Moments = dict[tuple[str, str], torch.Tensor]  # (parameter name, moment) -> its local flat view, as the shard lies
PROOF = "proof.safetensors"


class Saver:
    """Writes a run's checkpoints, each rank its ranges. ``keep_best``: that of the lowest held-out loss stays too."""

    def __init__(self, run: Path, ranks: Ranks, keep_last: int, keep_best: bool = False) -> None:
        self._run, self._ranks, self._keep, self._keep_best = run, ranks, keep_last, keep_best
        self._writing: Future[None] | None = None

    def save(
        self, step: int, sharded: ShardedModel, moments: Moments, facts: Facts, extra: Facts, beside: bool = False
    ) -> Path:
        """Start the checkpoint of ``step``; the folder that it gets. ``facts``: of the manifest; ``extra``: rank 0's
        files by name, tensors or text. ``beside``: from a copy in host memory, while the caller goes on. Collective."""
        self.wait()
        final = checkpoint_path(self._run, step)
        temporary = final.with_name(f".{final.name}.tmp")
        owned = [one for one in _trained_ranges(sharded, moments) if not one[2].is_copy]
        needed = (1 + (PEFT_CONFIG in extra)) * sum(self._ranks.gather_objects(sum(v.nbytes for *_, v in owned)))

        def clear() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            if (free := shutil.disk_usage(temporary).free) < needed:
                raise refusal("no_room_to_save", final=final, needed=needed / 1e9, free=free / 1e9, run=self._run)

        self._ranks.agree(clear if self._ranks.is_first else None)
        part, described, tensors = f"part_{self._ranks.rank:05d}.safetensors", [], {}
        for name, kind, shard, value in owned:
            tensors[key := f"{kind}/{name}"] = value.detach().to("cpu", copy=beside).contiguous()
            piece = Piece(part, key, shard.start, shard.stop)
            described.append(StoredTensor(name, kind, shard.full_shape, DTYPE_NAMES[value.dtype], (piece,)))
        files = ({part: tensors} if tensors else {}) | (extra if self._ranks.is_first else {})
        job = final, temporary, files, described, {"step": step, **facts}
        self._writing = ThreadPoolExecutor(1).submit(self._write, *job)
        if not beside:
            self.wait()
        return final

    def wait(self) -> None:
        """Until the last checkpoint is published, on all ranks; raises what went wrong with it. Collective."""
        if self._writing is not None:
            result, is_first, self._writing = self._writing.result, self._ranks.is_first, None
            self._ranks.agree(None if is_first else result)  # rank 0's thread would wait for one that has failed
            self._ranks.agree(result if is_first else None)

    def _write(self, final: Path, temporary: Path, files: Facts, described: list[StoredTensor], facts: Facts) -> None:
        """Write this rank's files and say so in one more; rank 0 publishes when all have. No collective is used."""
        say = "rank_{:05d}.json".format
        with Blame(CheckpointError, f"{final} cannot be written", f"Free the disk, then: fullshard resume {self._run}"):
            found = {name: _write_file(temporary / name, content) for name, content in files.items()}
            write_json(temporary / say(self._ranks.rank), {"described": list(map(asdict, described)), "files": found})
            if not self._ranks.is_first:
                return
            pieces, all_files = [], {}
            for path in [temporary / say(rank) for rank in range(self._ranks.num_ranks)]:
                while not path.is_file():  # a rank that fails ends this process, too
                    time.sleep(0.02)
                pieces += (each := read_json(path))["described"]
                all_files |= each["files"]
                path.unlink()
            joined: dict[tuple[str, str], dict[str, Any]] = {}  # the whole tensors that the ranks' pieces make
            for one in sorted(pieces, key=lambda one: one["pieces"][0]["start"]):
                joined.setdefault((one["name"], one["kind"]), one | {"pieces": []})["pieces"] += one["pieces"]
            if PEFT_CONFIG in files:  # the adapter as PEFT has it; a vocabulary that has grown belongs to it
                whole, opened = {}, {file: read_header(temporary / file) for file in all_files if "part_" in file}
                for (name, kind), one in joined.items():
                    if kind == "weight":
                        parts = [opened[piece["file"]][piece["key"]].read() for piece in one["pieces"]]
                        name = name if is_adapter(name) else PEFT_PREFIX + name
                        whole[name] = torch.cat(parts).view(one["shape"])
                all_files[PEFT_TENSORS] = _write_file(temporary / PEFT_TENSORS, whole)
            values = {"tensors": [*joined.values()], "files": all_files, **facts}
            write_manifest(temporary, TypeAdapter(Manifest).validate_python(values))
            sync_path(temporary)
            publish_folder(temporary, final)
            self._prune(final)

    def _prune(self, saved: Path) -> None:
        """Remove older ones, but not ``saved``, nor (keep_best) the whole one of the lowest loss, nor what is held."""
        found, losses = [path for _, path in list_checkpoints(self._run)], {}
        for path in found if self._keep_best else ():
            with suppress(UserError):
                losses[path] = read_manifest(path).trainer.get("last_eval")
        losses = {path: loss for path, loss in losses.items() if loss is not None and math.isfinite(loss)}
        kept = {saved, *found[-self._keep :], *sorted(losses, key=losses.__getitem__)[:1]}
        gone = saved.with_name(".old")  # under this name a kill leaves no half of a checkpoint
        found += saved.parent.glob(".step_*.old")  # written anew while they were read
        for path in set(found) - kept:
            with suppress(CheckpointError), run_folder.hold(path, alone=True):
                shutil.rmtree(gone, ignore_errors=True)
                os.replace(path, gone)
                gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)


def _write_file(path: Path, content: dict[str, torch.Tensor] | str) -> dict[str, Any]:
    """Write tensors or a text, look whether they are there, and return what a manifest says of the file."""
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        save_file(content, path, metadata={"format": "pt"})
        found = {key: tensor.shape for key, tensor in read_header(path, CheckpointError).items()}
        if found != {key: tuple(value.shape) for key, value in content.items()}:
            raise CheckpointError(f"{path} does not hold what was written.", "Check the disk.")
    sync_path(path)
    return {"bytes": path.stat().st_size, "xxh3": hash_file(path)}


def _trained_ranges(sharded: ShardedModel, moments: Moments) -> Iterator[tuple[str, str, Shard, torch.Tensor]]:
    """(stored name, kind, shard, its flat values) of all that this rank holds of the trained tensors."""
    for shard in sharded.shards():
        if shard.trainable and shard.start < shard.stop:
            name, owned = stored_name(shard.name), {"weight": shard.value}
            owned |= {moment: value for (owner, moment), value in moments.items() if owner == shard.name}
            yield from ((name, kind, shard, value) for kind, value in owned.items())


class OwnCheckpoint:
    """A checkpoint folder: its tensors (memory maps), trained ``weights`` and proof. CheckpointError: not whole."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._stored = {(stored.name, stored.kind): stored for stored in self.manifest.tensors}
        self.weights = {name: stored for (name, kind), stored in self._stored.items() if kind == "weight"}

    def read(
        self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d, in its stored dtype; in ``out`` if that can hold it."""
        if (stored := self._stored.get((name, kind))) is None:
            raise CheckpointError(f"Step {self.manifest.step} has no {kind} of {name}.", "fullshard verify RUN")
        dtype, stop = str_to_torch_dtype.get(stored.dtype), math.prod(stored.shape) if stop is None else stop
        if out is None or out.dtype != dtype or out.device.type != "cpu":
            out = torch.empty(stop - start, dtype=dtype)
        for piece in stored.pieces:
            low, high = max(piece.start, start), min(piece.stop, stop)
            if low < high:
                values, size = self.open_file(piece.file)[piece.key], piece.stop - piece.start
                if (values.shape, values.dtype) != ((size,), dtype):
                    found, file = f"{list(values.shape)} of {values.dtype}", self.folder / piece.file
                    raise refusal("piece_shape", file=file, key=piece.key, found=found, size=size, dtype=stored.dtype)
                values.read(low - piece.start, high - piece.start, out[low - start : high - start])
        return out

    @cache  # noqa: B019 - few are made
    def open_file(self, name: str) -> dict[str, FileTensor]:
        """The tensors of one of its files."""
        return read_header(self.folder / name, CheckpointError)

    def proof(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The proof: tokens (1, T) int64 and the training state's logits (T, vocabulary) fp32."""
        tokens, logits = (self.open_file(PROOF)[key].whole() for key in ("tokens", "logits"))
        return tokens, logits.float()


@torch.no_grad()
def load_checkpoint(folder: Path, sharded: ShardedModel, moments: Moments) -> Manifest:
    """Copy weights and moments of a checkpoint into this rank's shards, bit for bit. Returns the manifest."""
    checkpoint = OwnCheckpoint(folder)
    here = {(stored_name(shard.name), shard.full_shape) for shard in sharded.shards() if shard.trainable}
    if strange := here ^ {(name, stored.shape) for name, stored in checkpoint.weights.items()}:
        raise refusal("not_its_state", folder=folder, name=min(strange)[0], count=len({name for name, _ in strange}))
    for name, kind, shard, value in _trained_ranges(sharded, moments):
        value.copy_(checkpoint.read(name, kind, shard.start, shard.stop, value))
    return checkpoint.manifest
