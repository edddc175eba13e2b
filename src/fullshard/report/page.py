"""The one HTML page builder: documents without network or scripts. What it makes are the macros of page.html.

``page(title, sections, lang)``: a document. A section is a heading and its blocks; ``lang``: en, zh. A block: text or
``table(columns, rows)``: integers get separators, other numbers four digits; they stand right ·
``bars(values, x_label, y_label)``: a chart (SVG) of {label: value of 0 and more}, each written above its bar ·
``timeline(ranks, facts, words)``: a chart (SVG) of one step that also stands alone, from report/trace.py ·
``marked(heading, pieces)``: a text in pieces (text, bool), of which those with True are coloured and underlined.
All give Markup; whatever else is handed in is text, and is escaped.
"""

import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def round_step(largest: float, most: int) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... of which ``most`` reach ``largest``."""
    power = 10 ** int(math.log10(max(largest / most, 1)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= largest)


_LOADER = FileSystemLoader(Path(__file__).parent)
_ENVIRONMENT = Environment(loader=_LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
_ENVIRONMENT.globals["round_step"] = round_step
_MACROS = _ENVIRONMENT.get_template("page.html").module
page, table, bars, marked = _MACROS.page, _MACROS.table, _MACROS.bars, _MACROS.marked
timeline = _MACROS.timeline
