"""The one HTML page builder: documents without network or scripts, by the macros of page.html (its head says what each
takes). All give Markup; whatever else is handed in is text, and is escaped."""

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
_NAMES = ("page", "table", "bars", "marked", "timeline", "stacked")
_MACROS = (getattr(_ENVIRONMENT.get_template("page.html").module, name) for name in _NAMES)
page, table, bars, marked, timeline, stacked = _MACROS
