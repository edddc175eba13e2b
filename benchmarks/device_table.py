"""README's device table, made of benchmarks/results/device-*.json: `python benchmarks/device_table.py` writes it.

It stands between ``<!-- devices -->`` and ``<!-- /devices -->`` in README.md and README.zh-CN.md. A kind of device
without a file is "written for, not run"; of two files of one device the newer counts; a step that a file lacks is "-".
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh-CN.md"}
MARKED = re.compile(r"(<!-- devices -->\n)(.*?)(<!-- /devices -->)", re.S)
KINDS = {"cuda": "CUDA", "npu": "Ascend NPU", "cpu": "CPU"}

WORDS = {
    "en": {
        "header": ("kind", "device", "date", "doctor", "all ranks = 1 rank", "fp32", "bf16", "quickstart"),
        "none": "written for, not run",
        "ok": "ok", "failed": "failed", "refused": "refused",
        "about": "From `make test-device` (at most 20 minutes); its files are `benchmarks/results/device-*.json`.",
    },
    "zh": {
        "header": ("类型", "设备", "日期", "doctor", "多 rank = 单 rank", "fp32", "bf16", "quickstart"),
        "none": "代码已写，未实测",
        "ok": "通过", "failed": "失败", "refused": "不支持",
        "about": "由 `make test-device` 实测得出（最长 20 分钟），结果文件是 `benchmarks/results/device-*.json`。",
    },
}  # fmt: skip


def read_records(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest record of each device, by kind and name."""
    newest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("device-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        name = record["device"]["name"]
        if name not in newest or newest[name]["date"] <= record["date"]:
            newest[name] = record
    return sorted(newest.values(), key=lambda record: record["device"]["name"])


def make_table(language: str, folder: Path = RESULTS) -> str:
    """What stands between the markers, in "en" or "zh"."""
    words, records = WORDS[language], read_records(folder)
    header = words["header"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for kind, title in KINDS.items():
        rows = [record for record in records if record["device"]["kind"] == kind]
        for record in rows:
            lines.append(f"| {title} | {' | '.join(_cells(record, words))} |")
        if not rows:
            lines.append(f"| {title} | {words['none']} |{' - |' * (len(header) - 2)}")
    return "\n".join([*lines, "", words["about"]]) + "\n"


def _cells(record: dict[str, Any], words: dict[str, Any]) -> list[str]:
    device, steps = record["device"], record["steps"]
    modes = steps.get("precision", {}).get("modes", {})
    count = "" if device["kind"] == "cpu" else f"{device['count']} x "
    results = [
        _word(steps.get(step, {}).get("ok"), words) if step in steps else "-"
        for step in ("doctor", "parity", "quickstart")
    ]
    precisions = [words[modes[mode]] if mode in modes else "-" for mode in ("fp32", "bf16")]
    return [f"{count}{device['name'].removeprefix('CPU ')}", record["date"], *results[:2], *precisions, results[2]]


def _word(ok: bool, words: dict[str, Any]) -> str:
    return words["ok"] if ok else words["failed"]


def table_in(page: Path) -> str:
    """What a page holds between the markers; ValueError without them."""
    match = MARKED.search(page.read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{page} has no <!-- devices --> ... <!-- /devices -->")
    return match[2]


def write_tables(folder: Path = RESULTS, pages: dict[str, Path] = PAGES) -> None:
    """Put the table of ``folder`` into every page."""
    for language, page in pages.items():
        table_in(page)
        text = page.read_text(encoding="utf-8")
        table = make_table(language, folder)
        page.write_text(MARKED.sub(lambda match, table=table: match[1] + table + match[3], text), encoding="utf-8")


if __name__ == "__main__":
    write_tables()
    sys.exit(0)
