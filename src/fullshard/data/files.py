"""Records of files, folders and data set ids, with the line (Parquet, data sets: row) at which each begins. Where the
borders between rows are lost (JSON list, CSV quotes, compressed, Parquet), reading stops; all else is a BadRow."""

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from fullshard.errors import Blame, DataError, read_table, refusal, without_secrets

BLOCK, BATCH_ROWS = 1 << 20, 256  # characters of a JSON list, bytes of Parquet; Parquet rows in memory
DATA_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))??(?::([\w.-]+))?")
NOT_TEXT, HALF = re.compile("[\0\udc80-\udcff]"), re.compile("[\ud800-\udfff]")
MARK = re.compile(r"[ \t\r\n]*(\[[ \t\r\n]*\]|[\[\],]?)[ \t\r\n]*")
FACTS = read_table("data/files.yaml")
WAYS, ENDINGS, COMPRESSED = FACTS["other_ways"], FACTS["endings"], FACTS["compressed"]
Record = tuple[int, Any]  # number from 1; what stands there, ... for a blank line, or a BadRow
Files = Iterator[tuple[str, Iterator[Record], Path | str]]  # label, records, the place (or fingerprint) of the content


class BadRow(DataError):
    """One row that cannot be used, while those after it can. Its ``reason`` ends before the first colon or bracket."""

    def __init__(self, origin: str, trouble: str, hint: str = "Repair the row, or set data.on_bad=drop.") -> None:
        super().__init__(f"{origin}: {trouble}.", hint)
        self.reason = re.split(r" ?[:(]", trouble)[0]


def open_records(name: str, source: str) -> Files:
    """The files of ``name``: a file, folder, FOLDER:SPLIT (local paths win), data set id of ``source``. DataError."""
    path, (whole, _, split), found = Path(name), name.rpartition(":"), DATA_ID.fullmatch(name)
    if path.is_dir() or (whole and not path.exists() and Path(whole).is_dir()):
        yield from _open_folder(path, "") if path.is_dir() else _open_folder(Path(whole), split)
    elif path.exists() or not found or _format_of(found[1]):
        yield name, read_file(path), path
    else:
        yield from _open_id(found[1], found[2], found[3], source)


def read_file(path: Path) -> Iterator[Record]:
    """The records of one file, by its ending. Raises DataError with file and line for what no row can be blamed for."""
    if not path.is_file():
        raise refusal("no_file", path=path, problem="is no ordinary file" if path.exists() else "does not exist")
    if (read := _format_of(path.name)) is None:
        raise DataError(f"{path}: files ending in {''.join(path.suffixes[-2:]) or 'nothing'!r} are not read.", ENDINGS)
    yield from _guarded(read(path), path)


def _guarded(records: Iterator[Record], place: Path | str) -> Iterator[Record]:
    """The records; whatever their reader raises becomes a DataError that names the row behind which it came."""
    with (blame := Blame(DataError, f"{place}:1: cannot be read", "It is damaged, or not what its ending says.")):
        for record in records:
            blame.message = f"{place}:{record[0]}: what follows this row cannot be read"
            yield record


def _open(path: Path) -> io.TextIOWrapper:
    """A text whose lines end at a line feed only; a byte that is not UTF-8 comes as a lone surrogate."""
    if (ending := path.suffix.lower()) not in COMPRESSED:
        return open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    import pyarrow

    raw = io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSED[ending]))
    return io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", "\n")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands in it twice is refused, since all but the last value would be lost."""
    if len(record := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} stands twice in an object")
    return record


def _no_text(text: str) -> re.Match[str] | None:
    return None if text.isascii() and "\0" not in text else NOT_TEXT.search(text)


def decode_json(text: str, origin: str, hint: str = "Every line must be one whole JSON object.") -> Any:
    """The value of a JSON text. Raises BadRow."""
    try:
        return _checked(None if _no_text(text) else DECODER.decode(text), text, origin)
    except (ValueError, RecursionError) as error:
        raise BadRow(origin, _json_trouble(error), hint) from None


def _json_trouble(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg}): found {error.doc[max(0, error.pos - 20) : error.pos + 20] or 'the end'!r}"
    return f"not JSON ({'nested too deeply' if isinstance(error, RecursionError) else error})"


def _checked(value: Any, text: str, origin: str) -> Any:
    """``value``, where the text that it was made of is UTF-8 without NUL and half surrogate pairs. Raises BadRow."""
    if found := _no_text(text):  # NUL: UTF-16 without its mark, or a hole that a crash left
        byte = f"not UTF-8 (byte 0x{ord(found[0]) & 0xFF:02x}, character {found.start() + 1})"
        raise BadRow(origin, byte if ord(found[0]) else "a NUL byte (this is no UTF-8 text)", "Save it as UTF-8.")
    if re.search(r"\\u[dD]", text) and (half := HALF.search(json.dumps(value, ensure_ascii=False))):
        raise BadRow(origin, f"half a surrogate pair: {half[0]!r} is no text")
    return value


def _read_jsonl(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, decode_json(line, f"{path}:{number}") if line.strip() else ...
            except BadRow as error:
                yield number, error


def _read_json(path: Path) -> Iterator[Record]:
    """The objects of a JSON list, each with the line on which it begins. The file is read in blocks."""
    text, place, line, marks, block = "", 0, 1, ("[", "[]"), " "
    with _open(path) as file:
        while block:
            block = file.read(BLOCK)
            text, place = text[place:] + block, 0
            while True:
                mark = MARK.match(text, place)
                start, number, token = mark.end(), line + text.count("\n", place, mark.end()), "".join(mark[1].split())
                if start == len(text) and (block or not (token or "," in marks)):
                    break
                if token not in marks:
                    wanted, found = " or ".join(marks) or "the end", text[mark.start(1) :][:20] or "the end"
                    raise refusal("no_list", place=f"{path}:{number}", wanted=wanted, found=found)
                if token.endswith("]"):
                    place, line, marks = start, number, ()
                    continue
                try:
                    value, end = DECODER.raw_decode(text, start)
                    _checked(value, text[start:end], f"{path}:{number}")
                except BadRow as error:
                    value = error
                except (ValueError, RecursionError) as error:
                    at = getattr(error, "pos", -1)  # JSONDecodeError has it; the block may have cut the value off
                    if block and (str(error).startswith("Unterminated") or at > len(text.rstrip()) - 16):
                        break
                    number += text.count("\n", start, max(at, start))
                    raise DataError(f"{path}:{number}: {_json_trouble(error)}.", "Repair the list.") from None
                if end == len(text) and block:  # a number may go on in the next block
                    break
                yield number, value
                place, line, marks = end, number + text.count("\n", start, end), (",", "]")


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # its default is 128 KiB a field
    with _open(path) as file:
        reader, start, names = csv.reader(file, strict=True), 1, []
        try:
            for fields in reader:
                bad = _no_text("".join(fields)) and "not UTF-8, or a NUL byte"
                if not fields:
                    yield start, ...
                elif not names and (bad or len(set(fields)) < len(fields)):
                    raise DataError(f"{path}:{start}: {bad or 'two columns have one name'}.", "Repair the header.")
                elif not names:
                    names = fields
                elif bad or len(fields) != len(names):
                    bad = bad or f"wrong number of fields: {len(fields)}, but the header names {len(names)} columns"
                    yield start, BadRow(f"{path}:{start}", bad)
                else:
                    yield start, dict(zip(names, fields, strict=True))
                start = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}:{start}: not CSV ({error}).", "Repair the quotes of this row.") from None


def _read_text(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        for is_text, numbered in itertools.groupby(enumerate(file, 1), lambda each: bool(each[1].strip())):
            (start, first), *others = numbered
            if is_text:
                text = "".join([first, *(line for _, line in others)]).replace("\r\n", "\n").removesuffix("\n")
                yield start, BadRow(f"{path}:{start}", "not UTF-8, or a NUL byte") if _no_text(text) else {"text": text}


def _read_parquet(path: Path) -> Iterator[Record]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=BLOCK) as file:
        if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
            raise ValueError("two columns have one name")
        yield from _number(row for batch in file.iter_batches(BATCH_ROWS) for row in batch.to_pylist())


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)
TEXTS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".txt": _read_text}
FORMATS = {end + pack: read for end, read in TEXTS.items() for pack in ("", *COMPRESSED)} | {".parquet": _read_parquet}


def _format_of(name: str) -> Callable[[Path], Iterator[Record]] | None:
    endings = Path(name.lower()).suffixes
    return FORMATS.get("".join(endings[-2:])) or FORMATS.get("".join(endings[-1:]))


def _number(rows: Any) -> Iterator[Record]:
    """Rows of columns, numbered. Nested keys that are null are left out: columns merge the keys of all rows."""
    for number, row in enumerate(rows, 1):
        yield number, {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _open_folder(folder: Path, split: str) -> Files:
    """A data set as ``save_to_disk`` writes it, or all files of known formats in and below a folder."""
    splits: dict[str, Any] = {}
    if is_saved := any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        import datasets

        with Blame(DataError, f"{folder} is no whole data set", "Save it again."):
            found = datasets.load_from_disk(str(folder))
        splits = found if isinstance(found, dict) else {str(found.split or "train"): found}
    for path in () if is_saved else sorted(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        if path.is_file() and _format_of(path.name) and not re.search(FACTS["no_data"], inside):
            word = re.search(FACTS["split_word"], inside, re.IGNORECASE)
            splits.setdefault(word[1].lower() if word else "train", []).append(path)
    name = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if name not in splits:
        raise refusal("no_split", folder=folder, name=name, known=", ".join(splits) or "none", endings=ENDINGS)
    if is_saved:
        yield str(folder), _guarded(_number(splits[name]), folder), folder
    else:
        yield from ((str(path), read_file(path), path) for path in splits[name])


def _open_id(data_id: str, subset: str | None, split: str | None, source: str) -> Files:
    """A data set of a hub, from its cache where it is there (dataset_snapshot_download as in modelscope 1.40.2)."""
    from huggingface_hub import constants

    hub = "ModelScope" if source == "modelscope" else without_secrets(constants.ENDPOINT)
    with Blame(DataError, f"{data_id} is no file or folder here, and cannot be fetched from {hub}", WAYS):
        if source == "huggingface":
            import datasets

            rows = datasets.load_dataset(data_id, subset, split=split or "train")
            label = ":".join(filter(None, (data_id, subset, split or "train")))
            return iter([(label, _guarded(_number(rows), label), str(rows._fingerprint))])  # of commit, files, split
        from modelscope.hub.snapshot_download import dataset_snapshot_download

        return _open_folder(Path(dataset_snapshot_download(data_id), subset or ""), split or "")
