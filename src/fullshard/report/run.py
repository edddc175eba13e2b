"""A run as one page: the verdict, curves, data, proof, environment, answers, how to repeat it; and a recipe before it
runs: whether to train at all. The layout is run.html and before.html, the words are run.yaml and before.yaml."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fullshard.config import RunConfig
from fullshard.errors import PlanError
from fullshard.planning.search import make_plan
from fullshard.report.data import audit_data, audit_prepared, audit_tables
from fullshard.report.page import write_page
from fullshard.report.plan import plan_figures
from fullshard.run_folder import MERGE_FACTS, MERGED, PREPARED, RECIPE, REPORT, read_json, read_metrics, require_run
from fullshard.verdict import decide

Place = str | Path | None


def write_run_report(run: str | Path, output: Place = None, lang: str = "en") -> Path:
    """Write the page of a run (default RUN/report.html) and return its path. What the run does not have yet is named
    with the command that makes it. ConfigError: no run folder."""
    run, names = require_run(Path(run)), ("config", "plan", "environment", "data", "eval", "result")
    facts: dict[str, Any] = {name: read_json(run / f"{name}.json", optional=True) for name in names}
    facts["merged"] = read_json(run / MERGED / MERGE_FACTS, optional=True)
    facts["recipe"] = (run / RECIPE).read_text(encoding="utf-8", errors="backslashreplace")
    has_data = facts["data"] and (run / PREPARED).is_dir()
    facts["tables"] = audit_tables(audit_prepared(facts["data"], run / PREPARED), lang, limit=5) if has_data else []
    facts |= {"run": run, "records": read_metrics(run), "merged_path": str((run / MERGED).resolve())}
    return write_page("run", output or run / REPORT, lang, **facts)


def write_recipe_report(config: RunConfig, judged: Any, output: Place = None, lang: str = "en") -> dict[str, Any]:
    """Write the page of a recipe that has not run (default report.html): whether to train, by the Judgement ``judged``
    of its base, its plan and its data audit. Returns ``page``, ``decision`` (train, not_yet, mend) and ``reasons``."""
    with TemporaryDirectory() as folder:
        data = audit_data(config, Path(folder) / "prepared", Path(folder) / "audit.html", lang)
    figures, problem, (found,) = [], "", judged.comparisons
    try:
        figures = plan_figures(make_plan(config), lang)
    except PlanError as error:
        problem = str(error)
    decision, reasons = decide(found, data, problem, lang)
    facts = {"decision": decision, "reasons": reasons, "found": found, "figures": figures, "problem": problem}
    facts |= {"results": judged.results, "tables": audit_tables(data, lang, limit=5)}
    page = write_page("before", output or REPORT, lang, **facts)
    return {"page": str(page), "decision": decision, "reasons": reasons}
