"""The prepared data: tokenised and masked rows in memory-mapped arrays, written once before any rank starts.

A split's folder holds ``tokens.npy`` (int32, all rows end to end), ``supervised.npy`` (bool, same length),
``offsets.npy`` (int64, rows + 1), ``origins.npy`` (int32, rows x 2: file, line) and ``meta.json``. Beside the splits
lies ``data.json``, what ``prepare`` returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config import DataSection, RunConfig
from fullshard.data import audit, chat
from fullshard.data.batch_render import BatchRenderer
from fullshard.data.pack import shuffle
from fullshard.data.sources import Source, read_source
from fullshard.errors import DataError
from fullshard.model.fetch import with_model_folder
from fullshard.run_folder import DATA, SCHEMA_VERSION, publish_folder, read_json, write_json

META = "meta.json"
Progress = Callable[[str, int, int], None]  # split, rows done, rows in all


class PreparedData:
    """One split, opened read only. ``lengths`` and ``supervised`` (targets: supervised positions but a row's first)
    are int64 arrays over rows; ``hash`` is the SHA-256 of the content.
    """

    def __init__(self, folder: Path) -> None:
        self.meta = read_json(folder / META)
        self.hash: str = self.meta["hash"]
        self.lengths: np.ndarray
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self._offsets = np.load(folder / "offsets.npy")
        self._origins = np.load(folder / "origins.npy", mmap_mode="r")
        self.lengths = np.diff(self._offsets)
        counts = np.add.reduceat(self._supervised, self._offsets[:-1], dtype=np.int64)
        self.supervised: np.ndarray = counts - self._supervised[self._offsets[:-1]]

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and supervised mask (bool) of one row, both views into the memory map."""
        start, stop = self._offsets[number], self._offsets[number + 1]
        return self._tokens[start:stop], self._supervised[start:stop]

    def origin(self, number: int) -> str:
        """Where the row comes from, as file:line."""
        file, line = self._origins[number]
        return f"{self.meta['files'][file]}:{line}"


def open_prepared(folder: Path, split: str) -> PreparedData:
    """The split "train" or "eval" of a prepared folder. Raises DataError where it is not there."""
    if not (Path(folder) / split / META).is_file():
        raise DataError(f"{folder} holds no prepared {split} rows.", "Prepare them: fullshard prepare RECIPE")
    return PreparedData(Path(folder) / split)


def prepare(config: RunConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Tokenise, mask and audit the recipe's data into ``folder`` and return the content of data.json.

    The folder appears whole or not at all; one that was made from the same inputs is kept as it is. Keys of the result:
    ``hash``, ``key``, ``shape``, ``train`` and ``eval`` (accounting, see Audit.to_json; eval may be None),
    ``supervised_tokens`` and ``stop_ids`` (supervised end-of-turn ids, most frequent first) of the training rows,
    ``longest`` (row as written, of both splits), ``max_token_id``, ``pad_id``, ``template_hash``, ``eval_rows``,
    ``duplicates`` (training rows that also occur in eval) and ``report`` (lines to print). Raises DataError for
    anything in the data that cannot be trained on.
    """
    folder = Path(folder)
    if not Path(config.model.path).expanduser().is_dir():
        config = with_model_folder(config, weights=False)
    tokenizer = chat.load_tokenizer(config.model.path, config.model.add_tokens)
    num_embeddings = chat.num_embeddings(Path(config.model.path))
    if num_embeddings is not None:
        new_ids = chat.added_ids(tokenizer, config.model.add_tokens)
        num_embeddings = max(num_embeddings, *(number + 1 for number in new_ids)) if new_ids else num_embeddings
        chat.check_tokenizer(tokenizer, num_embeddings)
    train, held_out = _read_splits(config)
    key = _input_key(config, tokenizer, train, held_out)
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"} if folder.exists() else set()
    known = read_json(folder / DATA) if DATA in inside else {}
    if inside and ("key" not in known or not inside <= {DATA, "train", "eval"}):  # a run folder has a data.json too
        raise DataError(f"{folder} exists and holds something else than prepared data.", "Choose another folder.")
    if known.get("key") == key:
        return known
    temporary = _fresh(folder.with_name(f".{folder.name}.{os.getpid()}.tmp"))
    try:
        result = _prepare_into(temporary, config, tokenizer, (train, held_out), num_embeddings, progress)
        result["key"] = key
        write_json(temporary / DATA, result)
        publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return result


def preview(folder: Path, split: str, tokenizer: Any, count: int) -> list[str]:
    """The first ``count`` rows as text, with the supervised parts between ⟦ and ⟧."""
    data = open_prepared(folder, split)
    rows = []
    for number in range(min(count, len(data))):
        ids, supervised = data.row(number)
        borders = np.flatnonzero(np.diff(supervised.astype(np.int8))) + 1
        parts = []
        for piece, marked in zip(np.split(ids, borders), np.split(supervised, borders), strict=True):
            text = tokenizer.decode(piece.tolist())
            parts.append(f"⟦{text}⟧" if marked[0] else text)
        rows.append("".join(parts))
    return rows


def write_split(
    source: Source,
    data: DataSection,
    tokenizer: Any,
    folder: Path,
    split: str,
    num_embeddings: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Render, audit and write one split; returns its accounting with ``hash``, ``max_token_id`` and ``report``."""
    book = audit.Audit(split, ", ".join(source.shapes), data.max_length)
    arrays = _Arrays()
    renderer = BatchRenderer(chat.Renderer(tokenizer, data.loss_on, data.template_arguments))
    too_long: list[tuple[int, str]] = []
    unsupervised: list[tuple[str, int, int | None]] = []
    for number, (row, training_rows) in enumerate(renderer.render(source.rows)):
        kept = lost = 0
        reason = ""
        for rendered in training_rows:
            problem = _fit(rendered, row.origin, data, book, arrays, num_embeddings)
            if problem is None:
                kept += 1
                continue
            lost += 1
            reason = problem
            _remember(problem, rendered, row.origin, data, too_long, unsupervised)
        book.rows += 1
        book.used += kept > 0
        if not kept:
            book.drop(row.origin, reason)
        elif lost:
            book.partly.append(row.origin)
        if progress is not None:
            progress(split, number + 1, len(source.rows))
    if unsupervised:
        raise audit.refuse_unsupervised(*unsupervised[0], data.max_length, len(unsupervised) - 1)
    if too_long:
        raise audit.refuse_too_long([origin for _, origin in too_long], max(too_long)[0], data.max_length)
    report = book.report(tokenizer)
    if not book.used:
        raise DataError(
            f"No row is left in {split}. " + " ".join(report[2:]), "Raise data.max_length or repair the rows."
        )
    report += source.report(split)
    if source.unused:
        report.append(f"{split}: columns not used: {', '.join(source.unused)}")
    result = book.to_json() | {"max_token_id": arrays.largest, "report": report}
    result["hash"] = arrays.write(folder, result)
    return result


def _fit(
    rendered: chat.Rendered,
    origin: str,
    data: DataSection,
    book: audit.Audit,
    arrays: _Arrays,
    num_embeddings: int | None,
) -> str | None:
    """Keep a training row (cut where the policy says so) and return None, or return why it is not kept."""
    length = len(rendered.ids)
    if length > book.longest:
        book.longest, book.longest_origin = length, origin
    ids, supervised = rendered.ids[: data.max_length], rendered.supervised[: data.max_length]
    num_targets = sum(supervised[1:])
    problem = audit.NO_SUPERVISED if not num_targets else None
    if problem is None and length > data.max_length and data.too_long != "cut":
        problem = audit.TOO_LONG
    if problem is not None:
        book.tokens_dropped += length
        return problem
    if num_embeddings is not None and max(ids) >= num_embeddings:
        raise DataError(
            f"{origin}: token id {max(ids)} is outside the model's embedding of {num_embeddings} rows.",
            "Tokenizer and model do not belong together; check model.path.",
        )
    if length > data.max_length:
        book.cut.append(origin)
        book.tokens_cut += length - data.max_length
    book.prepared += 1
    book.longest_written = max(book.longest_written, len(ids))
    book.tokens += len(ids)
    book.supervised += sum(supervised)
    book.targets += num_targets
    book.stops.update(ids[stop] for stop in rendered.stops if stop < len(ids))
    arrays.append(ids, supervised, origin)
    return None


def _remember(
    problem: str,
    rendered: chat.Rendered,
    origin: str,
    data: DataSection,
    too_long: list[tuple[int, str]],
    unsupervised: list[tuple[str, int, int | None]],
) -> None:
    """Note a row that the policy does not allow to drop."""
    if data.too_long == "drop":
        return
    if problem == audit.TOO_LONG:
        too_long.append((len(rendered.ids), origin))
        return
    targets = [i for i, value in enumerate(rendered.supervised) if value and i]
    unsupervised.append((origin, len(rendered.ids), targets[0] if targets else None))


class _Arrays:
    """Rows on their way to disk: 5 bytes a token in memory."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self.supervised = bytearray()
        self.offsets = array("q", [0])
        self.origins = array("i")
        self.files: dict[str, int] = {}
        self.largest = 0

    def append(self, ids: list[int], supervised: list[bool], origin: str) -> None:
        self.tokens.extend(ids)
        self.supervised.extend(supervised)
        self.offsets.append(len(self.tokens))
        file, _, line = origin.rpartition(":")
        self.origins.extend((self.files.setdefault(file, len(self.files)), int(line)))
        self.largest = max(self.largest, *ids)

    def write(self, folder: Path, meta: dict[str, Any]) -> str:
        """Write the arrays and meta.json; returns the hash of tokens, mask and row borders."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "tokens": np.frombuffer(self.tokens, dtype=np.int32),
            "supervised": np.frombuffer(self.supervised, dtype=np.bool_),
            "offsets": np.frombuffer(self.offsets, dtype=np.int64),
        }
        digest = hashlib.sha256()
        for name, values in content.items():
            digest.update(values.data)
            np.save(folder / f"{name}.npy", values)
        np.save(folder / "origins.npy", np.frombuffer(self.origins, dtype=np.int32).reshape(-1, 2))
        known = meta | {"schema": SCHEMA_VERSION, "files": list(self.files), "hash": digest.hexdigest()}
        write_json(folder / META, known)
        return digest.hexdigest()


def _prepare_into(
    folder: Path,
    config: RunConfig,
    tokenizer: Any,
    sources: tuple[Source, Source | None],
    num_embeddings: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write both splits into ``folder`` and put data.json together."""
    splits: dict[str, dict[str, Any] | None] = {"train": None, "eval": None}
    report: list[str] = []
    for split, source in zip(splits, sources, strict=True):
        if source is not None:
            found = write_split(source, config.data, tokenizer, folder / split, split, num_embeddings, progress)
            report += found.pop("report")
            splits[split] = found
    train, held_out = sources
    duplicates = 0
    if held_out is not None:
        known = {row.content for row in held_out.rows}
        duplicates = sum(row.content in known for row in train.rows)
        report.append(
            f"{duplicates:,} training rows also occur in eval: its loss is too good by that much"
            if duplicates
            else "no training row occurs in eval"
        )
    found = [split for split in splits.values() if split is not None]
    return {
        "schema": SCHEMA_VERSION,
        "hash": hashlib.sha256("".join(split["hash"] for split in found).encode()).hexdigest(),
        "shape": ", ".join(train.shapes),
        **splits,
        "supervised_tokens": splits["train"]["supervised_tokens"],
        "longest": max(split["longest_written"] for split in found),
        "max_token_id": max(split["max_token_id"] for split in found),
        "stop_ids": splits["train"]["stop_ids"],
        "pad_id": chat.choose_pad_id(tokenizer),
        "template_hash": chat.template_hash(tokenizer),
        "eval_rows": splits["eval"]["prepared"] if splits["eval"] else 0,
        "duplicates": duplicates,
        "report": report,
    }


def _read_splits(config: RunConfig) -> tuple[Source, Source | None]:
    """Training and held-out rows; a share is set apart by the run's seed, in file order on both sides."""
    train = read_source(config.train_files, config.data, config.train.seed)
    share = config.data.eval
    if share is None:
        return train, None
    if isinstance(share, str):
        return train, read_source(share, config.data)
    num_rows = sum(not row.copy for row in train.rows)
    num_eval = max(1, round(share * num_rows))
    if num_eval >= num_rows:
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        raise DataError(f"data.eval={share} of {rows} leaves nothing to train on.", "Add rows, or set data.eval=null.")
    apart = set(shuffle(num_rows, config.train.seed, 2**32).tolist()[:num_eval])  # no epoch has this number
    numbers = np.cumsum([not row.copy for row in train.rows]) - 1  # copies go where their row goes
    kept = [row for number, row in zip(numbers, train.rows, strict=True) if number not in apart]
    held_out = [row for number, row in zip(numbers, train.rows, strict=True) if number in apart and not row.copy]
    return replace(train, rows=kept), Source(rows=held_out, shapes=train.shapes)


def write_held_out(config: RunConfig, path: Path) -> None:
    """Write the rows that ``data.eval`` (a share) sets apart as JSONL, so that ``eval`` can be given exactly them."""
    _, held_out = _read_splits(config)
    assert held_out is not None
    with open(path, "w", encoding="utf-8") as file:
        for row in held_out.rows:
            said = {"text": row.text, "messages": row.messages, "tools": row.tools}
            value = {key: part for key, part in said.items() if part is not None}
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _input_key(config: RunConfig, tokenizer: Any, train: Source, held_out: Source | None) -> str:
    """A hash of everything that the prepared data depends on."""
    digest = hashlib.sha256(json.dumps(config.data.model_dump(mode="json"), sort_keys=True).encode())
    digest.update(f"{SCHEMA_VERSION} {config.train.seed} {chat.template_hash(tokenizer)}".encode())
    digest.update(json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else b"slow")
    for source in (train, held_out):
        for row in source.rows if source else []:
            digest.update(f"{row.origin}\0{row.content}\n".encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be written: {error.strerror}.", "Choose another folder.") from None
    return folder
