"""Table compression: ids that share rows, and rows composed from several small tables.

Sources: H.-J. M. Shi, D. Mudigere, M. Naumov and J. Yang, "Compositional Embeddings Using Complementary Partitions for
Memory-Efficient Recommendation Systems", KDD 2020 (arXiv 1909.02107); for ``MixedDimension`` A. Ginart, M. Naumov, D.
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

# check_complementary() enumerates at most this many ids when it looks for collisions.
_MAX_IDS_CHECKED = 1 << 22


@dataclass(frozen=True)
class Part:
    """One small table of a compressed table, [num_embeddings, embedding_dim]: id -> row (id // divisor) % modulus."""

    divisor: int
    modulus: int
    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True)
class Compression(ABC):
    """Base class of table compressions."""

    _width_advice: ClassVar[str] = ""  # appended to the error if concatenated parts cannot have equal width

    @abstractmethod
    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        """The (divisor, modulus) of each part, for ids in [0, num_embeddings)."""

    def dims(self, count: int, embedding_dim: int) -> list[int]:
        """Columns of each of ``count`` parts.

        Raises:
            ValueError: no choice of columns adds up to ``embedding_dim``.
        """
        if self.combine != "concat":
            return [embedding_dim] * count
        if embedding_dim % count:
            raise ValueError(
                f"embedding_dim = {embedding_dim} must be a multiple of {count}, for {count} concatenated parts "
                f"of equal width; {self._width_advice}"
            )
        return [embedding_dim // count] * count

    @property
    def combine(self) -> str:
        """How the parts are combined into a row: "concat", "add" or "mult"."""
        return "concat"

    @property
    def compose(self) -> str:
        """ "per_id": the parts of each id are combined before pooling. "pooled": the pooled parts are combined."""
        return "per_id"

    def bounds(self, count: int, bound: float) -> list[float]:
        """Bounds of the parts' uniform initialization that give combined rows the variance of uniform +-``bound``."""
        if self.combine == "mult":  # the other factors have variance 1
            return [bound] + [math.sqrt(3)] * (count - 1)
        return [bound / math.sqrt(count) if self.combine == "add" else bound] * count

    def parts(self, num_embeddings: int, embedding_dim: int) -> list[Part]:
        """The small tables that replace a table [num_embeddings, embedding_dim].

        Raises:
            ValueError: the sizes do not fit this compression, or two ids would share all their rows.
        """
        partitions = self.partitions(num_embeddings)
        dims = self.dims(len(partitions), embedding_dim)
        return [
            Part(divisor, modulus, min(modulus, -(-num_embeddings // divisor)), dim)
            for (divisor, modulus), dim in zip(partitions, dims, strict=True)
        ]


@dataclass(frozen=True)
class Hash(Compression):
    """Hashing trick: id -> row id % buckets, so ids share rows; the baseline for the other compressions.

    With ``num_embeddings=None`` every int64 is a valid id. The row of a negative id is ``id % buckets`` as in Python
    and torch: -1 has row ``buckets - 1``.

    Args:
        buckets: rows of the table, at least 1.

    Raises:
        ValueError: ``buckets`` is not an integer, or is below 1.
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
    """Complementary partitions: each id has one row in each of several small tables, and no two ids share all rows.

    Args:
        pairs: (divisor, modulus) of each of one to four parts: an id's row is (id // divisor) % modulus.
        combine: "mult" or "add": parts have ``embedding_dim`` columns each and are multiplied or added; "concat": parts
            are concatenated to ``embedding_dim`` columns.
        compose: "per_id": the parts of each id are combined, then pooled, as with the full table. "pooled": each part
            is pooled over the bag, then the parts are combined, as in public implementations. Both are equal for bags
            of one id.
        columns: columns of each part, for "concat"; None: equal widths.

    ``mixed_radix`` and ``chinese_remainder`` construct the usual partitions. Collisions depend on the number of ids:
    ``rk.EmbeddingBagConfig`` raises ValueError, naming two ids that collide.

    Raises:
        ValueError: no pairs or more than four, a value below 1, an unknown option, or ``columns`` that do not apply.
    """

    pairs: Sequence[tuple[int, int]]
    _: KW_ONLY
    combine: str = "mult"
    compose: str = "per_id"
    columns: Sequence[int] | None = None
    _width_advice = "columns can give each its own"

    def __post_init__(self) -> None:
        _check_combine("Partitions", self.combine, self.compose)
        if not is_list(self.pairs) or not 1 <= len(self.pairs) <= MAX_PARTS:
            raise ValueError(
                f"Partitions: pairs must have 1 to {MAX_PARTS} elements (divisor, modulus), got {self.pairs!r}"
            )
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
                    "Partitions: columns must have one width for each pair, and require combine='concat', got "
                    f"{list(columns)} and {self.combine!r}"
                )
            object.__setattr__(self, "columns", columns)

    @classmethod
    def mixed_radix(cls, radices: Sequence[int], **options: Any) -> Partitions:
        """Generalised quotient-remainder: one part per mixed-radix digit of the id, lowest first.

        Args:
            radices: [m0, m1, ...], with a product of at least E; the parts are (1, m0), (m0, m1), (m0 * m1, m2), ...
            options: ``combine``, ``compose``, ``columns``.
        """
        digits = positive_integers("radices", radices)
        return cls([(math.prod(digits[:i]), m) for i, m in enumerate(digits)], **options)

    @classmethod
    def chinese_remainder(cls, moduli: Sequence[int], **options: Any) -> Partitions:
        """One part per remainder of the id.

        Args:
            moduli: m of each part (1, m); their least common multiple must be at least E.
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
    """Quotient-remainder trick: a remainder table whose rows ``collisions`` ids share, and a small quotient table.

    With m = ceil(E / collisions), an id uses row id % m of the first table, [m, D], and row id // m of the second,
    [collisions, D]. Public DLRM code swaps the roles: ``Partitions([(1, collisions), (collisions, m)])``.

    Args:
        collisions: at least 1; about E / collisions + collisions rows are stored.
        combine, compose: see ``rk.Partitions``.

    Raises:
        ValueError: ``collisions`` is not an integer or is below 1; an unknown option.
    """

    collisions: int = 4
    combine: str = "mult"
    compose: str = "per_id"
    _width_advice = "use an even one, or combine 'mult' or 'add'"

    def __post_init__(self) -> None:
        _check_combine("QuotientRemainder", self.combine, self.compose)
        object.__setattr__(self, "collisions", positive_integer("QuotientRemainder: collisions", self.collisions))

    def partitions(self, num_embeddings: int) -> list[tuple[int, int]]:
        first = -(-num_embeddings // self.collisions)
        return [(1, first), (first, self.collisions)]


@dataclass(frozen=True)
class MixedDimension(Compression):
    """Mixed dimension: narrow rows are pooled, then projected to ``embedding_dim`` columns.

    The projection, [embedding_dim, dim], is the parameter ``embedding_bags.<table>.projection``. The optimizer of the
    dense parameters trains it, even if the tables have a fused optimizer. One call projects a collection's features.

    Args:
        dim: columns of a row, at least 1; ``rk.mixed_dimensions`` chooses them. There is no projection if it
            equals ``embedding_dim``.

    Raises:
        ValueError: ``dim`` is not an integer or is below 1. ``rk.EmbeddingBagConfig`` raises if it is above
            ``embedding_dim``.
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
    """A K such that an id's rows determine id mod K: the largest that the following rule derives.

    If id mod K is known and a divides K, then id mod a and (id // a) mod (K / a) are known. The row (id // a) mod m
    then gives (id // a) mod lcm(K / a, m), hence id mod (a * lcm(K / a, m)). The rule covers mixed radices, remainders
    and combinations of them.
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
    """Checks that no two ids below ``num_ids`` have the same row in every part.

    Raises:
        ValueError: two ids collide (the error names them), or the check is infeasible: more than 4 million ids, and
            partitions that are neither remainders nor digits.
    """
    if known_modulus(pairs) >= num_ids:
        return
    ids = np.arange(min(num_ids, _MAX_IDS_CHECKED))
    rows = [ids // divisor % modulus for divisor, modulus in pairs]
    order = np.lexsort(rows)  # stable: among equal rows, smaller ids come first
    same = np.all([row[order][1:] == row[order][:-1] for row in rows], axis=0)
    if not same.any():
        if num_ids <= _MAX_IDS_CHECKED:
            return
        raise ValueError(
            f"partitions {list(pairs)} cannot be shown to distinguish {num_ids} ids: use moduli with at least "
            "this least common multiple, or the digits of a mixed-radix number"
        )
    first = np.flatnonzero(same)[order[:-1][same].argmin()]
    shared = tuple(int(row[order[first]]) for row in rows)
    raise ValueError(
        f"partitions {list(pairs)} are not complementary for {num_ids} ids: ids {order[first]} and {order[first + 1]} "
        f"both have rows {shared}"
    )
