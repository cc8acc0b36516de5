"""Numbers of tables from other packages' modules into this package's, and back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.convert.fbgemm_peer import FbgemmPeer
from rec_kernels.convert.peer import FAMILIES, Family, Peer, TableNumbers, Together
from rec_kernels.convert.quantized import is_quantized
from rec_kernels.convert.torch_peer import TorchPeer, TrainedBy
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_layers import EmbeddingLayer
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.rows import decode
from rec_kernels.nn.training.fused_update import power_names

_TORCHREC = "torchrec.modules.embedding_modules"
_FUSED = "torchrec.modules.fused_embedding_modules"
_FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


def import_tables(ours: nn.Module, theirs: Any, *, trained_by: TrainedBy = None) -> None:
    """Copies rows and optimizer state of another package's tables into a module of this package.

    Args:
        ours: ``rk.EmbeddingBagCollection``, ``rk.EmbeddingCollection``, or ``rk.Embedding`` or ``rk.EmbeddingBag`` with
            an option of its table. Of row formats other than the rows' dtype, rows are rounded to the nearest.
        theirs: ``torch.nn.Embedding`` or ``EmbeddingBag``; a dict or ``ModuleDict`` of some, by the names of our
            tables; TorchRec's ``EmbeddingBagCollection``, ``EmbeddingCollection`` or ``FusedEmbeddingBagCollection``,
            with tables of our names; FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``, with tables in our order.
            [E, D] of each must be ours.
        trained_by: the optimizers of torch, or TorchRec's wrappers, that have the weights. None: of FBGEMM and the
            fused collection, the module's own; of the others, those that run in the backward, if any do. []: none.
            Without an optimizer only rows are copied. A table's must be of the kind of ours: docs/convert.md has the
            pairs.

    Learning rates are not copied. The updates that Adam's kin have counted, ``step``, must be one number for all
    tables of ``ours`` that have it.

    Raises:
        TypeError: ``ours``, ``theirs`` or ``trained_by`` is another object. ValueError: names, shapes, dtypes, kinds of
        optimizers or steps do not fit; a table is compressed, or in a file. Nothing was changed.
    """
    collection, peer = _collection(ours), peer_of(theirs, trained_by)
    _check_memory(collection, peer)
    copy_in(collection, peer)


def export_tables(ours: nn.Module, theirs: Any, *, trained_by: TrainedBy = None) -> None:
    """Copies rows and optimizer state of a module of this package into another package's tables.

    Args:
        ours, theirs, trained_by: ``import_tables``'s. Rows are decoded, and rounded to the dtype of theirs.

    Raises:
        As ``import_tables``. Nothing was changed.
    """
    collection = _collection(ours)
    peer = peer_of(theirs, trained_by)
    _check_memory(collection, peer)
    order = {theirs_name: i for i, (theirs_name, _) in enumerate(_paired(collection, peer, peer.read()))}
    own = _numbers(collection, with_state=bool(peer.families))
    peer.write([own[order[name]] for name in peer.names()])


def _check_memory(collection: TableCollection, peer: Peer) -> None:
    """Raises ValueError if there are no rows to copy, or no place for them."""
    places = (("ours", [collection._weights]), ("theirs", peer.weights()))
    for name, weights in places:
        if any(weight.is_meta for weight in weights):
            raise ValueError(f"{name} must have memory, and is on the meta device: to_empty(device=...) comes first")


def copy_in(collection: TableCollection, peer: Peer) -> None:
    """``import_tables`` of a collection and a peer."""
    given = [table for _, table in _paired(collection, peer, peer.read())]
    state: dict[str, Tensor] = {}
    for config, table in zip(collection.tables, given, strict=True):
        held = f"{collection._holder}.{config.name}"
        state[f"{held}.weight"] = table.weight
        state |= {f"{held}.{kind}": numbers for kind, numbers in table.state.items()}
    step = _common_step(given)
    if step is not None:
        state |= _clock(collection, step)
    elif "step" in collection._buffers:
        state["step"] = collection.step
    collection.load_state_dict(state, strict=False, convert=True)


def peer_of(theirs: Any, trained_by: TrainedBy) -> Peer:
    """Another package's module as tables.

    Raises:
        TypeError: it is none that is known. ValueError: as ``TorchPeer`` and ``FbgemmPeer``.
    """
    if trained_by and (is_fbgemm(theirs) or is_fused(theirs)):
        raise TypeError("trained_by must be None or []: FBGEMM's tables have their optimizer in themselves")
    if is_fbgemm(theirs):
        return FbgemmPeer(theirs, rows_only=trained_by is not None)
    if is_fused(theirs):
        parts = [([t.name for t in part._embedding_tables], part._emb_module) for part in theirs._emb_modules]
        return Together([FbgemmPeer(m, rows_only=trained_by is not None, names=names) for names, m in parts])
    if isinstance(theirs, (nn.Embedding, nn.EmbeddingBag)):
        return TorchPeer({"weight": theirs}, trained_by)
    layers = torchrec_layers(theirs)
    if layers is None and isinstance(theirs, (Mapping, nn.ModuleDict)):
        layers = dict(theirs.items())
        wrong = [name for name, layer in layers.items() if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
        if wrong:
            kind = type(layers[wrong[0]]).__name__
            raise TypeError(f"theirs[{wrong[0]!r}] must be a torch.nn.Embedding or EmbeddingBag, got {kind}")
    if layers:
        return TorchPeer(layers, trained_by)
    is_named = is_other(theirs) or is_quantized(theirs)
    raise TypeError(
        "theirs must be a torch.nn.Embedding or EmbeddingBag, a dict of some, TorchRec's EmbeddingBagCollection, "
        "EmbeddingCollection or FusedEmbeddingBagCollection, or FBGEMM's SplitTableBatchedEmbeddingBagsCodegen, got "
        + (f"{type(theirs).__module__}.{type(theirs).__name__}" if is_named else type(theirs).__name__)
        + (": tables for inference are made anew, by rk.convert_embeddings" if is_quantized(theirs) else "")
        + (": rk.distributed.torchrec_state is for tables that TorchRec has sharded" if is_sharded(theirs) else "")
    )


def is_fbgemm(module: Any) -> bool:
    """True for FBGEMM's training tables; FBGEMM is not imported."""
    found = getattr(sys.modules.get(_FBGEMM), "SplitTableBatchedEmbeddingBagsCodegen", None)
    return found is not None and isinstance(module, found)


def is_fused(module: Any) -> bool:
    """True for TorchRec's ``FusedEmbeddingBagCollection``, whose tables are in modules of FBGEMM's."""
    found = sys.modules.get(_FUSED)
    return found is not None and isinstance(module, found.FusedEmbeddingBagCollection)


def is_other(module: Any) -> bool:
    """True for tables of TorchRec or FBGEMM that are not converted, as those with managed collisions are."""
    if is_fbgemm(module) or is_quantized(module) or torchrec_layers(module) is not None:
        return False
    found = sys.modules.get(_TORCHREC)
    faces = (found.EmbeddingBagCollectionInterface, found.EmbeddingCollectionInterface) if found else ()
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, faces) and kind not in faces]
    if any(kind.__module__.startswith("torchrec.") for kind in kinds):  # a user's own may have a collection inside
        return True
    return type(module).__module__.startswith("fbgemm_gpu.") and hasattr(module, "embedding_specs")


def torchrec_layers(module: Any) -> dict[str, nn.Module] | None:
    """The layers of TorchRec's collection by the names of their tables; None: it is none. TorchRec is not imported."""
    found = sys.modules.get(_TORCHREC)
    if is_fused(module) or (found is not None and isinstance(module, found.EmbeddingBagCollection)):
        return dict(module.embedding_bags.items())
    if found is not None and isinstance(module, found.EmbeddingCollection):
        return dict(module.embeddings.items())
    return None


def kinds() -> set[type]:
    """The classes of layers and collections whose lookups this package has: exactly these, and no subclass."""
    names = (
        (_TORCHREC, "EmbeddingBagCollection"),
        (_TORCHREC, "EmbeddingCollection"),
        (_FUSED, "FusedEmbeddingBagCollection"),
    )
    collections = {getattr(sys.modules[module], name) for module, name in names if module in sys.modules}
    return {nn.Embedding, nn.EmbeddingBag} | collections


def is_ours(module: Any) -> bool:
    """True for this package's layers and collections, sharded ones included."""
    sharded = is_sharded(module) and type(module).__module__.startswith("rec_kernels.")
    return sharded or isinstance(module, (EmbeddingLayer, TableCollection))


def is_sharded(module: Any) -> bool:
    """True for a module that TorchRec has sharded, this package's ones included."""
    found = getattr(sys.modules.get("torchrec.distributed.types"), "ShardedModule", None)
    return found is not None and isinstance(module, found)


def _collection(ours: Any) -> TableCollection:
    """The collection behind a module of this package, if its tables are such that others can have them."""
    collection = ours.collection if isinstance(ours, EmbeddingLayer) else ours
    if collection is None:
        raise ValueError(
            f"ours: this {type(ours).__name__} has no option of a table, so its weight is a parameter as any: copy it "
            "with load_state_dict(); its optimizer's state goes on by itself"
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
        raise ValueError("ours has its tables in a file, from which they are not converted: load them into memory")
    return collection


def _paired(collection: TableCollection, peer: Peer, given: list[TableNumbers]) -> list[tuple[str, TableNumbers]]:
    """The peer's tables with their names there, in the order of ours."""
    tables, own = collection.tables, [table.name for table in collection.tables]
    if len(own) != len(given):
        raise ValueError(f"ours has {len(own)} tables, {', '.join(own)}, and theirs {len(given)}")
    if peer.has_names and len(own) > 1:
        by_name = {table.name: table for table in given}
        if missing := [name for name in own if name not in by_name]:
            raise ValueError(f"theirs has no table {missing[0]!r} of ours, only {', '.join(by_name)}")
        given = [by_name[name] for name in own]
    for config, table in zip(tables, given, strict=True):
        size = [config.num_embeddings, config.embedding_dim]
        if list(table.weight.shape) != size:
            raise ValueError(f"table {config.name!r} has {size} numbers, and theirs {list(table.weight.shape)}")
        if table.family is not None:
            _check_family(config.name, config.optimizer or collection.optimizer, table.family)
    return [(table.name, table) for table in given]


def _check_family(name: str, optimizer: Optimizer | None, family: Family) -> None:
    if optimizer is None:
        raise ValueError(
            f"ours has no fused optimizer, which could take up the state of {family.described}: build it with "
            "optimizer="
        )
    if optimizer.op_name != family.name:
        fitting = FAMILIES[family.name].__name__
        raise ValueError(
            f"table {name!r} of ours is trained by {optimizer}, and theirs by {family.described}, whose state "
            f"rk.{fitting} has"
        )


def _common_step(given: list[TableNumbers]) -> int | None:
    """The updates that all tables have had, those of Adam's kin alike; None: nobody counts them, or only rows go."""
    counting = [table for table in given if table.step is not None and table.family is not None]
    used = {table.name: table.step for table in counting if "exp_avg" in table.state}
    if len(set(used.values())) > 1:
        raise ValueError(
            f"step must be one number, as a collection has one, got {used}: give each table, or those of one step, a "
            "collection of its own"
        )
    steps = list(used.values()) or [table.step for table in counting]
    return max(steps, default=None)


def _clock(collection: TableCollection, step: int) -> dict[str, Tensor]:
    """``step``, and what Adam's kin derive from it, as that many updates would have left them."""
    own: dict[str, Any] = collection._buffers
    optimizers: Any = collection._features.optimizers.distinct
    clock = {"step": torch.full_like(own["step"], step)}
    for number, name in power_names(optimizers).items():
        powers = [power_after(beta, step) for beta in optimizers[number].betas]
        clock[name] = torch.tensor(powers, dtype=torch.float32, device=own[name].device)
    return clock


def power_after(beta: float, steps: int) -> float:
    """1 times ``beta``, ``steps`` times, each product rounded to float32 as an update rounds it."""
    factor, power = ctypes.c_float(beta).value, 1.0
    for _ in range(steps):
        before, power = power, ctypes.c_float(power * factor).value
        if power == before:
            break
    return power


def _numbers(collection: TableCollection, *, with_state: bool) -> list[TableNumbers]:
    """The tables' numbers, rows decoded."""
    state = collection.state_dict()
    found = []
    for config in collection.tables:
        held = f"{collection._holder}.{config.name}"
        rows = state[f"{held}.weight"]
        if rows.dtype == torch.uint8:
            rows = decode(rows, config.format, config.embedding_dim)
        kinds = (config.optimizer or collection.optimizer).state if with_state else ()
        moments = {kind: state[f"{held}.{kind}"] for kind in kinds}
        found.append(TableNumbers(config.name, rows, moments, int(state["step"]) if with_state else None))
    return found
