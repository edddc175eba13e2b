"""Where a model comes from: a local folder, or an id of Hugging Face or ModelScope, downloaded into that hub's cache.
huggingface_hub reads HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, proxies and token when it is first imported."""

import errno
import re
import shutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import enable_progress_bars

from fullshard.config import RunConfig
from fullshard.errors import ModelError, refusal, without_secrets
from fullshard.model.load import FACTS, INDEX, SIDE_FILES, check_model_folder, weight_names

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FETCHED = ("config.json", "generation_config.json", INDEX, "README.md", *SIDE_FILES)
WAYS = FACTS["other_ways"]
# address; download(id, revision=, allow_patterns=) to a folder; files(id, revision=): path and size; what both raise
_Hub = tuple[str, Callable[..., str], Callable[..., Iterable[Any]], tuple[type[Exception], ...]]


def fetch_model(
    path: str | Path, source: str = "huggingface", revision: str | None = None, weights: bool = True
) -> Path:
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
    address, download, files, raised = _modelscope(model_id) if source == "modelscope" else _huggingface()
    problem = None
    try:
        folder = Path(download(model_id, revision=revision, allow_patterns=list(FETCHED)))
        missing = [name for name in weight_names(folder) if not (folder / name).is_file()] if weights else []
        listed = files(model_id, revision=revision) if missing else ()
        known = {file.path: getattr(file, "size", 0) for file in listed}  # folders have none
        if absent := [name for name in missing if name not in known]:
            problem = f"it has no {absent[0]}, and only safetensors weights are read"
        elif missing and (needed := sum(known[name] for name in missing)) > (free := shutil.disk_usage(folder).free):
            room = f"{needed / 1e9:,.1f} GB of weights are to come, but the disk of {folder} has {free / 1e9:,.1f} GB"
            problem = f"{room} free; HF_HOME (or MODELSCOPE_CACHE) names another place"
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
    inner = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None  # not cached, because of it
    cause = inner or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    for name, reason in FACTS["hub_errors"].items():
        if isinstance(cause, getattr(errors, name)):
            return reason
    if status in (401, 403, 404):
        return f"no such model is there (nor a folder here), or it is private and needs your login (HTTP {status})"
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return "the disk is full"
    first = str(cause).strip().partition("\n")[0].rstrip(".")
    return f"HTTP {status}" if status else f"{type(cause).__name__}: {without_secrets(first)}"


def _huggingface() -> _Hub:
    """``snapshot_download`` and ``list_repo_tree`` as in huggingface_hub 2.4.0."""
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars()  # loading a model has switched them off
    raised = (OSError, errors.HTTPError, ValueError, RuntimeError, ImportError)  # the last: a SOCKS proxy, no socksio
    files = partial(HfApi().list_repo_tree, recursive=True)
    return without_secrets(constants.ENDPOINT), snapshot_download, files, raised


def _modelscope(model_id: str) -> _Hub:
    """``snapshot_download`` as in modelscope 1.40.2; files and errors are those of its modelscope_hub 0.5.1."""
    try:
        from modelscope.hub.snapshot_download import snapshot_download
        from modelscope_hub import HubApi
        from modelscope_hub.errors import HubError
    except ImportError:
        raise refusal("no_modelscope", model_id=model_id) from None
    files = partial(HubApi().list_repo_files, repo_type="model")
    return "ModelScope", snapshot_download, files, (HubError, OSError, ValueError, RuntimeError)
