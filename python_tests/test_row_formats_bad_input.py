"""quantize_rows and dequantize_rows reject invalid arguments; errors say what is allowed."""

from __future__ import annotations

import re

import pytest
import torch
from backends import device_backends, emulated
from row_format_bytes import INTEGERS, ROUNDINGS
from row_format_cases import NO_POSITION, not_finite_rows

import rec_kernels as rk
from rec_kernels.ops.row_formats import raise_not_finite

NAMES = ", ".join(rk.ROW_FORMATS)
X = torch.ones(3, 5)
ROWS = torch.zeros(3, 13, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X, "fp8"), {}, f'format must be one of {NAMES}; got "fp8"'),
        ((X, "fp32"), {"rounding": "up"}, 'rounding must be "nearest" or "stochastic", got "up"'),
        ((X, "mx9"), {"scale_rule": "ceil"}, 'scale_rule must be "floor", "rceil" or None, got "ceil"'),
        ((X[0], "int8"), {}, "x must have 2 dimension(s), got shape [5]"),
        ((X.double(), "int8"), {}, "x must be float32, float16 or bfloat16, got float64"),
        ((X.long(), "int8"), {}, "x must be float32, float16 or bfloat16, got int64"),
        ((X[:, :0], "mx4"), {}, "x must have at least one column, got shape [3, 0]"),
        ((torch.empty(0, 2**31), "int8"), {}, "x must have fewer than 2^31 columns, got shape [0, 2147483648]"),
        ((torch.empty(0, 2**62), "int4"), {}, f"x must have fewer than 2^31 columns, got shape [0, {2**62}]"),
        ((X, "mx4"), {"table": 65536}, "table = 65536 must be in [0, 65536)"),
        ((X, "mx4"), {"table": -1}, "table = -1 must be in [0, 65536)"),
        ((X, "mx4"), {"first_row": -1}, "first_row = -1 must be in [0, 2^44 - 3]"),
        ((X, "mx4"), {"first_row": 2**44 - 2}, f"first_row = {2**44 - 2} must be in [0, 2^44 - 3]"),
        ((X, "mx4"), {"seed": torch.zeros(1).long()}, "seed must have 0 dimension(s), got shape [1]"),
        ((X, "mx4"), {"step": torch.zeros(())}, "step must be int64, got float32"),
        ((X, "mx4"), {"step": torch.zeros((), dtype=torch.int64, device="meta")}, "same device"),
        ((X, "mx4"), {"seed": 1.5}, "seed must be an int or an int64 tensor with 0 dimensions, got 1.5"),
        ((X, "mx4"), {"step": None}, "step must be an int or an int64 tensor with 0 dimensions, got None"),
    ],
)
def test_bad_quantize(arguments: tuple, options: dict, message: str) -> None:
    """The message names the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.quantize_rows(*arguments, **({"rounding": "stochastic"} | options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROWS, "int8", 6), 'rows must be 14 bytes wide for format "int8" and embedding_dim = 6, got 13'),
        ((ROWS, "mx9", 33), 'rows must be 54 bytes wide for format "mx9" and embedding_dim = 33, got 13'),
        ((ROWS, "int7", 5), f'format must be one of {NAMES}; got "int7"'),
        ((ROWS, "int8", 0), "embedding_dim = 0 must be in [1, 2^31)"),
        ((ROWS, "int8", -5), "embedding_dim = -5 must be in [1, 2^31)"),
        ((ROWS, "int8", 2**31), f"embedding_dim = {2**31} must be in [1, 2^31)"),
        ((ROWS.float(), "int8", 5), "rows must be uint8, got float32"),
        ((ROWS[0], "int8", 5), "rows must have 2 dimension(s), got shape [13]"),
        ((ROWS, "int8", 5, torch.float64), "dtype must be float32, float16 or bfloat16, got float64"),
        ((ROWS, "int8", 5, torch.int32), "dtype must be float32, float16 or bfloat16, got int32"),
    ],
)
def test_bad_dequantize(arguments: tuple, message: str) -> None:
    """An error of the width has the right one for the format and D."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.dequantize_rows(*arguments)


def test_bad_row_bytes() -> None:
    """Rows of the wrong size are rejected."""
    with pytest.raises(ValueError, match=re.escape(f'format must be one of {NAMES}; got "MX6"')):
        rk.row_bytes("MX6", 4)
    with pytest.raises(ValueError, match="embedding_dim = 0 must be at least 1"):
        rk.row_bytes("mx6", 0)


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_not_finite(format: str, rounding: str, dtype: torch.dtype) -> None:
    """The first bad position in row order is reported, whichever thread finds it; on a GPU, through `status`."""
    for value, columns, places in (
        (torch.nan, 70, [(4, 33), (4, 69), (5, 0)]),
        (-torch.nan, 3, [(2, 1)]),
        (torch.inf, 5, [(0, 4)]),
        (-torch.inf, 33, [(4999, 32)]),
        (torch.nan, 33, [(4998, 7), (1234, 32), (1235, 0), (3000, 1)]),
    ):
        x = torch.randn(5000, columns).to(dtype)
        for place in places:
            x[place] = value
        row, column = min(places)
        message = re.escape(f'x[{row}, {column}] = {value}: format "{format}" holds finite numbers only')
        with pytest.raises(ValueError, match=message):
            rk.quantize_rows(x, format, rounding=rounding)
        status = torch.tensor([row * columns + column])
        with pytest.raises(ValueError, match=message):
            raise_not_finite(x, format, status)


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_status(format: str) -> None:
    """CUDA kernels report the first bad position instead of raising, for formats without a code for it."""
    x = torch.randn(9, 40)
    x[3, 39] = x[3, 17] = x[7, 0] = torch.nan
    for backend in device_backends():
        rows, status = backend.ops.quantize_rows(x, format)
        assert status.tolist() == [3 * 40 + 17 if format in INTEGERS else NO_POSITION], backend.name
        assert backend.ops.dequantize_rows(rows, format, 40, torch.float32)[3, 17].isnan()
    raise_not_finite(x, format, torch.tensor([NO_POSITION]))


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("format", ["int4", "mx4"])
@pytest.mark.parametrize("capturing", [False, True])
def test_the_public_function_reads_status(format: str, capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it raises if waiting is allowed and the format has no NaN; in a capture, the row decodes to NaN."""
    monkeypatch.setattr("rec_kernels.ops.row_formats._ops", emulated())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    x = torch.randn(4, 8)
    x[2, 5] = torch.nan
    if format == "int4" and not capturing:
        with pytest.raises(ValueError, match=r'x\[2, 5\] = nan: format "int4" holds finite numbers only'):
            rk.quantize_rows(x.as_subclass(OnGpu), format)
    else:
        rows = rk.quantize_rows(x.as_subclass(OnGpu), format)
        assert rk.dequantize_rows(rows, format, 8).isnan().any(1).tolist() == [False, False, True, False]
    clean = torch.randn(4, 8)
    rows = rk.quantize_rows(clean.as_subclass(OnGpu), format)
    monkeypatch.undo()
    assert torch.equal(rows, rk.quantize_rows(clean, format))


@pytest.mark.parametrize("format", [f for f in rk.ROW_FORMATS if f not in INTEGERS])
def test_others_hold_what_is_not_finite(format: str) -> None:
    """Float formats keep NaN and Inf; a block with one decodes to NaN. Nothing raises."""
    x = not_finite_rows(70)
    value = rk.dequantize_rows(rk.quantize_rows(x, format, rounding="stochastic"), format, 70)
    assert (value.isnan() | value.isinf())[~x.isfinite()].all()
    if format in ("fp32", "fp16", "bf16"):
        assert torch.equal(value.isinf(), x.isinf())


def test_a_failed_call_changes_nothing() -> None:
    """x is unchanged, and the next call is correct."""
    x = torch.randn(100, 8)
    expected, bad = rk.quantize_rows(x, "int4"), x.clone()
    bad[50, 3] = torch.nan
    before = bad.clone()
    with pytest.raises(ValueError, match=r"x\[50, 3\]"):
        rk.quantize_rows(bad, "int4")
    assert torch.equal(bad.view(torch.int32), before.view(torch.int32))
    assert torch.equal(rk.quantize_rows(x, "int4"), expected)
