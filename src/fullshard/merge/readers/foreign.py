"""Other tools' checkpoints: torch's distributed (DCP), pickles, safetensors, PEFT adapters. Nothing is executed."""

import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from fullshard.errors import Blame, MergeError, read_table, refusal
from fullshard.model.blocks import PEFT_CONFIG, PEFT_TENSORS, stored_name
from fullshard.model.load import AGAIN, SINGLE, FileTensor, Part, read_header, weight_names

FACTS = read_table("merge/readers/foreign.yaml")
BESIDE, CHANGED_BASE, DCP = tuple(FACTS["beside"]), tuple(FACTS["changed_base"]), ".metadata"
DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class PairedRows(FileTensor):
    """A query or key weight of heads of ``head`` rows, in which the two rows that rotary turns together are neighbours
    (Meta's llama, torchtitan). It reads as transformers has it: the first of every pair, then the second."""

    head: int = 0

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d."""
        size = self.head * math.prod(self.shape[1:])
        first, stop = start // size, math.prod(self.shape) if stop is None else stop
        heads = super().read(first * size, -(-stop // size) * size).view(-1, self.head // 2, 2, size // self.head)
        return heads.transpose(1, 2).reshape(-1)[start - first * size : stop - first * size]


def read_dcp(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a DCP folder, by their names in it. MergeError where it is damaged or names anything but data."""
    with Blame(MergeError, f"{folder / DCP} cannot be read", AGAIN), open(folder / DCP, "rb") as file:
        metadata = _PlainData(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        tensors = {}
        for name, facts in metadata.state_dict_metadata.items():
            if isinstance(facts, TensorStorageMetadata) and not name.split(".")[0].startswith(BESIDE):
                parts, dtype = [], facts.properties.dtype
                for chunk in facts.chunks:  # each a whole file of torch.save
                    info = places[name, tuple(chunk.offsets)]
                    found = _in_file(path := inside(folder, info.relative_path), info.offset, info.length)
                    if (found.dtype, tuple(found.shape)) != (dtype, tuple(chunk.sizes)):
                        raise MergeError(f"{path} holds other tensors than {DCP} says.", AGAIN)
                    parts.append(_part(path, found, tuple(chunk.offsets) or (0,), info.offset))
                tensors[name] = FileTensor(tuple(facts.size), dtype, tuple(parts))
    return tensors


class _PlainData(pickle.Unpickler):
    """Reads pickles of DCP's own data classes; whatever else one names is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if name in FACTS["allowed"].get(module, ()) or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise MergeError(f"It names {module}.{name}, which is no plain data: nothing of it was run.", AGAIN)


def read_pickles(path: Path) -> dict[str, FileTensor]:
    """The tensors of a file of torch.save (pytorch_model.bin, .pt), nested names joined by dots."""
    tensors, values = {}, [("", _in_file(path, 0, path.stat().st_size))]
    for name, value in values:  # grows while it is read
        if isinstance(value, dict):
            values += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
        elif hasattr(value, "placements"):  # a DTensor
            raise refusal("not_plain", path=path)
        elif isinstance(value, torch.Tensor):
            part = _part(path, value, (0,) * max(1, value.dim()), 0)
            tensors[name] = FileTensor(tuple(value.shape), value.dtype, (part,))
    return tensors


def _in_file(path: Path, position: int, size: int) -> Any:
    """What torch.save wrote there: its tensors without values, which know where in the file these lie."""
    with Blame(MergeError, f"{path} cannot be read", AGAIN), open(path, "rb") as file, FakeTensorMode():
        try:
            return torch.load(_create_file_view(file, position, size), weights_only=True, map_location="cpu")
        except pickle.UnpicklingError:  # its own words advise to run it
            raise refusal("not_plain", path=path) from None


def _part(path: Path, value: torch.Tensor, offsets: tuple[int, ...], start: int) -> Part:
    """A tensor that ``_in_file`` found, where torch.save's file begins ``start`` bytes from the start."""
    position = start + value.untyped_storage()._checkpoint_offset + value.storage_offset() * value.dtype.itemsize
    stride = None if value.is_contiguous() else tuple(value.stride())
    return Part(path, position, offsets, tuple(value.shape) or (1,), stride, MergeError)


def inside(folder: Path, name: str) -> Path:
    """A file that lies in ``folder``, whatever links say. MergeError where it does not."""
    if not (path := folder / name).resolve().is_relative_to(folder.resolve()):
        raise MergeError(f"{folder} names {name}, which lies outside of it.", AGAIN)
    return path


class ForeignCheckpoint:
    """Tensors that another tool saved, under the names of the model they are for, read by position."""

    def __init__(self, path: Path) -> None:
        """Open what lies at ``path``. MergeError where it is damaged, empty, DeepSpeed's or of no known format."""
        self.folder, (files, self.format, read) = path, _find(path)
        places = [files[0].parent] if read is read_dcp else files
        self._found = {name: tensor for place in places for name, tensor in read(place).items()}
        self.weights: dict[str, FileTensor] = {}  # by ``take``
        configs = [place / PEFT_CONFIG for place in (path, path.parent) if (place / PEFT_CONFIG).is_file()][:1]
        self.lora, self.files = _lora_config(configs[0].parent) if configs else None, [*files, *configs]

    def take(self, names: Any, grown: Callable[[tuple[int, ...]], Any]) -> Any:
        """Name the tensors as a model does; its names, or ``grown(new ids)`` for a larger vocabulary. MergeError."""
        known, strange = names.canonical.keys() | names.adapter_shapes.keys() | names.weights.shapes.keys(), []
        renamed, config, is_paired = FACTS["wrappers"], names.model.config, False
        if any("tok_embeddings." in raw for raw in self._found):
            renamed = renamed | FACTS["torchtitan"]
            if (is_paired := FACTS["paired"].get(config.model_type)) is None:
                raise refusal("torchtitan", path=self.folder, family=config.model_type)
        for raw, tensor in self._found.items():
            if raw.split(".")[0].startswith(BESIDE) or ".original_module." in raw:
                continue
            if (name := _clean(raw, known, renamed)) is None:
                strange.append(raw)
                continue
            if is_paired and name.endswith((".q_proj.weight", ".k_proj.weight")):
                tensor = PairedRows(tensor.shape, tensor.dtype, tensor.parts, config.head_dim)
            other = self.weights.setdefault(names.canonical.get(name, name), tensor)
            if other is not tensor and (other.shape != tensor.shape or not torch.equal(other.read(), tensor.read())):
                raise MergeError(f"{self.folder} holds two values of {name}, one as {raw}.", AGAIN)
        if strange or not self.weights:
            raise refusal("strange", path=self.folder, count=len(strange), first=", ".join(strange[:5]) or "no name")
        rows = max((self.weights[name].shape[0] for name in names.vocabulary if name in self.weights), default=0)
        return grown(tuple(range(names.vocabulary_size, rows))) if rows > names.vocabulary_size else names

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d, in its stored dtype."""
        return self.weights[name].read(start, stop)


def _find(path: Path) -> tuple[list[Path], str, Any]:
    """The files, the format's name, and what reads it."""
    if path.is_file():
        return [path], "a pickled state dict", read_pickles
    if not path.is_dir():
        raise MergeError(f"There is nothing at {path}.", "Give a run folder, a checkpoint or an adapter.")
    if any(path.glob("zero_to_fp32.py")) or any(path.glob("**/*_optim_states.pt")):
        raise refusal("deepspeed", path=path)
    nested = sorted(place for place in path.glob(f"*/{DCP}") if not place.parent.name.startswith(BESIDE))
    for place in filter(Path.is_file, [path / DCP, *nested]):
        if len(nested) > 1:
            raise refusal("several", path=path, found=", ".join(one.parent.name for one in nested))
        files = {inside(place.parent, file.name) for file in place.parent.glob("*.distcp")}
        return [place, *sorted(files)], "a checkpoint of torch.distributed.checkpoint", read_dcp
    for single in (PEFT_TENSORS, "adapter_model.bin", SINGLE, "pytorch_model.bin"):
        names = weight_names(path, single, MergeError)
        absent = [name for name in names if not inside(path, name).is_file()]
        if absent and (path / f"{single}.index.json").is_file():
            raise refusal("files_absent", path=path, count=len(absent), all=len(names), first=absent[0])
        if not absent:
            kind = "a PEFT adapter" if single.startswith("adapter") else f"{single} of a state dict"
            read = read_pickles if single.endswith(".bin") else partial(read_header, kind=MergeError)
            return [path / name for name in names], kind, read
    raise refusal("not_plain" if any(path.glob("*rank*[0-9].*")) else "no_format", path=path)


def _lora_config(folder: Path) -> Any:
    from peft import LoraConfig, PeftConfig

    with Blame(MergeError, f"{folder / PEFT_CONFIG} is no adapter's", AGAIN):
        config = PeftConfig.from_pretrained(str(folder))
    start = config.init_lora_weights if isinstance(config, LoraConfig) else None
    if start is None or str(start).lower().startswith(CHANGED_BASE) or config.trainable_token_indices:
        raise refusal("other_adapter", path=folder, kind=start or config.peft_type)
    return config


def _clean(name: str, known: set[str], renamed: dict[str, str]) -> str | None:
    """The name in ``known`` that a tool's name means: its parts ``renamed``, without what wrappers added in front."""
    name = f".{name}"
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    name = stored_name(name[1:])
    while name not in known:
        if (prefix := next((prefix for prefix in FACTS["prefixes"] if name.startswith(prefix)), None)) is None:
            return None
        name = name.removeprefix(prefix)
    return name
