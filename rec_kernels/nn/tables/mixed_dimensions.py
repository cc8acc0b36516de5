"""``mixed_dimensions`` chooses embedding dimensions from the sizes of tables."""

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
    Systems" (arXiv:1909.11810): ``d = scale * n ** -temperature`` for a table of n rows. Rows of large tables are
    looked up rarely, so they get fewer columns. ``rk.grouped_projection`` projects the rows to ``base_dim`` columns.

    Args:
        num_embeddings: rows of each table, at least 1.
        base_dim: the model's embedding dimension, at least 1; the maximum, and the smallest table's dimension.
        temperature: exponent of the power law, at least 0; 0 gives all tables the same dimension.
        threshold: tables with at most this many rows keep ``base_dim``.
        power_of_two: round to the nearest power of two, on a logarithmic scale, instead of the nearest integer.
        budget: total parameters of all tables, before rounding and the limits ``base_dim`` and ``threshold``: ``scale``
            is ``budget / sum(n ** (1 - temperature))``. None: the smallest table has ``base_dim`` columns.

    Returns:
        The dimensions, from 1 to ``base_dim``, in the order of ``num_embeddings``. ``base_dim`` itself is never rounded
        to a power of two.

    Raises:
        ValueError: no tables, a value out of range, or an argument that is not a number; the message names it.
    """
    num_embeddings = positive_integers("num_embeddings", num_embeddings)
    base_dim, threshold = positive_integer("base_dim", base_dim), integer_from(0, "threshold", threshold)
    if not num_embeddings:
        raise ValueError("num_embeddings must name at least one table, got none")
    if not 0 <= number_of(temperature) < math.inf:
        raise ValueError(f"temperature = {temperature!r} must be at least 0 and finite")
    if budget is not None and not 0 < number_of(budget) < math.inf:
        raise ValueError(f"budget = {budget!r} must be above 0 and finite")
    # Relative to the smallest table, to avoid overflow.
    shares = [(min(num_embeddings) / n) ** number_of(temperature) for n in num_embeddings]
    if budget is None:
        scale = base_dim
    else:
        scale = number_of(budget) / sum(n * share for n, share in zip(num_embeddings, shares, strict=True))
    dims = []
    for n, share in zip(num_embeddings, shares, strict=True):
        dim = max(scale * share, 1.0)
        rounded = 2 ** round(math.log2(dim)) if power_of_two else round(dim)
        dims.append(base_dim if n <= threshold else min(rounded, base_dim))
    return dims
