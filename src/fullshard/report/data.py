"""The audit of prepared data: its figures, near copies and rows as tables and as an HTML page."""

from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config import RunConfig
from fullshard.data.chat import load_tokenizer
from fullshard.data.near import THRESHOLD, near_copies
from fullshard.data.prepared import PreparedData, open_prepared, prepare
from fullshard.model.fetch import with_model_folder
from fullshard.report.page import page_words, round_step, write_page
from fullshard.run_folder import DATA, write_json

NAMED, BINS = 100, 12  # pairs of a kind, bins of a histogram


def audit_data(config: RunConfig, folder: str | Path, page_path: str | Path, lang: str = "en") -> dict[str, Any]:
    """Prepare the recipe's data into ``folder``, write the HTML page and return data.json's content, with the new key
    "audit": figures and ``histograms`` of each split, ``near`` and ``near_eval``: ``rows`` (training rows like another
    one, or one of eval) and the first 100 ``places``: [row, what it is like, Jaccard index]. Raises as prepare."""
    result = audit_prepared(prepare(config, folder := Path(folder)), folder)
    tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
    facts = {"train": open_prepared(folder, "train"), "tokenizer": tokenizer, "audit": result["audit"]}
    facts |= {"tables": audit_tables(result, lang), "threshold": THRESHOLD, "limit": NAMED}
    write_page("data", page_path, lang, **facts)
    write_json(folder / DATA, result)
    return result


def audit_prepared(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """data.json's content with the key "audit", of the rows in ``folder`` (see audit_data)."""
    splits = {name: open_prepared(folder, name) for name in ("train", "eval") if result[name]}
    audit = {name: _figures(data) for name, data in splits.items()} | _near(*splits.values())
    kinds = [(name, kind) for name in splits for kind in ("lengths", "supervised")]
    histograms = {f"{name}_{kind}": _histogram(getattr(splits[name], kind)) for name, kind in kinds}
    return result | {"audit": audit | {"histograms": histograms}}


def audit_tables(result: dict[str, Any], lang: str, limit: int = NAMED) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Heading, columns and rows: figures of an audited data.json, rows to look at, ``limit`` copies of each kind."""
    words, known = page_words("data", lang), result | result["audit"]
    facts, noted = words["facts"], []
    splits = {name: result[name] | known[name] for name in ("train", "eval") if result[name]}
    for name, split in splits.items():
        counts = split["bad"] | split["dropped"] | {"special": split["special_strings"]["rows"]}
        split |= counts | {key: sum(split[key].values()) for key in ("bad", "dropped")}
        places = split["places"].items()
        noted += [[words[name], facts.get(key, key), split[key], ", ".join(at[:limit])] for key, at in places]
    kinds = ("exact_duplicates", "near", "overlap", "near_eval")[: 2 * len(splits)]
    splits["train"] |= {kind: known[kind]["rows"] for kind in kinds}
    pairs = [[facts[kind], *(*pair, 1.0)[:3]] for kind in kinds for pair in known[kind]["places"][:limit]]
    figures = [[facts[key], *(s.get(key, "") for s in splits.values())] for key in facts if key in splits["train"]]
    return [
        (words["counts"], ["", *(words[name] for name in splits)], figures),
        (words["noted"], words["noted_columns"], noted),
        (words["copies"], words["copies_columns"], pairs),
    ]


def _near(train: PreparedData, held_out: PreparedData | None = None) -> dict[str, dict[str, Any]]:
    """Near copies within train and of eval rows. A source row is compared by its last row, which has all turns."""
    chosen = []
    for data in (held_out, train) if held_out else (train,):
        last = np.append(data.source_rows()[1:], len(data)) - 1
        chosen.append(last[np.sort(np.unique(data.content[last], return_index=True)[1])])  # of equal ones the first
    rows, num_eval = np.concatenate(chosen), sum(map(len, chosen[:-1]))

    def place(row: int) -> tuple[PreparedData, int]:
        return (held_out if held_out and row < num_eval else train), rows[row]

    exact = np.isin(train.content, held_out.content) if held_out else ()  # counted as the overlap
    found: dict[str, dict[str, Any]] = {kind: {"rows": 0, "places": []} for kind in ("near", "near_eval")}
    for row, other, value in near_copies(lambda row: PreparedData.row(*place(row))[0], len(rows), num_eval):
        if other >= num_eval or not exact[rows[row]]:
            kind = found["near" if other >= num_eval else "near_eval"]
            kind["rows"] += 1
            if kind["rows"] <= NAMED:
                kind["places"].append([*(PreparedData.origin(*place(each)) for each in (row, other)), round(value, 4)])
    return found


def _figures(data: PreparedData) -> dict[str, Any]:
    middle, most = np.percentile(data.lengths, [50, 95], method="inverted_cdf").tolist()
    share = f"{data.supervised.sum() / data.lengths.sum():.1%}"
    return {"share": share, "shortest": int(data.lengths.min()), "median": middle, "most": most}


def _histogram(values: np.ndarray) -> dict[str, int]:
    step = round_step(int(values.max() - values.min()) + 1, BINS - 1)
    first = int(values.min()) // step
    bins = enumerate(np.bincount(values // step - first).tolist(), first)
    return {f"{place * step}–{place * step + step - 1}" if step > 1 else f"{place}": count for place, count in bins}
