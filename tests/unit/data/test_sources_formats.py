"""Every file format, folder and shape with its right values; tools kept exactly; weights; bad rows counted."""

from __future__ import annotations

import io
import json

import pytest
from all_rows import read_source

from fullshard.config import DataFile, DataSection, config_from_dict
from fullshard.data import files
from fullshard.data.sources import Account, iterate_rows, report_lines
from fullshard.errors import DataError

ROWS = [
    {"question": "红 red", "answer": "b\nc"},
    {"question": 'q "x", y', "answer": " "},
    {"question": "", "answer": "z"},
]
WANTED = [
    [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in ROWS
]
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "unit": None, "days": 2}}}
SUM = {"id": "c2", "type": "function", "function": {"name": "sum", "arguments": '{"b": 1.0, "a": [1, 2]}'}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
    },
    {"name": "sum", "parameters": {"b": 1.0, "a": True}},
]
CALLS = [
    {"role": "user", "content": "sun"},
    {"role": "assistant", "content": None, "tool_calls": [WEATHER, SUM], "reasoning_content": "hm"},
    {"role": "tool", "content": "21", "tool_call_id": "c2", "name": "sum"},
    {"role": "assistant", "content": "warm", "train": False},
]


def section(**keys) -> DataSection:
    return DataSection(train="unused", **keys)


def as_jsonl(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()


def write_csv(path, rows, names):
    import csv

    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def pack(path, content: bytes):
    import pyarrow

    with pyarrow.output_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}[path.suffix]) as file:
        file.write(content)


def save(path, rows):
    """Write ``rows`` in the format of the name."""
    name = path.name
    if ".parquet" in name:
        write_parquet(path, rows)
        return
    plain = path.with_name("plain")
    if ".csv" in name:
        write_csv(plain, rows, list(rows[0]))
    elif ".jsonl" in name:
        plain.write_bytes(b"\xef\xbb\xbf" + as_jsonl(rows))
    else:
        plain.write_text("\ufeff" + json.dumps(rows, indent=1 if "wide" in name else None), encoding="utf-8")
    if path.suffix in files.COMPRESSED:
        pack(path, plain.read_bytes())
        plain.unlink()
    else:
        plain.rename(path)


NAMES = ["a.jsonl", "a.json", "wide.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "A.JSON.GZ", "a.csv.zst"]


@pytest.mark.parametrize("name", NAMES)
def test_a_format_gives_what_was_written(tmp_path, name):
    path = tmp_path / name.lower()
    save(path, ROWS)
    path = path.rename(tmp_path / name)
    source = read_source(str(path), section())
    assert [row.messages for row in source.rows] == WANTED
    assert (", ".join(source.shapes), tuple(source.unused)) == ("question+answer", ())
    lines = {".csv": [2, 4, 5], ".json": [1, 1, 1]}
    expected = (
        [2, 6, 10] if "wide" in name else next((lines[end] for end in lines if end in name.lower() + "."), [1, 2, 3])
    )
    if ".jsonl" in name:
        expected = [1, 2, 3]
    assert [row.origin for row in source.rows] == [f"{path}:{line}" for line in expected]
    assert (source.read, source.used, source.blank) == (3, 3, 0)


def test_plain_text_packed(tmp_path):
    pack(tmp_path / "a.txt.gz", "\ufeffone\r\ntwo\r\n\r\nthree".encode())
    rows = read_source(str(tmp_path / "a.txt.gz"), section()).rows
    assert [(row.text, row.origin[-2:]) for row in rows] == [("one\ntwo", ":1"), ("three", ":4")]


def test_a_cut_stream_is_never_half_read(tmp_path):
    content = as_jsonl([{"text": f"{i} {i * i}"} for i in range(3000)])
    for ending in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{ending}"
        pack(path, content)
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(DataError, match=r"a\.jsonl\.\w+:\d+: (what follows this row )?cannot be read: Trunc"):
            read_source(str(path), section(on_bad="drop"))


def test_two_different_tool_calls_stay_exactly_as_they_are(tmp_path):
    record = {"messages": CALLS, "tools": TOOLS}
    save(tmp_path / "a.jsonl", [record, {"messages": CALLS, "tools": json.dumps(TOOLS)}])
    first, second = read_source(str(tmp_path / "a.jsonl"), section()).rows
    assert json.dumps(first.messages) == json.dumps(CALLS)  # types and the order of keys, too
    assert json.dumps(first.tools) == json.dumps(second.tools) == json.dumps(TOOLS)
    assert first.content == second.content
    for changed in ({**record, "tools": TOOLS[:1]}, {**record, "messages": [*CALLS[:3], {**CALLS[3], "train": True}]}):
        save(tmp_path / "b.jsonl", [changed])
        assert read_source(str(tmp_path / "b.jsonl"), section()).rows[0].content != first.content


def test_columns_do_not_add_keys_to_tool_calls(tmp_path):
    whole = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {"y": "2"}}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": whole}]
    texts = [dict(messages[0]), {**messages[1], "tool_calls": json.dumps(CALLS[1]["tool_calls"])}]
    save(tmp_path / "a.parquet", [{"messages": messages, "tools": None}])
    save(tmp_path / "b.parquet", [{"messages": texts, "tools": json.dumps(TOOLS)}])
    save(tmp_path / "c.csv", [{"messages": json.dumps(CALLS), "tools": json.dumps(TOOLS)}])
    rows = read_source([str(tmp_path / name) for name in ("a.parquet", "b.parquet", "c.csv")], section()).rows
    assert rows[0].messages == messages and rows[0].tools is None
    assert json.dumps(rows[1].messages[1]["tool_calls"]) == json.dumps(CALLS[1]["tool_calls"])  # with its null
    assert rows[2].messages == CALLS and json.dumps(rows[1].tools) == json.dumps(rows[2].tools) == json.dumps(TOOLS)


CALL = {"name": "weather", "arguments": {"city": "Rome"}}
WRAPPED = {"type": "function", "function": CALL}
SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": json.dumps(CALL), "weight": 0},
    {"from": "observation", "value": "21"},
    {"from": "gpt", "value": "a", "id": 7, "weight": 1},
]


def turns(*pairs: str) -> list[dict]:
    return [{"role": role, "content": text} for role, text in (pair.split("=") for pair in pairs)]


@pytest.mark.parametrize(
    ("record", "messages", "shape"),
    [
        (
            {"conversations": SHAREGPT, "system": "not taken"},
            [
                *turns("system=s", "user=q"),
                {"role": "assistant", "content": None, "tool_calls": [WRAPPED], "train": False},
                *turns("tool=21"),
                {"role": "assistant", "content": "a", "train": True},
            ],
            "sharegpt",
        ),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, turns("system=s", "user=q"), "sharegpt"),
        ({"conversations": turns("user=q", "assistant=a")}, turns("user=q", "assistant=a"), "sharegpt"),
        ({"messages": turns("developer=d", "user=q"), "system": ""}, turns("developer=d", "user=q"), "messages"),
        (
            {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["q", "a"], ["r", "b"]]},
            turns("system=s", "user=q", "assistant=a", "user=r", "assistant=b", "user=i\n\nx", "assistant=o"),
            "instruction+output",
        ),
        (
            {"instruction": "i", "input": None, "output": "o", "history": None},
            turns("user=i", "assistant=o"),
            "instruction+output",
        ),
        ({"prompt": turns("system=s", "user=q"), "completion": turns("assistant=a")},
         turns("system=s", "user=q", "assistant=a"), "prompt+completion"),
    ],
)  # fmt: skip
def test_shapes(tmp_path, record, messages, shape):
    save(tmp_path / "a.jsonl", [record])
    source = read_source(str(tmp_path / "a.jsonl"), section())
    assert source.rows[0].messages == messages
    assert json.dumps(source.rows[0].messages[0]) == json.dumps(messages[0])
    assert ", ".join(source.shapes) == shape


def test_what_is_not_used_is_said(tmp_path):
    save(tmp_path / "a.jsonl", [{"conversations": SHAREGPT, "id": 1}, {"conversations": SHAREGPT, "source": "x"}])
    source = read_source(str(tmp_path / "a.jsonl"), section())
    assert tuple(source.unused) == ("id", "messages.id", "source")


def test_a_shape_can_be_stated(tmp_path):
    record = {"text": "t", "instruction": "i", "output": "o", "messages": turns("user=q")}
    path = tmp_path / "a.jsonl"
    save(path, [record])
    assert read_source(str(path), section()).rows[0].messages == turns("user=q")
    assert read_source(str(path), section(shape="alpaca")).rows[0].messages == turns("user=i", "assistant=o")
    assert read_source(str(path), section(shape="text")).rows[0].text == "t"
    with pytest.raises(DataError, match=r"a\.jsonl:1: unknown columns: .* are not those of data\.shape=sharegpt"):
        read_source(str(path), section(shape="sharegpt"))
    (tmp_path / "b.txt").write_text("one")
    with pytest.raises(DataError, match=r"b\.txt:1: .*data\.shape=alpaca"):
        read_source(str(tmp_path / "b.txt"), section(shape="alpaca"))


def test_columns_of_tools_and_messages(tmp_path):
    save(tmp_path / "a.jsonl", [{"dialog": SHAREGPT[1:2], "functions": TOOLS, "note": "s"}, {"dialog": SHAREGPT[1:2]}])
    data = section(columns={"dialog": "messages", "functions": "tools", "note": "system"})
    first, second = read_source(str(tmp_path / "a.jsonl"), data).rows
    assert (first.messages, first.tools) == (turns("system=s", "user=q"), TOOLS)
    assert (second.messages, second.tools) == (turns("user=q"), None)


def numbered(path, count: int):
    save(path, [{"text": f"{path.stem} {i}"} for i in range(count)])
    return str(path)


@pytest.mark.parametrize(("weight", "copies"), [(1, 0), (3, 2), (0.25, 0), (1.5, 0), (0.001, 0), (0.333, 0)])
def test_weights(tmp_path, weight, copies):
    mixed = [DataFile(path=numbered(tmp_path / "a.jsonl", 260), weight=weight), numbered(tmp_path / "b.jsonl", 3)]
    account = Account()
    rows = list(iterate_rows(mixed, section(), 7, account))
    seen = [row for row in rows if row.text.startswith("a")]
    assert len(seen) == round(260 * weight)
    times = [sum(row.text == f"a {i}" for row in seen) for i in range(260)]
    assert set(times) <= {int(weight), int(weight) + (weight % 1 > 0)}
    assert [row.text for row in rows[len(seen) :]] == ["b 0", "b 1", "b 2"]
    by_copy = [row.copy for row in seen if row.text == seen[0].text]
    assert by_copy == list(range(len(by_copy)))
    assert account.read == 263 == account.used + sum(account.dropped.values())
    assert account.used + account.copies == len(rows)
    assert account.copies == (copies * 260 if weight != 1.5 else 130)
    again = [row.text for row in iterate_rows(mixed, section(), 7)]
    other = [row.text for row in iterate_rows(mixed, section(), 8)]
    assert again == [row.text for row in rows]
    assert (other == again) == (weight in (1, 3) or not seen)


def test_weights_in_a_recipe(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 2)
    values = {"model": {"path": "m"}, "output": "o", "data": {"train": [{"path": path, "weight": 2}, "b.parquet"]}}
    config = config_from_dict(values)
    assert config.train_files == [DataFile(path=path, weight=2), DataFile(path="b.parquet")]
    assert config_from_dict(config.model_dump(mode="json")) == config
    for wrong, message in ((0, "greater than 0"), ("x", "valid number")):
        values["data"]["train"][0]["weight"] = wrong
        with pytest.raises(Exception, match=rf"data\.train\.0\.weight: .*{message}"):
            config_from_dict(values)


BAD = [
    (b'{"text": "a"}', None),
    (b"", "blank"),
    (b'{"text": "b"', "not JSON"),
    (b"[1]", "no object with columns"),
    (b'{"text": 4}', "text is no string"),
    (b'{"body": "x"}', "no column 'text'"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\\udc00"}', "half a surrogate pair"),
    (b'{"text": "c"', "not JSON"),
    (b'{"text": "d"}', None),
]


def test_bad_rows_stop_or_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in BAD))
    with pytest.raises(DataError, match=r"a\.jsonl:3: not JSON"):
        read_source(str(path), section())
    source = read_source(str(path), section(on_bad="drop"))
    account = source
    assert [row.text for row in source.rows] == ["a", "d"]
    assert (account.read, account.used, account.blank) == (10, 2, 1)
    reasons = [reason for _, reason in BAD if reason and reason != "blank"]
    assert dict(account.bad) == {reason: reasons.count(reason) for reason in reasons}
    assert account.read == account.used + account.blank + account.bad.total() + account.dropped.total()
    assert account.places["not JSON"] == [f"{path}:3", f"{path}:9"]
    report = "\n".join(report_lines("left_out", "train", account))
    assert "train: 10 records read = 2 used + 0 dropped + 7 bad + 1 blank" in report
    assert f"train: 2 left out: not JSON ({path}:3, {path}:9)" in report


def test_a_file_of_bad_rows_only_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"y": 2}')
    with pytest.raises(DataError, match=r"a\.jsonl: no row can be used; the first: .*a\.jsonl:1: unknown columns: x"):
        read_source(str(tmp_path / "a.jsonl"), section(on_bad="drop"))


def test_bad_rows_of_csv_and_parquet(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,id\n"a\nb",1\nc\n\n"d""e",2\n\xff,3\n')
    source = read_source(str(tmp_path / "a.csv"), section(on_bad="drop"))
    assert [(row.text, row.origin[-2:]) for row in source.rows] == [("a\nb", ":2"), ('d"e', ":6")]
    assert dict(source.bad) == {"wrong number of fields": 1, "not UTF-8, or a NUL byte": 1}
    assert (source.read, source.blank, tuple(source.unused)) == (5, 1, ("id",))
    save(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}, {"text": "c"}])
    source = read_source(str(tmp_path / "a.parquet"), section(on_bad="drop"))
    assert source.places == {"text is no string": [f"{tmp_path}/a.parquet:2"]}


def test_long_fields_and_objects_over_several_blocks(tmp_path, monkeypatch):
    rows = [{"text": "x" * 200_000}, {"text": "红" * 70_000}, {"text": "y", "n": 12345678}, {"text": "z"}]
    for name in ("a.json", "wide.json", "a.csv", "a.jsonl"):
        for block in (1 << 20, 7, 1000):
            if block == 7 and "json" in name:
                rows = [{"text": row["text"][:40], "n": row.get("n", 1)} for row in rows]
            rows = [{"n": 1, **row} for row in rows]
            monkeypatch.setattr(files, "BLOCK", block)
            save(tmp_path / name, rows)
            assert [row.text for row in read_source(str(tmp_path / name), section()).rows] == [r["text"] for r in rows]


class Recorded(io.StringIO):
    """A text that knows how much of it was read."""

    taken = 0

    def read(self, size=-1):
        self.taken += size
        return super().read(size)


def test_a_fault_early_in_a_list_is_found_early(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 64)
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n{"text" "b"},\n' + '{"text": "c"},\n' * 1000 + '{"text": "d"}]')
    text = Recorded(path.read_text())
    monkeypatch.setattr(files, "_open", lambda path: text)
    with pytest.raises(DataError, match=r"a\.json:2: not JSON"):
        list(files.read_file(path))
    assert text.taken < 300


def test_a_number_over_two_blocks_is_one_bad_row(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('[{"text": "a"}, 1234567890123, {"text": "b"}]')
    for block in range(1, 20):
        monkeypatch.setattr(files, "BLOCK", block)
        source = read_source(str(tmp_path / "a.json"), section(on_bad="drop"))
        assert ([row.text for row in source.rows], source.bad.total()) == (["a", "b"], 1)


def test_folder_of_files(tmp_path):
    (tmp_path / "more" / ".cache").mkdir(parents=True)
    for name in ("train-00001.jsonl", "train-00000.csv", "more/train.parquet", "test.jsonl", "more/dev.json"):
        numbered(tmp_path / name, 2)
    for name in (".hidden.jsonl", "more/.cache/x.jsonl", "dataset_infos.json", "README.md", "a.bin"):
        (tmp_path / name).write_text("no rows")
    read = [row.text for row in read_source(str(tmp_path), section()).rows]
    assert read == ["train 0", "train 1", "train-00000 0", "train-00000 1", "train-00001 0", "train-00001 1"]
    assert [row.text for row in read_source(f"{tmp_path}:test", section()).rows] == ["test 0", "test 1"]
    with pytest.raises(DataError, match="no data of the split 'eval'; there is dev, train, test"):
        read_source(f"{tmp_path}:eval", section())


def test_folder_without_split_names(tmp_path):
    numbered(tmp_path / "b.jsonl", 1)
    numbered(tmp_path / "a.jsonl", 1)
    assert [row.text for row in read_source(str(tmp_path), section()).rows] == ["a 0", "b 0"]


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "two")
    for name, wanted in (("one", WANTED), ("two", WANTED), ("two:test", WANTED[1:2])):
        source = read_source(f"{tmp_path}/{name}", section())
        assert [row.messages for row in source.rows] == wanted
    assert source.rows[0].origin == f"{tmp_path}/two:1"
    with pytest.raises(DataError, match="no data of the split 'dev'; there is train, test"):
        read_source(f"{tmp_path}/two:dev", section())
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"broken")
    with pytest.raises(DataError, match="one is no whole data set"):
        read_source(f"{tmp_path}/one", section())


def test_tools_that_are_nested_too_deeply_are_a_bad_row(tmp_path):
    """Python's own limit would end the processes between which rows go."""
    good, deep = {"messages": turns("user=q", "assistant=a")}, {"a": 1}
    for _ in range(99):
        deep = {"a": deep}
    deeper = {"a": [deep]}
    save(tmp_path / "a.jsonl", [good | {"tools": [deeper]}, good | {"tools": [deep["a"]]}])
    source = read_source(str(tmp_path / "a.jsonl"), section(on_bad="drop"))
    assert source.places == {"tools": [f"{tmp_path}/a.jsonl:1"]} and len(source.rows) == 1
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": deeper}}]}]
    save(tmp_path / "b.jsonl", [{"messages": calls}])
    with pytest.raises(DataError, match=r"b\.jsonl:1: .*nested too deeply"):
        read_source(str(tmp_path / "b.jsonl"), section())


def test_every_row_left_out_has_its_place(tmp_path):
    """Blank lines too; data.json keeps a thousand places of a reason, the report prints three."""
    lines = ["", "{", '{"text": "a"}'] * 1001
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = read_source(str(tmp_path / "a.jsonl"), section(on_bad="drop"))
    for reason, first in (("blank", 1), ("not JSON", 2)):
        assert source.places[reason] == [f"{tmp_path}/a.jsonl:{first + 3 * i}" for i in range(1000)]
    place = f"{tmp_path}/a.jsonl"
    report = report_lines("left_out", "train", source)
    assert f"train: 1,001 left out: blank ({place}:1, {place}:4, {place}:7 and 998 more)" in report
    assert f"train: 1,001 left out: not JSON ({place}:2, {place}:5, {place}:8 and 998 more)" in report


def test_a_local_path_wins_over_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    numbered(tmp_path / "owner" / "name" / "a.jsonl", 1)
    assert [row.text for row in read_source("owner/name", section()).rows] == ["a 0"]
    assert [row.text for row in read_source("owner/name:train", section()).rows] == ["a 0"]
    with pytest.raises(DataError, match=r"Data file owner/none\.jsonl does not exist"):
        read_source("owner/none.jsonl", section())
