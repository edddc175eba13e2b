"""A unit (modules gathered, computed and freed together) and its groups (parameters of one kind in one flat buffer).
A few buffers are used by the blocks in turn, so that their size is a formula. A group always uses the same one, and its
parameters are views of it for ever: what autograd has saved for backward stays right, since the buffer is filled with
the same values again before."""

from __future__ import annotations
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
import torch
from torch import nn
from fullshard.shard.interface import Shard
from fullshard.shard.simple.layout import Layout, Slot
from fullshard.shard.simple.wire import Wire


class GatherBuffer:
    """A flat buffer that its ``users``, groups of one size and dtype, use in turn. Without memory while none does."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(num_elements, dtype=dtype, device=device)
        self._bytes = self.flat.untyped_storage().nbytes()
        self.users: list[Group] = []  # in the order of forward
        self.user, self._last = None, None  # whose values are in it; with whom this round, forward or backward, ends
        self.release()

    def take(self, group: Group) -> torch.Tensor:
        """The buffer for ``group``; whoever used it last must be through with it."""
        if (before := self.user) not in (None, group):
            before.finish_reduce()
            assert before.phase is Phase.SHARDED, f"{before.unit.name} still uses its buffer ({before.phase.value})"
        if self.user is None:
            self._last = self.users[-1] if group is self.users[0] else self.users[0]
        self.user = group
        if self.held_bytes == 0:
            self.flat.untyped_storage().resize_(self._bytes)
        return self.flat

    def leave(self, group: Group) -> None:
        """``group`` is through. After the last user of forward, and of backward, the memory is given back."""
        if group is self.user is self._last:
            self.release()

    def release(self) -> None:
        """Give the memory back; the tensors that look into it stay."""
        self.user = None
        self.flat.untyped_storage().resize_(0)

    held_bytes = property(lambda self: self.flat.untyped_storage().nbytes())  # of memory that the buffer has now


class Phase(Enum):
    """Where a group's values are."""

    SHARDED = "sharded"  # each rank has its range, and nothing else
    GATHERING = "gathering"  # ranges are on their way into the buffer
    LIVE = "live"  # the buffer holds all values
    REDUCING = "reducing"  # the buffer holds gradients that are on their way to their ranks


ALLOWED = {  # and what is then noted
    (Phase.SHARDED, Phase.GATHERING): ["gather"],
    (Phase.GATHERING, Phase.LIVE): ["gather end"],
    (Phase.LIVE, Phase.SHARDED): ["free"],
    (Phase.LIVE, Phase.REDUCING): ["free", "reduce"],
    (Phase.SHARDED, Phase.REDUCING): ["reduce"],  # an embedding, whose backward needs no values
    (Phase.REDUCING, Phase.SHARDED): ["reduce end"],
}


class Group:
    """Parameters of one unit that are alike: trained or frozen, one dtype at rest, one in compute.
    ``shard_S`` is this rank's range at rest; ``parameters`` are what the modules compute with: views of the buffer.
    ``shards`` are views of ``shard_S``, one a parameter: the optimizer's tensors."""

    def __init__(
        self, unit: Unit, layout: Layout, dtype: torch.dtype, buffer: GatherBuffer, trainable: bool, wires: Wires,
        reduce_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.unit, self.layout, self.buffer, self.trainable, self._wires = unit, layout, buffer, trainable, wires
        buffer.users.append(self)
        self.phase, self._transfer, self._sent_WS = Phase.SHARDED, None, None
        device, self.rank, self._reduce_dtype = buffer.flat.device, wires.gather.rank, reduce_dtype  # None: as computed
        self.shard_S = torch.zeros(layout.shard_elements, dtype=dtype, device=device)
        self.parameters, self.shards, flat_P = [], [], buffer.take(self)
        for slot in layout.slots:  # .data: views with version counters of their own, which filling does not move
            view = flat_P[slot.offset : slot.offset + slot.size].view(slot.shape).data
            self.parameters.append(nn.Parameter(view, requires_grad=trainable))
            self.parameters[-1].grad_dtype = None  # as computed: the head's may be sums in fp32
            start, stop = layout.local_range(slot, self.rank)
            self.shards.append(nn.Parameter(self.shard_S[start:stop].data, requires_grad=trainable))
        buffer.release()
        self.accumulated_P: torch.Tensor | None = None  # fp32 sums over micro-batches, before they are reduced
        self.gradient_S: torch.Tensor | None = None  # fp32 sum over ranks of this rank's range

    @torch.no_grad()
    def fill(self, place: int, whole: torch.Tensor) -> None:
        """Take this rank's range of a parameter's value, unless it is on the meta device."""
        if not whole.is_meta:
            start, stop = self.layout.own_range(self.layout.slots[place], self.rank)
            self.shards[place].copy_(whole.reshape(-1)[start:stop])

    def enter(self, new: Phase) -> None:
        """Change the phase, by a transition of ALLOWED; each is noted."""
        assert (self.phase, new) in ALLOWED, f"{self.unit.name}: {self.phase.value} cannot become {new.value}"
        before, self.phase = self.phase, new
        for what in ALLOWED[before, new]:
            self._wires.note(what, self.unit)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to fill the buffer, unless that has begun."""
        self.finish_reduce()
        if self.phase is Phase.SHARDED:
            pieces_WS = self.buffer.take(self).view(self.layout.num_ranks, -1)
            self._transfer = self._wires.gather.gather(pieces_WS, self.shard_S)
            self.enter(Phase.GATHERING)

    def gather(self) -> None:
        """Fill the buffer and wait until it is full."""
        self.start_gather()
        if self.phase is Phase.GATHERING:
            self._transfer.wait()
            self.enter(Phase.LIVE)

    def free(self) -> None:
        """Forget the gathered values."""
        if self.phase is Phase.GATHERING:  # prefetched and not used
            self.gather()
        if self.phase is Phase.LIVE:
            self.enter(Phase.SHARDED)
            self.buffer.leave(self)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add this micro-batch's gradients to the whole fp32 sums, and drop them."""
        if self.accumulated_P is None:
            dtype = torch.promote_types(self.shard_S.dtype, torch.float32)
            self.accumulated_P = torch.zeros(self.layout.total_elements, dtype=dtype, device=self.shard_S.device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if parameter.grad is not None:
                self.accumulated_P[slot.offset : slot.offset + slot.size] += parameter.grad.reshape(-1)
                parameter.grad = None

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Begin to send the gradients (none: zeros) to their ranks, in the dtype they were computed in, or fp32."""
        if self.accumulated_P is not None:
            self.accumulate()
            self.free()
            flat_P, self.accumulated_P = self.accumulated_P, None
        else:
            flat_P = self._pack()
        self._sent_WS = flat_P.view(self.layout.num_ranks, -1)
        self._transfer = self._wires.reduce.reduce(self._sent_WS)
        self.enter(Phase.REDUCING)

    def _pack(self) -> torch.Tensor:
        """The gradients in the group's buffer, or in one of the wire's dtype where that is another."""
        flat_P, least = self.buffer.flat, self._reduce_dtype
        wire_dtype = flat_P.dtype if least is None else torch.promote_types(flat_P.dtype, least)
        if wire_dtype == flat_P.dtype:
            self.buffer.take(self)
        else:
            flat_P = torch.empty(flat_P.numel(), dtype=wire_dtype, device=flat_P.device)
        end = 0
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            end = slot.offset + slot.size
            if parameter.grad is None:
                flat_P[slot.offset : end].zero_()
            else:
                flat_P[slot.offset : end].copy_(parameter.grad.reshape(-1))
                parameter.grad = None
        flat_P[end:].zero_()
        return flat_P

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """If it is reducing: wait for the other ranks' parts and add them up; the buffer is free afterwards."""
        if self.phase is not Phase.REDUCING:
            return
        total_S = self._wires.reduce.total(self._transfer, self._sent_WS)
        self.gradient_S = total_S if self.gradient_S is None else self.gradient_S.add_(total_S)
        self._transfer = self._sent_WS = None
        self.enter(Phase.SHARDED)
        self.buffer.leave(self)

    def bind_gradients(self) -> None:
        """Show the sums, which are there, to the optimizer as ``shards[i].grad``."""
        for slot, shard in zip(self.layout.slots, self.shards, strict=True):
            start, stop = self.layout.local_range(slot, self.rank)
            shard.grad = self.gradient_S[start:stop].to(shard.dtype)
        self.gradient_S = None

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._transfer is not None:
            self._transfer.wait()

    def reset(self) -> None:
        """After an exception, when all is settled: forget gradients and gathered values."""
        self.phase, self._transfer, self._sent_WS = Phase.SHARDED, None, None
        self.accumulated_P = self.gradient_S = None
        for parameter in self.parameters:
            parameter.grad = None
        self.buffer.release()

    def describe(self, slot: Slot, shard: nn.Parameter) -> Shard:
        """One parameter's range as the rest of the product sees it."""
        start, stop = self.layout.own_range(slot, self.rank)
        gradient = shard.grad.detach() if shard.grad is not None else None
        return Shard(slot.name, slot.shape, start, stop, shard.detach(), gradient, self.trainable, self._wires.is_copy)


@dataclass
class Wires:
    """The ways of a unit's bytes. ``note`` is told what happens to a unit."""

    gather: Wire
    reduce: Wire
    note: Callable[[str, Unit], None]
    is_copy: bool  # this rank is in a later replica (HSDP)


@dataclass(eq=False)
class Unit:
    """Modules whose groups are gathered together. ``strategy``: ``full`` frees after forward and gathers again for
    backward; ``keep`` frees after backward; ``replicate`` keeps the values until the optimizer has changed them."""

    name: str
    number: int
    strategy: str
    modules: list[nn.Module]
    groups: list[Group] = field(default_factory=list)
    needs_values_in_backward: bool = True
    uses: int = 0  # forward calls whose backward has not come
    finished: bool = False  # in this backward

    def start_gather(self) -> None:
        """Begin to gather all groups."""
        for group in self.groups:
            group.start_gather()

    def gather(self, coming: Sequence[Unit] = ()) -> None:
        """Gather all groups and wait; then begin to gather those of the units that come next."""
        self.start_gather()
        for group in self.groups:
            group.gather()
        for unit in coming:
            unit.start_gather()

    def free(self) -> None:
        """Forget the gathered values of all groups."""
        for group in self.groups:
            group.free()
