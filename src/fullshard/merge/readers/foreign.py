"""Checkpoints of other tools as sources of a merge: which format a path holds, and whose weights its names mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import Blame, MergeError, refusal
from fullshard.merge.readers import tensors
from fullshard.merge.readers.tensors import inside
from fullshard.model.load import SINGLE
from fullshard.model.names import PEFT_CONFIG, PEFT_PREFIX, PEFT_TENSORS, stored_name
from fullshard.model.tensor_files import FileTensor, read_header
from fullshard.run_folder import read_json

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "modules_to_save.default.")
PREFIXES = ("module.", "model.", "state_dict.", "app.", PEFT_PREFIX)  # taken off the front while no name fits
BESIDE = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "rng")  # first words of what is no weight
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # starts of adapters that belong to a changed base


class ForeignCheckpoint:
    """Tensors that another tool saved, under the names of the model they are for, read by position."""

    def __init__(self, path: Path) -> None:
        """Open what lies at ``path``. MergeError where it is damaged, empty, DeepSpeed's or of no known format."""
        self.folder, self.lora = path, None
        files, self.format, read = _find(path)
        self.files = [*files]
        self._found: dict[str, FileTensor] = read(files[0].parent if read is tensors.read_dcp else files)
        self.weights: dict[str, FileTensor] = {}  # by ``take``
        for place in (path, path.parent):
            if (place / PEFT_CONFIG).is_file() and self.lora is None:
                self.lora = _lora_config(place)
                self.files.append(place / PEFT_CONFIG)

    def take(self, names: Any, grown: Callable[[tuple[int, ...]], Any]) -> Any:
        """Give the tensors the names of a model, ModelNames; those of ``grown(new ids)`` where the vocabulary is larger
        here. Returns the names. MergeError where some fit none."""
        known, strange = names.canonical.keys() | names.adapter_shapes.keys() | names.weights.shapes.keys(), []
        for raw, tensor in self._found.items():
            if raw.split(".")[0].startswith(BESIDE) or ".original_module." in raw:
                continue
            if (name := _clean(raw, known)) is None:
                strange.append(raw)
                continue
            other = self.weights.setdefault(names.canonical.get(name, name), tensor)
            if other is not tensor and (other.shape != tensor.shape or not torch.equal(other.read(), tensor.read())):
                raise MergeError(f"{self.folder} holds two values of {name}, one as {raw}.", tensors.AGAIN)
        if strange or not self.weights:
            first = ", ".join(strange[:5]) or "there are none at all"
            raise refusal("strange", path=self.folder, count=len(strange), first=first)
        rows = max((self.weights[name].shape[0] for name in names.vocabulary if name in self.weights), default=0)
        return grown(tuple(range(names.vocabulary_size, rows))) if rows > names.vocabulary_size else names

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-d, in its stored dtype."""
        return self.weights[name].read(start, stop)


def _find(path: Path) -> tuple[list[Path], str, Any]:
    """The files, the format's name, and what reads it."""
    if path.is_file():
        return [path], "a pickled state dict", tensors.read_pickles
    if not path.is_dir():
        raise MergeError(f"There is nothing at {path}.", "Give a run folder, a checkpoint or an adapter.")
    if any(path.glob("zero_to_fp32.py")) or any(path.glob("**/*_optim_states.pt")):
        raise refusal("deepspeed", path=path)
    nested = sorted(place for place in path.glob(f"*/{tensors.DCP}") if not place.parent.name.startswith(BESIDE))
    for place in [path / tensors.DCP, *nested]:
        if place.is_file():
            if len(nested) > 1:
                raise refusal("several", path=path, found=", ".join(one.parent.name for one in nested))
            files = {inside(place.parent, file.name) for file in place.parent.glob("*.distcp")}
            return [place, *sorted(files)], "a checkpoint of torch.distributed.checkpoint", tensors.read_dcp
    for single, read in (
        (PEFT_TENSORS, _read_safetensors), ("adapter_model.bin", tensors.read_pickles),
        (SINGLE, _read_safetensors), ("pytorch_model.bin", tensors.read_pickles),
    ):  # fmt: skip
        index = path / f"{single}.index.json"
        kind = "a PEFT adapter" if single.startswith("adapter") else f"{single} of a state dict"
        if index.is_file():
            with Blame(MergeError, f"{index} is damaged", tensors.AGAIN):
                names = sorted(set(read_json(index)["weight_map"].values()))
            if absent := [name for name in names if not inside(path, name).is_file()]:
                raise refusal("files_absent", path=path, count=len(absent), all=len(names), first=absent[0])
            return [path / name for name in names], kind, read
        if (path / single).is_file():
            return [path / single], kind, read
    raise refusal("no_format", path=path)


def _read_safetensors(files: list[Path]) -> dict[str, FileTensor]:
    return {name: tensor for path in files for name, tensor in read_header(path, MergeError).items()}


def _lora_config(folder: Path) -> Any:
    from peft import LoraConfig, PeftConfig

    with Blame(MergeError, f"{folder / PEFT_CONFIG} is no adapter's", tensors.AGAIN):
        config = PeftConfig.from_pretrained(str(folder))
    start = config.init_lora_weights if isinstance(config, LoraConfig) else None
    if start is None or str(start).lower().startswith(CHANGED_BASE) or config.trainable_token_indices:
        kind = start or config.peft_type
        raise refusal("other_adapter", path=folder, kind=kind)
    return config


def _clean(name: str, known: set[str]) -> str | None:
    """The name in ``known`` that a tool's name means: without what wrappers added."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    name = stored_name(name)
    while name not in known:
        if (prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)) is None:
            return None
        name = name.removeprefix(prefix)
    return name
