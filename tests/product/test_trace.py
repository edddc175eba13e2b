"""``fullshard trace``: one step on two real ranks of a tiny model; what it says, its JSON, page and picture."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from xml.etree import ElementTree

import pytest
import yaml
from strict_page import StrictParser, parse
from tiny_models import make_job

from fullshard.cli import main
from fullshard.report.page import write_trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LAYERS = [f"model.layers.{number}" for number in range(2)]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("trace"), 16)


def check_events(found: dict, micro_batches: int) -> None:
    """By hand: a block is gathered twice a micro-batch, embedding and [norm, head] once; all are reduced once."""
    assert found["micro_batches"] == micro_batches and len(found["events"]) == found["ranks"] == 2
    for events in found["events"]:
        counts = Counter((event["what"], event["unit"]) for event in events)
        wanted = {unit: 2 * micro_batches for unit in LAYERS}
        wanted |= {unit: micro_batches for unit in ("model.embed_tokens", "model.norm + lm_head")}
        for unit, times in wanted.items():
            for what in ("gather", "gather end", "free"):
                assert counts[what, unit] == times, (what, unit)
            assert counts["reduce", unit] == counts["reduce end", unit] == 1
        assert {unit for what, unit in counts if what in ("gather", "reduce")} == set(wanted)
        gathered = Counter()
        for event in events:  # nothing is gathered twice without a free between, or computed with before it is there
            gathered[event["unit"]] += {"gather": 1, "free": -1}.get(event["what"], 0)
            assert 0 <= gathered[event["unit"]] <= 1 and event["gathered_bytes"] <= event["held_bytes"]
            if event["what"] == "forward" and event["unit"] != "the rest":
                assert gathered[event["unit"]] == 1
        assert not any(gathered.values())
        assert events[-1]["what"] == "optimizer end" and events[-1]["seconds"] <= found["seconds"]
        assert events[-1]["gathered_bytes"] == events[-1]["held_bytes"] == 0 < max(e["held_bytes"] for e in events)
        seconds = [event["seconds"] for event in events]
        assert seconds == sorted(seconds) and seconds[0] >= 0
    for unit in found["units"]:
        assert (
            unit["counted"]
            == unit["planned"]
            == {"gather": wanted[unit["unit"]], "free": wanted[unit["unit"]], "reduce": 1}
        )
    block = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # q, k, v, o; the MLP's three; two norms
    assert {unit["unit"]: unit["parameters"] for unit in found["units"]}[LAYERS[0]] == block
    assert [unit["bytes"] for unit in found["units"] if unit["unit"] in LAYERS] == [4 * 3072] * 2  # 6 x 512 elements


def test_a_step_of_two_micro_batches(job, capsys, monkeypatch):
    monkeypatch.chdir(job)
    before = set(job.iterdir())
    recipe = yaml.safe_load((job / "recipe.yaml").read_text(encoding="utf-8"))
    assert "engine" not in recipe  # auto: a trace takes the simple engine anyway
    wish = [
        "train.micro_batch=1 rows",
        "train.recompute=blocks",
        "train.precision=fp32",
        "--ranks",
        "2",
        "--output",
        "step.html",
    ]
    code, out, errors = run(capsys, "trace", "recipe.yaml", *wish)
    assert code == 0, errors
    assert "as often as the formula says" in out and out.splitlines()[-1] == "Page: step.html"
    assert {path.name for path in set(job.iterdir()) - before} == {"step.html", "step.json", "step.svg"}
    found = json.loads((job / "step.json").read_text(encoding="utf-8"))
    check_events(found, 2)
    assert found["report"] == out.splitlines()[:-1]

    parser = parse((job / "step.html").read_text(encoding="utf-8"))
    assert parser.tags.count("svg") == parser.tags.count("table") == 1
    titles = [data for tag, data in parser.texts if tag == "title"]
    for kind, times in (("gather", 12), ("reduce", 4)):  # one bar each, on two ranks
        assert sum(title.startswith(f"{kind} ") for title in titles) == 2 * times
    assert "rank 1" in {data for tag, data in parser.texts if tag == "text"}
    picture = ElementTree.parse(job / "step.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"


def test_in_chinese_and_where_counts_are_wrong(tmp_path):
    def event(seconds: float, what: str, size: int) -> dict:
        return {"seconds": seconds, "what": what, "unit": "a<b", "gathered_bytes": size, "held_bytes": size}

    planned = {"gather": 1, "free": 1, "reduce": 1}
    unit = {"unit": "a<b", "strategy": "full", "parameters": 3, "bytes": 12, "planned": planned}
    facts = {"recipe": "r.yaml", "ranks": 1, "device": "cpu", "precision": "fp32", "rows": 1, "tokens": 9}
    events = [event(7.0, "gather", 12), event(7.5, "gather end", 12), event(9.0, "free", 0)]
    found = write_trace(facts | {"micro_batches": 1, "units": [unit], "events": [events]}, tmp_path / "t.html", "zh")
    assert found["units"][0]["counted"] == {"gather": 1, "free": 1, "reduce": 0} and found["seconds"] == 2.0
    assert found["report"][2].startswith("与计划不符")
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    parse(page)
    assert '<html lang="zh-CN">' in page and "聚集 a&lt;b: 0.00 - 500.00 ms" in page and "1 / 1" in page


def test_torchrun_is_refused(job, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, errors = run(capsys, "trace", str(job / "recipe.yaml"))
    assert code == 2 and "its own ranks" in errors and "--ranks" in errors


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; the strict parser reads the same page above")
def test_chromium_draws_it(tmp_path):
    test_in_chinese_and_where_counts_are_wrong(tmp_path)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (tmp_path / "t.html").as_uri()
    done = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=240)
    shown = StrictParser()
    shown.feed(done.stdout)
    assert {"svg", "path", "table"} <= set(shown.tags), done.stderr
