"""Answers in a batch are those of single calls, in order, cut at the stop id (HO-15)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import END, EOS, WORDS, ids_of, make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from fullshard.errors import CheckpointError, ConfigError, ModelError
from fullshard.infer.generate import (
    Answerer,
    PackedLinear,
    generate_ids,
    generate_text,
    load_for_inference,
    pack_linears,
    prompt_tokens,
)
from fullshard.run_folder import hold

PROMPTS = [ids_of(" ".join(WORDS[start : start + size])) for start, size in ((3, 9), (0, 3), (20, 5), (40, 9), (7, 1))]

needs_fbgemm = pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="FBGEMM is of x86")


def make_folder(folder: Path, family: str = "llama", stored: torch.dtype | None = None, **tokenizer) -> Path:
    """A model whose greedy answers differ from prompt to prompt: large random weights; in fp32, or as ``stored``."""
    make_tokenizer(make_model(folder, family, initializer_range=0.4), **tokenizer)
    if stored:
        AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "right"}))
    return folder


def greedy_by_hand(answerer: Answerer, ids: list[int], num_new: int) -> list[int]:
    """Greedy decoding without generate, cache, padding or batch: the oracle."""
    ids = list(ids)
    start = len(ids)
    with torch.no_grad():
        for _ in range(num_new):
            token = int(answerer.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token in answerer.stop_ids:
                break
            ids.append(token)
    return ids[start:]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Answerer:
    return load_for_inference(make_folder(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize(("pad", "stored"), [("<pad>", None), ("<eos>", None), ("<pad>", torch.bfloat16)])
def test_batch_equals_single_equals_oracle(tmp_path, family, pad, stored):
    folder = make_folder(tmp_path / "model", family, stored, pad_token=pad)
    answerer = load_for_inference(folder)
    assert answerer.tokenizer.padding_side == "right"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    oracle = [greedy_by_hand(replace(answerer, model=plain), ids, 8) for ids in PROMPTS]
    assert len({tuple(answer) for answer in oracle}) > 2, "the model must not say the same to everyone"
    for batch_size in (1, 2, 16):
        assert generate_ids(answerer, PROMPTS, 8, batch_size=batch_size) == oracle
    assert generate_ids(answerer, PROMPTS[::-1], 8) == oracle[::-1]


def test_answers_are_cut_at_any_stop_id(tmp_path):
    folder = make_folder(tmp_path / "model")
    whole = generate_ids(load_for_inference(folder), PROMPTS, 8)
    stop = next(answer[3] for answer in whole if len(answer) == 8 and answer[3] not in answer[:3])
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [EOS, stop]}))
    answerer = load_for_inference(folder)
    assert answerer.stop_ids == (EOS, stop)
    cut = generate_ids(answerer, PROMPTS, 8)
    assert cut == [answer[: answer.index(stop)] if stop in answer else answer for answer in whole]
    assert cut != whole


def test_nothing_in_the_models_generation_config_but_stop_ids_steers(tmp_path):
    folder = make_folder(tmp_path / "model")
    plain = generate_ids(load_for_inference(folder), PROMPTS, 8)
    generation = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "max_length": 3, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert generate_ids(load_for_inference(folder), PROMPTS, 8) == plain


def test_too_long_a_prompt_is_refused_with_numbers(llama):
    long = ids_of("red " * 60)
    with pytest.raises(
        ConfigError, match=r"Prompt 2 has 60 tokens; with 8 new tokens that is 68, .* 64 positions"
    ) as error:
        generate_ids(llama, [PROMPTS[0], long], 8)
    assert "at most 4 new tokens" in error.value.hint
    assert len(generate_ids(llama, [long], 4)[0]) <= 4
    with pytest.raises(ConfigError, match="empty"):
        generate_ids(llama, [[]], 4)


def test_sampling_is_repeatable_and_leaves_the_generator_alone(llama):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = generate_ids(llama, PROMPTS, 8, temperature=3.0, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert generate_ids(llama, PROMPTS, 8, temperature=3.0, seed=1) == first
    assert generate_ids(llama, PROMPTS, 8, temperature=3.0, seed=2) != first
    greedy = generate_ids(llama, PROMPTS, 8)
    assert greedy != first
    assert generate_ids(llama, PROMPTS, 8, temperature=3.0, top_p=1e-6) == greedy


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1}, {"top_p": 0.0, "temperature": 1}, {"top_p": 0.5}, {"max_new_tokens": 0}, {"batch_size": 0}],
)
def test_wrong_settings_are_refused(llama, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        generate_ids(llama, PROMPTS, **settings)


def test_prompts_go_through_the_template(llama):
    expected = ids_of("<bos> <|user|> red blue <|end|> <|assistant|>")
    assert prompt_tokens(llama, "red blue") == expected
    assert prompt_tokens(llama, [{"role": "user", "content": "red blue"}]) == expected
    with_system = ids_of("<bos> <|system|> sun <|end|> <|user|> red blue <|end|> <|assistant|>")
    assert prompt_tokens(llama, "red blue", "sun") == with_system
    own = [{"role": "system", "content": "moon"}, {"role": "user", "content": "red"}]
    assert prompt_tokens(llama, own, "sun") == ids_of(
        "<bos> <|system|> moon <|end|> <|user|> red <|end|> <|assistant|>"
    )
    assert own[0]["content"] == "moon"
    texts = generate_text(llama, ["red blue", "sun"], max_new_tokens=6)
    ids = generate_ids(llama, [expected, prompt_tokens(llama, "sun")], 6)
    assert [ids_of(text) for text in texts] == [[token for token in answer if token > END] for answer in ids]


def test_without_a_template_prompts_are_plain_text(tmp_path):
    answerer = load_for_inference(make_folder(tmp_path / "model", chat_template=None, add_bos=True))
    assert prompt_tokens(answerer, "red blue") == ids_of("<bos> red blue")
    for prompt, system in (("red", "sun"), ([{"role": "user", "content": "red"}], None)):
        with pytest.raises(ConfigError, match="no chat template"):
            prompt_tokens(answerer, prompt, system)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="No model folder"):
        generate_text(tmp_path / "nothing", ["red"])


def test_rows_of_a_file_are_answered_as_single_prompts(tmp_path, llama):
    from fullshard.errors import DataError
    from fullshard.infer.generate import answer_file

    messages = [{"role": "user", "content": "sun moon"}]
    rows = [{"prompt": "red blue green", "id": 7}, {"messages": messages}, {"prompt": "star"}]
    file = tmp_path / "rows.jsonl"
    rows[0]["prompt"] += "\u2028green"  # a line of JSON may hold it as it is
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8-sig")
    found = answer_file(llama, file, max_new_tokens=5)
    assert [{key: row[key] for key in row if key != "answer"} for row in found] == rows
    wanted = [generate_text(llama, [row.get("messages") or row["prompt"]], 5)[0] for row in rows]
    assert [row["answer"] for row in found] == wanted
    for bad in ("{}", "[1]", "{", '{"prompt": ""}', '{"prompt": 3}'):
        file.write_text(f'{{"prompt": "a"}}\n{bad}\n')
        with pytest.raises(DataError, match=r"rows\.jsonl:2 has neither"):
            answer_file(llama, file)


def test_one_prompt_is_streamed(llama):
    import io

    out = io.StringIO()
    answers = generate_text(llama, ["red blue"], 6, stream=out)
    assert out.getvalue().strip() == answers[0].strip() and answers[0]


def test_an_adapter_answers_without_merging(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    base = make_folder(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    answerer, plain = load_for_inference(tmp_path / "adapter"), load_for_inference(base)
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.allclose(answerer.model(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits, atol=1e-5)
    assert generate_ids(answerer, PROMPTS, 8) != generate_ids(plain, PROMPTS, 8)

    def prune(*arguments, **named):  # a run that trains, to which it may belong, meets a lock
        with pytest.raises(CheckpointError, match="is used by another process"), hold(tmp_path / "adapter", alone=True):
            pass
        return load(*arguments, **named)

    load = PeftModel.from_pretrained
    with monkeypatch.context() as patched:
        patched.setattr(PeftModel, "from_pretrained", prune)
        load_for_inference(tmp_path / "adapter")
    with hold(tmp_path / "adapter", alone=True):
        pass
    file = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    save_file({name.replace("layers.1.", "layers.9."): value for name, value in weights.items()}, file)
    with pytest.raises(ModelError, match="does not fit"):
        load_for_inference(tmp_path / "adapter")


def packed_in(model: torch.nn.Module) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


@needs_fbgemm
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_multiplies_in_fp32_each_row_by_itself(bias):
    generator = torch.Generator().manual_seed(5)
    layer = torch.nn.Linear(67, 45, bias=bias)
    weight = torch.randn(45, 67, generator=generator).bfloat16().float()
    tiny = torch.tensor([2.0**-14, 1.5 * 2.0**-17, 2.0**-24, 2.0**-26, -3e-8, 1e-30])  # normal, and below fp16's
    weight[0, :6] = tiny.bfloat16().float()
    layer.weight.data = weight
    packed = PackedLinear(layer)
    assert (packed.weight - weight).abs().max() <= 2.0**-25
    assert torch.equal(packed.weight[1:], weight[1:])
    inputs = torch.randn(3, 11, 67, generator=generator)
    with torch.inference_mode():
        found = packed(inputs)
        expected = inputs.double() @ weight.double().T + (layer.bias.double() if bias else 0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)
        for rows in (1, 2, 3):
            assert torch.equal(packed(inputs[:rows, -1:]), found[:rows, -1:])


@needs_fbgemm
def test_layers_are_packed_where_fp16_holds_their_weights():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
    held = torch.arange(16.0).reshape(4, 4) / 8
    for layer, value in zip(model, (0.0, 70000.0, float("nan"), 1 + 2.0**-12, 65504.0), strict=True):
        layer.weight.data = held.clone()
        layer.weight.data[0, 0] = value
    pack_linears(model)
    assert [isinstance(layer, PackedLinear) for layer in model] == [True, False, False, False, True]


@needs_fbgemm
def test_a_model_stored_in_bf16_is_packed_and_one_in_fp32_is_not(tmp_path, llama):
    assert packed_in(llama.model) == 0
    folder = make_folder(tmp_path / "model", stored=torch.bfloat16)
    answerer, plain = load_for_inference(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert packed_in(answerer.model) == 2 * 7 + 1
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(answerer.model(tokens).logits, plain.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


@needs_fbgemm
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_answers_on_a_packed_base(tmp_path, dora):
    base = make_folder(tmp_path / "base", stored=torch.bfloat16)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, use_dora=dora),
    )
    model.save_pretrained(tmp_path / "adapter")
    answerer = load_for_inference(tmp_path / "adapter")
    assert packed_in(answerer.model) == 2 * 7 + 1
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(answerer.model(tokens).logits, model.eval()(tokens).logits, rtol=1e-4, atol=1e-4)
