"""Chunks of rows on their way to disk: rendered, cut or left out, counted, as arrays. No row depends on its chunk."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any

import numpy as np

from fullshard.config import DataSection
from fullshard.data import audit, chat
from fullshard.data.batch_render import BatchRenderer
from fullshard.data.sources import Row
from fullshard.errors import DataError, UserError, refusal

CHUNK_ROWS, CHUNK_CHARACTERS = 500, 4 << 20  # a chunk is full with one of these
RECORD = np.dtype([("content", "<u8"), ("lengths", "<i4"), ("targets", "<i4"), ("files", "<i4"), ("lines", "<i4")])
Chunk = list[tuple[str, Row]]  # split, row


@dataclass
class Part:
    """The training rows that a chunk has for one split; ``records``: one RECORD a row, its file a number in files."""

    book: audit.Audit = field(default_factory=audit.Audit)
    tokens: Any = field(default_factory=list)  # of each row's ids; int32 (tokens) when the chunk is done
    supervised: bytearray = field(default_factory=bytearray)  # 0 or 1 a token
    records: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)


def cut_chunks(rows: Iterable[tuple[str, Row]]) -> Iterator[Chunk | UserError]:
    """The rows in chunks; where reading fails, those before it and then the error."""
    chunk, size, failure = [], 0, None
    try:
        for split, row in rows:
            chunk.append((split, row))
            size += len(row.text or "")
            for message in row.messages or ():
                size += len(message["content"] or "")
            if len(chunk) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
                yield chunk
                chunk, size = [], 0
    except UserError as error:
        failure = error
    yield from filter(None, (chunk, failure))


class ChunkRenderer:
    """Makes chunks into parts. ``num_embeddings``: rows of the model's embedding, None where not known."""

    def __init__(self, tokenizer: Any, data: DataSection, num_embeddings: int | None) -> None:
        renderer = chat.Renderer(tokenizer, data.loss_on, data.template_arguments)
        self._renderer = BatchRenderer(renderer, data.on_bad)
        self._data, self._num_embeddings = data, num_embeddings

    def __call__(self, chunk: Chunk | UserError) -> dict[str, Part] | UserError:
        """The part of each split that the chunk has rows of; the error of its first row that has one."""
        if isinstance(chunk, UserError):
            return chunk
        parts: dict[str, Part] = {}
        try:
            rendered = self._renderer.render(row for _, row in chunk)
            for (split, _), (row, training_rows) in zip(chunk, rendered, strict=True):
                part = parts.get(split) or parts.setdefault(split, Part())  # a new one for each row would cost
                self._take(part, row, training_rows)
            for part in parts.values():
                part.tokens = np.fromiter(chain.from_iterable(part.tokens), np.int32, part.book.tokens)
        except UserError as error:
            return error
        return parts

    def _take(self, part: Part, row: Row, training_rows: list[chat.Rendered] | DataError) -> None:
        book = part.book
        book.copies += row.copy > 0
        book.rows += not row.copy
        if isinstance(training_rows, DataError):
            if not row.copy:
                book.bad[audit.NOT_RENDERED] += 1
                book.note(audit.NOT_RENDERED, row.origin)
                book.not_rendered = book.not_rendered or [(training_rows.message, training_rows.hint)]
            return
        content = int.from_bytes(blake2b(row.content.encode(), digest_size=8).digest(), "little")
        if row.text is not None and self._data.too_long == "stop":
            training_rows = self._split(book, training_rows[0], row)
        problems = [self._fit(part, rendered, row, content) for rendered in training_rows]
        if row.copy:
            return
        book.used += None in problems
        if None not in problems:
            book.dropped[problems[-1]] += 1
            book.note(problems[-1], row.origin)
        elif any(problems):
            book.count("partly", row.origin)
        if not self._renderer.plain and self._renderer.writes_special(row):
            book.count("special_strings", row.origin)

    def _split(self, book: audit.Audit, whole: chat.Rendered, row: Row) -> list[chat.Rendered]:
        """A text over max_length in even pieces; between two, nothing predicts the later one's first token."""
        length = len(whole.ids)
        if (count := -(-length // self._data.max_length)) > 1:
            book.count("split", row.origin)
            book.split_rows += count
        borders = pairwise(length * i // count for i in range(count + 1))
        return [whole.part(start, end) for start, end in borders] or [whole]

    def _fit(self, part: Part, rendered: chat.Rendered, row: Row, content: int) -> str | None:
        """Keep a training row (cut where the policy says so) and return None, or return why it is not kept."""
        book, limit, length = part.book, self._data.max_length, len(rendered.ids)
        book.longest = max(book.longest, length)
        ids, supervised = rendered.ids, rendered.supervised
        if length > limit:
            ids, supervised = ids[:limit], supervised[:limit]
        num_supervised = supervised.count(True)
        targets = num_supervised - supervised[0] if ids else 0
        if not targets or (length > limit and self._data.too_long != "cut"):
            problem = audit.TOO_LONG if targets else audit.NO_SUPERVISED
            book.tokens_dropped += length
            if self._data.too_long != "drop" and (targets or self._data.on_bad != "drop"):
                book.refused[problem] += 1
                if targets:
                    book.note("refused", row.origin)
                elif not book.unsupervised:
                    first = next((i for i, value in enumerate(rendered.supervised) if value and i), None)
                    book.unsupervised.append((row.origin, length, first))
            return problem
        largest = max(ids)
        if self._num_embeddings is not None and largest >= self._num_embeddings:
            raise refusal("id_outside", origin=row.origin, id=largest, rows=self._num_embeddings)
        if length > limit:
            book.count("cut", row.origin)
            book.tokens_cut += length - limit
        book.prepared += 1
        book.longest_written = max(book.longest_written, len(ids))
        book.tokens += len(ids)
        book.supervised_tokens += num_supervised
        book.targets += targets
        for stop in rendered.stops:
            if stop < len(ids):
                book.stops[str(ids[stop])] += 1
        file, _, line = row.origin.rpartition(":")
        part.tokens.append(ids)
        part.supervised.extend(supervised)
        part.records.append((content, len(ids), targets, part.files.setdefault(file, len(part.files)), int(line)))
        return None
