"""Validation of a collection's table configurations, and conversion of TorchRec's (without importing TorchRec)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig, check_per_id

_FORMATS = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8", "INT4": "int4"}
#: Unsupported fields, which change the rows or the meaning of ids.
_UNSUPPORTED = (
    "num_embeddings_post_pruning",
    "input_dim",
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
)


def from_torchrec(table: Any) -> Any:
    """Converts a TorchRec table configuration to this package's; other objects are returned unchanged.

    ``data_type`` becomes ``format`` and ``init_fn`` becomes ``init``. ``need_pos``, ``enable_embedding_update`` and
    ``stash_weights`` concern TorchRec's sharding and are ignored.

    Raises:
        ValueError: an unsupported data type or field, or an error of this package's configuration.
    """
    if not (hasattr(table, "data_type") and hasattr(table, "init_fn")):
        return table
    name = table.name
    for field in _UNSUPPORTED:
        if value := getattr(table, field, None):
            raise ValueError(f"table {name!r}: {field} must be left at its default, got {value!r}")
    data_type = getattr(table.data_type, "value", table.data_type)
    if data_type not in _FORMATS:
        raise ValueError(f"table {name!r}: data_type must be one of {', '.join(_FORMATS)}, got {data_type!r}")
    options = {
        "name": name,
        "feature_names": table.feature_names,
        "format": _FORMATS[data_type],
        "init": table.init_fn,
    }
    if hasattr(table, "pooling"):
        return EmbeddingBagConfig(table.num_embeddings, table.embedding_dim, pooling=table.pooling, **options)
    return EmbeddingConfig(table.num_embeddings, table.embedding_dim, **options)


def checked_tables(tables: Iterable[EmbeddingConfig], *, pooled: bool) -> list[EmbeddingConfig]:
    """The tables of a collection as a list of this package's configurations.

    Args:
        pooled: True if the collection's lookups are pooled.

    Raises:
        ValueError: ``tables`` has other objects, a compression does not support these lookups, or a TorchRec
            configuration has unsupported fields.
    """
    if not isinstance(tables, Iterable):
        raise ValueError(f"tables must be a list of rk.EmbeddingBagConfig or rk.EmbeddingConfig, got {tables!r}")
    tables = [from_torchrec(table) for table in tables]
    for i, table in enumerate(tables):
        if not isinstance(table, EmbeddingConfig):
            raise ValueError(f"tables[{i}] must be an rk.EmbeddingBagConfig or rk.EmbeddingConfig, got {table!r}")
        if not pooled:
            check_per_id(table)
    return tables
