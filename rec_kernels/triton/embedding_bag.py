"""embedding_bag in Triton, for GPUs and installs without the compiled CUDA library.

``embedding_bag.layout`` and the others have the names, arguments and results of the ops in docs/ops.md; ``help()``
shows the signatures. They take tensors on a GPU, or on the CPU under TRITON_INTERPRET=1 (to be set before Triton is
imported). How they differ from the compiled kernels:

- Results agree with docs/numerics.md within rounding, not bit for bit: each sum has the same FP32 terms, but the
  compiler chooses their order. No float is added atomically.
- ``weights`` may also be FP16 or BF16. Their rows are widened to FP32, and an updated row is rounded
  to nearest once. Output, gradients and state are FP32.
- Bad ids, bad offsets and a wrong layout raise no error: they are recorded in ``status``
  (rec_kernels/triton/kernels.py). A bad id is skipped, a bag with bad offsets is empty, and with a wrong layout the
  output is not written at all. An update is skipped after bad offsets or a wrong layout, and, with
  ``bounds_check="error"``, after a bad id. Gradients of the weights are zeros after bad offsets or a wrong layout.
- Row formats, row caches, ``bag_starts``, ``inverse``, features of several parts, ids that are divided or wrap around,
  clipping and weight decay are rejected: they need the compiled library. So is ``rounding="stochastic"``, the default,
  for updates of FP16 and BF16 tables.
- One program sums all occurrences of a row: very hot rows are slow.
- It is tested in Triton's interpreter, compiled for NVIDIA and AMD targets, and has run on an H200.

Every function raises ValueError for a wrong shape, dtype, device or option, and TypeError for arguments that its op
does not have.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.triton import inputs, kernels
from rec_kernels.triton.inputs import BagInput, check

_ops = torch.ops.rec_kernels
# Asks the compiler to keep a product and a sum as two operations.
_EXACT = {"enable_fp_fusion": False}


class Overloads:
    """Overloads of an op as attributes: ``embedding_bag.layout``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.all: dict[str, Callable] = {}

    def __getattr__(self, overload: str) -> Callable:
        if overload not in self.all:
            raise AttributeError(f"{self.__name__} has no overload {overload!r}, only {list(self.all)}")
        return self.all[overload]


embedding_bag = Overloads("embedding_bag")
embedding_bag_tables = Overloads("embedding_bag_tables")
embedding_bag_fused = Overloads("embedding_bag_fused")
embedding_bag_backward_fused_ = Overloads("embedding_bag_backward_fused_")
embedding_bag_backward_dense = Overloads("embedding_bag_backward_dense")
embedding_bag_backward_sparse = Overloads("embedding_bag_backward_sparse")
embedding_bag_backward_per_sample_weights = Overloads("embedding_bag_backward_per_sample_weights")


def _overload_of(op: Overloads, *names: str) -> Callable:
    """Decorates a function of one namespace; it becomes the named overloads of an op."""

    def add(function: Callable[[SimpleNamespace], object]) -> Callable:
        for name in names:
            op.all[name] = _like_op(function, getattr(getattr(_ops, op.__name__), name)._schema.arguments)
        return function

    return add


def _like_op(function: Callable[[SimpleNamespace], object], arguments: Sequence) -> Callable:
    """Gives a function of one namespace the signature of an op."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [
            inspect.Parameter(
                a.name,
                positional,
                annotation=str(a.type),
                default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            )
            for a in arguments
        ]
    )

    names = tuple(a.name for a in arguments)
    known, defaults = set(names), {a.name: a.default_value for a in arguments if a.has_default_value()}

    @functools.wraps(function)
    def call(*positions, **named):
        given = dict(zip(names, positions, strict=False)) | named
        complete = defaults | given
        # signature.bind takes longer than all checks of a call: only used for its error message.
        if len(given) != len(positions) + len(named) or complete.keys() != known:
            signature.bind(*positions, **named)
        a = SimpleNamespace(**complete)
        inputs.check_offered(a)
        # Triton launches on the current device, which may differ from the tensors' device.
        with torch.accelerator.device_index(a.values.device.index):
            return function(a)

    named: Any = call
    named.__signature__ = signature
    return named


def _pool(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    inputs.check_weights(a)
    bags = inputs.read_input(a, tuple(a.weights.shape))
    output = a.weights.new_empty((bags.batch, bags.output_dim), dtype=torch.float32)
    if bags.num_bags:
        kernels.pool_kernel[(bags.num_bags,)](
            weights=a.weights,
            factors=bags.factors,
            output=output,
            output_dim=bags.output_dim,
            **bags.bags,
            **bags.blocks,
            **_EXACT,
        )
    return output.to(a.output_dtype or torch.float32), bags.status


@_overload_of(embedding_bag, "layout", "table")
def _embedding_bag(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Pools bags of one table or many: (output [B, output_dim], status [2] int64)."""
    return _pool(a)


@_overload_of(embedding_bag_tables, "layout")
def _embedding_bag_tables(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Looks up like ``_embedding_bag``; ``tables``, views of ``weights``, are for autograd only."""
    inputs.check_tables(a)
    return _pool(a)


@_overload_of(embedding_bag_fused, "layout")
def _embedding_bag_fused(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Looks up like ``_embedding_bag``; state, step, learning rate and loss scale are for the backward only."""
    inputs.check_update(a)
    inputs.check_rounding(a)
    inputs.check_scalar(a, "grad_scale")
    return _pool(a)


class _Occurrences(NamedTuple):
    """The ids of a call sorted by linear row: [N] each."""

    keys: Tensor  # rows in ascending order; num_rows for skipped ids
    stops: Tensor  # end of the row's occurrences
    order: Tensor  # position in `values`
    bag_of: Tensor  # by position in `values`
    coefficients: Tensor  # likewise


def _sort(bags: BagInput) -> _Occurrences:
    count = bags.values.shape[0]
    check(count < 2**31, f"values hold {count} ids; at most 2^31 - 1 fit in a call of a backward")
    # Half the bytes, half the time of the sort.
    key = torch.int32 if bags.num_rows < 2**31 else torch.int64
    keys = bags.values.new_full((count,), bags.num_rows, dtype=key)
    bag_of = bags.values.new_empty((count,), dtype=torch.int32)
    coefficients = bags.values.new_empty((count,), dtype=torch.float32)
    if bags.num_bags:
        kernels.occurrences_kernel[(bags.num_bags,)](
            factors=bags.factors, keys=keys, bag_of=bag_of, coefficients=coefficients, **bags.bags, **_EXACT
        )
    if bags.frozen is not None and bags.num_bags:
        # bag_of is arbitrary for positions outside all bags, hence the clamp; their key excludes them.
        feature = (bag_of // bags.batch).clamp(0, bags.frozen.shape[0] - 1)
        keys.masked_fill_(bags.frozen[feature], bags.num_rows)
    keys, order = torch.sort(keys, stable=True)
    return _Occurrences(keys, torch.searchsorted(keys, keys, right=True), order, bag_of, coefficients)


def _finish_rows(
    a: SimpleNamespace,
    bags: BagInput,
    occurrences: _Occurrences,
    target: Tensor,
    *,
    places: Tensor | None = None,
    update: bool = False,
) -> None:
    if not bags.values.shape[0]:
        return
    kernels.finish_rows_kernel[(bags.values.shape[0],)](
        target=target,
        state=a.sum if update else None,
        lr=a.lr if update else None,
        lr_stride=a.lr.dim() if update else 0,
        eps=a.eps if update else 0.0,
        grad=a.grad.contiguous(),
        **occurrences._asdict(),
        features=bags.features,
        places=places,
        own_status=bags.status,
        forward_status=a.status if update else None,
        grad_scale=a.grad_scale if update else None,
        found_inf=a.found_inf if update else None,
        batch=bags.batch,
        output_dim=bags.output_dim,
        left_out=bags.num_rows,
        RAISE=update and bags.raises,
        **bags.blocks,
        **_EXACT,
    )


@_overload_of(embedding_bag_backward_fused_, "layout")
def _backward_fused(a: SimpleNamespace) -> None:
    """Updates every touched row of ``weights`` once, with ``sum``, and increments ``step``; does not synchronize."""
    inputs.check_update(a)
    inputs.check_rounding(a)
    inputs.check_weights(a)
    bags = inputs.read_input(a, tuple(a.weights.shape))
    inputs.check_gradient(a, bags)
    inputs.check_controls(a, bags)
    _finish_rows(a, bags, _sort(bags), a.weights, update=True)
    kernels.advance_step_kernel[(1,)](a.step, bags.status, a.status, a.found_inf, RAISE=bags.raises, **_EXACT)


def _read_backward(a: SimpleNamespace) -> BagInput:
    if hasattr(a, "layout"):
        inputs.check_weights(a)
        a.weights_shape = a.weights.shape
    else:
        check(len(a.weights_shape) == 2, f"weights_shape must have 2 elements, got {len(a.weights_shape)}")
    bags = inputs.read_input(a, tuple(a.weights_shape))
    inputs.check_gradient(a, bags)
    return bags


@_overload_of(embedding_bag_backward_dense, "layout", "table")
def _backward_dense(a: SimpleNamespace) -> Tensor:
    """Computes the dense float32 gradient of ``weights``; zeros for rows without ids."""
    bags = _read_backward(a)
    out = a.grad.new_zeros(a.weights_shape)
    _finish_rows(a, bags, _sort(bags), out)
    return out


@_overload_of(embedding_bag_backward_sparse, "layout", "table")
def _backward_sparse(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients of the touched rows: (rows int64, row_grads float32, row_counts [F] int64); synchronizes."""
    bags = _read_backward(a)
    occurrences = _sort(bags)
    keys, features = occurrences.keys, bags.features
    starts_run = keys != bags.num_rows
    starts_run[1:] &= keys[1:] != keys[:-1]
    starts = starts_run.nonzero()[:, 0]
    run_rows = keys[starts].long()
    feature = features[occurrences.bag_of[occurrences.order[starts]].long() // max(bags.batch, 1)]
    last = feature[:, 3].cumsum(0)
    places = torch.zeros_like(occurrences.order)
    places[starts] = last - feature[:, 3]
    row_grads = a.grad.new_zeros((int(last[-1]) if len(last) else 0,))
    _finish_rows(a, bags, occurrences, row_grads, places=places)
    first, rows = features[:, 1].contiguous(), features[:, 2]
    counts = torch.searchsorted(run_rows, first + rows) - torch.searchsorted(run_rows, first)
    return run_rows - feature[:, 1], row_grads, counts


@_overload_of(embedding_bag_backward_per_sample_weights, "layout", "table")
def _backward_factors(a: SimpleNamespace) -> Tensor:
    """Computes the gradient of ``per_sample_weights``: [N] float32, zeros for skipped ids."""
    inputs.check_weights(a)
    bags = inputs.read_input(a, tuple(a.weights.shape))
    inputs.check_gradient(a, bags)
    out = a.grad.new_zeros(a.values.shape)
    if bags.num_bags:
        kernels.factor_gradient_kernel[(bags.num_bags,)](
            grad=a.grad.contiguous(),
            weights=a.weights,
            out=out,
            output_dim=bags.output_dim,
            **bags.bags,
            **bags.blocks,
            **_EXACT,
        )
    return out
