"""The quickstart from end to end on real ranks, with a model that is tiny but reads the same tokens."""

import json
import shutil
from pathlib import Path

import pytest

from fullshard.errors import ConfigError, ModelError
from fullshard.model.fetch import ensure_default_model, find_packaged_gguf


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        find_packaged_gguf()
    except ModelError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=256, tie_word_embeddings=True, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ensure_default_model() / name, folder)
    return folder


@pytest.mark.slow
def test_main_job_on_two_ranks(tiny_model, tmp_path, monkeypatch, capfd):
    from fullshard.quickstart import run_quickstart

    monkeypatch.chdir(tmp_path)
    result = run_quickstart(model=tiny_model, ranks=2)
    out = capfd.readouterr().out
    stages = (
        "1 Machine",
        "2 Plan",
        "Expected from here",
        " steps in ",
        "proof:",
        "base answer",
        "English: held-out",
    )
    places = [out.rindex(stage) for stage in stages]
    assert places == sorted(places)
    assert result["run"] == "runs/quickstart" and Path(result["merged"], "model.safetensors").is_file()
    written = json.loads(Path("runs/quickstart/quickstart.json").read_text())
    assert written == json.loads(json.dumps(result))
    english, chinese = written["held_out"]["English"], written["held_out"]["Chinese"]
    assert (len(english["answers"]), len(chinese["answers"])) == (44, 10)
    assert english["loss"] < english["base"]["loss"]
    with pytest.raises(ConfigError, match="exists already"):
        run_quickstart(model=tiny_model, output="runs/quickstart")
