"""Stochastic rounding in fused updates: small updates are kept on average, and where the noise comes from."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import LR, Case, make_case
from embedding_bag_format_cases import STEP, EncodedCase, every_format_once
from layout_calls import OPS
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.testing import same_bits, use_threads

ops = OPS
NARROW = [f for f in BAG_FORMATS if f != "fp32"]


def bags_of_one(rows: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets of a batch in which every row is a bag by itself."""
    return torch.arange(rows), torch.arange(rows + 1)


def assert_mean(numbers: Tensor, expected: Tensor, slack: Tensor) -> None:
    """The mean over the draws [N, D] is within six standard errors of ``expected`` [D], and ``slack``."""
    numbers = numbers.double()
    error = (numbers.mean(0) - expected.double()).abs()
    # A code a whole step away may be too rare among the draws where another is a small error away.
    step = (numbers.amax(0) - numbers.amin(0)).max()
    variance = torch.maximum(numbers.var(0), error * step)
    allowed = 6 * (variance / len(numbers)).sqrt() + slack
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (int(worst), float(error[worst]), float(allowed[worst]))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("format", NARROW)
def test_updates_are_unbiased(format: str, optimizer: str) -> None:
    """The mean over rows, seeds and steps is what FP32 computes, although it lies between two codes."""
    rows, dim = 300, 35
    generator = torch.Generator().manual_seed(3)
    encoded = rk.quantize_rows(torch.randn(1, dim, generator=generator).expand(rows, dim), format)
    before = rk.dequantize_rows(encoded, format, dim)
    grad = (torch.randn(1, dim, generator=generator) * 0.1).expand(rows, dim)
    options = {"formats": [format], "embedding_dim": dim, "optimizer": optimizer, "rounding": "stochastic"}
    floats, found = before.clone(), []
    update_rows(floats, grad, torch.tensor(0), optimizer=optimizer)
    for draw in range(16):
        table = encoded.clone()
        update_rows(table, grad, torch.tensor(draw // 4), **options, seed=torch.tensor(draw % 4))
        found.append(rk.dequantize_rows(table, format, dim))
    draws = torch.cat(found)
    assert draws.unique(dim=0).shape[0] > 100
    # The codes of integer rows are computed from float32 quotients, whose rounding errors no draw averages out.
    span = floats[0].max() - floats[0].min()
    assert_mean(draws, floats[0], span * 2.0**-20)


def update_rows(table: Tensor, grad: Tensor, step: Tensor, lr: float = LR, **options) -> None:
    """One fused update in which every row occurs once."""
    state = torch.zeros(len(table)) if options["optimizer"] == "rowwise_adagrad" else None
    arguments = (table, state, step, torch.tensor(lr), grad, *bags_of_one(len(table)))
    ops.embedding_bag_backward_fused_(*arguments, **options)


def grow(format: str, rounding: str, rows: int, updates: int) -> tuple[Tensor, Tensor]:
    """Tables of ones beside a -4 and a 4, decoded, before and after ``updates`` of 0.001 for each of the ones."""
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
    """Below half of a step, nothing ever moves: why "stochastic" is the default. (A step of fp16 is 0.00098 here.)"""
    before, after = grow(format, "nearest", rows=2, updates=1500)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def case_of_all_formats() -> EncodedCase:
    """Tables in which every row that occurs does so once, so that no order of a sum matters."""
    rows = 20
    case = make_case([(rows, 20)] * 8, list(range(8)), [1] * 8 * rows, seed=5)
    case.values.copy_(torch.cat([torch.randperm(rows) for _ in range(8)]))
    return every_format_once(case)


@pytest.mark.parametrize("change", ["seed", "seed's upper word", "step", "table_ids"])
def test_noise_depends_on(change: str) -> None:
    """Each of them: other bytes in every table; without a seed, seed 0; without ids, table 0."""
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


def test_noise_differs_between_rows_and_columns() -> None:
    """Equal numbers are rounded alike in about half of the cases only."""
    table = rk.quantize_rows(torch.full((500, 40), 1.0), "bf16")
    update_rows(
        table,
        torch.full((500, 40), -(2.0**-8)),
        torch.tensor(0),
        1.0,
        formats=["bf16"],
        embedding_dim=40,
        optimizer="sgd",
    )
    up = (rk.dequantize_rows(table, "bf16", 40) > 1).double()
    for share in (up.mean(0), up.mean(1)):
        assert share.min() > 0.1
        assert share.max() < 0.9
    for a, b in ((up[1:], up[:-1]), (up[:, 1:], up[:, :-1])):
        assert abs((a == b).double().mean() - 0.5) < 0.02


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


def test_noise_does_not_depend_on_other_tables() -> None:
    """Each table by itself, or a part of its rows: the bytes of the call with all of them."""
    encoded = case_of_all_formats()
    case = encoded.case
    for backend in every_backend():
        together, _, _ = encoded.update("sgd", "stochastic", backend.ops)
        for t, format in enumerate(encoded.formats):
            ids = case.values[20 * t : 20 * t + 20]
            alone = _one_of(case, ids[:13], format, encoded.split(encoded.flat)[t])
            alone.table_id = lambda table, t=t: encoded.table_id(t)
            grad = case.grad[:13, 20 * t : 20 * t + 20]
            found, _, _ = alone.update("sgd", "stochastic", backend.ops, grad=grad)
            expected = encoded.split(together)[t]
            assert torch.equal(alone.split(found)[0][ids[:13]], expected[ids[:13]]), (backend.name, format)


def _one_of(case: Case, ids: Tensor, format: str, rows: Tensor) -> EncodedCase:
    """A table of ``case`` with bags of one id each."""
    one = make_case([(20, 20)], [0], [1] * len(ids), seed=1)
    one.values.copy_(ids)
    return EncodedCase(one, [format], rows=[rows])


@pytest.mark.parametrize("format", NARROW)
def test_noise_does_not_depend_on_threads(format: str) -> None:
    """Enough rows for several threads, each with a part of them."""
    rows, dim = 6000, 24
    table, grad = rk.quantize_rows(torch.randn(rows, dim), format), torch.randn(rows, dim)
    options = {"formats": [format], "embedding_dim": dim, "seed": torch.tensor(-5)}
    found = []
    for threads in (1, 2, 5):
        found.append(table.clone())
        with use_threads(threads):
            update_rows(found[-1], grad, torch.tensor(2), optimizer="rowwise_adagrad", **options)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_step_drives_the_noise() -> None:
    """An update counts step, and the next one's noise is that of the new count; a skipped one uses nothing up."""
    encoded = case_of_all_formats()
    for backend in every_backend():
        step, flat = torch.tensor(STEP), encoded.flat.clone()
        for skipped in (1.0, 0.0, 1.0, 0.0):
            arguments = (flat, None, step, torch.tensor(LR), encoded.case.grad, *encoded.case.jagged)
            options = encoded.layout | encoded.noise | {"found_inf": torch.tensor(skipped)}
            backend.ops.embedding_bag_backward_fused_(*arguments, **options, optimizer="sgd")
        assert step.item() == STEP + 2, backend.name
        first = EncodedCase(
            encoded.case, encoded.formats, rows=encoded.split(encoded.update("sgd", "stochastic", backend.ops)[0])
        )
        found, _, _ = first.update("sgd", "stochastic", backend.ops, step=STEP + 1)
        assert torch.equal(found, flat), backend.name
