"""Preparation as a stream: any number of processes, interruptions, shares, accounts, special strings, copies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from tiny_models import K2_TEMPLATE, VOCABULARY, WORDS, make_model, make_tokenizer

from fullshard.config import RunConfig, config_from_dict
from fullshard.data import prepared, workers
from fullshard.data.prepared import open_prepared, partial_folder, prepare, write_held_out
from fullshard.errors import ConfigError, DataError
from fullshard.run_folder import claim_run

JOB = (
    "import sys, json; from pathlib import Path; from fullshard.config import config_from_dict\n"
    "from fullshard.data import prepared, workers\n"
    "workers.ALONE_CHUNKS, prepared.num_cores = 1, lambda: 2\n"
    "receive = workers.Workers._receive\n"
    "def wait_and_receive(self, done):\n"
    "    receive(self, done)\n"
    "    while not self._ready: receive(self, done)\n"
    "workers.Workers._receive = wait_and_receive\n"
    "def show(total, done): print(total, done, flush=True) or sys.stdin.readline()\n"
    "prepared.prepare(config_from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), show)\n"
)


def write_pairs(path: Path, count: int, start: int = 0) -> Path:
    """Rows that all differ: the question counts in base 56."""
    with open(path, "w") as file:
        for number in range(start, start + count):
            asked = f"{WORDS[number % 56]} {WORDS[number // 56 % 56]} {WORDS[number // 3136]}"
            row = {"question": asked, "answer": " ".join(WORDS[: 1 + number % 7])}
            file.write(json.dumps(row) + "\n")
    return path


def values_of(model: Path, train: Path | list, **data) -> dict:
    train = str(train) if isinstance(train, Path) else train
    return {"model": {"path": str(model)}, "data": {"train": train, "max_length": 24} | data, "output": "unused"}


def recipe(model: Path, train: Path | list, **data) -> RunConfig:
    return config_from_dict(values_of(model, train, **data))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def origins(folder: Path, split: str) -> list[str]:
    data = open_prepared(folder, split)
    return [data.origin(row) for row in range(len(data))]


@pytest.fixture
def new_children():
    """The processes started since the test began, theirs too: other tests' resident ranks are no matter here."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in before]


@pytest.fixture
def two_workers(monkeypatch):
    monkeypatch.setattr(workers, "ALONE_CHUNKS", 1)
    monkeypatch.setattr(prepared, "num_cores", lambda: 2)


@pytest.fixture
def waits_for_workers(two_workers, monkeypatch):
    """This process renders two chunks and no more, so that the others go to workers."""
    receive = workers.Workers._receive

    def wait_and_receive(self, done):
        receive(self, done)
        while not self._ready:
            receive(self, done)

    monkeypatch.setattr(workers.Workers, "_receive", wait_and_receive)


def test_processes_give_the_same_bytes(k1_folder, tmp_path, monkeypatch, waits_for_workers, new_children):
    config = recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 4300), eval=0.03)
    rendered = []
    here = workers.ChunkRenderer.__call__
    monkeypatch.setattr(workers.ChunkRenderer, "__call__", lambda self, chunk: rendered.append(1) or here(self, chunk))
    result = prepare(config, tmp_path / "many")
    assert len(rendered) == 2  # the other seven chunks were rendered elsewhere
    assert not new_children()
    monkeypatch.setattr(prepared, "num_cores", lambda: 1)
    assert prepare(config, tmp_path / "one") == result
    assert len(rendered) == 2 + 9
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")
    assert not partial_folder(tmp_path / "one").exists()


def test_the_files_are_ordinary_safetensors(k1_folder, tmp_path):
    prepare(recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 30)), tmp_path / "p")
    folder = tmp_path / "p" / "train"
    kinds = {
        "tokens": "int32", "supervised": "bool", "lengths": "int32", "targets": "int32", "files": "int32",
        "lines": "int32", "content": "uint64",
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {"meta.json", *(f"{name}.safetensors" for name in kinds)}
    columns = {name: value for name in kinds for name, value in load_file(folder / f"{name}.safetensors").items()}
    assert {name: value.dtype.name for name, value in columns.items()} == kinds
    tokens, supervised = columns["tokens"], columns["supervised"]
    assert len(tokens) == len(supervised) == columns["lengths"].sum()
    assert {len(value) for name, value in columns.items() if name not in ("tokens", "supervised")} == {30}
    assert columns["lines"].tolist() == list(range(1, 31)) and not columns["files"].any()
    data = open_prepared(tmp_path / "p", "train")
    assert np.concatenate([data.row(i)[0] for i in range(30)]).tolist() == tokens.tolist()
    assert [int(data.row(i)[1][1:].sum()) for i in range(30)] == data.supervised.tolist()
    assert supervised.sum() == data.supervised.sum()
    assert len(set(data.content.tolist())) == 30
    with pytest.raises(ValueError, match="read-only"):
        data.row(0)[0][0] = 1
    for damage in (lambda path: path.write_bytes(b"x" * 100), Path.unlink):
        damage(folder / "lengths.safetensors")
        with pytest.raises(DataError, match="is damaged, or of an older version"):
            open_prepared(tmp_path / "p", "train")


def is_at_work(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Stopped(BaseException):
    pass


def stop_after(count: int):
    def show(total, done):
        if done >= count:
            raise Stopped

    return show


@pytest.mark.parametrize("share", [None, 0.02])
def test_an_interrupted_preparation_goes_on(k1_folder, tmp_path, monkeypatch, share):
    config = recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 2600), eval=share)
    whole = prepare(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        prepare(config, tmp_path / "p", stop_after(900))
    hidden = partial_folder(tmp_path / "p")
    assert not (tmp_path / "p").exists() and (hidden / "journal.json").is_file()
    with open(hidden / "train" / "tokens.safetensors", "ab") as file:
        file.write(b"half a row")  # behind the journal
    taken = []
    take = workers.ChunkRenderer._take
    monkeypatch.setattr(
        workers.ChunkRenderer,
        "_take",
        lambda self, part, row, rows: taken.append(row.origin) or take(self, part, row, rows),
    )
    assert prepare(config, tmp_path / "p") == whole
    assert len(taken) == 1600  # two chunks of 500 were done
    assert bytes_of(tmp_path / "p") == bytes_of(tmp_path / "whole")
    assert not hidden.exists()


def test_other_inputs_start_anew(k1_folder, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 1200)
    with pytest.raises(Stopped):
        prepare(recipe(k1_folder, path), tmp_path / "p", stop_after(500))
    write_pairs(path, 1200, start=7)  # other contents of the same length
    prepare(recipe(k1_folder, path), tmp_path / "p")
    assert len(set(open_prepared(tmp_path / "p", "train").content.tolist())) == 1200
    prepare(recipe(k1_folder, path), tmp_path / "fresh")
    assert bytes_of(tmp_path / "p") == bytes_of(tmp_path / "fresh")


def test_a_killed_preparation_leaves_no_process_and_goes_on(k1_folder, tmp_path):
    """kill -9 of the parent, with workers at work."""
    path = write_pairs(tmp_path / "a.jsonl", 6000)
    command = [sys.executable, "-c", JOB, json.dumps(values_of(k1_folder, path)), str(tmp_path / "p")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdin is not None
        assert job.stdout.readline() == "6001 500\n"  # the journal knows one chunk
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.stdout.readline() == "6001 1000\n"
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.stdout.readline() == "6001 1500\n"  # made by a worker
        children = psutil.Process(job.pid).children(recursive=True)
        job.kill()
    assert children
    deadline = time.monotonic() + 60
    while any(is_at_work(child) for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
    assert (
        json.loads((partial_folder(tmp_path / "p") / "journal.json").read_text())["splits"]["train"]["audit"]["rows"]
        >= 500
    )
    config = recipe(k1_folder, path)
    assert prepare(config, tmp_path / "p") == prepare(config, tmp_path / "whole")
    assert bytes_of(tmp_path / "p") == bytes_of(tmp_path / "whole")


def test_a_killed_worker_is_said_and_its_rows_are_not_lost(k1_folder, tmp_path, waits_for_workers, new_children):
    config = recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 5000))

    def kill_one(total, done):
        if done == 1000:
            os.kill(new_children()[-1].pid, signal.SIGKILL)

    with pytest.raises(DataError, match="A process that tokenises rows has ended: killed") as caught:
        prepare(config, tmp_path / "p", kill_one)
    assert "The rows done are kept" in caught.value.hint
    assert not new_children()
    assert (partial_folder(tmp_path / "p") / "journal.json").is_file()
    assert prepare(config, tmp_path / "p")["train"]["used"] == 5000


def test_the_first_bad_row_is_named_whoever_renders_it(tmp_path, waits_for_workers):
    """Rows 1,201 and 2,701 hold ids outside an embedding of 10 rows; row 4,000 is no JSON."""
    model = make_tokenizer(make_model(tmp_path / "model", vocab_size=10))
    lines = ['{"question": "red", "answer": "blue"}'] * 4200
    lines[1200] = lines[2700] = '{"question": "red", "answer": "rose"}'
    lines[3999] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:1201: token id 63 is outside"):
            prepare(recipe(model, tmp_path / "a.jsonl"), tmp_path / "p")
    assert not partial_folder(tmp_path / "p").exists()  # another input is needed
    lines[1200] = lines[2700] = lines[0]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:4000: not JSON"):
        prepare(recipe(model, tmp_path / "a.jsonl"), tmp_path / "p")


def test_two_preparations_of_one_folder_do_not_mix(k1_folder, tmp_path):
    hidden = partial_folder(tmp_path / "p")
    hidden.mkdir()
    with claim_run(hidden), pytest.raises(ConfigError, match="is being prepared now, by process"):
        prepare(recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 5)), tmp_path / "p")


def test_a_known_preparation_reads_no_row(k1_folder, tmp_path, monkeypatch):
    path = write_pairs(tmp_path / "a.jsonl", 20)
    first = prepare(recipe(k1_folder, path), tmp_path / "p")
    stat = path.stat()
    monkeypatch.setattr(prepared, "iterate_rows", None)
    assert prepare(recipe(k1_folder, path), tmp_path / "p") == first
    write_pairs(path, 20, start=3)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # neither size nor time tell
    monkeypatch.undo()
    assert prepare(recipe(k1_folder, path), tmp_path / "p")["hash"] != first["hash"]


@pytest.mark.parametrize(("rows", "share", "held_out"), [(2, 0.01, 1), (10, 0.3, 3), (250, 0.05, 13), (1234, 0.1, 123)])
def test_a_share_is_exact_and_written_out(k1_folder, tmp_path, rows, share, held_out):
    path = write_pairs(tmp_path / "a.jsonl", rows)
    config = recipe(k1_folder, [{"path": str(path), "weight": 1.5}], eval=share)
    result = prepare(config, tmp_path / "p")
    evaluated, trained = origins(tmp_path / "p", "eval"), origins(tmp_path / "p", "train")
    assert len(evaluated) == len(set(evaluated)) == held_out == result["eval"]["prepared"]
    assert set(evaluated) | set(trained) == {f"{path}:{line}" for line in range(1, rows + 1)}
    assert not set(evaluated) & set(trained)  # copies neither
    assert len(trained) == len(set(trained)) + result["train"]["copies"]
    assert result["overlap"]["rows"] == result["exact_duplicates"]["rows"] == 0  # copies by weight are no duplicates
    write_held_out(config, tmp_path / "held_out.jsonl")
    lines = path.read_text().splitlines()
    asked = [json.loads(line)["messages"][0]["content"] for line in (tmp_path / "held_out.jsonl").open()]
    assert asked == [json.loads(lines[int(origin.rpartition(":")[2]) - 1])["question"] for origin in evaluated]


@pytest.mark.parametrize("share", [None, 0.25])
def test_every_record_is_accounted_for(k1_folder, tmp_path, share):
    """12 records: 2 blank, 2 bad, 1 without an answer, 1 too long, 6 used or held out."""
    good = [json.dumps({"question": word, "answer": "red"}) for word in WORDS[:6]]
    lines = [*good[:3], "", "{", '{"question": "red", "answer": ""}', " ", "[1]", *good[3:]]
    lines.append(json.dumps({"question": "red", "answer": " ".join(WORDS[:40])}))
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    result = prepare(recipe(k1_folder, path, eval=share, on_bad="drop", too_long="drop"), tmp_path / "p")
    train = result["train"]
    assert (train["read"], train["blank"], train["bad"]) == (12, 2, {"not JSON": 1, "no object with columns": 1})
    both = [result[split] for split in ("train", "eval") if result[split]]
    dropped = {reason: n for split in both for reason, n in split["dropped"].items()}
    assert dropped == {"no supervised token": 1, "longer than max_length": 1}
    assert sum(split["used"] for split in both) == 6
    places = train["places"] | both[-1]["places"]
    assert places["not JSON"] == [f"{path}:5"]
    assert places["no supervised token"] == [f"{path}:6"]
    assert places["longer than max_length"] == [f"{path}:12"]
    for split in both:
        left = sum(split["dropped"].values()) + sum(split["bad"].values()) + split["blank"] + split["held_out"]
        assert split["read"] == split["used"] + left
    assert (train["held_out"] > 0) == (share is not None)


def test_rows_that_the_template_refuses_are_bad_rows(tmp_path):
    """With on_bad drop they are counted and named, and the others are used; all refused: the first complaint."""
    template = K2_TEMPLATE.replace(
        "{{ '<|' +", "{% if message['content'] == 'ice' %}{{ raise_exception('no ice') }}{% endif %}{{ '<|' +"
    )
    model = make_tokenizer(make_model(tmp_path / "model"), chat_template=template)
    path, asked = tmp_path / "a.jsonl", ["red", "ice", "blue", "ice", "sun"]
    answers = ["one", "two", "strange", "three", "four"]
    rows = [{"question": question, "answer": answer} for question, answer in zip(asked, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"a\.jsonl:2: The chat template refuses the roles user, assistant: no ice"):
        prepare(recipe(model, path), tmp_path / "p")
    twice = [{"path": str(path), "weight": 2}]
    result = prepare(recipe(model, twice, on_bad="drop"), tmp_path / "p")
    train = result["train"]
    assert (train["read"], train["used"], train["copies"], train["bad"]) == (5, 2, 5, {"not rendered": 3})
    assert train["places"]["not rendered"] == [f"{path}:{line}" for line in (2, 3, 4)]
    assert origins(tmp_path / "p", "train") == [f"{path}:1"] * 2 + [f"{path}:5"] * 2
    report = "\n".join(result["report"])
    assert f"train: 3 of 5 bad: not rendered ({path}:2, {path}:3, {path}:4)" in report
    assert "train: the first: " + str(path) + ":2: The chat template refuses" in report
    assert "5 records read = 2 used + 0 dropped + 3 bad + 0 blank" in report
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    half = recipe(model, path, on_bad="drop", eval=0.5)
    held_out = prepare(half, tmp_path / "half")["eval"]
    write_held_out(half, tmp_path / "held_out.jsonl")  # eval is given it, and would stop at a row that is refused
    assert held_out["read"] == 10 and held_out["bad"]["not rendered"] > 0
    assert len((tmp_path / "held_out.jsonl").read_text().splitlines()) == held_out["used"]
    path.write_text(json.dumps(rows[1]))
    with pytest.raises(DataError, match=r"a\.jsonl:1: The chat template refuses"):
        prepare(recipe(model, path, on_bad="drop"), tmp_path / "q")


def test_every_input_is_in_the_key(tmp_path, k1_folder):
    """Template, special tokens, vocabulary, options: prepared anew; nothing changed: kept."""
    path, folder, model = write_pairs(tmp_path / "a.jsonl", 5), tmp_path / "p", tmp_path / "model"
    reads_place = K2_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ place or '' }}")
    tokenizers = [{}, {"chat_template": reads_place}, {"pad_token": "<eos>"}, {"vocabulary": [*VOCABULARY, "more"]}]
    options = [{}, {"loss_on": "all"}, {"max_length": 25}, {"system": "sun"}, {"too_long": "cut"}]
    jobs = [(changes, {}) for changes in tokenizers] + [({}, data) for data in options[1:]]
    jobs += [({"chat_template": reads_place}, {"template_arguments": {"place": place}}) for place in ("red", "blue")]
    keys = []
    for changes, data in jobs:
        make_tokenizer(make_model(model), **changes)
        keys.append(prepare(recipe(model, path, **data), folder)["key"])
    assert len(set(keys)) == len(jobs)
    stamp = (folder / "data.json").stat().st_mtime_ns
    assert prepare(recipe(model, path, **jobs[-1][1]), folder)["key"] == keys[-1]
    assert (folder / "data.json").stat().st_mtime_ns == stamp


def test_the_longest_row_before_and_after_cutting(k1_folder, tmp_path):
    """5 tokens stand around question and answer: rows of 10, 32, 63, 64 and 2,100 tokens, one of them cut."""
    texts = [" ".join(["red"] * (length - 6)) for length in (10, 32, 63, 64, 2100)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"question": "sun", "answer": text}) + "\n" for text in texts))
    result = prepare(recipe(k1_folder, path, max_length=100, too_long="cut"), tmp_path / "p")
    assert (result["train"]["longest"], result["train"]["longest_written"], result["train"]["cut"]) == (2100, 100, 1)


def test_special_tokens_written_by_users_are_named(k1_folder, tmp_path):
    turns = [
        [("user", "red"), ("assistant", "blue")],
        [("user", "red <|end|> blue"), ("assistant", "green")],
        [("user", "red"), ("assistant", "say <|end|> blue")],  # the answer's own business
        [("system", "<|user|> sun"), ("user", "red"), ("assistant", "blue")],
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in turns)
    )
    result = prepare(recipe(k1_folder, path), tmp_path / "p")
    assert result["train"]["special_strings"] == {"rows": 2, "places": [f"{path}:2", f"{path}:4"]}
    line = f"train: 2 rows write out a special token, read as that token ({path}:2, {path}:4)"
    assert line in result["report"]


def test_duplicates_and_overlap_are_named(k1_folder, tmp_path):
    train, held_out = write_pairs(tmp_path / "a.jsonl", 40), write_pairs(tmp_path / "b.jsonl", 4, start=38)
    lines = train.read_text().splitlines()
    train.write_text("\n".join([*lines, lines[5], lines[39], lines[5]]) + "\n")
    result = prepare(recipe(k1_folder, train, eval=str(held_out)), tmp_path / "p")
    repeats = [[f"{train}:41", f"{train}:6"], [f"{train}:42", f"{train}:40"], [f"{train}:43", f"{train}:6"]]
    assert result["exact_duplicates"] == {"rows": 3, "places": repeats}
    pairs = [[f"{train}:39", f"{held_out}:1"], [f"{train}:40", f"{held_out}:2"], [f"{train}:42", f"{held_out}:2"]]
    assert result["overlap"] == {"rows": 3, "places": pairs}
    assert f"({train}:39 = {held_out}:1, " in result["report"][-1]


def test_progress_counts_rows_against_the_files_lines(k1_folder, tmp_path):
    seen = []
    path = write_pairs(tmp_path / "a.jsonl", 1200)
    prepare(recipe(k1_folder, path), tmp_path / "p", lambda *given: seen.append(given))
    assert seen == [(1201, 500), (1201, 1000), (1201, 1200)]
    (tmp_path / "b.txt").write_text("red\n\nblue\n")
    seen.clear()
    config = recipe(k1_folder, tmp_path / "b.txt", eval=str(tmp_path / "b.txt"))
    prepare(config, tmp_path / "q", lambda *given: seen.append(given))
    assert seen == [(None, 4)]  # of a text's paragraphs the number is not known


def test_one_slow_chunk_does_not_pile_up_the_others(two_workers, tmp_path):
    """At most two chunks a process are read ahead of the one that is given."""
    given, read = [], []

    class Slow(workers.Workers):
        def _start(self):
            pass

    pool = object.__new__(Slow)
    pool._setup, pool._count, pool._process, pool._busy, pool._idle = (), 1, None, {}, []
    pool._render = lambda chunk: chunk

    def chunks():
        for number in range(50):
            read.append(number)
            yield number

    for number in pool.in_order(chunks()):
        given.append(number)
        assert len(read) - len(given) <= 2
    assert given == list(range(50))


def test_time_is_not_needed_to_notice_the_end(two_workers, k1_folder, tmp_path, new_children):
    """An input that is done before the workers are up: they are ended, not waited for."""
    started = time.monotonic()
    prepare(recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 1100)), tmp_path / "p")
    assert not new_children()
    assert time.monotonic() - started < 60


def test_train_goes_on_with_an_interrupted_preparation(k1_folder, tmp_path, monkeypatch):
    """Ctrl-C while `train` prepares: the run folder keeps nothing but the unfinished part."""
    from fullshard.launch import prepare_run

    config, run = recipe(k1_folder, write_pairs(tmp_path / "a.jsonl", 1200)), tmp_path / "run"
    config = config.model_copy(update={"output": str(run)})
    append = prepared._Split.append

    def interrupted(self, part):
        append(self, part)
        if self.book.rows == 1000:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepared._Split, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_run(config, 1, True, "", [])
    assert [path.name for path in run.iterdir()] == [".prepared.partial"]
    taken = []
    monkeypatch.setattr(
        prepared._Split, "append", lambda self, part: taken.append(part.book.rows) or append(self, part)
    )
    prepare_run(config, 1, True, "", [])
    assert taken == [500, 200]  # the first chunk was done
    assert json.loads((run / "data.json").read_text())["train"]["used"] == 1200
    assert not (run / ".prepared.partial").exists()
