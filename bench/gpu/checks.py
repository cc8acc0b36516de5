"""No figure from a wrong kernel: outputs against torch, updates against one computed by torch in float64."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.implementations import EPS, LR, Implementation, Tables
from rec_kernels.testing import assert_same_sum, rounding_bound

UNIT = torch.finfo(torch.float32).eps / 2


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New memory starts as NaN: what a kernel forgets to write is not what a right kernel left there before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_forward(data: Tables, implementation: Implementation) -> None:
    """The output against torch's, table by table.

    Raises:
        AssertionError: they differ by more than the rounding of sums of L rows explains, or something is NaN.
    """
    w = data.workload
    with poisoned():
        output = implementation.forward()
    found = output if isinstance(output, list) else output.split(w.dim, dim=1)
    for mine, table, ids in zip(found, implementation.tables, data.ids_of_tables, strict=True):
        bags = ids.view(w.batch, w.bag)
        expected = F.embedding_bag(bags, table, mode="sum")
        assert_same_sum(mine, expected, table[bags].abs().double().sum(1), terms=w.bag)


class _Touched(NamedTuple):
    """The rows of one table that a batch names, before the update."""

    rows: Tensor  # [U], distinct
    row_of: Tensor  # [B * L], each id's place among them
    counts: Tensor  # [U]
    weights: Tensor  # [U, D]
    state: Tensor | None  # [U] or [U, D]


def check_update(data: Tables, implementation: Implementation, update: Callable[[], None]) -> None:
    """Every touched row and its state against the update that torch computes in float64 from the same gradient.

    Raises:
        AssertionError: a row or its state differs by more than rounding in FP32 explains, or is NaN.
    """
    touched, state = [], implementation.state or [None] * data.workload.tables
    for ids, table, sums in zip(data.ids_of_tables, implementation.tables, state, strict=True):
        rows, row_of, counts = ids.unique(return_inverse=True, return_counts=True)
        touched.append(_Touched(rows, row_of, counts, table[rows], None if sums is None else sums[rows]))
    with poisoned():
        update()
    parts = (touched, implementation.tables, state, data.grads_of_tables)
    for number, (before, table, sums, grad) in enumerate(zip(*parts, strict=True)):
        after = table[before.rows], None if sums is None else sums[before.rows]
        _check_table(f"table {number}", before, after, grad)


def _check_table(where: str, before: _Touched, after: tuple[Tensor, Tensor | None], grad: Tensor) -> None:
    bag_of = torch.arange(len(grad), device=grad.device).repeat_interleave(len(before.row_of) // len(grad))
    g = torch.zeros(before.weights.shape, dtype=torch.float64, device=grad.device)
    size = g.clone()
    g.index_add_(0, before.row_of, grad.double()[bag_of])
    size.index_add_(0, before.row_of, grad.double().abs()[bag_of])
    # Any order of the additions in FP32, and a factor of two to spare.
    n_u = (before.counts + 2).double()[:, None] * UNIT
    error = 2 * n_u / (1 - n_u) * size
    factor, slack = torch.full_like(g, LR), torch.full_like(g, 4 * UNIT)
    if before.state is not None:
        elementwise = before.state.dim() == 2
        mean = (lambda x: x) if elementwise else (lambda x: x.mean(1, keepdim=True))
        v = (before.state if elementwise else before.state[:, None]).double() + mean(g.square())
        # sqrt(v) is the length of a vector that holds g: it is off by no more than the length of g's own error.
        off, inexact = mean(error.square()).sqrt(), rounding_bound(g.shape[1] + 8)
        found = after[1] if elementwise else after[1][:, None]
        allowed = 2 * v.sqrt() * off + off.square() + inexact * v
        _within(f"{where}: optimizer state", found, v, allowed)
        factor = LR / (v.sqrt() + EPS)
        slack = 1.1 * off / (v.sqrt() + EPS) + 2 * inexact
    moved = factor * (g.abs() + error)
    allowed = factor * error + slack * moved + 4 * UNIT * (before.weights.double().abs() + moved)
    _within(f"{where}: rows", after[0], before.weights.double() - factor * g, allowed)


def _within(what: str, found: Tensor, expected: Tensor, allowed: Tensor) -> None:
    worst = ((found.double() - expected).abs() - allowed).max().item()
    # NaN is not below anything either.
    if not worst <= 0:
        raise AssertionError(f"{what} differ by {worst:.3e} more than rounding explains")
