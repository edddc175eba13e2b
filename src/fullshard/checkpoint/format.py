"""The checkpoint format, version 2, as format.md beside it describes it. Imports no torch."""

import hashlib
import math
import os
from collections.abc import Container
from dataclasses import asdict, field
from pathlib import Path
from typing import Any
import xxhash
from pydantic import TypeAdapter, ValidationError
from fullshard.errors import Blame, CheckpointError, UserError, refusal
from fullshard.frozen import Frozen
from fullshard.run_folder import MERGE_FACTS, MERGED, list_checkpoints, newest_checkpoint, read_json, write_json

FORMAT, MANIFEST, COMPLETE = 2, "manifest.json", "complete"
MARK = '{{\n  "{}": "{}"\n}}\n'  # what COMPLETE holds, written last: the manifest's name and hash


class Piece(Frozen):
    """The range [start, stop) of a flattened tensor, stored 1-d under ``key`` in ``file``."""

    file: str
    key: str
    start: int
    stop: int


class StoredTensor(Frozen):
    """One tensor of one kind: its full shape and the pieces that cover it, sorted by start."""

    name: str  # parameter name as in the transformers model, adapters as in PEFT's saved files
    kind: str  # weight | exp_avg | exp_avg_sq
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, ...
    pieces: tuple[Piece, ...]


class FileFacts(Frozen):
    """What the manifest says of one file."""

    bytes: int
    xxh3: str  # XXH3 (128 bit), hexadecimal


class Manifest(Frozen):
    """All that a checkpoint says about itself. Raises CheckpointError unless its pieces cover each tensor once."""

    format: int = field(default=FORMAT, kw_only=True)
    step: int
    method: str  # full | lora
    base_model: str  # absolute path of the base model's folder
    tensors: tuple[StoredTensor, ...]
    files: dict[str, FileFacts]
    trainer: dict[str, Any] = field(default_factory=dict)  # step, tokens seen, adapter settings, ...

    def __post_init__(self) -> None:
        for stored in self.tensors:
            place, position = f"{stored.kind} of {stored.name}", 0
            for piece in stored.pieces:
                if piece.start != position or piece.stop < piece.start or piece.file not in self.files:
                    raise refusal("piece_place", place=place, file=piece.file, start=piece.start, wanted=position)
                position = piece.stop
            if position != (size := math.prod(stored.shape)):
                raise CheckpointError(f"{place}: pieces end at {position} of {size}.", "Use another step.")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the files in ``folder`` a checkpoint."""
    write_json(folder / MANIFEST, asdict(manifest))
    write_json(folder / COMPLETE, {MANIFEST: hash_file(folder / MANIFEST)})


def read_manifest(folder: Path, hashes: bool = False) -> Manifest:
    """A checkpoint's manifest. CheckpointError: incomplete, damaged (``hashes``: every byte counts), another format."""
    path = folder / MANIFEST
    if absent := next((name for name in (MANIFEST, COMPLETE) if not (folder / name).is_file()), None):
        raise CheckpointError(f"{folder} is no finished checkpoint: {absent} is missing.", "Use another step.")
    if hash_file(folder / COMPLETE) != xxhash.xxh3_128_hexdigest(MARK.format(MANIFEST, hash_file(path)).encode()):
        raise refusal("not_as_marked", folder=folder, manifest=MANIFEST, complete=COMPLETE)
    if (values := read_json(path)).get("format") != FORMAT:
        raise CheckpointError(f"Checkpoint format {values.get('format')!r}, not {FORMAT}.", "Update fullshard.")
    try:
        manifest = TypeAdapter(Manifest).validate_python(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise refusal("damaged", path=path, place=".".join(map(str, problem["loc"])), why=problem["msg"]) from None
    for name, facts in manifest.files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file() or file.is_symlink():
            raise CheckpointError(f"{folder} is damaged: {name} is missing, or a link.", "Use another step.")
        if (size := file.stat().st_size) != facts.bytes:
            raise CheckpointError(f"{file} is damaged: {size} bytes, not {facts.bytes}.", "Use another step.")
        if hashes and (found := hash_file(file)) != facts.xxh3:
            raise refusal("other_hash", file=file, found=found, wanted=facts.xxh3)
    if strange := {one.name for one in folder.iterdir()} - {MANIFEST, COMPLETE, *manifest.files} if hashes else ():
        raise CheckpointError(f"{folder} holds {min(strange)}, which is no part of it.", "Move it elsewhere.")
    return manifest


def hash_file(path: Path) -> str:
    """XXH3 (128 bit) of a file, hexadecimal, read in blocks: it finds damage, not forgery."""
    with Blame(CheckpointError, f"{path} cannot be read", "Look at its disk."), open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class Verification(Frozen):
    """``found``: each checkpoint or merged folder with what is wrong with it, or nothing."""

    found: tuple[tuple[str, str], ...]
    healthy = property(lambda self: not any(problem for _, problem in self.found))  # all are whole


def verify(path: str | Path) -> Verification:
    """Read every byte of a run's checkpoints and merged folder, or of one such folder. ConfigError: it is neither."""
    path, found = Path(path), []
    inside = [folder for _, folder in list_checkpoints(path)] + [*path.glob("before_step_*"), path / MERGED]
    is_one = any(os.path.exists(path / name) for name in (MANIFEST, COMPLETE, MERGE_FACTS))
    if not (folders := [path] if is_one else [folder for folder in inside if folder.is_dir()]):
        raise refusal("not_verifiable", path=path)
    for folder in folders:
        try:
            if (folder / MERGE_FACTS).is_file():
                with Blame(CheckpointError, f"{MERGE_FACTS} is damaged", "Merge again."):
                    for name, wanted in read_json(folder / MERGE_FACTS)["output_xxh3"].items():
                        if not (folder / name).is_file() or hash_file(folder / name) != wanted:
                            raise CheckpointError(f"{name} is not what was written.")
            else:
                read_manifest(folder, hashes=True)
            found.append((str(folder), ""))
        except (UserError, FileNotFoundError) as error:
            if is_one or folder.is_dir():  # else a run that trains has removed it meanwhile
                found.append((str(folder), getattr(error, "message", str(error))))
    return Verification(tuple(found))


def newest_good(run: Path, step: int | None = None, others: Container[int] = ()) -> tuple[int, Path, list[str]]:
    """The newest whole checkpoint of ``run`` but ``others``, and why newer are none; ``step`` must be whole itself."""
    newest, problems = newest_checkpoint(run, step), []
    for number, folder in [newest] if step else [one for one in list_checkpoints(run)[::-1] if one[0] not in others]:
        try:
            read_manifest(folder, hashes=True)
            return number, folder, problems
        except UserError as error:
            if step:
                raise
            problems.append(error.message)
    raise CheckpointError(" ".join(problems), f"None of {run} is whole; train anew.")
