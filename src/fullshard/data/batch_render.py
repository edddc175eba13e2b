"""Rows to tokens without rendering and masking each by itself: ids and masks as of ``Renderer``.

A chat template is rendered once for each sequence of roles, with place-holders for the contents. Added tokens (no
content may hold one) cut the text into segments that a tokenizer takes one by one; those of a content are tokenised for
each row, all else is the first row's. Rows for which that could differ (``_pattern_of``) go the slow way, against which
the first of each sequence of roles and every 200th are checked: a difference ends it for these roles."""

import re
from collections import namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from jinja2 import Environment, nodes

from fullshard.data.chat import Rendered, Renderer
from fullshard.data.sources import Row
from fullshard.errors import DataError

BATCH_ROWS = 500
CHECKED_FIRST, CHECKED_EVERY, CHECKED_NOW = 8, 200, 10**9
PLACE = "\ue000{}\ue001"  # private characters, which no template looks for


# What stands between two added tokens: the text ``before``, a content, ``after``. Its ids are ``head``, then the
# content's, all with the mark ``supervised``, then ``tail``.
_Segment = namedtuple("_Segment", "before after head tail supervised")


@dataclass
class _Pattern:
    """How rows of one sequence of roles are written: a segment for each message, and what all rows have around the
    contents (one more; with heads and tails, ``stops`` counted from its own first id)."""

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
        while batch := list(islice(source, BATCH_ROWS)):
            patterns = [self._pattern_of(row) for row in batch]
            texts = []  # what is to be tokenised
            for pattern, row in zip(patterns, batch, strict=True):
                pairs = zip(pattern.segments, row.messages, strict=True) if pattern else ()
                texts += [segment.before + message["content"] + segment.after for segment, message in pairs]
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
        assert row.messages is not None
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
        supervised += [segment.supervised] * (end - start)
        stops += [len(ids) + stop for stop in constant.stops]
        ids += constant.ids
        supervised += constant.supervised
    return Rendered(ids, supervised, stops)


def _any_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _constants(template: str) -> set[str]:
    """Strings of two and more characters that the template's code could look for in a content."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(template.replace("{% generation", "{% if true").replace("{% endgeneration", "{% endif"))
    found = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return {text.strip() for text in found if len(text.strip()) > 1}
