"""The structures of Qwen2.5, Qwen3, Llama-3.1, Gemma and ChatML, in templates of our own, on K2: masks by hand.

In the expected rows ``^`` stands before each supervised token. K2 splits at white space, so that newlines vanish.
"""

from __future__ import annotations

import datetime

import pytest
from tiny_models import VOCABULARY, make_tokenizer

from fullshard.data.chat import Renderer, load_tokenizer
from fullshard.data.sources import Row
from fullshard.data.workers import BatchRenderer
from fullshard.errors import DataError

CONTROL_TEXT = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|> "
    "<start_of_turn> <end_of_turn>"
)
TAG_TEXT = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
WORD_TEXT = 'user assistant system tool model ipython Environment: Today {"one": 1} {"one":1} {"name": "sun"} "two"'
CONTROL, TAGS = CONTROL_TEXT.split(), TAG_TEXT.split()  # tags are added tokens, not special ones
LONGER = [*VOCABULARY, *CONTROL, *TAGS, *WORD_TEXT.split()]
NUMBERS = {token: number for number, token in enumerate(LONGER)}

# Roles by name, a system block that is always there, tools inside it, tool answers as one user turn.
QWEN25 = """
{%- set own = messages[0].content if messages[0].role == 'system' else 'moon star' %}
{{- '<|im_start|>system\n' + own }}
{%- for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- for turn in messages %}
{%- if turn.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + turn.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif turn.role != 'system' %}
{{- '<|im_start|>' + turn.role + '\n' + turn.content }}
{%- for call in turn.tool_calls or [] %}
{{- '\n<tool_call>\n' + call.function.name + ' ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Thoughts stand in the turns behind the last question only; the switch writes an empty block into the prompt.
QWEN3 = """
{%- set last = namespace(question=0) %}
{%- for turn in messages %}{% if turn.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for turn in messages %}
{%- if turn.role == 'assistant' %}
{%- set spoken = turn.content.split('</think>')[-1].lstrip('\n ') %}
{%- set thought = turn.reasoning_content or '' %}
{%- if '</think>' in turn.content %}
{%- set thought = turn.content.split('</think>')[0].split('<think>')[-1].strip('\n ') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.question and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif %}
{{- spoken }}
{%- for call in turn.tool_calls or [] %}
{{- '\n<tool_call>\n' + call.function.name + ' ' + call.function.arguments | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif turn.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + turn.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# Role headers, a system block with the date, tool answers as ipython, tools in the first question, two ends of turn.
LLAMA31 = """
{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- head('system') }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today ' + date_string + '\n\n' }}
{{- messages[0].content | trim if messages[0].role == 'system' }}
{{- '<|eot_id|>' }}
{%- for turn in turns %}
{%- if turn.tool_calls %}
{%- set call = turn.tool_calls[0].function %}
{{- head('assistant') }}
{%- if call.name == 'sea' %}{{ '<|python_tag|>' + call.name + ' ' + call.arguments.code + '<|eom_id|>' }}
{%- else %}{{ call.name + ' ' + call.arguments | tojson + '<|eot_id|>' }}{% endif %}
{%- elif turn.role == 'tool' %}{{ head('ipython') + turn.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- head(turn.role) }}
{%- if loop.first %}{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}{% endif %}
{{- turn.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

# No system role, turns must alternate, the assistant is called model.
GEMMA = """
{{- bos_token }}
{%- for turn in messages %}
{%- if turn.role == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}
{%- if (turn.role == 'user') != (loop.index0 is even) %}{{ raise_exception('turns must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\n' }}
{{- turn.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

CHATML = """
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def turns(*texts: str, system: str | None = None) -> list[dict]:
    """User and assistant in turn."""
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, texts, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def call(name: str, arguments, **more) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **more}


FOUR = turns("red blue", "green", "one two", "three four")
CALLED = [*turns("red"), call("sun", {"one": 1}), {"role": "tool", "content": "blue"}, *turns("", "green")[1:]]
TOOLS = [{"name": "sun"}]


def expected(text: str) -> tuple[list[int], list[int]]:
    """Ids and supervised positions of a row written by hand."""
    tokens = text.split()
    return [NUMBERS[token.lstrip("^")] for token in tokens], [i for i, token in enumerate(tokens) if token[0] == "^"]


@pytest.fixture
def tokenizer_with(tmp_path):
    def make(template: str, **changes):
        tokenizer = load_tokenizer(make_tokenizer(tmp_path, chat_template=template, vocabulary=LONGER, **changes))
        tokenizer.add_special_tokens({"additional_special_tokens": CONTROL}, replace_extra_special_tokens=False)
        tokenizer.add_tokens(TAGS)
        assert len(tokenizer) == len(LONGER)
        return tokenizer

    return make


def check(renderer: Renderer, messages: list[dict], rows: list[str], tools=None) -> None:
    """Rows, masks, ends of turn, and that each prompt of inference is the row's beginning."""
    found = renderer.chat(messages, tools)
    assert [row.ids for row in found] == [expected(row)[0] for row in rows]
    for row, text in zip(found, rows, strict=True):
        positions = expected(text)[1]
        assert [i for i, value in enumerate(row.supervised) if value] == positions
        assert row.stops == [i for i in positions if i + 1 not in positions]  # each turn ends in its end-of-turn token
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for place in places:
        prompt = renderer.prompt(messages[:place], tools)
        assert any(row.ids[: len(prompt)] == prompt and row.supervised[len(prompt)] for row in found)
    last = len(renderer.prompt(messages[: places[-1]], tools))
    assert renderer.answer(messages[: places[-1] + 1], tools) == found[-1].ids[last : found[-1].stops[-1] + 1]


@pytest.mark.parametrize("add_bos", [False, True])
def test_chatml(tokenizer_with, add_bos):
    row = (
        "<|im_start|> user red blue <|im_end|> <|im_start|> assistant ^green ^<|im_end|> "
        "<|im_start|> user one two <|im_end|> <|im_start|> assistant ^three ^four ^<|im_end|>"
    )
    renderer = Renderer(tokenizer_with(CHATML, add_bos=add_bos))
    check(renderer, FOUR, [row])  # no bos: the template writes none, whatever the tokenizer does with plain text
    check(renderer, turns("red", "green", system="sun"), [
        "<|im_start|> system sun <|im_end|> <|im_start|> user red <|im_end|> <|im_start|> assistant ^green ^<|im_end|>"
    ])  # fmt: skip


def test_qwen25(tokenizer_with):
    renderer = Renderer(tokenizer_with(QWEN25))
    system = "<|im_start|> system moon star <|im_end|> "
    check(renderer, FOUR, [
        system + "<|im_start|> user red blue <|im_end|> <|im_start|> assistant ^green ^<|im_end|> "
        "<|im_start|> user one two <|im_end|> <|im_start|> assistant ^three ^four ^<|im_end|>"
    ])  # fmt: skip
    called = (
        'user red <|im_end|> <|im_start|> assistant ^<tool_call> ^sun ^{"one": ^1} ^</tool_call> ^<|im_end|> '
        "<|im_start|> user <tool_response> blue </tool_response> <|im_end|> <|im_start|> assistant ^green ^<|im_end|>"
    )
    check(renderer, CALLED, ['<|im_start|> system moon star {"name": "sun"} <|im_end|> <|im_start|> ' + called], TOOLS)
    check(renderer, CALLED, [system + "<|im_start|> " + called])
    as_text = [*CALLED[:1], call("sun", '{"one":1}'), *CALLED[2:]]
    check(renderer, as_text, [system + "<|im_start|> " + called.replace('^{"one": ^1}', '^{"one":1}')])
    said = [*turns("red"), call("sun", {"one": 1}, content="moon")]
    check(renderer, said, [
        system + "<|im_start|> user red <|im_end|> "
        '<|im_start|> assistant ^moon ^<tool_call> ^sun ^{"one": ^1} ^</tool_call> ^<|im_end|>'
    ])  # fmt: skip


def test_qwen3_with_thinking(tokenizer_with):
    """Earlier turns lose their thoughts: a row for each turn. A thought may stand in a field or in the content."""
    question = "<|im_start|> user red blue <|im_end|> <|im_start|> assistant "
    again = "<|im_start|> user one two <|im_end|> <|im_start|> assistant "
    rows = [
        question + "^<think> ^</think> ^green ^<|im_end|>",
        question + "green <|im_end|> " + again + "^<think> ^</think> ^three ^four ^<|im_end|>",
    ]
    tokenizer = tokenizer_with(QWEN3)
    check(Renderer(tokenizer), FOUR, rows)
    check(Renderer(tokenizer, template_arguments={"enable_thinking": True}), FOUR, rows)
    thought = [row.replace("^<think>", "^<think> ^sun") for row in rows]
    in_field = [message | ({"reasoning_content": "sun"} if i % 2 else {}) for i, message in enumerate(FOUR)]
    in_content = [
        message | ({"content": f"<think>sun</think>{message['content']}"} if i % 2 else {})
        for i, message in enumerate(FOUR)
    ]
    for messages in (in_field, in_content):
        check(Renderer(tokenizer), messages, thought)
    (last,) = Renderer(tokenizer, "last").chat(in_field)
    assert last == Renderer(tokenizer).chat(in_field)[1]


def test_qwen3_without_thinking(tokenizer_with):
    renderer = Renderer(tokenizer_with(QWEN3), template_arguments={"enable_thinking": False})
    question = "<|im_start|> user red blue <|im_end|> <|im_start|> assistant "
    check(renderer, FOUR, [
        question + "<think> </think> ^green ^<|im_end|>",
        question + "green <|im_end|> <|im_start|> user one two <|im_end|> "
        "<|im_start|> assistant <think> </think> ^three ^four ^<|im_end|>",
    ])  # fmt: skip
    with pytest.raises(DataError, match="does not begin the rendered assistant turn") as caught:
        renderer.chat([*turns("red"), {"role": "assistant", "content": "blue", "reasoning_content": "sun"}])
    assert "data.template_arguments" in caught.value.hint


def test_qwen3_keeps_the_thoughts_between_tool_calls(tokenizer_with):
    """One question, two steps with thoughts: nothing is rewritten, so one row."""
    steps = [CALLED[0], CALLED[1] | {"reasoning_content": "moon"}, CALLED[2], CALLED[3] | {"reasoning_content": "star"}]
    check(Renderer(tokenizer_with(QWEN3)), steps, [
        "<|im_start|> user red <|im_end|> <|im_start|> assistant "
        '^<think> ^moon ^</think> ^<tool_call> ^sun ^{"one": ^1} ^</tool_call> ^<|im_end|> '
        "<|im_start|> user <tool_response> blue </tool_response> <|im_end|> "
        "<|im_start|> assistant ^<think> ^star ^</think> ^green ^<|im_end|>"
    ])  # fmt: skip


@pytest.mark.parametrize("add_bos", [False, True])
def test_llama31(tokenizer_with, add_bos):
    def head(role: str) -> str:
        return f"<|start_header_id|> {role} <|end_header_id|> "

    renderer = Renderer(tokenizer_with(LLAMA31, add_bos=add_bos), template_arguments={"date_string": "one two"})
    begin = "<bos> " + head("system") + "Today one two "
    check(renderer, turns("red blue", " green ", "one", "three", system="sun"), [
        begin + "sun <|eot_id|> " + head("user") + "red blue <|eot_id|> " + head("assistant") + "^green ^<|eot_id|> "
        + head("user") + "one <|eot_id|> " + head("assistant") + "^three ^<|eot_id|>"
    ])  # fmt: skip
    called = [CALLED[0], CALLED[1], CALLED[2] | {"content": "two"}, call("sea", {"code": "fire"})]
    row = (
        "<bos> " + head("system") + "Environment: ipython Today one two <|eot_id|> "
        + head("user") + '{"name": "sun"} red <|eot_id|> ' + head("assistant") + '^sun ^{"one": ^1} ^<|eot_id|> '
        + head("ipython") + '"two" <|eot_id|> ' + head("assistant") + "^<|python_tag|> ^sea ^fire ^<|eom_id|>"
    )  # fmt: skip
    check(renderer, called, [row], TOOLS)
    assert [renderer.chat(called, TOOLS)[0].ids[i] for i in renderer.chat(called, TOOLS)[0].stops] == [
        NUMBERS["<|eot_id|>"],
        NUMBERS["<|eom_id|>"],
    ]


def test_the_date_is_todays_where_no_argument_says_another(tokenizer_with):
    tokenizer = tokenizer_with(LLAMA31)
    text = tokenizer.apply_chat_template(FOUR, tokenize=False)
    assert datetime.datetime.now().strftime("%d %b %Y") in text
    assert NUMBERS["two"] not in Renderer(tokenizer).prompt(turns("red"))


def test_gemma(tokenizer_with):
    renderer = Renderer(tokenizer_with(GEMMA))
    check(renderer, FOUR, [
        "<bos> <start_of_turn> user red blue <end_of_turn> <start_of_turn> model ^green ^<end_of_turn> "
        "<start_of_turn> user one two <end_of_turn> <start_of_turn> model ^three ^four ^<end_of_turn>"
    ])  # fmt: skip
    with pytest.raises(DataError, match="refuses the roles user, system: no system turns here") as caught:
        renderer.chat([*turns("red"), {"role": "system", "content": "sun"}])
    assert "first user message" in caught.value.hint
    with pytest.raises(DataError, match="refuses the roles user, user, assistant: turns must alternate"):
        renderer.chat([*turns("red"), *turns("red", "blue")])


SILENT = CHATML.replace("{{ '<|im_start|>'", "{% if turn.role != 'developer' %}{{ '<|im_start|>'", 1).replace(
    "{% endfor %}", "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role", "row"),
    [
        (
            GEMMA,
            "system",
            "<bos> <start_of_turn> user sun red <end_of_turn> <start_of_turn> model ^blue ^<end_of_turn>",
        ),
        (SILENT, "developer", "<|im_start|> user sun red <|im_end|> <|im_start|> assistant ^blue ^<|im_end|>"),
    ],
)
def test_system_text_that_the_template_does_not_take_goes_into_the_question(
    tokenizer_with, template, role, row, caplog, monkeypatch
):
    """Refused by the template (Gemma) or left out by it; the same for training, answers and a batch; said once."""
    monkeypatch.setattr(Renderer, "_taken", {})
    tokenizer = tokenizer_with(template)
    messages = [{"role": role, "content": "sun"}, *turns("red", "blue")]
    for loss_on in ("assistant", "last"):
        check(Renderer(tokenizer, loss_on), messages, [row])
    rows = [Row(f"a:{i}", messages) for i in range(9)]
    batches = [found for _, found in BatchRenderer(Renderer(tokenizer)).render(rows)]
    assert [[row.ids for row in found] for found in batches] == [[expected(row)[0]]] * 9
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"The chat template takes no {role} message: its text is put at the start of the first user message."
    ]
    everything = Renderer(tokenizer, "all").chat([messages[0], messages[1] | {"train": False}, messages[2]])
    assert sum(everything[0].supervised) < len(everything[0].ids) - 3  # the question with the text is not learned


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA31])
def test_a_system_text_that_the_template_takes_stays_where_it_is(tokenizer_with, template, caplog):
    (row,) = Renderer(tokenizer_with(template)).chat(turns("red", "blue", system="sun"))
    ids = row.ids
    assert ids.index(NUMBERS["system"]) < ids.index(NUMBERS["sun"]) < ids.index(NUMBERS["user"])
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (CHATML, "<|im_start|> assistant ^sun ^<|im_end|> "),
        (QWEN25, "<|im_start|> system moon star <|im_end|> <|im_start|> assistant ^sun ^<|im_end|> "),
        (QWEN3, "<|im_start|> assistant ^sun ^<|im_end|> "),
    ],
)
def test_a_conversation_that_begins_with_the_assistant(tokenizer_with, template, row):
    """As ShareGPT has them. Its first turn is learned as the others, where the template shows where it begins."""
    tokenizer = tokenizer_with(template)
    messages = [{"role": "assistant", "content": "sun"}, *turns("red", "blue")]
    more = "<|im_start|> user red <|im_end|> <|im_start|> assistant "
    think = "^<think> ^</think> " if template == QWEN3 else ""
    (found,) = Renderer(tokenizer).chat(messages)
    wanted = expected(row + more + think + "^blue ^<|im_end|>")
    assert (found.ids, [i for i, value in enumerate(found.supervised) if value]) == wanted
    (alone,) = Renderer(tokenizer).chat(messages[:1])
    assert (alone.ids, [i for i, value in enumerate(alone.supervised) if value]) == expected(row)
    unlearned, last = [messages[0] | {"train": False}, *messages[1:]], Renderer(tokenizer, "last").chat(messages)
    assert Renderer(tokenizer).chat(unlearned) == last
    assert sum(last[0].supervised) == sum(found.supervised) - 2
    system = Renderer(tokenizer).chat([{"role": "system", "content": "moon"}, *messages])
    assert [sum(row.supervised) for row in system] == ([4, 4] if think else [4])  # Qwen3 rewrites: a row for each


def test_a_conversation_that_begins_with_the_assistant_is_refused_where_its_turn_cannot_be_found(tokenizer_with):
    with pytest.raises(DataError, match="refuses the roles assistant, user, assistant: turns must alternate"):
        Renderer(tokenizer_with(GEMMA)).chat([{"role": "assistant", "content": "sun"}, *turns("red", "blue")])
    without = CHATML[: CHATML.index("{%- if add_generation_prompt")]
    with pytest.raises(DataError, match="does not show where a first assistant turn begins") as caught:
        Renderer(tokenizer_with(without)).chat([{"role": "assistant", "content": "sun"}])
    assert "Begin with a user" in caught.value.hint


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA31, GEMMA])
def test_train_false_is_read_and_not_learned(tokenizer_with, template):
    tokenizer = tokenizer_with(template)
    whole = Renderer(tokenizer).chat(FOUR)
    first = Renderer(tokenizer).chat([*FOUR[:3], FOUR[3] | {"train": False}])
    second = Renderer(tokenizer).chat([FOUR[0], FOUR[1] | {"train": False}, FOUR[2], FOUR[3] | {"train": True}])
    if len(whole) == 2:
        assert (first, second) == ([whole[0]], [whole[1]])
    else:
        assert first[0].ids == second[0].ids == whole[0].ids
        assert first[0].supervised != second[0].supervised
        both = [a or b for a, b in zip(first[0].supervised, second[0].supervised, strict=True)]
        assert both == whole[0].supervised
    assert second == Renderer(tokenizer, "last").chat(FOUR)
    unlearned = FOUR[1] | {"train": False}
    for messages, loss_on in (([*FOUR[:3], unlearned], "last"), ([FOUR[0], unlearned], "assistant")):
        (nothing,) = Renderer(tokenizer, loss_on).chat(messages)
        assert not any(nothing.supervised) and nothing.stops == []


def test_train_false_where_everything_is_supervised(tokenizer_with):
    """A whole message with its header; where history is rewritten it has no place of its own."""
    messages = [FOUR[0] | {"train": False}, FOUR[1], FOUR[2], FOUR[3] | {"train": False}]
    (row,) = Renderer(tokenizer_with(CHATML), "all").chat(messages)
    by_hand = (
        "<|im_start|> user red blue <|im_end|> ^<|im_start|> ^assistant ^green ^<|im_end|> "
        "^<|im_start|> ^user ^one ^two ^<|im_end|> <|im_start|> assistant three four <|im_end|>"
    )
    assert (row.ids, [i for i, value in enumerate(row.supervised) if value]) == expected(by_hand)
    assert row.stops == [8]
    with pytest.raises(DataError, match="train: false cannot be kept"):
        Renderer(tokenizer_with(QWEN3), "all").chat([FOUR[0], FOUR[1] | {"train": False}, *FOUR[2:]])
    with pytest.raises(DataError, match="train: true on a message that is not"):
        Renderer(tokenizer_with(CHATML)).chat([FOUR[0] | {"train": True}, FOUR[1]])


def test_markers_are_kept_inside_their_turn(tokenizer_with):
    """Markers around the role header too, as some templates have them: the header is the prompt's, not the answer's."""
    template = """
{%- for turn in messages %}
{%- if turn.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + turn.content + '<|im_end|>\n' }}
{%- endgeneration %}{% else %}{{ '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    row = (
        "<|im_start|> user red blue <|im_end|> <|im_start|> assistant ^green ^<|im_end|> "
        "<|im_start|> user one two <|im_end|> <|im_start|> assistant ^three ^four ^<|im_end|>"
    )
    tokenizer = tokenizer_with(template)
    check(Renderer(tokenizer), FOUR, [row])
    (first,) = Renderer(tokenizer).chat([*FOUR[:3], FOUR[3] | {"train": False}])
    assert [i for i, value in enumerate(first.supervised) if value] == [7, 8]
    without_prompt = tokenizer_with(template[: template.index("{% if add_generation_prompt")].replace(
        "{% generation %}{{ '<|im_start|>assistant\n' + ", "{{ '<|im_start|>assistant\n' }}{% generation %}{{ "
    ))  # fmt: skip
    (marked,) = Renderer(without_prompt).chat(FOUR)
    assert (marked.ids, [i for i, value in enumerate(marked.supervised) if value]) == expected(row)
    assert marked.stops == [8, 18]


def test_a_row_brings_its_tools_and_the_template_never_sees_train(tokenizer_with):
    tokenizer = tokenizer_with(QWEN25 + "{% for turn in messages %}{{ 'moon' if turn.train is defined }}{% endfor %}")
    messages = [message | {"train": True} if message["role"] == "assistant" else message for message in CALLED]
    assert Renderer(tokenizer).row(Row("a:1", messages, tools=TOOLS)) == Renderer(tokenizer).chat(CALLED, TOOLS)
    assert Renderer(tokenizer).row(Row("a:1", text="red")) == [Renderer(tokenizer).plain_text("red")]
    with pytest.raises(DataError, match=r"^a:1: The tokenizer knows no word"):
        Renderer(tokenizer).row(Row("a:1", turns("red", "strange")))


def test_what_the_template_cannot_write_is_refused(tokenizer_with):
    renderer = Renderer(tokenizer_with(CHATML))
    with pytest.raises(DataError, match="no chat template that reads tools, tool_calls"):
        renderer.chat(CALLED, TOOLS)
    with pytest.raises(DataError, match="no chat template that reads reasoning_content"):
        renderer.chat([*turns("red"), {"role": "assistant", "content": "blue", "reasoning_content": "sun"}])
    with pytest.raises(DataError, match="reads enable_thinkin"):
        Renderer(tokenizer_with(QWEN3), template_arguments={"enable_thinkin": False})
    with pytest.raises(DataError, match=r"refuses the roles user: .*multiple values"):
        Renderer(tokenizer_with(QWEN3), template_arguments={"messages": []}).prompt(turns("red"))


def test_a_template_for_tools_of_its_own(tokenizer_with):
    """A tokenizer with two templates: the one named tool_use serves rows with tools."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN25}
    renderer = Renderer(tokenizer)
    check(renderer, FOUR[:2], ["<|im_start|> user red blue <|im_end|> <|im_start|> assistant ^green ^<|im_end|>"])
    with_tools = (
        '<|im_start|> system moon star {"name": "sun"} <|im_end|> '
        "<|im_start|> user red blue <|im_end|> <|im_start|> assistant ^green ^<|im_end|>"
    )
    check(renderer, FOUR[:2], [with_tools], TOOLS)


def test_an_end_of_turn_that_is_added_and_not_special(tokenizer_with, tmp_path):
    """It is supervised, and a stop."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "other", chat_template=CHATML.replace("<|im_end|>", "</s>")))
    tokenizer.add_tokens(["<|im_start|>", "</s>", "user", "assistant"])
    (row,) = Renderer(tokenizer).chat(turns("red", "green"))
    assert [row.ids[i] for i in row.stops] == [tokenizer.convert_tokens_to_ids("</s>")]
    assert sum(row.supervised) == 2


def test_words_that_the_tokenizer_does_not_know(tokenizer_with):
    with pytest.raises(DataError, match=r"knows no word of an assistant turn \('stranger things'\): each is <unk>"):
        Renderer(tokenizer_with(CHATML)).chat(turns("red", "stranger things"))


def test_two_bos_are_refused(tokenizer_with):
    with pytest.raises(DataError, match="writes <bos> twice"):
        Renderer(tokenizer_with("{{ bos_token }}" + LLAMA31)).prompt(turns("red"))


def test_a_template_that_does_not_end(tokenizer_with, monkeypatch):
    """The sandbox bounds one loop at 100,000 rounds, not one inside another."""
    monkeypatch.setattr("fullshard.data.chat.RENDER_SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"does not end: stopped after 0\.2 s"):
        Renderer(tokenizer_with(endless)).chat(FOUR)
    assert len(Renderer(tokenizer_with(CHATML)).chat(FOUR)) == 1  # the clock is off again
