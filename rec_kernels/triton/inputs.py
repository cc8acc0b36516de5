"""Checks and converts the arguments of embedding_bag ops for the Triton kernels, without synchronizing."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import triton
from torch import Tensor

from rec_kernels.ops.embedding_bag import TABLE_ALIGNMENT, table_starts
from rec_kernels.ops.layout_records import ID_DTYPES, MAX_TABLE_ID, check
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.table_layout import Column, Flag, Size
from rec_kernels.triton.kernels import COLUMNS, start_kernel

FLOATS = tuple(FLOAT_DTYPES.values())
_MOST = 2**31 - 1  # programs in a launch
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam", "lamb")
_HERE = OPTIMIZERS[:2]
_ADAMS = OPTIMIZERS[3:]
_COMPILED = "the compiled CUDA library (rk.build_info() says why it is not in use)"
# Arguments that the kernels do not support, with their defaults: batch sizes per feature, bags that samples share, row
# formats and caches, and what lies between a gradient and the optimizer.
_UNUSED = {
    **dict.fromkeys(("bag_starts", "inverse", "groups", "format")),
    **dict.fromkeys(f"cache_{name}" for name in ("rows", "slots", "tags", "marks", "dirty")),
    **dict.fromkeys(("clip_grad_value", "clip_grad_norm")),
    "embedding_dim": 0,
    "weight_decay": 0.0,
}
# Modules that pass these arguments, named in the error message.
_GIVEN_BY = {
    "bag_starts": " (rk.EmbeddingCollection, rk.PathEmbeddingBag and features with batch sizes of their own do)",
    "inverse": " (batches with inverse_indices do)",
}
# Optimizers that have each kind of state.
_STATE = {"sum": ("rowwise_adagrad", "adagrad"), "exp_avg": _ADAMS, "exp_avg_sq": _ADAMS, "beta_powers": _ADAMS}


def check_offered(a: SimpleNamespace) -> None:
    """Raises ValueError for arguments or layouts that the Triton kernels do not support."""
    for name, default in _UNUSED.items():
        given = getattr(a, name, default)
        if given is not default and (isinstance(given, Tensor) or given != default):
            what = f"the Triton kernels do without, it needs {_COMPILED}"
            raise ValueError(f"{name} must not be given{_GIVEN_BY.get(name, '')}: {what}")
    if hasattr(a, "layout"):
        _check_layout(a)
    dtype = getattr(a, "output_dtype", None)
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"output_dtype must be {' or '.join(map(str, FLOATS))}, got {dtype}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(
    t: Tensor,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    shape: tuple[int, ...] | None = None,
    rank: int | None = None,
    contiguous: bool = False,
) -> None:
    """Raises ValueError, naming the tensor and what is expected, for another shape, dtype or memory layout."""
    # Formats the message only on failure: a call makes about twenty checks.
    if rank is not None and t.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimension(s), got shape {list(t.shape)}")
    if shape is not None and t.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    if t.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(_name, dtypes))}, got {_name(t.dtype)}")
    if contiguous and not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous; call .contiguous() on it")


def check_one_device(a: SimpleNamespace) -> None:
    """Raises ValueError unless all tensor arguments are on the device of ``values``."""
    device = a.values.device
    for name, argument in vars(a).items():
        for t in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(t, Tensor) and t.device != device:
                raise ValueError(f"{name} is on {t.device}, values on {device}: they must be on the same device")


@dataclass(frozen=True)
class BagInput:
    """A checked call. ``features`` and ``status`` are those of rec_kernels.triton.kernels."""

    values: Tensor
    offsets: Tensor
    factors: Tensor | None
    features: Tensor
    status: Tensor
    num_bags: int
    batch: int
    output_dim: int
    max_dim: int
    num_rows: int
    check_ids: bool
    raises: bool
    frozen: Tensor | None  # [F] bool: features whose ids give no gradient

    @property
    def bags(self) -> dict[str, object]:
        """Arguments of all kernels that iterate over bags."""
        return {
            "values": self.values,
            "offsets": self.offsets,
            "features": self.features,
            "status": self.status,
            "num_ids": self.values.shape[0],
            "num_offsets": self.offsets.shape[0],
            "batch": self.batch,
            "CHECK": self.check_ids,
            "BLOCK_IDS": 64,
        }

    @property
    def blocks(self) -> dict[str, int]:
        """A tile of rows: 2048 elements keep 128 threads busy; more than 16 rows would mostly wait for short bags."""
        columns = min(triton.next_power_of_2(max(self.max_dim, 1)), 1024)
        return {"BLOCK_ROWS": min(16, 2048 // columns), "BLOCK_COLUMNS": columns}


def check_weights(a: SimpleNamespace) -> None:
    """Raises ValueError for weights that cannot hold a table."""
    check_tensor(a.weights, "weights", FLOATS, rank=1 if hasattr(a, "layout") else 2, contiguous=True)


def _check_layout(a: SimpleNamespace) -> None:
    sizes, made = a.layout_sizes, "; rec_kernels.table_layout makes layout and layout_sizes"
    check_tensor(a.layout, "layout", (torch.int64,), rank=2)
    parts = a.layout.shape[0]
    check_tensor(a.layout, "layout", (torch.int64,), shape=(parts, len(Column)), contiguous=True)
    check(len(sizes) == len(Size), f"layout_sizes must have {len(Size)} elements, got {len(sizes)}")
    features, dim, flags = sizes[Size.num_features], sizes[Size.max_embedding_dim], sizes[Size.flags]
    good = 0 <= features <= parts and (features > 0) == (parts > 0)
    each = "the number of features, of which each has a row of layout or several"
    check(good, f"layout_sizes[{Size.num_features}] = {features} must be {each}{made}")
    columns, rows = sizes[Size.output_dim], sizes[Size.num_rows]
    good = columns > 0 if parts else columns == 0
    check(good, f"layout_sizes[{Size.output_dim}] = {columns} must be the columns of all features, 0 without any{made}")
    check(rows >= 0, f"layout_sizes[{Size.num_rows}] = {rows} must be at least 0{made}")
    good = int(parts > 0) <= dim < 2**31
    check(good, f"layout_sizes[{Size.max_embedding_dim}] = {dim} must be in [1, 2^31){made}")
    check(not flags & Flag.bytes, f"layout has formats: the Triton kernels take tables of floats, it needs {_COMPILED}")
    mapped = parts > features or flags & Flag.maps_ids
    check(not mapped, f"layout has features of several parts, or ids that are not their rows: it needs {_COMPILED}")


def _check_bags(a: SimpleNamespace, include_last_offset: bool) -> int:
    pooling, bounds_check = getattr(a, "pooling", "sum"), getattr(a, "bounds_check", "ignore")
    check(pooling in ("sum", "mean"), f'pooling must be "sum" or "mean", got "{pooling}"')
    known = bounds_check in ("error", "ignore", "none")
    check(known, f'bounds_check must be "error", "ignore" or "none", got "{bounds_check}"')
    check_tensor(a.values, "values", ID_DTYPES, rank=1)
    check_tensor(a.offsets, "offsets", ID_DTYPES, rank=1)
    padding_idx = getattr(a, "padding_idx", -1)
    check(padding_idx >= -1, f"padding_idx = {padding_idx} must be an id of the table, or -1: none")
    bags = a.offsets.shape[0] - int(include_last_offset)
    expected = f"offsets must have {'num_features * ' if hasattr(a, 'layout') else ''}batch + 1 elements"
    check(bags >= 0, f"{expected}, got none")
    factors = getattr(a, "per_sample_weights", None)
    if factors is not None:
        check_tensor(factors, "per_sample_weights", (torch.float32,), shape=tuple(a.values.shape))
    if hasattr(a, "layout"):
        features = a.layout_sizes[Size.num_features]
        fits = bags % features == 0 if features else bags == 0
        check(fits, f"{expected}, got {a.offsets.shape[0]} for {features} features")
    if bags > _MOST:
        raise ValueError(f"offsets describe {bags} bags; at most 2^31 - 1 fit in a call")
    return bags


def read_input(a: SimpleNamespace, weights_shape: tuple[int, ...]) -> BagInput:
    """Checks a call and initializes its status.

    Args:
        a: the arguments of an op, by name.
        weights_shape: (E, D) of one table, (number of elements,) with a layout.

    Raises:
        ValueError: a wrong shape, dtype, device or option. The records of a layout are checked on the device;
            ``status`` tells of wrong ones.
    """
    check_one_device(a)
    bags = _check_bags(a, getattr(a, "include_last_offset", True))
    layout = getattr(a, "layout", None)
    if layout is None:
        check(weights_shape[1] >= 1, f"weights must have at least one column, got shape {list(weights_shape)}")
        features, num_rows, output_dim = 1, weights_shape[0], weights_shape[1]
        max_dim = output_dim
    else:
        sizes = (Size.num_features, Size.num_rows, Size.output_dim, Size.max_embedding_dim)
        features, num_rows, output_dim, max_dim = (a.layout_sizes[size] for size in sizes)
    packed = a.values.new_empty((features, COLUMNS.value), dtype=torch.int64)
    status = a.values.new_empty((2,), dtype=torch.int64)
    elements = torch.Size(weights_shape).numel()
    mean = getattr(a, "pooling", "sum") == "mean"
    start_kernel[(1,)](
        *(layout, packed, status, features, elements, output_dim, num_rows, max_dim),
        padding_idx=getattr(a, "padding_idx", -1),
        tables=a.lr.shape[0] if hasattr(a, "lr") and a.lr.dim() else MAX_TABLE_ID,
        MEAN=mean,
        BLOCK=128,
        enable_fp_fusion=False,
    )
    factors = getattr(a, "per_sample_weights", None)
    return BagInput(
        values=a.values.contiguous(),
        offsets=a.offsets.contiguous(),
        factors=None if factors is None else factors.contiguous(),
        features=packed,
        status=status,
        num_bags=bags,
        batch=bags // features if features else 0,
        output_dim=output_dim,
        max_dim=max_dim,
        num_rows=num_rows,
        check_ids=getattr(a, "bounds_check", "ignore") != "none",
        raises=getattr(a, "bounds_check", "ignore") == "error",
        frozen=None if layout is None else layout[:, Column.frozen].bool(),
    )


def check_gradient(a: SimpleNamespace, bags: BagInput) -> None:
    """Raises ValueError for a gradient of another shape or dtype than the output's."""
    check_tensor(a.grad, "grad", (torch.float32,), shape=(bags.batch, bags.output_dim))


def check_tables(a: SimpleNamespace) -> None:
    """Raises ValueError unless the tables fill weights, each at the next multiple of TABLE_ALIGNMENT bytes."""
    for i, t in enumerate(a.tables):
        check_tensor(t, f"tables[{i}]", (a.weights.dtype,), rank=2)
    elements = table_starts([t.numel() for t in a.tables])[-1]
    where = f"the tables one after the other at multiples of {TABLE_ALIGNMENT // 4}"
    fits = a.weights.numel() == elements
    check(fits, f"weights must have {elements} elements, {where}, got {a.weights.numel()}")


def check_update(a: SimpleNamespace) -> None:
    """Raises ValueError for optimizer state, step or learning rate that do not fit the optimizer."""
    check(a.optimizer in OPTIMIZERS, f'optimizer must be one of {", ".join(OPTIMIZERS)}, got "{a.optimizer}"')
    check_tensor(a.step, "step", (torch.int64,), rank=0)
    check_tensor(a.lr, "lr", (torch.float32,), contiguous=True)
    check(a.lr.dim() <= 1, f"lr must have at most 1 dimension, got shape {list(a.lr.shape)}")
    for name, optimizers in _STATE.items():
        wanted = a.optimizer in optimizers
        given = getattr(a, name) is not None
        check(given == wanted, f'{name} must{"" if wanted else " not"} be given for optimizer "{a.optimizer}"')
    if a.sum is not None:
        check_tensor(a.sum, "sum", (torch.float32,), rank=1, contiguous=True)
    good = 0 <= a.eps <= torch.finfo(torch.float32).max
    check(good, f"eps = {a.eps:g} must be at least 0, and finite as float32")
    good = all(0 <= beta < 1 - 2**-25 for beta in (a.beta1, a.beta2))  # values closer to 1 round to 1 in float32
    check(good, f"beta1 and beta2 must be in [0, 1) as float32, got {a.beta1:g} and {a.beta2:g}")
    check(
        a.optimizer in _HERE,
        f'optimizer "{a.optimizer}" is not among those of the Triton kernels, {" and ".join(_HERE)}; the compiled CUDA '
        "library has it (rk.build_info() says why it is not in use)",
    )


def check_rounding(a: SimpleNamespace) -> None:
    """Validates rounding options like the compiled ops; raises ValueError for stochastic rounding of narrow weights."""
    modes, roundings = ("l2", "decoupled"), ("nearest", "stochastic")
    check(a.weight_decay_mode in modes, f'weight_decay_mode must be "l2" or "decoupled", got "{a.weight_decay_mode}"')
    check(a.rounding in roundings, f'rounding must be "nearest" or "stochastic", got "{a.rounding}"')
    if a.weights.dtype != torch.float32 and a.rounding != "nearest":
        raise ValueError(
            f'rounding must be "nearest" for {_name(a.weights.dtype)} weights, got "{a.rounding}": the Triton kernels '
            f"have no noise, it needs {_COMPILED}"
        )
    if a.seed is not None:
        check_tensor(a.seed, "seed", (torch.int64,), rank=0)


def check_controls(a: SimpleNamespace, bags: BagInput) -> None:
    """Raises ValueError for state with too few rows, and for wrong controls of an update."""
    enough = a.sum is None or a.sum.shape[0] >= bags.num_rows
    check(enough, f"sum must have one element per row ({bags.num_rows}), got {0 if enough else a.sum.shape[0]}")
    if a.status is not None:
        check_tensor(a.status, "status", (torch.int64,), shape=(2,), contiguous=True)
    for name in ("grad_scale", "found_inf"):
        check_scalar(a, name)


def check_scalar(a: SimpleNamespace, name: str) -> None:
    """Raises ValueError unless the tensor is None or a single float32 element."""
    t = getattr(a, name)
    if t is not None:
        check(t.numel() == 1, f"{name} must have one element, got shape {list(t.shape)}")
        check_tensor(t, name, (torch.float32,))
