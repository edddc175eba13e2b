"""The one HTML page builder: documents without network or scripts, by the macros of page.html (its head says what each
takes). All give Markup; whatever else is handed in is text, and is escaped."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fullshard.verdict import amount, say, words


def round_step(largest: float, most: int) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... of which ``most`` reach ``largest``."""
    power = 10 ** int(math.log10(max(largest / most, 1)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= largest)


@cache
def page_words(name: str, lang: str) -> dict[str, Any]:
    """The words of NAME.yaml of this folder in a language: en, zh."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))[lang]


def write_page(name: str, path: str | Path, lang: str, **facts: Any) -> Path:
    """Write NAME.html of this folder with the words of NAME.yaml in ``lang`` and ``facts``; returns the path."""
    template = _ENVIRONMENT.get_template(f"{name}.html")
    text = template.render(words=page_words(name, lang), lang=lang, **facts).strip()
    (path := Path(path)).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    return path


_LOADER = FileSystemLoader(Path(__file__).parent)
_ENVIRONMENT = Environment(loader=_LOADER, undefined=StrictUndefined, trim_blocks=True, autoescape=True)
_ENVIRONMENT.globals |= {"round_step": round_step, "amount": amount, "say": say, "verdict_words": words}
HTML: Any = _ENVIRONMENT.get_template("page.html").module  # the macros
