"""What the simple engine did in one step, by rank: a page with a timeline (SVG), the same as JSON, a report."""

from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import yaml

from fullshard.planning.plan import format_bytes
from fullshard.report.page import page, table, timeline
from fullshard.run_folder import write_json

WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))  # by language: en, zh
EVENTS = ("seconds", "what", "unit", "gathered_bytes", "held_bytes")
STARTS = {"gathered": "gather", "reduced": "reduce", "rest": "optimizer"}
STARTS |= {f"{what} end": what for what in ("forward", "backward")}


def write_trace(found: dict[str, Any], path: Path, lang: str = "en") -> dict[str, Any]:
    """Write page, .svg and .json. ``found`` is what the ranks recorded; the result has its keys and: ``events`` of each
    rank as objects with the keys EVENTS, seconds since the first; in each of ``units`` the ``counted`` gathers, frees
    and reduces of a rank (the plan's beside them); ``seconds``, ``peak_bytes`` and, in words, ``report``."""
    words, ranks = WORDS[lang], [[dict(zip(EVENTS, event, strict=True)) for event in each] for each in found["events"]]
    begin = min(events[0]["seconds"] for events in ranks)
    for event in (every := [event for events in ranks for event in events]):
        event["seconds"] -= begin
    seconds, peak = max(event["seconds"] for event in every), max(event["held_bytes"] for event in every)
    counts = Counter((event["what"], event["unit"]) for event in ranks[0])
    units = [
        unit | {"counted": {f"{what}s": counts[what, unit["unit"]] for what in ("gather", "free", "reduce")}}
        for unit in found["units"]
    ]
    right = all(unit["counted"]["frees"] == unit["counted"]["gathers"] == unit["gathers"] for unit in units)
    right = right and all(unit["counted"]["reduces"] == unit["reduces"] for unit in units)
    facts = {
        name: found[name] for name in ("recipe", "ranks", "device", "precision", "rows", "tokens", "micro_batches")
    }
    facts |= {"milliseconds": f"{seconds * 1e3:,.1f}", "peak": format_bytes(peak)}
    facts["gathers"], facts["reduces"] = (sum(unit[kind] for unit in units) for kind in ("gathers", "reduces"))
    report = [line.format(**facts) for line in words["report"]] + [words["right" if right else "wrong"]]
    result = found | {"events": ranks, "units": units, "seconds": seconds, "peak_bytes": peak, "report": report}
    rows = [[u["unit"], words[u["strategy"]], *(u[key] for key in ("parameters", "bytes")), *_both(u)] for u in units]
    drawing = timeline([(_spans(events), events) for events in ranks], seconds, peak, format_bytes(peak), words)
    sections = [
        (words["step"], [*report, drawing, *words["reading"]]),
        (words["units"], [table(words["columns"], rows)]),
    ]
    path.write_text(page(words["title"], sections, lang), encoding="utf-8", errors="backslashreplace")
    path.with_suffix(".svg").write_text(f"{str(drawing).strip()}\n", encoding="utf-8")
    write_json(path.with_suffix(".json"), result)
    return result | {"report": [*report, words["written"].format(path, path.with_suffix(".svg").name)]}


def _both(unit: dict[str, Any]) -> list[str]:
    counted = unit["counted"]
    return [f"{counted[kind]} / {unit[kind]}" for kind in ("gathers", "reduces")]


def _spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From each start to its end: kind (gather, forward, backward, reduce, optimizer), unit, start and stop seconds."""
    waiting, spans = defaultdict(deque), []
    for event in events:
        kind = STARTS.get(event["what"])
        if kind is None:
            waiting[event["what"], event["unit"]].append(event["seconds"])
        elif starts := waiting[kind, event["unit"]]:
            spans.append({"kind": kind, "unit": event["unit"], "start": starts.popleft(), "stop": event["seconds"]})
            if kind == "backward":  # begins with the first of several gradients
                starts.clear()
    return spans
