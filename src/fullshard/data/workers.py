"""Rows to tokens, many at once, with ids and masks as of ``Renderer``, by a process for each core: see workers.md."""

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any
import numpy as np
from jinja2 import Environment, nodes
from fullshard.config import DataSection
from fullshard.data.chat import Rendered, Renderer
from fullshard.data.sources import Account, Row
from fullshard.errors import DataError, UserError, refusal

CHECKED_FIRST, CHECKED_EVERY, CHECKED_NOW = 8, 200, 10**9
PLACE = "\ue000{}\ue001"  # private characters, which no template looks for
CHUNK_ROWS, CHUNK_CHARACTERS = 500, 4 << 20  # a chunk is full with one of these
ALONE_CHUNKS = 4  # rendered in this process before others are started
SETUP = "setup"  # what the first child asks for
RECORD = np.dtype([("content", "<u8"), ("lengths", "<i4"), ("targets", "<i4"), ("files", "<i4"), ("lines", "<i4")])
Chunk = list[tuple[str, Row]]  # split, row
# Between two added tokens: a content, the texts around it; their ids, and the mark of the content's. See workers.md
_Segment = namedtuple("_Segment", "before after head tail supervised")


@dataclass
class _Pattern:
    """How rows of one sequence of roles are written: segments, and what all rows have around the contents."""

    roles: tuple[str, ...]
    segments: list[_Segment]
    constants: list[Rendered]
    seen: int = 0


class BatchRenderer:
    """Renders rows, in order, as ``Renderer`` would one by one. ``on_bad``: stop or drop where that refuses a row."""

    def __init__(self, renderer: Renderer, on_bad: str = "stop") -> None:
        self._renderer, self._on_bad = renderer, on_bad
        self._patterns: dict[tuple[str, ...], _Pattern | None] = {}  # None: only the slow way is right
        tokenizer = renderer.tokenizer
        added = tokenizer.added_tokens_decoder.values()
        constants = _constants(tokenizer.get_chat_template()) if tokenizer.chat_template else set()
        self._added = set(tokenizer.added_tokens_decoder)
        self.plain = False  # whether the row just rendered needed no second look
        self._known = _any_of(constants | {token.content for token in added})
        self._special = _any_of({token.content for token in added if token.special})

    def render(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Rendered] | DataError]]:
        """Each row, in order, with its training rows, or (drop) a DataError; ``plain``: which way the row went."""
        source = iter(rows)
        while batch := list(islice(source, CHUNK_ROWS)):
            patterns = [self._pattern_of(row) for row in batch]
            rows_of = [(row, pattern) for row, pattern in zip(batch, patterns, strict=True) if pattern]
            pairs = (pair for row, pattern in rows_of for pair in zip(pattern.segments, row.messages, strict=True))
            texts = [segment.before + message["content"] + segment.after for segment, message in pairs]
            encodings = iter(self._encode(texts) if texts else ())
            for row, pattern in zip(batch, patterns, strict=True):
                filled = _fill(pattern, list(islice(encodings, len(pattern.segments)))) if pattern else None
                self.plain = filled is not None
                if pattern is None or filled is None:
                    yield row, self._render_alone(row)
                    continue
                found, pattern.seen = [filled], pattern.seen + 1
                is_due = pattern.seen <= CHECKED_FIRST or pattern.seen % CHECKED_EVERY == 0
                if is_due and (slow := self._render_alone(row)) != found:
                    self._patterns[pattern.roles] = None
                    pattern.seen = -CHECKED_NOW  # what is prepared already is checked row by row
                    found = slow
                yield row, found

    def _render_alone(self, row: Row) -> list[Rendered] | DataError:
        try:
            return self._renderer.row(row)
        except DataError as error:
            if self._on_bad == "stop":
                raise
            return error

    def _encode(self, texts: list[str]) -> list[Any]:
        return self._renderer.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def _pattern_of(self, row: Row) -> _Pattern | None:
        if row.messages is None or row.tools:
            return None
        for message in row.messages:
            text = message["content"]
            if len(message) != 2 or not text or text[0].isspace() or text[-1].isspace() or self._known.search(text):
                return None
        if (roles := tuple(message["role"] for message in row.messages)) not in self._patterns:
            self._patterns[roles] = self._learn(row, roles)
        return self._patterns[roles]

    def writes_special(self, row: Row) -> bool:
        """Whether a text, or a message that is not the assistant's, writes out a special token."""
        said = [message["content"] for message in row.messages or () if message["role"] != "assistant"]
        return any(self._special.search(text) for text in [*said, row.text] if text)

    def _learn(self, row: Row, roles: tuple[str, ...]) -> _Pattern | None:
        """The pattern of this row's roles, from place-holders and this row done the slow way; None if there is none."""
        empty = [message | {"content": PLACE.format(i)} for i, message in enumerate(row.messages)]
        try:
            rest = self._renderer.text(empty)
            (slow,) = self._renderer.row(row)
        except (DataError, ValueError):  # the slow way will say what is wrong, or gives a row an answer
            return None
        pieces = []
        for place, message in zip(empty, row.messages, strict=True):
            literal, found, rest = rest.partition(place["content"])
            pieces += [literal, message["content"]]
            if not found or place["content"] in rest:
                return None
        text, borders = "".join([*pieces, rest]), list(accumulate(map(len, pieces)))
        encoded = self._renderer.encode(text)
        if text != self._renderer.text(row.messages) or encoded.ids != slow.ids:
            return None
        pattern, done = _Pattern(roles, [], []), 0
        added = [-1, *(place for place, number in enumerate(slow.ids) if number in self._added), len(slow.ids)]
        for start, end in zip(borders[::2], borders[1::2], strict=True):
            inside = [place for place, (low, high) in enumerate(encoded.offsets) if high > start and low < end]
            if not inside:
                return None
            first, last = inside[0], inside[-1]
            before, behind = max(i for i in added if i < first), min(i for i in added if i >= first)
            low = encoded.offsets[before][1] if before >= 0 else 0
            high = encoded.offsets[behind][0] if behind < len(slow.ids) else len(text)
            marks, alone = set(slow.supervised[first : last + 1]), done <= before + 1 and last < behind
            if not alone or len(marks) > 1 or set(slow.stops) & set(inside) or not low <= start < end <= high:
                return None
            if self._encode([text[low:high]])[0].ids != slow.ids[before + 1 : behind]:
                return None
            head, tail = slow.ids[before + 1 : first], slow.ids[last + 1 : behind]
            pattern.segments.append(_Segment(text[low:start], text[end:high], head, tail, marks.pop()))
            pattern.constants.append(slow.part(done, first))
            done = last + 1
        pattern.constants.append(slow.part(done, len(slow.ids)))
        return pattern


def _fill(pattern: _Pattern, encodings: list[Any]) -> Rendered | None:
    """The row of these segments; None where a content's tokens reach into the text around it."""
    first = pattern.constants[0]
    ids, supervised, stops = first.ids.copy(), first.supervised.copy(), first.stops.copy()
    for segment, encoding, constant in zip(pattern.segments, encodings, pattern.constants[1:], strict=True):
        found = encoding.ids
        start, end = len(segment.head), len(found) - len(segment.tail)
        if end <= start or found[:start] != segment.head or found[end:] != segment.tail:
            return None
        ids += found[start:end]
        stops += [len(ids) + stop for stop in constant.stops]
        ids += constant.ids
        supervised += [segment.supervised] * (end - start) + constant.supervised
    return Rendered(ids, supervised, stops)


def _any_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts))) or r"(?!)")


def _constants(template: str) -> set[str]:
    """Strings of two and more characters that the template's code could look for in a content."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(template.replace("{% generation", "{% if true").replace("{% endgeneration", "{% endif"))
    found = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return {text.strip() for text in found if len(text.strip()) > 1}


@dataclass
class Part:
    """The training rows that a chunk has for one split; ``records``: one RECORD a row, its file a number in files."""

    book: Account = field(default_factory=Account)
    tokens: Any = field(default_factory=list)  # of each row's ids; int32 (tokens) when the chunk is done
    supervised: bytearray = field(default_factory=bytearray)  # 0 or 1 a token
    records: Any = field(default_factory=list)  # an array when the chunk is done
    files: dict[str, int] = field(default_factory=dict)


def cut_chunks(rows: Iterable[tuple[str, Row]]) -> Iterator[Chunk | UserError]:
    """The rows in chunks; where reading fails, those before it and then the error."""
    chunk, size, failure = [], 0, None
    try:
        for split, row in rows:
            chunk.append((split, row))
            size += len(row.text or "") + sum(len(message["content"] or "") for message in row.messages or ())
            if len(chunk) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
                yield chunk
                chunk, size = [], 0
    except UserError as error:
        failure = error
    yield from filter(None, (chunk, failure))


class ChunkRenderer:
    """Makes chunks into parts. ``num_embeddings``: rows of the model's embedding, None where not known."""

    def __init__(self, tokenizer: Any, data: DataSection, num_embeddings: int | None) -> None:
        self._renderer = BatchRenderer(Renderer(tokenizer, data.loss_on, data.template_arguments), data.on_bad)
        has_more = num_embeddings is not None and max(tokenizer.get_vocab().values(), default=0) >= num_embeddings
        self._data, self._num_embeddings = data, num_embeddings if has_more else None  # None: every id has its row

    def __call__(self, chunk: Chunk | UserError) -> dict[str, Part] | UserError:
        """The part of each split that the chunk has rows of; the error of its first row that has one."""
        if isinstance(chunk, UserError):
            return chunk
        parts: dict[str, Part] = defaultdict(Part)
        try:
            rendered = self._renderer.render(row for _, row in chunk)
            for (split, _), (row, training_rows) in zip(chunk, rendered, strict=True):
                self._take(parts[split], row, training_rows)
            for part in parts.values():
                book, part.records = part.book, np.array(part.records, RECORD)
                lengths, targets = part.records["lengths"], part.records["targets"]
                book.prepared, book.tokens, book.targets = len(lengths), int(lengths.sum()), int(targets.sum())
                book.supervised_tokens, book.longest_written = part.supervised.count(1), int(lengths.max(initial=0))
                part.tokens = np.fromiter(chain.from_iterable(part.tokens), np.int32, book.tokens)
        except UserError as error:
            return error
        return parts

    def _take(self, part: Part, row: Row, training_rows: list[Rendered] | DataError) -> None:
        book = part.book
        book.copies += row.copy > 0
        book.rows += not row.copy
        if isinstance(training_rows, DataError):
            if not row.copy:
                book.count("bad", row.origin, "not rendered")  # by the template, or of words not known
                book.not_rendered = book.not_rendered or [(training_rows.message, training_rows.hint)]
            return
        content = int.from_bytes(blake2b(row.content.encode(), digest_size=8).digest(), "little")
        if row.text is not None and self._data.too_long == "stop":
            whole, length = training_rows[0], len(training_rows[0].ids)
            if (count := -(-length // self._data.max_length)) > 1:
                book.count("split", row.origin)
                book.split_rows += count
                borders = pairwise(length * i // count for i in range(count + 1))  # even; a first token has no context
                training_rows = [whole.part(start, end) for start, end in borders]
        problems = [self._fit(part, rendered, row, content) for rendered in training_rows]
        if row.copy:
            return
        book.used += None in problems
        if None not in problems:
            book.count("dropped", row.origin, problems[-1])
        elif any(problems):
            book.count("partly", row.origin)
        if not self._renderer.plain and self._renderer.writes_special(row):
            book.count("special_strings", row.origin)

    def _fit(self, part: Part, rendered: Rendered, row: Row, content: int) -> str | None:
        """Keep a training row (cut where the policy says so) and return None, or return why it is not kept."""
        book, limit, length = part.book, self._data.max_length, len(rendered.ids)
        book.longest, kept = max(book.longest, length), rendered if length <= limit else rendered.part(0, limit)
        ids, targets = kept.ids, kept.supervised[1:].count(True)
        if not targets or (length > limit and self._data.too_long != "cut"):
            problem = "longer than max_length" if targets else "no supervised token"
            book.tokens_dropped += length
            if self._data.too_long != "drop" and (targets or self._data.on_bad != "drop"):
                book.refused[problem] += 1
                if targets:
                    book.note("refused", row.origin)
                elif not book.unsupervised:
                    first = next((i for i, value in enumerate(rendered.supervised) if value and i), None)
                    book.unsupervised.append((row.origin, length, first))
            return problem
        if self._num_embeddings is not None and (largest := max(ids)) >= self._num_embeddings:
            raise refusal("id_outside", origin=row.origin, id=largest, rows=self._num_embeddings)
        if length > limit:
            book.count("cut", row.origin)
            book.tokens_cut += length - limit
        book.stops.update(str(ids[stop]) for stop in kept.stops)
        file, _, line = row.origin.rpartition(":")
        part.tokens.append(ids)
        part.supervised.extend(kept.supervised)
        part.records.append((content, len(ids), targets, part.files.setdefault(file, len(part.files)), int(line)))
        return None


class Workers:
    """``in_order`` renders chunks; ``close`` leaves no process behind. ``setup``: of ChunkRenderer."""

    def __init__(self, setup: tuple[Any, ...], count: int) -> None:
        self._setup, self._count, self._render = setup, count, ChunkRenderer(*setup)
        self._process: subprocess.Popen[bytes] | None = None
        self._busy: dict[Connection, int | None] = {}  # the number of its chunk; None: it starts
        self._idle: list[Connection] = []

    def close(self) -> None:
        """End the children: at once where one is at work or starting."""
        for connection in [*self._busy, *self._idle]:
            connection.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                if self._busy:
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def in_order(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """What ChunkRenderer makes of each chunk, in order. EOFError or ConnectionError where a child was killed."""
        source, done, number, given = iter(chunks), {}, 0, 0
        chunk = next(source, None)
        while chunk is not None or given < number:
            if number == ALONE_CHUNKS and self._process is None and self._count > 1:
                self._start()
            while self._idle and chunk is not None and number < given + 2 * self._count:
                worker = self._idle.pop()
                self._busy[worker] = number
                worker.send(chunk)
                number, chunk = number + 1, next(source, None)
            if chunk is not None and not self._ready:  # there is nobody yet to give it to
                done[number] = self._render(chunk)
                number, chunk = number + 1, next(source, None)
            while given in done:
                yield done.pop(given)
                given += 1
            if self._busy and (chunk is not None or given < number):
                self._receive(done)

    _ready = property(lambda self: bool(self._idle) or any(number is not None for number in self._busy.values()))

    def _receive(self, done: dict[int | None, Any]) -> None:
        for worker in wait(list(self._busy), None if self._ready else 0):
            if (answer := worker.recv()) == SETUP:
                worker.send(self._setup)
            else:
                self._idle.append(worker)
                done[self._busy.pop(worker)] = answer  # under None: that it is ready

    def _start(self) -> None:
        from fullshard.device import one_core_environment

        pairs = [Pipe() for _ in range(self._count)]
        theirs = [there.fileno() for _, there in pairs]
        command = [sys.executable, "-c", f"from {__name__} import be_worker; be_worker()", *map(str, theirs)]
        apart = {"env": one_core_environment(), "start_new_session": True}  # Ctrl-C is for us, who then end them
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs, **apart)
        for here, there in pairs:
            there.close()
            self._busy[here] = None


def be_worker() -> None:
    """Render what comes, until the socket closes; the first connection is of this process, the others of its forks."""
    mine, *others = connections = [Connection(int(handle)) for handle in sys.argv[1:]]
    with suppress(EOFError, ConnectionError):
        mine.send(SETUP)
        render = ChunkRenderer(*mine.recv())
        mine = next((connection for connection in others if os.fork() == 0), mine)
        for other in set(connections) - {mine}:
            other.close()
        mine.send(None)
        while True:
            mine.send(render(mine.recv()))
    with suppress(ChildProcessError):
        while mine is connections[0]:
            os.wait()
    os._exit(0)  # taking a tokenizer apart takes half a second
