"""What the features of a collection look up: the parts of their tables, and where these go in the ops' output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rec_kernels.nn.tables import EmbeddingConfig, StoredTable
from rec_kernels.ops.table_layout import IdPartitions


@dataclass(frozen=True)
class PartLookup:
    """A stored table, by its number, and the first column of the feature's that it goes to."""

    stored: int
    column: int


@dataclass(frozen=True)
class FeatureLookup:
    """A feature: the parts of its table, and ``width`` columns of the ops' output from ``column`` on.

    The ops combine the parts; or ("concat", and parts that are pooled first) leave them side by side.
    """

    table: EmbeddingConfig
    parts: list[PartLookup]
    combine: str
    column: int
    width: int

    def __getstate__(self) -> dict:
        return {**self.__dict__, "table": self.table.without_init()}

    @property
    def multiplies(self) -> bool:
        """Whether the ops multiply rows of its parts."""
        return self.combine == "mult" and len(self.parts) > 1

    @property
    def is_combined_later(self) -> bool:
        """Whether the pooled parts, side by side in the ops' output, are still to be added or multiplied."""
        compression = self.table.compression
        return compression is not None and compression.compose == "pooled" and compression.combine != "concat"

    def combined(self, block: Tensor) -> Tensor:
        """[B, width] of the ops' output with its pooled parts added or multiplied, in their order."""
        if not self.is_combined_later:
            return block
        first, *others = block.split(self.table.embedding_dim, dim=1)
        for other in others:
            first = first * other if self.table.compression.combine == "mult" else first + other
        return first


def lookups(tables: Sequence[EmbeddingConfig]) -> list[FeatureLookup]:
    """Of each feature, in the order of the tables."""
    features, column, stored = [], 0, 0
    for table in tables:
        compression = table.compression
        combined = compression is not None and compression.compose == "per_id" and compression.combine != "concat"
        parts, width = [], 0
        for part in table.stored:
            parts.append(PartLookup(stored, width))
            stored, width = stored + 1, 0 if combined else width + part.embedding_dim
        width = table.embedding_dim if combined else width
        for _ in table.feature_names:
            features.append(FeatureLookup(table, parts, compression.combine if combined else "concat", column, width))
            column += width
    return features


def partitions(features: list[FeatureLookup], stored: list[StoredTable]) -> IdPartitions:
    """How ids find rows."""
    parts = [stored[p.stored] for feature in features for p in feature.parts]
    return IdPartitions(
        starts=list(itertools.accumulate((len(feature.parts) for feature in features), initial=0)),
        divisors=[t.part.divisor if t.part else 1 for t in parts],
        moduli=[t.part.modulus if t.part else t.num_embeddings for t in parts],
        id_limits=[feature.table.num_embeddings for feature in features],
        combine=[feature.combine for feature in features],
    )
