"""Exact and near copies among rows: 5-grams of token ids, bands of MinHash for candidates, then the true Jaccard index.

Legend: R = rows, S = 5-grams of a chunk of rows. MinHash: Broder 1997; bands: Indyk and Motwani 1998. About 100 bytes a
row beside what ``rows`` itself holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

THRESHOLD = 0.8  # Jaccard index of the 5-gram sets of two near copies
GRAM = 5
BANDS, BAND_SIZE = 16, 5  # a pair at the threshold shares a band with probability 1 - (1 - 0.8**5)**16 = 99.8%
NEIGHBOURS = 32  # rows of a band that a row is compared with
COMMON_ROWS, COMMON_SHARE = 100, 0.5  # from so many rows on, a 5-gram in more than this share is template, not content
SAMPLE_ROWS = 1000  # of which that share is measured
CHUNK_TOKENS = 100_000
Pair = tuple[int, int, float]  # a training row, the row that it repeats, their Jaccard index


@dataclass(frozen=True)
class Copies:
    """At most one Pair a training row and list, by row number; an exact copy does not count again as a near one."""

    exact: list[Pair]  # an earlier training row
    near: list[Pair]
    exact_eval: list[Pair]  # a held-out row
    near_eval: list[Pair]


def find_copies(rows: Sequence[np.ndarray], num_eval: int = 0) -> Copies:
    """Copies among ``rows`` (int ids): the first ``num_eval`` are held out, the others are training rows.

    Row numbers count from 0 on either side. Identical rows are always found, near ones with the probability above;
    same rows, same answer. Rows of fewer than 5 tokens have themselves as their only 5-gram.
    """
    digests = np.fromiter(
        (int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest()) for ids in rows), np.uint64, len(rows)
    )
    _, first_of_all, group = np.unique(digests, return_index=True, return_inverse=True)
    in_eval = first_of_all[group[num_eval:]]  # of training rows; below num_eval where a held-out row is the same
    _, first, group = np.unique(digests[num_eval:], return_index=True, return_inverse=True)
    pool = np.concatenate([np.sort(first_of_all[first_of_all < num_eval]), num_eval + np.sort(first)])  # one a content
    within, across = _near(rows, pool, num_eval)
    exact = [(row, int(other), 1.0) for row, other in enumerate(first[group]) if other != row]
    exact_eval = [(row, int(other), 1.0) for row, other in enumerate(in_eval) if other < num_eval]
    near_eval = [
        (row, *across[original])
        for row, original in enumerate(first[group].tolist())
        if original in across and in_eval[row] >= num_eval
    ]
    near = [(row, other - num_eval, value) for row, (other, value) in sorted(within.items())]
    return Copies(exact, near, exact_eval, near_eval)


def jaccard(one: np.ndarray, other: np.ndarray, common: np.ndarray | None = None) -> float:
    """Size of the intersection over size of the union of two rows' 5-gram sets, without the hashes in ``common``."""
    first, second = (np.unique(_grams([ids], common)[0]) for ids in (one, other))
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _near(rows: Sequence[np.ndarray], pool: np.ndarray, num_eval: int) -> tuple[dict, dict]:
    """Training row -> (near row as numbered in ``rows``, index): within training, and between it and eval."""
    common = _common_grams(rows)
    keys = _band_keys(rows, pool, common)
    within: dict[int, tuple[int, float]] = {}
    across: dict[int, tuple[int, float]] = {}
    for band in range(BANDS):
        order = np.argsort(keys[:, band], kind="stable")  # held-out rows come first among equal keys
        same = np.diff(keys[order, band]) == 0
        together = np.flatnonzero(np.append(same, False) | np.insert(same, 0, False))
        numbers, key = pool[order[together]], keys[order[together], band]
        places = np.arange(len(numbers))
        starts = np.searchsorted(key, key)
        for step in range(1, min(NEIGHBOURS, (places - starts).max(initial=0)) + 1):
            for found, others in ((within, places - step), (across, starts + step - 1)):
                held_out = numbers[others] < num_eval
                fits = (starts <= others) & (others < places) & (numbers >= num_eval) & (held_out == (found is across))
                for row, other in zip(numbers[fits].tolist(), numbers[others[fits]].tolist(), strict=True):
                    if row - num_eval in found:
                        continue
                    value = jaccard(rows[row], rows[other], common)
                    if value >= THRESHOLD:
                        found[row - num_eval] = other, value
    return within, across


def _band_keys(rows: Sequence[np.ndarray], pool: np.ndarray, common: np.ndarray) -> np.ndarray:
    """One uint32 a row of ``pool`` and band; equal for rows whose BAND_SIZE minima are equal."""
    keys = np.empty((len(pool), BANDS), np.uint32)
    factors = _mix(np.arange(1, BANDS * BAND_SIZE + 1, dtype=np.uint64)).reshape(BANDS, BAND_SIZE) | np.uint64(1)
    ends = np.cumsum([len(rows[number]) for number in pool])
    for part in np.split(np.arange(len(pool)), np.flatnonzero(np.diff(ends // CHUNK_TOKENS)) + 1):
        grams, starts = _grams([rows[number] for number in pool[part]], common)
        for band in range(BANDS):
            key = np.zeros(len(part), np.uint64)
            for factor in factors[band]:
                key = _mix(key ^ np.minimum.reduceat(grams * factor, starts))
            keys[part, band] = key >> np.uint64(32)
    return keys


def _common_grams(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Hashes of the 5-grams that most rows have: those of the template and of a system prompt."""
    if len(rows) < COMMON_ROWS:
        return np.empty(0, np.uint64)
    sample = np.linspace(0, len(rows) - 1, min(SAMPLE_ROWS, len(rows))).astype(int)
    values, counts = np.unique(
        np.concatenate([np.unique(_grams([rows[number]])[0]) for number in sample]), return_counts=True
    )
    return values[counts > COMMON_SHARE * len(sample)]


def _grams(rows: list[np.ndarray], common: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64, S) of all 5-grams of ``rows``, row after row, and where each row starts among them.

    Those in ``common`` are left out, except in a row that has no others.
    """
    lengths = np.array([len(ids) for ids in rows])
    gap = np.zeros(GRAM - 1, np.int32)
    ids = np.concatenate([part for row in rows for part in (row + 1, gap)]).astype(np.uint64)
    counts = np.maximum(lengths - GRAM + 1, 1)
    starts = np.cumsum(counts) - counts
    shift = np.cumsum(lengths + GRAM - 1) - (lengths + GRAM - 1) - starts
    places = np.arange(counts.sum()) + np.repeat(shift, counts)
    weights = _mix(np.arange(101, 101 + GRAM, dtype=np.uint64))
    hashes = _mix((np.lib.stride_tricks.sliding_window_view(ids, GRAM)[places] * weights).sum(axis=1, dtype=np.uint64))
    if common is not None and len(common):
        kept = ~np.isin(hashes, common)
        kept |= np.repeat(~np.logical_or.reduceat(kept, starts), counts)
        counts = np.add.reduceat(kept, starts, dtype=np.int64)
        hashes, starts = hashes[kept], np.cumsum(counts) - counts
    return hashes, starts


def _mix(values: np.ndarray) -> np.ndarray:
    """Scatter uint64 values over all 64 bits, one to one (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
