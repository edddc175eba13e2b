"""Masks: values worked out by hand for the templates of the field and for awkward ones."""

from __future__ import annotations

import re

import pytest
from tiny_models import K2_TEMPLATE, VOCABULARY, ids_of, make_tokenizer

from fullshard.data.chat import Renderer, check_tokenizer, load_tokenizer
from fullshard.errors import DataError, ModelError

CONVERSATION = [
    {"role": "user", "content": "red blue"},
    {"role": "assistant", "content": "green"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three four"},
]
QUESTION = CONVERSATION[:2]
LAST_ONLY = K2_TEMPLATE.replace(
    "{{ message['content'] }}", "{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}{% endif %}"
)
NO_ANSWERS = K2_TEMPLATE.replace(
    "{{ message['content'] }}", "{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}"
)
MARKED = K2_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}",
)
MARKED_WITH_END = K2_TEMPLATE.replace(
    "{{ message['content'] }}{{ '<|end|>' }}",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}",
)


@pytest.fixture
def tokenizer_with(tmp_path):
    def make(template: str | None = K2_TEMPLATE, **changes):
        return load_tokenizer(make_tokenizer(tmp_path / "tokenizer", chat_template=template, **changes))

    return make


def positions(mask: list[bool]) -> list[int]:
    return [place for place, value in enumerate(mask) if value]


def supervised_text(tokenizer, row) -> str:
    return tokenizer.decode([number for number, value in zip(row.ids, row.supervised, strict=True) if value])


@pytest.mark.parametrize("template", [K2_TEMPLATE, MARKED, MARKED_WITH_END])
def test_two_turns_by_hand(tokenizer_with, template):
    """HO-2a, by prefixes and by generation markers, with or without the end of turn inside them."""
    tokenizer = tokenizer_with(template)
    (row,) = Renderer(tokenizer, "assistant").chat(CONVERSATION)
    assert row.ids == [1, 4, 8, 9, 7, 5, 10, 7, 4, 11, 12, 7, 5, 13, 14, 7]
    assert positions(row.supervised) == [6, 7, 13, 14, 15]
    assert row.stops == [7, 15]
    (row,) = Renderer(tokenizer, "last").chat(CONVERSATION)
    assert positions(row.supervised) == [13, 14, 15]
    assert row.stops == [15]
    (row,) = Renderer(tokenizer, "all").chat(CONVERSATION)
    assert positions(row.supervised) == list(range(16))
    assert row.stops == [7, 15]


def test_a_template_that_rewrites_earlier_turns_gives_a_row_per_answer(tokenizer_with):
    """HO-2b."""
    tokenizer = tokenizer_with(LAST_ONLY)
    first, second = Renderer(tokenizer, "assistant").chat(CONVERSATION)
    assert first.ids == [1, 4, 8, 9, 7, 5, 10, 7]
    assert positions(first.supervised) == [6, 7]
    assert second.ids == [1, 4, 8, 9, 7, 5, 7, 4, 11, 12, 7, 5, 13, 14, 7]
    assert positions(second.supervised) == [12, 13, 14]
    (last,) = Renderer(tokenizer, "last").chat(CONVERSATION)
    assert last == second


@pytest.mark.parametrize("answer", ["green", "end", "<|end|>"])
def test_a_template_that_drops_answers_is_refused(tokenizer_with, answer):
    """HO-2c; the answer "end" must not be found inside "<|end|>"."""
    rows = [QUESTION[0], {"role": "assistant", "content": answer}]
    with pytest.raises(DataError, match="writes nothing of an assistant turn"):
        Renderer(tokenizer_with(NO_ANSWERS)).chat(rows)


def test_markers_around_nothing_are_refused(tokenizer_with):
    template = K2_TEMPLATE + "{% generation %}{% endgeneration %}"
    with pytest.raises(DataError, match="markers mark nothing"):
        Renderer(tokenizer_with(template)).chat(QUESTION)


def test_a_template_without_a_generation_prompt_is_refused(tokenizer_with):
    template = K2_TEMPLATE[: K2_TEMPLATE.index("{% if add_generation_prompt")]
    with pytest.raises(DataError, match="ignores add_generation_prompt") as caught:
        Renderer(tokenizer_with(template)).chat(QUESTION)
    assert "<|assistant|>" in caught.value.message


def test_a_generation_prompt_that_the_turn_does_not_have_is_refused(tokenizer_with):
    template = K2_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|> moon' }}")
    with pytest.raises(DataError, match="does not begin the rendered assistant turn"):
        Renderer(tokenizer_with(template)).chat(QUESTION)


def test_a_text_behind_the_last_turn_only_is_no_reason_for_more_rows(tokenizer_with):
    """Phi-3 writes its eos behind the last turn; the end-of-turn token stays the last supervised one."""
    template = K2_TEMPLATE.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    (row,) = Renderer(tokenizer_with(template), "assistant").chat(CONVERSATION)
    assert row.ids[-2:] == [7, 2]
    assert positions(row.supervised) == [6, 7, 13, 14, 15]


def test_no_template_and_wrong_roles(tokenizer_with):
    with pytest.raises(DataError, match="no chat template") as caught:
        Renderer(tokenizer_with(None)).chat(QUESTION)
    assert "body: text" in caught.value.hint
    refusing = "{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' }}" + K2_TEMPLATE
    with pytest.raises(DataError, match="refuses the roles system, assistant: System role not supported"):
        Renderer(tokenizer_with(refusing)).chat([{"role": "system", "content": "sun"}, QUESTION[1]])
    (row,) = Renderer(tokenizer_with()).chat(QUESTION[1:])
    assert row.ids == ids_of("<bos> <|assistant|> green <|end|>") and positions(row.supervised) == [2, 3]


def test_a_conversation_without_end_is_refused_at_once(tokenizer_with):
    """Each turn is rendered with all before it: 100,000 messages would take days."""
    with pytest.raises(DataError, match="100,000 messages; at most 4,000 are read") as caught:
        Renderer(tokenizer_with()).chat(QUESTION * 50_000)
    assert "Split" in caught.value.hint


def test_rows_without_an_answer_supervise_nothing(tokenizer_with):
    tokenizer = tokenizer_with()
    assert positions(Renderer(tokenizer).chat(QUESTION[:1])[0].supervised) == []
    assert positions(Renderer(tokenizer).chat([QUESTION[0], {"role": "assistant", "content": " "}])[0].supervised) == []


@pytest.mark.parametrize("add_bos", [False, True])
def test_never_two_bos_tokens(tokenizer_with, add_bos):
    tokenizer = tokenizer_with(add_bos=add_bos)
    assert Renderer(tokenizer).chat(QUESTION)[0].ids == ids_of(
        "<bos> <|user|> red blue <|end|> <|assistant|> green <|end|>"
    )
    assert Renderer(tokenizer).prompt(QUESTION[:1]) == ids_of("<bos> <|user|> red blue <|end|> <|assistant|>")
    text = Renderer(tokenizer, "assistant").plain_text("<bos> red blue")
    assert text.ids == ids_of("<bos> red blue <eos>")
    assert text.supervised == [True] * 4
    assert text.stops == [3]
    assert Renderer(tokenizer, "assistant").plain_text("red <eos>").ids[-2:] == ids_of("red <eos>")


# What the templates of four families write (structure of the published ones, shortened).
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n'"
    " + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TEXT = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> <s> </s>"
)


@pytest.fixture(scope="module", params=[False, True], ids=["offsets", "trimmed-offsets"])
def byte_tokenizer(request):
    """A byte-level tokenizer without merges, with the control tokens of the field; offsets as GPT-2's or as Qwen's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.post_processor = processors.ByteLevel(trim_offsets=request.param)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TEXT.split()])
    return PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["green<|im_end|>three four<|im_end|>"]),
        (LLAMA3, ["green<|eot_id|>three four<|eot_id|>"]),
        (GEMMA, ["green<end_of_turn>three four<end_of_turn>"]),
        (LLAMA2, [" green </s> three four </s>"]),
        (QWEN3, ["<think>\n\n</think>\n\ngreen<|im_end|>", "<think>\n\n</think>\n\nthree four<|im_end|>"]),
    ],
    ids=["chatml", "llama3", "gemma", "llama2", "qwen3"],
)
def test_templates_of_the_field(byte_tokenizer, template, expected):
    byte_tokenizer.chat_template = template
    rows = Renderer(byte_tokenizer, "assistant").chat(CONVERSATION)
    assert [supervised_text(byte_tokenizer, row) for row in rows] == expected
    for row in rows:
        whole = byte_tokenizer.decode(row.ids)
        ids = byte_tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert row.ids == ids  # the text and its tokens are those of the template


def test_a_template_without_a_stop_token_trains_no_stop(byte_tokenizer):
    byte_tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (row,) = Renderer(byte_tokenizer, "assistant").chat(CONVERSATION)
    assert supervised_text(byte_tokenizer, row) == "greenthree four"
    assert row.stops == []


def test_the_prompt_of_inference_is_the_unsupervised_beginning(byte_tokenizer):
    """What the model sees before its answer is the same in training and in generation."""
    for template in (CHATML, LLAMA3, GEMMA, LLAMA2, QWEN3):
        byte_tokenizer.chat_template = template
        (row,) = Renderer(byte_tokenizer, "assistant").chat(QUESTION)
        prompt = Renderer(byte_tokenizer).prompt(QUESTION[:1])
        assert row.ids[: len(prompt)] == prompt
        assert positions(row.supervised)[0] == len(prompt)


CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\n' }}START{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{% set given = call.function.arguments %}"
    "{{ '<call>' + (given if given is string else given | tojson) + '</call>' }}{% endfor %}END"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(("start", "end"), [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_typed_arguments_are_kept_exactly(byte_tokenizer, start, end):
    """Order, numbers, null, nesting, letters: what JSON writes of the row's own values; a string stays that string."""
    byte_tokenizer.chat_template = CALLS.replace("START", start).replace("END", end)
    arguments = {"z": 1, "a": 1.0, "big": 2**60, "no": None, "on": True, "in": [{"k": "红 & <b>"}], "e": 1e-7}
    written = (
        '{"z": 1, "a": 1.0, "big": 1152921504606846976, "no": null, "on": true, "in": [{"k": "红 & <b>"}], "e": 1e-07}'
    )
    for given, text in ((arguments, written), ('{"z":  1}', '{"z":  1}')):
        calls = [{"type": "function", "function": {"name": "f", "arguments": given}}]
        messages = [QUESTION[0], {"role": "assistant", "content": "", "tool_calls": calls}]
        (row,) = Renderer(byte_tokenizer).chat(messages, [{"parameters": arguments}])
        assert supervised_text(byte_tokenizer, row) == f"<call>{text}</call><|im_end|>"
        assert byte_tokenizer.decode(row.ids).startswith(f'{{"parameters": {written}}}<|im_start|>user')
        assert Renderer(byte_tokenizer).answer(messages) == row.ids[-len(f"<call>{text}</call>".encode()) - 2 : -1]


def test_a_pad_token_outside_the_table_is_refused(tokenizer_with):
    """HO-3b."""
    tokenizer = tokenizer_with(vocabulary=[*VOCABULARY, "<fill>"], pad_token="<fill>")
    with pytest.raises(DataError) as caught:
        check_tokenizer(tokenizer, 64)
    assert "id 64" in caught.value.message
    assert "64 rows" in caught.value.message
    check_tokenizer(tokenizer, 65)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="No usable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 'x' * 10 ** 14 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ cycler() }}",
        "{% generation %}{{ 1 / 0 }}{% endgeneration %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(byte_tokenizer, template):
    byte_tokenizer.chat_template = template
    with pytest.raises(DataError, match="refuses the roles user, assistant"):
        Renderer(byte_tokenizer, "assistant").chat(QUESTION)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "null"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"added_tokens": [], "model": {}}'),  # tokenizers raise a bare Exception
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "null"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": {"other": "x"}}'),
    ],
)
def test_a_damaged_tokenizer_folder_is_named(tmp_path, name, content):
    make_tokenizer(tmp_path, chat_template=None)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=re.escape(f"No usable tokenizer in {tmp_path}: ")):
        load_tokenizer(tmp_path)
