"""Which rows make an optimizer step (windows), and how they lie on ranks and micro-batches (lay_out). No torch here."""

import heapq
from bisect import bisect_left
from functools import partial
import numpy as np
from fullshard.config import TrainSection, parse_quantity
from fullshard.errors import refusal

Amount = tuple[int, str]  # of "rows" or "tokens"
FEW = 32  # sequences a rank: one more of them is then 3 % and more of what the rank has to do
LARGEST = 16  # windows of a run that are looked at for what a rank must hold


def shuffle(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of ``range(num_rows)`` (int64), equal on every machine: sorted by a hash of (seed, epoch, row)."""
    start = _splitmix64(_splitmix64(np.array([seed], dtype=np.uint64)) ^ np.uint64(epoch))
    keys = _splitmix64(start ^ _splitmix64(np.arange(num_rows, dtype=np.uint64)))
    return np.argsort(keys, kind="stable").astype(np.int64)


def windows(lengths: np.ndarray, seed: int, epoch: int, quantity: Amount, drop_last: bool = False) -> list[np.ndarray]:
    """The row ids (int64) of each optimizer step of ``epoch``, in order. ``lengths``: tokens a row. ``quantity``:
    (64, "rows"), or (65536, "tokens"): rows until the next would exceed it, one at least. ``drop_last``: no smaller."""
    count, unit = quantity
    order, sizes = shuffle(len(lengths), seed, epoch), lengths if unit == "tokens" else np.ones_like(lengths)
    found, start, filled = [], 0, 0
    for place, size in enumerate(sizes[order].tolist()):
        if place > start and filled + size > count:
            found.append(order[start:place])
            start, filled = place, 0
        filled += size
    found.append(order[start:])
    return found[:-1] if drop_last and filled < count else found


def windows_of_run(lengths: np.ndarray, train: TrainSection) -> list[tuple[int, np.ndarray]]:
    """(epoch, row ids) of every optimizer step of a run; a part of an epoch is at least one. ConfigError for none."""
    quantity, steps, epoch = parse_quantity(train.global_batch), [], 0
    while epoch < train.epochs and (train.max_steps is None or len(steps) < train.max_steps):
        if not (of_epoch := windows(lengths, train.seed, epoch, quantity, train.drop_last)):
            size = len(lengths) if quantity[1] == "rows" else int(lengths.sum())
            raise refusal("no_steps", size=size, unit=quantity[1], asked=quantity[0])
        share = min(1.0, train.epochs - epoch)
        steps += [(epoch, window) for window in of_epoch[: max(1, round(share * len(of_epoch)))]]
        epoch += 1
    return steps[: train.max_steps]


def heaviest(steps: list[tuple[int, np.ndarray]], lengths: np.ndarray) -> list[np.ndarray]:
    """Windows of a run among which is the one that takes most memory: the LARGEST by tokens, and the longest row's."""
    every = sorted((window for _, window in steps), key=lambda window: -lengths[window].sum())
    return [*every[:LARGEST], max(every, key=lambda window: lengths[window].max())]


def area_of(cell: list[list[int]], lengths: np.ndarray, packing: bool) -> int:
    """Tokens of a micro-batch on one rank, pads included; packed documents are attended one by one, without pads."""
    sizes = [int(lengths[sequence].sum()) for sequence in cell]
    return sum(sizes) if packing else len(sizes) * max(sizes, default=0)


def lay_out(
    window: np.ndarray, lengths: np.ndarray, num_ranks: int, micro: Amount, packing: bool, max_length: int
) -> list[list[list[list[int]]]]:
    """Lay one window out as ``[micro_batch][rank] -> sequences``; a sequence is a list of row ids, each whole and in
    one. Every rank has the same number of micro-batches; an empty list is a fill batch of weight zero. With ``packing``
    a sequence holds at most ``max_length`` tokens, else one row. ``micro``: (4, "rows"), at most 4 sequences, or (4096,
    "tokens"), an area (``area_of``) of 4096, but at least one sequence. Similar areas lie side by side."""
    sequences = _pack(window, lengths, num_ranks, max_length) if packing else [[int(row)] for row in window]
    sizes = {sequence[0]: sum(int(lengths[row]) for row in sequence) for sequence in sequences}
    sequences.sort(key=lambda sequence: (-sizes[sequence[0]], sequence[0]))
    (count, unit), area = micro, partial(area_of, lengths=lengths, packing=packing)

    def deal(number: int) -> list[list[list[int]]]:
        if not packing:  # rows of like lengths come together
            return [part.tolist() for part in np.array_split(np.array(sequences), number)]
        return [sequences[n :: 2 * number] + sequences[2 * number - 1 - n :: 2 * number] for n in range(number)]

    def cut(most: int) -> list[list[list[int]]]:
        cells: list[list[list[int]]] = []
        for sequence in sequences:
            if not cells or (len(cells[-1]) + 1) * sizes[cells[-1][0][0]] > most:
                cells.append([])
            cells[-1].append(sequence)
        return cells

    if packing or unit == "rows":
        number = -(-(len(sequences) if unit == "rows" else sum(sizes.values())) // (count * num_ranks)) * num_ranks or 1
        while unit == "tokens" and number < len(sequences) and max(map(area, deal(number))) > count:
            number += num_ranks
        cells = [cell for cell in deal(number) if cell]
    else:  # the smallest area that needs no more cells
        allowed, least = -(-len(cut(count)) // num_ranks) * num_ranks, min(count, max(sizes.values(), default=1))
        cells = cut(bisect_left(range(count), True, least, key=lambda most: len(cut(most)) <= allowed))
    while len(cells) % num_ranks and any(len(cell) > 1 for cell in cells):  # rather split a cell than idle a rank
        largest = max((cell for cell in cells if len(cell) > 1), key=area)
        cells.remove(largest)
        half = len(largest) // 2
        cells += [largest[:half], largest[half:]]
    cells.sort(key=lambda cell: (-area(cell), cell[0][0]))
    cells += [[] for _ in range(-len(cells) % num_ranks)]
    return [cells[start : start + num_ranks] for start in range(0, len(cells), num_ranks)]


def _pack(window: np.ndarray, lengths: np.ndarray, num_ranks: int, max_length: int) -> list[list[int]]:
    """Sequences, even and as few as possible; up to FEW a rank they are a multiple of the ranks, if rows suffice."""
    rows = sorted(window.tolist(), key=lambda row: (-int(lengths[row]), row))
    sizes = lengths[rows].tolist()
    assert not rows or sizes[0] <= max_length, "rows over max_length are dropped or cut before packing"
    for least in range(-(-sum(sizes) // max_length), len(rows) + 1) if rows else ():
        count = min(-(-least // num_ranks) * num_ranks, len(rows)) if least <= FEW * num_ranks else least
        if (places := _fill_evenly(sizes, count, max_length)) is not None:
            return [[rows[i] for i in np.flatnonzero(places == place)] for place in range(count)]
    return []


def _fill_evenly(sizes: list[int], count: int, max_length: int) -> np.ndarray | None:
    """The place of each size (the largest first) in ``count`` sequences: where least lies yet. While a sequence is over
    ``max_length`` the fullest trades a row for a smaller one; None where that does not help, or would take long."""
    heap, places = [(0, place) for place in range(count)], []
    for size in sizes:
        filled, place = heap[0]
        places.append(place)
        heapq.heapreplace(heap, (filled + size, place))
    size_N, place_N = np.array(sizes), np.array(places)
    over_C = np.bincount(place_N, size_N).astype(np.int64) - max_length
    while over_C[full := over_C.argmax()] > 0:
        mine = np.flatnonzero(place_N == full)
        moved = size_N[mine, None] - size_N
        after = (over_C[full] - moved).clip(0) + (over_C[place_N] + moved).clip(0) - over_C[place_N].clip(0)
        given, taken = divmod(int(after.argmin()), len(sizes))
        if count > 4 * FEW or after[given, taken] >= over_C[full]:
            return None
        over_C[[full, other := place_N[taken]]] += moved[given, taken] * np.array([-1, 1])
        place_N[[mine[given], taken]] = other, full
    return place_N


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") of uint64 values."""
    return scatter(values + np.uint64(0x9E3779B97F4A7C15))  # wraps around by design


def scatter(values: np.ndarray) -> np.ndarray:
    """Scatter uint64 values over all 64 bits, one to one (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
