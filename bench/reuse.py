"""Histograms of row reuse within a batch: two tables fitted to histograms that Meta published.

Source: the locality statistics beside the embedding lookup traces of facebookresearch/dlrm_datasets (MIT licence), of
one batch each. 2021: 856 tables, batch 65,536, 887,017,990 ids of 128,435,723 distinct rows. 2022: 788 tables, batch
131,072, 1,405,163,864 ids of 110,259,238 distinct rows. For rows that a batch names 1, 2, 3 to 4, ... 16,385 to
32,768 and more times they give the share of distinct rows and the share of ids, to three decimals, all tables
together.

Derivation of a class's count, the mean over its rows: share of ids / share of rows * ids / distinct rows, where the
share of rows is 0.01 or more; where it is less, and its three decimals say little, the geometric mean of the class's
bounds (of the last, 32,768 and 65,536). Ids drawn from these tables are synthetic: the histograms have no information
about single tables, positions of rows, or reuse between batches.
"""

from __future__ import annotations

import numpy as np

#: Counts of the last classes, by their bounds.
_LAST = (181.0, 362.0, 724.1, 1448.2, 2896.3, 5792.6, 11585.2, 23170.5, 46341.0)
#: Mean occurrences per batch of a class of rows -> share of the batch's ids that refer to these rows.
REUSE_2021 = dict(
    zip(
        (1.0, 2.0, 3.4, 6.2, 11.6, 22.4, 45.8, 90.5, *_LAST),
        (
            *(0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058),
            *(0.052, 0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019),
        ),
        strict=True,
    )
)
REUSE_2022 = dict(
    zip(
        (1.0, 2.0, 3.4, 6.3, 11.9, 22.5, 43.5, 89.2, *_LAST),
        (
            *(0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070),
            *(0.059, 0.054, 0.040, 0.072, 0.064, 0.047, 0.021, 0.017, 0.076),
        ),
        strict=True,
    )
)
#: Rows with more occurrences are the same in every batch; others are redrawn. This is an assumption, because the
#: histograms describe single batches.
STEADY_COUNT = 8


def reused_ids(reuse: dict[float, float], ids: int, place: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws the ids of one table's batch, in random order.

    A class whose ids are fewer than its count is one row: small batches keep the shares of ids, and lose some reuse.

    Args:
        reuse: count -> share of ids.
        ids: how many.
        place: [E] a permutation of the table's rows; the most frequent classes have the first.
        rng: draws the rows that are not steady, and the order.

    Returns:
        [ids] int64.

    Raises:
        ValueError: the table has fewer rows than a batch must name.
    """
    ends = np.rint(np.cumsum(list(reuse.values())) / sum(reuse.values()) * ids).astype(np.int64)
    of_class = np.diff(ends, prepend=0)
    rows = [min(n, max(1, round(n / count))) for n, count in zip(of_class, reuse, strict=True)]
    steady = sum(n for n, count in zip(rows, reuse, strict=True) if count > STEADY_COUNT)
    if sum(rows) > len(place):
        raise ValueError(f"ids = {ids} name {sum(rows)} rows, but the table has {len(place)}")
    fresh = rng.choice(place[steady:], sum(rows) - steady, replace=False)
    # The last class is the most frequent one.
    chosen = np.concatenate([fresh, place[:steady][::-1]])
    first = np.cumsum([0, *rows[:-1]])
    drawn = [chosen[start + np.arange(n) % max(many, 1)] for start, n, many in zip(first, of_class, rows, strict=True)]
    return rng.permutation(np.concatenate(drawn))
