"""Memory for gathered groups: a few buffers that the blocks use in turn, so that its size is a formula.

A group always uses the same buffer, and its parameters are views of it for ever. What autograd has saved for backward
therefore stays right: before the group's backward the buffer is filled with the same values again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fullshard.shard.simple.unit import Group


class GatherBuffer:
    """A flat buffer that several groups of one size and dtype use in turn. Without memory while nobody uses it."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(num_elements, dtype=dtype, device=device)
        self._bytes = self.flat.untyped_storage().nbytes()
        self.user: Group | None = None
        self.release()

    def take(self, group: Group) -> torch.Tensor:
        """The buffer for ``group``; whoever used it last must be through with it."""
        if self.user is not None and self.user is not group:
            self.user.leave_buffer()
        self.user = group
        if self.held_bytes == 0:
            self.flat.untyped_storage().resize_(self._bytes)
        return self.flat

    def release(self) -> None:
        """Give the memory back; the tensors that look into it stay."""
        self.user = None
        self.flat.untyped_storage().resize_(0)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the buffer has now."""
        return self.flat.untyped_storage().nbytes()


class BufferPool:
    """Hands out the buffers: blocks of equal size and dtype share ``depth`` of them in turn, others have their own."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self._depth, self._device = depth, device
        self.buffers: list[GatherBuffer] = []
        self._shared: dict[tuple[int, torch.dtype, bool], list[GatherBuffer]] = {}  # in turn: the first is next

    def buffer_for(self, num_elements: int, dtype: torch.dtype, trainable: bool, shared: bool) -> GatherBuffer:
        """The buffer of the next group."""
        ring = self._shared.setdefault((num_elements, dtype, trainable), []) if shared else []
        if shared and len(ring) == self._depth:
            ring.append(ring.pop(0))
        else:
            ring.append(GatherBuffer(num_elements, dtype, self._device))
            self.buffers.append(ring[-1])
        return ring[-1]
