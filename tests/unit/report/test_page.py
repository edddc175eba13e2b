"""The page builder: sound markup, nothing from outside, everything escaped, readable charts."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from strict_page import StrictParser, parse

from fullshard.report.page import HTML, round_step

SCRIPT = "<script>document.title = 'it ran'</script>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def sample(text: str = "words", lang: str = "en") -> str:
    """A page with one of everything, ``text`` in every place."""
    blocks = [text, HTML.table([text, "n"], [[text, 1234567], [text, 5]]), HTML.bars({text: 3, "b": 0}, text, text)]
    return HTML.page(text, [(text, [*blocks, HTML.marked(text, [(text, False), (text, True)])])], lang)


def test_the_markup_nests_and_loads_nothing():
    parser = parse(sample())
    assert {"h1", "h2", "table", "svg", "figure", "mark"} <= set(parser.tags)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in parser.attributes


@pytest.mark.parametrize(
    "text", [SCRIPT, '"><b onload=x>', "a & b", "'quoted'", "</pre></style>", "答案 ⟦⟧", "{{ 7 * 7 }}"]
)
def test_everything_is_escaped(text):
    parser = parse(sample(text))
    assert "b" not in parser.tags
    found = [data for tag, data in parser.texts if tag not in ("style",)]
    # title, h1, h2, p, th, 2 td, 3 of the chart, caption, and the two pieces
    assert sum(data.count(text) for data in found) == 13


def test_the_language_is_said():
    assert '<html lang="en">' in sample() and '<html lang="zh-CN">' in sample(lang="zh")


def test_marked_text_is_seen_in_black_and_white_too():
    document = sample()
    assert re.search(r"mark \{[^}]*background[^}]*text-decoration: underline", document)
    assert "<mark>words</mark>" in document and "print-color-adjust: exact" in document


def test_text_keeps_its_line_breaks():
    made = HTML.marked("h", [("\nfirst\n  second", False), ("\n", True)])
    assert "<pre>\n\nfirst\n  second<mark>\n</mark></pre>" in made


def test_numbers_have_separators_and_stand_right():
    made = HTML.table(["name", "n"], [["a", 1234567], ["b", "57.9%"]])
    assert '<td class="number">1,234,567</td>' in made and '<td class="number">57.9%</td>' in made
    assert '<th class="number">n</th>' in made and "<td>a</td>" in made
    cells = re.findall("<td[^>]*>([^<]*)</td>", HTML.table(["v"], [[1234], [0.123456], [12.5], ["a"]]))
    assert cells == ["1,234", "0.1235", "12.5", "a"]


def rectangles(chart: str) -> list[dict[str, float]]:
    found = re.findall(r"<rect ([^>]*)/>", chart)
    return [{name: float(value) for name, value in re.findall(r'(\w+)="([\d.]+)"', rect)} for rect in found]


@pytest.mark.parametrize("values", [[1, 2, 4], [2431, 0, 7], [0, 0, 0], [0.5, 0.25, 0.125]])
def test_bars_are_as_high_as_their_values(values):
    chart = HTML.bars(dict(zip("abc", values, strict=True)), "x", "y")
    heights = [rect["height"] for rect in rectangles(chart)]
    scale = heights[0] / values[0] if values[0] else 0
    assert heights == pytest.approx([value * scale for value in values], abs=0.2)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", chart)
    assert [f"{value:,}" in texts for value in values] == [True] * 3
    assert texts[-2:] == ["x", "y"]


def test_a_chart_stays_inside_its_box():
    for count in (1, 2, 12, 40):
        chart = HTML.bars({f"{place * 1000}–{place * 1000 + 999}": 7 for place in range(count)}, "x", "y")
        for rect in rectangles(chart):
            assert rect["x"] >= 64 and rect["x"] + rect["width"] <= 760
            assert rect["y"] >= 20 and rect["y"] + rect["height"] <= 240
        assert ("rotate(-30" in chart) == (count >= 12)  # long labels are turned, so that they do not run together


def test_steps_are_round():
    for largest in (1, 2, 5, 6, 99, 100, 101, 512, 7473, 131072):
        step = round_step(largest, 5)
        assert step * 5 >= largest and str(step).rstrip("0") in ("1", "2", "5")
        assert step == 1 or step / 2.5 * 5 <= largest * 1.0001 + 5


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; the strict parser reads the same page above")
def test_chromium_shows_it_and_runs_nothing(tmp_path):
    file = tmp_path / "page.html"
    file.write_text(sample(SCRIPT), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=240)
    shown = StrictParser()
    shown.feed(done.stdout)
    assert [data for tag, data in shown.texts if tag == "title"] == [SCRIPT], done.stderr
    assert {"table", "svg", "rect", "mark"} <= set(shown.tags) and "script" not in shown.tags
