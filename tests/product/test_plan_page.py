"""``fullshard plan --html``: the page by a strict parser and in Chromium, in both languages; and a run that tells what
was planned next to what it measured."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from strict_page import StrictParser, parse
from tiny_models import make_job

import fullshard
from fullshard.cli import main
from fullshard.config import config_from_dict, load_config
from fullshard.planning import search
from fullshard.planning.search import Machine
from fullshard.planning.speed import Rates
from fullshard.report.page import page_words
from fullshard.train.metrics import MetricsLog

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXAMPLE = ROOT / "examples" / "qwen3_8b_full_8xa800.yaml"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "read_machine", lambda: Machine("cpu", 20_000_000_000, Rates(80e9, 1e9, 2)))
    monkeypatch.chdir(make_job(tmp_path, 16))
    return tmp_path


def cells(parser: StrictParser) -> set[str]:
    return {data for tag, data in parser.texts if tag in ("td", "th")}


def test_the_page_shows_the_plan(job, capsys):
    words = ["--ranks", "2", "--price", "12", "--currency", "CNY", "--html", "p.html"]
    code, out, errors = run(capsys, "plan", "recipe.yaml", *words)
    assert code == 0 and out.splitlines()[-1] == "Page: p.html", errors
    plan = fullshard.make_plan(load_config("recipe.yaml"), ranks=2, price=12, currency="CNY")
    parser = parse((job / "p.html").read_text(encoding="utf-8"))
    found = cells(parser)
    for line in plan.lines:
        assert {line.cause, f"{line.bytes:,}"} <= found
    assert set(plan.explained) | set(plan.explained.values()) <= found
    report = dict(line.split(": ", 1) for line in plan.to_text().splitlines() if ": " in line and line[0] != " ")
    for name in ("Peak", "Fits", "Disk", "Time", "Device-hours", "Cost"):
        assert {name, report[name]} <= found
    assert parser.tags.count("svg") == 2  # memory over the step, bars by cause
    drawn = {data.split(":")[0] for tag, data in parser.texts if tag == "title"}
    assert drawn >= {cause for cause, sizes in plan.timeline.items() if any(sizes)}
    assert parser.tags.count("table") == 3 and "None." not in found


def test_the_drawing_is_to_scale(job):
    """The highest point of the last area upon the others is the peak of the step: read the path back."""
    config = load_config("recipe.yaml")
    plan = fullshard.make_plan(config, ranks=2)
    text = fullshard.write_plan_page(plan, job / "p.html").read_text(encoding="utf-8")
    drawing = text[text.index("<svg") : text.index("</svg>")]
    ticks = re.findall(r'<text class="end" x="[\d.]+" y="([\d.]+)">([\d,]+)</text>', drawing)
    (zero, first), (top, last) = ticks[0], ticks[-1]
    pixels = (float(zero) - float(top)) / float(last.replace(",", ""))  # a megabyte; labels stand 4 under their line
    assert first == "0"
    areas = re.findall(r'<path d="M([^"]*z)" fill="#[0-9a-f]{6}"><title>', drawing)
    points = [[tuple(map(float, point.split())) for point in area[:-1].split("L")] for area in areas]
    assert len(points) == sum(map(any, plan.timeline.values())) and all(len(path) == 20 for path in points)
    upper = [y for _, y in points[-1][:10]]
    totals = [sum(sizes) / 1e6 for sizes in zip(*plan.timeline.values(), strict=True)]
    for y, total in zip(upper, totals, strict=True):
        assert (float(zero) - 4 - y) / pixels == pytest.approx(total, abs=0.2 / pixels)
    xs = [x for x, _ in points[0][:10]]
    assert xs == sorted(xs) and [x for x, _ in points[0][10:]] == xs[::-1]
    for below, area in pairwise(points):  # each stands on the one below
        assert area[10:] == below[:10][::-1]


KEPT = (
    "token tokens micro batch logits rank full lora auto torch simple fullshard prepare plan compare price GFLOP TFLOP"
)
KEPT += " LoRA rows mean data length max_length Qwen masters"


def english_of(parser: StrictParser) -> list[str]:
    """English words that are left: no names, options or keys."""
    texts = " ".join(data for tag, data in parser.texts if tag != "style")
    return sorted(set(re.findall(r"[A-Za-z_]{4,}", texts)) - set(KEPT.split()))


def test_chinese_pages_leave_no_english(job, capsys, tmp_path):
    code, out, errors = run(capsys, "plan", "recipe.yaml", "--ranks", "2", "--price", "3", "--compare", "--lang", "zh")
    assert code == 0 and out.splitlines()[-1] == "Page: plan.html", errors
    assert out.startswith("method")  # the terminal's words stay as they are
    text = (job / "plan.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in text and english_of(parse(text)) == []
    values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    values["train"] |= {"recompute": 4, "micro_batch": "1 rows"}
    for config, options in (
        (config_from_dict(values), {"devices": "8xa800"}),
        (load_config(ROOT / "examples" / "qwen3_8b_lora_4x4090.yaml"), {"devices": "4x4090", "price": 5}),
        (load_config("recipe.yaml", ["method=lora", "lora.variant=dora", "train.precision=fp16"]), {"ranks": 4}),
        (load_config("recipe.yaml", ["train.micro_batch=1 rows", "data.max_length=128"]), {"ranks": 1}),
    ):
        page = fullshard.write_plan_page(fullshard.make_plan(config, **options), tmp_path / "zh.html", "zh")
        assert english_of(parse(page.read_text(encoding="utf-8"))) == [], options


def test_side_by_side_on_the_page(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, errors = run(
        capsys, "plan", str(EXAMPLE), "--devices", "8xa800", "--compare", "--html", "c.html", "--json"
    )
    plans = json.loads(out)["plans"]
    assert code == 0 and [plan["ranks"] for plan in plans] == [4, 8, 16, 32] * 2, errors
    parser = parse((tmp_path / "c.html").read_text(encoding="utf-8"))
    assert parser.tags.count("table") == 4 and {"yes", "device-hours", "peak a rank"} <= cells(parser)
    assert any(data.startswith("This recipe: full on 8.") for _, data in parser.texts)
    assert "GB" in {data for tag, data in parser.texts if tag == "text"}


def test_both_languages_have_the_same_words():
    english, chinese = page_words("plan", "en"), page_words("plan", "zh")
    assert set(english) == set(chinese) and len(english["stages"]) == len(chinese["stages"]) == 5


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; the strict parser reads the same page above")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_chromium_draws_it(tmp_path, lang):
    plan = fullshard.compare_plans(load_config(EXAMPLE), devices="8xa800", price=12, currency="CNY")
    page = fullshard.write_plan_page(plan, tmp_path / "p.html", lang)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=240)
    shown = StrictParser()
    shown.feed(done.stdout)
    assert shown.tags.count("svg") == 2 and {"path", "table", "section"} <= set(shown.tags), done.stderr


# ---- predicted next to measured ----


def step_values(step: int, **changes) -> dict:
    values = {"step": step, "loss": 2.5, "tokens_per_second": 10.0, "share_of_peak": 0.5, "memory_bytes": 1_500_000_000}
    return values | {"seconds": 1.94, "planned_seconds": [1.5, 2.6], "planned_bytes": 1_610_000_000} | changes


@pytest.mark.parametrize(("steps", "first", "told"), [(9, 0, 3), (2, 0, 2), (9, 5, 8), (7, 5, 7)])
def test_the_third_step_is_judged(tmp_path, capsys, steps, first, told):
    log = MetricsLog(tmp_path / "metrics.jsonl", steps, first, True, False)
    for step in range(first + 1, steps + 1):
        log.step(**step_values(step))
    log.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "planned" in line]
    assert lines == [f"step {told}: 1.94 s, planned 1.5 - 2.6 s; peak 1.50 GB a rank, planned 1.61 GB"]


def test_an_older_plan_has_no_speed_to_judge(tmp_path, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl", 3, 0, True, False)
    log.step(**step_values(3, planned_seconds=[]))
    log.close()
    assert "planned" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_keeps_both_and_its_checkpoint_has_the_planned_size(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(make_job(tmp_path, 16))
    result = fullshard.train_run("recipe.yaml", ["train.max_steps=3"], ranks=1)
    plan = json.loads((result.run / "plan.json").read_text(encoding="utf-8"))
    lines = (result.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    assert len(steps) == 3
    slow, fast = plan["tokens_per_second"]
    for step in steps:
        assert step["planned_seconds"] == pytest.approx([step["tokens"] / fast, step["tokens"] / slow])
        assert step["memory_bytes"] > 0
    moments = plan["moments"]  # a checkpoint is written beside training after step 2, from a copy of the state
    assert plan["saves_beside"] and moments["save"] > moments["train"]
    assert [step["planned_bytes"] for step in steps] == [moments["train"], moments["train"], moments["save"]]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step 3: ")]
    assert len(said) == 1 and re.fullmatch(
        r"step 3: \S+ s, planned \S+ - \S+ s; peak \S+ GB a rank, planned .*", said[0]
    )
    sizes = {}
    for file in sorted((result.run / "checkpoints").glob("step_*/*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            sizes[file.name.split("_")[0]] = sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    proof = sizes.pop("proof.safetensors")
    assert proof < 64 * 64 + 200  # at most 16 positions of 64 words, and their ids
    assert sizes == {"part": plan["disk_bytes"] - 64 * 64}
