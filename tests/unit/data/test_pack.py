"""Windows and their layout: nothing lost, nothing twice, every rank in step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.config import TrainSection
from fullshard.data.pack import LARGEST, _splitmix64, area_of, heaviest, lay_out, shuffle, windows, windows_of_run
from fullshard.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(np.array)
UNITS = st.sampled_from(["rows", "tokens"])


def test_the_order_never_changes():
    """Pinned: another order would change every run's windows and break resume across versions."""
    assert int(_splitmix64(np.zeros(1, dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF  # the published first value
    assert shuffle(8, 0, 0).tolist() == [2, 6, 5, 3, 0, 4, 7, 1]
    assert shuffle(8, 0, 0).tolist() != shuffle(8, 0, 1).tolist()
    assert shuffle(8, 1, 0).tolist() != shuffle(8, 0, 1).tolist()


def test_windows_of_rows_keep_the_last_partial_one():
    found = windows(np.ones(5), 0, 0, (2, "rows"))
    assert [len(window) for window in found] == [2, 2, 1]


def test_windows_of_tokens_fill_until_the_next_row_would_exceed():
    found = windows(np.array([6, 6, 6, 6, 6]), 3, 0, (13, "tokens"))
    assert [len(window) for window in found] == [2, 2, 1]
    assert [len(window) for window in windows(np.array([20, 20]), 0, 0, (13, "tokens"))] == [1, 1]


@given(LENGTHS, st.integers(0, 9), st.integers(0, 3), st.integers(1, 100), UNITS)
def test_every_row_is_in_one_window(lengths, seed, epoch, count, unit):
    found = windows(lengths, seed, epoch, (count, unit))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    if unit == "tokens":
        assert all(len(window) == 1 or lengths[window].sum() <= count for window in found)
        for window, following in itertools.pairwise(found):
            assert lengths[window].sum() + lengths[following[0]] > count  # filled as far as it goes


def test_a_last_window_that_is_not_full_is_left_out_when_asked():
    """HO-6: 3 rows in windows of 8 are no step at all; a row longer than the count is full by itself."""
    assert [len(window) for window in windows(np.ones(5), 0, 0, (2, "rows"), True)] == [2, 2]
    assert [len(window) for window in windows(np.ones(4), 0, 0, (2, "rows"), True)] == [2, 2]
    assert windows(np.ones(3), 0, 0, (8, "rows"), True) == []
    assert [len(window) for window in windows(np.array([6] * 5), 3, 0, (13, "tokens"), True)] == [2, 2]
    assert [len(window) for window in windows(np.array([20, 20]), 0, 0, (13, "tokens"), True)] == [1, 1]
    with pytest.raises(ConfigError, match="0 steps: 3 rows < 8") as caught:
        windows_of_run(np.ones(3), TrainSection(global_batch="8 rows", drop_last=True))
    assert 'train.global_batch="3 rows"' in caught.value.hint
    with pytest.raises(ConfigError, match="0 steps: 12 tokens < 13"):
        windows_of_run(np.array([6, 6]), TrainSection(global_batch="13 tokens", drop_last=True, max_steps=9))


@settings(max_examples=200)
@given(LENGTHS, st.integers(0, 9), st.integers(1, 3), st.integers(1, 60), UNITS, st.booleans(), st.data())
def test_a_run_is_the_same_windows_however_it_is_laid_out(lengths, seed, epochs, count, unit, packing, data):
    """Ranks, micro-batch and packing change nothing: steps hold the same rows, an epoch each row exactly once, and
    what fills a tail has no row."""
    batch = f"{count} {unit}"
    micro = (data.draw(st.integers(1, 60)), data.draw(UNITS))
    plain = TrainSection(global_batch=batch, epochs=epochs, seed=seed)
    told = TrainSection(global_batch=batch, epochs=epochs, seed=seed, micro_batch=f"{micro[0]} {micro[1]}")
    steps, again = windows_of_run(lengths, plain), windows_of_run(lengths, told)
    assert [(epoch, window.tolist()) for epoch, window in steps] == [(e, window.tolist()) for e, window in again]
    for epoch in range(epochs):
        rows = [row for of_epoch, window in steps if of_epoch == epoch for row in window.tolist()]
        assert sorted(rows) == list(range(len(lengths)))
    for num_ranks in (1, data.draw(st.integers(2, 5))):
        for _, window in steps:
            layout = lay_out(window, lengths, num_ranks, micro, packing, 40)
            found = [row for ranks in layout for cell in ranks for sequence in cell for row in sequence]
            assert sorted(found) == sorted(window.tolist())


@settings(max_examples=300)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 120), UNITS, st.booleans())
def test_layout_holds_every_row_once_and_keeps_ranks_in_step(lengths, num_ranks, count, unit, packing):
    max_length = 40
    layout = lay_out(np.arange(len(lengths)), lengths, num_ranks, (count, unit), packing, max_length)
    assert all(len(ranks) == num_ranks for ranks in layout)
    rows = [row for ranks in layout for sequences in ranks for sequence in sequences for row in sequence]
    assert sorted(rows) == list(range(len(lengths)))
    for ranks in layout:
        assert any(ranks), "a micro-batch in which every rank is idle"
        for sequences in ranks:
            sizes = [sum(int(lengths[row]) for row in sequence) for sequence in sequences]
            if packing:
                assert all(size <= max_length for size in sizes)
            else:
                assert all(len(sequence) == 1 for sequence in sequences)
            area = sum(sizes) if packing else len(sizes) * max(sizes, default=0)
            assert area_of(sequences, lengths, packing) == area
            assert (len(sizes) if unit == "rows" else area) <= count or len(sizes) == 1


def test_five_rows_on_two_ranks_with_batches_of_two():
    """HO-6: both ranks take the same number of steps, nothing is used twice, one rank gets less."""
    layout = lay_out(np.arange(5), np.array([5, 4, 3, 2, 1]), 2, (2, "rows"), False, 8)
    assert [[len(sequences) for sequences in ranks] for ranks in layout] == [[2, 1], [1, 1]]


def test_one_row_on_two_ranks_leaves_one_rank_a_fill():
    assert lay_out(np.array([7]), np.arange(1, 9), 2, (2, "rows"), False, 8) == [[[[7]], []]]


def test_packing_joins_short_rows_of_a_large_window():
    layout = lay_out(np.arange(8), np.array([9, 1, 5, 5, 6, 4, 3, 7]), 2, (1, "rows"), True, 10)
    sequences = [sequence for ranks in layout for cell in ranks for sequence in cell]
    assert sorted(sorted(sequence) for sequence in sequences) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_packing_spreads_a_small_window_over_the_ranks():
    layout = lay_out(np.arange(4), np.array([5, 5, 5, 5]), 2, (4, "rows"), True, 1000)
    assert layout == [[[[0, 2]], [[1, 3]]]]  # two rows, 10 tokens, on each


def test_few_packed_sequences_lie_evenly_on_the_ranks():
    """Four rows of which no two pairs fit (GSM8K, step 29 of benchmarks/trl.py): 468 + 123 and 308 + 284 tokens; the
    two longest on one rank, 776 against 407, cost a third of the step and the largest peak of the run."""
    lengths = np.array([284, 468, 123, 308])
    for micro in ((2, "rows"), (960, "tokens"), (592, "tokens")):  # 2 x 468, of which nobody computes the pads
        (cells,) = lay_out(np.arange(4), lengths, 2, micro, True, 512)
        assert sorted(map(sorted, cells)) == [[[0], [3]], [[1], [2]]]
    lengths = np.arange(50, 40, -1)
    layout = lay_out(np.arange(10), lengths, 2, (3, "rows"), True, 60)  # one row a sequence, four cells, to and fro
    assert layout == [[[[0], [8], [7]], [[1], [9], [6]]], [[[2], [5]], [[3], [4]]]]
    unpacked = lay_out(np.arange(10), lengths, 2, (3, "rows"), False, 60)  # neighbours, whose pads are few
    assert unpacked == [[[[0], [1], [2]], [[3], [4], [5]]], [[[6], [7]], [[8], [9]]]]


def test_packed_sequences_are_equally_long():
    """Best fit alone would fill 10, 10, 10 and leave 2."""
    layout = lay_out(np.arange(8), np.array([4, 4, 4, 4, 4, 4, 4, 4]), 1, (4, "rows"), True, 11)
    assert [sum(4 for _ in sequence) for sequence in layout[0][0]] == [8, 8, 8, 8]


def test_packed_micro_batches_are_as_few_as_their_tokens_allow():
    """10 documents of 50 to 41 tokens, none two in a sequence of 60: 455 tokens, at most 100 a micro-batch and rank."""
    lengths = np.arange(50, 40, -1)
    layout = lay_out(np.arange(10), lengths, 2, (100, "tokens"), True, 60)
    sums = [[int(lengths[[row for rows in cell for row in rows]].sum()) for cell in ranks] for ranks in layout]
    assert len(layout) == 3 and max(map(max, sums)) <= 100 and sum(map(sum, sums)) == 455
    assert len(lay_out(np.arange(10), lengths, 2, (230, "tokens"), True, 60)) == 1


def test_what_a_rank_must_hold_is_looked_for_in_the_largest_windows_and_the_longest_rows():
    lengths = np.array([10] * 200 + [90, 5, 5, 5])
    steps = [(0, np.arange(place, place + 10)) for place in range(0, 200, 10)] + [(1, np.arange(200, 204))]
    found = heaviest(steps, np.where(np.arange(204) < 30, 11, lengths))
    assert len(found) == LARGEST + 1
    assert [window[0] for window in found[:3]] == [0, 10, 20] and found[-1].tolist() == [200, 201, 202, 203]


def test_no_sequences_of_no_rows():
    assert lay_out(np.array([], dtype=np.int64), np.array([3]), 2, (4, "rows"), True, 8) == []


def test_rows_trade_places_for_one_sequence_less():
    """Best fit: 6 + 5, 4 + 3 + 2 + 2, 2. Longest into the emptiest: 6 + 3 + 2 + 2, 5 + 4 + 2; then 6 against 5."""
    lengths = np.array([6, 5, 4, 3, 2, 2, 2])
    ((cells,),) = lay_out(np.arange(7), lengths, 1, (4, "rows"), True, 12)
    assert [int(lengths[rows].sum()) for rows in cells] == [12, 12]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_pairs_that_fill_a_sequence_find_each_other(sizes):
    lengths = np.array([part for size in sizes for part in (size, 30 - size) if part])
    layout = lay_out(np.arange(len(lengths)), lengths, 1, (4, "rows"), True, 30)
    assert sum(len(cell) for ranks in layout for cell in ranks) == len(sizes)


@pytest.mark.parametrize("max_length", [1024, 2048])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_windows_of_32k_tokens_are_at_least_95_percent_full(num_ranks, max_length):
    """Lengths as GSM8K has them (benchmarks/data.py measures the file itself): tokens over sequences x max_length, and
    over what the slowest rank has, times ranks (nothing is padded: documents are attended one by one).
    A window needs 16 sequences of 2,048; three ranks take 18, each with 1,820 tokens, so that none has a third more."""
    lengths = np.random.default_rng(0).normal(216, 80, 7473).clip(97, 570).astype(np.int64)
    tokens = places = slowest = 0
    for window in windows(lengths, 0, 0, (32768, "tokens"))[:-1]:
        for micro_batch in lay_out(window, lengths, num_ranks, (4, "rows"), True, max_length):
            sizes = [[sum(int(lengths[row]) for row in rows) for rows in sequences] for sequences in micro_batch]
            tokens += sum(map(sum, sizes))
            places += max_length * sum(map(len, sizes))
            slowest += num_ranks * max(map(sum, sizes))
    assert tokens / slowest >= 0.98
    assert tokens / places >= (0.88 if (num_ranks, max_length) == (3, 2048) else 0.96)
