"""embedding_bag: pooled lookups over one table or many, with torch gradients or an optimizer fused into the backward.

The ops (schemas and contract in csrc/embedding_bag/embedding_bag.cpp and .h, arguments in docs/ops.md):

- ``embedding_bag``: lookup with torch gradients, dense or sparse, of ``weights`` and ``per_sample_weights``.
- ``embedding_bag_tables``: lookup with one gradient per table, for the list ``tables`` of views of ``weights``.
- ``embedding_bag_fused``: lookup with a backward that updates ``weights`` and optimizer state in place, once per row.
- ``embedding_bag_backward_*``: the backward ops of these lookups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rec_kernels.ops.autograd import call
from rec_kernels.ops.bad_ids import explain_input
from rec_kernels.ops.fakes import check_devices, check_one_device, dynamic_size, register_fake
from rec_kernels.ops.layout_records import ID_DTYPES, check_tensor, integer_or_symbol
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.table_layout import Size

_ops = torch.ops.rec_kernels
_one_table = _ops.embedding_bag.table  # resolved once, because attribute lookup costs time in a small call

#: Alignment, in bytes, of the tables in a flat weight tensor: a cache line.
TABLE_ALIGNMENT = 64

# Half-precision dtypes of weight tensors, with the names of their row formats.
NARROW = {dtype: name for name, dtype in FLOAT_DTYPES.items() if dtype != torch.float32}


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    format: str | None = None,
    embedding_dim: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums or averages bags of embedding rows, like ``torch.nn.functional.embedding_bag`` (differences: docs/ops.md).

    Args:
        input: ids, int32 or int64: [N] with ``offsets``, or [B, L] without (B bags of L ids each).
        weight: [E, D] float32, float16 or bfloat16, contiguous. Its gradient has its dtype, and is dense, or coalesced
            sparse with ``sparse=True``. For lookups without a gradient also [E, row_bytes] uint8 rows of ``format``.
        offsets: [B] int32 or int64, bag starts ([B + 1] with ``include_last_offset``); ids before the first: in no bag.
        mode: "sum" or "mean"; "max" is not supported.
        per_sample_weights: float32 of input's shape, a factor per id. "mean" divides the weighted sum by the number of
            ids (torch refuses this combination).
        padding_idx: id to skip in every bag; a negative one counts from the table's end.
        format, embedding_dim: row format (in ``rk.BAG_FORMATS``) and D of a uint8 ``weight`` (``rk.quantize_rows``).
        output_dtype: torch.float32 (None), torch.float16 or torch.bfloat16. Sums are float32 and rounded once.
        max_norm, norm_type, scale_grad_by_freq: must have their defaults.

    Returns:
        [B, D] of ``output_dtype``, zeros for an empty bag. Rows are added in ascending position, with the same bits
        for every instruction set, thread count and run (docs/numerics.md).

    Raises:
        IndexError: an id is outside [0, E); the message has its place in ``input``, the bag and the range. TypeError:
        an argument is not a tensor. ValueError: wrong shapes, dtypes or devices; offsets that decrease or lie outside
        [0, N]. NotImplementedError: max_norm, norm_type or scale_grad_by_freq is set; a forward-mode tangent.

    On a GPU, bad ids and offsets raise no error: an id out of range is skipped in the output and the gradients, and
    with bad offsets the gradient is zero. ``torch.ops.rec_kernels.embedding_bag.table`` reports them in ``status``.
    """
    refuse_norms("rk.embedding_bag", max_norm, norm_type, scale_grad_by_freq)
    _check_arguments(input, weight, mode)
    ids, is_padded = input, input.dim() == 2
    if is_padded:
        ids, offsets, per_sample_weights = _flatten_bags(input, offsets, per_sample_weights)
    offsets = _checked_offsets(ids, offsets)
    options = _row_options(weight, format, embedding_dim)
    options |= {"sparse": True} if sparse else {}
    options |= {} if padding_idx is None else {"padding_idx": _padding_row(padding_idx, len(weight))}
    options |= {} if output_dtype in (None, torch.float32) else {"output_dtype": output_dtype}
    try:  # positional arguments, because keywords take a fifth of a small call's time
        has_last = include_last_offset or is_padded
        return call(_one_table, weight, ids, offsets, per_sample_weights, mode, has_last, **options)[0]
    except (IndexError, ValueError) as error:
        explain_input(error, input.shape)
        raise


def refuse_norms(name: str, max_norm: float | None, norm_type: float, scale_grad_by_freq: bool) -> None:
    """Raises NotImplementedError for options that renormalize rows in a lookup or scale gradients by id frequency."""
    if max_norm is not None or scale_grad_by_freq or norm_type != 2.0:
        raise NotImplementedError(
            f"max_norm, norm_type and scale_grad_by_freq are not supported by {name}: lookups never change "
            "rows, and gradients are those of torch without these options"
        )


def read_bags(
    input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, include_last_offset: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Converts the arguments of ``torch.nn.EmbeddingBag`` to ids [N], offsets [B + 1] and per-sample weights [N].

    Raises:
        TypeError: an argument is not a tensor. ValueError: wrong dtypes or shapes.
    """
    check_ids(input)
    if input.dim() == 2:
        return _flatten_bags(input, offsets, per_sample_weights)
    if per_sample_weights is not None:
        check_tensor("per_sample_weights", per_sample_weights)
    offsets = _checked_offsets(input, offsets)
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), input.shape[0])])
    return input, offsets, per_sample_weights


def _checked_offsets(input: Tensor, offsets: Tensor | None) -> Tensor:
    if input.dim() != 1:
        raise ValueError(f"input must have one or two dimensions, got shape {list(input.shape)}")
    if offsets is None:
        raise ValueError("offsets must be given when input has one dimension")
    check_tensor("offsets", offsets)
    if offsets.dim() != 1:
        raise ValueError(f"offsets must have one dimension, got shape {list(offsets.shape)}")
    if offsets.device != input.device:
        raise ValueError(f"offsets must be on input's device, {input.device}, got {offsets.device}")
    return offsets


def check_ids(input: Tensor) -> None:
    """Raises TypeError or ValueError unless ``input`` is a dense id tensor; the ops' messages would say "values"."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a tensor of ids, got {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        found = "a nested one" if input.is_nested else f"one of layout {input.layout}"
        raise ValueError(
            f"input must be a dense tensor, got {found}: for jagged ids, pass their values() and offsets()"
        )
    if input.dtype not in ID_DTYPES:
        raise ValueError(f"input must be int32 or int64 ids, got {input.dtype} {list(input.shape)}")


def _check_arguments(input: Tensor, weight: Tensor, mode: str) -> None:
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode must be 'sum' or 'mean', got {mode!r}")
    check_ids(input)
    check_tensor("weight", weight)
    # Checked here because the op's message would name it "weights".
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            f"weight must have two dimensions and be contiguous, got shape {list(weight.shape)} and strides "
            f"{list(weight.stride())}"
        )


def _row_options(weight: Tensor, format: str | None, embedding_dim: int | None) -> dict[str, Any]:
    """Returns the op's options that describe the rows of ``weight``: none for rows of floats."""
    if weight.dtype == torch.float32:
        if format not in (None, "fp32") or embedding_dim not in (None, weight.shape[-1]):
            raise ValueError(
                f"weight is float32 [E, {weight.shape[-1]}]: format must be None or 'fp32', got {format!r}, and "
                f"embedding_dim None, got {embedding_dim}; rk.quantize_rows makes rows of other formats"
            )
        return {}
    if weight.dtype in NARROW:
        own, columns = NARROW[weight.dtype], weight.shape[-1]
        if format not in (None, own) or embedding_dim not in (None, columns):
            raise ValueError(f"weight is {weight.dtype} [E, {columns}], got format={format!r}, {embedding_dim=}")
        return {}
    if weight.dtype != torch.uint8:
        raise ValueError(f"weight must be float32, float16, bfloat16 or uint8 rows of a format, got {weight.dtype}")
    if format is None or embedding_dim is None:
        raise ValueError(f"weight is {weight.dtype}: format and embedding_dim must describe its rows")
    return {"format": format, "embedding_dim": embedding_dim}


def _padding_row(padding_idx: int, rows: int) -> int:
    padding_idx = integer_or_symbol(padding_idx, "padding_idx")
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx = {padding_idx} must be in [{-rows}, {rows})")
    return padding_idx % rows


def _flatten_bags(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if offsets is not None:
        raise ValueError("offsets must be None when input has two dimensions: every row is a bag")
    if weights is not None:
        check_tensor("per_sample_weights", weights)
        if weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights must have input's shape {list(input.shape)}, got {list(weights.shape)}"
            )
    bags, length = input.shape
    offsets = torch.arange(bags + 1, device=input.device) * length
    return input.reshape(-1), offsets, None if weights is None else weights.reshape(-1)


def table_starts(sizes: list[int], itemsize: int = 4) -> list[int]:
    """Start of each table in a flat tensor, then the tensor's length: sizes [T], in elements -> offsets [T + 1]."""
    starts, alignment = [0], TABLE_ALIGNMENT // itemsize
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // alignment) * alignment)
    return starts


def split_tables(flat: Tensor, shapes: list[torch.Size], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Views of the tables in a flat tensor: float32, or the bytes of tables of several dtypes."""
    sizes = [shape.numel() * dtype.itemsize // flat.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = table_starts(sizes, flat.itemsize)
    tables = [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    typed = [t if t.dtype == dtype else t.view(dtype) for t, dtype in zip(tables, dtypes, strict=True)]
    return [t.view(shape) for t, shape in zip(typed, shapes, strict=True)]


def _outputs(like: Tensor, rows: int | torch.SymInt, columns: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return like.new_empty((rows, columns), dtype=dtype or torch.float32), like.new_empty((2,), dtype=torch.int64)


def _fake_layout_lookup(a: dict) -> tuple[Tensor, Tensor]:
    if "tables" in a:
        check_one_device(a.values())
    else:
        check_devices(a)
    sizes, bags = a["layout_sizes"], a["offsets"].shape[0] - 1
    own_rows = a.get("bag_starts") is not None and a.get("groups") is None
    rows = bags if own_rows else bags // max(sizes[Size.num_features], 1)
    if a.get("inverse") is not None:
        rows = a["inverse"].shape[1]
    columns = sizes[Size.widest_feature if own_rows else Size.output_dim]
    return _outputs(a["values"], rows, columns, a.get("output_dtype"))


def _fake_table_lookup(a: dict) -> tuple[Tensor, Tensor]:
    check_one_device(a.values())
    bags = a["offsets"].shape[0] - (1 if a.get("include_last_offset", True) else 0)
    return _outputs(a["values"], bags, a.get("embedding_dim") or a["weights"].shape[1], a.get("output_dtype"))


def _dense_gradient(a: dict) -> Tensor:
    check_one_device(a.values())
    if "weights_shape" in a:
        return a["grad"].new_empty(a["weights_shape"])
    return a["grad"].new_empty(a["weights"].shape, dtype=a["weights"].dtype)


def _sparse_gradient(a: dict) -> tuple[Tensor, Tensor, Tensor]:
    check_one_device(a.values())
    parts = a["layout"].shape[0] if "layout" in a else 1
    row_ids, starts = (a["grad"].new_empty(n, dtype=torch.int64) for n in (dynamic_size(), parts))
    return row_ids, a["grad"].new_empty(dynamic_size()), starts


def _per_sample_weights_gradient(a: dict) -> Tensor:
    check_devices(a)
    return a["grad"].new_empty(a["values"].shape)


for _op in ("embedding_bag.layout", "embedding_bag_tables.layout", "embedding_bag_fused.layout"):
    register_fake(_op, _fake_layout_lookup)
for _of in ("layout", "table"):
    register_fake(f"embedding_bag_backward_dense.{_of}", _dense_gradient)
    register_fake(f"embedding_bag_backward_sparse.{_of}", _sparse_gradient)
    register_fake(f"embedding_bag_backward_per_sample_weights.{_of}", _per_sample_weights_gradient)
register_fake("embedding_bag.table", _fake_table_lookup)
register_fake("embedding_bag_backward_fused_.layout", check_devices)
