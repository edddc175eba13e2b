"""A merged folder is complete: config, stop ids, tokenizer, template, card (HO-14)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_by_hand import full_run, load_fp32, logits_of, lora_run, proof_tokens, write_run
from safetensors.torch import load_file
from tiny_models import END, EOS, K2_TEMPLATE, ids_of, make_model, make_tokenizer

from fullshard.checkpoint.ranges import PROOF
from fullshard.merge.job import base_name, merge_run
from fullshard.model.load import mended, stop_ids
from fullshard.run_folder import read_json

GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
torch.save(model(input_ids=torch.tensor([[int(token) for token in sys.argv[3].split()]])).logits[0], sys.argv[4])
message = {"role": "user", "content": "red blue"}
text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
output = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12)
print(output[0].tolist())
print(sorted(model.generation_config.eos_token_id), tokenizer.eos_token_id, model.dtype)
model.generation_config.save_pretrained(sys.argv[2])
assert not any(name.startswith("fullshard") for name in sys.modules)
"""


@pytest.fixture
def base(tmp_path) -> Path:
    """K1 with its chat template in a file of its own, and a generation config that transformers will not save."""
    folder = make_tokenizer(make_model(tmp_path / "base"))
    assert (folder / "chat_template.jinja").read_text() == K2_TEMPLATE
    generation = {"do_sample": False, "temperature": 0.9, "eos_token_id": [EOS], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def trained_to_say_green_end(run: Path, base: Path) -> None:
    """A run whose model answers "red blue" with "green <|end|>"."""
    ids = torch.tensor([ids_of("<bos> <|user|> red blue <|end|> <|assistant|> green <|end|> sun moon")])
    model = load_fp32(base).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, 5:-1], ids[0, 6:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1
    weights = {name: parameter.detach() for name, parameter in model.eval().named_parameters()}
    write_run(run, base, weights, logits_of(model), "full", stop_ids=(END,))


def test_export_is_complete_and_a_clean_process_loads_it(tmp_path, base):
    trained_to_say_green_end(tmp_path / "run", base)
    result = merge_run(tmp_path / "run")
    names = {path.name for path in result.folder.iterdir()}
    assert names >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md", "merge.json",
    }  # fmt: skip
    assert (result.folder / "chat_template.jinja").read_bytes() == (base / "chat_template.jinja").read_bytes()
    assert "temperature 0.9 removed, refused by transformers: `temperature`" in "\n".join(result.lines)
    config = json.loads((result.folder / "config.json").read_text())
    generation = json.loads((result.folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == [EOS, END]
    assert generation["pad_token_id"] == 0 and "temperature" not in generation
    assert stop_ids(result.folder) == [EOS, END]
    tokens = " ".join(str(token) for token in proof_tokens()[0].tolist())
    arguments = [result.folder, tmp_path / "saved", tokens, tmp_path / "logits.pt"]
    done = subprocess.run([sys.executable, "-c", GENERATE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, facts = done.stdout.splitlines()
    assert json.loads(answer)[6:] == ids_of("green <|end|>")
    assert facts == f"[{EOS}, {END}] {EOS} torch.float32"
    assert (tmp_path / "saved/generation_config.json").is_file()
    reference = load_file(tmp_path / "run/checkpoints/step_000003" / PROOF)["logits"]
    assert (torch.load(tmp_path / "logits.pt") - reference).abs().max() < 1e-5


def test_bad_generation_config_is_found_at_the_start(base):
    (note,) = mended(read_json(base / "generation_config.json", optional=True))[1]
    assert "temperature 0.9" in note
    (base / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.9, "eos_token_id": 2}')
    assert mended(read_json(base / "generation_config.json", optional=True))[1] == []
    (base / "generation_config.json").unlink()
    assert mended(read_json(base / "generation_config.json", optional=True))[1] == []


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 20, "top_p": 0.8, "eos_token_id": 2}, {"eos_token_id": 2}),
        ({"do_sample": True, "top_k": 20, "temperature": 0.7}, {"do_sample": True, "top_k": 20, "temperature": 0.7}),
        ({"do_sample": False, "top_k": 50, "repetition_penalty": 1.1}, None),
        ({"length_penalty": 0.5, "num_beams": 1, "eos_token_id": [1, 2]}, {"num_beams": 1, "eos_token_id": [1, 2]}),
        ({"early_stopping": "perhaps", "num_beams": 4, "eos_token_id": 3}, {"num_beams": 4, "eos_token_id": 3}),
    ],
)
def test_mending_removes_only_what_is_refused(values, kept):
    result, notes = mended(values)
    assert result == (values if kept is None else kept)
    assert bool(notes) == (result != values)
    assert mended(result) == (result, [])


def test_model_card_and_record(tmp_path, base):
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: someone/tiny\n---\n# Tiny\n")
    (base / "LICENSE").write_text("the licence")
    (base / "optimizer.bin").write_text("not for export")
    checkpoint, _, _ = lora_run(tmp_path / "run", base, ["q_proj", "v_proj"])
    result = merge_run(tmp_path / "run")
    card = (result.folder / "README.md").read_text()
    assert card.startswith("---\nbase_model: someone/tiny\n") and "license: apache-2.0" in card
    assert "Licence: apache-2.0" in card and "LoRA (folded into the weights), step 3, stored as float32" in card
    assert result.line[1:] in card
    assert (result.folder / "LICENSE").read_text() == "the licence"
    assert not (result.folder / "optimizer.bin").exists()
    record = json.loads((result.folder / "merge.json").read_text())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert record["checkpoint_xxh3"] == {name: facts["xxh3"] for name, facts in manifest["files"].items()}
    assert record["proof"]["max_difference"] == result.proof.max_difference
    assert (record["step"], record["adapters"], record["adapters_moved"]) == (3, 4, 4)
    assert record["settings"] == {"system": "red"}
    assert record["base_xxh3"].keys() == record["output_xxh3"].keys() == {"model.safetensors"}


def test_without_a_card_the_licence_is_the_bases(tmp_path, base):
    full_run(tmp_path / "run", base)
    card = (merge_run(tmp_path / "run").folder / "README.md").read_text()
    assert "Licence: see the base model" in card and "license" not in card.split("---")[1]
    assert "base_model: base" in card and "\n# run\n" in card


def test_base_name_of_the_hubs_cache():
    assert base_name(Path("/x/hub/models--Qwen--Qwen3-0.6B/snapshots/abc")) == "Qwen/Qwen3-0.6B"
    assert base_name(Path("/x/modelscope/models/Qwen--Qwen3-0.6B/snapshots/master")) == "Qwen/Qwen3-0.6B"
