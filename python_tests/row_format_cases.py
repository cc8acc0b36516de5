"""Rows that are hard to encode, and the comparison of every backend with the reference."""

from __future__ import annotations

import torch
from backends import every_backend
from row_format_bytes import BLOCKS, INTEGERS, ROUNDINGS
from torch import Tensor

import rec_kernels as rk
from rec_kernels.reference import row_formats as reference
from rec_kernels.testing import same_bits

RULES = ["floor", "rceil"]
NO_POSITION = torch.iinfo(torch.int64).max
MOST = torch.finfo(torch.float32).max
#: Default noise arguments of a call: every part of the counter is in use.
PLACE = {"seed": 0x123456789ABCDEF, "step": 9, "table": 3, "first_row": 2**33 + 5}
#: torch's ops that encode integer rows.
PREPACK = {
    "int8": torch.ops.quantized.embedding_bag_byte_prepack,
    "int4": torch.ops.quantized.embedding_bag_4bit_prepack,
    "int2": torch.ops.quantized.embedding_bag_2bit_prepack,
}
#: Every format and rounding and, for blocks, scale rule.
WAYS = [(f, r, rule) for f in rk.ROW_FORMATS for r in ROUNDINGS for rule in (RULES if f in BLOCKS else [None])]


def any_bits(*shape: int) -> Tensor:
    """Finite float32 values of any exponent, mantissa and sign."""
    bits = torch.randint(-(2**31), 2**31, shape)
    x = bits.int().view(torch.float32)
    return torch.where(x.isfinite(), x, 1.0)


def finite_rows(columns: int) -> Tensor:
    """Rows [N, D] of every and of mixed magnitudes, on ties, constant, near the limits, and zeros of both signs."""
    size = torch.exp2(torch.arange(-149, 127, 12))[:, None]
    near = torch.randn(8, columns) * torch.exp2(torch.randint(-9, 9, (8, columns)))
    signs = torch.where(torch.rand(6, columns) < 0.5, -0.0, 0.0)
    one = torch.zeros(4, columns)
    one[:, columns // 2] = torch.tensor([1.0, -3e-39, MOST, -1e-5])
    half_zero = torch.where(torch.rand(6, columns) < 0.5, signs, torch.randn(6, columns).abs())
    parts = [
        torch.randn(len(size), columns) * size,
        near,
        any_bits(8, columns),
        torch.randint(-64, 65, (8, columns)) / 4 * torch.exp2(torch.randint(-130, 100, (8, 1))),
        torch.tensor([1.5, -0.1, 65504.0, 65520.0, -1e5, 1e-7, -3e-39, MOST])[:, None].expand(8, columns),
        torch.randn(6, 1) * 50 + torch.randn(6, columns) * 1e-3,
        torch.tensor([6e4, 7e4, 3e38])[:, None] * torch.rand(3, columns),
        torch.randn(3, columns).sign() * torch.tensor([[MOST], [MOST / 2], [3e4]]),
        torch.zeros(1, columns),
        signs,
        half_zero,
        -half_zero,
        one,
    ]
    return torch.cat(parts)


def plain_rows(columns: int, format: str) -> Tensor:
    """Rows that the format can represent, without -0."""
    x = finite_rows(columns) + 0.0
    return x[reference.dequantize_rows(reference.quantize_rows(x, format), format, columns).isfinite().all(1)]


def not_finite_rows(columns: int) -> Tensor:
    """Rows [N, D] with a NaN or Inf in the first, last or another column, and rows of nothing else."""
    x = torch.randn(8, columns)
    for row, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        x[row, 0 if row % 2 else columns - 1] = value
        x[4 + row, columns // 2] = value
    whole = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None].expand(3, columns)
    payload = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)[:, None].expand(2, columns)
    return torch.cat([x, whole, payload])


def first_not_finite(x: Tensor, format: str) -> int:
    """Expected ``status``: position of the first Inf or NaN, for formats without a code for it."""
    bad = (~x.isfinite()).flatten().nonzero()
    return int(bad[0]) if format in INTEGERS and len(bad) else NO_POSITION


def scalar(value: int) -> Tensor:
    """An int64 tensor [] of a number modulo 2^64."""
    return torch.tensor((value + 2**63) % 2**64 - 2**63)


def arguments(format: str, rounding: str, rule: str | None, place: dict[str, int]) -> tuple:
    """Arguments after x in a call of the op."""
    return (
        format,
        rounding,
        scalar(place["seed"]),
        scalar(place["step"]),
        place["table"],
        place["first_row"],
        rule,
    )


def encoded_and_decoded(
    x: Tensor, format: str, rounding: str = "nearest", rule: str | None = None, **place: int
) -> Tensor:
    """The reference's result of fake_quantize, of the shape and dtype of x."""
    how = {"rounding": rounding, "scale_rule": rule, "raise_not_finite": False} | place
    rows = reference.quantize_rows(x.reshape(-1, x.shape[-1]), format, **how)
    return reference.dequantize_rows(rows, format, x.shape[-1]).to(x.dtype).reshape(x.shape)


def compare_everywhere(x: Tensor, format: str, rounding: str, rule: str | None = None, **place: int) -> None:
    """Compares bytes, status and decoded values of every backend that can encode x with the reference."""
    place = PLACE | place
    expected = reference.quantize_rows(x, format, rounding=rounding, scale_rule=rule, raise_not_finite=False, **place)
    numbers = reference.dequantize_rows(expected, format, x.shape[1])
    position = first_not_finite(x, format)
    for backend in every_backend():
        if position != NO_POSITION and backend.kind == "cpu":
            continue  # which raises: test_row_formats_bad_input.py
        rows, status = backend.ops.quantize_rows(x, *arguments(format, rounding, rule, place))
        where = f"{backend.name}, {format}, {rounding}, {rule}, {list(x.shape)}"
        assert torch.equal(rows, expected), f"{where}: {first_difference(rows, expected, x)}"
        assert status.tolist() == [position], where
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found = backend.ops.dequantize_rows(rows, format, x.shape[1], dtype)
            assert same_bits(found, numbers.to(dtype)), f"{where}: decoded to {dtype}"


def first_difference(rows: Tensor, expected: Tensor, x: Tensor) -> str:
    """The first row that differs, as bits, and its expected bytes."""
    if rows.shape != expected.shape:
        return f"shape {list(rows.shape)}, expected {list(expected.shape)}"
    row = int((rows != expected).any(1).nonzero()[0])
    bits = [f"{b & 0xFFFFFFFF:08x}" for b in x[row].float().contiguous().view(torch.int32).tolist()]
    return f"x[{row}] = {bits} gave {rows[row].tolist()}, expected {expected[row].tolist()}"
