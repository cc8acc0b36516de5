"""quantize_rows and dequantize_rows have the reference's and the recorded bytes on every backend."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from backends import every_backend
from hypothesis import strategies as st
from row_format_bytes import BLOCKS, ROUNDINGS, random_blocks
from row_format_cases import (
    NO_POSITION,
    PLACE,
    RULES,
    WAYS,
    any_bits,
    arguments,
    compare_everywhere,
    finite_rows,
    not_finite_rows,
    scalar,
)
from tiers import cross, drawn, full
from torch import Tensor

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.reference import row_formats as reference

RECORDED_IN = Path(__file__).parent / "data" / "row_bytes.json"
RECORDED = json.loads(RECORDED_IN.read_text()) if RECORDED_IN.exists() else {"rows": {}}
RECORDED_ROWS = RECORDED["rows"]
RECORDED_PLACE = {"seed": 42, "step": 9, "table": 3, "first_row": 7}
DIMS = [1, 5, 16, 17, 33, 65, 260], [3, 8, 15, 31, 32, 64, 129]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ops = torch.ops.rec_kernels


@pytest.mark.parametrize("dims", [DIMS[0], *full(DIMS[1])], ids=str)
@pytest.mark.parametrize(("format", "rounding", "rule"), WAYS)
def test_matches_reference(format: str, rounding: str, rule: str | None, dims: list[int]) -> None:
    """Rows of every kind and length, including non-finite values."""
    for columns in dims:
        compare_everywhere(finite_rows(columns), format, rounding, rule)
        compare_everywhere(not_finite_rows(columns), format, rounding, rule)


@pytest.mark.parametrize(("dtype", "format"), cross(DTYPES[1:], rk.ROW_FORMATS, "int8"), ids=str)
def test_narrow_inputs(format: str, dtype: torch.dtype) -> None:
    """Float16 and bfloat16 rows, with and without denormals and infinities."""
    for columns in (1, 7, 33, 64):
        wide = finite_rows(columns)
        x = torch.cat([wide.to(dtype), torch.randint(0, 2**16, (8, columns)).to(torch.uint16).view(dtype)])
        for rounding in ROUNDINGS:
            compare_everywhere(x, format, rounding)
            compare_everywhere(x[x.isfinite().all(1)], format, rounding)


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_strided_inputs(format: str) -> None:
    """Transposed, strided, sliced and repeated rows are read correctly."""
    x = finite_rows(40)
    views = [x.T, x[::2], x[3:, 1:38], x[:1].expand(5, -1), x[:, 5]]
    views[-1] = views[-1][:, None]
    rows = rk.quantize_rows(x, format)
    buffer = torch.full((len(x), rows.shape[1] + 3), 255, dtype=torch.uint8)
    buffer[:, 2:-1] = rows
    for backend in every_backend():
        for view in views:
            assert torch.equal(backend.ops.quantize_rows(view, format)[0], reference.quantize_rows(view, format))
        for view in (buffer[:, 2:-1], buffer[::3, 2:-1], rows.T.contiguous().T):
            same = reference.dequantize_rows(view, format, 40)
            assert testing.same_bits(backend.ops.dequantize_rows(view, format, 40, torch.float32), same), backend.name


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_any_address(format: str) -> None:
    """Contiguous tensors may start anywhere in memory: at odd bytes, floats at any element."""
    for columns, first in ((64, 1), (64, 2), (33, 3), (5, 1), (128, 4)):
        x = torch.randn(5 * columns + first)[first:].view(5, columns)
        expected = reference.quantize_rows(x, format)
        memory = torch.zeros(expected.numel() + first, dtype=torch.uint8)
        rows = memory[first:].view(expected.shape).copy_(expected)
        half = torch.zeros(5 * columns + first).half()[first:].view(5, columns).copy_(x)
        numbers = reference.dequantize_rows(expected, format, columns)
        for backend in every_backend():
            assert torch.equal(backend.ops.quantize_rows(x, format)[0], expected), backend.name
            assert torch.equal(backend.ops.quantize_rows(half, format)[0], reference.quantize_rows(half, format))
            for dtype in DTYPES:
                found = backend.ops.dequantize_rows(rows, format, columns, dtype)
                assert testing.same_bits(found, numbers.to(dtype)), backend.name


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_any_bytes_are_read(format: str) -> None:
    """Bytes that no encoder writes are decoded, too: every code with every scale."""
    for columns in (1, 33, 256):
        rows = torch.randint(0, 256, (300, rk.row_bytes(format, columns)), dtype=torch.uint8)
        numbers = reference.dequantize_rows(rows, format, columns)
        for backend in every_backend():
            for dtype in DTYPES:
                found = backend.ops.dequantize_rows(rows, format, columns, dtype)
                assert testing.same_bits(found, numbers.to(dtype)), (backend.name, columns, dtype)


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
@pytest.mark.parametrize(
    "place",
    [
        {"seed": 0, "step": 0, "table": 0, "first_row": 0},
        {"seed": 2**64 - 1, "step": 2**32 - 1, "table": 65535, "first_row": 2**44 - 90},
        {"seed": -5, "step": -1, "table": 1, "first_row": 2**32 - 45},
        {"seed": 2**32, "step": 2**35 + 7, "table": 256, "first_row": 2**32 - 1},
    ],
    ids=["zeros", "largest", "negative", "carry"],
)
def test_places(format: str, place: dict[str, int]) -> None:
    """The whole range of seed, step, table and row; rows on both sides of 2^32."""
    x = finite_rows(21)
    assert len(x) == 90
    compare_everywhere(x, format, "stochastic", **place)


def test_absent_scalars_are_zeros() -> None:
    """seed=None and step=None mean 0 on every backend."""
    x = finite_rows(9)
    for backend in every_backend():
        rows, _ = backend.ops.quantize_rows(x, "mx6", "stochastic")
        assert torch.equal(rows, reference.quantize_rows(x, "mx6", rounding="stochastic")), backend.name


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_no_rows(format: str) -> None:
    """N = 0 gives rows of the right width, and back."""
    for backend in every_backend():
        for dtype in DTYPES:
            rows, status = backend.ops.quantize_rows(torch.zeros(0, 5, dtype=dtype), format)
            assert rows.shape == (0, rk.row_bytes(format, 5))
            assert status.tolist() == [NO_POSITION]
            found = backend.ops.dequantize_rows(rows, format, 5, dtype)
            assert (found.shape, found.dtype) == ((0, 5), dtype)


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_large_is_independent_of_threads(format: str) -> None:
    """Enough rows for every thread, and long rows."""
    for shape in ((6000, 33), (40, 3000)):
        x = torch.randn(shape)
        expected = reference.quantize_rows(x, format, rounding="stochastic", **PLACE)
        numbers = reference.dequantize_rows(expected, format, shape[1])
        for threads in (1, 2, 3):
            with testing.use_threads(threads):
                rows, _ = ops.quantize_rows(x, *arguments(format, "stochastic", None, PLACE))
                assert torch.equal(rows, expected)
                assert testing.same_bits(ops.dequantize_rows(rows, format, shape[1], torch.float32), numbers)


@pytest.mark.parametrize(("format", "rounding", "rule"), WAYS)
def test_denormals(format: str, rounding: str, rule: str | None) -> None:
    """torch.set_flush_denormal changes nothing: the smallest values are kept, in and out."""
    x = torch.cat([torch.randn(30, 65) * 2.0**e for e in (-149, -140, -130, -126, -14, -24)])
    expected = reference.quantize_rows(x, format, rounding=rounding, scale_rule=rule, **PLACE)
    numbers = reference.dequantize_rows(expected, format, 65)
    for isa in testing.cpu_isas():
        with testing.use_cpu_isa(isa), testing.flush_denormals():
            rows, _ = ops.quantize_rows(x, *arguments(format, rounding, rule, PLACE))
            found = [ops.dequantize_rows(rows, format, 65, dtype) for dtype in DTYPES]
        assert torch.equal(rows, expected), isa
        assert all(testing.same_bits(f, numbers.to(f.dtype)) for f in found), isa


MANTISSAS = [0, 1, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x700000, 0x7FFFFF]
ELEMENTS = st.tuples(
    st.sampled_from([0, 1 << 31]), st.integers(0, 14), st.sampled_from(MANTISSAS) | st.integers(0, 0x7FFFFF)
)


@st.composite
def hard_rows(draw: st.DrawFn) -> Tensor:
    """[1, D] float32: exponents within 14 of the row's largest, which is any; significands on and beside ties."""
    top = draw(st.sampled_from([0, 1, 2, 7, 8, 102, 113, 127, 142, 240, 246, 250, 254]) | st.integers(0, 254))
    elements = draw(st.lists(ELEMENTS, min_size=1, max_size=70))
    bits = [sign | max(top - below, 0) << 23 | mantissa for sign, below, mantissa in elements]
    return torch.tensor([bits], dtype=torch.uint32).view(torch.float32)


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
@drawn(
    60, x=hard_rows(), rounding=st.sampled_from(ROUNDINGS), rule=st.sampled_from(RULES), seed=st.integers(0, 2**64 - 1)
)
def test_hard_rows(format: str, x: Tensor, rounding: str, rule: str, seed: int) -> None:
    """The CPU's bytes and values are the reference's, over all exponents and tails."""
    rows = rk.quantize_rows(x, format, rounding=rounding, scale_rule=rule, seed=seed)
    assert torch.equal(rows, reference.quantize_rows(x, format, rounding=rounding, scale_rule=rule, seed=seed))
    numbers = reference.dequantize_rows(rows, format, x.shape[1])
    assert testing.same_bits(rk.dequantize_rows(rows, format, x.shape[1]), numbers)


@pytest.mark.parametrize(("format", "rounding", "rule"), [way for way in WAYS if way[0] in BLOCKS])
def test_values_at_rest(format: str, rounding: str, rule: str) -> None:
    """Values that a block represents do not change, from the smallest scale to the largest.

    E4M3 under floor is the exception, tested separately: its largest mantissa, 1.875, is NaN's in the highest binade,
    where floor puts the largest element of a block.
    """
    x = random_blocks(format, 4000)
    if format == "mxfp8_e4m3" and rule == "floor":
        x = x[torch.frexp(x.abs().amax(1))[0] * 2 != 1.875]
    assert len(x) > 3000
    how = {"rounding": rounding, "scale_rule": rule, "seed": 1}
    rows = rk.quantize_rows(x, format, **how)
    assert torch.equal(rows, reference.quantize_rows(x, format, **how))
    assert testing.same_bits(rk.dequantize_rows(rows, format, 32), x if format != "mxint8" else x + 0.0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_e4m3_moves_once_under_floor(rounding: str) -> None:
    """floor moves 240 = 1.875 * 2^7 to a binade where its code is NaN's; rceil represents it."""

    def again(x: Tensor, rule: str) -> Tensor:
        rows = rk.quantize_rows(x, "mxfp8_e4m3", rounding=rounding, scale_rule=rule)
        return rk.dequantize_rows(rows, "mxfp8_e4m3", x.shape[1])

    x = torch.tensor([[240.0, 1.0]])
    assert again(x, "floor").tolist() == [[224.0, 1.0]]
    assert again(again(x, "floor"), "floor").tolist() == [[224.0, 1.0]]
    assert again(x, "rceil").tolist() == [[240.0, 1.0]]


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_floats_at_rest(format: str, rounding: str) -> None:
    """Every 16-bit value, and float32 of any bits, survive encoding in their own format."""
    if format == "fp32":
        x = any_bits(64, 1024)
    else:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[format]
        x = torch.arange(2**16).to(torch.uint16).view(64, 1024).view(dtype).float()
    rows = rk.quantize_rows(x, format, rounding=rounding, seed=2)
    assert testing.same_bits(rk.dequantize_rows(rows, format, 1024), x)


@pytest.mark.parametrize("format", [f for f in rk.ROW_FORMATS if f != "fp32"])
def test_unbiased(format: str) -> None:
    """The mean of N draws lies within five standard errors of the value.

    Integer rows compute (x - bias) / scale in float32, whose roundings shift the mean a little.
    """
    draws = 2**16
    x = torch.randn(48) * torch.exp2(torch.randint(-3, 3, (48,)))
    rows = rk.quantize_rows(x.expand(draws, -1), format, rounding="stochastic", seed=11)
    value = rk.dequantize_rows(rows, format, 48).double()
    low, high = value.amin(0), value.amax(0)
    assert ((value == low) | (value == high)).all()
    share = ((x - low) / (high - low).clamp(min=1e-300)).clamp(0, 1)
    rare = (share * draws < 30) | ((1 - share) * draws < 30)
    error = (value.mean(0) - x).abs() - 2.0**-22 * x.abs().max() * format.startswith("int")
    assert (error <= 5 * (high - low) * (share * (1 - share) / draws).sqrt())[~rare].all()
    assert (~rare).sum() >= 35


def test_public_functions() -> None:
    """seed and step may be numbers or tensors; scale rules and the dtype have defaults."""
    x, seed, step = torch.randn(6, 20), 2**64 - 3, 7
    for format, rounding, rule in WAYS:
        rows = rk.quantize_rows(
            x, format, rounding=rounding, scale_rule=rule, seed=seed, step=step, table=2, first_row=9
        )
        native = ops.quantize_rows(x, format, rounding, scalar(seed), scalar(step), 2, 9, rule)[0]
        assert torch.equal(rows, native)
        tensors = {"seed": scalar(seed), "step": torch.tensor(step), "table": 2, "first_row": 9, "scale_rule": rule}
        assert torch.equal(rk.quantize_rows(x, format, rounding=rounding, **tensors), native)
        assert rk.dequantize_rows(rows, format, 20).dtype == torch.float32
        assert rk.dequantize_rows(rows, format, 20, torch.bfloat16).dtype == torch.bfloat16
        rule = {"nearest": "floor", "stochastic": "rceil"}[rounding]
        plain = rk.quantize_rows(x, format, rounding=rounding, seed=1)
        assert torch.equal(plain, rk.quantize_rows(x, format, rounding=rounding, seed=1, scale_rule=rule))


def test_row_bytes() -> None:
    """Sizes and names are the reference's."""
    assert rk.ROW_FORMATS == reference.ROW_FORMATS
    for format in rk.ROW_FORMATS:
        for columns in (*range(1, 70), 1000, 2**31 - 1):
            assert rk.row_bytes(format, columns) == reference.row_bytes(format, columns)


def test_inputs_are_unchanged() -> None:
    """Neither op writes to its inputs."""
    x = finite_rows(33)
    before = x.clone()
    for format in rk.ROW_FORMATS:
        rows = rk.quantize_rows(x, format, rounding="stochastic", seed=scalar(3))
        copy = rows.clone()
        rk.dequantize_rows(rows, format, 33)
        assert torch.equal(rows, copy)
    assert testing.same_bits(x, before)


def recorded_row() -> Tensor:
    """[1, 37] float32: a tail in every block, both zeros, a denormal half, a large number."""
    c = torch.arange(37)
    x = ((c * c * 7 + 3 * c) % 41 - 20) * 0.0137
    x[5], x[11], x[12], x[20], x[34] = -0.0, 0.0, 3e-6, -17.3, 1.0
    return x[None]


def reference_hex(x: Tensor) -> dict[str, str]:
    """format rounding" -> the reference's bytes of a row."""
    rows = {}
    for format in rk.ROW_FORMATS:
        for rounding in ROUNDINGS:
            row = reference.quantize_rows(x, format, rounding=rounding, **RECORDED_PLACE)[0]
            rows[f"{format} {rounding}"] = bytes(row.tolist()).hex()
    return rows


@pytest.mark.parametrize("case", RECORDED_ROWS)
def test_recorded_bytes(case: str) -> None:
    """The layout never changes: stored rows stay readable, and noise stays the same."""
    x = torch.tensor([int(word, 16) for word in RECORDED["x"]], dtype=torch.uint32).view(torch.float32)[None]
    place, (format, rounding) = RECORDED["place"], case.split()
    expected = torch.tensor([list(bytes.fromhex(RECORDED_ROWS[case]))], dtype=torch.uint8)
    assert torch.equal(reference.quantize_rows(x, format, rounding=rounding, **place), expected)
    for backend in every_backend():
        rows, _ = backend.ops.quantize_rows(x, *arguments(format, rounding, None, place))
        assert torch.equal(rows, expected), backend.name


def test_every_format_is_recorded() -> None:
    """`python python_tests/test_row_formats.py` records new formats; it never changes an old record."""
    assert RECORDED_ROWS.keys() == reference_hex(recorded_row()).keys()


if __name__ == "__main__":
    bits = [f"{word & 0xFFFFFFFF:08x}" for word in recorded_row()[0].view(torch.int32).tolist()]
    record = {"x": bits, "place": RECORDED_PLACE, "rows": reference_hex(recorded_row()) | RECORDED_ROWS}
    RECORDED_IN.write_text(json.dumps(RECORDED | record, indent=1) + "\n")
    sys.stdout.write(f"recorded {len(record['rows'])} rows in {RECORDED_IN.name}\n")
