"""A plan as an HTML page: memory over one step, a bar a cause, the figures, their formulas, plans side by side."""

import re
from functools import partial
from pathlib import Path

import yaml

from fullshard.planning.plan import EXPLAIN, Comparison, Plan
from fullshard.report.page import bars, page, stacked, table

WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))  # by language: en, zh


def write_plan_page(found: Plan | Comparison, path: str | Path, lang: str = "en") -> Path:
    """Write the page of a plan; of a comparison, with its table and the recipe's own plan. Returns its path."""
    words, plan = WORDS[lang], found.own if isinstance(found, Comparison) else found
    say = partial(_say, lang)
    unit, size = ("GB", 1e9) if plan.peak_bytes > 5e9 else ("MB", 1e6)
    series = [(say(cause), [count / size for count in sizes]) for cause, sizes in plan.timeline.items() if any(sizes)]
    causes = [[say(each.cause), each.bytes, say(EXPLAIN["moments"][each.when] + each.formula)] for each in plan.lines]
    chart = bars({say(line.cause): line.bytes / size for line in plan.lines}, "", unit)
    sections = [
        (words["figures"], [table(words["figure_columns"], plan_figures(plan, lang))]),
        (words["step"], [stacked(words["stages"], series, plan.usable_bytes / size, unit, words), *words["reading"]]),
        (words["causes"], [chart, table(words["cause_columns"], causes)]),
        (words["formulas"], [table(words["formula_columns"], [[*map(say, row)] for row in plan.explained.items()])]),
        (words["notes"], [say(note) for note in plan.notes] or [words["none"]]),
    ]
    if found is not plan:
        lines = found.to_text().splitlines()
        names, *rows = [[say(cell) for cell in re.split(" {2,}", line)] for line in lines if "  " in line]
        sections.insert(1, (words["compared"], [table(names, rows), say(lines[len(rows) + 2])]))
    (path := Path(path)).write_text(page(words["title"], sections, lang), encoding="utf-8", errors="backslashreplace")
    return path


def plan_figures(plan: Plan, lang: str) -> list[list[str]]:
    """The lines of a plan's report as rows: what, and how much."""
    report = [line.partition(": ") for line in plan.to_text().splitlines() if not line.startswith(" ")]
    return [[_say(lang, name), _say(lang, text)] for name, _, text in report if text and name != "Note"]


def _say(lang: str, text: str) -> str:
    for english, other in WORDS[lang]["phrases"].items():
        text = re.sub(english, other, text)
    return text
