"""Model folders: what is in them, building on the meta device with right buffers, reading ranges of weights.

Models are transformers' own classes. Weight files are safetensors; every read names the rows it wants, so that a rank
touches only its own ranges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from fullshard.errors import ModelError
from fullshard.model.names import file_name_of, is_adapter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def check_model_folder(path: str | Path, weights: bool = True) -> Path:
    """Return the folder if config, weights and all index entries are there; else ModelError naming what is missing.

    ``weights=False``: only config.json is needed.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"No model folder at {folder}.", "Give a Hugging Face folder, or a hub id: owner/name.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is incomplete: config.json is missing.", "Download the whole model folder again.")
    names = weight_names(folder) if weights else []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing == [SINGLE]:
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f" It has {others[0]}, which this version does not read." if others else ""
        raise ModelError(
            f"{folder} is incomplete: neither {SINGLE} nor {INDEX} is there.{found}",
            "Use a folder with safetensors weights.",
        )
    if missing:
        raise ModelError(
            f"{folder} is incomplete: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}.",
            "Download the whole model folder again.",
        )
    return folder


def weight_names(folder: Path) -> list[str]:
    """The weight files that a folder means, there or not: those of its index, else model.safetensors."""
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            return sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{folder / INDEX} is damaged: it holds no weight_map.", "Download it again.") from None
    return [SINGLE]


class WeightFiles:
    """The tensors of a model folder, read by rows. Memory maps: what is not read costs nothing."""

    def __init__(self, path: str | Path) -> None:
        folder = check_model_folder(path)
        self._places: dict[str, Any] = {}
        for file in weight_names(folder):
            try:
                handle = safe_open(folder / file, framework="pt")
                for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                    self._places[name] = handle
            except SafetensorError as error:
                raise ModelError(f"{folder / file} is damaged: {error}", "Download this file again.") from None

    def names(self) -> list[str]:
        """Names of all tensors in the files."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the file's header."""
        return tuple(self._places[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """dtype of one tensor as safetensors names it: F32, BF16, F16, ..."""
        return self._places[name].get_slice(name).get_dtype()

    def read(self, name: str, start_row: int | None = None, stop_row: int | None = None) -> torch.Tensor:
        """Rows [start_row, stop_row) of one tensor, or all of it, in the file's dtype."""
        if start_row is None:
            return self._places[name].get_tensor(name)
        return self._places[name].get_slice(name)[start_row:stop_row]


def read_config(path: str | Path) -> Any:
    """The transformers config of a model folder. ModelError where the family is unknown or no causal model."""
    folder = check_model_folder(path, weights=False)
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{folder}/config.json cannot be used: {error}", "Check the folder.") from None


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder, with a pad token set (to the end token where it has none)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(
            f"{path} has no usable tokenizer: {str(error).splitlines()[0]}", "Copy the tokenizer files into the folder."
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_on_meta(path: str | Path) -> nn.Module:
    """The model with parameters (fp32) on the meta device and its non-persistent buffers real and right, on CPU.

    Buffers such as rotary frequencies are in no file: they are filled with NaN, then made by the model's own
    initialisation; a buffer that stays NaN is a ModelError, never luck.
    """
    config = read_config(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ModelError(f"{path}: {str(error).splitlines()[0]}", "A causal language model is needed.") from None
    with torch.no_grad():
        for module in model.modules():
            empty = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            if not empty:
                continue
            for name, buffer in empty.items():
                fill = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
            model._init_weights(module)
    return model


def load_buffers(model: nn.Module, files: WeightFiles, prefix: str) -> None:
    """Fill the persistent buffers from the files, then refuse any float buffer that holds NaN.

    Covers: buffers that ``build_on_meta`` made and those that a file holds. ``prefix``: the model's base_model_prefix.
    """
    available = set(files.names())
    for name, buffer in model.named_buffers():
        file_name = file_name_of(name, available, prefix)
        if file_name is not None:
            buffer.copy_(files.read(file_name))
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            raise ModelError(
                f"Buffer {name} is neither in the weight files nor made by the model's own initialisation.",
                "This family cannot be loaded sharded yet.",
            )


def match_names(parameter_names: Iterable[str], files: WeightFiles, prefix: str, where: str) -> dict[str, str]:
    """Parameter name -> name in the files, one to one; ModelError with the first five that do not match."""
    available = set(files.names())
    matched = {name: file_name_of(name, available, prefix) for name in parameter_names}
    missing = [name for name, file_name in matched.items() if file_name is None]
    if missing:
        first = ", ".join(missing[:5])
        raise ModelError(
            f"{where}: {len(missing)} of {len(matched)} parameters have no tensor of their name in the files: {first}.",
            "Families whose weights are stacked or renamed on load come with a later version.",
        )
    return {name: file_name for name, file_name in matched.items() if file_name is not None}


def check_weights(model: nn.Module, files: WeightFiles, where: str) -> dict[str, str]:
    """Names and shapes of all base parameters against the files' headers; returns parameter name -> name in the files.

    Raises ModelError with the first names or shapes that do not match.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
    file_names = match_names(parameters, files, model.base_model_prefix, where)
    for name, parameter in parameters.items():
        if files.shape(file_names[name]) != tuple(parameter.shape):
            raise ModelError(
                f"{name}: config.json means {tuple(parameter.shape)}, the file holds {files.shape(file_names[name])}.",
                f"The config.json and the weights of {where} do not belong together.",
            )
    return file_names


def load_plain(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """The whole model in this process (eval mode, ``dtype``) and its tokenizer."""
    folder = check_model_folder(path)
    disable_progress_bar()  # transformers' own bar over loading; ours are the only ones
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), load_tokenizer(folder)
