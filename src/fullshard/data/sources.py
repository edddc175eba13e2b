"""From records to rows: shape, messages and tools, how often, what is wrong; and what became of each, in lines."""

import hashlib
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from jinja2 import StrictUndefined, Template
from fullshard.config import DataFile, DataSection
from fullshard.data.files import BLOCK, FACTS, BadRow, Record, decode_json, open_records
from fullshard.errors import Blame, DataError, refusal
from fullshard.frozen import Frozen

BESIDE = {"tools": "tools", "system": "system"}
MESSAGE_KEYS = {"tool_call_id": str, "name": str, "train": bool, "reasoning_content": str}
ROLES, SHAREGPT_ROLES, SHAPES_HINT = FACTS["roles"], FACTS["sharegpt_roles"], FACTS["shapes_hint"]
_Layout = tuple[str, dict[str, str], frozenset[str]]  # shape, column -> part, columns that must be there
KEPT = 1000  # places of each reason, for data.json; fewer are printed
MOST_NESTED = 100  # levels of tools and their calls, in which rows go to other processes
Paths = str | Path | DataFile | list[str] | list[Path] | list[str | DataFile]
ENCODER = json.JSONEncoder(default=str)
WEIGHED_ROWS = 100  # a fraction is taken of each so many rows


class Row(Frozen):
    """One example: ``messages`` (as chat.Message; content None only beside tool_calls; train false: unsupervised) with
    ``tools``, or ``text``; ``origin``: file:line (Parquet: file:row). ``copy`` 1, 2, ...: a repeat by weight."""

    origin: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    copy: int = 0
    content = property(lambda self: ENCODER.encode([self.messages, self.text, self.tools]))  # equal rows, equal texts


@dataclass
class Account:
    """What became of the records: read = used + dropped + bad + blank (+ held_out); ``copies`` by weight are beside. Of
    the reading; another one, of (a part of) a split, has what stands from ``rows`` on; used: a training row is kept."""

    read: int = 0
    used: int = 0
    copies: int = 0
    blank: int = 0
    held_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> records
    bad: Counter[str] = field(default_factory=Counter)  # reason -> records
    places: dict[str, list[str]] = field(default_factory=dict)  # reason -> its first origins
    shapes: dict[str, None] = field(default_factory=dict)  # "messages", "question+answer", "text", ...; in order
    unused: dict[str, None] = field(default_factory=dict)  # columns, and keys of messages as messages.KEY
    rows: int = 0  # source rows read, without copies by weight
    prepared: int = 0  # training rows written: copies, pieces of texts, rows per answer too
    partly: int = 0  # used rows that lost one of their training rows
    cut: int = 0  # training rows
    split: int = 0  # texts over max_length, in pieces
    split_rows: int = 0  # the training rows that these became
    tokens: int = 0
    supervised_tokens: int = 0  # supervised positions
    targets: int = 0  # supervised positions that can be predicted (all but a row's first)
    tokens_dropped: int = 0
    tokens_cut: int = 0
    longest: int = 0  # tokens of the longest row before cutting or dropping
    longest_written: int = 0  # and after
    special_strings: int = 0  # source rows that write out a special token where it is no answer
    refused: Counter[str] = field(default_factory=Counter)  # reason -> training rows that may not be dropped
    stops: Counter[str] = field(default_factory=Counter)  # supervised end-of-turn ids, as text: JSON keys
    unsupervised: list[tuple[str, int, int | None]] = field(default_factory=list)  # the first: origin, tokens, before
    not_rendered: list[tuple[str, str]] = field(default_factory=list)  # the first: message, hint

    def note(self, what: str, origin: str) -> None:
        """Remember a place, if it is among the first."""
        if len(places := self.places.setdefault(what, [])) < KEPT:
            places.append(origin)

    def count(self, figure: str, origin: str, reason: str = "") -> None:
        """Count a row in one of the figures, or there under its reason, and remember its place."""
        if reason:
            getattr(self, figure)[reason] += 1
        else:
            setattr(self, figure, getattr(self, figure) + 1)
        self.note(reason or figure, origin)

    def add(self, later: "Account") -> None:
        """Take in the account of the rows that follow; its counts may be plain dicts, as ``vars`` read from JSON."""
        for name, value in vars(later).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            elif isinstance(mine, dict):
                mine.update({what: (mine.get(what, []) + places)[:KEPT] for what, places in value.items()})
            elif isinstance(mine, list):
                mine.extend(value[: 1 - len(mine)])
            else:
                setattr(self, name, max(mine, value) if name.startswith("longest") else mine + value)

    def to_json(self, account: "Account") -> dict[str, Any]:
        """The numbers, for data.json: read = used + dropped + bad + blank (+ held_out). ``account``: of the reading."""
        facts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        facts |= {name: getattr(account, name) for name in ("read", "blank", "held_out")}
        facts |= {"shape": ", ".join(account.shapes), "bad": dict(account.bad), "dropped": dict(account.dropped)}
        facts |= {"places": self.places | account.places, "stop_tokens": self.stops.total()}
        special = {"rows": self.special_strings, "places": self.places.get("special_strings", [])}
        return facts | {"special_strings": special, "stop_ids": [int(text) for text, _ in self.stops.most_common()]}


def iterate_rows(paths: Paths, data: DataSection, seed: int = 0, account: Account | None = None) -> Iterator[Row]:
    """The rows of files, folders and data set ids, as often as weights say (docs/sources.md), while ``account`` is
    filled. DataError with file and line: a row that cannot be used (unless data.on_bad is drop), a file without any."""
    account = Account() if account is None else account
    for place, entry in enumerate(paths if isinstance(paths, list) else [paths]):
        file = entry if isinstance(entry, DataFile) else DataFile(path=str(entry))
        for label, records, _ in open_records(file.path, data.source):
            rows, chance = _usable_rows(label, records, data, account), random.Random(f"{seed} {place} {label}")
            whole, share = divmod(file.weight, 1)
            for row, is_drawn in _draw(rows, share, chance):  # once more for a drawn share of the rows
                times = int(whole) + is_drawn
                account.used += times > 0
                account.copies += max(0, times - 1)
                if not times:
                    account.count("dropped", row.origin, "weight of the file")
                yield from (replace(row, copy=copy) if copy else row for copy in range(times))


def hash_content(paths: Paths, data: DataSection) -> Iterator[tuple[str, int | None]]:
    """Label and SHA-256 (or a hub's fingerprint) of each file, and its lines where one is a row. Raises DataError."""
    for entry in paths if isinstance(paths, list) else [paths]:
        for label, records, content in open_records(getattr(entry, "path", str(entry)), data.source):
            if isinstance(content, str):
                yield f"{label}\0{content}", None
                continue
            if not content.exists():
                next(records)  # raises what there is to say
            for path in filter(Path.is_file, sorted(content.rglob("*")) if content.is_dir() else [content]):
                with Blame(DataError, f"{path}:1: cannot be read", "Check its rights."), open(path, "rb") as file:
                    digest, lines = hashlib.sha256(), 1  # the last may not end
                    while block := file.read(BLOCK):
                        digest.update(block)
                        lines += block.count(b"\n")
                yield f"{path}\0{digest.hexdigest()}", lines if path.suffix in (".jsonl", ".csv") else None


def set_apart(rows: Iterator[Row], share: float, chance: random.Random, account: Account) -> Iterator[tuple[Row, bool]]:
    """Each row and whether it is held out: ``share`` of them, exact to one row, at least one, drawn from each 100.
    Copies by weight go where their row goes, and out where that is held out. Raises DataError where none is left."""
    seen = kept = 0

    def number_of(row: Row) -> int:
        nonlocal seen
        seen += not row.copy
        return seen

    groups = (list(group) for _, group in itertools.groupby(rows, number_of))  # a row and its copies
    for group, held in _draw(groups, share, chance, least=1):
        kept += not held
        account.held_out += held
        account.copies -= held * (len(group) - 1)
        yield from ((row, held) for row in (group[:1] if held else group))
    if not kept:
        raise refusal("all_set_apart", share=share, rows="1 row" if seen == 1 else f"{seen} rows")


def _draw(items: Iterator[Any], share: float, chance: random.Random, least: int = 0) -> Iterator[tuple[Any, bool]]:
    """Each item and whether it is drawn: ``share`` of them, exact to one, ``least`` at least, from each 100."""
    seen = drawn = 0
    while block := list(itertools.islice(items, WEIGHED_ROWS)):
        seen += len(block)
        chosen = set(chance.sample(range(len(block)), max(least, int(seen * share + 0.5)) - drawn))
        drawn += len(chosen)
        yield from ((item, place in chosen) for place, item in enumerate(block))


def _usable_rows(label: str, records: Iterator[Record], data: DataSection, account: Account) -> Iterator[Row]:
    layout = row = first = None
    for number, record in records:
        account.read += 1
        origin = f"{label}:{number}"
        if record is ...:
            account.count("blank", origin)
            continue
        try:
            if isinstance(record, BadRow):
                raise record
            if not isinstance(record, dict):
                raise BadRow(origin, f"no object with columns: found {record!r:.40}", SHAPES_HINT)
            layout = layout or _recognise(record, data, origin)
            row = _make_row(record, layout, data, origin, account.unused)
        except BadRow as error:
            if data.on_bad == "stop":
                raise DataError(error.message, error.hint) from None
            account.count("bad", origin, error.reason)
            first = first or error
            continue
        account.shapes[layout[0]] = None
        yield row
    if row is None:
        empty = f"{label} is empty: no row in it.", 'A row is, for example, {"text": "..."} on a line.'
        raise DataError(*((f"{label}: no row can be used; the first: {first.message}", first.hint) if first else empty))


def _recognise(record: dict[str, Any], data: DataSection, origin: str) -> _Layout:
    if columns := data.columns:
        parts, shape = set(columns.values()), ", ".join(f"{name} as {part}" for name, part in columns.items())
        alone = "text" if "text" in parts else "messages" if "messages" in parts else ""
        if parts - BESIDE.keys() not in ({"user", "assistant"}, {alone}) or (alone == "text" and len(columns) > 1):
            raise refusal("columns_unfit", given=shape)
        required = frozenset(name for name, part in columns.items() if part not in BESIDE)
        return shape, columns if "text" in parts else {"tools": "tools"} | columns, required
    for shape, columns, more in (known.values() for known in FACTS["shapes"]):
        if data.shape in ("auto", shape) and columns.keys() <= record.keys():
            return "+".join(columns) if len(columns) > 1 else shape, columns | more, frozenset(columns)
    wanted = "are no known shape" if data.shape == "auto" else f"are not those of data.shape={data.shape}"
    raise BadRow(origin, f"unknown columns: {', '.join(record)} {wanted}", SHAPES_HINT)


def _make_row(record: dict[str, Any], layout: _Layout, data: DataSection, origin: str, unused: dict[str, None]) -> Row:
    _, columns, required = layout
    for name in required - record.keys():
        raise BadRow(origin, f"no column {name!r}: there is {', '.join(record)}", "A file's rows have one shape.")
    names: defaultdict[str, list[str]] = defaultdict(list)  # part -> columns
    for name, part in columns.items():
        if name in required or record.get(name) not in (None, ""):
            names[part].append(name)
    unused.update(dict.fromkeys(name for name in record if name not in columns))
    if names["text"]:
        if data.system is not None or data.loss_on == "last":
            raise refusal("no_turns", origin=origin)
        return Row(origin, text=_joined(record, names["text"], origin))
    turns = names["messages"] or names["user"] + names["assistant"]
    if names["messages"] or all(isinstance(record[name], list) for name in turns):  # prompt and completion as lists
        given = [message for name in turns for message in _read_list(record[name], name, dict, origin)]
        messages = [_read_message(message, f"{origin}: message {i}", unused) for i, message in enumerate(given, 1)]
        if not messages:
            raise BadRow(origin, f"no messages: found {record[turns[0]]!r:.40}", SHAPES_HINT)
    else:
        pairs = [pair for name in names["history"] for pair in _read_list(record[name], name, list, origin)]
        texts = [_text(text, "history", origin) for text in itertools.chain(*pairs)]
        texts += [_joined(record, names[part], origin) for part in ("user", "assistant")]
        messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    system = _joined(record, names["system"], origin) or data.system
    if system is not None and all(message["role"] not in ("system", "developer") for message in messages):
        messages = [{"role": "system", "content": system}, *messages]
    tools = [tool for name in names["tools"] for tool in _read_list(record[name], name, dict, origin)]
    return Row(origin, messages=messages, tools=tools or None)


def _joined(record: dict[str, Any], names: list[str], origin: str) -> str:
    return "\n\n".join([_text(record[name], name, origin) for name in names])


def _read_message(given: dict[str, Any], place: str, unused: dict[str, None]) -> dict[str, Any]:
    """One message, given with role and content or with from and value (ShareGPT: its function_call is tool_calls)."""
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls")
    if role is None and given.get("from") == "function_call":
        functions = _read_list(given.get("value"), "function_call", dict, place)
        role, calls = "assistant", [{"type": "function", "function": function} for function in functions]
    elif role is None and "from" in given:
        role, content = SHAREGPT_ROLES.get(str(given["from"]), given["from"]), given.get("value")
    if role not in ROLES:
        found = f"no role (from) in {', '.join(given)}" if role is None else f"unknown role: {role!r:.40}"
        raise BadRow(place, found, f"Known are {', '.join(SHAREGPT_ROLES)} and function_call (in from).")
    calls = _read_list(calls, "tool_calls", dict, place)
    read = {"role": role, "content": content if content is None and calls else _text(content, "content", place)}
    if calls:
        read["tool_calls"] = calls
    for key, inner in given.items():
        if inner in (None, [], "") or key in ("role", "content", "from", "value", "tool_calls"):
            continue
        if key == "weight" and inner in (0, 1):  # as in OpenAI's files
            read["train"] = bool(inner)
        elif key in ("function_call", "weight") or not isinstance(inner, MESSAGE_KEYS.get(key, object)):
            raise BadRow(place, f"{key} of a kind that is not read: {inner!r:.40}")
        elif key in MESSAGE_KEYS:
            read[key] = inner
        else:
            unused[f"messages.{key}"] = None
    return read


def _read_list(value: Any, name: str, kind: type, origin: str) -> list[Any]:
    """A list of objects (or of pairs), given as such or as JSON in a string, exactly as it stands; null is empty."""
    if isinstance(value, str):
        value = decode_json(value or "[]", f"{origin}: {name}", SHAPES_HINT)
    value = [] if value is None else [value] if name == "function_call" and isinstance(value, dict) else value
    is_fit = isinstance(value, list) and all(isinstance(inner, kind) for inner in value)
    if not is_fit or (kind is list and any(len(pair) != 2 for pair in value)):
        wanted = "a list of objects" if kind is dict else "a list of [question, answer] pairs"
        raise BadRow(origin, f"{name} is not {wanted}: found {value!r:.40}", SHAPES_HINT)
    depth, level = 0, [value]
    while level:
        inside = itertools.chain(*(outer.values() if isinstance(outer, dict) else outer for outer in level))
        depth, level = depth + 1, [inner for inner in inside if isinstance(inner, dict | list)]
        if depth > MOST_NESTED:
            raise BadRow(origin, f"{name}: nested too deeply (more than {MOST_NESTED} levels)")
    return value


def _text(value: Any, name: str, origin: str) -> str:
    texts = [part.get("text") for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    if texts and value == [{"type": "text", "text": str(text)} for text in texts]:
        return "".join(texts)
    if not isinstance(value, str):
        raise BadRow(origin, f"{name} is no string: found {value!r:.40}", "Write the value in quotes.")
    return value


def report_lines(macro: str, *facts: Any) -> list[str]:
    """The lines that a person reads, as a macro of report.txt has them."""
    text = Path(__file__).with_name("report.txt").read_text(encoding="utf-8")
    module = Template(text, undefined=StrictUndefined, trim_blocks=True).make_module({"n": "{:,}".format})
    return [line for line in getattr(module, macro)(*facts).split("\n") if line]
