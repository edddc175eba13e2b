"""Rows to tokens without rendering and masking each by itself: ids and masks as of ``Renderer``.

A chat template is rendered once for each sequence of roles, with place-holders for the contents; other rows of these
roles are that text with their contents put in. The mask's borders are learnt from the first row, as distances to a
content's borders. Rows for which that could differ (see ``_is_plain``) go the slow way (``Renderer``), against which
the first rows of each sequence of roles and every 200th are checked; at the first difference it is given up for these
roles."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any

from fullshard.data.chat import Rendered, Renderer
from fullshard.data.sources import Row
from fullshard.errors import DataError

BATCH_ROWS = 500
CHECKED_FIRST, CHECKED_EVERY, CHECKED_NOW = 8, 200, 10**9
PLACE = "\ue000{}\ue001"  # private characters, which no template looks for


@dataclass
class _Pattern:
    """How rows of one sequence of roles are written. ``literals``: the text around contents, one more than contents.
    ``runs`` and ``stops``: borders as (anchor, distance); anchors are the text's start, each content's start and end in
    order, and the text's end."""

    literals: list[str]
    runs: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    stops: list[tuple[int, int]] = field(default_factory=list)
    seen: int = 0


class BatchRenderer:
    """Renders rows, in order, as ``Renderer`` would one by one."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._patterns: dict[tuple[str, ...], _Pattern | None] = {}  # None: only the slow way is right
        tokenizer = renderer.tokenizer
        added = tokenizer.added_tokens_decoder.values()
        constants = _constants(tokenizer.get_chat_template()) if tokenizer.chat_template else set()
        self.plain = False  # whether the row just rendered needed no second look
        self._known = _any_of(constants | {token.content for token in added})
        self._special = _any_of({token.content for token in added if token.special})

    def render(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Rendered]]]:
        """Each row with its training rows, in order; ``plain``: which way it went. A DataError names the row."""
        source = iter(rows)
        while batch := list(islice(source, BATCH_ROWS)):
            prepared = [self._prepare(row) for row in batch]
            texts = [text for _, text, _ in filter(None, prepared)]
            encode = self._renderer.tokenizer.backend_tokenizer.encode_batch if texts else lambda *_, **__: ()
            encodings = iter(encode(texts, add_special_tokens=False))
            for row, known in zip(batch, prepared, strict=True):
                self.plain = known is not None
                if known is None:
                    yield row, self._renderer.row(row)
                    continue
                pattern, _, anchors = known
                found = [_mask(pattern, next(encodings), anchors)]
                pattern.seen += 1
                if pattern.seen <= CHECKED_FIRST or pattern.seen % CHECKED_EVERY == 0:
                    slow = self._renderer.row(row)
                    if slow != found:
                        self._patterns[_roles(row)] = None
                        pattern.seen = -CHECKED_NOW  # what is prepared already is checked row by row
                        found = slow
                yield row, found

    def _prepare(self, row: Row) -> tuple[_Pattern, str, list[int]] | None:
        if row.messages is None or row.tools or not self._is_plain(row.messages):
            return None
        roles = _roles(row)
        if roles not in self._patterns:
            self._patterns[roles] = self._learn(row)
        pattern = self._patterns[roles]
        return None if pattern is None else (pattern, *_fill(pattern, row))

    def _is_plain(self, messages: list[dict[str, Any]]) -> bool:
        contents = [message["content"] for message in messages if len(message) == 2]
        said = all(isinstance(text, str) and text and text == text.strip() for text in contents)
        return said and len(contents) == len(messages) and not any(map(self._known.search, contents))

    def writes_special(self, row: Row) -> bool:
        """Whether a text, or a message that is not the assistant's, writes out a special token."""
        said = [message["content"] for message in row.messages or () if message["role"] != "assistant"]
        return any(self._special.search(text) for text in [*said, row.text] if text)

    def _learn(self, row: Row) -> _Pattern | None:
        """The pattern of this row's roles, from place-holders and this row done the slow way; None if there is none."""
        assert row.messages is not None
        empty = [message | {"content": PLACE.format(i)} for i, message in enumerate(row.messages)]
        try:
            rest = self._renderer.text(empty)
            (slow,) = self._renderer.row(row)
        except (DataError, ValueError):  # the slow way will say what is wrong, or gives a row an answer
            return None
        literals = []
        for message in empty:
            literal, found, rest = rest.partition(message["content"])
            literals.append(literal)
            if not found or message["content"] in rest:
                return None
        pattern = _Pattern([*literals, rest])
        text, anchors = _fill(pattern, row)
        encoded = self._renderer.encode(text)
        if text != self._renderer.text(row.messages) or encoded.ids != slow.ids:
            return None

        def behind(place: int) -> tuple[int, int]:
            before = bisect_right(anchors, place) - 1
            return before, place - anchors[before]

        size = len(slow.ids)
        changes = [i for i in range(1, size) if slow.supervised[i] != slow.supervised[i - 1]]
        for start, stop in pairwise([0, *changes, size]):
            if start < stop and slow.supervised[start]:
                first = encoded.offsets[start][0]
                after = bisect_left(anchors, first)
                pattern.runs.append(((after, first - anchors[after]), behind(encoded.offsets[stop - 1][1])))
        pattern.stops += [behind(encoded.offsets[stop][0]) for stop in slow.stops]
        return pattern


def _roles(row: Row) -> tuple[str, ...]:
    return tuple(message["role"] for message in row.messages or ())


def _fill(pattern: _Pattern, row: Row) -> tuple[str, list[int]]:
    pieces = [pattern.literals[0]]
    for message, literal in zip(row.messages or (), pattern.literals[1:], strict=True):
        pieces += [message["content"], literal]
    return "".join(pieces), list(accumulate(map(len, pieces), initial=0))


def _mask(pattern: _Pattern, encoding: Any, anchors: list[int]) -> Rendered:
    ids = list(encoding.ids)
    supervised = [False] * len(ids)

    def token_at(border: tuple[int, int]) -> int:
        """The first token that begins at the border or later."""
        place = anchors[border[0]] + border[1]
        for position in range(place, anchors[-1]):
            token = encoding.char_to_token(position)
            if token is not None:
                return token if encoding.token_to_chars(token)[0] >= place else token + 1
        return len(ids)

    for start, stop in ((token_at(first), token_at(last)) for first, last in pattern.runs):
        supervised[start:stop] = [True] * (stop - start)
    return Rendered(ids, supervised, [token_at(border) for border in pattern.stops])


def _any_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _constants(template: str) -> set[str]:
    """Strings of two and more characters that the template's code could look for in a content."""
    from jinja2 import Environment, nodes

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(template.replace("{% generation", "{% if true").replace("{% endgeneration", "{% endif"))
    found = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return {text.strip() for text in found if len(text.strip()) > 1}
