"""Near copies among rows: 5-grams of token ids, MinHash (Broder 1997) for candidates, then the true Jaccard index."""

from collections.abc import Callable
import numpy as np
from fullshard.data.pack import scatter

GRAM, THRESHOLD = 5, 0.8  # tokens; Jaccard index of two near copies' sets of 5-grams
BANDS, BAND_SIZE = 16, 5  # a pair at the threshold shares a band with probability 1 - (1 - 0.8**5)**16 = 99.8%
NEIGHBOURS = 32  # rows just before a row in a band, and first rows of that band, that the row is compared with
COMMON_ROWS, COMMON_SHARE = 100, 0.5  # from so many rows on, what more than this share of rows has is template
WEIGHTS = 0x9E3779B97F4A7C15 ** np.arange(1, GRAM + 1, dtype=np.uint64)  # of the places in a 5-gram; odd
NONE = np.empty(0, np.uint64)


def near_copies(ids: Callable[[int], np.ndarray], num_rows: int, num_eval: int = 0) -> list[tuple[int, int, float]]:
    """Training rows (from ``num_eval`` on) like another: (row, other, Jaccard index), in order; at most one pair with a
    held-out row, one with an earlier training row. ``ids``: of a row (int32, at least one). Memory: 100 bytes a row."""
    sample = np.linspace(0, num_rows - 1, min(1000, num_rows)).astype(int).tolist()
    values, counts = np.unique(np.concatenate([_grams(ids(row)) for row in sample]), return_counts=True)
    common = values[counts > COMMON_SHARE * len(sample)] if num_rows >= COMMON_ROWS else NONE
    keys = np.empty((num_rows, BANDS), np.uint32)
    factors = scatter(np.arange(1, BANDS * BAND_SIZE + 1, dtype=np.uint64)) | np.uint64(1)
    for row in range(num_rows):
        minima = (_grams(ids(row), common) * factors[:, None]).min(axis=1).reshape(BANDS, BAND_SIZE)
        keys[row] = scatter(scatter(minima) @ factors[:BAND_SIZE]) >> np.uint64(32)
    found: dict[tuple[int, bool], tuple[int, float]] = {}
    for band in keys.T:
        rows = np.argsort(band, kind="stable")
        same = np.diff(band[rows]) == 0
        rows = rows[np.append(same, False) | np.insert(same, 0, False)]
        places, starts = np.arange(len(rows)), np.searchsorted(band[rows], band[rows])
        for step in range(1, min(NEIGHBOURS, (places - starts).max(initial=0)) + 1):
            for others in (starts + step - 1, places - step):
                fits = (starts <= others) & (others < places) & (rows >= num_eval)
                for row, other in zip(rows[fits].tolist(), rows[others[fits]].tolist(), strict=True):
                    key = row, other < num_eval
                    if key not in found and (value := jaccard(ids(row), ids(other), common)) >= THRESHOLD:
                        found[key] = other, value
    return [(row, other, value) for (row, _), (other, value) in sorted(found.items())]


def jaccard(one: np.ndarray, other: np.ndarray, common: np.ndarray = NONE) -> float:
    """Size of the intersection over size of the union of two rows' 5-gram sets, without the hashes in ``common``."""
    first, second = _grams(one, common), _grams(other, common)
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _grams(ids: np.ndarray, common: np.ndarray = NONE) -> np.ndarray:
    """Hashes (uint64, unique) of a row's 5-grams (of fewer tokens: one); not those in ``common``, if it has others."""
    size = min(GRAM, len(ids))
    count, values = len(ids) - size + 1, ids.astype(np.uint64) + np.uint64(1)
    hashes = np.unique(scatter(sum(values[place : place + count] * WEIGHTS[place] for place in range(size))))
    own = hashes[~np.isin(hashes, common, assume_unique=True)] if len(common) else hashes
    return own if len(own) else hashes
