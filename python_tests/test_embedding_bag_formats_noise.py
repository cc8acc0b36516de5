"""Stochastic rounding in fused updates preserves small updates on average; its noise has defined inputs."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import LR, make_case
from embedding_bag_format_cases import STEP, EncodedCase, every_format_once
from layout_calls import OPS
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.testing import same_bits

ops = OPS
NARROW = [f for f in BAG_FORMATS if f != "fp32"]


def bags_of_one(rows: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets of a batch in which every row is a separate bag."""
    return torch.arange(rows), torch.arange(rows + 1)


def assert_mean(numbers: Tensor, expected: Tensor, slack: Tensor) -> None:
    """The mean over the draws [N, D] is within six standard errors of ``expected`` [D], and ``slack``."""
    numbers = numbers.double()
    error = (numbers.mean(0) - expected.double()).abs()
    # If most draws have a small error, a code a whole step away may be too rare to estimate the variance.
    step = (numbers.amax(0) - numbers.amin(0)).max()
    variance = torch.maximum(numbers.var(0), error * step)
    allowed = 6 * (variance / len(numbers)).sqrt() + slack
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (int(worst), float(error[worst]), float(allowed[worst]))


def update_rows(table: Tensor, grad: Tensor, step: Tensor, lr: float = LR, **options) -> None:
    """One fused update in which every row occurs once."""
    state = torch.zeros(len(table)) if options["optimizer"] == "rowwise_adagrad" else None
    arguments = (table, state, step, torch.tensor(lr), grad, *bags_of_one(len(table)))
    ops.embedding_bag_backward_fused_(*arguments, **options)


def grow(format: str, rounding: str, rows: int, updates: int) -> tuple[Tensor, Tensor]:
    """Decoded tables of ones with a -4 and a 4, before and after ``updates`` of 0.001 to each one."""
    dim, fixed = 32, [0, 31]
    x = torch.ones(rows, dim)
    x[:, fixed] = torch.tensor([-4.0, 4.0])
    grad = torch.full((rows, dim), -0.001)
    grad[:, fixed] = 0
    table, step, seed = rk.quantize_rows(x, format), torch.tensor(0), torch.tensor(17)
    before = rk.dequantize_rows(table, format, dim)
    options = {"formats": [format], "embedding_dim": dim, "optimizer": "sgd", "rounding": rounding, "seed": seed}
    for _ in range(updates):
        update_rows(table, grad, step, 1.0, **options)
    assert step.item() == updates
    return before[:, 1:31], rk.dequantize_rows(table, format, dim)[:, 1:31]


@pytest.mark.parametrize("format", NARROW)
def test_small_updates_add_up(format: str) -> None:
    """1 plus 1,500 times 0.001 is 2.5 on average, past the binade in which the step doubles."""
    before, after = grow(format, "stochastic", rows=40, updates=1500)
    assert_mean(after - before, torch.full((30,), 1.5), torch.tensor(1e-3))
    assert abs((after - before).mean() - 1.5) < 0.1


@pytest.mark.parametrize("format", [f for f in NARROW if f != "fp16"])
def test_small_updates_are_lost_to_the_nearest(format: str) -> None:
    """Rounding to nearest loses updates below half a step: hence the default. (A step of fp16 is 0.00098 here.)"""
    before, after = grow(format, "nearest", rows=2, updates=1500)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def case_of_all_formats() -> EncodedCase:
    """Tables in which every row occurs at most once, so that no order of a sum matters."""
    rows = 20
    case = make_case([(rows, 20)] * 8, list(range(8)), [1] * 8 * rows, seed=5)
    case.values.copy_(torch.cat([torch.randperm(rows) for _ in range(8)]))
    return every_format_once(case)


@pytest.mark.parametrize("change", ["seed", "seed's upper word", "step", "table_ids"])
def test_noise_depends_on(change: str) -> None:
    """Each input changes the bytes of every table; the defaults are seed 0 and table 0."""
    encoded = case_of_all_formats()
    changes = {
        "seed": {"seed": encoded.noise["seed"] + 1},
        "seed's upper word": {"seed": encoded.noise["seed"] + 2**32},
        "step": {"step": STEP + 1},
        "table_ids": {"table_ids": encoded.noise["table_ids"] - 1},
    }[change]
    for backend in every_backend():
        first, second = (encoded.update("sgd", "stochastic", backend.ops, **c)[0] for c in ({}, changes))
        for format, a, b in zip(encoded.formats, encoded.split(first), encoded.split(second), strict=True):
            assert torch.equal(a, b) == (format == "fp32"), (backend.name, format)
        nearest = [encoded.update("sgd", "nearest", backend.ops, **c)[0] for c in ({}, changes)]
        assert torch.equal(*nearest), backend.name
        if change in ("seed", "table_ids"):
            defaults = [None, torch.tensor(0) if change == "seed" else torch.zeros(8, dtype=torch.int64)]
            found = [encoded.update("sgd", "stochastic", backend.ops, **{change: d})[0] for d in defaults]
            assert torch.equal(*found), backend.name


def test_noise_does_not_depend_on_the_order_of_the_batch() -> None:
    """Bags in another order give equal bytes."""
    encoded = case_of_all_formats()
    case, order = encoded.case, torch.randperm(20)
    for backend in every_backend():
        expected = encoded.update("rowwise_adagrad", "stochastic", backend.ops)
        values = case.values.clone()
        case.values.copy_(values.view(8, 20)[:, order].flatten())
        found = encoded.update("rowwise_adagrad", "stochastic", backend.ops, grad=case.grad[order])
        case.values.copy_(values)
        assert all(map(same_bits, found, expected)), backend.name
