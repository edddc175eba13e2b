"""The audit of prepared data: lengths, copies and overlap as numbers, as tables and as an HTML page."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fullshard.config import RunConfig
from fullshard.data.chat import load_tokenizer
from fullshard.data.near import THRESHOLD, find_copies
from fullshard.data.prepared import PreparedData, open_prepared, prepare
from fullshard.model.fetch import with_model_folder
from fullshard.report.page import Cell, bars, marked, page, round_step, table
from fullshard.run_folder import DATA, write_json

LANGUAGES = ("en", "zh")
NAMED = 100  # pairs of each kind in data.json and on the page
BINS = 12  # of a histogram, at most
EXAMPLES, HEAD, TAIL = 10, 900, 300  # rows on the page; tokens shown of one that is longer than both
Table = tuple[str, list[str], list[list[Cell]]]  # heading, names of the columns, rows


def audit_data(config: RunConfig, folder: Path, page_path: Path, lang: str = "en") -> dict[str, Any]:
    """Prepare the recipe's data into ``folder``, write the HTML page to ``page_path`` and return data.json's content.

    Its new key "audit", also written to the folder's data.json, holds figures and ``histograms`` of each split's
    lengths, for train how many rows are copies, and ``pairs``: kind -> [training row, what it repeats, Jaccard index]
    of the first 100. ``lang``: en or zh. Raises what ``prepare`` raises.
    """
    result = prepare(config, folder)
    splits = {name: open_prepared(folder, name) for name in ("train", "eval") if result[name]}
    rows = {name: _SourceRows(data) for name, data in splits.items()}
    audit = result["audit"] = {name: _lengths(data) for name, data in splits.items()} | {"pairs": {}}
    for kind, pairs in find_copies(rows["train"], rows.get("eval", ())).items():
        other = rows["eval" if "eval" in kind else "train"]
        named = [[rows["train"].origin(one), other.origin(two), round(value, 4)] for one, two, value in pairs[:NAMED]]
        audit["train"][kind], audit["pairs"][kind] = len(pairs), named
    tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
    page_path.write_text(_page(result, splits["train"], tokenizer, lang), encoding="utf-8", errors="backslashreplace")
    write_json(folder / DATA, result)
    return result


def audit_tables(result: dict[str, Any], lang: str, limit: int = NAMED) -> list[Table]:
    """The tables of an audited data.json: figures, rows to look at, and at most ``limit`` copies of each kind."""
    words = _words(lang)
    splits = {name: result[name] | result["audit"][name] for name in ("train", "eval") if result[name]}
    figures, places = [], []
    for key, label in words["facts"].items():
        values = [split.get(key) or 0 for split in splits.values()]
        if any(values):
            figures.append([label, *(sum(value.values()) if isinstance(value, dict) else value for value in values)])
    for name, split in splits.items():
        for reason, count in (split["dropped"] | split.get("bad", {})).items():
            places.append([words[name], reason, count, ", ".join(split.get("places", {}).get(reason, []))])
    pairs = [[words["facts"][kind], *pair] for kind, found in result["audit"]["pairs"].items() for pair in found[:limit]]
    tables = [
        (words["counts"], ["", *(words[name] for name in splits)], figures),
        (words["left_out"], words["left_out_columns"], places),
        (words["copies"], words["copies_columns"], pairs),
    ]
    return [one for one in tables if one[2]]


class _SourceRows:
    """Token ids of the longest prepared row of each source row: what one row became is no copy of itself."""

    def __init__(self, data: PreparedData) -> None:
        self.data, self.numbers, last = data, array("q"), ""
        for number in range(len(data)):  # the copies by weight of a row, and its rows per answer, stand together
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


def _lengths(data: PreparedData) -> dict[str, Any]:
    """Figures of the rows as written; ``supervised`` counts the tokens of a row that can be predicted."""
    middle, most = np.percentile(data.lengths, [50, 95], method="inverted_cdf").tolist()
    histograms = {"length": _histogram(data.lengths), "supervised": _histogram(data.supervised)}
    share = f"{data.supervised.sum() / data.lengths.sum():.1%}"
    shortest = int(data.lengths.min())
    return {"share": share, "shortest": shortest, "median": middle, "most": most, "histograms": histograms}


def _histogram(values: np.ndarray) -> dict[str, int]:
    """The number of ``values`` in each of at most BINS equal bins, by the bin's range."""
    step = round_step(int(values.max() - values.min()) + 1, BINS - 1)
    first = int(values.min()) // step
    counts = np.bincount(values // step - first).tolist()
    edges = [(first + place) * step for place in range(len(counts))]
    return {f"{edge}–{edge + step - 1}" if step > 1 else f"{edge}": n for edge, n in zip(edges, counts, strict=True)}


def _page(result: dict[str, Any], train: PreparedData, tokenizer: Any, lang: str) -> str:
    """The page: the tables, the histograms, and ten training rows."""
    words = _words(lang)
    sections = {heading: [table(columns, rows)] for heading, columns, rows in audit_tables(result, lang)}
    sections.setdefault(words["copies"], [words["no_copies"]]).append(
        words["copies_text"].format(threshold=THRESHOLD, limit=NAMED)
    )
    sections[words["lengths"]] = [
        bars(list(found), list(found.values()), words[kind].format(words[name]), words["rows"])
        for name in ("train", "eval")
        for kind, found in result["audit"].get(name, {}).get("histograms", {}).items()
    ]
    examples = sections[words["examples"]] = [words["examples_text"]]
    for number in _chosen(train.lengths):
        ids, supervised = train.row(number)
        heading = words["example"].format(train.origin(number), len(ids), int(supervised.sum()))
        examples.append(marked(heading, list(_pieces(ids, supervised, tokenizer, words["gap"]))))
    return page(words["title"], list(sections.items()), lang)


def _chosen(lengths: np.ndarray) -> list[int]:
    """The longest row, the shortest, and others spread evenly: EXAMPLES in all where there are so many."""
    ends = list({int(lengths.argmax()): 0, int(lengths.argmin()): 0})
    others = np.delete(np.arange(len(lengths)), ends)
    count = min(EXAMPLES - len(ends), len(others))
    return ends + others[np.linspace(0, len(others) - 1, count).astype(int)].tolist()


def _pieces(ids: np.ndarray, supervised: np.ndarray, tokenizer: Any, gap: str) -> Iterator[tuple[str, bool]]:
    """The row as text, cut where the mask changes; of a long one the beginning and the end."""
    if len(ids) > HEAD + TAIL:
        yield from _pieces(ids[:HEAD], supervised[:HEAD], tokenizer, gap)
        yield gap.format(len(ids) - HEAD - TAIL), False
        ids, supervised = ids[-TAIL:], supervised[-TAIL:]
    borders = np.flatnonzero(np.diff(supervised)) + 1
    for part, marks in zip(np.split(ids, borders), np.split(supervised, borders), strict=True):
        yield tokenizer.decode(part.tolist()), bool(marks[0])


def _words(lang: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[lang]
