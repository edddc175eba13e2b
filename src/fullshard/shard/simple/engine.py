"""The simple engine: fully sharded data parallelism on plain collectives, in hooks around a model's own modules.

One step, for a unit between two others (prefetch 1):

    forward    gather -> compute -> free                      while the next unit is gathered
    backward   gather -> compute -> reduce, free              while the one before is gathered, the one behind reduced
    optimizer  on this rank's flat range, in fp32

A unit is gathered when the first of its modules is called, and again when the gradient of its output arrives. It is
through when the gradients of its inputs are complete: then its own gradients are, too, since autograd runs what adds to
them first. Parameters are views of a buffer and are made once; only the buffer's memory comes and goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten
from fullshard.device import device_of
from fullshard.errors import refusal
from fullshard.shard.interface import Shard, in_later_replica
from fullshard.shard.simple.layout import lay_out_group
from fullshard.shard.simple.unit import GatherBuffer, Group, Phase, Unit, Wires
from fullshard.shard.simple.wire import Wire
from fullshard.train.precision import Precision

PREFETCH = 1  # units gathered ahead
BUFFERS = PREFETCH + 2  # of blocks: one computes, one is gathered, one is reduced


class Schedule:
    """The order in which units compute: recorded in the first forward (``agree`` compares ranks), kept, read ahead."""

    def __init__(self, prefetch: int, agree: Callable[[Unit], None]) -> None:
        self._prefetch, self._agree = prefetch, agree
        self.order: list[Unit] = []
        self._is_known, self._place, self._place_back = False, 0, 0

    def begin(self) -> None:
        """A forward begins."""
        self._place = 0
        if not self._is_known:
            self.order.clear()

    def enter(self, unit: Unit) -> None:
        """``unit`` is about to compute. Raises TrainError where that is not its turn."""
        if self._place and self.order[self._place - 1] is unit:
            return
        if not self._is_known:
            self._agree(unit)
            self.order.append(unit)
        elif unit not in (due := self.order[self._place : self._place + 1]):
            raise refusal("order_changed", unit=unit.name, expected=due[0].name if due else "the end")
        self._place += 1

    def end(self, root: Unit) -> None:
        """The forward, ``root``'s, is over: its order holds from now on. Raises TrainError as ``enter``."""
        self.enter(root)
        self._is_known, self._place_back = True, len(self.order)

    def coming(self) -> list[Unit]:
        """The units that compute next in forward."""
        return self.order[self._place : self._place + self._prefetch] if self._is_known else []

    def coming_back(self, unit: Unit) -> list[Unit]:
        """The units whose backward comes after ``unit``'s; after that of the model, the last."""
        known = (place for place in reversed(range(self._place_back)) if self.order[place] is unit)
        self._place_back = place = next(known, self._place_back)
        return self.order[max(0, place - self._prefetch) : place][::-1]


@cache  # for all models of a process: each group of gloo has threads that wake up a hundred times a second
def _second_group(world: Any, ranks: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    return dist.new_subgroups_by_enumeration([list(group) for group in ranks])[0]


class SimpleShardedModel:
    """A ``ShardedModel`` over flat buffers: ``shard_model`` says what it takes, ``Unit`` what a ``strategy`` is. Unless
    ``reduce_each``, whole fp32 sums of gradients are kept until the last micro-batch. ``events``: set it to a list, and
    what happens is noted in it: free, and beginning and end of gather, forward, backward, reduce and optimizer."""

    def __init__(
        self, model: nn.Module, units: list[list[nn.Module]], replicated: set[nn.Parameter], mesh: DeviceMesh,
        precision: Precision, strategy: str = "full", reduce_each: bool = False,
    ) -> None:  # fmt: skip
        self.module, self._reduce_each = model, reduce_each
        self.events: list[dict[str, Any]] | None = None
        self._device, self.num_ranks = device_of(mesh), mesh.size(-1)
        self._replica_group, self._num_replicas = (None, 1) if mesh.ndim == 1 else (mesh.get_group(0), mesh.size(0))
        apart = tuple(map(tuple, mesh.mesh.view(-1, self.num_ranks).tolist()))
        gather = Wire(mesh.get_group(mesh.ndim - 1), self._device)
        reduce = Wire(_second_group(dist.group.WORLD, apart), self._device)
        self._wires = Wires(gather, reduce, self._note, in_later_replica(mesh))
        self._units: list[Unit] = []
        self._groups: list[Group] = []
        self._buffers: list[GatherBuffer] = []
        self._schedule = Schedule(PREFETCH, self._agree)
        self._pending: list[Group] = []
        self._last, self._in_backward = True, False
        self._build(units, replicated, precision, strategy)

    def _build(
        self, units: list[list[nn.Module]], replicated: set[nn.Parameter], precision: Precision, strategy: str
    ) -> None:
        """Move every parameter into a group of its unit, and hang the hooks on the units' modules."""
        model, prefix = self.module, getattr(self.module, "name_prefix", "")
        path = {module: name.removeprefix(prefix) for name, module in model.named_modules()}
        names = {parameter: name.removeprefix(prefix) for name, parameter in model.named_parameters()}
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {parameter: [] for parameter in names}
        unit_of: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in names}
        for module in path:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                owners[parameter].append((module, name))
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                module._buffers[name] = buffer.to(self._device)
        for number, modules in enumerate(units):  # [final norm, head] is kept: needed first thing in backward
            name, kept = " + ".join(path[module] for module in modules), len(modules) > 1
            self._units.append(Unit(name, number, "keep" if kept else strategy, modules))
            for parameter in {parameter for module in modules for parameter in module.parameters()}:
                unit_of[parameter].add(number)
        self._root = Unit("the rest", len(units), "keep" if strategy != "replicate" else strategy, [model])
        self._adapters = Unit("adapters", len(units) + 1, "replicate", [])
        self._units += [self._root, self._adapters]
        wire_dtypes = dict.fromkeys(range(len(self._units)), None if self._device.type == "cpu" else precision.reduce)
        content: dict[tuple[int, bool, torch.dtype, torch.dtype], list[nn.Parameter]] = {}
        for parameter, numbers in unit_of.items():
            alone = parameter in replicated
            number = self._adapters.number if alone else numbers.pop() if len(numbers) == 1 else self._root.number
            compute = parameter.dtype if alone else precision.compute
            if parameter in getattr(model, "fp32_gradients", ()):
                wire_dtypes[number] = torch.float32
            content.setdefault((number, parameter.requires_grad, parameter.dtype, compute), []).append(parameter)
        kinds = [type(unit.modules[0]) for unit in self._units if unit.strategy == "full"]
        slots: dict[str, tuple[Group, int]] = {}
        rings: dict[tuple[int, torch.dtype, bool], list[GatherBuffer]] = {}
        for (number, trainable, dtype, compute), parameters in sorted(content.items(), key=lambda item: item[0][0]):
            unit = self._units[number]
            layout = lay_out_group([(names[p], tuple(p.shape)) for p in parameters], self.num_ranks)
            # Blocks of equal size and dtype use BUFFERS in turn, the first in the ring is next; others have their own.
            shared = unit.strategy == "full" and kinds.count(type(unit.modules[0])) > 1
            ring = rings.setdefault((layout.total_elements, compute, trainable), []) if shared else []
            if len(ring) == BUFFERS:
                ring.append(ring.pop(0))
            else:
                ring.append(GatherBuffer(layout.total_elements, compute, self._device))
                self._buffers.append(ring[-1])
            group = Group(unit, layout, dtype, ring[-1], trainable, self._wires, wire_dtypes[number])
            unit.groups.append(group)
            self._groups.append(group)
            for place, parameter in enumerate(parameters):
                group.fill(place, parameter)
                slots[names[parameter]] = (group, place)
                for module, name in owners[parameter]:
                    module._parameters[name] = group.parameters[place]
        self._slots = [slots[name] for name in names.values()]
        for unit in self._units:
            unit.needs_values_in_backward = not all(isinstance(module, nn.Embedding) for module in unit.modules)
            for module in unit.modules:
                module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True, with_kwargs=True)
                module.register_forward_hook(partial(self._after_forward, unit))

    def shards(self) -> list[Shard]:
        """This rank's ranges, in parameter order, tied parameters once."""
        return [group.describe(group.layout.slots[place], group.shards[place]) for group, place in self._slots]

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Matrices (decay) and vectors (no decay) of the trainable parameters, as (name, flat tensor) pairs."""
        found: dict[bool, list[tuple[str, nn.Parameter]]] = {}
        for group, place in self._slots:
            slot = group.layout.slots[place]
            if group.trainable:
                found.setdefault(len(slot.shape) > 1, []).append((slot.name, group.shards[place]))
        return [{"params": pairs, "decay": decay} for decay, pairs in found.items()]

    def replicas(self, name: str) -> int:
        """1, or with HSDP the number of replicas: adapters are split over the ranks, too."""
        return self._num_replicas

    def after_step(self) -> None:
        """The shards have changed, a forward without backward is over, or a step was given up: nothing is kept."""
        for group in self._groups:
            group.free()
            group.accumulated_P = group.gradient_S = None
        for buffer in self._buffers:
            buffer.release()
        self._note("optimizer end", self._root)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around one forward and backward; ``last``: the sums are there afterwards. An exception leaves no trace."""
        self._last = last
        for unit in self._units:
            unit.uses = 0
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            if not is_whole:
                self._in_backward = False
                self._pending.clear()
                for tidy in (Group.settle, Group.reset):  # nobody forgets before all are settled
                    for group in self._groups:
                        tidy(group)

    def _agree(self, unit: Unit) -> None:
        """While the order is new: all ranks run this unit, or TrainError on all."""
        numbers = [torch.empty(1, dtype=torch.int64, device=self._device) for _ in range(self.num_ranks)]
        dist.all_gather(numbers, torch.tensor([unit.number], device=self._device), group=self._wires.gather.group)
        for rank, number in enumerate(numbers):
            if (other := self._units[int(number)]) is not unit:
                raise refusal("other_order", own=self._wires.gather.rank, unit=unit.name, rank=rank, other=other.name)

    def _note(self, what: str, unit: Unit) -> None:
        if self.events is not None:
            full = [group.buffer.flat.nbytes for group in self._groups if group.phase in (Phase.GATHERING, Phase.LIVE)]
            sizes = {"gathered_bytes": sum(full), "held_bytes": sum(buffer.held_bytes for buffer in self._buffers)}
            self.events.append({"seconds": time.perf_counter(), "what": what, "unit": unit.name, **sizes})

    def planned(self, num_micro_batches: int) -> list[dict[str, Any]]:
        """Of each unit: strategy, parameters, bytes when gathered; by formula, its collectives and frees in a step."""
        found = []
        for unit in [unit for unit in self._units if unit.groups]:
            times = 1 if unit.strategy == "replicate" else num_micro_batches
            gathers = len(unit.groups) * times * (1 + (unit.strategy == "full" and unit.needs_values_in_backward))
            reduces = sum(group.trainable for group in unit.groups) * (times if self._reduce_each else 1)
            facts = {"unit": unit.name, "strategy": unit.strategy}
            facts["parameters"] = sum(slot.size for group in unit.groups for slot in group.layout.slots)
            facts["bytes"] = sum(group.buffer.flat.nbytes for group in unit.groups)
            found.append({**facts, "planned": {"gather": gathers, "free": gathers, "reduce": reduces}})
        return found

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather, prefetch, and mark the inputs: when their gradients are complete, the unit is through."""
        if torch._C._current_graph_task_id() != -1:  # recomputation inside backward
            unit.gather()
            return None
        if unit is self._root:
            self._schedule.begin()
            self._adapters.gather()
        else:
            self._schedule.enter(unit)
        unit.gather(self._schedule.coming())
        self._note("forward", unit)
        values, spec = tree_flatten((args, kwargs))
        marked = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad]
        if not (marked and torch.is_grad_enabled()):
            return None
        unit.uses += 1
        for i, value in zip(marked, _Through.apply(self, unit, *[values[i] for i in marked]), strict=True):
            values[i] = value
        return tree_unflatten(values, spec)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """Free, and ask to be told when the gradient of the output arrives."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._note("forward end", unit)
        if unit is self._root:
            self._schedule.end(unit)
        if unit.strategy == "full":
            unit.free()
        if torch.is_grad_enabled():
            for value in tree_flatten(output)[0]:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not self._in_backward:
            if unit is not self._root:  # a backward inside the forward, of a loss in chunks
                return
            self._in_backward = True
            for other in self._units:
                other.finished = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        coming = [other for other in self._schedule.coming_back(unit) if other.needs_values_in_backward]
        unit.gather(coming) if unit.needs_values_in_backward else None
        self._note("backward", unit)

    def _after_backward(self, unit: Unit) -> None:
        unit.uses -= 1
        if self._in_backward and unit.uses == 0 and not unit.finished:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """The unit's gradients of this micro-batch are complete: reduce or keep them, free the rest."""
        unit.finished = True
        self._note("backward end", unit)
        replicate = unit.strategy == "replicate"
        for group in unit.groups:
            if group.trainable and (self._last or (self._reduce_each and not replicate)):
                group.start_reduce()
                self._pending.append(group)
                while len(self._pending) > 1:
                    self._pending.pop(0).finish_reduce()
                continue
            if group.trainable:
                group.accumulate()
            if not replicate:
                group.free()

    def _end_backward(self) -> None:
        """After the last gradient: units without inputs that have gradients, unused ones, and the rest of the sums."""
        for unit in reversed(self._units):
            if not unit.finished:
                self._finish(unit)
        while self._pending:
            self._pending.pop(0).finish_reduce()
        self._in_backward = False
        for unit in self._units:
            if unit.strategy != "replicate":
                unit.free()
        if not self._last:
            return
        for group in [group for group in self._groups if group.gradient_S is not None]:
            if self._replica_group is not None:
                dist.all_reduce(group.gradient_S, group=self._replica_group)
            group.bind_gradients()
        self._note("optimizer", self._root)


class _Through(torch.autograd.Function):
    """Passes tensors on; its backward runs when all their gradients are complete."""

    @staticmethod
    def forward(context: Any, engine: SimpleShardedModel, unit: Unit, *tensors: torch.Tensor) -> Any:
        context.engine, context.unit = engine, unit
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.engine._after_backward(context.unit)
        return (None, None, *gradients)
