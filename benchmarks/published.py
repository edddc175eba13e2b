"""Score the planner on published runs: memory, speed and what does not fit, every row predicted beside published.

    python benchmarks/published.py [ROWS.csv]          # scores, results/published_DATE.json, docs/planning.md
    python benchmarks/published.py [ROWS.csv] --fit    # first fit src/fullshard/planning/efficiency.yaml to the rows

Errors are taken per group (one published table) first, then averaged over the groups. `--fit` changes only the shares
of efficiency.yaml: one number per family of cards, kernel or kind of transfer, none per row. Held out: every group is
predicted once with shares that were fitted without it.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from published_rows import RESERVED_BAND, ROOT, ROWS, Case, case_of_row, number, out_of_scope, read_rows

from fullshard.planning.hardware import GIB
from fullshard.planning.memory import memory_lines, train_peak
from fullshard.planning.plan import fit_of
from fullshard.planning.speed import EFFICIENCY, micro_batch_seconds

SHARES_FILE = ROOT / "src" / "fullshard" / "planning" / "efficiency.yaml"
USABLE_SHARE = 0.95  # as planning/search.py
START = {  # where the fit starts: what is usual in kernels' own benchmarks; a share moves away only as rows ask for it
    "families": {
        "ampere": {"matrices": 0.95, "flash1": 0.45, "flash2": 0.65, "flash3": 0.65},
        "hopper": {"matrices": 0.95, "flash1": 0.25, "flash2": 0.45, "flash3": 0.6},
        "capped": {"matrices": 0.8, "flash1": 0.25, "flash2": 0.45, "flash3": 0.6},
        "narrow": {"matrices": 1.1, "flash1": 0.5, "flash2": 0.75, "flash3": 0.85},
        "ada": {"matrices": 1.0, "flash1": 0.45, "flash2": 0.65, "flash3": 0.65},
        "consumer": {"matrices": 0.8, "flash1": 0.45, "flash2": 0.65, "flash3": 0.65},
        "blackwell": {"matrices": 0.7, "flash1": 0.15, "flash2": 0.25, "flash3": 0.5},
        "cdna": {"matrices": 0.8, "flash1": 0.25, "flash2": 0.4, "flash3": 0.4},
        "measured": {"matrices": 0.9, "flash1": 0.4, "flash2": 0.6, "flash3": 0.6},
        "ascend": {"matrices": 0.95, "flash1": 0.45, "flash2": 0.65, "flash3": 0.65},
    },
    "kernels": {"plain": 2.5, "fused": 2.0, "compiled": 1.5, "adapter": 1.5, "logits": 3.0},
    "width": 300.0, "small_heads": 0.85, "optimizer": 2.0, "block": 1e-4, "unit": 3e-4, "hop": 2e-6,
    "overlap": 0.75, "link": 0.6, "bus": 0.4, "node": 0.6,
}  # fmt: skip
HIGHEST = {
    "overlap": 1.0,
    "link": 0.95,
    "bus": 0.95,
    "node": 1.0,
    "matrices": 1.3,
    "small_heads": 1.0,
    "flash1": 0.9,
    "flash2": 0.9,
    "flash3": 0.9,
}
SAME = {
    "flash1": ("ampere", "ada", "consumer"),
    "flash2": ("ampere", "ada", "consumer"),
    "flash3": ("ampere", "ada", "consumer"),
}


def predicted_memory(case: Case) -> tuple[float, float]:
    """(allocated, whole plan with context and slack) in GiB."""
    lines = memory_lines(case.shape, case.job, case.practice)
    tensors = [line for line in lines if line.cause not in ("device context", "allocator slack")]
    return train_peak(tensors) / GIB, train_peak(lines) / GIB


def predicted_speed(case: Case, shares: dict[str, Any] | None = None) -> float:
    """Tokens per second of one device."""
    seconds = micro_batch_seconds(case.shape, case.job, case.card, case.run, case.practice, shares)["total"]
    seconds += case.host_seconds
    padding = case.run.tokens / (case.run.length * number(case.row["micro_batch"]))
    return case.run.tokens / seconds / padding


def percentile(values: Sequence[float], share: float) -> float:
    """Between neighbours where it falls between them."""
    return float(np.quantile(list(values), share))


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's, ties shared (values equal in three digits); None for fewer than three rows or for no spread."""

    def ranks(values: Sequence[float]) -> list[float]:
        rounded = [float(f"{value:.3g}") for value in values]
        return [sum(other < one for other in rounded) + sum(other == one for other in rounded) / 2 for one in rounded]

    first, second = ranks(left), ranks(right)
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def of_groups(
    pairs: Sequence[tuple[str, float]], measure: Callable[[list[float]], float]
) -> tuple[float, dict[str, float]]:
    """The mean over the groups of a measure of each group's values, and the groups' own."""
    groups: dict[str, list[float]] = {}
    for group, value in pairs:
        groups.setdefault(group, []).append(value)
    found = {group: measure(values) for group, values in sorted(groups.items())}
    return statistics.mean(found.values()), found


# ---- the fit ----


def keys_of(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """Paths of the shares that these rows say anything about."""
    families = {(case.card.family, case.run.attention) for case in cases}
    keys = {("families", family, "matrices") for family, _ in families}
    keys |= {("families", family, kernel) for family, kernel in families}
    keys |= {("kernels", case.run.kernels) for case in cases} | {("kernels", "adapter")}
    return sorted(keys) + [
        (name,)
        for name in ("width", "small_heads", "optimizer", "block", "unit", "hop", "overlap", "link", "bus", "node")
    ]


def with_shares(keys: list[tuple[str, ...]], logarithms: np.ndarray) -> dict[str, Any]:
    """START with other values at the keys; cards of one design share their attention."""
    shares = copy.deepcopy(START)
    for key, value in zip(keys, np.exp(logarithms), strict=True):
        place = shares
        for name in key[:-1]:
            place = place[name]
        place[key[-1]] = float(min(value, HIGHEST.get(key[-1], math.inf)))
    for kernel, families in SAME.items():
        for family in families[1:]:
            shares["families"][family][kernel] = shares["families"][families[0]][kernel]
    return shares


def fit(cases: Sequence[Case], pull: float = 0.15, rounds: int = 12) -> dict[str, Any]:
    """Shares by damped least squares on log(predicted / published); a group weighs as one, large misses count less
    than their square. ``pull``: how hard a share that no row decides is held at START."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.row["group"]] = counts.get(case.row["group"], 0) + 1
    keys = [key for key in keys_of(cases) if key[1:2] not in (("ada",), ("consumer",)) or key[-1] == "matrices"]
    weights = np.array([counts[case.row["group"]] ** -0.5 for case in cases])
    published = np.log([case.published_speed for case in cases])
    start = np.array([math.log(_at(key)) for key in keys])

    def misses(values: np.ndarray) -> np.ndarray:
        shares = with_shares(keys, values)
        rows = np.log([predicted_speed(case, shares) for case in cases]) - published
        return np.concatenate([weights * rows, pull * (values - start)])

    def cost(found: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1 + (found / 0.1) ** 2) - 1))

    values, damping = start.copy(), 0.01
    found = misses(values)
    for _ in range(rounds):
        slopes = np.stack([(misses(values + step) - found) / 1e-4 for step in 1e-4 * np.eye(len(values))], axis=1)
        soft = 1 / np.sqrt(1 + (found / 0.1) ** 2)
        square, gradient = slopes.T @ (slopes * soft[:, None]), slopes.T @ (soft * found)
        for _ in range(8):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -gradient)
            tried = misses(values + step)
            if cost(tried) < cost(found):
                break
            damping *= 5
        else:
            break
        values, damping, done = values + step, damping / 5, cost(found) - cost(tried) < 1e-5
        found = tried
        if done:
            break
    return with_shares(keys, values)


def _at(key: tuple[str, ...]) -> float:
    place: Any = START
    for name in key:
        place = place[name]
    return place


def fit_file(cases: Sequence[Case], held_out: dict[str, float]) -> str:
    """efficiency.yaml's text: the shares, the error bar and the rows that each card was checked on."""
    shares = fit(cases)
    ratios = [case.published_speed / held_out[case.row["id"]] for case in cases]
    checked: dict[str, int] = {}
    for case in cases:
        checked[case.card.name] = checked.get(case.card.name, 0) + 1
    shares["error"] = [percentile(ratios, 0.1), percentile(ratios, 0.9)]
    rounded = json.loads(json.dumps(shares), parse_float=lambda text: float(f"{float(text):.3g}"))
    head = SHARES_FILE.read_text(encoding="utf-8").split("devices:\n")[0]
    devices = {"devices": {**rounded, "checked": dict(sorted(checked.items()))}}
    return head + yaml.safe_dump(devices, sort_keys=False, default_flow_style=None, width=118)


def predict_held_out(cases: Sequence[Case]) -> dict[str, float]:
    """Tokens per second by row id, each group predicted with shares that were fitted to the other groups."""
    found = {}
    for group in sorted({case.row["group"] for case in cases}):
        shares = fit([case for case in cases if case.row["group"] != group])
        found |= {case.row["id"]: predicted_speed(case, shares) for case in cases if case.row["group"] == group}
    return found


# ---- the scores ----


def judge(row: dict[str, str], held_out: dict[str, float]) -> dict[str, Any]:
    """One row predicted beside published."""
    case = case_of_row(row)
    memory, whole = predicted_memory(case)
    speed = predicted_speed(case) if case.card and case.published_speed else None
    limit = case.card.usable_bytes / GIB if case.card else number(row["gpu_mem"])
    return {
        "id": row["id"], "group": row["group"], "core": row["core"], "model": row["model"], "method": row["method"],
        "card": case.card.name if case.card else row["gpu"], "devices": case.job.num_ranks,
        "length": row["seq_len"], "rows": row["micro_batch"], "recomputed": row["act_ckpt"],
        "memory_kind": "out of memory" if row["core"] == "fit-check" else case.memory_kind,
        "memory_published": case.published_memory, "memory_predicted": memory,
        "fits": fit_of(whole, USABLE_SHARE * limit) if limit else None,  # yes, tight or no, as plan and train judge
        "speed_published": case.published_speed, "speed_predicted": speed, "speed_held_out": held_out.get(row["id"]),
    }  # fmt: skip


def score(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The issue's figures of judged rows."""
    memory = [row for row in rows if row["memory_published"] and row["memory_kind"] == "allocated"]
    misses = [(row["group"], abs(row["memory_predicted"] / row["memory_published"] - 1)) for row in memory]
    reserved = [row for row in rows if row["memory_published"] and row["memory_kind"] == "reserved"]
    low, high = RESERVED_BAND
    inside = [(row["group"], low <= row["memory_published"] / row["memory_predicted"] <= high) for row in reserved]
    fast = [row for row in rows if row["speed_published"] and row["speed_predicted"]]
    figures: dict[str, Any] = {"rows": len(rows)}
    if misses:
        figures["memory_median"], figures["memory_median_of_groups"] = of_groups(misses, statistics.median)
        figures["memory_p90"], figures["memory_p90_of_groups"] = of_groups(misses, lambda v: percentile(v, 0.9))
        figures["memory_rows"] = len(misses)
    if inside:
        figures["reserved_inside_rows"] = statistics.mean(held for _, held in inside)
        figures["reserved_inside"], figures["reserved_inside_of_groups"] = of_groups(inside, statistics.mean)
        figures["reserved_rows"] = len(inside)
    for name in ("speed_predicted", "speed_held_out"):
        pairs = [(row["group"], abs(row[name] / row["speed_published"] - 1)) for row in fast if row[name]]
        if pairs:
            figures[name], figures[f"{name}_of_groups"] = of_groups(pairs, statistics.median)
    figures["speed_rows"] = len(fast)
    ranks = {}
    for group in sorted({row["group"] for row in fast}):
        table = [row for row in fast if row["group"] == group]
        columns = ([row[name] for row in table] for name in ("speed_predicted", "speed_published"))
        if (found := rank_correlation(*columns)) is not None:
            ranks[group] = found
    if ranks:
        figures["rank_correlation"], figures["rank_correlation_of_groups"] = statistics.mean(ranks.values()), ranks
    failed = [row for row in rows if row["core"] == "fit-check"]
    ran = [row for row in rows if row["core"] != "fit-check" and row["fits"] is not None]
    figures["out_of_memory_rows"], figures["ran_rows"] = len(failed), len(ran)
    for name, judged in (("out_of_memory", failed), ("ran", ran)):
        for answer, words in (("yes", "said_to_fit"), ("tight", "said_to_be_tight"), ("no", "said_not_to_fit")):
            figures[f"{name}_{words}"] = sum(row["fits"] == answer for row in judged)
    return figures


def other_rows(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """In scope but for core = no (near-duplicates, three a cluster are core): no constant was chosen by them alone."""
    others = [{**row, "core": "yes"} for row in rows if out_of_scope(row) == "not core" and row["completeness"] != "C"]
    return [judge(row, {}) for row in others]


def main() -> None:
    """Fit if asked, score, write the result file and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "rows", nargs="?", type=Path, default=ROWS, help="a file with the columns of published_runs.csv"
    )
    parser.add_argument("--fit", action="store_true", help="write efficiency.yaml from these rows first")
    parser.add_argument("--scores-only", action="store_true", help="print the scores; no held-out fits, no files")
    asked = parser.parse_args()
    rows = read_rows(asked.rows)
    scope = [row for row in rows if not out_of_scope(row)]
    cases = [case_of_row(row) for row in scope if row["core"] == "yes"]
    cases = [case for case in cases if case.card and case.published_speed]
    held_out = {} if asked.scores_only else predict_held_out(cases)
    if asked.fit:
        SHARES_FILE.write_text(fit_file(cases, held_out), encoding="utf-8")
        EFFICIENCY.update(yaml.safe_load(SHARES_FILE.read_text(encoding="utf-8")))
    judged = [judge(row, held_out) for row in scope]
    figures, others = score(judged), score(other_rows(rows))
    print(json.dumps({name: value for name, value in figures.items() if not isinstance(value, dict)}, indent=1))
    if asked.scores_only:
        return
    from published_page import write_page

    today = datetime.date.today()
    result = {
        "topic": "published", "command": "python benchmarks/published.py", "date": today.isoformat(),
        "hardware": "none: predictions beside figures that others published", "rows_file": asked.rows.name,
        "scores": figures, "other_rows": others, "rows": judged,
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"published_{today:%Y%m%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_page(result)
    print(f"wrote {path.relative_to(ROOT)} and docs/planning.md")


if __name__ == "__main__":
    main()
