"""docs/fsdp.md: the example on a bare module, the padding table, and the pages as their script makes them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rank_pool import free_port, pool

ROOT = Path(__file__).parents[2]
BARE = ROOT / "examples" / "learn" / "simple_engine_bare.py"
PAGES = [ROOT / "docs" / name for name in ("fsdp.md", "fsdp.zh-CN.md")]
BLOCK = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096  # Llama-3.1-8B: q, o; k, v; the MLP; two norms
EMBEDDING = 128256 * 4096
LLAMA = 32 * BLOCK + 2 * EMBEDDING + 4096


@pytest.fixture(scope="module")
def script():
    """The module fsdp_page."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import fsdp_page
    finally:
        sys.path[:] = before
    return fsdp_page


def test_a_bare_module_learns_as_unsharded(tmp_path):
    assert len(BARE.read_text(encoding="utf-8").splitlines()) <= 60
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(BARE)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    # two processes write to one pipe: what one prints may stand behind the other's on a line
    pairs = re.findall(r"step \d: loss (\S+) on 2 ranks, ([\d.]+) unsharded", done.stdout)
    assert len(pairs) == 5
    for sharded, whole in pairs:
        assert abs(float(sharded) / float(whole) - 1) < 1e-5, done.stdout
    held = re.findall(r"rank \d holds ([\d,]+) of ([\d,]+)", done.stdout)
    whole = (8 * 48 + 48) + 4 * (2 * 48 + 2 * 4 * 48 * 48 + 5 * 48) + (48 + 1)
    assert {int(total.replace(",", "")) for _, total in held} == {whole}
    assert sum(int(own.replace(",", "")) for own, _ in held) == whole


def test_padding_by_hand(script):
    ours, default = script.padding.ours, script.padding.fully_sharded
    assert (ours([(15, 7), (15,), (3,)], 4), default([(15, 7), (15,), (3,)], 4)) == (4 * 256, 16 * 7 + 16 + 4)
    experts = [(8, 1000, 520), (8, 3)]  # 4,160,024 elements: 254 blocks of 64 x 256; 8 rows become 64
    assert (ours(experts, 64), default(experts, 64)) == (254 * 64 * 256, 8 * 4_160_000 + 64 * 3)
    assert 1 < ours(experts, 64) / 4_160_024 < 1.0004


def test_padding_results(script):
    """At most 1.03 for every model; Llama's figures come out of its shapes again."""
    [(name, found)] = script.newest("padding")
    assert set(found["models"]) == {"Llama-3.1-8B", "Qwen3-30B-A3B", "Mixtral-8x7B"}
    for model in found["models"].values():
        assert set(model["ranks"]) == {"8", "64", "256"}
        for both in model["ranks"].values():
            assert set(both["ours"]) == {"full", "worst", "lora"} and 1 <= max(both["ours"].values()) <= 1.03
    assert found["models"]["Mixtral-8x7B"]["ranks"]["256"]["fully_shard"]["worst"] > 31
    llama = found["models"]["Llama-3.1-8B"]
    units, adapters = script.padding.groups_of("Llama-3.1-8B")
    assert sum(map(script.padding.real, units)) == llama["parameters"] == LLAMA
    per_block = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)  # q, o; k, v; the MLP's three
    assert script.padding.real(adapters) == llama["adapters"] == 32 * 16 * per_block
    for ranks, both in llama["ranks"].items():
        assert script.padding.ratios(units, adapters, int(ranks)) == both
    assert name in PAGES[0].read_text(encoding="utf-8")


def test_held_and_sent_by_hand(script):
    """8 ranks; every unit of Llama-3.1-8B is a multiple of 8 x 256 elements, so nothing is padding."""
    sizes = [BLOCK] * 32 + [EMBEDDING, EMBEDDING + 4096]
    blocks = 32 * BLOCK
    full = script.held_and_sent(sizes, "full", False, 8, 4)
    assert full["rest"] == 12 * LLAMA // 8 and full["whole"] == 4 * LLAMA
    assert full["gathered"] == 2 * (3 * BLOCK + 2 * EMBEDDING + 4096)
    assert full["sent"] == 7 * (4 * 2 * (2 * blocks + 2 * EMBEDDING + 4096) + 4 * LLAMA) // 8
    keep = script.held_and_sent(sizes, "keep", True, 8, 4)
    assert (keep["gathered"], keep["whole"]) == (2 * LLAMA, 0) and keep["sent"] == 7 * (4 * 2 + 4 * 4) * LLAMA // 8
    replicate = script.held_and_sent(sizes, "replicate", False, 8, 1)
    assert replicate["sent"] == 7 * (2 + 4) * LLAMA // 8 and replicate["whole"] == 0
    hybrid = script.held_and_sent(sizes, "keep", False, 4, 1, replicas=2)
    assert hybrid["rest"] == 3 * LLAMA and hybrid["sent"] == (3 * (2 + 4) + 4) * LLAMA // 4


def count_events(ranks, strategy: str, reduce_each: bool, micros: int) -> tuple[list[dict], Counter]:
    """The plan of a step, and what happened in it."""
    import torch
    from odd_model import make_model, tokens_of
    from test_engines import shard

    sharded = shard(
        make_model(False, True, False, torch.float32),
        ranks,
        "simple",
        torch.float32,
        strategy=strategy,
        reduce_each=reduce_each,
    )
    for step in range(2):
        sharded.events = []
        for micro in range(micros):
            with sharded.microbatch(micro == micros - 1):
                sharded.module(tokens_of(step, micro, ranks.rank)).backward()
        sharded.after_step()
    assert sharded.events[-1]["held_bytes"] == sharded.events[-1]["gathered_bytes"] == 0
    return sharded.planned(micros), Counter((event["what"], event["unit"]) for event in sharded.events)


@pytest.mark.parametrize("strategy", ["full", "keep", "replicate"])
def test_transfers_of_a_step_are_those_of_the_formula(strategy, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "parity"))
    for reduce_each, micros in itertools.product((False, True), (1, 3)):
        for planned, counts in pool(2).run(count_events, strategy, reduce_each, micros):
            for unit in planned:
                found = {kind: counts[kind, unit["unit"]] for kind in unit["planned"]}
                assert found == unit["planned"], (strategy, reduce_each, micros, unit)
            block = next(unit["planned"] for unit in planned if unit["unit"] == "blocks.1")
            times = {"full": 2 * micros, "keep": micros, "replicate": 1}[strategy]
            reduces = micros if reduce_each and strategy != "replicate" else 1
            assert block == {"gather": times, "free": times, "reduce": reduces}


def test_the_pages_are_what_the_script_makes(script):
    for path, text in script.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: python docs/fsdp_page.py"
        assert not re.search(r"\{[a-z_]+\}", text)


def test_both_pages_show_the_same(script):
    first, second = (path.read_text(encoding="utf-8") for path in PAGES)
    assert re.findall(r"```python\n.*?```", first, re.S) == re.findall(r"```python\n.*?```", second, re.S)
    numbers = [re.findall(r"\d[\d,]*\.\d+|\d+(?:,\d{3})+", text) for text in (first, second)]
    assert sorted(numbers[0]) == sorted(numbers[1]) and len(numbers[0]) > 80
    for path, text in zip(PAGES, (first, second), strict=True):
        names = re.findall(r"\]\(([^)#]+)\)", text) + [
            f"../{name}" for name in re.findall(r"`((?:src|docs|tests|examples|benchmarks)/[\w./-]+)`", text)
        ]
        assert len(names) >= 6 and not [name for name in names if not (path.parent / name).exists()]


def test_measured_figures_are_those_of_the_file(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert "not measured" in script.measured(script.WORDS["en"]).lower()
    case = {"precision": "fp32", "recompute": False, "micro_batches": 1}
    found = {
        "date": "2026-12-01", "backend": "gloo, 2 ranks x 1 thread", "pairs": 5,
        "timings": [{
            "precision": "fp32", "tokens_per_rank": 256, "median_seconds": {"simple": 0.7},
            "simple_over": {"simple": 1.0, "fully_shard": 0.72, "fully_shard best": 0.784, "DDP": 1.1},
        }],
        "memory_and_bytes": [
            {**case, "engine": "simple", "peak_over_start_bytes": 150e6, "loopback_bytes": 75e6},
            {**case, "engine": "fully_shard", "peak_over_start_bytes": 200e6, "loopback_bytes": 100e6},
        ],
    }  # fmt: skip
    (tmp_path / "engine_cpu2_20261201.json").write_text(json.dumps(found))
    made = script.measured(script.WORDS["zh"])
    assert "| fp32, 256 | 700 | 0.72 | 0.78 | 1.10 |" in made and "| fp32, 否, 1 | 150 | 0.75 | 75 | 0.75 |" in made
    assert "engine_cpu2_20261201.json" in made and "2026-12-01" in made
