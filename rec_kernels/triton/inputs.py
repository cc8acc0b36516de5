"""From the arguments of an embedding_bag op to what the Triton kernels read, and the checks that wait for no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import triton
from torch import Tensor

from rec_kernels.triton.kernels import start_kernel

# As in rec_kernels/ops/embedding_bag.py, which this layer does not import.
TABLE_ALIGNMENT = 16
LAYOUT = ("weight_offsets", "row_offsets", "num_embeddings", "embedding_dims", "output_offsets")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 2**31 - 1  # programs in a launch
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam", "lamb")
_HERE = OPTIMIZERS[:2]
_ADAMS = OPTIMIZERS[3:]
_COMPILED = "the compiled CUDA library (rk.build_info() says why it is not in use)"
# What the kernels have nothing for, and its defaults: batch sizes of features' own, bags that samples share, features
# of several parts, row caches, and what lies between a gradient and the optimizer.
_UNUSED = {
    **dict.fromkeys(("bag_starts", "inverse", "groups", "partition_starts", "multiplies")),
    **dict.fromkeys(f"cache_{name}" for name in ("rows", "offsets", "slots", "tags", "marks", "dirty", "sets")),
    **dict.fromkeys(("cache_set_starts", "clip_grad_value", "clip_grad_norm")),
    "max_parts": 0,
    "cache_ways": 0,
    "weight_decay": 0.0,
}
_OF_PARTS = ("divisors", "moduli", "id_limits", "combine")
# Who gives them, for those who never did by themselves.
_GIVEN_BY = {
    "bag_starts": " (rk.EmbeddingCollection, rk.PathEmbeddingBag and features with batch sizes of their own do)",
    "inverse": " (batches with inverse_indices do)",
    "partition_starts": " (rk.Hash, rk.QuotientRemainder and rk.Partitions do)",
}
# Which optimizers have a kind of state.
_STATE = {"sum": ("rowwise_adagrad", "adagrad"), "exp_avg": _ADAMS, "exp_avg_sq": _ADAMS, "beta_powers": _ADAMS}


def check(ok: bool, message: str) -> None:
    """Raises ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


def check_offered(a: SimpleNamespace) -> None:
    """Raises ValueError for arguments that the Triton kernels have nothing for."""
    if a.formats is not None or a.format_of is not None or a.embedding_dim != 0:
        raise ValueError(
            "formats, format_of and embedding_dim must not be given: the Triton kernels take float tables only, "
            f"rows of bytes need {_COMPILED}"
        )
    for name, default in _UNUSED.items():
        given = getattr(a, name, default)
        if given is not default and (isinstance(given, Tensor) or given != default):
            what = f"the Triton kernels do without, it needs {_COMPILED}"
            raise ValueError(f"{name} must not be given{_GIVEN_BY.get(name, '')}: {what}")
    if any(getattr(a, name) is not None for name in _OF_PARTS):
        raise ValueError("partition_starts is missing: divisors, moduli, id_limits and combine mean nothing without it")
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
    """Raises ValueError, which names the tensor and what it should be, for another shape, dtype or memory layout."""
    # Messages are made for who reads them: a call makes some twenty of these checks.
    if rank is not None and t.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimension(s), got shape {list(t.shape)}")
    if shape is not None and t.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    if t.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(_name, dtypes))}, got {_name(t.dtype)}")
    if contiguous and not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous; call .contiguous() on it")


def check_one_device(a: SimpleNamespace) -> None:
    """Raises ValueError unless all tensors among the arguments are where ``values`` is."""
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
    padding_idx: int
    check_ids: bool
    raises: bool
    frozen: Tensor | None  # [F] bool: features whose ids give no gradient

    @property
    def bags(self) -> dict[str, object]:
        """Arguments of every kernel that goes through the bags."""
        return {
            "values": self.values,
            "offsets": self.offsets,
            "features": self.features,
            "status": self.status,
            "num_ids": self.values.shape[0],
            "num_offsets": self.offsets.shape[0],
            "batch": self.batch,
            "padding_idx": self.padding_idx,
            "CHECK": self.check_ids,
            "BLOCK_IDS": 64,
        }

    @property
    def blocks(self) -> dict[str, int]:
        """A tile of rows: 2048 elements keep 128 threads busy; more than 16 rows would mostly wait for short bags."""
        columns = min(triton.next_power_of_2(max(self.max_dim, 1)), 1024)
        return {"BLOCK_ROWS": min(16, 2048 // columns), "BLOCK_COLUMNS": columns}


def check_weights(a: SimpleNamespace) -> None:
    """Raises ValueError for weights that no table can lie in."""
    rank = 2 if a.embedding_dims is None else 1
    check_tensor(a.weights, "weights", FLOATS, rank=rank, contiguous=True)


def check_own_weights(a: SimpleNamespace) -> None:
    """Raises ValueError for ``weights`` that a gradient of ``weights_shape`` cannot be of; it does not read them."""
    if a.weights is not None:
        check_weights(a)
        if tuple(a.weights.shape) != tuple(a.weights_shape):
            shape = list(a.weights.shape)
            raise ValueError(f"weights must have the shape that weights_shape names, got {shape}")


def _check_layout(a: SimpleNamespace, bags: int) -> None:
    for name in ("output_dim", "num_rows", "max_embedding_dim"):
        size = getattr(a, name)
        if size < 0:
            raise ValueError(f"{name} = {size} must be at least 0")
    layout = {name: getattr(a, name) for name in LAYOUT}
    if a.embedding_dims is None:
        tensors = [*layout.values(), a.mean, a.frozen]
        unused = all(t is None for t in tensors) and not (a.output_dim or a.num_rows or a.max_embedding_dim)
        check(unused, "embedding_dims is missing: other layout arguments mean nothing without it")
        return
    check_tensor(a.embedding_dims, "embedding_dims", (torch.int64,), rank=1)
    features = a.embedding_dims.shape[0]
    for name, t in layout.items():
        if t is None:
            raise ValueError(f"{name} is missing: embedding_dims is given, so the layout of every feature must be")
        check_tensor(t, name, (torch.int64,), shape=(features,), contiguous=True)
    if a.mean is not None:
        check_tensor(a.mean, "mean", (torch.bool,), shape=(features,), contiguous=True)
    if a.frozen is not None:
        check_tensor(a.frozen, "frozen", (torch.bool,), shape=(features,), contiguous=True)
    if bags % features if features else bags:
        expected = "offsets must have num_features * batch + 1 elements"
        raise ValueError(f"{expected}, got {a.offsets.shape[0]} for {features} features")


def _check_bags(a: SimpleNamespace, include_last_offset: bool) -> int:
    integers = (torch.int32, torch.int64)
    check(a.pooling in ("sum", "mean"), f'pooling must be "sum" or "mean", got "{a.pooling}"')
    known = a.bounds_check in ("error", "ignore", "none")
    check(known, f'bounds_check must be "error", "ignore" or "none", got "{a.bounds_check}"')
    check_tensor(a.values, "values", integers, rank=1)
    check_tensor(a.offsets, "offsets", integers, rank=1)
    bags = a.offsets.shape[0] - int(include_last_offset)
    check(bags >= 0, "offsets must have num_features * batch + 1 elements, got none")
    factors = getattr(a, "per_sample_weights", None)
    if factors is not None:
        check_tensor(factors, "per_sample_weights", (torch.float32,), shape=tuple(a.values.shape))
    _check_layout(a, bags)
    if bags > _MOST:
        raise ValueError(f"offsets describe {bags} bags; at most 2^31 - 1 fit in a call")
    return bags


def _sizes(a: SimpleNamespace, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(output_dim, num_rows, max_dim); reads them back from the GPU only where a layout comes without them."""
    if a.embedding_dims is None:
        check(shape[1] >= 1, f"weights must have at least one column, got shape {list(shape)}")
        return shape[1], shape[0], shape[1]
    num_rows, max_dim = a.num_rows, a.max_embedding_dim
    if a.embedding_dims.shape[0] and not (num_rows > 0 and max_dim > 0):
        ends = a.row_offsets + a.num_embeddings
        most = torch.stack([ends.max(), a.embedding_dims.max()]).tolist()
        num_rows, max_dim = max(num_rows, most[0]), max(max_dim, most[1])
    return a.output_dim, num_rows, max_dim


def read_input(a: SimpleNamespace, weights_shape: tuple[int, ...]) -> BagInput:
    """Checks a call and starts its status.

    Args:
        a: the arguments of an op, by name.
        weights_shape: (E, D) of one table, (number of elements,) with a layout.

    Raises:
        ValueError: a wrong shape, dtype, device or option. The numbers in layout tensors are checked on the device;
            ``status`` tells of wrong ones.
    """
    check_one_device(a)
    include_last_offset = getattr(a, "include_last_offset", True)
    bags = _check_bags(a, include_last_offset)
    output_dim, num_rows, max_dim = _sizes(a, weights_shape)
    features = 1 if a.embedding_dims is None else a.embedding_dims.shape[0]
    packed = a.values.new_empty((features, 6), dtype=torch.int64)
    status = a.values.new_empty((2,), dtype=torch.int64)
    elements = torch.Size(weights_shape).numel()
    layout = [getattr(a, name) for name in LAYOUT]
    mean = a.pooling == "mean"
    start_kernel[(1,)](
        *layout,
        *(a.mean, packed, status, features, elements, output_dim, num_rows, max_dim),
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
        padding_idx=a.padding_idx,
        check_ids=a.bounds_check != "none",
        raises=a.bounds_check == "error",
        frozen=a.frozen,
    )


def check_gradient(a: SimpleNamespace, bags: BagInput) -> None:
    """Raises ValueError for a gradient of another shape or dtype than the output's."""
    check_tensor(a.grad, "grad", (torch.float32,), shape=(bags.batch, bags.output_dim))


def check_tables(a: SimpleNamespace) -> None:
    """Raises ValueError for tables that are not all of weights, each at the next multiple of TABLE_ALIGNMENT."""
    elements = 0
    for t in a.tables:
        check(t.dim() == 2, f"tables must have 2 dimension(s), got shape {list(t.shape)}")
        elements += -(-t.numel() // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    where = f"the tables one after the other at multiples of {TABLE_ALIGNMENT}"
    fits = a.weights.numel() == elements
    check(fits, f"weights must have {elements} elements, {where}, got {a.weights.numel()}")
    check(a.embedding_dims is not None, "embedding_dims is missing: embedding_bag_tables needs the layout arguments")


def check_update(a: SimpleNamespace) -> None:
    """Raises ValueError for optimizer state, step or learning rate of another kind than the optimizer's."""
    check(a.optimizer in OPTIMIZERS, f'optimizer must be one of {", ".join(OPTIMIZERS)}, got "{a.optimizer}"')
    check_tensor(a.step, "step", (torch.int64,), rank=0)
    check_tensor(a.lr, "lr", (torch.float32,), rank=0)
    for name, optimizers in _STATE.items():
        wanted = a.optimizer in optimizers
        given = getattr(a, name) is not None
        check(given == wanted, f'{name} must{"" if wanted else " not"} be given for optimizer "{a.optimizer}"')
    if a.sum is not None:
        check_tensor(a.sum, "sum", (torch.float32,), rank=1, contiguous=True)
    good = 0 <= a.eps <= torch.finfo(torch.float32).max
    check(good, f"eps = {a.eps:g} must be at least 0, and finite as float32")
    good = all(0 <= beta < 1 - 2**-25 for beta in (a.beta1, a.beta2))  # what is closer to 1 is 1 as float32
    check(good, f"beta1 and beta2 must be in [0, 1) as float32, got {a.beta1:g} and {a.beta2:g}")
    places = "they are for a layout and an optimizer with state for every element"
    elementwise = a.optimizer not in _HERE
    check(elementwise or a.moment_offsets is None, f"moment_offsets must not be given: {places}")
    check(
        not elementwise,
        f'optimizer "{a.optimizer}" is not among those of the Triton kernels, {" and ".join(_HERE)}; the compiled CUDA '
        "library has it (rk.build_info() says why it is not in use)",
    )


def check_rounding(a: SimpleNamespace) -> None:
    """Raises ValueError for options that change nothing here as the compiled ops do, and for noise: there is none."""
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
    if a.table_ids is not None:
        check(a.embedding_dims is not None, "embedding_dims is missing: table_ids mean nothing without it")
        check_tensor(a.table_ids, "table_ids", (torch.int64,), shape=tuple(a.embedding_dims.shape), contiguous=True)


def check_controls(a: SimpleNamespace, bags: BagInput) -> None:
    """Raises ValueError for state that does not reach every row, and for what says whether and how to update."""
    enough = a.sum is None or a.sum.shape[0] >= bags.num_rows
    check(enough, f"sum must have one element per row ({bags.num_rows}), got {0 if enough else a.sum.shape[0]}")
    if a.status is not None:
        check_tensor(a.status, "status", (torch.int64,), shape=(2,), contiguous=True)
    for name in ("grad_scale", "found_inf"):
        check_scalar(a, name)


def check_scalar(a: SimpleNamespace, name: str) -> None:
    """Raises ValueError for a tensor that is neither None nor one float32 element."""
    t = getattr(a, name)
    if t is not None:
        check(t.numel() == 1, f"{name} must have one element, got shape {list(t.shape)}")
        check_tensor(t, name, (torch.float32,))
