"""Which tensors of a model folder make which parameter, and back: where a family renames, stacks or splits tensors on
load, transformers' own conversion table is run for one target at a time, and reversed for the export."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
import torch
from torch import nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from fullshard.errors import Blame, ModelError, refusal
from fullshard.model.blocks import base_name
from fullshard.model.load import DTYPE_NAMES, WeightFiles

RESTORED_GROUPS = 2  # an export in the files' order goes back and forth between the two groups of an expert layer


@dataclass(eq=False)
class Group:
    """File tensors that are read together, and the parameters they make. Without a converter: one of each."""

    target: str  # what transformers calls the group: its first parameter
    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (source pattern, file tensor), experts in order
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)  # with the shapes that the files make


class WeightMap:
    """Parameters (and buffers) of one model, read by ranges from its files. ``aliases``: all names of a tied one."""

    def __init__(self, model: nn.Module, files: WeightFiles, where: str, new_ids: tuple[int, ...] = ()) -> None:
        """Match ``model`` (on meta) with the headers of ``files``; else ModelError. ``new_ids``: new rows."""
        self.files, self._tensors, self._where, self._new_ids = files, files.tensors, where, new_ids
        self._config, self._prefix = model.config, model.base_model_prefix
        self.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self.groups: dict[str, Group] = {}  # by file tensor; none for those that the model ignores
        self.ignored: list[str] = []  # file tensors that the model has no place for
        self._outputs: dict[str, Group] = {}  # by parameter
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(parameter, []).append(name)
        self.aliases = {name: tuple(names) for names in names_of.values() if len(names) > 1 for name in names}
        ends = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))  # embedding and head
        self.vocabulary = {name for end in ends for one in end.parameters(recurse=False) for name in names_of[one]}
        self._match(model, [entry for entry in conversions if isinstance(entry, WeightConverter)])
        self._converted_group: tuple[str, dict[str, torch.Tensor]] = ("", {})  # one target at a time
        self._restored: dict[str, dict[str, torch.Tensor]] = {}
        self._means: dict[str, torch.Tensor] = {}
        self._check(model)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter or buffer, 1-d, in the files' dtype."""
        stop, name = math.prod(self.shapes[name]) if stop is None else stop, self._source_name(name)
        if (group := self._outputs[name]).converter is not None:
            if self._converted_group[0] != group.target:
                self._converted_group = ("", {})  # let go of the last one first
                made = self._forward(group, {name: self._tensors[name].whole() for _, name in group.sources})
                self._converted_group = (group.target, made)
            return self._converted_group[1][name].reshape(-1)[start:stop]
        file_name = group.sources[0][1]
        if self._new_ids and name in self.vocabulary:
            return self._read_grown(file_name, start, stop)
        return self._tensors[file_name].read(start, stop)

    def load_buffers(self, model: nn.Module) -> None:
        """Fill the persistent buffers from the files; ModelError where a float buffer holds NaN."""
        for name, buffer in model.named_buffers():
            if self._source_name(plain := base_name(name)) in self._outputs:
                buffer.copy_(self.read(plain).view(buffer.shape))
            if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
                raise refusal("unknown_buffer", name=name)

    def dtype(self, name: str) -> str:
        """Safetensors' name of the dtype in which the files hold the parameter."""
        return DTYPE_NAMES[self._tensors[self._outputs[self._source_name(name)].sources[0][1]].dtype]

    def restore(self, file_name: str, blocks: Callable[[str], Iterable[torch.Tensor]]) -> torch.Tensor:
        """A tensor under its original name, from the flattened values ``blocks(name)`` of its parameters."""
        if (group := self.groups[file_name]).target not in self._restored:
            if len(self._restored) == RESTORED_GROUPS:
                del self._restored[next(iter(self._restored))]
            whole = {name: torch.cat(list(blocks(name))).view(self.shapes[name]) for name in group.outputs}
            self._restored[group.target] = self._reverse(group, whole)
        return self._restored[group.target][file_name]

    def _match(self, model: nn.Module, converters: list[WeightConverter]) -> None:
        state, rename = model.state_dict(), core_model_loading.rename_source_key
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for file_name in sorted(self._tensors, key=core_model_loading.dot_natural_key):
            target, pattern = rename(file_name, self._renamings, converters, self._prefix, state)
            if target not in state and file_name in state:  # transformers' own second try
                target, pattern = rename(file_name, [], [], self._prefix, state)
            if target not in state:
                self.ignored.append(file_name)
                continue
            group = self._outputs.setdefault(target, Group(target, by_pattern.get(pattern)))
            group.sources.append((pattern or file_name, file_name))
            self.groups[file_name] = group
        for group in list(dict.fromkeys(self._outputs.values())):
            self._find_outputs(group)

    def _find_outputs(self, group: Group) -> None:
        """Convert empty tensors of the files' shapes: which parameters come out, and do they go back?"""
        if group.converter is None:
            group.outputs = {group.target: self._tensors[group.sources[0][1]].shape}
            return
        counts = Counter(pattern for pattern, _ in group.sources)
        if len(set(counts.values())) > 1 or len(counts) < len(group.converter.source_patterns):
            raise refusal("incomplete_group", where=self._where, target=group.target, counts=dict(counts))
        empty = {name: torch.empty(self._tensors[name].shape, device="meta") for _, name in group.sources}
        made_of = f"{group.sources[0][1]} and {len(group.sources) - 1} more"
        wrong = refusal("irreversible", where=self._where, target=group.target, made_of=made_of)
        with Blame(ModelError, wrong.message, wrong.hint):
            made = self._forward(group, empty)
            back = self._reverse(group, made)
            if any(back[name].shape != empty[name].shape for _, name in group.sources):
                raise ValueError("the shapes change")
        group.outputs = {name: tuple(value.shape) for name, value in made.items()}
        self._outputs |= dict.fromkeys(made, group)

    def _forward(self, group: Group, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = [(pattern, name, tensors[name]) for pattern, name in group.sources]
        return self._convert(deepcopy(group.converter), group.target, parts)

    def _reverse(self, group: Group, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = group.converter.reverse_transform()
        renamed = {name: converter.rename_source_key(name) for name in parameters}  # (new name, its pattern)
        parts = [(renamed[name][1], name, value) for name, value in parameters.items()]
        made = self._convert(converter, next(iter(renamed.values()))[0], parts)
        prefix = f"{self._prefix}."
        plain = {name.removeprefix(prefix): value for name, value in made.items()}
        stored = {name: core_model_loading.apply_renamings(name, self._renamings) for _, name in group.sources}
        return {name: plain[parameter.removeprefix(prefix)] for name, parameter in stored.items()}

    def _convert(self, converter: WeightConverter, target: str, parts: list[tuple[str, str, torch.Tensor]]) -> Any:
        """What ``converter`` makes of tensors, each with its pattern and name: a tensor by each new name."""
        for pattern, name, value in parts:
            converter.add_tensor(target, name, pattern, value)
        made = converter.convert(target, config=self._config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _source_name(self, name: str) -> str:
        return next((alias for alias in self.aliases.get(name, (name,)) if alias in self._outputs), name)

    def _check(self, model: nn.Module) -> None:
        for names in set(self.aliases.values()):
            found = [self._outputs[name].sources[0][1] for name in names if name in self._outputs]
            stored = [self._tensors[file_name].whole() for file_name in found]
            if any(not torch.equal(value, stored[0]) for value in stored[1:]):
                raise refusal("ties", where=self._where, names=" and ".join(names))
        parameters = [name for name, _ in model.named_parameters()]
        if missing := [name for name in parameters if self._source_name(name) not in self._outputs]:
            count, first = f"{len(missing)} of {len(parameters)}", ", ".join(missing[:5])
            raise refusal("no_tensor", where=self._where, count=count, first=first)
        for name in parameters:
            if self.dtype(name) not in ("F32", "BF16", "F16", "F64"):
                raise refusal("no_floats", where=self._where, name=name, dtype=self.dtype(name))
            expected, stored_name = self.shapes[name], self._source_name(name)
            found = self._outputs[stored_name].outputs[stored_name]
            may_grow = self._new_ids and name in self.vocabulary
            if found != expected and not (may_grow and found[1:] == expected[1:] and found[0] <= expected[0]):
                raise refusal("other_shape", name=name, expected=expected, found=found, where=self._where)

    def _read_grown(self, file_name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a vocabulary tensor: old rows from the file, new ones the mean of the old."""
        tensor = self._tensors[file_name]
        num_old, width = tensor.shape[0], math.prod(tensor.shape[1:])
        if file_name not in self._means:
            kept = [row for row in range(num_old) if row not in self._new_ids]
            self._means[file_name] = tensor.whole().float()[kept].mean(0).to(tensor.dtype).reshape(-1)
        first, last, mean = start // width, -(-stop // width), self._means[file_name]
        stored = tensor.read(min(first, num_old) * width, min(last, num_old) * width).view(-1, width)
        rows = torch.cat([stored, mean.expand(last - first - len(stored), width)])
        rows[[row - first for row in self._new_ids if first <= row < last]] = mean
        return rows.view(-1)[start - first * width : stop - first * width]
