"""The audit of prepared data: its figures, near copies and rows as tables and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fullshard.config import RunConfig
from fullshard.data.chat import load_tokenizer
from fullshard.data.near import THRESHOLD, near_copies
from fullshard.data.prepared import PreparedData, open_prepared, prepare
from fullshard.model.fetch import with_model_folder
from fullshard.report.page import bars, marked, page, round_step, table
from fullshard.run_folder import DATA, write_json

NAMED = 100  # near copies of each kind in data.json and on the page
BINS = 12  # of a histogram, at most
EXAMPLES, HEAD, TAIL = 10, 900, 300  # rows on the page; tokens shown of one that is longer than both
PLACED = {"cut": "cut", "partly": "partly", "special_strings": "special"}  # figures, and what their places are under
WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))  # by language: en, zh


def audit_data(config: RunConfig, folder: Path, page_path: Path, lang: str = "en") -> dict[str, Any]:
    """Prepare the recipe's data into ``folder``, write the HTML page to ``page_path`` and return data.json's content.

    Its new key "audit", also written to the folder's data.json, holds figures and ``histograms`` of each split's rows,
    and ``near`` and ``near_eval``: ``rows`` (different training rows like another one, or like one of eval) and
    ``places``, of the first 100: [row, what it is like, Jaccard index]. ``lang``: en or zh. Raises what prepare raises.
    """
    result = prepare(config, folder)
    splits = {name: open_prepared(folder, name) for name in ("eval", "train") if result[name]}
    audit = result["audit"] = {name: _figures(data) for name, data in splits.items()}
    audit |= _near(splits)
    tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
    page_path.write_text(_page(result, splits["train"], tokenizer, lang), encoding="utf-8", errors="backslashreplace")
    write_json(folder / DATA, result)
    return result


def audit_tables(result: dict[str, Any], lang: str, limit: int = NAMED) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Heading, columns and rows: figures of an audited data.json, rows to look at, ``limit`` copies of each kind."""
    words, facts, known = WORDS[lang], WORDS[lang]["facts"], result | result["audit"]
    copies = {kind: known[kind] for kind in ("exact_duplicates", "near", "overlap", "near_eval")}
    splits = {name: result[name] | known[name] for name in ("train", "eval") if result[name]}
    splits["train"] |= copies
    figures = [[label, *(_count(split.get(key, 0)) for split in splits.values())] for key, label in facts.items()]
    noted: list[list[Any]] = []
    for name, split in splits.items():
        places = split["places"] | {facts[key]: split["places"].get(what) for key, what in PLACED.items()}
        counts = split["bad"] | split["dropped"] | {facts[key]: _count(split[key]) for key in PLACED}
        noted += [[words[name], what, count, ", ".join(places[what])] for what, count in counts.items() if count]
    pairs = [[facts[kind], *(*pair, 1.0)[:3]] for kind in copies for pair in copies[kind]["places"][:limit]]
    return [
        (words["counts"], ["", *(words[name] for name in splits)], [line for line in figures if any(line[1:])]),
        (words["noted"], words["noted_columns"], noted),
        (words["copies"], words["copies_columns"], pairs),
    ]


def _count(value: Any) -> Any:
    """A figure of data.json: rows with their places, a sum over reasons, or one number."""
    return value if not isinstance(value, dict) else value["rows"] if "rows" in value else sum(value.values())


def _near(splits: dict[str, PreparedData]) -> dict[str, dict[str, Any]]:
    """Near copies within train and of eval rows. A source row is compared by its last row, which has all turns."""
    chosen = []
    for data in splits.values():
        last = np.append(data.source_rows()[1:], len(data)) - 1
        chosen.append(last[np.sort(np.unique(data.content[last], return_index=True)[1])])  # equal ones: the first
    rows, num_eval = np.concatenate(chosen), sum(map(len, chosen[:-1]))

    def place(row: int) -> tuple[PreparedData, int]:
        return splits["eval" if row < num_eval else "train"], rows[row]

    near = near_copies(lambda row: PreparedData.row(*place(row))[0], len(rows), num_eval)
    content = splits["train"].content[rows[[row for row, _, _ in near]]]
    exact = np.isin(content, splits["eval"].content) if num_eval else [False] * len(near)  # these are the overlap
    found: dict[str, dict[str, Any]] = {kind: {"rows": 0, "places": []} for kind in ("near", "near_eval")}
    for (row, other, value), same in zip(near, exact, strict=True):
        if other >= num_eval or not same:
            kind = found["near" if other >= num_eval else "near_eval"]
            kind["rows"] += 1
            if kind["rows"] <= NAMED:
                kind["places"].append([*(PreparedData.origin(*place(each)) for each in (row, other)), round(value, 4)])
    return found


def _figures(data: PreparedData) -> dict[str, Any]:
    """Lengths of the rows as written; ``supervised`` counts the tokens of a row that can be predicted."""
    middle, most = np.percentile(data.lengths, [50, 95], method="inverted_cdf").tolist()
    figures = {"share": f"{data.supervised.sum() / data.lengths.sum():.1%}", "shortest": int(data.lengths.min())}
    histograms = {"length": _histogram(data.lengths), "supervised": _histogram(data.supervised)}
    return figures | {"median": middle, "most": most, "histograms": histograms}


def _histogram(values: np.ndarray) -> dict[str, int]:
    """The number of ``values`` in each of at most BINS equal bins, by the bin's range."""
    step = round_step(int(values.max() - values.min()) + 1, BINS - 1)
    first = int(values.min()) // step
    bins = enumerate(np.bincount(values // step - first).tolist(), first)
    return {f"{place * step}–{place * step + step - 1}" if step > 1 else f"{place}": count for place, count in bins}


def _page(result: dict[str, Any], train: PreparedData, tokenizer: Any, lang: str) -> str:
    """The page: the tables, the histograms, and ten training rows: the longest, the shortest, others spread evenly."""
    words, audit = WORDS[lang], result["audit"]
    tables = audit_tables(result, lang)
    sections = [(title, [table(columns, rows) if rows else words["none"]]) for title, columns, rows in tables]
    sections[-1][1].append(words["copies_text"].format(threshold=THRESHOLD, limit=NAMED))
    charts = [
        bars(list(found), list(found.values()), words[kind].format(words[name]), words["rows"])
        for name in ("train", "eval")
        for kind, found in audit.get(name, {"histograms": {}})["histograms"].items()
    ]
    ends = list({int(train.lengths.argmax()): 0, int(train.lengths.argmin()): 0})
    others = np.delete(np.arange(len(train)), ends)
    spread = np.linspace(0, len(others) - 1, min(EXAMPLES - len(ends), len(others))).astype(int)
    examples = [words["examples_text"]]
    for number in ends + others[spread].tolist():
        ids, supervised = train.row(number)
        heading = words["example"].format(train.origin(number), len(ids), int(supervised.sum()))
        examples.append(marked(heading, list(_pieces(ids, supervised, tokenizer, words["gap"]))))
    return page(words["title"], [*sections, (words["lengths"], charts), (words["examples"], examples)], lang)


def _pieces(ids: np.ndarray, supervised: np.ndarray, tokenizer: Any, gap: str) -> Iterator[tuple[str, bool]]:
    """The row as text, cut where the mask changes; of a long one the beginning and the end."""
    if len(ids) > HEAD + TAIL:
        yield from _pieces(ids[:HEAD], supervised[:HEAD], tokenizer, gap)
        yield gap.format(len(ids) - HEAD - TAIL), False
        ids, supervised = ids[-TAIL:], supervised[-TAIL:]
    borders = np.flatnonzero(np.diff(supervised)) + 1
    for part, marks in zip(np.split(ids, borders), np.split(supervised, borders), strict=True):
        yield tokenizer.decode(part.tolist()), bool(marks[0])
