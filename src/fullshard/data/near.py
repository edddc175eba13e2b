"""Exact and near copies among rows: 5-grams of token ids, MinHash bands for candidates, then the true Jaccard index.

MinHash: Broder 1997; bands: Indyk and Motwani 1998. About 100 bytes of memory a row, beside what holds the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np

THRESHOLD = 0.8  # Jaccard index of the 5-gram sets of two near copies
GRAM = 5
BANDS, BAND_SIZE = 16, 5  # a pair at the threshold shares a band with probability 1 - (1 - 0.8**5)**16 = 99.8%
NEIGHBOURS = 32  # rows of the same band that a row is compared with
COMMON_ROWS, COMMON_SHARE = 100, 0.5  # from so many rows on, a 5-gram in more than this share is template, not content
SAMPLE_ROWS = 1000  # in which that share is measured
WEIGHTS = 0x9E3779B97F4A7C15 ** np.arange(1, GRAM + 1, dtype=np.uint64)  # of a 5-gram's places; odd
NONE = np.empty(0, np.uint64)
Pair = tuple[int, int, float]  # a training row, the row that it repeats, their Jaccard index


def find_copies(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray] = ()) -> dict[str, list[Pair]]:
    """Copies among rows of int32 token ids; at most one pair a training row and kind.

    Kinds: ``exact`` (of an earlier training row), ``near`` (of a training row) and, with held-out rows, ``exact_eval``
    and ``near_eval`` (of one of these). What is exact is not also near. Identical rows are always found, near ones
    with the probability above; same rows, same answer. A row of fewer than 5 tokens is its own only 5-gram.
    """
    num_eval = len(held_out)
    hashes = (blake2b(ids.tobytes(), digest_size=8).digest() for ids in chain(held_out, train))
    digests = np.fromiter(map(int.from_bytes, hashes), np.uint64, num_eval + len(train))
    originals, of_all = _first_equal(digests[num_eval:]), _first_equal(digests)
    in_eval = of_all[num_eval:]  # below num_eval where a held-out row is the same
    pool = np.unique(np.concatenate([of_all[:num_eval], originals + num_eval]))  # one row a content and side
    within, across = _near(train, held_out, pool)
    repeated = np.flatnonzero(originals != np.arange(len(originals)))
    near_eval = np.flatnonzero(np.isin(originals, list(across)) & (in_eval >= num_eval))
    found = {
        "exact": [(int(row), int(originals[row]), 1.0) for row in repeated],
        "near": [(row, *within[row]) for row in sorted(within)],
        "exact_eval": [(int(row), int(in_eval[row]), 1.0) for row in np.flatnonzero(in_eval < num_eval)],
        "near_eval": [(int(row), *across[originals[row]]) for row in near_eval],
    }
    return found if num_eval else {kind: found[kind] for kind in ("exact", "near")}


def _first_equal(digests: np.ndarray) -> np.ndarray:
    """The number of the first row of the same content, for each row."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return first.astype(np.int32)[group]


def jaccard(one: np.ndarray, other: np.ndarray, common: np.ndarray = NONE) -> float:
    """Size of the intersection over size of the union of two rows' 5-gram sets, without the hashes in ``common``."""
    first, second = _grams(one, common), _grams(other, common)
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _near(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray], pool: np.ndarray) -> tuple[dict, dict]:
    """Training row -> (near row, Jaccard index): within the training rows, and with held-out ones.

    ``pool``: the rows to compare, numbered with the held-out ones in front.
    """
    num_eval = len(held_out)

    def ids_of(row: int) -> np.ndarray:
        return held_out[row] if row < num_eval else train[row - num_eval]

    common = NONE
    if len(pool) >= COMMON_ROWS:  # the 5-grams of the template and of a system prompt
        sample = pool[np.linspace(0, len(pool) - 1, min(SAMPLE_ROWS, len(pool))).astype(int)].tolist()
        values, counts = np.unique(np.concatenate([_grams(ids_of(row)) for row in sample]), return_counts=True)
        common = values[counts > COMMON_SHARE * len(sample)]
    keys = np.empty((len(pool), BANDS), np.uint32)
    factors = _mix(np.arange(1, BANDS * BAND_SIZE + 1, dtype=np.uint64)) | np.uint64(1)
    for place, row in enumerate(pool.tolist()):
        minima = (_grams(ids_of(row), common) * factors[:, None]).min(axis=1).reshape(BANDS, BAND_SIZE)
        keys[place] = _mix(_mix(minima) @ factors[:BAND_SIZE]) >> np.uint64(32)
    within: dict[int, tuple[int, float]] = {}
    across: dict[int, tuple[int, float]] = {}
    for band in keys.T:
        order = np.argsort(band, kind="stable")  # held-out rows come first among equal keys
        same = np.diff(band[order]) == 0
        order = order[np.append(same, False) | np.insert(same, 0, False)]
        rows, places, starts = pool[order], np.arange(len(order)), np.searchsorted(band[order], band[order])
        for step in range(1, min(NEIGHBOURS, (places - starts).max(initial=0)) + 1):
            for found, others in ((within, places - step), (across, starts + step - 1)):
                side = (rows[others] < num_eval) == (found is across)
                fits = np.flatnonzero((starts <= others) & (others < places) & (rows >= num_eval) & side)
                for row, other in zip(rows[fits].tolist(), rows[others[fits]].tolist(), strict=True):
                    if row - num_eval not in found:
                        value = jaccard(ids_of(row), ids_of(other), common)
                        if value >= THRESHOLD:
                            found[row - num_eval] = other - num_eval * (found is within), value
    return within, across


def _grams(ids: np.ndarray, common: np.ndarray = NONE) -> np.ndarray:
    """Hashes (uint64, unique) of a row's 5-grams; those in ``common`` are left out unless it has no others."""
    size = min(GRAM, len(ids))
    values = ids.astype(np.uint64) + np.uint64(1)
    count = len(ids) - size + 1
    hashes = np.unique(_mix(sum(values[place : place + count] * WEIGHTS[place] for place in range(size))))
    own = hashes[~np.isin(hashes, common, assume_unique=True)]
    return own if len(own) else hashes


def _mix(values: np.ndarray) -> np.ndarray:
    """Scatter uint64 values over all 64 bits, one to one (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
