"""The errors of data/files.yaml: each is raised somewhere, with exactly the facts that its texts show."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

import fullshard.data.files as files


def test_every_refusal_gets_its_facts():
    given = {}
    for path in Path(files.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refusal":
                given.setdefault(node.args[0].value, []).append({keyword.arg for keyword in node.keywords})
    assert given.keys() == files.FACTS["refusals"].keys()
    for name, calls in given.items():
        wanted = {
            field for text in files.FACTS["refusals"][name] for _, field, _, _ in Formatter().parse(text) if field
        }
        assert all(facts == wanted for facts in calls), name
        assert len(files.FACTS["refusals"][name]) == 2, name  # message and hint


def test_a_refusal_has_message_and_hint():
    error = files.refusal("no_answer", which="")
    assert error.message == "The chat template writes nothing of an assistant turn."
    assert error.hint.startswith("Repair the chat_template ({% generation %} around answers), or change")
