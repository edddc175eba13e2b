"""The flat layout is arithmetic: every element on exactly one rank, little padding, borders as said."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fullshard.shard.simple.layout import ALIGNMENT, lay_out_group

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8)


@given(SHAPES, st.integers(1, 300))
def test_every_element_is_on_one_rank(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out_group([(f"p{i}", shape) for i, shape in enumerate(shapes)], num_ranks)
    flat = np.full(layout.total_elements, -1)
    for number, slot in enumerate(layout.slots):
        assert slot.size == int(np.prod(slot.shape))
        assert (flat[slot.offset : slot.offset + slot.size] == -1).all()
        flat[slot.offset : slot.offset + slot.size] = number
    for number, slot in enumerate(layout.slots):
        found, end = [], 0
        for rank in range(num_ranks):
            start, stop = layout.own_range(slot, rank)
            low, high = layout.local_range(slot, rank)
            assert stop - start == high - low and 0 <= low <= high <= layout.shard_elements
            if stop > start:
                assert start == end
                end = stop
                found.append(flat[rank * layout.shard_elements :][low:high])
        assert end == slot.size
        assert not found or (np.concatenate(found) == number).all()


@given(SHAPES, st.integers(1, 300))
def test_padding_is_under_256_elements_a_rank(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out_group([(f"p{i}", shape) for i, shape in enumerate(shapes)], num_ranks)
    real_elements = sum(slot.size for slot in layout.slots)
    padding = layout.total_elements - real_elements
    assert layout.shard_elements % ALIGNMENT == 0
    assert 0 <= padding < ALIGNMENT * num_ranks or real_elements == 0


def test_by_hand() -> None:
    """(15, 7) then (300,), on two ranks: 405 elements in 2 x 256; rank 0 ends inside the second parameter."""
    layout = lay_out_group([("a", (15, 7)), ("b", (300,))], 2)
    assert layout.shard_elements == 256
    a, b = layout.slots
    assert [layout.own_range(a, rank) for rank in (0, 1)] == [(0, 105), (105, 105)]
    assert [layout.own_range(b, rank) for rank in (0, 1)] == [(0, 151), (151, 300)]
    assert [layout.local_range(b, rank) for rank in (0, 1)] == [(105, 256), (0, 149)]
    scalar = lay_out_group([("s", ())], 3)
    assert [scalar.own_range(scalar.slots[0], rank) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]
