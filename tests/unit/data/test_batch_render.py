"""Many rows at once give exactly what Renderer gives row by row, whatever the template does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_structures import CHATML, CONTROL, GEMMA, LLAMA31, LONGER, QWEN3, QWEN25, turns
from tiny_models import K2_TEMPLATE, WORDS, make_tokenizer

from fullshard.data.chat import Renderer, load_tokenizer
from fullshard.data.sources import Row
from fullshard.data.workers import BatchRenderer
from fullshard.errors import DataError

CONTENT = "{{ message['content'] }}"
TEMPLATES = {
    "k2": K2_TEMPLATE,
    "trimmed": K2_TEMPLATE.replace(CONTENT, "{{ message['content'] | trim }}"),
    "upper first turn": K2_TEMPLATE.replace(CONTENT, "{{ 'red ' if loop.first }}" + CONTENT),
    "looks for a word": K2_TEMPLATE.replace(CONTENT, "{{ 'moon ' if 'sun moon' in message['content'] }}" + CONTENT),
    "by length": K2_TEMPLATE.replace(CONTENT, "{{ 'tree ' if message['content'] | length > 14 }}" + CONTENT),
    "forgets earlier answers": K2_TEMPLATE.replace(
        CONTENT, "{% if message['role'] == 'user' or loop.last %}" + CONTENT + "{% endif %}"
    ),
    "markers": K2_TEMPLATE.replace(CONTENT, "{% generation %}" + CONTENT + "{% endgeneration %}"),
}
TEXT = st.lists(st.sampled_from([*WORDS[:12], "sun moon", "<|end|>", " "]), min_size=0, max_size=6).map(" ".join)


def one_by_one(renderer, rows):
    found = []
    for row in rows:
        try:
            found.append(renderer.chat(row.messages))
        except DataError as error:
            return found, f"{row.origin}: {error.message}"
    return found, None


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("t"), chat_template=TEMPLATES[request.param]))


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
@settings(max_examples=25, deadline=None)
@given(contents=st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=30))
def test_equal_to_the_slow_way(tokenizer, loss_on, contents):
    rows = []
    for number, (asked, answered, twice) in enumerate(contents):
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        rows.append(Row(f"rows.jsonl:{number}", messages=turns * (2 if twice else 1)))
    expected, problem = one_by_one(Renderer(tokenizer, loss_on), rows)
    found, said = [], None
    try:
        found += [training_rows for _, training_rows in BatchRenderer(Renderer(tokenizer, loss_on)).render(rows)]
    except DataError as error:
        said = error.message
    assert said == problem
    if problem is None:
        assert found == expected


def test_most_rows_take_the_fast_way(tmp_path, monkeypatch):
    """2,500 rows of one shape: the template is rendered for the first, for 8 + 12 checks, and no more."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    rows = [
        Row(
            f"x:{i}",
            messages=[{"role": "user", "content": WORDS[i % 56]}, {"role": "assistant", "content": WORDS[i % 9]}],
        )
        for i in range(2500)
    ]
    renderer, calls = Renderer(tokenizer, "assistant"), []
    slow = renderer.chat
    monkeypatch.setattr(renderer, "chat", lambda *given: calls.append(1) or slow(*given))
    found = list(BatchRenderer(renderer).render(rows))
    assert [row.origin for row, _ in found] == [row.origin for row in rows]
    assert len(calls) == 1 + 8 + 12
    assert all(training_rows == slow(row.messages) for row, training_rows in found[::100])


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA31, GEMMA])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_rows_of_these_structures_need_no_rendering_each(tmp_path, template, loss_on, monkeypatch):
    """40 rows: the first teaches, 8 are checked."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, chat_template=template, vocabulary=LONGER))
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL}, replace_extra_special_tokens=False)
    renderer, calls = Renderer(tokenizer, loss_on), []
    slow = renderer.chat
    monkeypatch.setattr(renderer, "chat", lambda *given: calls.append(1) or slow(*given))
    said = [turns(f"red {colour}", "green blue"[: 5 + i % 6].strip()) for i, colour in enumerate(["sun", "moon"] * 20)]
    found = list(BatchRenderer(renderer).render([Row(f"a:{i}", messages) for i, messages in enumerate(said)]))
    assert [rows for _, rows in found] == [slow(messages) for messages in said]
    assert len(calls) == 1 + 8
