"""Reading data files into rows: JSONL, JSON and plain text, with the line of everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config import DataSection
from fullshard.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("system", "user", "assistant", "text", "messages")  # what a column may play in data.columns
KNOWN_SHAPES: tuple[dict[str, str], ...] = (
    {"messages": "messages"},
    {"prompt": "user", "completion": "assistant"},
    {"prompt": "user", "response": "assistant"},
    {"question": "user", "answer": "assistant"},
    {"instruction": "user", "output": "assistant"},
    {"text": "text"},
)
SHAPES_HINT = (
    "Name the columns in the recipe, data.columns: {question: user, answer: assistant} or {body: text}. Known by"
    " themselves: messages, prompt+completion, prompt+response, question+answer, instruction(+input)+output, text."
)


@dataclass(frozen=True)
class Row:
    """One training example: either ``messages`` (dicts with role and content) or ``text``; ``origin`` is file:line."""

    origin: str
    messages: list[dict[str, str]] | None = None
    text: str | None = None
    tools: list[Any] | None = None

    @property
    def content(self) -> str:
        """Everything the row says, as one string; equal rows have equal strings."""
        return json.dumps(self.messages or self.text, ensure_ascii=True, sort_keys=True)


@dataclass(frozen=True)
class Source:
    """The rows of one or more files and how they were understood."""

    rows: list[Row]
    shape: str  # "messages", "question+answer", "text", ...; joined by ", " where files differ
    unused_columns: tuple[str, ...]


def read_rows(paths: str | Path | list[str] | list[Path], data: DataSection) -> list[Row]:
    """All rows of the files, in order. Raises DataError with file, line and what was found."""
    return read_source(paths, data).rows


def read_source(paths: str | Path | list[str] | list[Path], data: DataSection) -> Source:
    """Like ``read_rows``, with the recognised shape and the columns that nothing uses."""
    rows: list[Row] = []
    shapes: list[str] = []
    unused: list[str] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        found, shape, left = _read_file(Path(path), data)
        rows += found
        shapes.append(shape)
        unused += left
    return Source(rows, ", ".join(dict.fromkeys(shapes)), tuple(dict.fromkeys(unused)))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a UTF-8 file as (number from 1, text without the line end). A BOM and CRLF are fine.

    Lines end at ``\\n`` only, so that U+2028 and the like inside a JSON string do not tear it. Raises DataError for a
    missing file and for bytes that are not UTF-8.
    """
    if not path.is_file():
        kind = (
            "is a folder, not a file" if path.is_dir() else "is no ordinary file" if path.exists() else "does not exist"
        )
        raise DataError(f"Data file {path} {kind}.", "Check data.train and data.eval in the recipe.")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(f"{path} is UTF-16, not UTF-8.", "Save the file as UTF-8.")
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: byte {error.start + 1} is not UTF-8 (0x{line[error.start]:02x}).",
                    "Save the file as UTF-8.",
                ) from None
            if "\0" in text:  # UTF-16 without its mark, or a hole that a crash left
                raise DataError(f"{path}:{number}: a NUL byte, so this is no UTF-8 text.", "Save the file as UTF-8.")
            yield number, text.removesuffix("\n").removesuffix("\r")


def _read_file(path: Path, data: DataSection) -> tuple[list[Row], str, list[str]]:
    """Rows, shape and unused columns of one file."""
    match path.suffix.lower():
        case ".jsonl":
            records = _read_jsonl(path)
        case ".json":
            records = _read_json(path)
        case ".txt":
            if data.columns:
                raise DataError(f"{path} is plain text and has no columns.", "Remove data.columns from the recipe.")
            rows = [_text_row(text, f"{path}:{number}", data) for number, text in _read_paragraphs(path)]
            if not rows:
                raise DataError(f"{path} holds no text.", "Paragraphs are separated by an empty line.")
            return rows, "text", []
        case suffix:
            next(read_lines(path), None)  # a missing file is said before its ending
            raise DataError(
                f"{path}: files ending in {suffix or 'nothing'!r} are not read.", "Use .jsonl, .json or .txt."
            )
    rows = []
    columns: dict[str, str] = {}
    unused: list[str] = []
    for number, record in records:
        origin = f"{path}:{number}"
        if not columns:
            columns = _recognise(record, data, origin)
            unused = [name for name in record if name not in columns and not _is_alpaca_input(name, columns)]
        rows.append(_make_row(record, columns, data, origin))
    if not rows:
        raise DataError(f"{path} is empty: no row in it.", 'One JSON object a line, for example {"text": "..."}.')
    shape = "+".join(columns) if not data.columns else ", ".join(f"{name} as {part}" for name, part in columns.items())
    return rows, shape, unused


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            record = DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, path, number, "Every line must be one whole JSON object.") from None
        yield number, _require_object(record, f"{path}:{number}")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands in it twice is refused, since all but the last value would be lost."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} stands twice in an object")
    return record


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def _not_json(error: ValueError | RecursionError, path: Path, line: int, hint: str) -> DataError:
    """The DataError for what the decoder raised: no JSON, a key twice, 5,000 digits, or nested too deeply."""
    if isinstance(error, json.JSONDecodeError):
        found = error.doc[max(0, error.pos - 20) : error.pos + 20] or "the end"
        return DataError(f"{path}:{line}: not JSON ({error.msg} at column {error.colno}): found {found!r}.", hint)
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return DataError(f"{path}:{line}: {reason}.", hint)


def _read_json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON list, each with the line on which it begins."""
    text = "\n".join(line for _, line in read_lines(path))
    place = _skip_space(text, 0)
    if place == len(text):
        return
    if text[place] != "[":
        raise DataError(
            f"{path}: a .json file must hold a list of objects; it begins with {text[place : place + 20]!r}.",
            "One object a line? Then name the file .jsonl.",
        )
    place = _skip_space(text, place + 1)
    line, counted = 1, 0
    more = text[place : place + 1] != "]"
    while more:
        line, counted = line + text.count("\n", counted, place), place
        try:
            record, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            number = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _not_json(error, path, number, "A .json file must hold one list of objects.") from None
        yield line, _require_object(record, f"{path}:{line}")
        place = _skip_space(text, place)
        if text[place : place + 1] == ",":
            place = _skip_space(text, place + 1)
        elif text[place : place + 1] == "]":
            more = False
        else:
            line = 1 + text.count("\n", 0, place)
            found = text[place : place + 20] or "the end of the file"
            raise DataError(f"{path}:{line}: expected ',' or ']', found {found!r}.", "Repair the JSON list.")
    if text[place + 1 :].strip():
        line = 1 + text.count("\n", 0, _skip_space(text, place + 1))
        raise DataError(
            f"{path}:{line}: text after the end of the list.", "A .json file must hold one list of objects."
        )


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _read_paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Paragraphs (separated by empty lines) with the line on which each begins."""
    start, lines = 0, []
    for number, line in read_lines(path):
        if line.strip():
            if not lines:
                start = number
            lines.append(line)
        elif lines:
            yield start, "\n".join(lines)
            lines = []
    if lines:
        yield start, "\n".join(lines)


def _require_object(record: Any, origin: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{origin}: found {_kind(record)}, expected an object with columns.", SHAPES_HINT)
    for name in record:
        _require_text(name, f"the column name {name!r}", origin)
    return record


def _recognise(record: dict[str, Any], data: DataSection, origin: str) -> dict[str, str]:
    """Column -> part for a file, from data.columns or from its first row."""
    if not data.columns:
        for columns in KNOWN_SHAPES:
            if all(name in record for name in columns):
                return columns
        raise DataError(f"{origin}: the columns {_names(record)} are no known shape.", SHAPES_HINT)
    parts = list(data.columns.values())
    for name, part in data.columns.items():
        if part not in PARTS:
            raise DataError(f"data.columns: {name} is {part!r}, which is none of {', '.join(PARTS)}.", SHAPES_HINT)
    if ("text" in parts or "messages" in parts) and len(parts) > 1:
        raise DataError(f"data.columns: text and messages stand alone; given are {', '.join(parts)}.", SHAPES_HINT)
    if "text" not in parts and "messages" not in parts and ("user" not in parts or "assistant" not in parts):
        raise DataError(f"data.columns needs a user and an assistant; given are {', '.join(parts)}.", SHAPES_HINT)
    return data.columns


def _is_alpaca_input(name: str, columns: dict[str, str]) -> bool:
    return name == "input" and "instruction" in columns and "output" in columns


def _make_row(record: dict[str, Any], columns: dict[str, str], data: DataSection, origin: str) -> Row:
    for name in columns:
        if name not in record:
            raise DataError(
                f"{origin}: no column {name!r}; this row has {_names(record)}.", "All rows of a file have one shape."
            )
    if record.get("tools"):
        raise DataError(f"{origin}: tools are not supported yet.", "Remove the column tools to train without them.")
    if list(columns.values()) == ["text"]:
        (name,) = columns
        return _text_row(_require_text(record[name], name, origin), origin, data)
    if list(columns.values()) == ["messages"]:
        (name,) = columns
        messages = _check_messages(record[name], name, origin)
    elif all(isinstance(record[name], list) for name in columns):  # prompt and completion as lists of messages
        messages = [message for name in columns for message in _check_messages(record[name], name, origin)]
    else:
        messages = _join_columns(record, columns, not data.columns, origin)
    if data.system is not None and all(message["role"] not in ("system", "developer") for message in messages):
        messages = [{"role": "system", "content": data.system}, *messages]
    return Row(origin, messages=messages)


def _join_columns(
    record: dict[str, Any], columns: dict[str, str], recognised: bool, origin: str
) -> list[dict[str, str]]:
    """One message a part, in the order system, user, assistant; columns of one part are joined by an empty line."""
    parts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for name, part in columns.items():
        if part == "system" and record[name] in (None, ""):
            continue
        parts[part].append(_require_text(record[name], name, origin))
    if recognised and _is_alpaca_input("input", columns) and record.get("input") not in (None, ""):
        parts["user"].append(_require_text(record["input"], "input", origin))
    return [{"role": role, "content": "\n\n".join(texts)} for role, texts in parts.items() if texts]


def _text_row(text: str, origin: str, data: DataSection) -> Row:
    if data.system is not None:
        raise DataError(f"{origin}: data.system is set, but rows of plain text have no system message.", "Remove it.")
    if data.loss_on == "last":
        raise DataError(f"{origin}: data.loss_on is last, but rows of plain text have no turns.", "Remove it.")
    return Row(origin, text=text)


def _check_messages(value: Any, name: str, origin: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else _kind(value)
        raise DataError(f"{origin}: {name} holds {found}, expected a list of messages.", SHAPES_HINT)
    messages = []
    for number, message in enumerate(value, 1):
        place = f"{origin}: {name}, message {number}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            found = f"an object with {_names(message)}" if isinstance(message, dict) else _kind(message)
            raise DataError(f"{place}: found {found}, expected role and content.", SHAPES_HINT)
        if message["role"] not in ROLES:
            raise DataError(f"{place}: role {message['role']!r} is none of {', '.join(ROLES)}.", SHAPES_HINT)
        extra = [
            key for key, inner in message.items() if key not in ("role", "content") and inner not in (None, [], "")
        ]
        if extra:
            raise DataError(f"{place}: {', '.join(extra)} is not supported yet.", "Keep only role and content.")
        messages.append({"role": message["role"], "content": _require_text(message["content"], "content", place)})
    return messages


def _require_text(value: Any, name: str, origin: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{origin}: {name} holds {_kind(value)}, expected a string.", "Write the value in quotes.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: {name} holds half a surrogate pair ({value[error.start]!r}), which is no text.",
            "Repair the row.",
        ) from None
    return value


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the string {value[:30]!r}"
        case list():
            return f"a list of {len(value)}"
    return "an object"


def _names(record: dict[str, Any]) -> str:
    return ", ".join(record) or "none"
