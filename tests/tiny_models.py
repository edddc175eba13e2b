"""The common kit of the tests: K1, a tiny random model, and K2, a word-level tokenizer, as Hugging Face folders.

Nothing here needs the network. Same arguments, same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import yaml

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
WORD_TEXT = (
    "red blue green one two three four five six seven sun moon star sky sea tree leaf root stone sand wind rain snow "
    "fire ice cat dog bird fish horse cow sheep goat wolf bear lion ship boat road bridge house door wall roof bread "
    "milk salt corn rice bean apple pear plum fig nut rose"
)
WORDS = WORD_TEXT.split()
VOCABULARY = SPECIAL_TOKENS + WORDS  # 64 tokens; the id is the place in this list
IDS = {token: number for number, token in enumerate(VOCABULARY)}
PAD, BOS, EOS, UNK, USER, ASSISTANT, SYSTEM, END = range(8)

K2_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """The ids of space-separated K2 tokens: ``ids_of("<bos> red")`` is [1, 8]."""
    return [IDS[token] for token in text.split()]


def make_tokenizer(folder: str | Path, **changes: Any) -> Path:
    """Write the K2 tokenizer into ``folder`` and return it.

    ``changes``: ``chat_template`` (None: no template), ``add_bos=True`` (the tokenizer itself puts ``<bos>`` in front),
    ``vocabulary`` (a longer list), and any special token by name (``pad_token="<eos>"``, ``eos_token="<|end|>"``).
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    template = changes.pop("chat_template", K2_TEMPLATE)
    add_bos = changes.pop("add_bos", False)
    vocabulary = changes.pop("vocabulary", VOCABULARY)
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if add_bos:
        words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"} | changes
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[4:]})
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def make_model(folder: str | Path, family: str = "llama", tied: bool = False, seed: int = 7, **config: Any) -> Path:
    """Write a tiny random model of ``family`` in fp32 into ``folder`` (no tokenizer) and return it. Default: K1.

    Vocabulary 64, width 16, 2 layers, 2 heads, MLP 32, 64 positions, no dropout; ``config`` overrides by the names of
    the family's own transformers config. Beware: in a qwen2 folder AutoTokenizer insists on its own byte-level class
    and silently drops K2's words; where a test needs text, take qwen3.
    """
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    if family == "gpt2":
        common["n_inner"] = common.pop("intermediate_size")
    if family not in families.FAMILIES:
        raise ValueError(f"family {family!r} is not one of {list(families.FAMILIES)}")
    common |= families.FAMILIES[family]
    settings = transformers.AutoConfig.for_model(family, **(common | config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.generation_config.eos_token_id = [EOS]
    model.save_pretrained(Path(folder))
    return Path(folder)


ONE_RANK = SimpleNamespace(
    is_first=True,
    rank=0,
    barrier=lambda: None,
    gather_objects=lambda value: [value],
    num_ranks=1,
    agree=lambda task=None: [task() if task else None],
)  # what a Saver asks of Ranks, of one rank without a process group


def make_job(folder: Path, num_rows: int) -> Path:
    """A folder with K1, one-word rows and a recipe: full, 4 rows a step, 2 epochs, a checkpoint every 2 steps."""
    make_tokenizer(make_model(folder / "model"))
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]}
        for word in WORDS[:num_rows]
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    recipe = {
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl", "max_length": 32},
        "method": "full",
        "train": {"global_batch": "4 rows", "epochs": 2, "learning_rate": 0.001, "save_every": 2, "precision": "fp32"},
        "output": "run",
    }  # auto would time products, which on a CPU with bf16 products comes out by what else runs
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder
