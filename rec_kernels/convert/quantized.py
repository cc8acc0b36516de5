"""Conversion of quantized inference tables: FBGEMM's module and TorchRec's quantized collections."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rec_kernels.convert.fbgemm_tables import features_of, output_dtype_of, pooling_of
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig
from rec_kernels.nn.tables.load_state import format_tensor
from rec_kernels.nn.tables.torchrec_configs import from_torchrec
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.row_formats_fbgemm import rows_from_fbgemm

_FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops_inference"
_TORCHREC = "torchrec.quant.embedding_modules"
_FORMATS = ("int8", "int4", "fp16", "fp32")
_OPTIONS = {"output_dtype", "bounds_check"}


def is_fbgemm_quantized(module: Any) -> bool:
    """True for FBGEMM's inference tables; FBGEMM is not imported."""
    found = getattr(sys.modules.get(_FBGEMM), "IntNBitTableBatchedEmbeddingBagsCodegen", None)
    return found is not None and type(module) is found


def is_torchrec_quantized(module: Any) -> bool:
    """True for a quantized TorchRec collection, but not for subclasses; TorchRec is not imported."""
    found = sys.modules.get(_TORCHREC)
    return found is not None and type(module) in (found.EmbeddingBagCollection, found.EmbeddingCollection)


def is_quantized(module: Any) -> bool:
    """True for inference tables of a supported type."""
    return is_fbgemm_quantized(module) or is_torchrec_quantized(module)


def quantized_refusal(theirs: Any) -> str | None:
    """The reason why inference tables cannot be converted; None: they can."""
    if getattr(theirs, "need_indices", bool)():
        return "need_indices=True: the rows of rk.EmbeddingCollection come without their ids"
    try:
        for part in quantized_parts(theirs):
            output_dtype_of(part)
            _check(part)
        _tables(theirs)
    except ValueError as error:
        return str(error).removeprefix("theirs: ")
    return None


def convert_quantized(theirs: Any, options: Mapping[str, Any]) -> TableCollection:
    """Converts inference tables to a frozen collection whose rows decode to the same values.

    Args:
        theirs: a module for which ``is_quantized`` is true and ``quantized_refusal`` is None.
        options: ``output_dtype``, ``bounds_check``.

    Raises:
        ValueError: another option was given.
    """
    if others := sorted(set(options) - _OPTIONS):
        raise ValueError(
            f"{others[0]} is an option of tables that train, and these are for inference, whose format is theirs: "
            'for_serving("fp16") of the result rounds them into another one'
        )
    tables, parts = _tables(theirs), quantized_parts(theirs)
    pooled = isinstance(tables[0], EmbeddingBagConfig)
    is_weighted = theirs.is_weighted() if hasattr(theirs, "is_weighted") else None
    given: dict[str, Any] = {
        "output_dtype": output_dtype_of(parts[0]),
        "is_weighted": is_weighted if pooled else False,  # FBGEMM ignores weights of unpooled lookups
        **options,
    }
    made: Any = (EmbeddingBagCollection if pooled else EmbeddingCollection)(tables, device="meta", **given)
    state, encoded = {}, [rows for part in parts for rows in _rows(part)]
    for table, rows in zip(tables, encoded, strict=True):
        state[f"{made._holder}.{table.name}.weight"] = rows
        if table.format not in FLOAT_DTYPES:
            state[f"{made._holder}.{table.name}.format"] = format_tensor(table.format)
    made.load_state_dict(state, assign=True)
    return made.to(encoded[0].device).requires_grad_(False).train(theirs.training)


def quantized_parts(theirs: Any) -> list[Any]:
    """The FBGEMM modules: the module itself, or a collection's modules, one for each pooling and format."""
    return [theirs] if is_fbgemm_quantized(theirs) else list(theirs._emb_modules)


def _check(part: Any) -> None:
    """Raises ValueError if a module has unsupported row formats or remapped (pruned) ids."""
    for name, _, _, kind, _ in part.embedding_specs:
        if kind.value not in _FORMATS:
            raise ValueError(
                f"table {name!r}: its rows are {kind.name}, and must be one of {', '.join(_FORMATS).upper()}: "
                "rk.dequantize_rows reads INT2"
            )
    if part.scale_bias_size_in_bytes != 4:
        raise ValueError(f"scale_bias_size_in_bytes must be 4, got {part.scale_bias_size_in_bytes}")
    if any(getattr(part, name).numel() for name in ("index_remappings_array", "index_remapping_hash_table")):
        raise ValueError("its rows are pruned: ids are remapped before the lookup, as docs/convert.md shows")


def _tables(theirs: Any) -> list[EmbeddingConfig]:
    """Configurations of the tables, in the order of their output columns."""
    specs = [spec for part in quantized_parts(theirs) for spec in part.embedding_specs]
    if is_torchrec_quantized(theirs):
        pooled = hasattr(theirs, "embedding_bag_configs")
        configs = theirs.embedding_bag_configs() if pooled else theirs.embedding_configs()
        by_name = {config.name: from_torchrec(config) for config in configs}
        return [dataclasses.replace(by_name[name], format=kind.value, init=None) for name, _, _, kind, _ in specs]
    pooling = pooling_of(theirs)
    options: dict[str, Any] = {} if pooling is None else {"pooling": pooling}
    config = EmbeddingConfig if pooling is None else EmbeddingBagConfig
    names = [spec[0] for spec in specs]
    if len(set(names)) < len(names) or not all(names):
        names = [f"t{i}" for i in range(len(specs))]
    return [
        config(rows, columns, name=name, feature_names=features, format=kind.value, **options)
        for name, (_, rows, columns, kind, _), features in zip(names, specs, features_of(theirs), strict=True)
    ]


def _rows(part: Any) -> list[Tensor]:
    """Copies of each table's rows, encoded in its format."""
    found = []
    weights = part.split_embedding_weights(split_scale_shifts=False)
    for (_, _, columns, kind, _), (stored, _) in zip(part.embedding_specs, weights, strict=True):
        if kind.value in FLOAT_DTYPES:
            dtype = FLOAT_DTYPES[kind.value]
            found.append(stored[:, : columns * dtype.itemsize].clone(memory_format=torch.contiguous_format).view(dtype))
        else:
            found.append(rows_from_fbgemm(stored, kind.value, columns))
    return found
