"""docs/planning.md from a result of published.py: figures, formulas, every row, and why the large misses miss."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import yaml
from measuring import high
from published_rows import (
    COMPILED_LOGIT,
    DROPOUT_BYTES,
    FUSED_LOGIT,
    LITGPT_LOGIT,
    RESERVED_BAND,
    ROOT,
    SHIFTED_LOGIT,
    TORCH_LOGIT,
)

import fullshard

LARGE = 0.2  # a miss that is explained below
# The likely reason of a row's or a table's miss; an explanation is no correction: nothing above knows of these rows.
REASONS = {
    "P015": "79.1 GiB predicted of the card's 79.15, before its context; it ran, so this is too high",
    "P061": "the states of PagedAdamW8bit move page by page; 25 GB/s each way is assumed",
    "P080": "the table says `none? (config says false)`; it needs 56 GiB then, on a card of 24, so it ran with it",
    "P082": "24.1 GB on a card that has 23.6 GiB: what the allocator had taken, not what was needed",
    "P084": "states are paged by bitsandbytes: how much of them lies on the card, and how fast it moves, is not stated",
    "P103": "1.37 times the allocated, just outside the band: 9.3 GiB for each fp32 tensor of logits leave large holes",
    "P105": "0.6 billion parameters at 8,192 tokens: a short step, in which the trainer's own time on the host counts",
    "P241": "56 of 79 GiB are weights, gradients and states: short of memory, the allocator frees and asks again",
    "P293": "the 70B run on 128 cards does twice the tokens in 1.47 times the time; why is not stated",
    "P316": "which share of the blocks was recomputed is not stated; none is assumed, and half of them would do",
    "P317": "as P316",
    "P569": "96 kept inputs of blocks are 22.5 GiB and eager scores of one block 6; precision is not stated",
    "vectorlm": "16,384 x 128,256 logits at 12 bytes are 23.5 GiB beside 60 of bf16 weights, gradients and states; why"
    " they took less is not stated (rows shorter than the limit would explain it)",
    "ms-swift-bench": "rows of many lengths, each of which leaves blocks that the allocator cannot join; 151,936 words",
}

WORDS = {  # of the table of figures, in Chinese; longer ones first
    "tokens/s, median error, table held out": "tokens/s，留出整张表的中位误差",
    "tokens/s, median error": "tokens/s，中位误差",
    "allocated memory, median error": "allocated 显存，中位误差",
    "allocated memory, 90th percentile": "allocated 显存，第 90 百分位",
    "times the predicted allocated": "倍（预测的 allocated）之内",
    "reserved memory inside": "reserved 显存在",
    "order in a table, rank correlation": "表内次序，秩相关",
    "out-of-memory runs said to fit": "公布为显存不足而被判为放得下",
    "| figure | reached | wanted | rows |": "| 指标 | 达到 | 要求 | 行数 |",
    "| the plan says | of runs that ran | of runs out of memory |": "| 计划的判断 | 跑成的运行 | 显存不足的运行 |",
    "tight: may fit or not": "很紧：可能放得下，也可能放不下",
    "does not fit: refused": "放不下：拒绝",
    "| fits |": "| 放得下 |",
    "aim": "目标",
}


def percent(value: float | None) -> str:
    """12.3 %, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"


def signed(predicted: float | None, published: float | None) -> str:
    """Predicted over published, less one."""
    return f"{100 * (predicted / published - 1):+.0f} %" if predicted and published else "-"


def figure_table(scores: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """The issue's figures beside their limits."""
    low, high = RESERVED_BAND
    inside = f"reserved memory inside {low:g} to {high:g} times the predicted allocated"
    fits = f"{scores['out_of_memory_said_to_fit']} of {scores['out_of_memory_rows']}"
    rows = [
        ("allocated memory, median error", scores["memory_median"], "7 % (aim 5)", scores["memory_rows"]),
        ("allocated memory, 90th percentile", scores["memory_p90"], "20 % (aim 12)", scores["memory_rows"]),
        (inside, scores["reserved_inside"], "80 %", scores["reserved_rows"]),
        ("tokens/s, median error", scores["speed_predicted"], "20 % (aim 12)", scores["speed_rows"]),
        ("tokens/s, median error, table held out", scores["speed_held_out"], "-", scores["speed_rows"]),
    ]
    lines = ["| figure | reached | wanted | rows |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {percent(value)} | {wanted} | {count} |" for name, value, wanted, count in rows]
    lines += [
        f"| order in a table, rank correlation | {scores['rank_correlation']:.2f} | 0.90 | {scores['speed_rows']} |",
        f"| out-of-memory runs said to fit | {fits} | 0 | {scores['out_of_memory_rows']} |",
        "",
        "| the plan says | of runs that ran | of runs out of memory |",
        "|---|---:|---:|",
        *(
            f"| {answer} | {scores[f'ran_{name}']} | {scores[f'out_of_memory_{name}']} |"
            for answer, name in (
                ("fits", "said_to_fit"),
                ("tight: may fit or not", "said_to_be_tight"),
                ("does not fit: refused", "said_not_to_fit"),
            )
        ),
        "",
        f"Rows of the same scope that are not core ({others['rows']}: near-duplicates; no share was fitted to them):",
        f"memory {percent(others.get('memory_median'))} at the median and {percent(others.get('memory_p90'))} at the "
        f"90th percentile of {others.get('memory_rows', 0)} rows, tokens/s {percent(others.get('speed_predicted'))} of",
        f"{others['speed_rows']} rows.",
    ]
    return lines


def group_table(scores: dict[str, Any]) -> list[str]:
    """One line a published table."""
    names = ("memory_median", "memory_p90", "reserved_inside", "speed_predicted", "speed_held_out", "rank_correlation")
    columns = [scores[f"{name}_of_groups"] for name in names]
    lines = ["| table | memory, median | memory, 90th | reserved inside | tokens/s | held out | order |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for group in sorted({group for column in columns for group in column}):
        *shares, order = (column.get(group) for column in columns)
        order_text = "-" if order is None else f"{order:.2f}"
        lines.append(f"| {group} | {' | '.join(map(percent, shares))} | {order_text} |")
    return lines


def row_table(rows: list[dict[str, Any]]) -> list[str]:
    """Every row, predicted and published."""
    lines = ["| row | table | run | GiB published | predicted | | tokens/s published | predicted | | fits |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---:|---:|---|")
    for row in rows:
        kind = {"allocated": "", "reserved": " r", "unknown": " ?"}.get(row["memory_kind"], "")
        memory = (
            "OOM"
            if row["core"] == "fit-check"
            else f"{row['memory_published'] or ''}{kind * bool(row['memory_published'])}"
        )
        speeds = [f"{value:,.0f}" if value else "" for value in (row["speed_published"], row["speed_predicted"])]
        what = f"{row['model']}, {row['method'].split(' (')[0]}, {row['devices']} x {row['card']}, "
        what += f"{row['rows']} x {row['length']}"
        what += f", recomputed: {row['recomputed'].split(' (')[0]}"
        fits = row["fits"] or ""
        lines.append(
            f"| {row['id']} | {row['group']} | {what} | {memory} | {row['memory_predicted']:.2f} |"
            f" {signed(row['memory_predicted'], row['memory_published'])} | {speeds[0]} | {speeds[1]} |"
            f" {signed(row['speed_predicted'], row['speed_published'])} | {fits} |"
        )
    return lines


def miss_list(rows: list[dict[str, Any]]) -> list[str]:
    """Rows that miss by more than LARGE, or ran and would be refused, with the reason."""
    lines = []
    low, high = RESERVED_BAND
    for row in rows:
        found = []
        if row["memory_published"]:
            ratio = row["memory_predicted"] / row["memory_published"]
            is_in = row["memory_kind"] != "allocated" and low <= 1 / ratio <= high
            if abs(ratio - 1) > LARGE and not is_in:
                found.append(
                    f"memory {signed(row['memory_predicted'], row['memory_published'])} ({row['memory_kind']})"
                )
        if row["speed_predicted"] and abs(row["speed_predicted"] / row["speed_published"] - 1) > LARGE:
            found.append(f"tokens/s {signed(row['speed_predicted'], row['speed_published'])}")
        if row["fits"] == "no" and row["core"] != "fit-check":
            found.append("refused, though it ran")
        if found:
            reason = REASONS.get(row["id"]) or REASONS.get(row["group"]) or "not explained"
            lines.append(f"- **{row['id']}** ({row['group']}, {row['model']}): {', '.join(found)}: {reason}.")
    return lines or ["None."]


def cpu_texts() -> dict[str, str]:
    """Of the newest result of plan.py: its name, its errors by kind of run as a table, how far runs are apart."""
    path = max((ROOT / "benchmarks" / "results").glob("plan_*.json"), key=lambda path: path.stem[-8:])
    result = json.loads(path.read_text(encoding="utf-8"))
    runs = [run for run in result["configurations"] if "error" in run]

    def line(what: str, errors: list[float]) -> str:
        sizes, signs = list(map(abs, errors)), f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
        return f"| {what} | {len(sizes)} | {percent(statistics.median(sizes))} | {percent(high(sizes))} | {signs} |"

    lines = ["| runs | number | median error | 95th percentile | from, to |", "|---|---:|---:|---:|---:|"]
    lines.append(line("**peak memory, all**", [run["error"] for run in runs]))
    for engine, precision in itertools.product(("simple", "torch"), ("fp32", "bf16")):
        chosen = [run["error"] for run in runs if (run["engine"], run["precision"]) == (engine, precision)]
        lines.append(line(f"engine {engine}, {precision}", chosen))
    for recompute in ("none", "blocks"):
        chosen = [run["error"] for run in runs if run["recompute"] == recompute]
        lines.append(line(f"recompute {recompute}", chosen))
    last = [run["planned_bytes"] / run["measured_runs"][-1] - 1 for run in runs]
    lines.append(line("the last run alone", last))
    lines.append(line("**step time after the probe**", [run["time_error"] for run in runs if "time_error" in run]))
    apart = [max(several) / min(several) - 1 for run in runs if len(several := run["measured_runs"]) > 1] or [0.0]
    texts = {"cpu_name": path.stem, "cpu": "\n".join(lines)}
    return texts | {"runs_apart": percent(statistics.median(apart)), "runs_apart_most": percent(max(apart))}


def write_page(result: dict[str, Any]) -> None:
    """Write docs/planning.md and its Chinese form; tables of rows and reasons are in English in both."""
    scores, rows = result["scores"], result["rows"]
    shares = yaml.safe_load((ROOT / "src" / "fullshard" / "planning" / "efficiency.yaml").read_text(encoding="utf-8"))
    devices = shares["devices"]
    low, high = RESERVED_BAND
    families = ["| family | products | flash 1 | flash 2 | flash 3 |", "|---|---:|---:|---:|---:|"]
    for name, found in devices["families"].items():
        cells = " | ".join(f"{found[key]:g}" for key in ("matrices", "flash1", "flash2", "flash3"))
        families.append(f"| {name} | {cells} |")
    checked = ", ".join(f"{name} {count}" for name, count in devices["checked"].items())
    kernels = ", ".join(f"{name} {value:g}" for name, value in devices["kernels"].items())
    rest = ", ".join(
        f"{name} {devices[name]:g}" for name in ("width", "small_heads", "optimizer", "block", "unit", "hop")
    )
    rest += ", " + ", ".join(f"{name} {devices[name]:g}" for name in ("overlap", "link", "bus", "node"))
    figures = "\n".join(figure_table(scores, result["other_rows"]))
    texts = {
        "result_name": f"{result['topic']}_{result['date'].replace('-', '')}", "count": scores["rows"],
        "groups": "\n".join(group_table(scores)), "misses": "\n".join(miss_list(rows)),
        "rows": "\n".join(row_table(rows)),
        "families": "\n".join(families), "error": devices["error"], "checked": checked,
        "kernels": kernels, "rest": rest,
        "low": low, "high": high, "torch": TORCH_LOGIT, "compiled": COMPILED_LOGIT, "fused": FUSED_LOGIT,
        "shifted": SHIFTED_LOGIT, "litgpt": LITGPT_LOGIT, "dropout": DROPOUT_BYTES,
    }  # fmt: skip
    example = fullshard.load_config(ROOT / "examples" / "qwen3_8b_lora_4x4090.yaml")
    texts["compared"] = fullshard.compare_plans(example, devices="4x4090", price=2, currency="CNY").to_text()
    texts |= cpu_texts()
    chinese = figures
    for english, word in WORDS.items():
        chinese = chinese.replace(english, word)
    for ending, table in (("md", figures), ("zh-CN.md", chinese)):
        template = Path(__file__).with_name(f"published_page.{ending}").read_text(encoding="utf-8")
        (ROOT / "docs" / f"planning.{ending}").write_text(template.format(figures=table, **texts), encoding="utf-8")
