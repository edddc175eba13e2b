"""The one HTML page builder: a page without network or scripts. Its markup and style are the macros of page.html.

A block is the Markup that ``table``, ``bars`` or ``marked`` made, or a str: a paragraph. Whatever is no Markup is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

Cell = str | int | float


@cache
def _macros() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = number
    return environment.get_template("page.html").module


def number(value: Cell) -> str:
    """Integers with separators, other numbers with four digits, text and Markup as they are."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else value


def page(title: str, sections: Sequence[tuple[str, Sequence[str]]], lang: str = "en") -> str:
    """A whole HTML document: a heading and its blocks for each section. ``lang``: en or zh."""
    return str(_macros().page(title, sections, lang))


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """A table; numbers stand right."""
    return _macros().table(header, rows)


def marked(heading: str, pieces: Sequence[tuple[str, bool]]) -> Markup:
    """A text in pieces, of which those with True are coloured and underlined."""
    return _macros().marked(heading, pieces)


def bars(labels: Sequence[str], values: Sequence[int | float], x_label: str, y_label: str) -> Markup:
    """A bar chart (SVG) of values of 0 and more, each written above its bar; the axes' labels in words."""
    step = round_step(max(values), 5)
    return _macros().bars(labels, values, x_label, y_label, step, math.ceil(max(values) / step))


def round_step(largest: float, most: int) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... of which ``most`` reach ``largest``."""
    power = 10 ** int(math.log10(max(largest / most, 1)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= largest)
