"""What became of every row: counts, reasons, and the lines that say so. And near copies among rows: 5-grams of token
ids, MinHash (Broder 1997) for candidates, then the true Jaccard index."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template

from fullshard.data.pack import scatter
from fullshard.data.sources import KEPT, Account

NO_SUPERVISED = "no supervised token"
TOO_LONG = "longer than max_length"
NOT_RENDERED = "not rendered"  # refused by the chat template, or of words that the tokenizer does not know
LARGEST = ("longest", "longest_written")  # of these figures the largest counts, the others add up
GRAM, THRESHOLD = 5, 0.8  # tokens; Jaccard index of two near copies' sets of 5-grams
BANDS, BAND_SIZE = 16, 5  # a pair at the threshold shares a band with probability 1 - (1 - 0.8**5)**16 = 99.8%
NEIGHBOURS = 32  # rows just before a row in a band, and first rows of that band, that the row is compared with
COMMON_ROWS, COMMON_SHARE = 100, 0.5  # from so many rows on, what more than this share of rows has is template
WEIGHTS = 0x9E3779B97F4A7C15 ** np.arange(1, GRAM + 1, dtype=np.uint64)  # of the places in a 5-gram; odd
NONE = np.empty(0, np.uint64)


@dataclass
class Audit(Account):
    """An account of source rows from here on, of (a part of) a split; ``used``: at least one training row is kept."""

    rows: int = 0  # source rows read, without copies by weight
    prepared: int = 0  # training rows written: copies, pieces of texts, rows per answer too
    partly: int = 0  # used rows that lost one of their training rows
    cut: int = 0  # training rows
    split: int = 0  # texts over max_length, in pieces
    split_rows: int = 0  # the training rows that these became
    tokens: int = 0
    supervised_tokens: int = 0  # supervised positions
    targets: int = 0  # supervised positions that can be predicted (all but a row's first)
    tokens_dropped: int = 0
    tokens_cut: int = 0
    longest: int = 0  # tokens of the longest row before cutting or dropping
    longest_written: int = 0  # and after
    special_strings: int = 0  # source rows that write out a special token where it is no answer
    refused: Counter[str] = field(default_factory=Counter)  # reason -> training rows that may not be dropped
    stops: Counter[str] = field(default_factory=Counter)  # supervised end-of-turn ids, as text: JSON keys
    unsupervised: list[tuple[str, int, int | None]] = field(default_factory=list)  # the first: origin, tokens, before
    not_rendered: list[tuple[str, str]] = field(default_factory=list)  # the first: message, hint

    def add(self, later: "Audit") -> None:
        """Take in the account of the rows that follow; its counts may be plain dicts, as ``vars`` read from JSON."""
        for name, value in vars(later).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            elif isinstance(mine, dict):
                mine.update({what: (mine.get(what, []) + places)[:KEPT] for what, places in value.items()})
            elif isinstance(mine, list):
                mine.extend(value[: 1 - len(mine)])
            else:
                setattr(self, name, max(mine, value) if name in LARGEST else mine + value)

    def to_json(self, account: Account) -> dict[str, Any]:
        """The numbers, for data.json: read = used + dropped + bad + blank (+ held_out). ``account``: of the reading."""
        facts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        facts |= {name: getattr(account, name) for name in ("read", "blank", "held_out")}
        facts |= {"shape": ", ".join(account.shapes), "bad": dict(account.bad), "dropped": dict(account.dropped)}
        facts |= {"places": self.places | account.places, "stop_tokens": self.stops.total()}
        special = {"rows": self.special_strings, "places": self.places.get("special_strings", [])}
        return facts | {"special_strings": special, "stop_ids": [int(text) for text, _ in self.stops.most_common()]}


def report_lines(macro: str, *facts: Any) -> list[str]:
    """The lines that a person reads, as a macro of report.txt has them."""
    text = Path(__file__).with_name("report.txt").read_text(encoding="utf-8")
    module = Template(text, undefined=StrictUndefined, trim_blocks=True).make_module({"n": "{:,}".format})
    return [line for line in getattr(module, macro)(*facts).split("\n") if line]


def near_copies(ids: Callable[[int], np.ndarray], num_rows: int, num_eval: int = 0) -> list[tuple[int, int, float]]:
    """Training rows that are like another row: (row, the other, their Jaccard index), in order of rows. ``ids`` gives
    the token ids (int32, at least one) of a row; rows below ``num_eval`` are held out. A training row has at most one
    pair with a held-out row and one with an earlier training row. Memory: below 100 bytes a row."""
    sample = np.linspace(0, num_rows - 1, min(1000, num_rows)).astype(int).tolist()
    values, counts = np.unique(np.concatenate([_grams(ids(row)) for row in sample]), return_counts=True)
    common = values[counts > COMMON_SHARE * len(sample)] if num_rows >= COMMON_ROWS else NONE
    keys = np.empty((num_rows, BANDS), np.uint32)
    factors = scatter(np.arange(1, BANDS * BAND_SIZE + 1, dtype=np.uint64)) | np.uint64(1)
    for row in range(num_rows):
        minima = (_grams(ids(row), common) * factors[:, None]).min(axis=1).reshape(BANDS, BAND_SIZE)
        keys[row] = scatter(scatter(minima) @ factors[:BAND_SIZE]) >> np.uint64(32)
    found: dict[tuple[int, bool], tuple[int, float]] = {}
    for band in keys.T:
        rows = np.argsort(band, kind="stable")
        same = np.diff(band[rows]) == 0
        rows = rows[np.append(same, False) | np.insert(same, 0, False)]
        places, starts = np.arange(len(rows)), np.searchsorted(band[rows], band[rows])
        for step in range(1, min(NEIGHBOURS, (places - starts).max(initial=0)) + 1):
            for others in (starts + step - 1, places - step):
                fits = (starts <= others) & (others < places) & (rows >= num_eval)
                for row, other in zip(rows[fits].tolist(), rows[others[fits]].tolist(), strict=True):
                    key = row, other < num_eval
                    if key not in found and (value := jaccard(ids(row), ids(other), common)) >= THRESHOLD:
                        found[key] = other, value
    return [(row, other, value) for (row, _), (other, value) in sorted(found.items())]


def jaccard(one: np.ndarray, other: np.ndarray, common: np.ndarray = NONE) -> float:
    """Size of the intersection over size of the union of two rows' 5-gram sets, without the hashes in ``common``."""
    first, second = _grams(one, common), _grams(other, common)
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _grams(ids: np.ndarray, common: np.ndarray = NONE) -> np.ndarray:
    """Hashes (uint64, unique) of a row's 5-grams (of fewer tokens: one); not those in ``common``, if it has others."""
    size = min(GRAM, len(ids))
    count, values = len(ids) - size + 1, ids.astype(np.uint64) + np.uint64(1)
    hashes = np.unique(scatter(sum(values[place : place + count] * WEIGHTS[place] for place in range(size))))
    own = hashes[~np.isin(hashes, common, assume_unique=True)] if len(common) else hashes
    return own if len(own) else hashes
