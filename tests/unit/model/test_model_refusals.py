"""Every refusal in the code has its texts, with exactly the facts that it gives; no text is left over."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

import fullshard
from fullshard.model.load import REFUSALS, refusal


def test_texts_and_facts_fit():
    used = {}
    for path in Path(fullshard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refusal":
                used.setdefault(node.args[0].value, set()).add(frozenset(keyword.arg for keyword in node.keywords))
    assert used.keys() == REFUSALS.keys()
    for key, given in used.items():
        message, hint = REFUSALS[key]
        wanted = {name for text in (message, hint) for _, name, _, _ in Formatter().parse(text) if name}
        assert given == {frozenset(wanted)}, key


def test_facts_with_braces_stay_as_they_are():
    message, hint = refusal("quantised", path="/a/{b}", method="{0}")
    assert message.startswith("/a/{b} holds quantised weights ({0})") and hint.startswith("Take")
