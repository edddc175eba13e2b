"""The reader: every shape, and every complaint with its file and line."""

from __future__ import annotations

import json
import os
import re

import pytest
from all_rows import read_source
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config import DataSection
from fullshard.data.sources import Row
from fullshard.errors import DataError


def section(**keys) -> DataSection:
    return DataSection(train="unused", **keys)


def read_rows(path, data: DataSection) -> list[Row]:
    return read_source(path, data).rows


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, content: str | bytes):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)]


@pytest.mark.parametrize(
    ("record", "messages", "shape"),
    [
        ({"messages": turns("a", "b")}, turns("a", "b"), "messages"),
        ({"prompt": "a", "completion": "b"}, turns("a", "b"), "prompt+completion"),
        ({"prompt": "a", "response": "b"}, turns("a", "b"), "prompt+response"),
        ({"answer": "b", "question": "a"}, turns("a", "b"), "question+answer"),
        ({"instruction": "a", "input": "x", "output": "b"}, turns("a\n\nx", "b"), "instruction+output"),
        ({"instruction": "a", "input": "", "output": "b"}, turns("a", "b"), "instruction+output"),
        ({"prompt": turns("a", "b")[:1], "completion": turns("a", "b")[1:]}, turns("a", "b"), "prompt+completion"),
    ],
)
def test_shapes_are_recognised(write, record, messages, shape):
    source = read_source(write("a.jsonl", json.dumps(record)), section())
    assert source.rows[0].messages == messages
    assert ", ".join(source.shapes) == shape
    assert tuple(source.unused) == ()


def test_columns_of_the_recipe(write):
    path = write("a.jsonl", '{"q": "a", "hint": "s", "a": "b", "id": 4}\n')
    source = read_source(path, section(columns={"q": "user", "a": "assistant", "hint": "system"}))
    assert source.rows[0].messages == [{"role": "system", "content": "s"}, *turns("a", "b")]
    assert tuple(source.unused) == ("id",)
    assert read_rows(write("b.jsonl", '{"body": "a"}'), section(columns={"body": "text"}))[0].text == "a"


def test_system_goes_in_front_of_rows_without_one(write):
    own = [{"role": "system", "content": "own"}, *turns("a", "b")]
    path = write("a.jsonl", json.dumps({"messages": turns("a", "b")}) + "\n" + json.dumps({"messages": own}))
    first, second = read_rows(path, section(system="short"))
    assert first.messages == [{"role": "system", "content": "short"}, *turns("a", "b")]
    assert second.messages == own


def test_bom_crlf_blank_lines_and_unicode_line_separators(write):
    path = write("a.jsonl", b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\r\n{"text": "c"}\r\n')
    rows = read_rows(path, section())
    assert [row.text for row in rows] == ["a\u2028b", "c"]
    assert rows[1].origin == f"{path}:3"


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]))),
    st.sampled_from(["\n", "\r\n"]),
)
def test_lines_come_back_as_they_were(tmp_path_factory, lines, end):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(["first", *lines, "last"]).encode())
    paragraphs = "\n".join(["first", *lines, "last"])
    rows = read_rows(path, section())
    assert "\n".join(row.text for row in rows).split("\n") == [line for line in paragraphs.split("\n") if line.strip()]


def test_json_lists_keep_their_line_numbers(write):
    path = write("a.json", '[\n {"text": "a"},\n\n {"text":\n "b"}, {"text": "c"}\n]\n')
    assert [row.origin for row in read_rows(path, section())] == [f"{path}:2", f"{path}:4", f"{path}:5"]


def test_plain_text_is_cut_at_empty_lines(write):
    path = write("a.txt", "one\ntwo\n \n\nthree\n")
    assert [(row.text, row.origin) for row in read_rows(path, section())] == [
        ("one\ntwo", f"{path}:1"),
        ("three", f"{path}:5"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", "\n \n", "a.jsonl is empty"),
        ("a.json", "[]", "a.json is empty"),
        ("a.json", " [ ] ", "a.json is empty"),
        ("a.json", " ", "a.json is empty"),
        ("a.txt", "\n\n", "a.txt is empty"),
        ("a.csv", "text\n", "a.csv is empty"),
        ("a.tsv", "a,b", "files ending in '.tsv' are not read"),
        ("a.parquet.gz", "a", "files ending in '.parquet.gz' are not read"),
        ("a", "a,b", "files ending in 'nothing' are not read"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"', "a.jsonl:2: not JSON (Expecting"),
        ("a.jsonl", '{"text": "a"}\n[1, 2]', "a.jsonl:2: no object with columns: found [1, 2]"),
        ("a.jsonl", '{"text": "a"}\nnull', "a.jsonl:2: no object with columns: found None"),
        ("a.jsonl", '{"text": "a"}\n"b"', "a.jsonl:2: no object with columns: found 'b'"),
        ("a.json", '[{"text": "a"}, null]', "a.json:1: no object with columns: found None"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}', "a.jsonl:2: no column 'text': there is body"),
        ("a.jsonl", '{"text": 5}', "a.jsonl:1: text is no string: found 5"),
        ("a.jsonl", '{"question": "a", "answer": ["b"]}', "a.jsonl:1: answer is no string: found ['b']"),
        ("a.jsonl", '{"text": null}', "a.jsonl:1: text is no string: found None"),
        ("a.jsonl", '{"text": "\\ud800"}', "a.jsonl:1: half a surrogate pair"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl:2: not UTF-8 (byte 0xff, character 11)"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', "a.json:2: not UTF-8 (byte 0xff, character 11)"),
        ("a.csv", b'text\n"a\nb"\n\xff\n', "a.csv:4: not UTF-8"),
        ("a.csv", b"te\xffxt\na\n", "a.csv:1: not UTF-8"),
        ("a.txt", b"a\n\n\xff\n", "a.txt:3: not UTF-8"),
        ("a.jsonl", b"\xff\xfe{\x00", "a.jsonl:1: not UTF-8"),
        ("a.jsonl", '{"x": "a", "y": "b"}', "a.jsonl:1: unknown columns: x, y are no known shape"),
        ("a.jsonl", '{"messages": []}', "a.jsonl:1: no messages: found []"),
        ("a.jsonl", '{"messages": "red"}', "a.jsonl:1: messages: not JSON"),
        ("a.jsonl", '{"messages": [5]}', "a.jsonl:1: messages is not a list of objects: found [5]"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl:1: message 1: content is no string: found None"),
        ("a.jsonl", '{"messages": [{"body": "a"}]}', "a.jsonl:1: message 1: no role (from) in body"),
        ("a.jsonl", '{"messages": [{"role": "bot", "content": "a"}]}', "message 1: unknown role: 'bot'"),
        ("a.jsonl", '{"messages": [{"role": ["user"], "content": "a"}]}', "unknown role: ['user']"),
        ("a.jsonl", '{"conversations": [{"from": "bot", "value": "a"}]}', "unknown role: 'bot'"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}',
            "tool_calls is not a list of",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a", "train": "no"}]}',
            "train of a kind that is not read",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a", "weight": 3}]}',
            "weight of a kind that is not read",
        ),
        ("a.jsonl", '{"prompt": "a", "completion": "b", "tools": {"name": "f"}}', "tools is not a list of objects"),
        (
            "a.jsonl",
            '{"instruction": "a", "output": "b", "history": [["x"]]}',
            "not a list of [question, answer] pairs",
        ),
        ("a.json", '{"text": "a"}\n{"text": "b"}', "a.json:1: expected [ or [], found '{"),
        ("a.json", '[{"text": "a"},\n{"text": }]', "a.json:2: not JSON"),
        ("a.json", '[{"text": "a"}\n{"text": "b"}]', "a.json:2: expected , or ]"),
        ("a.json", '[{"text": "a"},', "a.json:1: not JSON"),
        ("a.json", '[{"text": "a"}', "a.json:1: expected , or ], found 'the end'"),
        ("a.json", '[{"text": "a"}] x', "a.json:1: expected the end, found 'x'"),
        ("a.csv", "text,id\na,1\nb\n", "a.csv:3: wrong number of fields: 1, but the header names 2 columns"),
        ("a.csv", 'text\na\n"b\nc', "a.csv:3: not CSV (unexpected end of data)"),
        ("a.csv", "text,text\na,b\n", "a.csv:1: two columns have one name"),
        ("a.parquet", "PAR1", "a.parquet:1: cannot be read"),
        ("a.jsonl.gz", "red", "a.jsonl.gz:1: cannot be read"),
        ("a.jsonl.zst", "red", "a.jsonl.zst:1: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(write, name, content, expected):
    with pytest.raises(DataError) as caught:
        read_rows(write(name, content), section())
    assert expected in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"columns": {"q": "human"}}, "gives q as human, but what is needed"),
        ({"columns": {"q": "user"}}, "gives q as user, but"),
        ({"columns": {"q": "text", "a": "assistant"}}, "gives q as text, a as assistant, but"),
        ({"columns": {"q": "text"}, "system": "s"}, "data.system is set"),
        ({"columns": {"q": "text"}, "loss_on": "last"}, "loss_on is last"),
    ],
)
def test_settings_that_cannot_be_honoured(write, keys, expected):
    with pytest.raises(DataError, match=expected):
        read_rows(write("a.jsonl", '{"q": "a", "a": "b"}'), section(**keys))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        read_rows(tmp_path / "none.jsonl", section())
    with pytest.raises(DataError, match=r"holds no data of the split 'train'; there is none"):
        read_rows(tmp_path, section())


ROW = '{"question": "red", "answer": "blue"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "red", "question": "sea", "answer": "b"}', "the key 'question' stands twice"),
        ("a.json", '[{"messages": [{"role": "user", "role": "assistant"}]}]', "the key 'role' stands twice"),
        ("a.json", '[{"text": ' + "[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"text": ' + "[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"text": "red", "x": ' + "1" * 5000 + "}", "4300 digits"),
        ("a.json", '[{"text": "red", "x": ' + "1" * 5000 + "}]", "4300 digits"),
        ("a.jsonl", '{"text": "red", "\\ud800": 1}', "half a surrogate pair"),
        ("a.json", f"[{ROW},]", "not JSON (Expecting value): found ',]'"),
        ("a.jsonl", f"{ROW}\r{ROW}", "not JSON (Extra data)"),
        ("a.txt", "red\0blue", "a NUL byte"),
    ],
)
def test_what_would_be_read_otherwise_than_written_is_refused(write, name, content, message):
    path = write(name, content)
    with pytest.raises(DataError, match=re.escape(f"{path}:1: ")) as caught:
        read_rows(path, section())
    assert message in caught.value.message


def test_utf_16_without_its_mark_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("red blue".encode("utf-16-le"))
    with pytest.raises(DataError, match="NUL byte"):
        read_rows(path, section())


def test_a_pipe_is_refused_and_never_waited_for(tmp_path):
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    with pytest.raises(DataError, match="is no ordinary file"):
        read_rows(path, section())
