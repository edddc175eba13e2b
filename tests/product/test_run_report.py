"""``fullshard report`` and ``eval`` on a run and on a recipe: the page by a strict parser and in Chromium, in both
languages, with what is missing said with its command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from strict_page import StrictParser, parse
from tiny_models import WORDS, make_job

import fullshard
from fullshard.cli import main
from fullshard.config import load_config
from fullshard.report.page import HTML

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REPORT = Path(fullshard.__file__).parent / "report"


def run_cli(capfd, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capfd.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def texts(path: Path) -> str:
    parser = parse(path.read_text(encoding="utf-8"))
    return " ".join(data for tag, data in parser.texts if tag != "style")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps, finished but not merged."""
    folder = make_job(tmp_path_factory.mktemp("job"), 16)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    with open(folder / "held.jsonl", "w") as file:
        for word in WORDS[16:24]:
            file.write(
                json.dumps({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]})
                + "\n"
            )
    recipe["data"] |= {"train": str(folder / "rows.jsonl"), "eval": str(folder / "held.jsonl")}
    recipe |= {"model": {"path": str(folder / "model")}, "output": str(folder / "run")}
    recipe["train"]["max_steps"] = 3
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    fullshard.train_run(folder / "recipe.yaml", ranks=1, quiet=True)
    return folder


@pytest.mark.slow
def test_a_run_from_training_to_its_verdict(trained, capfd):
    run = trained / "run"
    code, out, errors = run_cli(capfd, "report", str(run))
    assert code == 0 and out == f"Page: {run}/report.html\n", errors
    before = texts(run / "report.html")
    assert "Not judged yet" in before and f"fullshard merge {run} && fullshard eval {run}" in before
    assert "A merged model and its proof: not there yet" in before
    code, _, errors = run_cli(capfd, "eval", str(run))
    assert code == 2 and f"fullshard merge {run}" in errors
    fullshard.merge_run(run)
    code, out, errors = run_cli(capfd, "eval", str(run), "--general", str(trained / "rows.jsonl"), "--json")
    assert code == 0, errors
    judged = json.loads(out)
    assert judged == json.loads((run / "eval.json").read_text())
    (found,) = judged["comparisons"]
    assert (found["before_name"], found["after_name"]) == ("base", "model") and found["device_hours"] > 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    hours = sum(step["seconds"] for step in steps if step["kind"] == "train") / 3600
    assert found["device_hours"] == pytest.approx(hours)
    held_out = [step["loss"] for step in steps if step["kind"] == "eval"]
    assert found["measures"]["loss"]["before"] == pytest.approx(held_out[0], rel=1e-4)
    assert found["measures"]["loss"]["after"] == pytest.approx(held_out[-1], rel=1e-4)
    for lang, words in (
        ("en", ["Decision", "Merge proof", "How to repeat it"]),
        ("zh", ["结论", "合并证明", "如何重复这次训练"]),
    ):
        path = fullshard.write_run_report(run, trained / f"{lang}.html", lang)
        shown, parser = texts(path), parse(path.read_text(encoding="utf-8"))
        assert all(word in shown for word in words) and (lang != "en" or found["text"] in shown)
        assert parser.tags.count("svg") == 5, "loss, learning rate, gradient norm, tokens/s, memory"
        assert "not there yet" not in shown and "还没有" not in shown
        assert (
            "torch==" in shown
            and "global_batch: 4 rows" in shown
            and judged["results"][1]["answers"][0]["answer"] in shown
        )
    assert "no evidence of gain" in texts(trained / "en.html") or found["verdict"] != "none"


@pytest.mark.slow
def test_whether_to_train_a_recipe(trained, capfd):
    code, out, errors = run_cli(capfd, "report", str(trained / "recipe.yaml"), "--output", str(trained / "before.html"))
    assert code == 0 and out.startswith("Train\n") and out.endswith(f"Page: {trained}/before.html\n"), errors
    shown = texts(trained / "before.html")
    assert "What the base can do" in shown and "Device-hours" in shown and "records read" in shown
    (trained / "leak.jsonl").write_text(
        (trained / "rows.jsonl").read_text() + "\n" + (trained / "held.jsonl").read_text()
    )
    config = load_config(trained / "recipe.yaml", [f"data.train={trained / 'leak.jsonl'}"])
    found = fullshard.write_recipe_report(config, fullshard.judge_recipe(config, limit=6), trained / "zh.html", "zh")
    assert found["decision"] == "mend" and "8 行训练数据与留出行完全相同" in found["reasons"][0]
    assert "先修好数据" in texts(trained / "zh.html")
    code, _, errors = run_cli(capfd, "eval", str(trained / "recipe.yaml"), "--base", "x")
    assert code == 2 and "A recipe brings its own" in errors
    code, out, errors = run_cli(capfd, "eval", str(trained / "recipe.yaml"), "--limit", "6", "--show", "0")
    assert code == 0 and "Before any training" in out and "6 rows can show" in out, errors


def test_what_is_no_run(capfd, tmp_path):
    code, _, errors = run_cli(capfd, "report", str(tmp_path))
    assert code == 2 and "is not a run folder" in errors
    code, _, errors = run_cli(capfd, "report", str(tmp_path / "none.yaml"))
    assert code == 2 and "No recipe at" in errors


def bare_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model": {"path": "m"}, "train": {}}')
    (folder / "recipe.yaml").write_text("model: {path: <b>m</b>}\n")
    return folder


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_run_that_has_nothing_yet(tmp_path, lang):
    run = bare_run(tmp_path / "run")
    shown = texts(fullshard.write_run_report(run, lang=lang))
    missing = "not there yet" if lang == "en" else "还没有"
    assert shown.count(missing) >= 6 and f"fullshard resume {run}" in shown and "<b>m</b>" in shown


def test_bad_numbers_and_broken_lines_do_not_stop_the_page(tmp_path):
    run = bare_run(tmp_path / "run")
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 3.0), (2, float("nan")), (3, 2.0))]
    records += [
        {"kind": "train", "step": 3, "loss": 2.5},
        {"kind": "bad_step", "step": 2, "what": "loss nan", "rows": []},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records) + '{"kind": "tra')
    page = fullshard.write_run_report(run).read_text()
    assert "loss nan" in page and page.count("<svg") == 1
    (path,) = re.findall(r'<path d="M([^"]*)" fill="none" stroke="#3b6ea8"', page)
    assert len(path.split("L")) == 2, "two steps: nan is left out, of a repeated step the last counts"


def test_a_line_chart_is_to_scale():
    points = [(step, 10.0 - step) for step in range(1, 6)]
    chart = HTML.lines([("a", points, False), ("b", [(1, 2.0), (5, 2.0)], True)], "step", "y")
    ticks = re.findall(r'<text class="end" x="[\d.]+" y="([\d.]+)">([\d.]+)</text>', chart)
    (low, first), (high, last) = ticks[0], ticks[-1]
    scale = (float(low) - float(high)) / (float(last) - float(first))
    solid, dashed = re.findall(r'<path d="M([^"]*)" fill="none"', chart)
    ys = [float(point.split()[1]) for point in solid.split("L")]
    assert [round((float(low) - 4 - y) / scale + float(first), 1) for y in ys] == [9, 8, 7, 6, 5]
    assert "stroke-dasharray" in chart and len({point.split()[1] for point in dashed.split("L")}) == 1
    parse(HTML.page("t", [("h", [chart])]).strip())


@pytest.mark.parametrize("values", [[1e-5, 2e-5], [0.0], [5.0, 5.0], [-3.0, 2.0], [1e9, 3e9]])
def test_charts_of_any_values(values):
    chart = HTML.lines([("a", list(enumerate(values)), False)], "step", "y")
    numbers = [float(text.replace(",", "")) for text in re.findall(r'<text class="end"[^>]*>([^<]*)</text>', chart)]
    assert 2 <= len(numbers) <= 8 and numbers[0] <= min(values) and numbers[-1] >= max(values)
    steps = {round((second - first) / (numbers[1] - numbers[0]), 3) for first, second in pairwise(numbers)}
    assert steps == {1.0}


def test_a_long_run_keeps_its_spikes():
    points = [(step, 50.0 if step == 4321 else 1.0) for step in range(10_000)]
    chart = HTML.lines([("a", points, False)], "step", "y")
    (path,) = re.findall(r'<path d="M([^"]*)" fill="none"', chart)
    heights = [float(point.split()[1]) for point in path.split("L")]
    assert len(heights) < 1000 and min(heights) < 30


def test_both_languages_have_the_same_words():
    for name in ("run", "before", "data", "trace"):
        words = yaml.safe_load((REPORT / f"{name}.yaml").read_text(encoding="utf-8"))
        assert set(words["en"]) == set(words["zh"])
        for key, value in words["en"].items():
            if isinstance(value, dict | list):
                assert len(value) == len(words["zh"][key]), key


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; the strict parser reads the same page above")
def test_chromium_shows_the_page(tmp_path):
    run = bare_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": n, "loss": 4 / n}) + "\n" for n in range(1, 9))
    )
    file = fullshard.write_run_report(run, lang="zh").absolute()
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=240)
    shown = StrictParser()
    shown.feed(done.stdout)
    assert {"svg", "path", "table", "code"} <= set(shown.tags), done.stderr
    picture = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={picture}", file.as_uri()], capture_output=True, timeout=240)
    assert picture.stat().st_size > 10_000
