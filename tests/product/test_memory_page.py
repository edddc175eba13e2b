"""docs/memory.md: the pages are what the script makes, and its key numbers come out by hand and by measurement."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from rank_pool import pool
from tiny_models import make_model, make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from fullshard.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "memory.md", ROOT / "docs" / "memory.zh-CN.md"]
SIZE = 8_190_735_360  # Qwen3-8B's model card


@pytest.fixture(scope="module")
def scripts():
    """The modules memory_page and memory_numbers."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import memory_numbers
        import memory_page
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return memory_page, memory_numbers


@pytest.fixture(scope="module")
def numbers(scripts):
    return scripts[1].compute()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


COMMANDS = [line for block in blocks(PAGES[0], "bash") for line in block.splitlines()]


def run(line: str):
    """A command of the page that succeeds, run in this process."""
    program, *arguments = shlex.split(line)
    assert program == "fullshard"
    return CliRunner().invoke(app, arguments, terminal_width=1000)


def test_the_pages_are_what_the_script_makes(scripts):
    made = scripts[0].pages()
    assert len(made) == 8  # two pages, three figures in two languages
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: python docs/memory_page.py"
        if path.suffix == ".svg":
            ElementTree.fromstring(text)


def test_both_pages_show_the_same_numbers():
    """Every number with a decimal point or a thousands comma, in tables and text, is in both languages."""
    first, second = (set(re.findall(r"\d[\d,]*[.,]\d+", page.read_text(encoding="utf-8"))) for page in PAGES)
    assert first - {"7.5"} == second  # 7.5 billion is 75 亿
    assert len(first) > 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_recipe_keys_exist(page):
    from fullshard.config import recipe_keys

    text = page.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert len(links) == 7
    assert not [name for name in links if not (page.parent / name).exists()]
    paths = re.findall(r"`((?:src|tests|examples|docs)/[\w./-]+)`", text)
    assert paths and not [name for name in paths if not (ROOT / name).exists()]
    keys = re.findall(r"`((?:train|data|model)\.\w+)", text)
    assert {"train.recompute", "data.packing", "model.path"} <= set(keys) <= set(recipe_keys())


def test_commands_are_the_same_and_named_by_the_script(scripts):
    assert [line for block in blocks(PAGES[1], "bash") for line in block.splitlines()] == COMMANDS
    assert scripts[0].VARIANTS[0] == ((), scripts[1].DEVICES)
    assert [scripts[0].command(*variant) for variant in scripts[0].VARIANTS] == COMMANDS


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = run(line)
    assert result.exit_code == 0, result.output
    if line == COMMANDS[0]:
        assert result.stdout == blocks(PAGES[0], "text")[0]


def test_refused_plans_say_what_the_page_says():
    shown = blocks(PAGES[0], "text")[1]
    refused = [part for part in re.split(r"^\$ ", shown, flags=re.M) if part]
    assert len(refused) == 2
    for part in refused:
        line, _, message = part.partition("\n")
        words = [sys.executable, "-m", "fullshard", *shlex.split(line)[1:]]
        result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr == message


def test_states_and_stages_by_hand(scripts, numbers):
    _, script = scripts
    assert numbers.shape.parameters == SIZE
    assert sum(script.TEXTBOOK.values()) == sum(script.OURS.values()) == 16
    held = [round(sum(script.stage_bytes(stage, SIZE, 8).values()) / 1e9, 1) for stage in script.STAGES]
    assert held == [131.1, 45.0, 30.7, 16.4]  # 16 N, 4 N + 12 N / 8, 2 N + 14 N / 8, 16 N / 8
    paper = [round(sum(script.stage_bytes(stage, 7.5e9, 64).values()) / 1e9, 1) for stage in script.STAGES]
    assert paper == [120.0, 31.4, 16.6, 1.9]  # the ZeRO paper's figure 1
    assert [worth for _, worth in script.STAGES.values()] == [2, 2, 2, 3]
    assert script.sent_bytes(3, 8e9, 8, 2) == 1.5 * script.sent_bytes(2, 8e9, 8, 2) == 42e9


def test_model_by_hand(numbers):
    """A block: q and o 4096^2, k and v 4096 x 1024, three of 4096 x 12288, norms 2 x 4096 and 2 x 128."""
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert numbers.shape.block == block == 192_946_432
    assert 36 * block + 2 * 151_936 * 4096 + 4096 == SIZE
    counted = numbers.models[0]
    assert counted.formula == 12 * 36 * 4096**2 == 7_247_757_312
    assert (counted.attention, counted.mlp) == (2.5, 9.0)
    for other in numbers.models:  # the matrices in units of h^2 give back the blocks, norms aside
        matrices = (other.attention + other.mlp) * other.shape.num_layers * other.shape.hidden_size**2
        assert matrices == pytest.approx(other.shape.blocks, rel=1e-3)


def test_activations_by_hand(scripts, numbers):
    _, script = scripts
    row, hidden = 4096, 4096
    # inputs of the norms' product (4 norms: 13,312 features), of q k v and of gate and up, query, key, value, output
    assert numbers.sdpa["tensors"] == row * 2 * (13_312 + 4096 + 4096 + 4096 + 1024 + 1024 + 4096)
    assert numbers.sdpa["mlp"] == row * 2 * 4 * 12_288
    assert numbers.sdpa["norms"] == row * 4 * 13_312
    assert numbers.sdpa["statistics"] == row * 4 * (1 + 1 + 32 + 8 + 32)  # norms: row, head, key head; softmax: head
    assert set(numbers.sdpa) == {"tensors", "mlp", "norms", "statistics"}
    more = sum(numbers.packed.values()) - sum(numbers.sdpa.values())
    assert more == row * (2 * row + 2 * 2 * (4096 - 1024))  # its own 16-bit mask; keys and values for all heads
    assert numbers.eager["scores"] == row * row * 32 * (4 + 2)  # the softmax in fp32, and in bf16 for the product
    assert script.working_bytes(row, row, hidden, 32, 1) == row * (65_536 + 262_144)
    assert script.unfused_bytes(row, row, hidden, 32) == row * (139_264 + 655_360)
    assert script.checkpointed_bytes(16_384, hidden, 36, 1) == 4_831_838_208
    assert script.line_of(numbers.plan, "block inputs").bytes == 4_831_838_208


@pytest.mark.parametrize(("attention", "packed"), [("sdpa", False), ("sdpa", True), ("eager", False)])
def test_tensors_without_data_keep_what_real_ones_keep(scripts, attention, packed):
    _, script = scripts
    small = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = script.shipped_settings(script.MODEL) | small | {"head_dim": 64}
    fake, real = (script.measured_block_bytes(settings, attention, 192, packed, fake) for fake in (True, False))
    assert fake == real
    assert ("scores" in real) == (attention == "eager")


def test_figure_of_a_step_by_hand(numbers):
    plan, moments = numbers.plan, numbers.moments
    states = 3 * SIZE // 2  # (4 + 8) / 8 bytes a parameter: masters and moments of 8 ranks
    assert moments[0].total == moments[-1].total == states + 900 * 2**20
    assert len(moments) == 2 + 2 * 38 + 1  # embedding, 36 blocks, head; rest before and after; the optimizer
    highest = max(moments, key=lambda moment: moment.total)
    assert (highest.phase, highest.unit) == ("backward", "block 36")
    head, block = 151_936 * 4096 + 4096, 192_946_432
    traced = 16_384 * 215_336 + 2 * 2 * 4096 * 128  # the page's measured block; the first one has the rotary tables
    passing = 2 * 2 * block + 4_831_838_208 + traced + 4 * head + -(-4 * (head + block) // 8)
    assert highest.total == states + 900 * 2**20 + passing
    assert all(moment.total <= plan.moments["train"] for moment in moments)
    assert moments[-2].live["gradients"] == SIZE // 2


class Sizes(TorchDispatchMode):
    """Elements of every all-gather (its output) and reduce-scatter (its input), with their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator.namespace == "c10d" and operator._opname in ("_allgather_base_", "_reduce_scatter_base_"):
            whole = max(arguments[:2], key=lambda tensor: tensor.numel())
            key = f"{operator._opname} {whole.dtype}"
            self.found[key] = self.found.get(key, 0) + whole.numel()
        return operator(*arguments, **(keywords or {}))


def count_a_step(ranks, folder: str, micro_batches: int) -> dict[str, int]:
    """What one step of ``micro_batches`` with recomputation puts on the wire, in bf16 on the torch engine."""
    from fullshard.config import config_from_dict
    from fullshard.train.precision import precision_of
    from fullshard.train.setup import build_sharded

    recipe = {"model": {"path": folder}, "data": {"train": "none.jsonl"}, "method": "full", "output": "none"}
    recipe["engine"] = "torch"
    built = build_sharded(config_from_dict(recipe), ranks, precision_of("bf16"), recompute=True)
    ids = torch.arange(8, 24)[None]
    sizes = Sizes()
    for index in range(micro_batches):
        with sizes, built.sharded.microbatch(last=index == micro_batches - 1):
            built.loss_model(ids, ids).backward()
    built.sharded.after_step()
    gradients = {str(shard.gradient.dtype) for shard in built.sharded.shards()}
    dist.barrier()
    return sizes.found | {"gradients": gradients}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_sends_what_the_page_says(scripts, tmp_path, micro_batches):
    """Blocks gathered twice a micro-batch, embedding and head once, in bf16; gradients reduced once a step, in fp32."""
    from fullshard.planning.shape import build_for_plan, shape_of

    folder = make_tokenizer(make_model(tmp_path / "model", "qwen3", tie_word_embeddings=False))
    shape = shape_of(build_for_plan(str(folder)))
    assert not shape.tied and shape.head > 0
    expected = scripts[1].gathered_in_a_step(shape, micro_batches)
    assert expected == micro_batches * (shape.embedding + 2 * shape.blocks + shape.head)
    for found in pool(2).run(count_a_step, str(folder), micro_batches):
        assert found == {
            "_allgather_base_ torch.bfloat16": expected,
            "_reduce_scatter_base_ torch.float32": shape.parameters,
            "gradients": {"torch.float32"},
        }
