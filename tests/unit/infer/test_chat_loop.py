"""The conversation: memory, commands, piped lines."""

from __future__ import annotations

import io

import pytest
from tiny_models import make_model, make_tokenizer

from fullshard.infer.chat import start_chat
from fullshard.infer.generate import Answerer, generate_text, load_for_inference


@pytest.fixture(scope="module")
def answerer(tmp_path_factory) -> Answerer:
    folder = tmp_path_factory.mktemp("model")
    return load_for_inference(make_tokenizer(make_model(folder, initializer_range=0.4)))


def talk(answerer: Answerer, lines: str, **settings) -> tuple[int, list[str]]:
    """Number of answers and the lines written after the greeting."""
    writer = io.StringIO()
    count = start_chat(answerer, reader=io.StringIO(lines), writer=writer, **settings)
    return count, writer.getvalue().splitlines()[1:]


def answer(answerer: Answerer, messages: list[str], num_new: int = 5, system: str | None = None) -> str:
    roles = ["user", "assistant"] * len(messages)
    prompt = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return generate_text(answerer, [prompt], num_new, system=system)[0].strip()


def words(line: str) -> str:
    return line.split(" [cut")[0].strip()


def test_turns_are_remembered_until_reset(answerer):
    count, lines = talk(answerer, "red blue\nsun\n/reset\nsun\n", max_new_tokens=5)
    first = answer(answerer, ["red blue"])
    second = answer(answerer, ["red blue", first, "sun"])
    fresh = answer(answerer, ["sun"])
    assert second != fresh, "the model must show that it remembers"
    assert count == 3
    assert [words(lines[0]), words(lines[1]), lines[2], words(lines[3])] == [
        first,
        second,
        "the conversation starts anew",
        fresh,
    ]


def test_system_message_and_exit(answerer):
    count, lines = talk(answerer, "\nred\n/exit\nblue\n", max_new_tokens=5, system="moon")
    assert count == 1
    assert [words(line) for line in lines] == [answer(answerer, ["red"], system="moon")]


def test_unknown_commands_are_said_and_not_asked(answerer):
    count, lines = talk(answerer, "/rest\n")
    assert count == 0 and lines[0].startswith("/rest is unknown")


def test_a_full_conversation_says_so_and_goes_on_after_reset(answerer):
    count, lines = talk(answerer, f"{'red ' * 70}\n/reset\nred\n", max_new_tokens=5)
    assert count == 1
    text = " ".join(lines)
    assert "The conversation has 74 tokens" in text and "64 positions" in text and "/reset makes room" in text
    assert words(lines[-1]) == answer(answerer, ["red"])


def test_an_answer_that_is_cut_says_so(answerer):
    _, lines = talk(answerer, "red blue\n", max_new_tokens=1)
    assert lines[0].endswith("[cut after 1 tokens]")


def test_two_models_answer_side_by_side(answerer, tmp_path):
    other = load_for_inference(make_tokenizer(make_model(tmp_path, initializer_range=0.4, seed=3)))
    count, lines = talk(answerer, "red blue\nsun\n", max_new_tokens=5, compare=other)
    assert count == 4 and len(lines) == 8
    for place, model in ((1, answerer), (3, other)):
        first = answer(model, ["red blue"])
        assert [words(lines[place]), words(lines[place + 4])] == [first, answer(model, ["red blue", first, "sun"])]
