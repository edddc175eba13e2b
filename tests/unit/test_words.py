"""Words of other tools: the answers name things that exist here, and every page holds the same table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from fullshard import cli
from fullshard.config import RunConfig, config_from_dict, recipe_keys
from fullshard.errors import ConfigError, read_table
from fullshard.words import TOOLS, answer_word

ROOT = Path(__file__).parents[2]
ROWS = read_table("words.yaml")
WORDS = [word for row in ROWS for word in row["words"]]
VERBS = {word: row["here"] for row in ROWS if row.get("here", "").startswith("fullshard ") for word in row["words"]}
COMMANDS = set(cli.typer.main.get_command(cli.app).commands)
GOOD = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "output": "o"}
ASKED_FOR = set(
    [
        "cutoff_len",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "finetuning_type",
        "lora_target",
        "lora_rank",
        "lora_alpha",
        "model_name_or_path",
        "sequence_len",
        "micro_batch_size",
        "num_train_epochs",
        "lr_scheduler_type",
        "warmup_ratio",
        "bf16",
        "deepspeed",
        "template",
        "dataset",
        "output_dir",
        "val_set_size",
        "sample_packing",
        "gradient_checkpointing",
        "max_seq_length",
        "save_steps",
        "logging_steps",
        "train_on_inputs",
        "adapter",
        "sft",
        "infer",
        "export",
        "deploy",
        "env",
        "pt",
        "rlhf",
        "webui",
        "preprocess",
        "inference",
        "merge-lora",
    ]
)


def table_script():
    spec = importlib.util.spec_from_file_location("words_table", ROOT / "docs" / "words_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**GOOD, **changes})
    return caught.value.message


def test_the_table_has_every_word_once_and_none_of_ours():
    assert set(WORDS) >= ASKED_FOR
    assert len(WORDS) == len(set(WORDS)) >= 40
    assert not set(WORDS) & ((set(RunConfig.model_fields) - {"model"}) | COMMANDS)
    assert not set(WORDS) & {key.split(".")[-1] for key in recipe_keys()}
    for row in ROWS:
        assert set(row) <= {"words", "here", "note", "values"} and (row.get("here") or row.get("note"))
        assert all(tools and set(tools) <= set(TOOLS) for tools in row["words"].values()), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row["words"])))
def test_answers_name_what_exists(row):
    here, text = row.get("here", ""), f"{row.get('here', '')}; {row.get('note', '')}"
    assert here in ["", *recipe_keys(), "output"] or here.split()[1] in COMMANDS
    keys = re.findall(r"\b(?:model|data|lora|train)\.[a-z_]+", text)
    assert set(keys) <= set(recipe_keys())
    assert {verb for verb in re.findall(r"fullshard ([a-z]+)", text)} <= COMMANDS


def accepted(answer: str) -> object:
    """The config that the answer's ``key: value`` makes, by way of YAML."""
    import yaml

    key, _, value = answer.partition("here: ")[2].split(";")[0].partition(": ")
    values = {**GOOD}
    if key == "lora.targets":
        values["method"] = "lora"
    section, _, leaf = key.rpartition(".")
    if section:
        values[section] = {**values.get(section, {}), leaf: yaml.safe_load(value)}
    else:
        values[key] = yaml.safe_load(value)
    return config_from_dict(values)


@pytest.mark.parametrize(
    ("key", "value", "here"),
    [
        ("cutoff_len", 2048, "data.max_length: 2048"),
        ("finetuning_type", "lora", "method: lora"),
        ("tuner_type", "full", "method: full"),
        ("use_peft", True, "method: lora"),
        ("model_name_or_path", "models/base", "model.path: models/base"),
        ("lora_target", "all", "lora.targets: all-linear"),
        ("lora_target", "q_proj, v_proj", "lora.targets: [q_proj, v_proj]"),
        ("target_modules", ["q_proj"], "lora.targets: [q_proj]"),
        ("lora_target_linear", True, "lora.targets: all-linear"),
        ("lora_rank", 8, "lora.rank: 8"),
        ("lora_alpha", 16, "lora.alpha: 16"),
        ("per_device_train_batch_size", 4, "train.micro_batch: 4 rows"),
        ("num_train_epochs", 3.0, "train.epochs: 3.0"),
        ("lr_scheduler_type", "constant_with_warmup", "train.schedule: constant"),
        ("optim", "adamw_torch_fused", "train.optimizer: adamw"),
        ("warmup_ratio", 0.1, "train.warmup: 0.1"),
        ("bf16", True, "train.precision: bf16"),
        ("fp16", True, "train.precision: fp16"),
        ("tf32", True, "train.precision: tf32"),
        ("gradient_checkpointing", True, "train.recompute: blocks"),
        ("sample_packing", True, "data.packing: true"),
        ("train_on_inputs", False, "data.loss_on: assistant"),
        ("mask_history", True, "data.loss_on: last"),
        ("assistant_only_loss", True, "data.loss_on: assistant"),
        ("val_set_size", 0.05, "data.eval: 0.05"),
        ("save_steps", 500, "train.save_every: 500"),
        ("max_grad_norm", 1.0, "train.clip_norm: 1.0"),
        ("output_dir", "runs/x", "output: runs/x"),
    ],
)
def test_values_are_translated_into_what_the_recipe_takes(key, value, here):
    message = refusal(**{key: value})
    assert re.search(rf"- {key} is a word of .*; here: {re.escape(here)}(;|$)", message, re.M), message
    accepted(answer_word(key, value))


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("lr_scheduler_type", "cosine_with_restarts", "here: train.schedule (cosine or linear or constant)"),
        ("finetuning_type", "freeze", "here: method (lora or full)"),
        ("adapter", "qlora", "here: method (lora or full)"),
        ("val_set_size", 500, "here: data.eval; a share"),
        ("eval_steps", 0.2, "here: train.eval_every; in steps"),
        ("deepspeed", "ds_z3.json", "needs no file"),
        ("load_in_4bit", True, "QLoRA is not built"),
        ("gradient_accumulation_steps", 8, "the plan chooses it from train.global_batch and train.micro_batch"),
        ("overwrite_output_dir", True, "never overwritten"),
    ],
)
def test_what_cannot_be_carried_over_is_said(key, value, needed):
    assert needed in refusal(**{key: value})


def test_nested_prefixed_and_several_at_once():
    message = refusal(
        training_args={"cutoff_len": 512, "seed": 1, "inner": {"lora_r": 4}},
        train={"num_epochs": 2},
        model="Qwen/Qwen3-8B",
    )
    assert "training_args.cutoff_len is a word of LLaMA-Factory; here: data.max_length: 512" in message
    assert "\n  - training_args.inner.lora_r is a word of Axolotl, TRL; here: lora.rank: 4" in message
    assert "train.num_epochs is a word of Axolotl; here: train.epochs: 2" in message
    assert "model is a word of ms-swift; here: model.path: Qwen/Qwen3-8B" in message
    assert answer_word("--lora-rank") == answer_word("--lora_rank").replace("lora_rank", "lora-rank")


def test_other_unknown_keys_still_get_the_nearest():
    assert "did you mean train.learning_rate" in refusal(learning_rate=1e-4)
    assert answer_word("cutof_len", 3) is None and answer_word("other", {"x": 1}) is None


@pytest.mark.parametrize("verb", [*VERBS, "merge_lora"])
def test_a_foreign_verb_ends_with_2_and_names_ours(capsys, verb):
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "x.yaml"])
    assert stopped.value.code == 2
    assert f"here: {VERBS[verb.replace('_', '-') if verb == 'merge_lora' else verb]}" in capsys.readouterr().err


def test_a_foreign_key_as_an_option_is_answered_too(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--model_name_or_path", "x", "--finetuning_type=lora"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "here: model.path" in error and "  -> " in error
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--nothing_known"])
    assert stopped.value.code == 2 and "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("page", table_script().PAGES)
def test_pages_hold_the_table(page):
    script = table_script()
    assert (ROOT / page).read_text(encoding="utf-8") == script.expected(page), "run: python docs/words_table.py"


def test_every_note_has_a_chinese_one():
    script = table_script()
    noted = {next(iter(row["words"])) for row in ROWS if "note" in row}
    assert set(script.CHINESE) == noted
