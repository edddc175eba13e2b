"""A finished plan: what a run needs and how its batches lie, ready to print, to store and to draw. explain.yaml has the
memory over a step and the formulas of time, plan.txt and compare.txt the reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
import yaml
from jinja2 import StrictUndefined, Template
from fullshard.frozen import Frozen
from fullshard.planning.memory import Line

EXPLAIN = yaml.safe_load(Path(__file__).with_name("explain.yaml").read_text(encoding="utf-8"))
REST = "others"  # of a peak: what no line counts, such as a file's tensors while they are loaded


class Plan(Frozen):
    """What the planner decided and predicts. Bytes are per rank; seconds are a range, low to high."""

    method: str
    ranks: int
    device: str  # cpu | cuda | npu
    engine: str  # torch | simple
    precision: str  # a mode of train/precision.py
    micro_batch: tuple[int, str]  # per rank and forward: (4, "rows") or (2048, "tokens"), pads included
    recompute: bool | int  # how many of the first blocks; True: all
    lines: tuple[Line, ...]
    moments: dict[str, int]  # peak of load, train, eval, save, merge
    peak_bytes: int  # the largest moment of the ranks (merge runs afterwards, alone)
    usable_bytes: int
    rows: int
    tokens: int  # of one epoch
    longest: int
    is_estimate: bool  # tokens come from file sizes, not from prepared rows
    num_steps: int
    micro_batches: int  # of a typical step
    batch: str  # "64 rows = 31,204 tokens = 4 ranks x 2 micro-batches"
    seconds_low: float
    seconds_high: float
    step_seconds: tuple[float, float]
    kernel_seconds: dict[str, float]  # of one micro-batch, by kernel class; total: less what is hidden
    device_hours: tuple[float, float]  # of all ranks together
    disk_bytes: int  # of one checkpoint, all ranks together
    host_bytes: int  # of the ranks on one machine together, and of what starts them
    explained: dict[str, str]  # by name: the formula with its numbers
    timeline: dict[str, list[int]]  # step_timeline
    peak: dict[str, Any]  # find_peak
    fits: bool
    notes: tuple[str, ...]
    card: str = ""  # of --devices: the plan is for machines that are not here
    tokens_per_second: tuple[float, float] = (0.0, 0.0)  # of all ranks, low and high
    checked_rows: int = 0  # published runs of this card beside which the speed model was checked
    saves_beside: bool = False  # checkpoints are written from a copy while training goes on; on CPU in "save"
    reduce_each: bool = False  # gradients are reduced after each micro-batch: there is no memory to keep them whole
    is_assumed: bool = False  # rows and tokens were not read from any file
    price: float | None = None  # of a device-hour
    currency: str = ""
    cost: tuple[float, float] | None = None  # with a price

    def to_text(self, explain: bool = False) -> str:
        """The report, of several lines; ``explain``: with each formula and its numbers."""
        return render("plan.txt", **vars(self), explain=explain)


class Comparison(Frozen):
    """Plans of one recipe as full and as LoRA on several numbers of ranks, of which ``own`` is the recipe's."""

    own: Plan
    plans: tuple[Plan, ...]

    def to_text(self) -> str:
        """A table; and which plan is the recipe's own, the fastest that fits, the cheapest."""
        return render("compare.txt", plans=self.plans, own=self.own)


def step_timeline(lines: Sequence[Line], load_bytes: int) -> dict[str, list[int]]:
    """Bytes by cause, each at the beginning and the end of loading, forward, the head, backward and the step."""
    found = {}
    for line in lines:
        ends = [line.bytes * (line is lines[0]), line.bytes * (line is lines[0] or line.cause in EXPLAIN["loaded"])]
        factors = EXPLAIN["kinds"][EXPLAIN["causes"].get(line.cause, line.when)]
        found[line.cause] = ends + [line.bytes * factor for factor in factors]
    rest = max(0, load_bytes - sum(sizes[1] for sizes in found.values()))
    return found | {REST: [rest, rest, *[0] * 8]}


def find_peak(timeline: dict[str, list[int]], lines: Sequence[Line], moments: dict[str, int]) -> dict[str, Any]:
    """``where`` the ranks' largest moment lies (a key of explain.yaml's peaks); ``causes``: bytes, largest first."""
    columns = [dict(zip(timeline, sizes, strict=True)) for sizes in zip(*timeline.values(), strict=True)]
    where = max((moment for moment in moments if moment != "merge"), key=moments.__getitem__)
    place = max(range(2, len(columns)), key=lambda place: sum(columns[place].values()))
    found = {"load": ("load", columns[1]), "train": (EXPLAIN["stages"][place], columns[place])}
    size, always = moments[where], {line.cause: line.bytes for line in lines if line.when == "always"}
    where, causes = found.get(where, (where, always))
    causes[REST] = size - sum(causes.values()) + causes.get(REST, 0)
    ordered = {cause: size for cause, size in sorted(causes.items(), key=lambda item: -item[1]) if size}
    return {"where": where, "causes": ordered}


def fit_of(peak: float, usable: float) -> str:
    """yes | tight | no: what a planned peak says of the memory that a rank may use; tight: within the peak's error."""
    return "yes" if peak <= usable else "tight" if peak * (1 - EXPLAIN["memory_error"]) <= usable else "no"


def format_bytes(count: int) -> str:
    """Decimal units: ``1.25 GB``, ``310 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def format_minutes(low: float, high: float) -> str:
    """``3 - 7 minutes``, ``20 - 50 seconds``, ``1.5 - 3 hours``."""
    unit, size = ("seconds", 1) if high < 100 else ("minutes", 60) if high < 2 * 3600 else ("hours", 3600)
    digits = {"seconds": ".0f", "minutes": ".2g" if low < 600 else ".0f", "hours": ".1f"}[unit]
    return f"{low / size:{digits}} - {high / size:{digits}} {unit}"


def format_range(low: float, high: float) -> str:
    """``1,200 - 1,900``; below 100 with three digits: ``0.0123 - 0.02``."""
    return " - ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (low, high))


def render(name: str, **values: Any) -> str:
    """A template of this folder, with what the words of a plan need."""
    words = {"bytes": format_bytes, "minutes": format_minutes, "range_of": format_range, "fit": fit_of}
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, undefined=StrictUndefined).render(words | values, words=EXPLAIN).rstrip()
