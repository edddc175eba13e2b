"""Near copies: constructed rows of known Jaccard index, what counts as template, and memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.near import GRAM, THRESHOLD, jaccard, near_copies


def random_rows(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    """Rows of which no two share a 5-gram."""
    return list(np.random.default_rng(seed).permutation(count * length).astype(np.int32).reshape(count, length))


def changed(row: np.ndarray, *places: int) -> np.ndarray:
    """The row with other tokens at ``places``: five 5-grams fewer for each, away from the ends and each other."""
    copy = row.copy()
    copy[list(places)] += 1_000_000
    return copy


def near(rows, num_eval=0):
    return near_copies(rows.__getitem__, len(rows), num_eval)


def by_hand(one, other) -> float:
    first, second = ({tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)} for ids in (one, other))
    return len(first & second) / len(first | second)


@pytest.mark.parametrize(
    ("places", "expected"),
    [((), 1.0), ((50,), 95 / 105), ((20, 70), 90 / 110), ((20, 50, 70), 85 / 115), ((0,), 99 / 101)],
)
def test_the_jaccard_index_is_that_of_the_5_grams(places, expected):
    row = random_rows(1, 104)[0]  # 100 5-grams
    other = changed(row, *places)
    assert jaccard(row, other) == pytest.approx(expected) == pytest.approx(by_hand(row, other))


def test_rows_above_the_threshold_are_found_and_others_are_not():
    rows = random_rows(20, 104)
    assert near([*rows, changed(rows[3], 20, 70), changed(rows[4], 20, 50, 70)]) == [(20, 3, pytest.approx(90 / 110))]
    assert 85 / 115 < THRESHOLD <= 90 / 110


def test_almost_no_near_copy_is_missed():
    rows = random_rows(500, 104)
    found = near([*rows, *(changed(row, 20, 70) for row in rows)])  # 1 - (1 - 0.818**5)**16 = 99.9%
    assert len(found) >= 495
    assert {(row - 500, other) for row, other, _ in found} <= {(number, number) for number in range(500)}


def test_a_row_is_named_with_a_held_out_one_and_with_an_earlier_one():
    rows = random_rows(6, 60)
    held_out, train = rows[:2], [*rows[2:], rows[1], changed(rows[5], 30), rows[1]]
    copied = pytest.approx(51 / 61)
    assert near([*held_out, *train], 2) == [(6, 1, 1.0), (7, 5, copied), (8, 6, 1.0), (8, 1, 1.0)]
    assert near(held_out * 2, 4) == []  # held-out rows are not compared with each other


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_identical_rows_are_always_found(data):
    """Also short ones, of few different tokens, and among rows that are like them."""
    row = st.lists(st.integers(0, 3), min_size=1, max_size=12)
    rows = data.draw(st.lists(row, min_size=1, max_size=20))
    copied = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=10))
    ids = [np.array(one, dtype=np.int32) for one in [*rows, *copied]]
    found = {row for row, _, _ in near(ids)}
    assert set(range(len(rows), len(ids))) <= found
    pairs = near(ids, len(rows))
    assert {row for row, other, _ in pairs if other < len(rows)} == set(range(len(rows), len(ids)))
    for row, other, value in pairs:
        assert other < row and THRESHOLD <= value == jaccard(ids[row], ids[other]) <= 1


def test_same_rows_same_answer():
    rows = random_rows(50, 60)
    rows += [changed(row, 30) for row in rows]
    assert near(rows) == near([row.copy() for row in rows]) != []


@pytest.mark.parametrize(("count", "num_found"), [(99, 98), (100, 0)])
def test_a_template_is_no_content(count, num_found):
    """From 100 rows on, what more than half of the rows have does not count."""
    template = np.arange(40, dtype=np.int32)
    rows = [np.append(template, 1000 + number).astype(np.int32) for number in range(count)]
    assert len(near(rows)) == num_found


def test_with_a_template_copies_are_still_found():
    template = np.arange(10_000, 10_040, dtype=np.int32)
    rows = [np.append(template, row).astype(np.int32) for row in random_rows(150, 60)]
    found = near([*rows, changed(rows[7], 70)])
    assert [(row, other) for row, other, _ in found] == [(150, 7)]
    assert found[0][2] < jaccard(changed(rows[7], 70), rows[7])  # without the template there is less in common


def test_memory_per_row():
    def peak(count: int) -> int:
        rows = np.random.default_rng(0).integers(0, 49_000, (count, 10), dtype=np.int32)
        tracemalloc.start()
        near_copies(rows.__getitem__, count)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert (peak(8000) - peak(2000)) / 6000 < 100
