"""The audit of prepared data: lengths, copies and overlap as numbers, as tables and as a section of an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fullshard.config import RunConfig
from fullshard.data.near import THRESHOLD, find_copies
from fullshard.data.prepared import PreparedData, open_prepared, prepare
from fullshard.errors import UserError
from fullshard.report.page import Cell, bars, marked, page, round_step, table
from fullshard.run_folder import DATA, write_json

BINS = 12  # of a histogram, at most
NAMED = 100  # pairs of each kind in data.json and on the page
EXAMPLES, HEAD, TAIL = 10, 900, 300  # rows shown, and tokens shown of a longer one
LANGUAGES = ("en", "zh")


def audit_data(config: RunConfig, folder: Path, page_path: Path | None = None, lang: str = "en") -> dict[str, Any]:
    """Prepare into ``folder`` and return the content of data.json with the key "audit", which is written there too.

    "audit" holds ``threshold``, for each split its lengths, ``histograms`` and, for train, numbers of rows that are
    copies, and ``pairs``: kind -> [training row, what it repeats, Jaccard index] of the first 100. ``page_path``: where
    the HTML page goes, in ``lang`` (en or zh). Raises what ``prepare`` raises.
    """
    result = prepare(config, folder)
    splits = {name: open_prepared(folder, name) for name in ("eval", "train") if result[name]}
    rows = _SourceRows(list(splits.values()))
    copies = find_copies(rows, len(rows.parts[0][1]) if "eval" in splits else 0)
    audit: dict[str, Any] = {"threshold": THRESHOLD} | {name: _lengths(data) for name, data in splits.items()}
    audit["train"] |= {kind: len(pairs) for kind, pairs in copies.items() if "eval" in splits or kind in ("exact", "near")}
    audit["pairs"] = {
        kind: [[train.origin(row), (held_out if "eval" in kind else train).origin(other), value] for row, other, value in pairs[:NAMED]]
        for kind, pairs in copies.items()
    }
    result["audit"] = audit
    if page_path is not None:
        page_path.write_text(_page(config, result, splits, lang), encoding="utf-8", errors="backslashreplace")
    write_json(folder / DATA, result)
    return result


class _SourceRows(Sequence[np.ndarray]):
    """Ids of the longest prepared row of each source row: its copies by weight and its rows per answer are no copies."""

    def __init__(self, data: PreparedData) -> None:
        self.data, self.numbers = data, array("q")
        last = ""
        for number in range(len(data)):
            if (origin := data.origin(number)) != last:
                self.numbers.append(number)
            elif data.lengths[number] > data.lengths[self.numbers[-1]]:
                self.numbers[-1] = number
            last = origin

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.data.row(self.numbers[number])[0]

    def origin(self, number: int) -> str:
        return self.data.origin(self.numbers[number])
