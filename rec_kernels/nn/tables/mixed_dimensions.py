"""Widths of embedding tables by how many rows they have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rec_kernels.nn.arguments import integer_from, number_of, positive_integer, positive_integers


def mixed_dimensions(
    num_embeddings: Sequence[int],
    base_dim: int,
    temperature: float,
    *,
    threshold: int = 200,
    power_of_two: bool = False,
    budget: float | None = None,
) -> list[int]:
    """Chooses an embedding dimension for each table: the more rows, the fewer columns.

    The power law of A. Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation
    Systems" (arXiv:1909.11810): ``d = scale * n ** -temperature`` for a table of n rows. What a row of the large tables
    loses is seldom looked up. ``rk.grouped_projection`` brings the rows back to ``base_dim`` columns.

    Args:
        num_embeddings: rows of each table, at least 1.
        base_dim: the width that the model wants, at least 1: of the smallest table, and the most of any.
        temperature: how fast the widths fall, at least 0, which gives all tables the same width.
        threshold: tables of at most so many rows keep ``base_dim``: they cost next to nothing.
        power_of_two: take the nearest power of two, on a logarithmic scale, instead of the nearest whole number.
        budget: parameters of all tables, before rounding, ``base_dim`` and ``threshold`` change it: ``scale`` is then
            ``budget / sum(n ** (1 - temperature))``. None: the smallest table's width is ``base_dim``.

    Returns:
        The widths, from 1 to ``base_dim``, in the order of ``num_embeddings``. A ``base_dim`` that is no power of two
        stays what it is.

    Raises:
        ValueError: no tables, a number out of range, or something else than a number; the message names it.
    """
    num_embeddings = positive_integers("num_embeddings", num_embeddings)
    base_dim, threshold = positive_integer("base_dim", base_dim), integer_from(0, "threshold", threshold)
    if not num_embeddings:
        raise ValueError("num_embeddings must name at least one table, got none")
    if not 0 <= number_of(temperature) < math.inf:
        raise ValueError(f"temperature = {temperature!r} must be at least 0 and finite")
    if budget is not None and not 0 < number_of(budget) < math.inf:
        raise ValueError(f"budget = {budget!r} must be above 0 and finite")
    # Relative to the smallest table, so that no power is too large for a float.
    shares = [(min(num_embeddings) / n) ** number_of(temperature) for n in num_embeddings]
    if budget is None:
        scale = base_dim
    else:
        scale = number_of(budget) / sum(n * share for n, share in zip(num_embeddings, shares, strict=True))
    dims = []
    for n, share in zip(num_embeddings, shares, strict=True):
        wanted = max(scale * share, 1.0)
        rounded = 2 ** round(math.log2(wanted)) if power_of_two else round(wanted)
        dims.append(base_dim if n <= threshold else min(rounded, base_dim))
    return dims
