"""docs/precision.md: its table is the code's, its errors come out again, both languages show the same figures."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fullshard.train.precision import MODES, NAMES, log_text

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("precision.md", "precision.zh-CN.md")]


def test_the_table_of_modes_is_the_code_s():
    for page in PAGES:
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
        ]
        assert [row[0].strip("`") for row in rows] == list(MODES)
        for name, master, frozen, products, wire, rest, gathered, _ in rows:
            mode = MODES[name.strip("`")]
            size = mode.master.itemsize
            assert (master, frozen, wire) == (NAMES[mode.master], NAMES[mode.compute], NAMES[mode.reduce])
            assert products.startswith("TF32" if mode.fast_fp32 else NAMES[mode.compute])
            assert rest == f"{size} + {size} + 8 = {2 * size + 8}" and gathered == str(mode.compute.itemsize)
        assert log_text("mode", MODES["bf16"]) in page


def test_errors_come_out_again(capsys):
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import precision_runs
    finally:
        sys.path.remove(str(ROOT / "docs"))
    precision_runs.print_errors()
    printed = capsys.readouterr().out.strip()
    for page in PAGES:
        assert printed in page
        assert f"{MODES['fp16'].loss_scale:,.0f}" in page


def test_both_languages_show_the_same():
    first, second = (re.findall(r"```.*?\n(.*?)```", page, re.S) for page in PAGES)
    assert first == second
