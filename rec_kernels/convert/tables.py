"""``import_tables`` and ``export_tables``: copy rows and optimizer state from and to other packages' modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.convert.external_tables import FAMILIES, CombinedTables, ExternalTables, Family, TableTensors
from rec_kernels.convert.fbgemm_tables import FbgemmTables
from rec_kernels.convert.kinds import QUANTIZED, Kind, kind_of, layers_of
from rec_kernels.convert.torch_tables import TorchTables, TrainedBy
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_layers import EmbeddingLayer
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.rows import decode


def import_tables(ours: nn.Module, theirs: Any, *, trained_by: TrainedBy = None) -> None:
    """Copies rows and optimizer state of another package's tables into a module of this package.

    Args:
        ours: ``rk.EmbeddingBagCollection``, ``rk.EmbeddingCollection``, or ``rk.Embedding`` or ``rk.EmbeddingBag`` with
            a table option. If a table's format differs from the rows' dtype, rows are rounded to the nearest.
        theirs: ``torch.nn.Embedding`` or ``EmbeddingBag``, or a dict or ``ModuleDict`` of them, keyed by the names of
            our tables; TorchRec's ``EmbeddingBagCollection``, ``EmbeddingCollection`` or
            ``FusedEmbeddingBagCollection``, matched by table name; FBGEMM's
            ``SplitTableBatchedEmbeddingBagsCodegen``, matched by position. Shapes [E, D] must be equal.
        trained_by: the torch optimizers, or TorchRec's wrappers, that train the weights. None: for FBGEMM and the fused
            collection, the module's own; for the others, optimizers that run in the backward, if any. []: none, so that
            only rows are copied. Each must be of the same kind as ours: docs/convert.md lists the pairs.

    Learning rates are not copied. All tables of ``ours`` with Adam-like state must have the same ``step`` (number of
    updates).

    Raises:
        TypeError: ``ours``, ``theirs`` or ``trained_by`` has an unsupported type.
        ValueError: names, shapes, dtypes, kinds of optimizers or steps differ; a table is compressed, or in a file.
            Nothing is changed.
    """
    collection, external = _collection(ours), find_tables(theirs, trained_by)
    _check_memory(collection, external)
    copy_from(collection, external)


def export_tables(ours: nn.Module, theirs: Any, *, trained_by: TrainedBy = None) -> None:
    """Copies rows and optimizer state of a module of this package into another package's tables.

    Args:
        ours, theirs, trained_by: see ``import_tables``. Rows are decoded, then rounded to the dtype of theirs.

    Raises:
        TypeError, ValueError: as in ``import_tables``. Nothing is changed.
    """
    collection = _collection(ours)
    external = find_tables(theirs, trained_by)
    _check_memory(collection, external)
    order = {table.name: i for i, table in enumerate(_match_tables(collection, external))}
    own = _decoded_tables(collection, with_state=bool(external.families))
    external.write([own[order[name]] for name in external.names()])


def _check_memory(collection: TableCollection, external: ExternalTables) -> None:
    """Raises ValueError if either side is on the meta device."""
    for name, weights in (("ours", [collection._weights]), ("theirs", external.weights())):
        if any(weight.is_meta for weight in weights):
            raise ValueError(f"{name} must have memory, but is on the meta device: call to_empty(device=...) first")


def copy_from(collection: TableCollection, external: ExternalTables) -> None:
    """Loads rows and state of external tables into a collection."""
    tables = _match_tables(collection, external)
    state: dict[str, Tensor] = {}
    for config, table in zip(collection.tables, tables, strict=True):
        prefix = f"{collection._holder}.{config.name}"
        state[f"{prefix}.weight"] = table.weight
        state |= {f"{prefix}.{kind}": values for kind, values in table.state.items()}
    if "step" in collection._buffers:
        step = _common_step(tables)
        state["step"] = collection.step if step is None else torch.full_like(collection.step, step)
    collection.load_state_dict(state, strict=False, convert=True)


def find_tables(theirs: Any, trained_by: TrainedBy) -> ExternalTables:
    """Wraps another package's module as ``ExternalTables``.

    Raises:
        TypeError: the module's type is not supported. ValueError: as in ``TorchTables`` and ``FbgemmTables``.
    """
    kind = kind_of(theirs)
    if trained_by and kind in (Kind.FBGEMM, Kind.FUSED):
        raise TypeError("trained_by must be None or []: FBGEMM's tables include their optimizer")
    if kind is Kind.FBGEMM:
        return FbgemmTables(theirs, rows_only=trained_by is not None)
    if kind is Kind.FUSED:
        parts = [([t.name for t in part._embedding_tables], part._emb_module) for part in theirs._emb_modules]
        return CombinedTables([FbgemmTables(m, rows_only=trained_by is not None, names=names) for names, m in parts])
    layers = layers_of(theirs)
    if kind is None and isinstance(theirs, (Mapping, nn.ModuleDict)):
        layers = dict(theirs.items())
        for name, layer in layers.items():
            if kind_of(layer) is not Kind.LAYER:
                got = type(layer).__name__
                raise TypeError(f"theirs[{name!r}] must be a torch.nn.Embedding or EmbeddingBag, got {got}")
    if layers:
        return TorchTables(layers, trained_by)
    raise TypeError(
        "theirs must be a torch.nn.Embedding or EmbeddingBag, a dict of some, TorchRec's EmbeddingBagCollection, "
        "EmbeddingCollection or FusedEmbeddingBagCollection, or FBGEMM's SplitTableBatchedEmbeddingBagsCodegen, got "
        + (f"{type(theirs).__module__}." if kind in (Kind.OTHER, *QUANTIZED) else "")
        + type(theirs).__name__
        + (": convert tables for inference with rk.convert_embeddings" if kind in QUANTIZED else "")
        + (": use rk.distributed.torchrec_state for tables that TorchRec has sharded" if kind is Kind.SHARDED else "")
    )


def _collection(ours: Any) -> TableCollection:
    """The collection of a module of this package; raises if other packages cannot represent its tables."""
    collection = ours.collection if isinstance(ours, EmbeddingLayer) else ours
    if collection is None:
        raise ValueError(
            f"ours: this {type(ours).__name__} has no table options, so its weight is an ordinary parameter: "
            "copy it with load_state_dict(); its optimizer's state stays valid"
        )
    if not isinstance(collection, TableCollection):
        raise TypeError(
            "ours must be an rk.EmbeddingBagCollection, rk.EmbeddingCollection, rk.EmbeddingBag or rk.Embedding, got "
            f"{type(ours).__name__}"
        )
    for table in collection.tables:
        if table.compression is not None:
            raise ValueError(f"table {table.name!r}: compression = {table.compression} has no counterpart elsewhere")
    if collection._store.numbers():
        raise ValueError("ours has its tables in a file, which is not supported: load them into a collection in memory")
    return collection


def _match_tables(collection: TableCollection, external: ExternalTables) -> list[TableTensors]:
    """Reads the external tables, in the order of the collection's tables."""
    given, own = external.read(), [table.name for table in collection.tables]
    if len(own) != len(given):
        raise ValueError(f"ours has {len(own)} tables, {', '.join(own)}, but theirs has {len(given)}")
    if external.has_names and len(own) > 1:
        by_name = {table.name: table for table in given}
        if missing := [name for name in own if name not in by_name]:
            raise ValueError(f"theirs has no table {missing[0]!r} of ours, only {', '.join(by_name)}")
        given = [by_name[name] for name in own]
    for config, table in zip(collection.tables, given, strict=True):
        size = [config.num_embeddings, config.embedding_dim]
        if list(table.weight.shape) != size:
            raise ValueError(f"table {config.name!r} is {size}, but theirs is {list(table.weight.shape)}")
        if table.family is not None:
            _check_family(config.name, config.optimizer or collection.optimizer, table.family)
    return given


def _check_family(name: str, optimizer: Optimizer | None, family: Family) -> None:
    if optimizer is None:
        raise ValueError(f"ours has no fused optimizer for the state of {family.described}: build it with optimizer=")
    if optimizer.op_name != family.name:
        fitting = FAMILIES[family.name].__name__
        raise ValueError(
            f"table {name!r} of ours is trained by {optimizer}, but theirs by {family.described}: use "
            f"rk.{fitting}, which has the same state"
        )


def _common_step(given: list[TableTensors]) -> int | None:
    """The number of updates, equal for all Adam-like tables; None: it is not counted, or only rows are copied."""
    counting = [table for table in given if table.step is not None and table.family is not None]
    used = {table.name: table.step for table in counting if "exp_avg" in table.state}
    if len(set(used.values())) > 1:
        raise ValueError(
            f"step must be the same for all tables of a collection, got {used}: put tables with different steps "
            "into separate collections"
        )
    steps = list(used.values()) or [table.step for table in counting]
    return max(steps, default=None)


def _decoded_tables(collection: TableCollection, *, with_state: bool) -> list[TableTensors]:
    """The collection's tables with decoded rows, and their optimizer state if ``with_state``."""
    state = collection.state_dict()
    found = []
    for config in collection.tables:
        prefix = f"{collection._holder}.{config.name}"
        rows = state[f"{prefix}.weight"]
        if rows.dtype == torch.uint8:
            rows = decode(rows, config.format, config.embedding_dim)
        kinds = (config.optimizer or collection.optimizer).state if with_state else ()
        moments = {kind: state[f"{prefix}.{kind}"] for kind in kinds}
        found.append(TableTensors(config.name, rows, moments, int(state["step"]) if with_state else None))
    return found
