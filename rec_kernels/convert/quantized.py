"""Conversion of quantized inference tables: FBGEMM's module and TorchRec's quantized collections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rec_kernels.convert.fbgemm_tables import configs_of, output_dtype_of
from rec_kernels.convert.kinds import Kind, kind_of, torchrec_configs
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig
from rec_kernels.nn.tables.load_state import format_tensor
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.row_formats_fbgemm import rows_from_fbgemm

_FORMATS = ("int8", "int4", "fp16", "fp32")
_OPTIONS = {"output_dtype", "bounds_check"}


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
        theirs: a module whose kind is in ``QUANTIZED`` and whose ``quantized_refusal`` is None.
        options: ``output_dtype``, ``bounds_check``.

    Raises:
        ValueError: another option was given.
    """
    if others := sorted(set(options) - _OPTIONS):
        raise ValueError(
            f"{others[0]} requires tables that can be trained, but these are for inference and keep their "
            'format: for_serving("fp16") of the result rounds them to another one'
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
    return [theirs] if kind_of(theirs) is Kind.FBGEMM_QUANTIZED else list(theirs._emb_modules)


def _check(part: Any) -> None:
    """Raises ValueError if a module has unsupported row formats or remapped (pruned) ids."""
    for name, _, _, kind, _ in part.embedding_specs:
        if kind.value not in _FORMATS:
            raise ValueError(
                f"table {name!r}: its rows are {kind.name}, but must be one of {', '.join(_FORMATS).upper()}; "
                "rk.dequantize_rows reads INT2"
            )
    if part.scale_bias_size_in_bytes != 4:
        raise ValueError(f"scale_bias_size_in_bytes must be 4, got {part.scale_bias_size_in_bytes}")
    if any(getattr(part, name).numel() for name in ("index_remappings_array", "index_remapping_hash_table")):
        raise ValueError("its rows are pruned: ids are remapped before the lookup, as docs/convert.md shows")


def _tables(theirs: Any) -> list[EmbeddingConfig]:
    """Configurations of the tables, in the order of their output columns."""
    specs = [spec for part in quantized_parts(theirs) for spec in part.embedding_specs]
    if kind_of(theirs) is Kind.TORCHREC_QUANTIZED:
        by_name = {config.name: config for config in torchrec_configs(theirs)}
        return [dataclasses.replace(by_name[name], format=kind.value, init=None) for name, _, _, kind, _ in specs]
    names = [spec[0] for spec in specs]
    if len(set(names)) < len(names) or not all(names):
        names = [f"t{i}" for i in range(len(specs))]
    return configs_of(theirs, names, [spec[1:3] for spec in specs], [spec[3].value for spec in specs])


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
