"""What must hold for every structure of test_chat_structures.py alike: one BOS, last turn only, arguments kept."""

from __future__ import annotations

import json

import pytest
from test_chat_structures import CHATML, FOUR, GEMMA, LLAMA31, NUMBERS, QWEN3, QWEN25, call, turns
from test_chat_structures import tokenizer_with as tokenizer_with  # the fixture
from tiny_models import BOS

from fullshard.data.chat import Renderer
from fullshard.errors import DataError

STRUCTURES = {
    "chatml": (CHATML, {}),
    "qwen25": (QWEN25, {}),
    "qwen3-thinking": (QWEN3, {"enable_thinking": True}),
    "qwen3": (QWEN3, {"enable_thinking": False}),
    "llama31": (LLAMA31, {"date_string": "one two"}),
    "gemma": (GEMMA, {}),
}
ENDS = {NUMBERS[token] for token in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")}
OTHERS = "red blue one two sun user assistant model system <|im_start|> <start_of_turn> <|start_header_id|>"
STRUCTURE = pytest.mark.parametrize("name", STRUCTURES)


@STRUCTURE
@pytest.mark.parametrize("add_bos", [False, True])
def test_one_bos_or_none_in_training_and_answers(tokenizer_with, name, add_bos):
    """Whatever the tokenizer puts before plain text, the template alone decides."""
    template, arguments = STRUCTURES[name]
    tokenizer = tokenizer_with(template, add_bos=add_bos)
    renderer = Renderer(tokenizer, template_arguments=arguments)
    wanted = int("bos_token" in template)
    for messages in (FOUR, turns("red", "blue", system="sun"), FOUR[:2]):
        rows = renderer.chat(messages)
        assert all(
            row.ids.count(BOS) == wanted and row.ids.index(BOS) == 0 if wanted else BOS not in row.ids for row in rows
        )
        assert renderer.prompt(messages[:-1]).count(BOS) == wanted
    assert renderer.plain_text("red").ids.count(BOS) == add_bos


@STRUCTURE
def test_only_answers_are_supervised_and_each_ends_in_its_end_of_turn(tokenizer_with, name):
    """System and several turns: no token of another's words, header or block; last: the last answer alone."""
    template, arguments = STRUCTURES[name]
    tokenizer = tokenizer_with(template)
    messages = [{"role": "system", "content": "sun"}, *FOUR]
    rows = Renderer(tokenizer, "assistant", arguments).chat(messages)
    learned = [number for row in rows for number, value in zip(row.ids, row.supervised, strict=True) if value]
    others = {NUMBERS[word] for word in OTHERS.split()}
    assert not others & set(learned)
    assert {NUMBERS[word] for word in ("green", "three", "four")} <= set(learned)
    assert [row.ids[stop] for row in rows for stop in row.stops] == [number for number in learned if number in ENDS]
    assert sum(len(row.stops) for row in rows) == 2
    (last,) = Renderer(tokenizer, "last", arguments).chat(messages)
    words = [number for number, value in zip(last.ids, last.supervised, strict=True) if value]
    assert words[-3:-1] == [NUMBERS["three"], NUMBERS["four"]] and words[-1] in ENDS and len(last.stops) == 1
    assert NUMBERS["green"] in last.ids and NUMBERS["green"] not in words


@STRUCTURE
def test_typed_arguments_are_written_as_they_are(tokenizer_with, name):
    """Order, integers, floats, null, truth and nesting; or the structure has no tool calls, and says so."""
    template, arguments = STRUCTURES[name]
    renderer = Renderer(tokenizer_with(template), template_arguments=arguments)
    given = {"z": 1, "a": 1.0, "no": None, "on": True, "in": [{"k": "红"}]}
    messages = [*turns("red"), call("sun", given)]
    if "tool_calls" not in template:
        with pytest.raises(DataError, match="no chat template that reads tools, tool_calls"):
            renderer.chat(messages, [{"name": "sun"}])
        return
    assert json.dumps(given, ensure_ascii=False) in renderer.text(messages)
    assert given == {"z": 1, "a": 1.0, "no": None, "on": True, "in": [{"k": "红"}]}
