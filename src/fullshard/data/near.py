"""Exact and near copies among rows: 5-grams of token ids, MinHash bands for candidates, then the true Jaccard index.

MinHash: Broder 1997; bands: Indyk and Motwani 1998. About 100 bytes of memory a row, beside what holds the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np

THRESHOLD = 0.8  # Jaccard index of the 5-gram sets of two near copies
GRAM = 5
BANDS, BAND_SIZE = 16, 5  # a pair at the threshold shares a band with probability 1 - (1 - 0.8**5)**16 = 99.8%
NEIGHBOURS = 32  # rows of the same band that a row is compared with
COMMON_ROWS, COMMON_SHARE = 100, 0.5  # from so many rows on, a 5-gram in more than this share is template, not content
SAMPLE_ROWS = 1000  # in which that share is measured
CHUNK_TOKENS = 100_000
Pair = tuple[int, int, float]  # a training row, the row that it repeats, their Jaccard index
_Ids = Callable[[int], np.ndarray]  # token ids by row number, held-out rows first


def find_copies(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray] = ()) -> dict[str, list[Pair]]:
    """Copies among rows of int32 token ids; at most one pair a training row and kind.

    Kinds: ``exact`` (of an earlier training row) and ``near`` (of a training row); ``exact_eval`` and ``near_eval`` (of
    a held-out row). What is exact is not also near. Identical rows are always found, near ones with the probability
    above; same rows, same answer. A row of fewer than 5 tokens is its own only 5-gram.
    """
    num_eval = len(held_out)
    hashes = (blake2b(ids.tobytes(), digest_size=8).digest() for ids in chain(held_out, train))
    digests = np.fromiter(map(int.from_bytes, hashes), np.uint64, num_eval + len(train))
    originals, of_all = _first_equal(digests[num_eval:]), _first_equal(digests)
    in_eval = of_all[num_eval:]  # below num_eval where a held-out row is the same
    pool = np.unique(np.concatenate([of_all[:num_eval], originals + num_eval]))  # one row a content and side
    within, across = _near(lambda n: held_out[n] if n < num_eval else train[n - num_eval], pool, num_eval)
    repeated = np.flatnonzero(originals != np.arange(len(originals)))
    near_eval = np.flatnonzero(np.isin(originals, list(across)) & (in_eval >= num_eval))
    return {
        "exact": [(int(row), int(originals[row]), 1.0) for row in repeated],
        "near": [(row, *within[row]) for row in sorted(within)],
        "exact_eval": [(int(row), int(in_eval[row]), 1.0) for row in np.flatnonzero(in_eval < num_eval)],
        "near_eval": [(int(row), *across[originals[row]]) for row in near_eval],
    }


def _first_equal(digests: np.ndarray) -> np.ndarray:
    """The number of the first row of the same content, for each row."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return first.astype(np.int32)[group]


def jaccard(one: np.ndarray, other: np.ndarray, common: np.ndarray | None = None) -> float:
    """Size of the intersection over size of the union of two rows' 5-gram sets, without the hashes in ``common``."""
    first, second = (np.unique(_grams([ids], common)[0]) for ids in (one, other))
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _near(ids: _Ids, pool: np.ndarray, num_eval: int) -> tuple[dict, dict]:
    """Training row -> (near row, Jaccard index): within the training rows, and with held-out ones."""
    common = _common_grams(ids, pool)
    keys = _band_keys(ids, pool, common)
    within: dict[int, tuple[int, float]] = {}
    across: dict[int, tuple[int, float]] = {}
    for band in range(BANDS):
        order = np.argsort(keys[:, band], kind="stable")  # held-out rows come first among equal keys
        same = np.diff(keys[order, band]) == 0
        order = order[np.append(same, False) | np.insert(same, 0, False)]
        rows, places, starts = pool[order], np.arange(len(order)), np.searchsorted(keys[order, band], keys[order, band])
        for step in range(1, min(NEIGHBOURS, (places - starts).max(initial=0)) + 1):
            for found, others in ((within, places - step), (across, starts + step - 1)):
                side = (rows[others] < num_eval) == (found is across)
                fits = np.flatnonzero((starts <= others) & (others < places) & (rows >= num_eval) & side)
                for row, other in zip(rows[fits].tolist(), rows[others[fits]].tolist(), strict=True):
                    if row - num_eval not in found and (value := jaccard(ids(row), ids(other), common)) >= THRESHOLD:
                        found[row - num_eval] = other - num_eval * (found is within), value
    return within, across


def _band_keys(ids: _Ids, pool: np.ndarray, common: np.ndarray) -> np.ndarray:
    """One uint32 a row of ``pool`` and band; equal for rows whose BAND_SIZE minima are equal."""
    keys = np.empty((len(pool), BANDS), np.uint32)
    factors = _mix(np.arange(1, BANDS * BAND_SIZE + 1, dtype=np.uint64)).reshape(BANDS, BAND_SIZE) | np.uint64(1)
    ends = np.cumsum(np.fromiter((len(ids(row)) for row in pool), np.int64, len(pool)))
    for part in np.split(np.arange(len(pool)), np.flatnonzero(np.diff(ends // CHUNK_TOKENS)) + 1):
        grams, starts = _grams([ids(row) for row in pool[part].tolist()], common)
        for band in range(BANDS):
            key = np.zeros(len(part), np.uint64)
            for factor in factors[band]:
                key = _mix(key ^ np.minimum.reduceat(grams * factor, starts))
            keys[part, band] = key >> np.uint64(32)
    return keys


def _common_grams(ids: _Ids, pool: np.ndarray) -> np.ndarray:
    """Hashes of the 5-grams that most rows have: those of the template and of a system prompt."""
    if len(pool) < COMMON_ROWS:
        return np.empty(0, np.uint64)
    sample = pool[np.linspace(0, len(pool) - 1, min(SAMPLE_ROWS, len(pool))).astype(int)]
    grams = np.concatenate([np.unique(_grams([ids(row)])[0]) for row in sample.tolist()])
    values, counts = np.unique(grams, return_counts=True)
    return values[counts > COMMON_SHARE * len(sample)]


def _grams(rows: list[np.ndarray], common: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of all 5-grams of ``rows``, row after row, and where each row starts among them.

    Those in ``common`` are left out, except in a row that has no others.
    """
    lengths = np.array([len(row) for row in rows])
    gap = np.zeros(GRAM - 1, np.int32)  # so that no 5-gram reaches into the next row
    ids = np.concatenate([part for row in rows for part in (row + 1, gap)]).astype(np.uint64)
    counts = np.maximum(lengths - GRAM + 1, 1)
    starts = np.cumsum(counts) - counts
    begins = np.cumsum(lengths + len(gap)) - lengths - len(gap)
    places = np.arange(counts.sum()) + np.repeat(begins - starts, counts)
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
