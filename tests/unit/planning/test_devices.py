"""Plans for cards that are not here, from shipped configs: no weights, no data, no accelerator, no network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from fullshard import cli
from fullshard.config import config_from_dict, load_config
from fullshard.errors import ModelError, PlanError
from fullshard.planning.hardware import ACCELERATORS, GIB, find_accelerator, parse_devices
from fullshard.planning.search import make_plan
from fullshard.planning.shape import build_for_plan, shape_of, shipped_config

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "src" / "fullshard" / "planning" / "models"
QWEN3_8B = 8_190_735_360  # its model card's count
EXAMPLES = {
    "qwen3_8b_lora_4x4090": ("4x4090", 4, "cuda", 24),
    "qwen3_8b_full_8xa800": ("8xa800-80g", 8, "cuda", 80),
    "qwen3_8b_full_8x910b3": ("8x910b3-64g", 8, "npu", 64),
}


@pytest.fixture(autouse=True)
def empty_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def example(name: str, **changes):
    values = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    if values["method"] == "full":
        values.pop("lora", None)
    return config_from_dict(values)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_planned(name):
    devices, ranks, kind, sold = EXAMPLES[name]
    plan = make_plan(load_config(ROOT / "examples" / f"{name}.yaml"), devices=devices)
    assert (plan.ranks, plan.device, plan.precision) == (ranks, kind, "bf16")
    assert plan.peak_bytes <= plan.usable_bytes < sold * GIB
    assert plan.usable_bytes > 0.85 * sold * 1e9
    lines = {line.cause: line.bytes for line in plan.lines}
    if plan.method == "full":  # 16 bytes a parameter: fp32 master, gradient and two moments, on 8 ranks
        states = lines["fp32 masters"] + lines["fp32 gradients"] + lines["optimizer state"]
        assert states == pytest.approx(16 * QWEN3_8B / 8, rel=1e-6)  # 16.4 GB
        assert 25e9 < plan.peak_bytes < 45e9
        # 9,500 rows x 2,048 tokens x 2 epochs, 6 + 2 operations a weight, 8 cards at 15 - 66 % of about 300 TFLOP/s
        flops = 2 * plan.tokens * 8 * QWEN3_8B / 8
        assert flops / (0.66 * 312e12) < plan.seconds_low < plan.seconds_high < flops / (0.15 * 295e12)
    else:
        assert lines["frozen base"] == pytest.approx(2 * QWEN3_8B / 4, rel=1e-6)  # 4.1 GB
        # rank 16: 16 x (in + out) of q, k, v, o, gate, up, down in 36 blocks
        features = 8192 + 2 * (4096 + 1024) + 8192 + 3 * (4096 + 12288)
        assert lines["adapters"] == 16 * (16 * features * 36)
        assert 10e9 < plan.peak_bytes < 24e9
    text = plan.to_text()
    assert f"{ranks} x {plan.card}" in text and "micro-batches of" in text and "recomputed" in text
    checked = {"4090": "checked on 6 published runs", "a800": "checked on 2 published runs"}.get(
        plan.card, "not checked"
    )
    found = re.search(rf"^Speed: (.*) - (.*) tokens/s \(from the card's facts; {checked} of this card\)$", text, re.M)
    slow, fast = (float(speed.replace(",", "")) for speed in found.groups())
    assert 1.2 * slow < fast < 2 * slow  # the error bar
    assert re.search(r"^Time: .* - .* (minutes|hours)$", text, re.M)
    assert "(assumed)" in text and "10,000 rows" in text and "--rows and --mean-tokens" in text
    assert "config that fullshard ships" in text


def test_full_fine_tuning_on_four_4090_is_refused_with_what_fits():
    config = example("qwen3_8b_lora_4x4090", method="full")
    with pytest.raises(PlanError) as caught:
        make_plan(config, devices="4x4090")
    assert "4 ranks" in caught.value.message and "optimizer state 16.4 GB" in caught.value.message
    changes = [line.split("   (")[0].strip() for line in caught.value.hint.splitlines()[1:]]
    assert changes == ["method=lora", "train.optimizer=sgd", "--devices 8x4090"]
    assert make_plan(example("qwen3_8b_lora_4x4090", method="full"), devices="8x4090").peak_bytes < 24.2e9
    assert make_plan(example("qwen3_8b_lora_4x4090"), devices="4x4090").peak_bytes < 24.2e9


def test_rows_and_tokens_can_be_assumed():
    config = example("qwen3_8b_lora_4x4090", train={"epochs": 1})
    few, many = (make_plan(config, devices="4x4090", rows=rows, mean_tokens=500) for rows in (1000, 4000))
    assert (few.rows, few.tokens) == (950, 950 * 500)  # 5 % are held out
    assert "1,000 rows of 500 tokens are assumed" in few.to_text()
    assert 3 < many.num_steps / few.num_steps < 5 and many.seconds_high > 2 * few.seconds_high
    with pytest.raises(PlanError, match="2,048"):
        make_plan(config, devices="4x4090", mean_tokens=3000)


def test_a_data_file_that_is_there_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}] * 40
    (tmp_path / "data" / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = make_plan(example("qwen3_8b_lora_4x4090"), devices="4x4090")
    assert plan.rows == 38 and not plan.is_assumed and "estimated from file sizes" in plan.to_text()


@pytest.mark.parametrize(
    ("changes", "devices", "ranks", "needed"),
    [
        ({}, "4x4080", None, "Nearest known: 4090"),
        ({}, "8xa80", None, "a800"),
        ({}, "8x910b5", None, "910b3"),
        ({}, "4090", None, "8xa800-80g"),
        ({}, "0x4090", None, "8xa800-80g"),
        ({}, "8xv100-16g", None, "8xv100"),
        ({"train": {"precision": "tf32"}}, "8xv100", None, "no facts about its tf32"),
        ({"train": {"precision": "fp32"}}, "8x910a", None, "no facts about its fp32"),
        ({}, "4x4090", 2, "Leave --ranks out"),
    ],
)
def test_devices_that_cannot_be_planned(changes, devices, ranks, needed):
    with pytest.raises(PlanError) as caught:
        make_plan(example("qwen3_8b_lora_4x4090", **changes), ranks=ranks, devices=devices)
    assert needed in str(caught.value) and devices in caught.value.message


def test_names_of_cards():
    for card in ACCELERATORS:
        assert parse_devices(f"2x{card.name}") == (2, card)
    same = ["8xA800-80G", "8xa800-80gb", "8xa800", "8xnvidia-a800"]
    assert {parse_devices(text) for text in same} == {(8, find_accelerator("NVIDIA A800-SXM4-80GB"))}
    assert parse_devices("4xRTX-4090")[1] == parse_devices("4x4090-24g")[1] == parse_devices("4xrtx4090")[1]
    assert parse_devices("4x4090")[1] == find_accelerator("NVIDIA GeForce RTX 4090")
    assert parse_devices("8xascend910b3")[1] == parse_devices("8x910b3-64g")[1] == find_accelerator("Ascend910B3")
    assert parse_devices("8xh100-sxm-80g")[1] == parse_devices("8xh100")[1] == find_accelerator("NVIDIA H100 80GB HBM3")
    assert parse_devices("4x4090d")[1] == parse_devices("4xrtx-4090-d")[1]
    assert parse_devices("4x4090d")[1] == find_accelerator("NVIDIA GeForce RTX 4090 D") != parse_devices("4x4090")[1]
    assert parse_devices("8xa100-40g")[1].usable_bytes < 40 * GIB < parse_devices("8xa100-80g")[1].usable_bytes


@pytest.mark.parametrize("file", sorted(MODELS.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_configs_have_the_known_number_of_parameters(file):
    values = json.loads(file.read_text(encoding="utf-8"))
    assert values["source"] and set(values) == {"source", "parameters", "config"}
    name = file.stem.replace("--", "/")
    assert shipped_config(name) == file
    assert shape_of(build_for_plan(name)).parameters == values["parameters"]


def test_the_count_of_qwen3_8b():
    counts = {file.stem: json.loads(file.read_text())["parameters"] for file in MODELS.glob("*.json")}
    assert counts["Qwen--Qwen3-8B"] == QWEN3_8B
    assert counts["Qwen--Qwen3-0.6B"] == 596_049_920 and counts["Qwen--Qwen2.5-7B"] == 7_615_616_512


def test_a_folder_that_is_here_goes_before_the_shipped_config(tmp_path, k1_folder):
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen3-8B").symlink_to(k1_folder)
    assert shipped_config("Qwen/Qwen3-8B") is None
    assert shape_of(build_for_plan("Qwen/Qwen3-8B")).parameters < 1_000_000


def test_a_model_that_is_neither_here_nor_shipped_is_refused(tmp_path):
    with pytest.raises(ModelError, match="none"):
        make_plan(example("qwen3_8b_lora_4x4090", model={"path": str(tmp_path / "none")}), devices="4x4090")


def test_a_model_alone_is_planned_with_defaults(capsys, tmp_path, k1_folder, monkeypatch):
    """An id that is shipped, a folder; --method and keys as of a recipe. Neither file nor model, nor a key: refused."""
    monkeypatch.chdir(tmp_path)
    for model, wanted, longest in (("Qwen/Qwen3-8B", QWEN3_8B, 512), (str(k1_folder), None, 64)):  # its positions
        plans = {}
        for method in ("full", "lora"):
            with pytest.raises(SystemExit) as stopped:
                cli.main(["plan", model, "--method", method, "--devices", "8xh100", "data.max_length=512", "--json"])
            assert not stopped.value.code
            plans[method] = json.loads(capsys.readouterr().out)
        assert [plan["method"] for plan in plans.values()] == ["full", "lora"]
        assert plans["full"]["rows"] == 10_000 and plans["full"]["longest"] == longest and plans["full"]["is_assumed"]
        masters = next(line for line in plans["full"]["lines"] if "masters" in line["cause"])
        assert wanted is None or masters["bytes"] == 4 * wanted // 8
    for arguments in (["none"], ["none.yaml"], ["Qwen/Qwen3-8B", "--method", "some"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["plan", *arguments])
        assert stopped.value.code == 2
    assert not any(tmp_path.iterdir())
    here = make_plan(load_config(k1_folder, or_model=True), ranks=2)  # from Python, for this machine
    assert here.is_assumed and here.rows == 10_000


def test_command_line(capsys):
    recipe = str(ROOT / "examples" / "qwen3_8b_lora_4x4090.yaml")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", recipe, "--devices", "4x4090", "--rows", "100", "--mean-tokens", "64", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert not stopped.value.code and (plan["ranks"], plan["card"], plan["rows"]) == (4, "4090", 95)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", recipe, "--devices", "4x4090", "method=full", "lora.rank=8"])
    assert stopped.value.code == 2
