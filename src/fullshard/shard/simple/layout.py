"""Where a group's parameters lie: end to end in one flat buffer that is cut in equal ranges, one a rank.

    parameters   |---- weight (15 x 7) ----|- bias (15) -|-- norm (3) --|pad|
    flat buffer  |0                                                       P|
    ranks        |------ rank 0 ------|------ rank 1 ------|--- rank 2 ----|
                 0                    S                   2S            P = 3S

The cuts know nothing of parameters: a rank's share of a parameter is one contiguous range of its row-major elements,
perhaps empty. S is a multiple of 256 elements, so the padding is less than 256 elements a rank. Pure arithmetic."""

from math import prod
from fullshard.frozen import Frozen

ALIGNMENT = 256  # elements; block-wise optimizer states can be cut at rank borders later


class Slot(Frozen):
    """One parameter's place in the flat buffer: elements [offset, offset + size)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size = property(lambda self: prod(self.shape))  # number of elements


class Layout(Frozen):
    """The slots of a group and the equal ranges of its ranks."""

    slots: tuple[Slot, ...]
    num_ranks: int
    shard_elements: int  # S
    total_elements = property(lambda self: self.shard_elements * self.num_ranks)  # P, padding included

    def own_range(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The elements [start, stop) of the flattened parameter that ``rank`` holds; start == stop where none."""
        first = rank * self.shard_elements
        start = min(max(first - slot.offset, 0), slot.size)
        return start, max(start, min(first + self.shard_elements - slot.offset, slot.size))

    def local_range(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The same elements as places [start, stop) of the rank's own flat shard."""
        start, stop = self.own_range(slot, rank)
        place = slot.offset + start - rank * self.shard_elements if stop > start else 0
        return place, place + stop - start


def lay_out_group(shapes: list[tuple[str, tuple[int, ...]]], num_ranks: int) -> Layout:
    """Lay parameters (name, shape) end to end in the given order and cut the buffer for ``num_ranks``."""
    slots, offset = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, shape, offset))
        offset += slots[-1].size
    return Layout(tuple(slots), num_ranks, max(1, -(-offset // (num_ranks * ALIGNMENT))) * ALIGNMENT)
