"""A plan as an HTML page: memory over one step, a bar a cause, the figures, their formulas, plans side by side."""

import re
from functools import partial
from pathlib import Path

from fullshard.planning.plan import EXPLAIN, Comparison, Plan
from fullshard.report.page import page_words, write_page


def write_plan_page(found: Plan | Comparison, path: str | Path, lang: str = "en") -> Path:
    """Write the page of a plan; of a comparison, with its table and the recipe's own plan. Returns its path."""
    plan, say = found.own if isinstance(found, Comparison) else found, partial(_say, lang)
    compared = [] if found is plan else [line for line in found.to_text().splitlines() if line]
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
