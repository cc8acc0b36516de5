"""Tables of many ids in few numbers: ids that share rows, and rows made of those of small tables.

Sources: H.-J. M. Shi, D. Mudigere, M. Naumov and J. Yang, "Compositional Embeddings Using Complementary Partitions for
Memory-Efficient Recommendation Systems", KDD 2020 (arXiv 1909.02107); of ``MixedDimension`` A. Ginart, M. Naumov, D.
Mudigere, J. Yang and J. Zou, "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation Systems",
2019 (arXiv 1909.11810).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from rec_kernels.nn.arguments import check_choice, is_list, positive_integer, positive_integers
from rec_kernels.ops.layout_records import COMBINE, MAX_PARTS

# Ids that are looked at one by one to find two with the same rows.
_LOOKED_AT = 1 << 22


@dataclass(frozen=True)
class Part:
    """One of the tables that stand for a large one: id -> row (id // divisor) % modulus of [num_embeddings, dim]."""

    divisor: int
    modulus: int
    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True)
class Compression(ABC):
    """Base of the ways to keep a table in fewer numbers."""

    _instead: ClassVar[str] = ""  # advice where parts side by side cannot be of equal width

    @abstractmethod
    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        """(divisor, modulus) of each part, for ids in [0, num_embeddings)."""

    def dims(self, count: int, embedding_dim: int) -> list[int]:
        """Columns of each of ``count`` parts.

        Raises:
            ValueError: they do not give ``embedding_dim`` columns together.
        """
        if self.combine != "concat":
            return [embedding_dim] * count
        if embedding_dim % count:
            raise ValueError(
                f"embedding_dim = {embedding_dim} does not divide into {count} parts of equal width, side by side; "
                f"{self._instead}"
            )
        return [embedding_dim // count] * count

    @property
    def combine(self) -> str:
        """Combination of the parts into a row: "concat", "add" or "mult"."""
        return "concat"

    @property
    def compose(self) -> str:
        """ "per_id" if the parts of every id are combined, "pooled" if sums over bags are."""
        return "per_id"

    def bounds(self, count: int, bound: float) -> list[float]:
        """Bounds of the parts' first uniform numbers, for rows with the variance of numbers in +-bound."""
        if self.combine == "mult":  # numbers of variance 1 beside those in +-bound
            return [bound] + [math.sqrt(3)] * (count - 1)
        return [bound / math.sqrt(count) if self.combine == "add" else bound] * count

    def parts(self, num_embeddings: int, embedding_dim: int) -> list[Part]:
        """The tables that stand for one of [num_embeddings, embedding_dim].

        Raises:
            ValueError: there is none, or two ids would share all their rows.
        """
        partitions = self.partitions(num_embeddings)
        dims = self.dims(len(partitions), embedding_dim)
        return [
            Part(divisor, modulus, min(modulus, -(-num_embeddings // divisor)), dim)
            for (divisor, modulus), dim in zip(partitions, dims, strict=True)
        ]


@dataclass(frozen=True)
class Hash(Compression):
    """Ids share rows: id -> row id % buckets, the baseline of the others ("hashing trick").

    A table with ``num_embeddings=None`` takes every integer for an id, also negative ones, whose row is Python's and
    torch's ``id % buckets``, too: -1 has row ``buckets - 1``.

    Args:
        buckets: rows of the table, at least 1.

    Raises:
        ValueError: ``buckets`` is no integer, or below 1.
    """

    buckets: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", positive_integer("Hash: buckets", self.buckets))

    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        return [(1, self.buckets)]


def _check_combine(name: str, combine: str, compose: str) -> None:
    if combine not in COMBINE:
        raise ValueError(f"{name}: combine must be one of {', '.join(COMBINE)}, got {combine!r}")
    check_choice(f"{name}: compose", compose, ("per_id", "pooled"))


@dataclass(frozen=True)
class Partitions(Compression):
    """Every id has a row in each of several small tables, and no two ids have all of them in common.

    Args:
        pairs: (divisor, modulus) of one to four parts: an id's row is (id // divisor) % modulus.
        combine: "mult" or "add": parts of the table's ``embedding_dim`` columns each, multiplied or added; "concat":
            side by side, ``embedding_dim`` together.
        compose: "per_id": the parts of an id are combined, then bags pooled, as if the whole table were there.
            "pooled": the parts of a bag are pooled, then combined (what public implementations do); the same for bags
            of one id.
        columns: of the parts, for "concat"; None: as equal as can be, which must be equal.

    ``mixed_radix`` and ``chinese_remainder`` make the usual ones. Whether two ids collide is known when there is a
    table: ``rk.EmbeddingBagConfig`` raises ValueError, naming them.

    Raises:
        ValueError: too many pairs or none, a number below 1, an unknown name, or columns that are not asked for.
    """

    pairs: Sequence[tuple[int, int]]
    _: KW_ONLY
    combine: str = "mult"
    compose: str = "per_id"
    columns: Sequence[int] | None = None
    _instead = "columns can give each its own"

    def __post_init__(self) -> None:
        _check_combine("Partitions", self.combine, self.compose)
        if not is_list(self.pairs) or not 1 <= len(self.pairs) <= MAX_PARTS:
            raise ValueError(f"Partitions: there must be 1 to {MAX_PARTS} (divisor, modulus) pairs, got {self.pairs!r}")
        pairs = []
        for i, pair in enumerate(self.pairs):
            if not is_list(pair) or len(pair) != 2:
                raise ValueError(f"Partitions: pairs[{i}] must be (divisor, modulus), got {pair!r}")
            names = f"Partitions: pairs[{i}]: divisor", f"Partitions: pairs[{i}]: modulus"
            pairs.append(tuple(map(positive_integer, names, pair)))
        object.__setattr__(self, "pairs", tuple(pairs))
        if self.columns is not None:
            columns = positive_integers("Partitions: columns", self.columns)
            if self.combine != "concat" or len(columns) != len(pairs):
                raise ValueError(
                    "Partitions: columns must be one number for each pair, and are for combine='concat', got "
                    f"{list(columns)} and {self.combine!r}"
                )
            object.__setattr__(self, "columns", columns)

    @classmethod
    def mixed_radix(cls, radices: Sequence[int], **options: Any) -> Partitions:
        """Generalised quotient-remainder: the digits of an id, the lowest first. Their product must reach E.

        Args:
            radices: [m0, m1, ...]; the parts are (1, m0), (m0, m1), (m0 * m1, m2), ...
            options: ``combine``, ``compose``, ``columns``.
        """
        digits = positive_integers("radices", radices)
        return cls([(math.prod(digits[:i]), m) for i, m in enumerate(digits)], **options)

    @classmethod
    def chinese_remainder(cls, moduli: Sequence[int], **options: Any) -> Partitions:
        """Remainders by several numbers, whose least common multiple must reach E (pairwise coprime: their product).

        Args:
            moduli: of the parts (1, m).
            options: ``combine``, ``compose``, ``columns``.
        """
        return cls([(1, m) for m in positive_integers("moduli", moduli)], **options)

    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        check_complementary(self.pairs, num_embeddings)
        return list(self.pairs)

    def dims(self, count: int, embedding_dim: int) -> list[int]:
        if self.columns is None:
            return super().dims(count, embedding_dim)
        if sum(self.columns) != embedding_dim:
            raise ValueError(f"columns = {list(self.columns)} must add up to embedding_dim = {embedding_dim}")
        return list(self.columns)


@dataclass(frozen=True)
class QuotientRemainder(Compression):
    """Two tables: one that up to ``collisions`` ids share a row of, one that tells these apart.

    With m = ceil(E / collisions), an id has row id % m of the first, [m, D], and id // m of the second,
    [collisions, D]. (Public DLRM code has it the other way round; that is ``Partitions([(1, collisions), (collisions,
    m)])``.)

    Args:
        collisions: at least 1; E / collisions rows are kept, and a few.
        combine, compose: as ``rk.Partitions``'.

    Raises:
        ValueError: ``collisions`` is no integer, or below 1; an unknown name.
    """

    collisions: int = 4
    combine: str = "mult"
    compose: str = "per_id"
    _instead = "it must be even, or combine 'mult' or 'add'"

    def __post_init__(self) -> None:
        _check_combine("QuotientRemainder", self.combine, self.compose)
        object.__setattr__(self, "collisions", positive_integer("QuotientRemainder: collisions", self.collisions))

    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        first = -(-num_embeddings // self.collisions)
        return [(1, first), (first, self.collisions)]


@dataclass(frozen=True)
class MixedDimension(Compression):
    """Rows of fewer columns than the model wants: pooled as they are, then multiplied by a matrix [embedding_dim, dim].

    The matrix is a parameter, ``embedding_bags.<table>.projection``, for the optimizer of the dense parameters, also
    where the tables have a fused one. All features of a collection are projected in one call.

    Args:
        dim: columns of a row, at least 1; ``rk.mixed_dimensions`` chooses them. With ``embedding_dim`` of them there
            is no matrix.

    Raises:
        ValueError: ``dim`` is no integer, or below 1. More than ``embedding_dim``: ``rk.EmbeddingBagConfig`` raises.
    """

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", positive_integer("MixedDimension: dim", self.dim))

    @property
    def compose(self) -> str:
        return "pooled"

    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        return [(1, num_embeddings)]

    def dims(self, count: int, embedding_dim: int) -> list[int]:
        if self.dim > embedding_dim:
            raise ValueError(f"MixedDimension: dim = {self.dim} must be at most embedding_dim = {embedding_dim}")
        return [self.dim]


def known_modulus(pairs: Sequence[tuple[int, int]]) -> int:
    """The largest K that this finds for which the rows of an id tell id modulo K.

    From id mod K, and a divisor a of K, follow id mod a and (id // a) mod (K / a); with the row (id // a) mod m, it is
    known modulo lcm(K / a, m), and so the id modulo a times that. This finds mixed radices, remainders, and mixtures.
    """
    known, grows = 1, True
    while grows:
        grows = False
        for divisor, modulus in pairs:
            if known % divisor:
                continue
            more = divisor * math.lcm(known // divisor, modulus)
            grows, known = grows or more > known, more
    return known


def check_complementary(pairs: Sequence[tuple[int, int]], num_ids: int) -> None:
    """Raises ValueError, naming two ids, if two ids below ``num_ids`` have the same row in every part.

    Raises:
        ValueError: there are two such ids, or it cannot be told that there are none (more than 4 million ids, and
            partitions that are neither remainders nor digits).
    """
    if known_modulus(pairs) >= num_ids:
        return
    ids = np.arange(min(num_ids, _LOOKED_AT))
    rows = [ids // divisor % modulus for divisor, modulus in pairs]
    order = np.lexsort(rows)  # stable: of equal rows, the smaller id first
    same = np.all([row[order][1:] == row[order][:-1] for row in rows], axis=0)
    if not same.any():
        if num_ids <= _LOOKED_AT:
            return
        raise ValueError(
            f"partitions {list(pairs)} are not known to tell {num_ids} ids apart: use remainders whose least common "
            "multiple is as large, or the digits of mixed radices"
        )
    first = np.flatnonzero(same)[order[:-1][same].argmin()]
    shared = tuple(int(row[order[first]]) for row in rows)
    raise ValueError(
        f"partitions {list(pairs)} are not complementary for {num_ids} ids: ids {order[first]} and {order[first + 1]} "
        f"both have rows {shared}"
    )
