"""Tokenised and masked rows in memory-mapped files (prepared.md), written before any rank starts; and their batches."""

import hashlib
import json
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any
import numpy as np
import torch
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from fullshard.config import RunConfig
from fullshard.data import chat
from fullshard.data.sources import KEPT, Account, Row, hash_content, iterate_rows, report_lines, set_apart
from fullshard.data.workers import RECORD, BatchRenderer, Part, Workers, cut_chunks
from fullshard.device import num_cores
from fullshard.errors import Blame, DataError, UserError, refusal
from fullshard.frozen import Frozen
from fullshard.model.fetch import with_model_folder
from fullshard.run_folder import DATA, LOCK, SCHEMA_VERSION, claim_run, clear, publish_folder, read_json, write_json

FORMAT, META, JOURNAL, JOURNAL_SECONDS = 4, "meta.json", "journal.json", 5.0
OF_TOKENS = {"tokens": np.dtype(np.int32), "supervised": np.dtype(np.bool_)}
COLUMNS = OF_TOKENS | {name: RECORD[name] for name in RECORD.names or ()}
KINDS = {"int32": "I32", "bool": "BOOL", "uint64": "U64"}  # as safetensors names them
HEADER_BYTES = 512  # of a file that is written as a stream: its size is known only at the end
PIECE_ROWS = 1 << 16  # of a column in memory at once
IGNORED, FILL_TOKENS = -100, 8  # label of a position that has no target; most tokens of a fill batch
Progress = Callable[[int | None, int], None]  # rows in all (about; None: not known) and rows done


class PreparedData:
    """One split, read only. Arrays over rows: ``lengths``, ``supervised`` (positions but a row's first; both int64) and
    ``content`` (uint64: rows of one source row, and exact duplicates, have the same). ``hash``: SHA-256 of all."""

    def __init__(self, folder: Path) -> None:
        self.meta = read_json(folder / META)
        self.hash: str = self.meta["hash"]
        self._columns: dict[str, np.ndarray] = {}
        hint = "Prepare it again: fullshard train RECIPE output=NEW_FOLDER"
        with Blame(DataError, f"{folder} is damaged, or of an older version", hint):
            for name in COLUMNS:
                with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
                    self._columns[name] = file.get_tensor(name).numpy()
                self._columns[name].flags.writeable = False
        self.content = self._columns["content"]

    lengths = cached_property(lambda self: self._columns["lengths"].astype(np.int64))
    supervised = cached_property(lambda self: self._columns["targets"].astype(np.int64))
    _ends = cached_property(lambda self: np.cumsum(self.lengths))

    def __len__(self) -> int:
        return len(self.content)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and supervised mask (bool) of one row, both views into the memory map."""
        start, stop = self._ends[number] - self.lengths[number], self._ends[number]
        return self._columns["tokens"][start:stop], self._columns["supervised"][start:stop]

    def pieces(self, number: int, tokenizer: Any, last: int = 0) -> list[tuple[str, bool]]:
        """A row as texts, supervised or not; ``last``: of its last tokens only."""
        ids, supervised = (values[-last:] for values in self.row(number))
        borders = np.flatnonzero(np.diff(supervised)) + 1
        texts = [tokenizer.decode(piece.tolist()) for piece in np.split(ids, borders)]
        return list(zip(texts, supervised[[0, *borders]], strict=True))

    def origin(self, number: int) -> str:
        """Where the row comes from, as file:line."""
        return f"{self.meta['files'][self._columns['files'][number]]}:{self._columns['lines'][number]}"

    def source_rows(self, part: int = 0, parts: int = 1) -> np.ndarray:
        """The first row (int64) of each source row; of those whose content's hash modulo ``parts`` is ``part``."""
        found = []
        for start in range(0, len(self), PIECE_ROWS):
            rows = slice(max(0, start - 1), start + PIECE_ROWS)
            changes = np.diff(self._columns["files"][rows]) | np.diff(self._columns["lines"][rows])
            new = np.insert(changes != 0, 0, [True] * (start == 0))
            found.append(start + np.flatnonzero(new & (self.content[start : start + PIECE_ROWS] % parts == part)))
        return np.concatenate(found)


def open_prepared(folder: Path, split: str) -> PreparedData:
    """The split "train" or "eval" of a prepared folder. Raises DataError where it is not there."""
    if not (Path(folder) / split / META).is_file():
        raise DataError(f"{folder} holds no prepared {split} rows.", "Prepare them: fullshard prepare RECIPE")
    return PreparedData(Path(folder) / split)


class Batch(Frozen):
    """One micro-batch of one rank. All tensors are int64 of shape (B, S): sequences, tokens of the longest sequence."""

    input_ids: torch.Tensor
    labels: torch.Tensor  # already shifted: the id at t+1 where that position is supervised and of the same row
    position_ids: torch.Tensor  # restart at 0 in each row; 0 on pads
    attention_mask: torch.Tensor  # 1 on real tokens, 0 on pads
    lengths: list[list[int]]  # of each sequence's documents


def make_batch(data: PreparedData, sequences: list[list[int]], pad_id: int) -> Batch:
    """The sequences (of row ids), right-padded with ``pad_id`` (may be eos); none: the start of row 0, no labels."""
    if not (content := [[data.row(row) for row in sequence] for sequence in sequences]):
        ids, supervised = data.row(0)
        content = [[(ids[:FILL_TOKENS], supervised[:FILL_TOKENS] & False)]]
    columns = []
    for rows in content:
        tokens = torch.from_numpy(np.concatenate([ids for ids, _ in rows])).long()  # copies out of the memory map
        targets = np.concatenate([np.append(supervised[1:], False) for _, supervised in rows])
        labels = torch.where(torch.from_numpy(targets), tokens.roll(-1), IGNORED)
        positions = torch.cat([torch.arange(len(ids)) for ids, _ in rows])
        columns.append((tokens, labels, positions, torch.ones_like(tokens)))
    padded = zip(zip(*columns, strict=True), (pad_id, IGNORED, 0, 0), strict=True)
    tensors = [pad_sequence(column, batch_first=True, padding_value=value) for column, value in padded]
    return Batch(*tensors, [[len(ids) for ids, _ in rows] for rows in content])


def prepare(config: RunConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Tokenise, mask and audit the recipe's data into ``folder``, whole or not at all, and return data.json's content;
    a folder made from the same inputs (by the files' bytes) is kept. prepared.md has the keys. Raises DataError."""
    folder, config = Path(folder), with_model_folder(config, weights=False)
    tokenizer = chat.load_tokenizer(config.model.path, config.model.add_tokens)
    if (num_embeddings := chat.num_embeddings(Path(config.model.path))) is not None:
        num_embeddings = max(num_embeddings, 1 + max(chat.added_ids(tokenizer, config.model.add_tokens), default=0))
        chat.check_tokenizer(tokenizer, num_embeddings)
    key, num_rows = _input_key(config, tokenizer, num_embeddings)
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"} if folder.exists() else set()
    known = read_json(folder / DATA, optional=True)  # a run folder has one too, without a key
    if inside and not ("key" in known and inside <= {DATA, "train", "eval", "audit.html"}):
        raise DataError(f"{folder} exists and holds something else than prepared data.", "Choose another folder.")
    if known.get("key") == key:
        return known
    partial = partial_folder(folder)
    with Blame(DataError, f"{folder.parent} cannot be written", "Choose another folder."):
        partial.mkdir(parents=True, exist_ok=True)
    with claim_run(partial, "prepared"):
        try:
            job = _Preparation(config, partial, key, tokenizer)
            job.write(num_embeddings, lambda done: progress and progress(num_rows, done))
            write_json(partial / DATA, result := job.finish() | {"key": key})
            for left in (JOURNAL, LOCK):
                (partial / left).unlink()
            publish_folder(partial, folder)
        except (EOFError, ConnectionError):
            raise refusal("worker_ended") from None
        except UserError:  # another input is needed, so that this part would not be gone on with
            shutil.rmtree(partial)
            raise
    return result


@contextmanager
def rows_bar(quiet: bool = False) -> Iterator[Progress]:
    """A progress bar on a terminal, for ``prepare``."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns, console = (*Progress.get_default_columns(), MofNCompleteColumn()), Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("preparing rows", total=None)
        yield lambda total, done: bar.update(task, total=total, completed=done)


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
        state = state or {"audit": {}, "files": [], "digest": ""}
        self.folder, self.files, self.book = folder, {}, Account()
        self.book.add(Account(**state["audit"]))
        self.names, self.digest = dict.fromkeys(state["files"]), state["digest"]  # of the rows' files, in order
        folder.mkdir(exist_ok=True)
        for name, kind in COLUMNS.items():
            path, right = folder / f"{name}.safetensors", HEADER_BYTES + kind.itemsize * self._count(name)
            path.touch()
            self.files[name] = file = open(path, "r+b")  # noqa: SIM115 - closed by finish
            if self.digest and os.fstat(file.fileno()).st_size < right:
                raise DataError(f"{path} is shorter than its journal says.", "Start again.")
            file.truncate(right)
            file.seek(right)

    def _count(self, name: str) -> int:
        return self.book.tokens if name in OF_TOKENS else self.book.prepared

    def append(self, part: Part) -> None:
        """Write what a chunk has for this split."""
        self.names |= dict.fromkeys(part.files)
        records, names = part.records, list(self.names)
        records["files"] = np.array([names.index(name) for name in part.files], dtype=np.int32)[records["files"]]
        columns = {"tokens": part.tokens, "supervised": part.supervised}
        for name, values in (columns | {name: records[name] for name in RECORD.names or ()}).items():
            self.files[name].write(bytes(values))
        contents = self.digest.encode(), part.tokens, part.supervised, records["lengths"].tobytes()
        self.digest = hashlib.sha256(b"".join(contents)).hexdigest()
        self.book.add(part.book)

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Fill in the headers (as safetensors' README has them), write ``result`` with ``hash`` as META; returns it."""
        for name, file in self.files.items():
            kind, count = COLUMNS[name], self._count(name)
            facts = {"dtype": KINDS[kind.name], "shape": [count], "data_offsets": [0, kind.itemsize * count]}
            text = json.dumps({name: facts}).encode().ljust(HEADER_BYTES - 8)
            file.seek(0)
            file.write(len(text).to_bytes(8, "little") + text)
            file.close()
        result |= {"hash": self.digest}
        write_json(self.folder / META, result | {"schema": SCHEMA_VERSION, "files": list(self.names)})
        return result


class _Preparation:
    """The splits of a recipe on their way into ``folder``, with the journal."""

    def __init__(self, config: RunConfig, folder: Path, key: str, tokenizer: Any) -> None:
        self.config, self.folder, self.tokenizer = config, folder, tokenizer
        self.accounts = {"train": Account(), "eval": Account()}
        self.journal = read_json(folder / JOURNAL, optional=True)
        if self.journal.get("key") != key:
            self.journal = {"key": key, "splits": {}}
            clear(folder, folder / LOCK)
        names = ("train",) if config.data.eval is None else ("train", "eval")
        self.splits = {name: _Split(folder / name, self.journal["splits"].get(name)) for name in names}

    def write(self, num_embeddings: int | None, progress: Callable[[int], Any]) -> None:
        """Read, render and write all rows that the journal does not know."""
        rows = read_splits(self.config, self.accounts)
        deque(islice(rows, sum(split.book.rows + split.book.copies for split in self.splits.values())), maxlen=0)
        due = 0.0
        try:
            with closing(Workers((self.tokenizer, self.config.data, num_embeddings), num_cores())) as workers:
                for parts in workers.in_order(cut_chunks(rows)):
                    if isinstance(parts, UserError):
                        raise parts
                    for name, part in parts.items():
                        self.splits[name].append(part)
                    for name, split in self.splits.items():
                        state = {"audit": vars(split.book), "files": list(split.names), "digest": split.digest}
                        self.journal["splits"][name] = json.loads(json.dumps(state))  # as of now
                    if time.monotonic() >= due:
                        self._write_journal()
                        due = time.monotonic() + JOURNAL_SECONDS
                    progress(sum(split.book.rows for split in self.splits.values()))
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
            if refusal := report_lines("refusal", book, data.max_length):
                raise DataError(*refusal)
            account.used, account.dropped = book.used, account.dropped + book.dropped
            account.bad += book.bad
            facts = book.to_json(account)
            stops = ", ".join(self.tokenizer.convert_ids_to_tokens(facts["stop_ids"]))
            lines = report_lines("kept", name, book, facts["shape"], data.max_length, stops)
            if not book.used:
                left = f"No row is left in {name}. " + " ".join(lines[2:]), "Raise data.max_length or repair the rows."
                raise DataError(*(book.not_rendered[0] if book.not_rendered else left))
            report += lines + report_lines("left_out", name, account)
            found[name] = split.finish(facts)
        splits = {name: PreparedData(self.folder / name) for name in self.splits}
        repeats = _repeats(splits["train"], splits["train"])
        overlap = _repeats(splits["train"], splits["eval"]) if "eval" in splits else {"rows": 0, "places": []}
        report += report_lines("repeats", repeats, overlap, "eval" in splits)
        whole = hashlib.sha256("".join(split.digest for split in self.splits.values()).encode()).hexdigest()
        result = {"schema": SCHEMA_VERSION, "hash": whole} | found | {"stop_ids": found["train"]["stop_ids"]}
        return result | {"exact_duplicates": repeats, "overlap": overlap, "report": report}


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
        is_later = first[place] != np.arange(len(rows)) if others is train else True
        repeats = np.flatnonzero((contents[place] == content) & is_later)
        count += len(repeats)
        pairs += [(rows[number], known[first[place[number]]]) for number in repeats[:KEPT]]
    return {"rows": count, "places": [[train.origin(row), others.origin(other)] for row, other in sorted(pairs)[:KEPT]]}


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
    """Write the rows that ``data.eval`` (a share) sets apart, and the template takes, as JSONL for ``eval``."""
    held = (row for split, row in read_splits(config, {"train": Account()}) if split == "eval")
    tokenizer = chat.load_tokenizer(config.model.path, config.model.add_tokens)
    renderer = chat.Renderer(tokenizer, config.data.loss_on, config.data.template_arguments)
    with open(path, "w", encoding="utf-8") as file:
        for row, rendered in BatchRenderer(renderer, config.data.on_bad).render(held):
            if not isinstance(rendered, DataError):
                said = {key: value for key in ("text", "messages", "tools") if (value := getattr(row, key)) is not None}
                file.write(json.dumps(said, ensure_ascii=False) + "\n")


def _input_key(config: RunConfig, tokenizer: Any, num_embeddings: int | None) -> tuple[str, int | None]:
    options, counts = [config.data.model_dump(mode="json"), config.train.seed, FORMAT, num_embeddings], []
    described = [tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.is_fast]
    digest = hashlib.sha256(json.dumps([*options, *described], sort_keys=True, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else b"")
    for paths in (config.train_files, config.data.eval):
        for line, count in hash_content(paths, config.data) if isinstance(paths, str | list) else ():
            digest.update(f"{line}\n".encode())
            counts.append(count)
        digest.update(b"\0")
    return digest.hexdigest(), None if None in counts else sum(counts)
