"""fake_quantize in Triton has the reference's bits.

triton_device.py describes how the file is run.
"""

# ruff: noqa: N803 (constants of a kernel are written large)
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from backends import PASSED
from row_format_bytes import BLOCKS, ROUNDINGS, random_blocks
from row_format_cases import PLACE, WAYS, any_bits, arguments, encoded_and_decoded, finite_rows, not_finite_rows, scalar
from tiers import full
from torch import Tensor
from triton_device import DEVICE

# isort: split
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import rec_kernels as rk
from rec_kernels.reference.numerics import fused_multiply_add
from rec_kernels.reference.philox import row_words
from rec_kernels.testing import same_bits
from rec_kernels.triton import fake_quantize as module
from rec_kernels.triton.row_formats import fake_quantize_tile, narrow, random_words, widen

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# A row of these sizes fits none of the kernels' tiles; the last tile is partial.
LONG = module.TILE + 452
TABLE, SEED, STEP = tl.constexpr(3), tl.constexpr(-5), tl.constexpr(2**32 + 9)


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the interpreter's multiply-add, which rounds twice, by a fused one; ignores overflow warnings."""

    def fused(_, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        total = fused_multiply_add(*(torch.from_numpy(np.array(t.data)) for t in (x, y, z)))
        return TensorHandle(total.numpy(), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    with np.errstate(all="ignore"):
        yield


def fake_quantize(x: Tensor, *given: object) -> Tensor:
    """Runs the kernels on copies of CPU tensors."""
    there = (a.to(DEVICE) if isinstance(a, Tensor) else a for a in (x, *given))
    return module.fake_quantize(*there).cpu()


def compare(x: Tensor, format: str, rounding: str, rule: str | None = None, **place: int) -> None:
    """Compares every bit of a call with the reference."""
    place = PLACE | place
    found = fake_quantize(x, *arguments(format, rounding, rule, place))
    right = encoded_and_decoded(x, format, rounding, rule, **place)
    where = f"{format}, {rounding}, {rule}, {x.dtype} {list(x.shape)}"
    assert found.is_contiguous()
    assert same_bits(found, right), f"{where}: {_first_difference(x, found, right)}"
    PASSED["triton"] += 1


def _first_difference(x: Tensor, found: Tensor, right: Tensor) -> str:
    if found.shape != right.shape or found.dtype != right.dtype:
        return f"{found.dtype} {list(found.shape)}"
    differs = (found != right) | (found.signbit() != right.signbit())
    place = tuple(int(i) for i in (differs & ~(found.isnan() & right.isnan())).nonzero()[0])
    return f"x{list(place)} = {x[place].item()} gave {found[place].item()}, expected {right[place].item()}"


def binades(columns: int) -> Tensor:
    """[255, columns]: values of row r are in binade r of float32 and a few below."""
    exponent = (torch.arange(255)[:, None] - torch.randint(-1, 12, (255, columns)).clamp(min=0)).clamp(min=0)
    mantissa = torch.randint(2**23, (255, columns)) & -(2 ** torch.randint(24, (255, columns)))
    sign = torch.randint(-1, 1, (255, columns)) * 2**31
    return (sign + (exponent << 23) + mantissa).int().view(torch.float32)


@pytest.mark.parametrize("columns", [33, *full(1, 3, 16, 100, 300)])
def test_every_way(columns: int) -> None:
    """Rows that are hard to encode, with and without NaN and Inf; some of the widest."""
    x = torch.cat([finite_rows(columns), not_finite_rows(columns)])[:: 1 + columns // 100]
    for way in WAYS:
        compare(x, *way)


@pytest.mark.parametrize(
    ("format", "rounding", "rule"),
    [*(way for way in WAYS if way[1] == ROUNDINGS[0]), *full(*(way for way in WAYS if way[1] != ROUNDINGS[0]))],
)
def test_every_binade(format: str, rounding: str, rule: str | None) -> None:
    """Also near the limits of exponents: denormal scales, clamped steps, raised pairs."""
    compare(torch.cat([binades(64), any_bits(65, 64)]), format, rounding, rule)


@pytest.mark.parametrize("dtype", [FLOATS[2], *full(*FLOATS[:2])])
def test_long_rows(dtype: torch.dtype) -> None:
    """Rows span several tiles: with an Inf, constant, and with the smallest value in the last tile."""
    x = torch.randn(4, LONG) * torch.tensor([[1e-6], [1.0], [30.0], [1.0]])
    x[1, 5], x[2] = torch.inf, 0.1
    x[3, -1], x[3, 0] = -9.0, 9.0
    for way in WAYS:
        if dtype == torch.float32 or way[0] in ("int8", "int4", "mx6", "mxfp6_e3m2", "bf16"):
            compare(x.to(dtype), *way)


@pytest.mark.parametrize("dtype", [FLOATS[1], *full(FLOATS[2])])
@pytest.mark.parametrize("rounding", [ROUNDINGS[0], *full(*ROUNDINGS[1:])])
def test_narrow_input(dtype: torch.dtype, rounding: str) -> None:
    """Values of any bits; decoded values are rounded to the dtype, with Inf on overflow."""
    bits = torch.randint(-(2**15), 2**15, (40, 33), dtype=torch.int16).view(dtype)
    x = torch.cat([finite_rows(33).to(dtype), bits])
    for way in WAYS:
        if way[1] == rounding:
            compare(x, *way)


@pytest.mark.parametrize("format", BLOCKS)
def test_at_rest(format: str) -> None:
    """Values that a format represents decode to themselves."""
    x = random_blocks(format, 300)
    for rounding in ROUNDINGS:
        compare(x, format, rounding, "rceil")
        assert same_bits(fake_quantize(x, *arguments(format, rounding, "rceil", PLACE)), x)


@pytest.mark.parametrize(
    "place",
    [
        {"first_row": 2**32 - 3, "table": 65535, "seed": -1, "step": -1},
        {"first_row": 2**44 - 70, "table": 0, "seed": -(2**63), "step": 2**40 + 7},
        {"first_row": 0, "table": 1, "seed": 2**32, "step": 2**32 - 1},
    ],
)
def test_noise(place: dict[str, int]) -> None:
    """Rows around 2^32, the last row and table, negative and wrapping seeds and steps."""
    for format in ("bf16", "fp16", "int4", "mx4", "mxfp4_e2m1"):
        compare(torch.rand(70, 37) + 0.01, format, "stochastic", **place)


def test_defaults() -> None:
    """Seed and step default to 0; the scale rule follows the rounding, and fp32 uses no noise."""
    x = torch.randn(5, 40)
    for format in rk.ROW_FORMATS:
        assert same_bits(fake_quantize(x, format), encoded_and_decoded(x, format))
        assert same_bits(fake_quantize(x, format, "stochastic"), encoded_and_decoded(x, format, "stochastic"))
        found = fake_quantize(x, format, "stochastic", None, scalar(4), 6)
        assert same_bits(found, encoded_and_decoded(x, format, "stochastic", step=4, table=6))


def test_shapes_and_strides() -> None:
    """Tensors may have any rank and strides, or no rows; rows are numbered in the order of the leading dimensions."""
    x = torch.randn(6, 4, 40)
    views = [x[0, 0], x[0, 0, :1], x, x[1:1], x[:, :0]]
    strided = [x[..., ::2], x[:, 1], x.transpose(0, 1), x.mT, x[:1].expand(3, 4, 40)]
    for view in views + strided:
        for format in ("bf16", "int8", "mx6", "mxfp8_e4m3"):
            compare(view, format, "stochastic")
    before = x.clone()
    fake_quantize(x, "int2")
    assert same_bits(x, before)


def test_bad_arguments() -> None:
    """Arguments that the op rejects are rejected."""
    x = torch.ones(2, 3)
    bad = [("int3",), ("int8", "up"), ("int8", "nearest", torch.tensor([1])), ("mx9", "nearest", None, None, -1)]
    for given in bad:
        with pytest.raises(ValueError, match=r"format|rounding|seed|table"):
            fake_quantize(x, *given)


@triton.jit
def _scaled_kernel(x, factor, words, out, D: tl.constexpr, FORMAT: tl.constexpr):
    """A user's kernel: out = fake_quantize(x * factor) and the random words it was rounded with, [4, D] each."""
    r, c = tl.arange(0, 4), tl.arange(0, 32)[None, :]
    at = r[:, None] * D + c
    w = random_words(SEED, STEP, TABLE, r.to(tl.int64), 0, 32)
    y = tl.load(x + at, mask=c < D, other=0.0) * tl.load(factor + r)[:, None]
    tl.store(words + at, w.to(tl.int64), mask=c < D)
    tl.store(out + at, fake_quantize_tile(y, w, c < D, FORMAT, True), mask=c < D)


@pytest.mark.parametrize("format", ["bf16", "int4", "mx9", "mxfp6_e2m3"])
def test_own_kernel(format: str) -> None:
    """A user's kernel can call the device functions, with constants instead of the op's tensors."""
    x, factor = torch.randn(4, 30), torch.rand(4)
    place = {"seed": SEED.value, "step": STEP.value, "table": TABLE.value}
    words, out = torch.zeros(4, 30, dtype=torch.int64, device=DEVICE), torch.zeros(4, 30, device=DEVICE)
    _scaled_kernel[(1,)](x.to(DEVICE), factor.to(DEVICE), words, out, 30, format, enable_fp_fusion=False)
    assert torch.equal(words.cpu(), row_words(**place, first_row=0, rows=4, columns=30))
    assert same_bits(out.cpu(), encoded_and_decoded(x * factor[:, None], format, "stochastic", "rceil", **place))
    PASSED["triton"] += 1


@triton.jit
def _cast_kernel(x, out):
    i = tl.arange(0, 1024)
    tl.store(out + i, narrow(widen(tl.load(x + i)), out.dtype.element_ty))


@pytest.mark.parametrize("narrow_dtype", FLOATS[1:])
def test_casts(narrow_dtype: torch.dtype) -> None:
    """Casts to a narrower dtype and back are correct for any bits: NaN of every payload, ties, denormals."""
    x = torch.randint(-(2**31), 2**31, (1024,)) & -(2 ** torch.randint(0, 18, (1024,)))
    x[:4] = torch.tensor([0x7F800001, -0x7FFFFF, 0x7F7FFFFF, 0x7F800000])
    x = x.int().view(torch.float32)
    half = x.to(narrow_dtype)
    for source, right in ((x, half), (half, half.float())):
        out = torch.zeros_like(right, device=DEVICE)
        _cast_kernel[(1,)](source.to(DEVICE), out)
        assert same_bits(out.cpu(), right)
