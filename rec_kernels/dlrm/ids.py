"""From the values of a categorical column to rows of a table."""

from __future__ import annotations

import numpy as np
import pandas as pd


def ids_by_appearance(values: np.ndarray, train_rows: int) -> tuple[np.ndarray, int]:
    """Ids 1, 2, ... in order of first appearance; 0 for a value whose first appearance is a test row.

    Args:
        values: [N], any dtype that pandas can factorise.
        train_rows: rows [0, train_rows) are for training, 1 or more.

    Returns:
        int64 [N], and the rows of the table, row 0 included.
    """
    codes = pd.factorize(values)[0]
    seen = int(codes[:train_rows].max()) + 1
    return np.where(codes < seen, codes + 1, 0), seen + 1


def mix64(keys: np.ndarray) -> np.ndarray:
    """A well-mixed 64-bit number for each key: the output of SplitMix64 whose state is the key.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.

    Args:
        keys: uint64, any shape.

    Returns:
        uint64 of the same shape; different keys give different numbers.
    """
    # Arrays of integers wrap around without a warning, as the method wants it.
    mixed = np.asarray(keys, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
