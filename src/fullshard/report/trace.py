"""What the simple engine did in one step, by rank: a page with a timeline (SVG), the same as JSON, a report."""

from collections import Counter
from pathlib import Path
from typing import Any

from fullshard.planning.plan import format_bytes
from fullshard.report.page import HTML, page_words, write_page
from fullshard.run_folder import write_json


def write_trace(found: dict[str, Any], path: Path, lang: str = "en") -> dict[str, Any]:
    """Write page, .svg and .json of what ranks recorded (``trace_rank``). Returns the last: ``found``, seconds from the
    first event on, with seconds and peak_bytes in all, each unit's counts on rank 0, and ``report`` in words."""
    words, ranks, units = page_words("trace", lang), found["events"], found["units"]
    every = [event for events in ranks for event in events]
    begin = min(event["seconds"] for event in every)
    for event in every:
        event["seconds"] -= begin
    counts = Counter((event["what"], event["unit"]) for event in ranks[0])
    for unit in units:
        unit["counted"] = {kind: counts[kind, unit["unit"]] for kind in unit["planned"]}
    found["seconds"], found["peak_bytes"] = (max(event[key] for event in every) for key in ("seconds", "held_bytes"))
    facts = {kind: sum(unit["counted"][kind] for unit in units) for kind in ("gather", "reduce")} | found
    facts |= {"milliseconds": found["seconds"] * 1e3, "peak": format_bytes(found["peak_bytes"])}
    verdict = words["right" if all(unit["counted"] == unit["planned"] for unit in units) else "wrong"]
    found["report"] = [*(line.format(**facts) for line in words["report"]), verdict]
    drawing = HTML.timeline([(_spans(events), events) for events in ranks], facts, words)
    path = write_page("trace", path.with_suffix(".html"), lang, report=found["report"], drawing=drawing, units=units)
    path.with_suffix(".svg").write_text(f"{drawing.strip()}\n", encoding="utf-8")
    write_json(path.with_suffix(".json"), found)
    return found | {"report": [*found["report"], f"Page: {path}"]}


def _spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the first of each beginning to its end: kind (gather, forward, ...), unit, start and stop in seconds."""
    begun, spans = {}, []
    for event in events:
        kind, unit, seconds = event["what"].removesuffix(" end"), event["unit"], event["seconds"]
        if kind == event["what"]:
            begun.setdefault((kind, unit), seconds)
        elif (kind, unit) in begun:
            spans.append({"kind": kind, "unit": unit, "start": begun.pop((kind, unit)), "stop": seconds})
    return spans
