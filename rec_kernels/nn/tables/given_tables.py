"""The tables that a collection is given: this package's configurations or TorchRec's, which is not imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig, check_per_id

_FORMATS = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8", "INT4": "int4"}
#: These fields change the rows or what ids mean, and are not offered.
_UNSUPPORTED = (
    "num_embeddings_post_pruning",
    "input_dim",
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
)


def from_torchrec(table: Any) -> Any:
    """The configuration of this package for one of TorchRec's; anything else is returned as it is.

    ``data_type`` is the row format, ``init_fn`` the ``init``. ``need_pos``, ``enable_embedding_update`` and
    ``stash_weights`` concern TorchRec's sharding and are not looked at.

    Raises:
        ValueError: a data type that is no row format here, a field that is not offered, or what the configuration of
            this package refuses.
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
    """The tables of a collection as a list, TorchRec's converted.

    Args:
        pooled: whether its lookups are.

    Raises:
        ValueError: they are none, one has a compression that is for lookups of the other kind, or one of TorchRec's has
            what is not offered here.
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
