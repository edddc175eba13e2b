"""What became of every row: counts, reasons, and the lines that say so."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fullshard.data.sources import KEPT, Account

NO_SUPERVISED = "no supervised token"
TOO_LONG = "longer than max_length"
NOT_RENDERED = "not rendered"  # refused by the chat template, or of words that the tokenizer does not know
LARGEST = ("longest", "longest_written")  # of these figures the largest counts, the others add up


@dataclass
class Audit(Account):
    """An account of source rows from here on, of (a part of) a split; ``used``: at least one training row is kept."""

    rows: int = 0  # source rows read, without copies by weight
    prepared: int = 0  # training rows written: copies, pieces of texts, rows per answer too
    partly: int = 0  # used rows that lost one of their training rows
    cut: int = 0  # training rows
    split: int = 0  # texts over max_length, in pieces
    split_rows: int = 0  # the training rows that these became
    tokens: int = 0
    supervised_tokens: int = 0  # supervised positions
    targets: int = 0  # supervised positions that can be predicted (all but a row's first)
    tokens_dropped: int = 0
    tokens_cut: int = 0
    longest: int = 0  # tokens of the longest row before cutting or dropping
    longest_written: int = 0  # and after
    special_strings: int = 0  # source rows that write out a special token where it is no answer
    refused: Counter[str] = field(default_factory=Counter)  # reason -> training rows that may not be dropped
    stops: Counter[str] = field(default_factory=Counter)  # supervised end-of-turn ids, as text: JSON keys
    unsupervised: list[tuple[str, int, int | None]] = field(default_factory=list)  # the first: origin, tokens, before
    not_rendered: list[tuple[str, str]] = field(default_factory=list)  # the first: message, hint

    def count(self, figure: str, origin: str) -> None:
        """Count a row in one of the figures, and its place under the figure's name."""
        setattr(self, figure, getattr(self, figure) + 1)
        self.note(figure, origin)

    def add(self, later: "Audit") -> None:
        """Take in the account of the rows that follow; its counts may be plain dicts, as ``vars`` read from JSON."""
        for name, value in vars(later).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            elif isinstance(mine, dict):
                mine.update({what: (mine.get(what, []) + places)[:KEPT] for what, places in value.items()})
            elif isinstance(mine, list):
                mine.extend(value[: 1 - len(mine)])
            else:
                setattr(self, name, max(mine, value) if name in LARGEST else mine + value)

    def to_json(self, account: Account) -> dict[str, Any]:
        """The numbers, for data.json: read = used + dropped + bad + blank (+ held_out). ``account``: of the reading."""
        figures = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return figures | {
            "shape": ", ".join(account.shapes),
            **{name: getattr(account, name) for name in ("read", "blank", "held_out")},
            **{"bad": dict(account.bad), "dropped": dict(account.dropped), "places": self.places | account.places},
            "special_strings": {"rows": self.special_strings, "places": self.places.get("special_strings", [])},
            "stop_tokens": self.stops.total(),
            "stop_ids": [int(number) for number, _ in self.stops.most_common()],
        }


def report_lines(macro: str, *facts: Any) -> list[str]:
    """The lines that a person reads, as a macro of report.txt has them."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["n"] = "{:,}".format
    text = getattr(environment.get_template("report.txt").module, macro)(*facts)
    return [line for line in text.split("\n") if line]
