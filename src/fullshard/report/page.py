"""HTML pages without network or scripts. Layouts are NAME.html of this folder, words NAME.yaml; the macros of page.html
(its head says what each takes) give Markup; whatever else is handed in is text, and is escaped."""

import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from fullshard import run_folder, verdict
from fullshard.config import RunConfig
from fullshard.data.chat import load_tokenizer
from fullshard.data.near import THRESHOLD, near_copies
from fullshard.data.prepared import PreparedData, open_prepared, prepare
from fullshard.errors import PlanError, read_table
from fullshard.model.fetch import with_model_folder
from fullshard.planning.plan import EXPLAIN, Comparison, Plan, format_bytes
from fullshard.planning.search import make_plan

NAMED, BINS = 100, 12  # pairs of near copies of a kind, bins of a histogram
Place = str | Path | None


def round_step(largest: float, most: int) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... of which ``most`` reach ``largest``."""
    power = 10 ** int(math.log10(max(largest / most, 1)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= largest)


LOADER = FileSystemLoader(Path(__file__).parent)
ENVIRONMENT = Environment(loader=LOADER, undefined=StrictUndefined, trim_blocks=True, autoescape=True)
ENVIRONMENT.globals.update(round_step=round_step, amount=verdict.amount, say=verdict.say, verdict_words=verdict.words)
HTML: Any = ENVIRONMENT.get_template("page.html").module  # the macros


def page_words(name: str, lang: str) -> dict[str, Any]:
    """The words of NAME.yaml of this folder in a language: en, zh."""
    return read_table(f"report/{name}.yaml")[lang]


def write_page(name: str, path: str | Path, lang: str, **facts: Any) -> Path:
    """Write NAME.html of this folder with the words of NAME.yaml in ``lang`` and ``facts``; returns the path."""
    text = ENVIRONMENT.get_template(f"{name}.html").render(words=page_words(name, lang), lang=lang, **facts).strip()
    (path := Path(path)).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    return path


def write_plan_page(found: Plan | Comparison, path: str | Path, lang: str = "en") -> Path:
    """Write the page of a plan; of a comparison, with its table and the recipe's own plan. Returns its path."""
    plan, say = found.own if isinstance(found, Comparison) else found, partial(_say, lang)
    compared = [] if found is plan else filter(None, found.to_text().splitlines())
    rows = [[say(cell) for cell in re.split(" {2,}", line)] for line in compared]
    facts = {"plan": plan, "say": say, "figures": plan_figures(plan, lang), "compared": rows}
    return write_page("plan", path, lang, moments=EXPLAIN["moments"], **facts)


def plan_figures(plan: Plan, lang: str) -> list[list[str]]:
    """The lines of a plan's report as rows: what, and how much."""
    report = [line.partition(": ") for line in plan.to_text().splitlines() if not line.startswith(" ")]
    return [[_say(lang, name), _say(lang, text)] for name, _, text in report if text and name != "Note"]


def _say(lang: str, text: str) -> str:
    for english, other in page_words("plan", lang)["phrases"].items():
        text = re.sub(english, other, text)
    return text


def audit_data(config: RunConfig, folder: str | Path, page_path: str | Path, lang: str = "en", **to: Any) -> dict:
    """``prepare`` (``to``: its options) and an HTML page; returns data.json's content with the new key "audit": figures
    and ``histograms``; ``near``, ``near_eval``: ``rows``, 100 ``places`` ([row, what it is like, Jaccard index])."""
    result = audit_prepared(prepare(config, folder := Path(folder), **to), folder)
    tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
    facts = {"train": open_prepared(folder, "train"), "audit": result["audit"], "tables": audit_tables(result, lang)}
    write_page("data", page_path, lang, tokenizer=tokenizer, threshold=THRESHOLD, limit=NAMED, **facts)
    run_folder.write_json(folder / run_folder.DATA, result)
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
        for key, at in split["places"].items():
            noted.append([words[name], facts.get(key, key), split[key], ", ".join(at[:limit])])
    kinds = ("exact_duplicates", "near", "overlap", "near_eval")[: 2 * len(splits)]
    splits["train"] |= {kind: known[kind]["rows"] for kind in kinds}
    pairs = [[facts[kind], *(*pair, 1.0)[:3]] for kind in kinds for pair in known[kind]["places"][:limit]]
    figures = [[facts[key], *(s.get(key, "") for s in splits.values())] for key in facts if key in splits["train"]]
    others = [(words[kind], words[f"{kind}_columns"], rows) for kind, rows in (("noted", noted), ("copies", pairs))]
    return [(words["counts"], ["", *(words[name] for name in splits)], figures), *others]


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
    found = {"share": f"{data.supervised.sum() / data.lengths.sum():.1%}", "shortest": int(data.lengths.min())}
    return found | {"median": middle, "most": most}


def _histogram(values: np.ndarray) -> dict[str, int]:
    step = round_step(int(values.max() - values.min()) + 1, BINS - 1)
    first = int(values.min()) // step
    bins = enumerate(np.bincount(values // step - first).tolist(), first)
    return {f"{place * step}–{place * step + step - 1}" if step > 1 else f"{place}": count for place, count in bins}


def write_trace(found: dict[str, Any], path: Path, lang: str = "en") -> dict[str, Any]:
    """Write page, .svg and .json of what ranks recorded (``trace_rank``). Returns the last: ``found``, seconds from the
    first event on, with seconds and peak_bytes in all, each unit's counts on rank 0, and ``report`` in words."""
    words, ranks, units = page_words("trace", lang), found["events"], found["units"]
    every = [event for events in ranks for event in events]
    begin = min(event["seconds"] for event in every)
    for event in every:
        event["seconds"] -= begin
    counts = Counter((event["what"], event["unit"]) for event in ranks[0])
    for unit in units:
        unit["counted"] = {kind: counts[kind, unit["unit"]] for kind in unit["planned"]}
    found["seconds"], found["peak_bytes"] = (max(event[key] for event in every) for key in ("seconds", "held_bytes"))
    facts = {kind: sum(unit["counted"][kind] for unit in units) for kind in ("gather", "reduce")} | found
    facts |= {"milliseconds": found["seconds"] * 1e3, "peak": format_bytes(found["peak_bytes"])}
    judged = words["right" if all(unit["counted"] == unit["planned"] for unit in units) else "wrong"]
    found["report"] = [*(line.format(**facts) for line in words["report"]), judged]
    drawing = HTML.timeline([(_spans(events), events) for events in ranks], facts, words)
    path = write_page("trace", path.with_suffix(".html"), lang, report=found["report"], drawing=drawing, units=units)
    path.with_suffix(".svg").write_text(f"{drawing.strip()}\n", encoding="utf-8")
    run_folder.write_json(path.with_suffix(".json"), found)
    return found | {"report": [*found["report"], f"Page: {path}"]}


def _spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the first of each beginning to its end: kind (gather, forward, ...), unit, start and stop in seconds."""
    begun, spans = {}, []
    for event in events:
        kind, unit, seconds = event["what"].removesuffix(" end"), event["unit"], event["seconds"]
        if kind == event["what"]:
            begun.setdefault((kind, unit), seconds)
        elif (kind, unit) in begun:
            spans.append({"kind": kind, "unit": unit, "start": begun.pop((kind, unit)), "stop": seconds})
    return spans


def write_run_report(run: str | Path, output: Place = None, lang: str = "en") -> Path:
    """Write the page of a run (default RUN/report.html), its path. What it lacks is named. ConfigError: no such run."""
    run, names = run_folder.require_run(Path(run)), ("config", "plan", "environment", "data", "eval", "result")
    facts: dict[str, Any] = {name: run_folder.read_json(run / f"{name}.json", optional=True) for name in names}
    facts["merged"] = run_folder.read_json(run / run_folder.MERGED / run_folder.MERGE_FACTS, optional=True)
    facts["recipe"] = (run / run_folder.RECIPE).read_text(encoding="utf-8", errors="backslashreplace")
    prepared = run / run_folder.PREPARED
    audited = facts["data"] and prepared.is_dir() and audit_prepared(facts["data"], prepared)
    facts["tables"] = audit_tables(audited, lang, limit=5) if audited else []
    facts |= {"records": run_folder.read_metrics(run), "merged_path": str((run / run_folder.MERGED).resolve())}
    return write_page("run", output or run / run_folder.REPORT, lang, run=run, **facts)


def write_recipe_report(config: RunConfig, judged: Any, output: Place = None, lang: str = "en") -> dict[str, Any]:
    """Write the page of a recipe that has not run (default report.html): whether to train, by the Judgement ``judged``
    of its base, its plan and its data audit. Returns ``page``, ``decision`` (train, not_yet, mend) and ``reasons``."""
    with TemporaryDirectory() as folder:
        data = audit_prepared(prepare(config, place := Path(folder) / "prepared"), place)
    figures, problem, (found,) = [], "", judged.comparisons
    try:
        figures = plan_figures(make_plan(config), lang)
    except PlanError as error:
        problem = str(error)
    decision, reasons = verdict.decide(found, data, problem, lang)
    facts = {"decision": decision, "reasons": reasons, "found": found, "figures": figures, "problem": problem}
    facts |= {"results": judged.results, "tables": audit_tables(data, lang, limit=5)}
    page = write_page("before", output or run_folder.REPORT, lang, **facts)
    return {"page": str(page), "decision": decision, "reasons": reasons}
