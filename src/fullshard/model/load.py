"""Model folders, models on the meta device; tensors in files, read by position: what is not read costs no memory."""

import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_utils import str_to_torch_dtype
from fullshard.device import ATTENTION
from fullshard.errors import Blame, ModelError, UserError, read_table, refusal
from fullshard.frozen import Frozen
from fullshard.model.attention import BY_DOCUMENT
from fullshard.run_folder import LOCK, claim_run, clear, publish_folder, read_json, sync_path, write_json

AGAIN = "Copy or download this file again."
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}  # safetensors' names: F32, BF16, ...
SINGLE, INDEX, GENERATION_CONFIG = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
FACTS = read_table("model/load.yaml")
SIDE_FILES, REFUSED_FAMILIES = FACTS["side_files"], FACTS["refused_families"]
RECORD = "made_from.json"  # in an unfinished folder
SAMPLES = 16  # places of 4 KiB in a weight file that a fingerprint reads


def check_model_folder(path: str | Path, weights: bool = True) -> Path:
    """The folder, if config and (``weights``) all weight files are there; else ModelError naming what is missing."""
    if not (folder := Path(path).expanduser()).is_dir():
        raise ModelError(f"No model folder at {folder}.", "Give a Hugging Face folder, or a hub id: owner/name.")
    names = ["config.json", *(weight_names(folder) if weights else ())]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing == [SINGLE]:
        raise refusal("no_safetensors", folder=folder, single=SINGLE, index=INDEX)
    if missing:
        raise refusal("files_missing", folder=folder, count=len(missing), all=len(names), first=missing[0])
    return folder


def weight_names(folder: Path, single: str = SINGLE, kind: type[UserError] = ModelError) -> list[str]:
    """The weight files that a folder means, there or not: those of its index, else ``single``. Raises ``kind``."""
    if (index := folder / f"{single}.index.json").is_file():
        with Blame(kind, f"{index} is damaged: it holds no weight_map", AGAIN):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise kind(f"{index} names {outside[0]}, which lies outside of its folder.", AGAIN)
            return names
    return [single]


class Part(Frozen):
    """A block of a tensor: its place in it and, ``position`` bytes on, in a file; ``stride`` (elements) or dense."""

    file: Path
    position: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    kind: type[UserError] = ModelError  # raised where the file does not hold it

    def rows(self, first: int, last: int, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [first, last) of the part, read into ``out`` (flat) where it is dense and one is given."""
        if self.stride is not None:
            span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            return self._values(0, span, dtype).as_strided(self.shape, self.stride)[first:last]
        width = math.prod(self.shape[1:])
        return self._values(first * width, last * width, dtype, out).view(last - first, *self.shape[1:])

    def _values(self, start: int, stop: int, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        found, position = torch.empty(stop - start, dtype=dtype) if out is None else out, start * dtype.itemsize
        with Blame(self.kind, f"{self.file} cannot be read", AGAIN), open(self.file, "rb") as file:
            file.seek(self.position + position)
            if file.readinto(found.view(torch.uint8).numpy()) != found.nbytes:
                raise self.kind(f"{self.file} is cut short: {found.nbytes} bytes are needed from {position} on.", AGAIN)
        return found


class FileTensor(Frozen):
    """One tensor: its shape, dtype and the parts that make it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def whole(self) -> torch.Tensor:
        """All of it, in its shape."""
        return self.read().view(self.shape)

    def read(self, start: int = 0, stop: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Elements [start, stop), 1-d; in ``out`` (1-d, CPU) where one part has all. Part.kind if not covered once."""
        shape = self.shape or (1,)
        width, stop = max(1, math.prod(shape[1:])), math.prod(shape) if stop is None else stop
        first, last = start // width, -(-stop // width)
        if len(self.parts) == 1 and self.parts[0].shape == shape:
            rows = self.parts[0].rows(first, last, self.dtype, out)
            return rows.reshape(-1)[start - first * width : stop - first * width]
        rows, missing = torch.empty(last - first, *shape[1:], dtype=self.dtype), (last - first) * width
        for part in self.parts:
            (above, *before), (height, *sizes) = part.offsets, part.shape
            low, high = max(first, above), min(last, above + height)
            if low < high:
                found = part.rows(low - above, high - above, self.dtype)
                inner = (slice(offset, offset + size) for offset, size in zip(before, sizes, strict=True))
                rows[(slice(low - first, high - first), *inner)] = found
                missing -= found.numel()
        if missing:
            part = self.parts[0]
            raise part.kind(f"{part.file.parent}: the parts of a tensor {shape} do not cover it.", AGAIN)
        return rows.reshape(-1)[start - first * width : stop - first * width]


def read_header(path: Path, kind: type[UserError] = ModelError) -> dict[str, FileTensor]:
    """The tensors of a safetensors file. Raises ``kind`` where its header does not fit it."""
    tensors = {}
    with Blame(kind, f"{path} is damaged", AGAIN), open(path, "rb") as file:
        size, start = path.stat().st_size, 8 + (length := int.from_bytes(file.read(8), "little"))
        if start > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        for name, facts in json.loads(file.read(length)).items():
            if name != "__metadata__":
                shape, dtype, (low, high) = tuple(facts["shape"]), facts["dtype"], facts["data_offsets"]
                wanted = math.prod(shape) * str_to_torch_dtype[dtype].itemsize
                is_odd = any(type(side) is not int or side < 0 for side in shape)
                if is_odd or not 0 <= low <= high <= size - start or high - low != wanted:
                    raise ValueError(f"{name} has bytes {low} to {high} of {size - start}, and needs {wanted}")
                part = Part(path, start + low, (0,) * max(1, len(shape)), shape or (1,), kind=kind)
                tensors[name] = FileTensor(shape, str_to_torch_dtype[dtype], (part,))
    return tensors


class WeightFiles:
    """The ``tensors`` of a model folder by name, read by position."""

    def __init__(self, path: str | Path) -> None:
        folder = check_model_folder(path)
        self.files = [folder / file for file in weight_names(folder)]
        self.tensors = {name: tensor for file in self.files for name, tensor in read_header(file).items()}

    def fingerprint(self) -> str:
        """A hash of config.json and of each weight file's name, size and samples of its bytes; cheap, for ranks."""
        digest = hashlib.blake2b((self.files[0].parent / "config.json").read_bytes(), digest_size=16)
        for path in self.files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                for sample in range(SAMPLES):
                    file.seek(size * sample // SAMPLES)
                    digest.update(file.read(1 << 12))
        return digest.hexdigest()


def read_config(path: str | Path) -> Any:
    """The transformers config of a model folder. ModelError where it is damaged or the family unknown."""
    folder = check_model_folder(path, weights=False)
    with Blame(ModelError, f"{folder}/config.json cannot be used", "Check the folder, or download it again."):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def attention_for(config: Any, packing: bool = False) -> str:
    """What to ask of transformers: the device's, "eager" for families without it; ``packing``: ours, if it can be."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if packing and getattr(family, "_supports_attention_backend", False):
        return BY_DOCUMENT
    return ATTENTION if getattr(family, "_supports_sdpa", True) else "eager"


def build_on_meta(path: str | Path, num_tokens: int = 0, packing: bool = False) -> torch.nn.Module:
    """The model: fp32 parameters on meta, non-persistent buffers (in no file) made on CPU by its own initialisation;
    one that stays NaN is a ModelError later. ``num_tokens``: the least vocabulary. ``packing``: attends by document."""
    config = read_config(path)
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, num_tokens)
    return build_from_config(config, path, packing)


def build_from_config(config: Any, path: str | Path, packing: bool = False) -> torch.nn.Module:
    """``build_on_meta`` for a config that was read; ``path`` names it in errors."""
    family, quantised = config.model_type, getattr(config, "quantization_config", None)
    if family in REFUSED_FAMILIES:
        raise ModelError(f"{family} models are refused: {REFUSED_FAMILIES[family]}.", "What works: docs/models.md")
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise ModelError(f"{family} models see or hear; only text models can be trained.", "Take its text model.")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise refusal("quantised", path=path, method=method)
    attention = attention_for(config, packing)
    with Blame(ModelError, str(path), "A causal language model is needed; check config.json."), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for module in model.modules():
            empty = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in empty.items():
                fill = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
            if empty:
                model._init_weights(module)
    return model


@contextmanager
def unfinished_folder(final: Path, kind: type[UserError], hint: str, made_from: Any = None) -> Iterator[Path]:
    """A folder beside ``final``: takes its place when the block ends well, vanishes where it fails (``kind``: the disk
    did). It stays where the process is killed, for the next call with the same ``made_from`` (of JSON)."""
    partial = final.with_name(f".{final.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with claim_run(partial, "written"), ExitStack() as stack:
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            if made_from is None or read_json(partial / RECORD, optional=True).get("made_from") != made_from:
                clear(partial, partial / LOCK)
                write_json(partial / RECORD, {"made_from": made_from})
            yield partial
            (partial / RECORD).unlink()
            (partial / LOCK).unlink()
            for path in [*partial.rglob("*"), partial]:
                sync_path(path)
            publish_folder(partial, final)
            stack.pop_all()
    except OSError as error:
        raise kind(f"{final} cannot be written: {error}.", hint) from error


def union_of_ids(*groups: int | Iterable[int] | None) -> list[int]:
    """All token ids of ``groups`` (each an id, ids, or None) without repetition, in order of first appearance."""
    return list(dict.fromkeys(n for ids in groups for n in ([ids] if isinstance(ids, int) else ids or ())))


def stop_ids(folder: Path) -> list[int]:
    """Ids that end an answer: those of the generation config, else those of config.json; possibly none."""
    from_generation = union_of_ids(read_json(folder / GENERATION_CONFIG, optional=True).get("eos_token_id"))
    return from_generation or union_of_ids(read_json(folder / "config.json").get("eos_token_id"))


def mended(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A generation config without the settings for which transformers would refuse to save it; a line for each."""
    result, notes = dict(values), []
    while (problem := _problem(result)) and (left := [key for key in result if key not in FACTS["token_keys"]]):
        named = re.search(r"`(\w+)`.*", problem)
        told = ", ".join(f"{key} {result.pop(key)}" for key in ([named[1]] if named and named[1] in left else left))
        notes.append(f"generation config: {told} removed, refused by transformers: {named[0] if named else problem}")
    return result, notes


def _problem(values: dict[str, Any]) -> str:
    """Why transformers would refuse to save ``values``, or nothing."""
    logging.disable(logging.WARNING)  # it says the same there
    try:
        GenerationConfig.from_dict(values).validate(strict=True)
    except (ValueError, TypeError) as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    return ""
