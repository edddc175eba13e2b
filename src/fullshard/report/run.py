"""A run as one page: the verdict, curves, data, proof, environment, answers, how to repeat it; and a recipe before it
runs: whether to train at all. The layout is run.html and before.html, the words are run.yaml and before.yaml."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fullshard import run_folder
from fullshard.config import RunConfig
from fullshard.errors import PlanError
from fullshard.model.load import MERGE_FACTS
from fullshard.planning.search import make_plan
from fullshard.report.data import audit_data, audit_prepared, audit_tables
from fullshard.report.page import write_page
from fullshard.report.plan import plan_figures
from fullshard.run_folder import read_json, read_metrics, require_run
from fullshard.verdict import amount, decide, say, words

FILES = ("config", "plan", "environment", "data", "eval", "result")
CURVES = ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "memory_bytes", "planned_bytes")
SHOWN = 12  # answers side by side


def write_run_report(run: str | Path, output: str | Path | None = None, lang: str = "en") -> dict[str, Any]:
    """Write the page of a run (default RUN/report.html); what it does not have yet is named with the command that makes
    it. Returns ``page``, ``verdict`` (None: not judged) and ``text`` (lines to print). ConfigError: no run folder."""
    run = require_run(Path(run))
    facts: dict[str, Any] = {name: read_json(run / f"{name}.json", optional=True) for name in FILES}
    facts |= {"run": run, "merged": read_json(run / run_folder.MERGED / MERGE_FACTS, optional=True), "tables": []}
    facts["recipe"] = (run / run_folder.RECIPE).read_text(encoding="utf-8", errors="backslashreplace")
    records = read_metrics(run)
    steps, losses = ({one["step"]: one for one in records if one["kind"] == kind} for kind in ("train", "eval"))
    facts["curves"] = {key: _curve(steps, key) for key in CURVES} | {"held_out": _curve(losses, "loss")}
    facts["events"] = [one for one in records if one["kind"] in ("skipped", "bad_step")]
    if facts["data"] and (run / run_folder.PREPARED).is_dir():
        facts["data"] = audit_prepared(facts["data"], run / run_folder.PREPARED)
        facts["tables"] = audit_tables(facts["data"], lang, limit=5)
    results, own = facts["eval"].get("results", []), (run / run_folder.MERGED).resolve()
    name = next((one["name"] for one in results if Path(one["model"]).resolve() == own), None)
    pair = {one["name"]: {each["row"]: each for each in one["answers"]} for one in results if one["name"] in ("base", name)}
    compared = facts["eval"].get("comparisons", []) if name else []
    found = next((one for one in compared if (one["before_name"], one["after_name"]) == ("base", name)), None)
    if found:
        both = [(pair["base"][row], pair[name][row]) for row in pair["base"] if row in pair[name]]
        both.sort(key=lambda each: each[0]["correct"] == each[1]["correct"])  # what changed first
        facts["answers"] = [[one["prompt"], one["expected"], base["answer"], one["answer"]] for base, one in both[:SHOWN]]
    verdict, text = found and found["verdict"], [say(found["verdict"], lang, **found)] if found else []
    facts |= {"found": found, "text": text, "amount": amount, "verdict_words": words(lang)}
    page = write_page("run", output or run / run_folder.REPORT, lang, **facts)
    return {"page": str(page), "verdict": verdict, "text": text}


def write_recipe_report(
    config: RunConfig, judged: Any, output: str | Path | None = None, lang: str = "en"
) -> dict[str, Any]:
    """Write the page of a recipe that has not run (default report.html): whether to train, by the Judgement ``judged`` of
    its base, its plan and its data audit. Returns ``page``, ``decision`` (train, not_yet, mend) and ``text``."""
    with TemporaryDirectory() as folder:
        data = audit_data(config, Path(folder) / "prepared", Path(folder) / "audit.html", lang)
    try:
        figures, problem = plan_figures(make_plan(config), lang), ""
    except PlanError as error:
        figures, problem = [], str(error)
    (found,) = judged.comparisons
    decision, reasons = decide(found, data, problem, lang)
    facts = {"decision": decision, "reasons": reasons, "found": found, "results": judged.results, "figures": figures}
    facts |= {"text": say("before", lang, **found), "problem": problem, "tables": audit_tables(data, lang, limit=5)}
    facts |= {"amount": amount, "verdict_words": words(lang), "shown": SHOWN}
    page = write_page("before", output or run_folder.REPORT, lang, **facts)
    text = [f"{words(lang)['decisions'][decision]}: {' '.join(reasons)}"]
    return {"page": str(page), "decision": decision, "reasons": reasons, "text": text}


def _curve(steps: dict[int, dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of each step that has a finite one; bytes as GB."""
    values = [(step, steps[step].get(key)) for step in sorted(steps)]
    scale = 1e-9 if key.endswith("bytes") else 1
    return [(step, value * scale) for step, value in values if isinstance(value, int | float) and math.isfinite(value)]
