"""``convert_embeddings`` converts one module of torch.nn, TorchRec or FBGEMM to a module of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from rec_kernels.convert import fbgemm_tables
from rec_kernels.convert.external_tables import ExternalTables, check_weight
from rec_kernels.convert.kinds import QUANTIZED, Kind, classes_of, kind_of, layers_of, torchrec_configs
from rec_kernels.convert.quantized import convert_quantized, quantized_refusal
from rec_kernels.convert.tables import copy_from, find_tables
from rec_kernels.convert.torch_tables import TrainedBy
from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.collection_options import CollectionOptions, check_names
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.embedding_layers import Embedding, EmbeddingBag
from rec_kernels.nn.tables.config import BAG_FORMATS, EmbeddingBagConfig
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.ops.row_formats import FLOAT_FORMATS

if TYPE_CHECKING:
    from typing_extensions import Unpack

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def convert_embeddings(theirs: Any, *, trained_by: TrainedBy = None, **options: Unpack[CollectionOptions]) -> nn.Module:
    """Converts a module of another package to one of this package, with its tables; the original is unchanged.

    Args:
        theirs: ``torch.nn.Embedding`` -> ``rk.Embedding``; ``torch.nn.EmbeddingBag`` -> ``rk.EmbeddingBag``; TorchRec's
            ``EmbeddingBagCollection`` (also fused or quantized) and ``EmbeddingCollection`` (also quantized) ->
            ``rk.EmbeddingBagCollection`` and ``rk.EmbeddingCollection``, which take TorchRec's batches; FBGEMM's
            ``SplitTableBatchedEmbeddingBagsCodegen`` and, for inference, ``IntNBitTableBatchedEmbeddingBagsCodegen`` ->
            ``rk.EmbeddingBagCollection`` or, unpooled, ``rk.EmbeddingCollection``, with features f0, f1 ... in the
            order of FBGEMM's input. The output is ordered by table, which differs from FBGEMM's order if
            ``feature_table_map`` is not ascending.
        trained_by: the torch optimizers whose state is converted; see ``rk.import_tables``.
        options: ``optimizer``: default, the equivalent of the optimizer that trained each table, including FBGEMM's
            own; if none is known, tables are ordinary parameters. ``format``: row format of all tables; default, that
            of the rows' dtype. The others are arguments of ``rk.EmbeddingBagCollection``. Quantized tables, whose rows
            keep their encoding, take only ``bounds_check`` and ``output_dtype``.

    Returns:
        The module, with the device, training mode, frozen tables and output dtype of theirs. TorchRec collections that
        ignore a batch's weights get ``is_weighted=False``. A torch.nn layer converted without options shares its
        parameter with theirs, so its torch optimizer continues. Any other module without a fused optimizer has new
        parameters, which need a new optimizer. Quantized tables are frozen; ``for_serving()`` of the collection
        provides lookups only.

    Raises:
        TypeError: ``theirs`` has an unsupported type, or an option is unknown.
        ValueError: ``theirs`` is a subclass, is sharded, or has hooks or unsupported options; no optimizer here is
            equivalent to the one that trained it; and the errors of ``rk.import_tables``.
    """
    check_names("convert_embeddings", options, CollectionOptions)
    if isinstance(theirs, (Mapping, nn.ModuleDict)):
        raise TypeError("theirs must be one module, got several: rk.import_tables copies them into a collection")
    if reason := refusal(theirs):
        raise ValueError(f"theirs: {reason}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if kind_of(theirs) in QUANTIZED:
        if trained_by:
            raise TypeError("trained_by must be None: tables for inference have no optimizer")
        return convert_quantized(theirs, given)
    if "format" in given:
        check_choice("format", given["format"], BAG_FORMATS)
    external = find_tables(theirs, [] if "optimizer" in options and "optimizer" not in given else trained_by)
    own = external.counterparts() if external.families and "optimizer" not in given else []
    if own:
        given["optimizer"] = own[0]
    if given or not isinstance(theirs, (nn.Embedding, nn.EmbeddingBag)):  # else the layer shares its parameter
        _check_trained(external, given)
    ours: Any = _build(theirs, external, given, own)
    collection = getattr(ours, "collection", ours)
    if collection is not None and not collection._weights.is_meta:
        copy_from(collection, external)
    return _copy_modes(ours, theirs)


def refusal(theirs: Any) -> str | None:
    """The reason why a module cannot be converted, regardless of its optimizer; None: it can."""
    kind = kind_of(theirs)
    if kind is Kind.SHARDED:
        return "it is sharded by TorchRec: rk.distributed.torchrec_state takes its checkpoints"
    if kind in QUANTIZED:
        return "it has hooks" if _has_hooks(theirs) else quantized_refusal(theirs)
    if kind not in (Kind.LAYER, Kind.TORCHREC, Kind.FUSED):
        return None  # FbgemmTables or find_tables() raises later
    if type(theirs) not in (classes := classes_of(kind)):
        base = next(base for base in type(theirs).__mro__ if base in classes)
        return f"it is a subclass of {base.__name__}, whose lookups may be others"
    if _has_hooks(theirs):
        return "it has hooks"
    if kind is Kind.FUSED and (reason := _mixed_columns(theirs)):
        return reason
    for name in ("max_norm", "scale_grad_by_freq"):
        if kind is Kind.LAYER and getattr(theirs, name):
            return f"{name}={getattr(theirs, name)!r} is not offered"
    if getattr(theirs, "need_indices", bool)():
        return "need_indices=True: the rows of rk.EmbeddingCollection come without their ids"
    try:
        for name, layer in layers_of(theirs).items():
            check_weight(name, layer.weight)
        if kind is not Kind.LAYER:
            torchrec_configs(theirs)
    except ValueError as error:
        return str(error)
    return None


def _mixed_columns(theirs: Any) -> str | None:
    """The reason not to convert a fused TorchRec collection if its columns and keys are in different orders."""
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
    """True if the module or a parameter has hooks, which the converted module would not call."""
    return any(getattr(m, name) for m in theirs.modules() for name in HOOKS) or any(
        p._backward_hooks or p._post_accumulate_grad_hooks for p in theirs.parameters()
    )


def _check_trained(external: ExternalTables, given: dict[str, Any]) -> None:
    """Raises ValueError if trained rows would have no optimizer: torch's train rows of its dtypes only."""
    formats = {given["format"]} if "format" in given else {FLOAT_FORMATS[w.dtype] for w in external.weights()}
    if "optimizer" not in given and (codes := formats - {*FLOAT_FORMATS.values()}) and external.is_trained:
        raise ValueError(
            f"rows of format {', '.join(sorted(codes))} can only be trained by fused optimizers: "
            "pass one as optimizer=, or freeze theirs first with requires_grad_(False)"
        )


def _build(theirs: Any, external: ExternalTables, given: dict[str, Any], own: Sequence[Optimizer]) -> nn.Module:
    """Builds the module with rows of zeros; ``own`` has one optimizer per table, or is empty."""
    kind = kind_of(theirs)
    if kind is Kind.LAYER:
        return _layer(theirs, given)
    format, weights = given.pop("format", None), external.weights()
    formats = [format or FLOAT_FORMATS[weight.dtype] for weight in weights]
    if kind is Kind.FBGEMM:
        given.setdefault("output_dtype", fbgemm_tables.output_dtype_of(theirs))
        given.setdefault("rounding", "stochastic" if theirs.stochastic_rounding else "nearest")
        sizes = [weight.shape for weight in weights]
        tables = fbgemm_tables.configs_of(theirs, external.names(), sizes, formats, init=nn.init.zeros_)
    else:
        given["is_weighted"] = hasattr(theirs, "embedding_bag_configs") and theirs.is_weighted()
        is_meta = any(weight.is_meta for weight in weights)
        tables = [
            dataclasses.replace(table, format=format, init=table.init if is_meta else nn.init.zeros_)
            for table, format in zip(torchrec_configs(theirs), formats, strict=True)
        ]
    for i, optimizer in enumerate(own):
        if optimizer != own[0]:
            tables[i] = dataclasses.replace(tables[i], optimizer=optimizer)
    is_pooled = isinstance(tables[0], EmbeddingBagConfig)
    collection = EmbeddingBagCollection if is_pooled else EmbeddingCollection
    return collection(tables, device=weights[0].device, **given)


def _layer(theirs: Any, given: dict[str, Any]) -> nn.Module:
    sizes: dict[str, Any] = {"padding_idx": theirs.padding_idx, "device": theirs.weight.device}
    if isinstance(theirs, nn.EmbeddingBag):
        sizes |= {"mode": theirs.mode, "include_last_offset": theirs.include_last_offset}
    kind: Any = EmbeddingBag if isinstance(theirs, nn.EmbeddingBag) else Embedding
    shape = theirs.num_embeddings, theirs.embedding_dim
    if not given:
        if not theirs.weight.is_contiguous():
            strides = list(theirs.weight.stride())
            raise ValueError(f"weight must be contiguous, got {list(shape)} with strides {strides}")
        layer = kind(*shape, **{**sizes, "device": "meta", "sparse": theirs.sparse})
        layer.weight = theirs.weight
        return layer
    own = {"format": FLOAT_FORMATS[theirs.weight.dtype], "output_dtype": theirs.weight.dtype}
    later = {} if theirs.weight.is_meta else {"init": nn.init.zeros_}
    return kind(*shape, **sizes, **{**own, **later, **given})


def _copy_modes(ours: Any, theirs: Any) -> nn.Module:
    """Copies the training mode and frozen tables of theirs to ours."""
    for name, layer in layers_of(theirs).items():
        if isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad:
            target = ours if isinstance(ours, (Embedding, EmbeddingBag)) else ours._tables[name].weight
            target.requires_grad_(False)
    return ours.train(theirs.training)
