"""Writes docs/fsdp.md and docs/fsdp.zh-CN.md from their templates in docs/templates.

``python docs/fsdp_page.py`` fills them: excerpts and line counts from the engine's source, the padding table from
benchmarks/results/padding_*.json, bytes held and sent from the layout, measured figures from
benchmarks/results/engine_*.json ("not measured yet" where there is none). ``--trace`` first runs ``fullshard trace`` on a
small model and stores its pictures (docs/figures/fsdp_step*.svg) and what it counted (docs/fsdp_trace.json).
tests/product/test_fsdp_page.py holds that the pages are as this script writes them.
"""

from __future__ import annotations

import ast
import json
import random
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
SIMPLE = ROOT / "src" / "fullshard" / "shard" / "simple"
TRACE = DOCS / "fsdp_trace.json"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import padding  # noqa: E402

PAGES = {"en": "fsdp.md", "zh": "fsdp.zh-CN.md"}
MODEL, RANKS, MICRO_BATCHES, REPLICAS = "Llama-3.1-8B", 8, 4, 2
COMPUTE_BYTES, REDUCE_BYTES, REST_BYTES = 2, 4, 12  # bf16 values, fp32 sums; at rest: fp32 weights, Adam's two moments
BLOCK_BUFFERS = 3
# Excerpts: file, the first line and the last (each the first that starts so, stripped).
EXCERPTS = {
    "show_layout": ("layout.py", "slots, offset = [], 0", "return Layout("),
    "show_release": ("unit.py", "if self.held_bytes == 0:", "return self.flat"),
    "show_views": ("unit.py", "view = flat_P[", "self.parameters.append("),
    "show_phases": ("unit.py", "ALLOWED = {", "}"),
    "show_through": ("engine.py", "class _Through", "return (None, None, *gradients)"),
    "show_prefetch": ("unit.py", "def gather(self, coming", "unit.start_gather()"),
    "show_recompute": ("engine.py", "if torch._C._current_graph_task_id() != -1:  # recomputation", "return None"),
    "show_accumulate": ("unit.py", "if parameter.grad is not None:", "parameter.grad = None"),
    "show_hsdp": ("engine.py", "if self._replica_group is not None:", "dist.all_reduce(group.gradient_S"),
    "show_total": ("wire.py", "ordered = [", "return total"),
}
# What an idea takes: whole classes and functions, by file.
PARTS = {
    "lines_layout": {"layout.py": ["*"]},
    "lines_buffers": {"unit.py": ["GatherBuffer"]},
    "lines_phases": {"unit.py": ["Phase", "ALLOWED", "Group.enter"]},
    "lines_hooks": {"engine.py": ["*._before_forward", "*._after_forward", "*._before_backward", "*._after_backward", "_Through"]},
    "lines_schedule": {"engine.py": ["Schedule"], "unit.py": ["Unit.gather"]},
    "lines_accumulate": {"unit.py": ["Group.accumulate"]},
    "lines_wire": {"wire.py": ["*"]},
    "lines_safety": {"engine.py": ["*._agree", "*.microbatch"], "unit.py": ["Group.settle", "Group.reset"]},
    "lines_all": {name: ["*"] for name in ("layout.py", "wire.py", "unit.py", "engine.py")},
}  # fmt: skip
WORDS = {
    "en": {
        "columns": ["model", "ranks", "all: default", "all: ours", "worst unit: default", "worst unit: ours",
                    "LoRA: default", "LoRA: ours"],
        "strategies": ["blocks", "gradients reduced", "at rest", "gathered at most", "whole gradients, {m} micro-batches",
                       "sent, 1 micro-batch", "sent, {m} micro-batches"],
        "end": "after the last", "each": "at each", "hsdp": "`full`, HSDP {r} x {s}",
        "none": "Not measured yet: `python benchmarks/engine.py` on a quiet machine writes the file that this place shows.",
        "from": "From `benchmarks/results/{name}`: CPU, {backend}, {pairs} interleaved rounds, medians; {date}.",
        "timing": ["precision, tokens a rank", "simple, ms", "over fully_shard", "over its best settings", "over DDP"],
        "memory": ["precision, recomputation, micro-batches", "peak, simple, MB", "over fully_shard", "sent, simple, MB",
                   "over fully_shard"],
        "yes": "yes", "no": "no",
    },
    "zh": {
        "columns": ["模型", "rank 数", "全部：默认", "全部：我们", "最差单元：默认", "最差单元：我们", "LoRA：默认", "LoRA：我们"],
        "strategies": ["各块", "梯度何时规约", "常驻", "聚集时最多", "完整梯度，{m} 个 micro-batch", "发送，1 个 micro-batch",
                       "发送，{m} 个 micro-batch"],
        "end": "最后一个之后", "each": "每个都规约", "hsdp": "`full`，HSDP {r} x {s}",
        "none": "尚未测量：在空闲的机器上运行 `python benchmarks/engine.py`，它写出的文件会显示在这里。",
        "from": "来自 `benchmarks/results/{name}`：CPU，{backend}，{pairs} 轮交替，取中位数；{date}。",
        "timing": ["精度，每 rank 的 token", "simple，毫秒", "与 fully_shard 之比", "与其最佳设置之比", "与 DDP 之比"],
        "memory": ["精度，重算，micro-batch", "峰值，simple，MB", "与 fully_shard 之比", "发送，simple，MB", "与 fully_shard 之比"],
        "yes": "是", "no": "否",
    },
}  # fmt: skip


def excerpt(file: str, first: str, last: str) -> str:
    """The lines from the first that starts with ``first`` to the next that starts with ``last``, dedented."""
    lines = (SIMPLE / file).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(number for number in range(start, len(lines)) if lines[number].strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def count_lines(parts: dict[str, list[str]]) -> int:
    """Lines of the named classes, functions and assignments, decorators included; ``*``: of the whole file."""
    total = 0
    for file, names in parts.items():
        text = (SIMPLE / file).read_text(encoding="utf-8")
        if names == ["*"]:
            total += len(text.splitlines())
            continue
        found = {}
        for node in ast.parse(text).body:
            name = getattr(node, "name", "") or ast.unparse(getattr(node, "targets", [ast.Name("")])[0])
            found.setdefault(name, []).append(node)
            for inner in getattr(node, "body", []):
                for owner in (name, "*"):
                    found.setdefault(f"{owner}.{getattr(inner, 'name', '')}", []).append(inner)
        for node in (node for name in names for node in found[name]):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            total += node.end_lineno - first + 1
    return total


def newest(topic: str) -> list[tuple[str, dict]]:
    """Name and content of the topic's newest result, on each machine; the newest last."""
    paths = sorted(RESULTS.glob(f"{topic}_*.json"), key=lambda path: path.stem.rpartition("_")[::-2])
    by_machine = {path.stem.rpartition("_")[0]: path for path in paths}
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in by_machine.values()]


def rows_of(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def held_and_sent(
    sizes: list[int], strategy: str, each: bool, ranks: int, micro_batches: int, replicas: int = 1
) -> dict:
    """Bytes of one rank, by the layout. ``sizes``: padded elements of the blocks, then embedding, then [norm, head].

    Sent: of a gather the own shard to every other rank; of a reduction all pieces but the own one; across replicas the
    sum of a shard in a ring. ``whole``: fp32 gradients kept until the last micro-batch.
    """
    blocks, embedding, head = sizes[:-2], sizes[-2], sizes[-1]
    total, others = sum(sizes), (ranks - 1) / ranks
    once = micro_batches * (total if strategy == "keep" else total + sum(blocks))
    gathered = sum(blocks) + embedding + micro_batches * head if strategy == "replicate" else once
    buffers = total if strategy != "full" else BLOCK_BUFFERS * max(blocks) + embedding + head
    across = 2 * (replicas - 1) / replicas * REDUCE_BYTES * total / ranks
    reductions = micro_batches if each else 1
    return {
        "rest": REST_BYTES * total // ranks,
        "gathered": COMPUTE_BYTES * buffers,
        "whole": REDUCE_BYTES * total if micro_batches > 1 and not each else 0,
        "sent": round(others * (COMPUTE_BYTES * gathered + REDUCE_BYTES * total * reductions) + across),
    }


def strategy_table(words: dict) -> str:
    """What each strategy holds and sends, for MODEL on RANKS ranks."""
    units, _ = padding.groups_of(MODEL)
    rows = []
    for strategy, each, replicas in (
        ("full", False, 1), ("full", True, 1), ("keep", False, 1), ("keep", True, 1), ("replicate", False, 1),
        ("full", False, REPLICAS),
    ):  # fmt: skip
        ranks = RANKS // replicas
        sizes = [padding.ours(shapes, ranks) for shapes in units]
        one, more = (held_and_sent(sizes, strategy, each, ranks, count, replicas) for count in (1, MICRO_BATCHES))
        name = words["hsdp"].format(r=replicas, s=ranks) if replicas > 1 else f"`{strategy}`"
        values = one["rest"], one["gathered"], more["whole"], one["sent"], more["sent"]
        rows.append([name, words["each" if each else "end"], *(f"{value / 1e9:.1f}" for value in values)])
    return rows_of([column.format(m=MICRO_BATCHES) for column in words["strategies"]], rows)


def measured(words: dict) -> str:
    """Step times, memory and bytes of the newest runs of benchmarks/engine.py."""
    return "\n\n".join(measured_in(words, *result) for result in newest("engine")) or words["none"]


def measured_in(words: dict, name: str, found: dict) -> str:
    """The same of one run."""
    timing, held = [], []
    for case in found["timings"]:
        over, seconds = case["simple_over"], case["median_seconds"]["simple"]
        ratios = [f"{over[key]:.2f}" if key in over else "-" for key in ("fully_shard", "fully_shard best", "DDP")]
        timing.append([f"{case['precision']}, {case['tokens_per_rank']:,}", f"{seconds * 1e3:.0f}", *ratios])
    for ours in (case for case in found["memory_and_bytes"] if case["engine"] == "simple"):
        same = ("precision", "recompute", "micro_batches")
        theirs = next(
            case for case in found["memory_and_bytes"]
            if case["engine"] == "fully_shard" and all(case[key] == ours[key] for key in same)
        )  # fmt: skip
        row = [f"{ours['precision']}, {words['yes' if ours['recompute'] else 'no']}, {ours['micro_batches']}"]
        for key in ("peak_over_start_bytes", "loopback_bytes"):
            row += [f"{ours[key] / 1e6:.0f}", f"{ours[key] / theirs[key]:.2f}"]
        held.append(row)
    source = words["from"].format(name=name, **{key: found[key] for key in ("backend", "pairs", "date")})
    return "\n\n".join([source, rows_of(words["timing"], timing), rows_of(words["memory"], held)])


def page(lang: str) -> str:
    """One page: its template with everything filled in."""
    words, trace = WORDS[lang], json.loads(TRACE.read_text(encoding="utf-8"))
    name, found = newest("padding")[-1]
    values = {key: excerpt(*place) for key, place in EXCERPTS.items()}
    values |= {key: str(count_lines(parts)) for key, parts in PARTS.items()}
    values |= {"padding_table": padding.table(found["models"], words["columns"]), "padding_file": name}
    values |= {
        "strategy_table": strategy_table(words),
        "measured": measured(words),
        "model": MODEL,
        "ranks": str(RANKS),
    }
    values |= {key: f"{value:,}" for key, value in trace["numbers"].items()}
    text = (DOCS / "templates" / PAGES[lang]).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    return text


def pages() -> dict[Path, str]:
    """The pages by path."""
    return {DOCS / name: page(lang) for lang, name in PAGES.items()}


def numbers_of(found: dict) -> dict[str, int]:
    """What the text says of a trace: of rank 0."""
    events, blocks = found["events"][0], [unit for unit in found["units"] if ".layers." in unit["unit"]]
    begun = [place for place, event in enumerate(events) if event["what"] == "gather"]
    computing = [place for place in begun if events[place + 1]["what"] in ("forward", "backward")]
    ahead = [place for place in computing if events[place + 1]["unit"] != "the rest"]  # that is the model's own
    return {
        "trace_blocks": len(blocks), "trace_block_bytes": blocks[0]["bytes"],
        "trace_all_bytes": sum(unit["bytes"] for unit in found["units"]),
        "trace_peak_bytes": found["peak_bytes"], "trace_gathers": len(begun), "trace_ahead": len(ahead),
        "trace_gathered_peak": max(event["gathered_bytes"] for event in events),
    }  # fmt: skip


def trace() -> None:
    """Run the trace of the figure, in both languages' words, and store what the pages need of it."""
    import chapter_model
    import torch
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM

    import fullshard
    from fullshard.report.page import write_trace

    random.seed(0)
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    tokenizer = chapter_model.make_tokenizer()
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_hidden_layers": 6}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [chapter_model.chat(" ".join(random.choices(chapter_model.WORDS, k=120)), "red") for _ in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = {
        "model": {"path": str(folder / "model")}, "data": {"train": str(folder / "rows.jsonl"), "max_length": 256},
        "method": "full", "train": {"global_batch": "16 rows", "precision": "fp32"}, "output": str(folder / "run"),
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    found = fullshard.trace_run(folder / "recipe.yaml", output=folder / "step.html", ranks=2)
    for lang, ending in (("en", ""), ("zh", ".zh-CN")):
        write_trace(json.loads((folder / "step.json").read_text(encoding="utf-8")), folder / f"{lang}.html", lang)
        shutil.copy(folder / f"{lang}.svg", DOCS / "figures" / f"fsdp_step{ending}.svg")
    kept = {"command": "python docs/fsdp_page.py --trace", "torch": torch.__version__, "numbers": numbers_of(found)}
    TRACE.write_text(json.dumps(kept | {"units": found["units"]}, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder)


if __name__ == "__main__":
    if "--trace" in sys.argv[1:]:
        trace()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
