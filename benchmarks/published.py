"""Score the planner on published runs: memory, speed and what does not fit, every row predicted beside published.

    python benchmarks/published.py [ROWS.csv]          # scores, benchmarks/results/published_DATE.json, docs/planning.md
    python benchmarks/published.py [ROWS.csv] --fit    # first fit src/fullshard/planning/efficiency.yaml to the rows

Errors are taken per group (one published table) first, then averaged over the groups. `--fit` changes only the shares of
efficiency.yaml: one number per family of cards, kernel or kind of transfer, none per row. Held out: every group is predicted
once with shares that were fitted without it.
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
from published_rows import ROOT, ROWS, Case, case_of_row, number, out_of_scope, read_rows

from fullshard.planning.hardware import GIB
from fullshard.planning.memory import DEVICE_CONTEXT_BYTES, RESERVED_BAND, memory_lines, train_peak
from fullshard.planning.speed import micro_batch_seconds

EFFICIENCY = ROOT / "src" / "fullshard" / "planning" / "efficiency.yaml"
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
        "ascend": {"matrices": 0.95, "flash1": 0.45, "flash2": 0.65, "flash3": 0.65},
    },
    "kernels": {"plain": 2.5, "fused": 2.0, "compiled": 1.5, "adapter": 1.5},
    "width": 300.0, "small_heads": 0.85, "optimizer": 2.0, "block": 1e-4, "unit": 3e-4, "hop": 2e-6, "overlap": 0.75, "link": 0.6, "bus": 0.4, "node": 0.6,
}  # fmt: skip
HIGHEST = {"overlap": 1.0, "link": 0.95, "bus": 0.95, "node": 1.0, "matrices": 1.3, "small_heads": 1.0, "flash1": 0.9, "flash2": 0.9, "flash3": 0.9}
SAME = {"flash1": ("ampere", "ada", "consumer"), "flash2": ("ampere", "ada", "consumer"), "flash3": ("ampere", "ada", "consumer")}


def predicted_memory(case: Case) -> tuple[float, float]:
    """(allocated, whole plan with context and slack) in GiB."""
    lines = memory_lines(case.shape, case.job, case.practice)
    tensors = [line for line in lines if line.cause not in ("device context", "allocator slack")]
    return train_peak(tensors) / GIB, train_peak(lines) / GIB


def predicted_speed(case: Case, shares: dict[str, Any] | None = None) -> float:
    """Tokens per second of one device."""
    seconds = micro_batch_seconds(case.shape, case.job, case.card, case.run, case.practice, shares)["total"]
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


def of_groups(pairs: Sequence[tuple[str, float]], measure: Callable[[list[float]], float]) -> tuple[float, dict[str, float]]:
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
    return sorted(keys) + [(name,) for name in ("width", "small_heads", "optimizer", "block", "unit", "hop", "overlap", "link", "bus", "node")]


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


def fit(cases: Sequence[Case], pull: float = 0.15, rounds: int = 25) -> dict[str, Any]:
    """Shares by damped least squares on log(predicted / published); a group weighs as one, and large misses count less than
    their square. ``pull``: how hard a share that no row decides is held at START."""
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
