"""A module of this package for one of torch.nn, TorchRec or FBGEMM: tables, options, rows and optimizer state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from rec_kernels.convert import fbgemm_peer
from rec_kernels.convert.peer import Peer, check_weight
from rec_kernels.convert.quantized import convert_quantized, is_quantized, quantized_refusal
from rec_kernels.convert.tables import copy_in, is_fbgemm, is_fused, is_sharded, kinds, peer_of, torchrec_layers
from rec_kernels.convert.torch_peer import TrainedBy
from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.embedding_layers import Embedding, EmbeddingBag
from rec_kernels.nn.tables.config import BAG_FORMATS, EmbeddingBagConfig, EmbeddingConfig
from rec_kernels.nn.tables.given_tables import from_torchrec
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.ops.row_formats import FLOAT_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Unpack

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ConvertOptions(TypedDict, total=False):
    """How the tables are kept and trained from now on: arguments of ``rk.EmbeddingBagCollection``, and one format."""

    optimizer: Optimizer | None
    format: str
    cache: RowCache | None
    output_dtype: torch.dtype
    bounds_check: str
    rounding: str
    seed: int


def convert_embeddings(theirs: Any, *, trained_by: TrainedBy = None, **options: Unpack[ConvertOptions]) -> nn.Module:
    """Makes a module of this package with the tables of another one's, which is left as it is.

    Args:
        theirs: ``torch.nn.Embedding`` -> ``rk.Embedding``; ``torch.nn.EmbeddingBag`` -> ``rk.EmbeddingBag``; TorchRec's
            ``EmbeddingBagCollection``, fused and quantized ones too, and ``EmbeddingCollection``, quantized ones too ->
            ``rk.EmbeddingBagCollection`` and ``rk.EmbeddingCollection``, which take TorchRec's batches; FBGEMM's
            ``SplitTableBatchedEmbeddingBagsCodegen`` and, for inference, ``IntNBitTableBatchedEmbeddingBagsCodegen`` ->
            ``rk.EmbeddingBagCollection`` or, unpooled, ``rk.EmbeddingCollection``, whose features are named f0, f1 ...
            in the order of FBGEMM's input. Its output has them table by table: another order than FBGEMM's where
            ``feature_table_map`` does not ascend.
        trained_by: ``rk.import_tables``'s: optimizers of torch whose state is taken along.
        options: ``optimizer`` of this package: its default has the formula and numbers of what trained theirs, of
            FBGEMM's own, of each table; where nothing is known to have, tables are ordinary parameters. The others are
            ``rk.EmbeddingBagCollection``'s; ``format`` is of all tables, by default that of the rows' dtype. Of tables
            for inference, whose rows stay encoded as they are, only ``bounds_check`` and ``output_dtype``.

    Returns:
        The module, on the device of theirs, training or not as theirs, with frozen tables frozen and outputs of their
        dtype. TorchRec's collections that do not use a batch's weights become ones with ``is_weighted=False``. A layer
        of torch.nn without any option has theirs' parameter itself, so that the optimizer of torch that has it goes on;
        all else that is not fused has new parameters, and wants an optimizer made afterwards. Tables for inference are
        frozen: ``for_serving()`` of the collection leaves all but lookups away.

    Raises:
        TypeError: ``theirs`` is none of these, or an option is unknown. ValueError: it is a subclass, sharded, or has
        hooks or options that are not offered here; no optimizer here has the formula of what trained it; and as
        ``rk.import_tables``.
    """
    unknown = sorted(set(options) - set(ConvertOptions.__annotations__))
    if unknown:
        raise TypeError(f"convert_embeddings() got an unexpected keyword argument {unknown[0]!r}")
    if isinstance(theirs, (Mapping, nn.ModuleDict)):
        raise TypeError("theirs must be one module, got several: rk.import_tables copies them into a collection")
    if reason := refusal(theirs):
        raise ValueError(f"theirs: {reason}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if is_quantized(theirs):
        if trained_by:
            raise TypeError("trained_by must be None: tables for inference have no optimizer")
        return convert_quantized(theirs, given)
    if "format" in given:
        check_choice("format", given["format"], BAG_FORMATS)
    peer = peer_of(theirs, [] if "optimizer" in options and "optimizer" not in given else trained_by)
    own = peer.counterparts() if peer.families and "optimizer" not in given else []
    if own:
        given["optimizer"] = own[0]
    _check_trained(peer, given)
    ours: Any = _built(theirs, peer, given, own)
    collection = getattr(ours, "collection", ours)
    if collection is not None and not collection._weights.is_meta:
        copy_in(collection, peer)
    return _like(ours, theirs)


def refusal(theirs: Any) -> str | None:
    """A reason why a module cannot be converted, whatever trains it; None: it can."""
    if is_sharded(theirs):
        return "it is sharded by TorchRec: rk.distributed.torchrec_state takes its checkpoints"
    if is_quantized(theirs):
        return "it has hooks" if _has_hooks(theirs) else quantized_refusal(theirs)
    if is_fbgemm(theirs) or not any(isinstance(theirs, kind) for kind in kinds()):
        return None  # FbgemmPeer refuses, or peer_of
    if type(theirs) not in kinds():
        base = next(kind for kind in type(theirs).__mro__ if kind in kinds())
        return f"it is a subclass of {base.__name__}, whose lookups may be others"
    if _has_hooks(theirs):
        return "it has hooks"
    layers: dict[str, Any] | None = torchrec_layers(theirs)
    if is_fused(theirs) and (reason := _mixed_columns(theirs)):
        return reason
    for name in ("max_norm", "scale_grad_by_freq"):
        if layers is None and getattr(theirs, name):
            return f"{name}={getattr(theirs, name)!r} is not offered"
    if layers is not None and getattr(theirs, "need_indices", bool)():
        return "need_indices=True: the rows of rk.EmbeddingCollection come without their ids"
    try:
        for name, layer in (layers or {"weight": theirs}).items():
            weight: Any = layer.weight
            check_weight(name, weight)
        if layers is not None:
            _configs(theirs)
    except ValueError as error:
        return str(error)
    return None


def _mixed_columns(theirs: Any) -> str | None:
    """A reason not to convert a fused collection of TorchRec's whose columns are not those of its keys."""
    keys = [table.name for table in theirs.embedding_bag_configs()]
    columns = [table.name for part in theirs._emb_modules for table in part._embedding_tables]
    if keys == columns:
        return None
    return (
        f"its columns are those of tables {', '.join(columns)}, and its keys those of {', '.join(keys)}: "
        "TorchRec's lookups give features each other's columns, which those of rk.EmbeddingBagCollection do not; "
        "rk.import_tables copies its tables into one"
    )


def _has_hooks(theirs: nn.Module) -> bool:
    """True if something is called at lookups or gradients that a module of this package would not call."""
    return any(getattr(m, name) for m in theirs.modules() for name in HOOKS) or any(
        p._backward_hooks or p._post_accumulate_grad_hooks for p in theirs.parameters()
    )


def _check_trained(peer: Peer, given: dict[str, Any]) -> None:
    """Refuses rows that nothing would train any more."""
    formats = {given["format"]} if "format" in given else {_format(w) for w in peer.weights()}
    if "optimizer" not in given and formats - {"fp32"} and peer.is_trained:
        raise ValueError(
            f"rows of format {', '.join(sorted(formats - {'fp32'}))} are trained by fused optimizers only: give "
            "optimizer= one, or freeze theirs first with requires_grad_(False)"
        )


def _built(theirs: Any, peer: Peer, given: dict[str, Any], own: Sequence[Optimizer]) -> nn.Module:
    """The module with rows that are still to come; ``own`` are optimizers of its tables, or none."""
    if isinstance(theirs, (nn.Embedding, nn.EmbeddingBag)):
        return _layer(theirs, given)
    format = given.pop("format", None)
    weights = peer.weights()
    tables: list[EmbeddingConfig]
    if is_fbgemm(theirs):
        given.setdefault("output_dtype", fbgemm_peer.output_dtype_of(theirs))
        given.setdefault("rounding", "stochastic" if theirs.stochastic_rounding else "nearest")
        pooling = fbgemm_peer.pooling_of(theirs)
        options: dict[str, Any] = {} if pooling is None else {"pooling": pooling}
        kind = EmbeddingConfig if pooling is None else EmbeddingBagConfig
        names = zip(peer.names(), fbgemm_peer.features_of(theirs), weights, strict=True)
        tables = [
            kind(*w.shape, name=n, feature_names=f, format=format or _format(w), init=Later(), **options)
            for n, f, w in names
        ]
    else:
        pooling = getattr(theirs, "embedding_bag_configs", None)
        given["is_weighted"] = pooling is not None and theirs.is_weighted()
        tables = _configs(theirs, [format or _format(w) for w in weights])
    for i, optimizer in enumerate(own):
        if optimizer != own[0]:
            tables[i] = dataclasses.replace(tables[i], optimizer=optimizer)
    of = EmbeddingCollection if pooling is None else EmbeddingBagCollection
    return of(tables, device=weights[0].device, **given)


def _layer(theirs: Any, given: dict[str, Any]) -> nn.Module:
    sizes: dict[str, Any] = {"padding_idx": theirs.padding_idx, "device": theirs.weight.device}
    if isinstance(theirs, nn.EmbeddingBag):
        sizes |= {"mode": theirs.mode, "include_last_offset": theirs.include_last_offset}
    kind: Any = EmbeddingBag if isinstance(theirs, nn.EmbeddingBag) else Embedding
    shape = theirs.num_embeddings, theirs.embedding_dim
    if not given and theirs.weight.dtype == torch.float32:
        if not theirs.weight.is_contiguous():
            strides = list(theirs.weight.stride())
            raise ValueError(f"weight must be contiguous, got {list(shape)} with strides {strides}")
        layer = kind(*shape, **{**sizes, "device": "meta", "sparse": theirs.sparse})
        layer.weight = theirs.weight
        return layer
    own = {"format": _format(theirs.weight), "output_dtype": theirs.weight.dtype}
    later = {} if theirs.weight.is_meta else {"init": Later()}
    return kind(*shape, **sizes, **{**own, **later, **given})


def _configs(theirs: Any, formats: list[str] | None = None) -> list[EmbeddingConfig]:
    """The tables of TorchRec's collection as this package's; on the meta device, theirs say how rows begin."""
    pooled = hasattr(theirs, "embedding_bag_configs")
    given = [from_torchrec(c) for c in (theirs.embedding_bag_configs() if pooled else theirs.embedding_configs())]
    formats = [table.format for table in given] if formats is None else formats
    is_meta, found = any(p.is_meta for p in theirs.parameters()), []
    for table, format in zip(given, formats, strict=True):
        found.append(dataclasses.replace(table, format=format, init=table.init if is_meta else Later()))
    return found


class Later:
    """An ``init`` of rows that come when the module is there."""

    in_chunks = True

    def __call__(self, rows: Tensor) -> None:
        rows.detach().zero_()


def _format(weight: Tensor) -> str:
    return next(name for name, dtype in FLOAT_DTYPES.items() if dtype == weight.dtype)


def _like(ours: Any, theirs: Any) -> nn.Module:
    """Ours in the mode of theirs, with what is frozen there."""
    layers = torchrec_layers(theirs) or {"weight": theirs}
    for name, layer in layers.items():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, nn.Parameter) and not weight.requires_grad:
            held = ours if isinstance(ours, (Embedding, EmbeddingBag)) else ours._held[name].weight
            held.requires_grad_(False)
    return ours.train(theirs.training)
