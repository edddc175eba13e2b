"""Readers on arbitrary and damaged bytes: a DataError with file and line, or every record accounted for."""

from __future__ import annotations

import csv
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullshard.config import DataSection
from fullshard.data.sources import Account, iterate_rows
from fullshard.errors import DataError

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = (".jsonl", ".json", ".csv", ".txt")
PACKED = tuple(kind + packing for kind in KINDS for packing in (".gz", ".zst"))
ENDINGS = (*KINDS, ".parquet", *PACKED)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
KEYS = (
    "text messages role content from value tools tool_calls train weight prompt completion history instruction output"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS.split()), inner),
)


def read(path, on_bad="drop"):
    """(rows, account), or None where the file is refused; anything but a DataError with its place fails."""
    account = Account()
    data = DataSection(train="unused", on_bad=on_bad)
    try:
        rows = list(iterate_rows(str(path), data, 0, account))
    except DataError as error:
        assert re.search(rf"{re.escape(str(path))}(:\d+: | is empty)", error.message), error.message
        assert error.hint
        return None
    assert rows and all(re.fullmatch(rf"{re.escape(str(path))}:\d+", row.origin) for row in rows)
    assert len(rows) == account.used
    assert account.read == account.used + account.blank + account.bad.total() + account.dropped.total()
    for row in rows:
        row.content.encode()  # plain text through and through
        assert (row.text is None) != (row.messages is None)
    return rows, account


def valid(ending: str) -> bytes:
    from pyarrow import BufferOutputStream, CompressedOutputStream, Table, parquet

    rows = [
        {"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "ä红"}]} for i in range(9)
    ]
    kind, _, packing = ending[1:].partition(".")
    if kind == "parquet":
        sink = BufferOutputStream()
        parquet.write_table(Table.from_pylist(rows), sink)
        return sink.getvalue().to_pybytes()
    content = {
        "jsonl": "\n".join(map(json.dumps, rows)),
        "json": json.dumps(rows, indent=1),
        "csv": "question,answer\r\n" + "".join(f'"q\n{i}",ä\r\n' for i in range(9)),
        "txt": "\n\n".join(f"q {i}\nä" for i in range(9)),
    }[kind].encode()
    if packing:
        sink = BufferOutputStream()
        with CompressedOutputStream(sink, {"gz": "gzip", "zst": "zstd"}[packing]) as file:
            file.write(content)
        content = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize("ending", ENDINGS)
@QUICK
@given(content=st.binary(max_size=200), on_bad=st.sampled_from(["stop", "drop"]))
def test_arbitrary_bytes(tmp_path, ending, content, on_bad):
    path = tmp_path / f"a{ending}"
    path.write_bytes(content)
    read(path, on_bad)


@pytest.mark.parametrize("ending", ENDINGS)
@QUICK
@given(data=st.data())
def test_damaged_files(tmp_path, ending, data):
    content = bytearray(valid(ending))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "remove"])):
            case "set":
                content[place] = data.draw(st.integers(0, 255))
            case "cut":
                del content[max(1, place) :]
            case "insert":
                content[place:place] = data.draw(st.binary(min_size=1, max_size=3))
            case "remove":
                del content[place : place + 2]
        if not content:
            break
    path = tmp_path / f"a{ending}"
    path.write_bytes(bytes(content))
    read(path)


@pytest.mark.parametrize("ending", [".json", ".parquet", *PACKED])
def test_a_file_cut_at_any_byte_is_refused(tmp_path, ending):
    """Whatever ends too early, and knows it, gives not one row."""
    path, content = tmp_path / f"a{ending}", valid(ending)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert read(path) is None, length
    path.write_bytes(content)
    assert len(read(path)[0]) == 9


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".txt"])
def test_a_file_of_lines_cut_at_any_byte(tmp_path, ending):
    """What stood whole before the cut is there, unchanged; of the rest at most one row, cut (text), or counted as bad
    (JSON), or refused (CSV inside of quotes)."""
    path, content = tmp_path / f"a{ending}", valid(ending)
    path.write_bytes(content)
    whole = [row.content for row in read(path)[0]]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = read(path)
        if found is None:
            continue
        rows, account = [row.content for row in found[0]], found[1]
        assert rows[:-1] == whole[: len(rows) - 1]
        assert rows[-1] == whole[len(rows) - 1] or ending != ".jsonl"
        assert account.bad.total() <= 1


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_streams_one_after_another(tmp_path, packing):
    """As ``cat a.gz b.gz`` makes them: all rows; cut, or with something else behind: refused."""
    path = tmp_path / f"a.jsonl{packing}"
    content, more = valid(f".jsonl{packing}"), valid(f".txt{packing}")
    path.write_bytes(content + content)
    assert read(path) is not None and read(path)[1].bad.total() == 1  # the first has no line end at its end
    assert len(read(path)[0]) == 16
    for behind in (more[:-1], b"garbage", b"\0" * 9):
        path.write_bytes(content + behind)
        assert read(path) is None


@QUICK
@given(values=st.lists(JSON, min_size=1, max_size=4))
def test_any_json_value(tmp_path, values):
    """What no line is, a list holds; both readers count the same."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    (tmp_path / "a.json").write_text(json.dumps(values))
    lines, whole = read(tmp_path / "a.jsonl"), read(tmp_path / "a.json")
    assert (lines is None) == (whole is None)
    if lines:
        assert [row.content for row in lines[0]] == [row.content for row in whole[0]]
        assert lines[1].bad == whole[1].bad and lines[1].read == len(values)


RECORDS = st.lists(
    st.tuples(st.just("good"), TEXTS)
    | st.tuples(st.just("blank"), st.sampled_from(["", " ", "\t"]))
    | st.tuples(st.just("bad"), st.sampled_from(['{"text": ', "[]", "5", "null", '{"text": 1}', '{"body": "a"}', "x"]))
    | st.tuples(st.just("bad"), st.just(b'{"text": "\xe9"}')),
    min_size=1,
    max_size=20,
)


@QUICK
@given(records=RECORDS, end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans())
def test_every_line_is_a_row_or_blank_or_bad(tmp_path, records, end, bom):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": value}, ensure_ascii=False) if kind == "good" else value for kind, value in records]
    content = end.encode().join(line if isinstance(line, bytes) else line.encode() for line in [*lines, "x"])
    path.write_bytes(b"\xef\xbb\xbf" * bom + content)
    good = [(number, value) for number, (kind, value) in enumerate(records, 1) if kind == "good"]
    found = read(path)
    assert (found is None) == (not good)
    if found:
        rows, account = found
        assert [(row.origin, row.text) for row in rows] == [(f"{path}:{number}", value) for number, value in good]
        kinds = [kind for kind, _ in records]
        assert (account.blank, account.bad.total()) == (kinds.count("blank"), kinds.count("bad") + 1)


@QUICK
@given(rows=st.lists(st.tuples(TEXTS, TEXTS) | st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=8))
def test_every_csv_row_is_a_row_or_bad(tmp_path, rows):
    path = tmp_path / "a.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *rows])
    good = [list(row) for row in rows if len(row) == 2]
    found = read(path)
    assert (found is None) == (not good)
    if found:
        assert [[message["content"] for message in row.messages] for row in found[0]] == good
        assert found[1].bad.total() == len(rows) - len(good)


@QUICK
@given(rows=st.lists(st.fixed_dictionaries({"text": st.none() | TEXTS}), min_size=1, max_size=8))
def test_every_parquet_row_is_a_row_or_bad(tmp_path, rows):
    from pyarrow import Table, parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(Table.from_pylist(rows), path)
    found = read(path)
    good = [row["text"] for row in rows if row["text"] is not None]
    assert (found is None) == (not good)
    if found:
        assert [row.text for row in found[0]] == good and found[1].bad.total() == len(rows) - len(good)
