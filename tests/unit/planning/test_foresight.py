"""What a plan says beyond memory and time: money, device-hours, disk, host memory, the moment and the cause of the
peak, its formulas with numbers, and plans side by side. Right values are worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import fullshard
from fullshard import cli
from fullshard.config import config_from_dict
from fullshard.errors import PlanError
from fullshard.planning import search
from fullshard.planning.memory import CPU_PROCESS_BYTES, Line
from fullshard.planning.plan import EXPLAIN, find_peak, format_range, step_timeline
from fullshard.planning.search import Machine, compare_plans, make_plan
from fullshard.planning.speed import Rates

ROOT = Path(__file__).parents[3]
CPU = Machine("cpu", 20_000_000_000, Rates(80e9, 1e9, 2))
QWEN3_8B = 8_190_735_360
K1 = 2 * 64 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16  # embedding and head, two blocks, the last norm


@pytest.fixture(autouse=True)
def this_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "read_machine", lambda: CPU)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(k1_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps({"question": "red blue green", "answer": "one two"})] * 40))

    def make(**changes):
        values = {
            "model": {"path": str(k1_folder)},
            "data": {"train": str(path), "max_length": 32},
            "train": {"global_batch": "10 rows"},
            "output": str(tmp_path / "run"),
        }
        for key, value in changes.items():
            values[key] = {**values[key], **value} if isinstance(value, dict) else value
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return config_from_dict(values)

    return make


def example(name: str, **changes):
    values = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    if changes.get("method") == "full":
        values.pop("lora", None)
    return config_from_dict(values | changes)


def run_cli(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


# ---- money ----


def test_device_hours_and_money_by_hand(recipe, monkeypatch):
    """An hour to two on 4 ranks are 4 to 8 device-hours; at 12 each, 48 to 96."""
    real = search.run_seconds
    monkeypatch.setattr(search, "run_seconds", lambda *inputs: (3600.0, 7200.0, *real(*inputs)[2:]))
    plan = make_plan(recipe(), ranks=4, price=12, currency="CNY")
    assert plan.device_hours == (4.0, 8.0) and plan.cost == (48.0, 96.0)
    text = plan.to_text()
    assert "\nDevice-hours: 4 - 8 (4 x the time)\n" in text
    assert "\nCost: 48 - 96 CNY (at 12 a device-hour)\n" in text
    assert "--price is that of the machine / ranks" in text  # the ranks of a CPU machine share it
    free = make_plan(recipe(), ranks=4)
    assert free.cost is None and "Device-hours: 4 - 8" in free.to_text() and "Cost" not in free.to_text()
    assert "Cost: 48 - 96 (at 12 a device-hour)" in make_plan(recipe(), ranks=4, price=12).to_text()


def test_money_has_the_error_bar_of_the_time():
    plan = make_plan(example("qwen3_8b_full_8xa800"), devices="8xa800", price=7.5, currency="CNY")
    assert plan.device_hours == pytest.approx((plan.seconds_low * 8 / 3600, plan.seconds_high * 8 / 3600))
    assert plan.cost[1] / plan.cost[0] == pytest.approx(plan.seconds_high / plan.seconds_low)
    assert plan.cost[0] == pytest.approx(7.5 * plan.seconds_low * 8 / 3600)


@pytest.mark.parametrize("price", [0, -1, math.nan, math.inf])
def test_a_price_is_positive(recipe, price):
    with pytest.raises(PlanError, match="must be above 0") as caught:
        make_plan(recipe(), ranks=1, price=price)
    assert "--price 12" in caught.value.hint
    with pytest.raises(PlanError, match="must be above 0"):
        compare_plans(recipe(), ranks=1, price=price)


def test_bad_options_of_the_command_line(recipe, capsys):
    recipe()
    for words, needed in (
        (["--price", "-3"], "above 0"),
        (["--price", "free"], "for '--price'"),
        (["--currency", "CNY"], "without a price"),
        (["--compare", "--explain"], "Leave one of them out"),
    ):
        code, out, errors = run_cli(capsys, "plan", "recipe.yaml", *words)
        assert code == 2 and needed in errors and not out, words


def test_ranges():
    assert [format_range(*pair) for pair in ((1234, 2345.6), (0.01234, 0.02), (99.96, 130), (4, 8))] == [
        "1,234 - 2,346",
        "0.0123 - 0.02",
        "100 - 130",
        "4 - 8",
    ]


# ---- disk and host memory ----


def test_a_checkpoint_is_the_weights_and_two_moments(recipe):
    full = make_plan(recipe(method="full"), ranks=2)
    assert full.disk_bytes == 12 * K1 + 64 * 64  # and the proof: 16 positions of 64 words in fp32
    assert make_plan(recipe(method="full", train={"optimizer": "sgd"}), ranks=2).disk_bytes == 4 * K1 + 64 * 64
    pure = make_plan(recipe(method="full", train={"precision": "bf16_pure"}), ranks=2)
    assert pure.disk_bytes == 10 * K1 + 64 * 64
    lora = make_plan(recipe(), ranks=2)
    adapters = next(line for line in lora.lines if line.cause == "adapters")
    assert lora.disk_bytes == adapters.bytes // 16 * 16 + 64 * 64  # an adapter's weights twice, for PEFT
    assert "Disk: " in full.to_text() and "a checkpoint; host memory: " in full.to_text()


def test_host_memory(recipe):
    plan = make_plan(recipe(), ranks=2)
    assert plan.host_bytes == 2 * plan.peak_bytes + search.LAUNCHER_BYTES
    cards = make_plan(example("qwen3_8b_full_8xa800"), devices="8xa800")  # a rank brings its share of 12 bytes to save
    assert cards.host_bytes == 8 * (CPU_PROCESS_BYTES + 12 * QWEN3_8B // 8) + search.LAUNCHER_BYTES
    many = make_plan(example("qwen3_8b_full_8xa800"), devices="64xa800")  # 8 a machine; now reading is more than saving
    assert many.host_bytes == 8 * (CPU_PROCESS_BYTES + 4 * 151_936 * 4096) + search.LAUNCHER_BYTES


def test_a_disk_too_full_for_one_checkpoint(recipe, monkeypatch):
    needed = make_plan(recipe(method="full"), ranks=1).disk_bytes
    monkeypatch.setattr(search.shutil, "disk_usage", lambda place: SimpleNamespace(free=needed - 1))
    with pytest.raises(PlanError, match="A checkpoint takes") as caught:
        make_plan(recipe(method="full"), ranks=1)
    assert "output=FOLDER" in caught.value.hint
    assert make_plan(example("qwen3_8b_lora_4x4090"), devices="4x4090").disk_bytes > needed  # that disk is not here


# ---- the moment and the cause of the peak ----

LINES = (
    Line("libraries", 100, "fixed", "always"),
    Line("fp32 masters", 40, "", "always"),
    Line("optimizer state", 80, "", "always"),
    Line("gathered weights", 20, "", "backward"),
    Line("kept gradients", 7, "", "backward"),
    Line("gradient reduction", 10, "", "backward"),
    Line("activations", 60, "", "backward"),
    Line("logits chunk", 30, "", "head"),
    Line("optimizer temporary", 8, "", "step"),
)


def test_a_step_by_hand():
    """load, forward, head, backward, step: the beginning and the end of each."""
    found = step_timeline(LINES, 150)
    assert found == {
        "libraries": [100] * 10,
        "fp32 masters": [0, *[40] * 9],
        "optimizer state": [0, 0, *[80] * 8],
        "gathered weights": [0, 0, 20, 20, 20, 20, 20, 20, 0, 0],
        "kept gradients": [0, 0, 7, 7, 7, 7, 7, 0, 0, 0],
        "gradient reduction": [0, 0, 0, 0, 10, 10, 10, 10, 0, 0],
        "activations": [0, 0, 0, 60, 60, 60, 60, 0, 0, 0],
        "logits chunk": [0, 0, 0, 0, 30, 30, 0, 0, 0, 0],
        "optimizer temporary": [0, 0, 0, 0, 0, 0, 0, 0, 8, 8],
        "others": [10, 10, *[0] * 8],
    }
    peak = find_peak(found, LINES, {"load": 150, "train": 347, "eval": 200, "merge": 9999})
    assert peak["where"] == "head" and sum(peak["causes"].values()) == 347
    assert list(peak["causes"])[:3] == ["libraries", "optimizer state", "activations"]
    loading = find_peak(found, LINES, {"load": 360, "train": 347})  # the rest is what no line counts
    assert loading == {"where": "load", "causes": {"others": 220, "libraries": 100, "fp32 masters": 40}}
    judging = find_peak(found, LINES, {"load": 150, "train": 347, "eval": 400})
    assert judging["where"] == "eval" and judging["causes"]["others"] == 180


@pytest.mark.parametrize("train", [{}, {"recompute": "blocks"}, {"recompute": 1}, {"micro_batch": "1 rows"}])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_highest_point_of_the_step_is_the_planned_peak(recipe, method, train, ranks):
    """On the real formulas, whatever the method and the layout: what is drawn is what is planned."""
    plan = make_plan(recipe(method=method, train={"global_batch": "10 rows", **train}), ranks=ranks)
    totals = [sum(sizes) for sizes in zip(*plan.timeline.values(), strict=True)]
    assert max(totals[2:]) == plan.moments["train"] and totals[1] == plan.moments["load"]
    assert sum(plan.peak["causes"].values()) == plan.peak_bytes
    activations = plan.timeline.get("activations") or plan.timeline["block inputs"]
    assert activations[2] == activations[7] == 0 < activations[3]
    words = EXPLAIN["peaks"][plan.peak["where"]]
    assert f"\nPeak: {search.format_bytes(plan.peak_bytes)} {words}; largest: " in plan.to_text()


def test_the_peak_of_a_large_model_names_its_cause():
    plan = make_plan(example("qwen3_8b_full_8xa800"), devices="8xa800")
    assert plan.peak["where"] in ("head", "backward")
    assert sum(plan.peak["causes"].values()) == plan.peak_bytes == plan.moments["train"]
    assert all(cause in plan.timeline for cause in plan.peak["causes"])


# ---- formulas with their numbers ----


def value_of(formula: str) -> float:
    """What a formula's text comes to: numbers, x, /, + and brackets count, words do not."""
    tokens = re.findall(r"(?<![A-Za-z\d])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?|(?<= )x(?= )|[/+()]", formula)
    return eval("".join(token.replace(",", "").replace("x", "*") for token in tokens))


def check_formulas(plan) -> None:
    for line in plan.lines:
        if line.formula != "fixed" and not re.search("passing causes|of this rank", line.formula):
            assert value_of(line.formula) == pytest.approx(line.bytes, abs=1), line
    for name, text in plan.explained.items():
        formula, _, result = text.rpartition(" = ")
        if name != "hidden":
            assert value_of(formula) == pytest.approx(value_of(result), rel=2e-3), (name, text)
    parts = dict(plan.kernel_seconds)
    total, hidden = parts.pop("total"), parts.pop("hidden")
    assert total == pytest.approx(sum(parts.values()) - hidden)
    for name, seconds in (plan.kernel_seconds | {"step, low": plan.step_seconds[0]}).items():
        if name != "total":
            assert value_of(plan.explained[name].rpartition(" = ")[2]) == pytest.approx(seconds, rel=1e-3, abs=1e-9)
    for end, seconds in (("low", plan.seconds_low), ("high", plan.seconds_high)):
        assert value_of(plan.explained[f"time, {end}"].rpartition(" = ")[2]) == pytest.approx(seconds, rel=1e-2)
    assert value_of(plan.explained["disk"].rpartition(" = ")[2]) == plan.disk_bytes
    assert value_of(plan.explained["host memory"].rpartition(" = ")[2]) == plan.host_bytes


@pytest.mark.parametrize("method", ["full", "lora"])
def test_each_formula_comes_to_its_result_here(recipe, method):
    check_formulas(make_plan(recipe(method=method, train={"micro_batch": "2 rows", "recompute": 1}), ranks=2))


@pytest.mark.parametrize(
    ("name", "devices"), [("lora_4x4090", "4x4090"), ("full_8xa800", "8xa800"), ("full_8xa800", "16xa800")]
)
def test_each_formula_comes_to_its_result_on_cards(name, devices):
    check_formulas(make_plan(example(f"qwen3_8b_{name}"), devices=devices))


def test_explain_shows_them_all(recipe, capsys):
    recipe()
    code, out, errors = run_cli(capsys, "plan", "recipe.yaml", "--ranks", "2", "--price", "3", "--explain")
    assert code == 0, errors
    plan = make_plan(recipe(), ranks=2, price=3)
    report, explained = out.split("\n\nWhere the numbers come from\n")
    assert report.startswith("Plan: lora on 2 x cpu, ") and "Where" not in make_plan(recipe(), ranks=2).to_text()
    for line in plan.lines:
        assert f"  {line.cause}: " in explained and f"{line.formula} = {line.bytes:,}" in explained
    for name in plan.explained:
        assert f"\n  {name}: " in explained
    peak = re.search(r"^  peak, while the weights are loaded: (.*) = ([\d,]+)$", explained, re.M)
    assert value_of(peak[1]) == plan.peak_bytes == value_of(peak[2])
    assert re.search(r"^  cost, high: 3 x \S+ device-hours = \S+$", explained, re.M)


# ---- side by side ----


def test_full_and_lora_on_several_ranks(recipe):
    found = compare_plans(recipe(), ranks=2, price=12, currency="CNY")
    assert [(plan.method, plan.ranks) for plan in found.plans] == [
        ("lora", 1), ("lora", 2), ("lora", 4), ("full", 1), ("full", 2), ("full", 4),
    ]  # fmt: skip
    assert found.own == make_plan(recipe(), ranks=2, price=12, currency="CNY") == found.plans[1]
    assert found.plans[5] == make_plan(recipe(method="full"), ranks=4, price=12, currency="CNY")
    text = found.to_text().splitlines()
    names = ["method", "ranks", "peak a rank", "usable", "fits", "tokens/s", "time", "device-hours", "cost"]
    rows = [re.split(" {2,}", line) for line in text[:7]]
    assert rows[0] == names and all(len(row) == 9 and row[4] == "yes" and row[8].endswith(" CNY") for row in rows[1:])
    starts = [text[0].index(name) for name in names]
    assert all(line[start - 1] == " " != line[start] for line in text[1:7] for start in starts[1:])  # in columns
    assert text[7] == "" and text[8].startswith("This recipe: lora on 2. Fastest that fits: ")
    fewest = min(found.plans, key=lambda plan: plan.device_hours[1])
    assert text[8].endswith(f" Fewest device-hours: {fewest.method} on {fewest.ranks}.")
    assert "cost" not in compare_plans(recipe(), ranks=2).to_text().splitlines()[0]


def test_numbers_of_ranks(recipe):
    def counts(**options):
        return sorted({plan.ranks for plan in compare_plans(options.pop("config", recipe()), **options).plans})

    assert counts(ranks=3) == [1, 2, 3, 4]
    assert counts(ranks=2, config=recipe(train={"replicas": 2})) == [2, 4]
    card = example("qwen3_8b_lora_4x4090")
    assert counts(config=card, devices="4x4090") == [2, 4, 8, 16]
    assert counts(config=card, devices="1xa800") == [1, 2, 4]
    assert counts(ranks=4, rows=2, mean_tokens=8) == [1, 2, 4]  # more ranks than rows is no error


def test_what_does_not_fit_is_shown_and_not_timed(capsys):
    found = compare_plans(example("qwen3_8b_lora_4x4090"), devices="4x4090")
    fits = {(plan.method, plan.ranks): plan.fits for plan in found.plans}
    assert fits["lora", 4] and not fits["full", 4]
    rows = {tuple(line.split()[:2]): re.split(" {2,}", line) for line in found.to_text().splitlines()[1:9]}
    assert (
        rows["full", "4"][4:] == ["no", "-", "-", "-"]
        and rows["lora", "4"][4] == "yes"
        and "-" not in rows["lora", "4"]
    )
    nothing = compare_plans(example("qwen3_8b_lora_4x4090", method="full"), devices="1xl4")
    if not any(plan.fits for plan in nothing.plans if plan.method == "full"):
        assert not nothing.own.fits and nothing.to_text()  # the recipe's own does not fit, and no error is raised


def test_nothing_fits(recipe, monkeypatch):
    monkeypatch.setattr(search, "read_machine", lambda: dataclasses.replace(CPU, memory_bytes=700_000_000))
    found = compare_plans(recipe(), ranks=2)
    assert not any(plan.fits for plan in found.plans)
    assert "Nothing of this fits: fullshard plan without --compare" in found.to_text()
    assert "\nDoes not fit: " in found.own.to_text()


def test_the_command_line_compares(recipe, capsys):
    recipe()
    code, out, errors = run_cli(capsys, "plan", "recipe.yaml", "--ranks", "2", "--compare")
    assert code == 0 and out.splitlines()[0].split()[:2] == ["method", "ranks"], errors
    options = ["--price", "12", "--currency", "CNY", "--json"]
    code, out, errors = run_cli(capsys, "plan", "recipe.yaml", "--ranks", "2", "--compare", *options)
    plans = json.loads(out)["plans"]
    assert code == 0 and len(plans) == 6 and json.loads(out)["own"] == plans[1], errors
    for plan in plans:
        assert plan["cost"] == pytest.approx([12 * hours for hours in plan["device_hours"]])
        low, high = plan["seconds_low"] * plan["ranks"] / 3600, plan["seconds_high"] * plan["ranks"] / 3600
        assert plan["device_hours"] == pytest.approx([low, high]) and plan["currency"] == "CNY"
    code, out, _ = run_cli(capsys, "plan", "recipe.yaml", "--ranks", "2", *options)
    plan = json.loads(out)
    assert code == 0 and isinstance(plan, dict) and plan["fits"] is True and plan["price"] == 12
    assert {"where", "causes"} == set(plan["peak"]) and plan["disk_bytes"] > 0 and plan["host_bytes"] > 0
    assert set(plan["kernel_seconds"]) >= {"matrices", "attention", "wire", "optimizer", "hidden", "total"}
    assert fullshard.compare_plans is compare_plans  # the same in Python


def test_tokens_a_second_are_those_of_a_mean_step(recipe):
    plan = make_plan(recipe(), ranks=2)
    assert plan.tokens_per_second[0] == pytest.approx(180 / plan.step_seconds[1])  # 10 rows of 18 tokens
    assert plan.tokens_per_second[1] == pytest.approx(180 / plan.step_seconds[0])
