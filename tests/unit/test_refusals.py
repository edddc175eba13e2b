"""refusals.yaml: each text is raised somewhere, with exactly the facts that it shows; nothing else is raised."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

import fullshard
from fullshard.errors import ModelError, read_refusals, refusal


def test_texts_and_facts_fit():
    used: dict[str, list[set[str]]] = {}
    for path in Path(fullshard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refusal":
                given = node.args[0]
                for name in [given.body, given.orelse] if isinstance(given, ast.IfExp) else [given]:
                    used.setdefault(name.value, []).append({keyword.arg for keyword in node.keywords})
    assert used.keys() == read_refusals().keys()
    for name, calls in used.items():
        _, texts = read_refusals()[name]
        assert len(texts) == 2 and all(texts), name  # message and hint
        wanted = {fact for text in texts for _, fact, _, _ in Formatter().parse(text) if fact}
        assert all(facts == wanted for facts in calls), (name, wanted, calls)


def test_facts_with_braces_stay_as_they_are():
    error = refusal("quantised", path="/a/{b}", method="{0}")
    assert type(error) is ModelError and error.hint.startswith("Take")
    assert error.message.startswith("/a/{b} holds quantised weights ({0})")


def test_a_refusal_has_message_and_hint():
    error = refusal("no_answer", which="")
    assert error.message == "The chat template writes nothing of an assistant turn."
    assert error.hint.startswith("Repair the chat_template ({% generation %} around answers), or change")
