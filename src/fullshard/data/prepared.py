"""The prepared data: tokenised and masked rows in memory-mapped files, written once before any rank starts.

A split's folder holds safetensors files: ``tokens`` (int32, rows end to end), ``supervised`` (bool, same length),
``rows`` (``offsets`` int64, rows + 1; ``origins`` int32, rows x 2: file, line; ``content`` uint64, a hash; ``targets``
int32), and ``meta.json``; beside them data.json. All is a stream into ``.NAME.partial``, whose journal says how far the
files are right: an interrupted preparation of the same inputs goes on there."""

import hashlib
import json
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fullshard.config import RunConfig
from fullshard.data import audit, chat
from fullshard.data.chunks import RECORD, Part, cut_chunks
from fullshard.data.sources import Account, Row, hash_content, iterate_rows, set_apart
from fullshard.data.workers import Workers
from fullshard.device import num_cores
from fullshard.errors import Blame, DataError, UserError
from fullshard.model.fetch import with_model_folder
from fullshard.run_folder import DATA, LOCK, SCHEMA_VERSION, claim_run, clear, publish_folder, read_json, write_json

FORMAT = 3  # of the files; 1 was numpy's, 2 had shorter headers
META, JOURNAL = "meta.json", "journal.json"
TOKENS, SUPERVISED, ROWS = (f"{name}.safetensors" for name in ("tokens", "supervised", "rows"))
RECORDS = "records.bin"  # RECORD after RECORD, until they become ROWS
HEADER_BYTES = 512  # of a file that is written as a stream: its size is known only at the end
PIECE_ROWS = 1 << 16  # of the rows' table in memory at once
JOURNAL_SECONDS = 5.0
Progress = Callable[[str, int, int | None], None]  # split, rows done, rows in all: None, not known


class PreparedData:
    """One split, read only. Arrays over rows: ``lengths``, ``supervised`` (positions but a row's first; both int64) and
    ``content`` (uint64: rows of one source row, and exact duplicates, have the same). ``hash``: SHA-256 of all."""

    def __init__(self, folder: Path) -> None:
        self.meta = read_json(folder / META)
        self.hash: str = self.meta["hash"]
        try:
            (self._tokens,), (self._supervised,) = _map(folder / TOKENS), _map(folder / SUPERVISED)
            self.content, self._offsets, self._origins, self._targets = _map(folder / ROWS)
        except (SafetensorError, OSError, ValueError) as error:  # not four tensors
            hint = "Prepare it again: fullshard train RECIPE output=NEW_FOLDER"
            raise DataError(f"{folder} is damaged, or of an older version: {error}.", hint) from None

    lengths = cached_property(lambda self: np.diff(self._offsets))
    supervised = cached_property(lambda self: self._targets.astype(np.int64))

    def __len__(self) -> int:
        return len(self.content)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and supervised mask (bool) of one row, both views into the memory map."""
        start, stop = self._offsets[number], self._offsets[number + 1]
        return self._tokens[start:stop], self._supervised[start:stop]

    def pieces(self, number: int, tokenizer: Any, last: int = 0) -> list[tuple[str, bool]]:
        """A row as texts, supervised or not; ``last``: of its last tokens only."""
        ids, supervised = (values[-last:] for values in self.row(number))
        borders = np.flatnonzero(np.diff(supervised)) + 1
        texts = [tokenizer.decode(piece.tolist()) for piece in np.split(ids, borders)]
        return list(zip(texts, supervised[[0, *borders]], strict=True))

    def origin(self, number: int) -> str:
        """Where the row comes from, as file:line."""
        file, line = self._origins[number]
        return f"{self.meta['files'][file]}:{line}"

    def source_rows(self, part: int = 0, parts: int = 1) -> np.ndarray:
        """The first row (int64) of each source row: copies by weight and one row per answer lie behind it. ``part``:
        only those whose content's hash leaves it when divided by ``parts``."""
        found = []
        for start in range(0, len(self), PIECE_ROWS):
            origins = self._origins[max(0, start - 1) : start + PIECE_ROWS]
            new = np.insert((origins[1:] != origins[:-1]).any(axis=1), 0, [True] * (start == 0))
            found.append(start + np.flatnonzero(new & (self.content[start : start + PIECE_ROWS] % parts == part)))
        return np.concatenate(found)


def _map(path: Path) -> list[np.ndarray]:
    with safe_open(path, framework="pt") as file:
        found = [file.get_tensor(name).numpy() for name in sorted(file.keys())]
    for array in found:
        array.flags.writeable = False
    return found


def open_prepared(folder: Path, split: str) -> PreparedData:
    """The split "train" or "eval" of a prepared folder. Raises DataError where it is not there."""
    if not (Path(folder) / split / META).is_file():
        raise DataError(f"{folder} holds no prepared {split} rows.", "Prepare them: fullshard prepare RECIPE")
    return PreparedData(Path(folder) / split)


def prepare(config: RunConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Tokenise, mask and audit the recipe's data into ``folder``, whole or not at all, and return data.json's content;
    a folder made from the same inputs (by the files' bytes) is kept. Keys: ``hash``, ``key``, ``shape``, ``train`` and
    ``eval`` (Audit.to_json, or None), ``supervised_tokens`` and ``stop_ids`` (most frequent first) of the training
    rows, ``longest`` (row as written), ``max_token_id``, ``pad_id``, ``template_hash``, ``eval_rows``,
    ``exact_duplicates`` and ``overlap`` (training rows that repeat an earlier one, or one of eval: ``rows``,
    ``places``), ``duplicates`` (rows of overlap), ``report`` (lines). DataError for what cannot be trained on."""
    folder = Path(folder)
    if not Path(config.model.path).expanduser().is_dir():
        config = with_model_folder(config, weights=False)
    tokenizer = chat.load_tokenizer(config.model.path, config.model.add_tokens)
    if (num_embeddings := chat.num_embeddings(Path(config.model.path))) is not None:
        new_ids = chat.added_ids(tokenizer, config.model.add_tokens)
        num_embeddings = max([num_embeddings, *(number + 1 for number in new_ids)])
        chat.check_tokenizer(tokenizer, num_embeddings)
    key = _input_key(config, tokenizer, num_embeddings)
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"} if folder.exists() else set()
    known = read_json(folder / DATA) if DATA in inside else {}
    is_ours = "key" in known and inside <= {DATA, "train", "eval", "audit.html"}  # a run folder has a data.json too
    if inside and not is_ours:
        raise DataError(f"{folder} exists and holds something else than prepared data.", "Choose another folder.")
    if known.get("key") == key:
        return known
    partial = partial_folder(folder)
    with Blame(DataError, f"{folder.parent} cannot be written", "Choose another folder."):
        partial.mkdir(parents=True, exist_ok=True)
    with claim_run(partial, "prepared"):
        try:
            job = _Preparation(config, partial, key, tokenizer)
            job.write(num_embeddings, progress)
            write_json(partial / DATA, result := job.finish() | {"key": key})
            for left in (JOURNAL, LOCK, f"train/{RECORDS}", f"eval/{RECORDS}"):
                (partial / left).unlink(missing_ok=True)
            publish_folder(partial, folder)
        except (EOFError, ConnectionError):
            problem = "A process that tokenises rows has ended: killed, often for memory, or broken."
            raise DataError(problem, "The rows done are kept: start the same command again.") from None
        except UserError:  # another input is needed, so that this part would not be gone on with
            shutil.rmtree(partial)
            raise
    return result


def partial_folder(folder: Path) -> Path:
    """Where an unfinished preparation of ``folder`` lies."""
    return folder.with_name(f".{folder.name}.partial")


def preview(folder: Path, split: str, tokenizer: Any, count: int) -> list[str]:
    """The first ``count`` rows as text, with the supervised parts between ⟦ and ⟧."""
    data = open_prepared(folder, split)
    rows = [data.pieces(number, tokenizer) for number in range(min(count, len(data)))]
    return ["".join(f"⟦{text}⟧" if mark else text for text, mark in row) for row in rows]


class _Split:
    """One split on its way to disk, chunk after chunk. ``state``: what the journal says of it, None for a new one."""

    def __init__(self, folder: Path, state: dict[str, Any] | None) -> None:
        self.folder, self.files = folder, {}
        self.book = audit.Audit.from_json(state["audit"]) if state else audit.Audit()
        self.names = dict.fromkeys(state["files"] if state else ())  # of the files that rows come from, in order
        self.digest: str = state["digest"] if state else ""
        folder.mkdir(exist_ok=True)
        tokens, rows = self.book.tokens, self.book.prepared
        sizes = {TOKENS: HEADER_BYTES + 4 * tokens, SUPERVISED: HEADER_BYTES + tokens, RECORDS: RECORD.itemsize * rows}
        for name, right in sizes.items():
            (folder / name).touch()
            self.files[name] = file = open(folder / name, "r+b")  # noqa: SIM115 - closed by finish
            if state and os.fstat(file.fileno()).st_size < right:
                raise DataError(f"{folder / name} is shorter than its journal says.", "Start again.")
            file.truncate(right)
            file.seek(right)

    def append(self, part: Part) -> None:
        """Write what a chunk has for this split."""
        self.names |= dict.fromkeys(part.files)
        places = {name: number for number, name in enumerate(self.names)}
        records = np.array(part.records, dtype=RECORD)
        records["file"] = np.array([places[name] for name in part.files], dtype=np.int32)[records["file"]]
        digest = hashlib.sha256(self.digest.encode())
        for content in (part.tokens, part.supervised, records["length"].tobytes()):
            digest.update(content)
        for name, content in ((TOKENS, part.tokens), (SUPERVISED, part.supervised), (RECORDS, records)):
            self.files[name].write(content)
        self.digest = digest.hexdigest()
        self.book.add(part.book)

    def state(self) -> dict[str, Any]:
        """For the journal."""
        return {"audit": vars(self.book), "files": list(self.names), "digest": self.digest}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Fill in the headers, write ROWS, and ``result`` with ``hash`` as META; returns them."""
        tokens = self.book.tokens
        for name, kind, size in ((TOKENS, "I32", 4), (SUPERVISED, "BOOL", 1)):  # as the format's README has it
            self.files[name].seek(0)
            self.files[name].write(_header({name.partition(".")[0]: (kind, [tokens], size * tokens)}))
        for file in self.files.values():
            file.close()
        records = np.memmap(self.folder / RECORDS, RECORD, "r")
        count, end = len(records), 0
        columns = {"content": ("U64", [count], 8 * count), "offsets": ("I64", [count + 1], 8 * count + 8)}
        columns |= {"origins": ("I32", [count, 2], 8 * count), "targets": ("I32", [count], 4 * count)}
        with open(self.folder / ROWS, "wb") as file:
            file.write(_header(columns))
            for name in columns:
                file.write(bytes(8 * (name == "offsets")))
                for piece in (records[start : start + PIECE_ROWS] for start in range(0, count, PIECE_ROWS)):
                    if name == "offsets":
                        values = end + np.cumsum(piece["length"], dtype=np.int64)
                        end = values[-1]
                    else:
                        values = np.stack([piece["file"], piece["line"]], 1) if name == "origins" else piece[name]
                    file.write(values.tobytes())
        result |= {"hash": self.digest}
        write_json(self.folder / META, result | {"schema": SCHEMA_VERSION, "files": list(self.names)})
        return result


def _header(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """Of a safetensors file, as the format's README has it. ``tensors``: dtype, shape and bytes, in their order."""
    found, end = {}, 0
    for name, (kind, shape, size) in tensors.items():
        found[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end := end + size]}
    text = json.dumps(found).encode().ljust(HEADER_BYTES - 8)
    return len(text).to_bytes(8, "little") + text


class _Preparation:
    """The splits of a recipe on their way into ``folder``, with the journal."""

    def __init__(self, config: RunConfig, folder: Path, key: str, tokenizer: Any) -> None:
        self.config, self.folder, self.tokenizer = config, folder, tokenizer
        self.accounts = {"train": Account(), "eval": Account()}
        journal = read_json(folder / JOURNAL) if (folder / JOURNAL).is_file() else {}
        if journal.get("key") != key:
            journal = {"key": key, "splits": {}}
            clear(folder, folder / LOCK)
        names = ("train",) if config.data.eval is None else ("train", "eval")
        self.splits = {name: _Split(folder / name, journal["splits"].get(name)) for name in names}
        self.journal = journal

    def write(self, num_embeddings: int | None, progress: Progress | None) -> None:
        """Read, render and write all rows that the journal does not know."""
        rows = read_splits(self.config, self.accounts)
        num_done = sum(split.book.rows + split.book.copies for split in self.splits.values())
        deque(islice(rows, num_done), maxlen=0)
        due = 0.0
        try:
            with closing(Workers((self.tokenizer, self.config.data, num_embeddings), num_cores())) as workers:
                for parts in workers.in_order(cut_chunks(rows)):
                    if isinstance(parts, UserError):
                        raise parts
                    for name, part in parts.items():
                        self.splits[name].append(part)
                    states = {name: split.state() for name, split in self.splits.items()}
                    self.journal = json.loads(json.dumps(self.journal | {"splits": states}))  # as of now
                    if time.monotonic() >= due:
                        self._write_journal()
                        due = time.monotonic() + JOURNAL_SECONDS
                    for name in parts if progress else ():
                        progress(name, self.splits[name].book.rows, None)
        finally:
            self._write_journal()

    def _write_journal(self) -> None:
        for file in (file for split in self.splits.values() for file in split.files.values()):
            file.flush()
            os.fsync(file.fileno())
        write_json(self.folder / JOURNAL, self.journal)

    def finish(self) -> dict[str, Any]:
        """Judge the accounts and make the files whole; returns data.json's content."""
        data, report, found, read = self.config.data, [], {"train": None, "eval": None}, self.accounts["train"]
        if isinstance(data.eval, float):
            self.accounts["eval"] = Account(read=read.held_out, shapes=read.shapes)
        for name, split in self.splits.items():
            book, account = split.book, self.accounts[name]
            if refusal := book.refuse(data.max_length):
                raise refusal
            stops = ", ".join(self.tokenizer.convert_ids_to_tokens(number) for number, _ in book.stops.most_common())
            lines = audit.report_lines("kept", name, book, ", ".join(account.shapes), data.max_length, stops)
            if not book.used:
                problem = f"No row is left in {name}. " + " ".join(lines[2:])
                raise DataError(problem, "Raise data.max_length or repair the rows.")
            account.used, account.dropped = book.used, account.dropped + book.dropped
            report += lines + audit.report_lines("left_out", name, account)
            found[name] = split.finish(book.to_json(account))
        splits = {name: PreparedData(self.folder / name) for name in self.splits}
        books, none = [split.book for split in self.splits.values()], {"rows": 0, "places": []}
        repeats = _repeats(splits["train"], splits["train"])
        overlap = _repeats(splits["train"], splits["eval"]) if "eval" in splits else none
        report += audit.report_lines("repeats", repeats, overlap, "eval" in splits)
        digests = "".join(split.digest for split in self.splits.values())
        result = {
            "schema": SCHEMA_VERSION, "hash": hashlib.sha256(digests.encode()).hexdigest(),
            **{name: found["train"][name] for name in ("shape", "supervised_tokens", "stop_ids")},
            "longest": max(book.longest_written for book in books),
            "max_token_id": max(book.max_token_id for book in books),
            "pad_id": chat.choose_pad_id(self.tokenizer), "template_hash": chat.template_hash(self.tokenizer),
            "eval_rows": found["eval"]["prepared"] if found["eval"] else 0, "duplicates": overlap["rows"],
        }  # fmt: skip
        return result | found | {"exact_duplicates": repeats, "overlap": overlap, "report": report}


def _repeats(train: PreparedData, others: PreparedData) -> dict[str, Any]:
    """How many source rows of ``train`` say what one of ``others`` (or an earlier one of train) says, and the first."""
    count, pairs, parts = 0, [], min(64, 1 + len(train) // PIECE_ROWS)
    for part in range(parts):
        rows, known = train.source_rows(part, parts), others.source_rows(part, parts)
        if not len(known):
            continue
        contents, first = np.unique(others.content[known], return_index=True)
        content = train.content[rows]
        place = np.searchsorted(contents, content).clip(max=len(contents) - 1)
        same = contents[place] == content
        if others is train:
            same = first[place] != np.arange(len(rows))
        repeats = np.flatnonzero(same)
        count += len(repeats)
        pairs += [(rows[number], known[first[place[number]]]) for number in repeats[: audit.SHOWN]]
    places = [[train.origin(row), others.origin(other)] for row, other in sorted(pairs)[: audit.SHOWN]]
    return {"rows": count, "places": places}


def read_splits(config: RunConfig, accounts: dict[str, Account]) -> Iterator[tuple[str, Row]]:
    """All rows, each with its split: those of an eval file first; of a share, drawn by the run's seed, in between."""
    if isinstance(share := config.data.eval, str):
        yield from (("eval", row) for row in iterate_rows(share, config.data, account=accounts["eval"]))
    rows = iterate_rows(config.train_files, config.data, config.train.seed, accounts["train"])
    apart = ((row, False) for row in rows)
    if isinstance(share, float):
        apart = set_apart(rows, share, random.Random(f"{config.train.seed} eval"), accounts["train"])
    yield from (("eval" if held else "train", row) for row, held in apart)


def write_held_out(config: RunConfig, path: Path) -> None:
    """Write the rows that ``data.eval`` (a share) sets apart as JSONL, so that ``eval`` can be given exactly them."""
    with open(path, "w", encoding="utf-8") as file:
        for split, row in read_splits(config, {"train": Account()}):
            if split == "eval":
                said = {key: value for key in ("text", "messages", "tools") if (value := getattr(row, key)) is not None}
                file.write(json.dumps(said, ensure_ascii=False) + "\n")


def _input_key(config: RunConfig, tokenizer: Any, num_embeddings: int | None) -> str:
    options = [config.data.model_dump(mode="json"), config.train.seed, FORMAT, chat.template_hash(tokenizer)]
    described = [*options, num_embeddings, tokenizer.special_tokens_map, tokenizer.is_fast]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else b"")
    for paths in (config.train_files, config.data.eval):
        for line in hash_content(paths, config.data) if isinstance(paths, str | list) else ():
            digest.update(f"{line}\n".encode())
        digest.update(b"\0")
    return digest.hexdigest()
