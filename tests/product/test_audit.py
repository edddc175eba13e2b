"""``prepare --audit``: what the table, data.json and the page say about data of which everything is known."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import yaml
from strict_page import parse
from tiny_models import K2_TEMPLATE, SPECIAL_TOKENS, WORDS, make_model, make_tokenizer

import fullshard
from fullshard.cli import main

SCRIPT = "<script>alert(1)</script>"


def line(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def words(first: int, count: int = 30) -> list[str]:
    """A text of ``count`` words; texts that begin elsewhere share no 5-gram in their first 12 words."""
    return [WORDS[(first + step * (first % 5 + 1)) % len(WORDS)] for step in range(count)]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Training rows 1 to 6: two with copies in 7 (exact) and 8 (near); 9 too long; eval holds copies of 2 and 3."""
    make_tokenizer(make_model(tmp_path / "model"), vocabulary=[*SPECIAL_TOKENS, *WORDS[:-1], SCRIPT])
    texts = [words(start) for start in (0, 8, 16, 24, 32)]
    near, near_eval = texts[0].copy(), texts[2].copy()
    near[0] = near_eval[0] = "rain"
    rows = [line(" ".join(text), "red") for text in texts]
    rows += [
        line(f"blue {SCRIPT}", "green"),
        rows[1],
        line(" ".join(near), "red"),
        line(" ".join(words(40, 90)), "red"),
    ]
    rows += [line("one", "two <|end|> three"), line("cat <|user|> dog", "fish")]
    held_out = [rows[1], line(" ".join(near_eval), "red"), line("sun moon", "star")]
    for name, content in (("train", rows), ("eval", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)), encoding="utf-8")
    recipe = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 64, "too_long": "drop"},
        "method": "full",
        "train": {"global_batch": "4 rows"},
        "output": "run",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    return captured.out


def test_table_page_and_json_agree(job, capsys):
    out = run(capsys, "prepare", "recipe.yaml", "--audit", "--output", "prepared")
    assert out.splitlines()[-1] == "Page: prepared/audit.html"
    facts = dict(re.findall(r"│ ([^│]+?) +│ +([\d,.%]+) │ ", out))
    wanted = {"records read": "11", "used": "10", "dropped": "1", "training rows written": "10"}
    wanted |= {"exact copies of an earlier row": "1", "near copies of another row": "1"}
    wanted |= {"exact copies of an eval row": "2", "near copies of an eval row": "1"}
    wanted |= {"rows with special-token strings": "1", "longest row before cutting": "96"}
    assert wanted.items() <= facts.items(), facts

    known = json.loads((job / "prepared" / "data.json").read_text(encoding="utf-8"))
    audit = known["audit"]
    name = known["exact_duplicates"]["places"][0][0].rpartition("/")[0]
    place = f"{name}/" if name else ""
    (near,), (near_eval,) = audit["near"]["places"], audit["near_eval"]["places"]
    assert near[:2] == [f"{place}train.jsonl:8", f"{place}train.jsonl:1"] and 0.8 <= near[2] < 1
    assert near_eval[:2] == [f"{place}train.jsonl:3", f"{place}eval.jsonl:2"]
    assert sum(audit["histograms"]["train_lengths"].values()) == known["train"]["prepared"] == 10
    assert sum(audit["histograms"]["eval_supervised"].values()) == 3
    assert audit["train"]["shortest"] == 8 and audit["eval"]["shortest"] == 8

    again = run(capsys, "prepare", "recipe.yaml", "--audit", "--output", "prepared")  # audit.html is nothing foreign
    assert again.splitlines()[-1] == out.splitlines()[-1]
    page = (job / "prepared" / "audit.html").read_text(encoding="utf-8")
    parser = parse(page)
    for origin in ("train.jsonl:7", "train.jsonl:8", "train.jsonl:9", "eval.jsonl:2"):
        assert origin in page
    assert parser.tags.count("svg") == 4 and parser.tags.count("figure") == 10
    assert "blue &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<mark>green &lt;|end|&gt;</mark>" in page  # the supervised tokens, and no others


def test_the_ten_rows_are_the_longest_the_shortest_and_others(job):
    rows = [line(" ".join(WORDS[: 1 + (number * 7) % 31]), "red") for number in range(40)]
    (job / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = fullshard.load_config("recipe.yaml", ["data.eval=null"])
    result = fullshard.audit_data(config, job / "out", job / "page.html")
    page = (job / "page.html").read_text(encoding="utf-8")
    shown = [int(found) for found in re.findall(r"<figcaption>\S*train\.jsonl:(\d+) ", page)]
    lengths = [1 + (number * 7) % 31 for number in range(40)]
    assert shown[:2] == [lengths.index(31) + 1, lengths.index(1) + 1]
    assert len(set(shown)) == 10 and shown[2:] == sorted(shown[2:])
    assert shown[-1] == 40 and max(b - a for a, b in pairwise(shown[2:])) <= 7
    assert result["audit"].keys() == {"train", "near", "near_eval", "histograms"}
    assert parse(page).tags.count("svg") == 2 and "of an eval row" not in page  # there is none


def test_a_long_row_shows_its_end(job):
    text = " ".join(words(3, 1500))
    (job / "train.jsonl").write_text(json.dumps(line(text, "red blue")), encoding="utf-8")
    config = fullshard.load_config("recipe.yaml", ["data.eval=null", "data.max_length=2000"])
    fullshard.audit_data(config, "out", "page.html")
    page = (job / "page.html").read_text(encoding="utf-8")
    parse(page)
    assert "1,507 tokens, 3 supervised" in page and "<mark>red blue &lt;|end|&gt;</mark>" in page
    assert len(re.search(r"<pre>\n(.*?)<mark>", page, re.S)[1].split()) < 1200


def test_in_chinese_and_where_the_page_is_asked_for(job, capsys):
    out = run(capsys, "prepare", "recipe.yaml", "--lang", "zh", "--page", "页.html", "--show", "0")
    assert out.splitlines()[-1] == "Page: 页.html" and "与另一行近似重复" in out
    page = (job / "页.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in page and "计入损失" in page
    parse(page)
    assert not (job / "audit.html").exists()
    assert "Page" not in run(capsys, "prepare", "recipe.yaml") and not (job / "audit.html").exists()


@pytest.mark.parametrize("options", [[], ["--audit"]])
def test_a_bar_shows_the_rows_done(job, capsys, monkeypatch, options):
    """Both commands show it on a terminal; in a file there is no such line (test_json_is_only_json)."""
    said = []
    monkeypatch.setattr("rich.progress.Progress.update", lambda bar, task, **values: said.append(values))
    run(capsys, "prepare", "recipe.yaml", *options)
    assert said == [{"total": 14, "completed": 14}]


def test_json_is_only_json(job, capsys):
    result = json.loads(run(capsys, "prepare", "recipe.yaml", "--audit", "--json"))
    assert result["audit"]["near"]["rows"] == 1 and (job / "audit.html").exists()


def test_what_one_row_becomes_is_no_copy(job):
    """A row that a weight repeats, or that a template makes into one for each answer, is one row."""
    kept = "{% if message['role'] != 'assistant' or loop.last %}{{ message['content'] }}{% endif %}"
    make_tokenizer(job / "model", chat_template=K2_TEMPLATE.replace("{{ message['content'] }}", kept))
    first = line(" ".join(words(0, 12)), "green")["messages"]
    rows = [{"messages": first + line(" ".join(words(start, 12)), "four")["messages"]} for start in (8, 16)]
    (job / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = fullshard.load_config("recipe.yaml", ["data.eval=null", "data.train=[{path: train.jsonl, weight: 3}]"])
    result = fullshard.audit_data(config, job / "out", job / "page.html")
    assert result["train"]["used"] == 2 and result["train"]["prepared"] == 12
    assert result["exact_duplicates"]["rows"] == result["audit"]["near"]["rows"] == 0
