"""The reference of the row formats: published vectors, torch's codes, and properties of every format."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from row_format_bytes import BLOCKS, INTEGERS, ROUNDINGS, SHARED, read_ocp, read_shared, round_trip, write_ocp
from row_format_cases import PREPACK, plain_rows
from torch import Tensor

from rec_kernels.reference import row_formats_affine as affine
from rec_kernels.reference import row_formats_bits as bits
from rec_kernels.reference import row_formats_mx as mx
from rec_kernels.reference.philox import philox, row_words
from rec_kernels.reference.row_formats import ROW_FORMATS, dequantize_rows, quantize_rows, row_bytes
from rec_kernels.testing import same_bits

VECTORS = json.loads((Path(__file__).parent / "data" / "formats.json").read_text())
OCP_FLOATS = [name for name in mx.ELEMENTS if name != "mxint8"]
# Bytes of each plane of a block.
PLANES = {"mx9": (16, 1, 1), "mx6": (8, 2, 1, 1), "mx4": (4, 2, 1, 1), "mxfp4_e2m1": (16, 1)}
PLANES |= {name: (16, 8, 1) if "mxfp6" in name else (32, 1) for name in mx.ELEMENTS if name not in PLANES}


def from_hex(words: list[str]) -> np.ndarray:
    """Float32 values from their bits."""
    return np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32)


def test_philox_vectors() -> None:
    """Published answers, including Random123's."""
    known = [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    known.append((pi, 0x299F31D0_A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"))
    for case in VECTORS["philox"]:
        low, high = case["offset"] % 2**32, case["offset"] >> 32
        known.append(([low, high, 0, 0], case["seed"], " ".join(case["words"])))
    for counter, seed, words in known:
        found = philox([torch.tensor(c) for c in counter], seed)
        assert " ".join(f"{w.item():08x}" for w in found) == words


def test_row_words() -> None:
    """Rows and columns have fixed counters; shards draw the whole table's words."""
    found = row_words(42, 9, 3, 7, 1, 8)
    words = "1020009e edb97331 7f7eb0f5 81de075f e5e7830e 6a3fa847 2fec9538 758d51fd"
    assert " ".join(f"{w:08x}" for w in found[0].tolist()) == words
    whole = row_words(5, 6, 7, 2**32 - 3, 6, 7, stream=2)
    assert torch.equal(whole[2:5, :5], row_words(5, 6, 7, 2**32 - 1, 3, 5, stream=2))
    counter = [1, 1, 7 | 2 << 16 | 1 << 20, 6]
    assert whole[4, 4:].tolist() == [w.item() for w in philox([torch.tensor(c) for c in counter], 5)][:3]
    assert torch.equal(whole, row_words(5 + 2**64, 6 + 2**32, 7, 2**32 - 3, 6, 7, stream=2))
    for arguments in ((0, 0, 2**16, 0, 1, 1), (0, 0, 0, -1, 1, 1), (0, 0, 0, 2**44, 1, 1), (0, 0, 0, 0, 1, 1, 16)):
        with pytest.raises(ValueError, match="must be in"):
            row_words(*arguments)


def test_stochastic_16_bit_vectors() -> None:
    """Random bits are added below the kept mantissa, the highest ones of the word."""
    x = from_hex([case["x"] for case in VECTORS["sr"]])
    words = np.array([int(case["word"], 16) for case in VECTORS["sr"]])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = torch.from_numpy(getattr(bits, name + "_bits")(x, words)).view(dtype)
        expected = torch.tensor([int(case[name], 16) for case in VECTORS["sr"]], dtype=torch.uint16).view(dtype)
        assert same_bits(found, expected)


@pytest.mark.parametrize("case", VECTORS["smx"], ids=lambda c: c["format"])
def test_shared_vectors(case: dict) -> None:
    """Exponent, microexponents, signed magnitudes and values, under the rule floor."""
    x, name = torch.from_numpy(from_hex(case["x"]))[None], case["format"]
    row = quantize_rows(x, name)
    exponent, micro, magnitudes, signs = read_shared(row[0].tolist(), name)
    signed = [-m if s else m for m, s in zip(magnitudes, signs, strict=True)]
    assert (exponent, micro, signed) == (case["exponent"], case["micro"], case["signed"])
    assert signs == x[0].signbit().int().tolist()
    assert torch.equal(dequantize_rows(row, name, 16)[0], torch.tensor(case["values"]))


def test_shared_example() -> None:
    """Exponent, microexponents and magnitudes of a block, by hand."""
    x = [1, -0.75, 0.3, 2.9, -5.1, 0.01, 7, -0.126, 0.5, 0.4, 3.99, -3.99, 7.97, 1.5, -0.062, 0.031]
    exponent, micro, magnitudes, _ = read_shared(quantize_rows(torch.tensor([x]), "mx6")[0].tolist(), "mx6")
    assert (exponent, micro) == (0x81, [1, 1, 0, 0, 1, 1, 0, 1])
    assert magnitudes == [4, 3, 1, 12, 10, 0, 14, 0, 2, 2, 15, 15, 15, 3, 0, 0]


@pytest.mark.parametrize("case", VECTORS["mx"], ids=lambda c: f"{c['format']}-{c['rule']}-{c['block']}")
def test_ocp_vectors(case: dict) -> None:
    """Codes for a given scale, values for given codes, and the scale under both rules."""
    x, name, element = from_hex(VECTORS["blocks"][case["block"]]), case["format"], mx.ELEMENTS[case["format"]]
    assert mx.element_codes(x / np.float32(2.0 ** (case["scale"] - 127)), element, None).tolist() == case["codes"]
    row = write_ocp(case["scale"], case["codes"], name)
    assert torch.equal(dequantize_rows(row, name, 32)[0], torch.tensor(case["values"]))
    if case["rule"] in ("floor", "rceil"):
        found = quantize_rows(torch.from_numpy(x)[None], name, scale_rule=case["rule"])
        assert read_ocp(found[0].tolist(), name) == (case["scale"], case["codes"])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_planes(name: str, rounding: str) -> None:
    """Each plane covers the row; the tail of the last block equals zeros; blocks are independent."""
    size = 16 if name in SHARED else 32
    x = torch.randn(5, 3 * size) * torch.exp2(torch.arange(3).repeat_interleave(size))
    x[:, 2 * size + 3 :] = 0
    row = quantize_rows(x, name, rounding=rounding)
    assert torch.equal(row, quantize_rows(x[:, : 2 * size + 3], name, rounding=rounding))
    assert torch.equal(
        dequantize_rows(row, name, 2 * size + 3), dequantize_rows(row, name, 3 * size)[:, : 2 * size + 3]
    )
    if rounding == "nearest":
        parts = [quantize_rows(b, name).split(PLANES[name], dim=1) for b in x.split(size, dim=1)]
        assert torch.equal(row, torch.cat([torch.cat(plane, dim=1) for plane in zip(*parts, strict=True)], dim=1))


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_sizes(name: str) -> None:
    """Row sizes are those of the formats' table, also without rows and with one column."""
    sizes = dict(zip(ROW_FORMATS, [400, 200, 200, 108, 54, 29, 126, 84, 56, 132, 132, 100, 100, 68, 132], strict=True))
    assert row_bytes(name, 100) == sizes[name]
    for rounding in ROUNDINGS:
        assert round_trip(torch.zeros(0, 5), name, rounding=rounding).shape == (0, 5)
        assert round_trip(torch.tensor([[0.5], [-1.0]]), name, rounding=rounding).flatten().tolist() == [0.5, -1.0]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_16_bit_pattern(name: str, dtype: torch.dtype, rounding: str) -> None:
    """All 2^16 values survive, with one NaN. Rounding other values to nearest is torch's conversion."""
    pattern = torch.arange(2**16).to(torch.uint16).view(64, -1)
    x = pattern.view(dtype)
    stored = quantize_rows(x, name, rounding=rounding, seed=3)
    assert same_bits(stored.view(dtype), x)
    assert same_bits(dequantize_rows(stored, name, 1024), x.float())
    assert set(stored.view(torch.uint16)[x.isnan()].tolist()) == {0x7FC0 if name == "bf16" else 0x7E00}
    anything = torch.randint(-(2**31), 2**31, (64, 1024)).int().view(torch.float32)
    near = torch.cat([anything, torch.randn(64, 64) * torch.exp2(torch.randint(-30, 18, (64, 64)))], dim=1)
    if rounding == "nearest":
        assert same_bits(round_trip(near, name), near.to(dtype).float())
    else:
        assert torch.equal(round_trip(near, name, rounding=rounding).isfinite(), near.isfinite())


def test_fp32_is_plain() -> None:
    """Every bit but a NaN's payload, little endian."""
    x = torch.tensor([[1.0, -0.0, 2.0**-149, torch.inf, -torch.nan]])
    row = quantize_rows(x, "fp32", rounding="stochastic")
    assert row[0, :8].tolist() == [0, 0, 0x80, 0x3F, 0, 0, 0, 0x80]
    assert row[0, -4:].tolist() == [0, 0, 0xC0, 0x7F]
    assert same_bits(row.view(torch.float32), x)
    assert same_bits(dequantize_rows(row, "fp32", 5), x)


def affine_rows(columns: int) -> Tensor:
    """[330, columns]: random rows of many magnitudes, constant rows, zeros, offsets; no half overflows."""
    sizes = [1.0, 1e4, 1e-3, 2e-6, 1e-7, 1e-9, 1e-30, 1e-40]
    parts = [torch.randn(30, columns) * size for size in sizes]
    parts += [torch.randn(30, 1).expand(30, columns), torch.zeros(30, columns)]
    return torch.cat([*parts, torch.randn(30, 1) + torch.randn(30, columns) * 1e-6])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 17, 31, 64, 100])
def test_integer_rows_are_torchs(name: str, columns: int) -> None:
    """Rows equal torch's byte for byte. torch needs full bytes: a repeated last column fills them, and is removed."""
    x = affine_rows(columns)
    x = torch.cat([x if name != "int8" else torch.cat([x, x[:30] * 1e37]), plain_rows(columns, name)])
    of_byte = 8 // INTEGERS[name]
    padded = torch.cat([x, x[:, -1:].expand(-1, -columns % of_byte)], dim=1)
    expected = PREPACK[name](padded)
    size = -(-columns // of_byte)
    if columns % of_byte:
        expected[:, size - 1] &= (1 << columns % of_byte * INTEGERS[name]) - 1
    assert torch.equal(quantize_rows(x, name), expected)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_rows_first_zero(name: str) -> None:
    """If zeros of both signs are the minimum, the bias has the sign of the first."""
    for first in (0.0, -0.0):
        row = quantize_rows(torch.tensor([[first, -first, 1.0, 0.5]]), name)
        assert row[0, -1].item() == (0x80 if math.copysign(1, first) < 0 else 0)


def test_int8_maximum_never_wraps() -> None:
    """(max - min) / scale may be slightly above 255; a word of 0 rounds up everything possible."""
    x = np.random.default_rng(0).standard_normal((4000, 8), dtype=np.float32)
    scale = (x.max(1) - x.min(1)) / np.float32(255)
    assert ((x.max(1) - x.min(1)) * (1 / scale) > 255).sum() > 100
    codes = affine.quantize(x, 8, np.zeros((4000, 8), np.int64))[:, :8]
    assert (codes[np.arange(4000), x.argmax(1)] == 255).all()
    assert (codes[np.arange(4000), x.argmin(1)] == 0).all()


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_stochastic_grid_covers_the_row(name: str) -> None:
    """The half bias is not above the minimum, the half scale reaches the maximum."""
    x = torch.cat([affine_rows(16), torch.tensor([[7e4, 8e4] * 8, [-65504.0, 6e4] * 8])])
    row = quantize_rows(x, name, rounding="stochastic")
    scale, bias = row[:, -4:].clone().view(torch.float16).float().unbind(1)
    assert (bias <= x.amin(1)).all()
    top = bias.double() + (2 ** INTEGERS[name] - 1) * scale.double()
    assert (top * (1 + 1e-6 * top.sign()) >= x.amax(1)).all()


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_constant_and_tiny_integer_rows(name: str, rounding: str) -> None:
    """A range of 0, or too small for a normal scale, has codes 0."""
    x = torch.tensor([[1.5] * 8, [-0.25] * 8, [0.0] * 8, [0.0, 2.0**-140] * 4])
    row = quantize_rows(x, name, rounding=rounding)
    assert (row[:, : INTEGERS[name]] == 0).all()
    assert torch.equal(dequantize_rows(row, name, 8)[:3], x[:3])
    up = affine.quantize(np.array([[0, 2.0**-149]], np.float32), INTEGERS[name], np.zeros((1, 2), np.int64))
    assert up[0, : -(-INTEGERS[name] // 4)].tolist() == [0] * -(-INTEGERS[name] // 4)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_integer_rows_not_finite(name: str, rounding: str, bad: float) -> None:
    """Non-finite values or an overflowing range are rejected with the position, or make only that row NaN."""
    x = torch.randn(4, 6)
    clean = quantize_rows(x, name, rounding=rounding)
    x[2, 5] = x[2, 3] = x[3, 0] = bad
    with pytest.raises(ValueError, match=f"{name}.*row 2, column 3"):
        quantize_rows(x, name, rounding=rounding)
    row = quantize_rows(x, name, rounding=rounding, raise_not_finite=False)
    assert torch.equal(row[:2], clean[:2])
    tail = [0, 0, 0xC0, 0x7F, 0, 0, 0, 0] if name == "int8" else [0, 0x7E, 0, 0]
    assert row[2].tolist() == [0] * (row.shape[1] - len(tail)) + tail
    assert dequantize_rows(row, name, 6)[2:].isnan().all()
    assert round_trip(torch.tensor([[3e38, -3e38]]), name, rounding=rounding).isnan().all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_blocks_not_finite(name: str, rounding: str, bad: float) -> None:
    """A non-finite value makes only its block NaN, with all other bits 0."""
    size = 16 if name in SHARED else 32
    x = -torch.ones(1, 3 * size)
    x[0, size + 5] = bad
    row = quantize_rows(x, name, rounding=rounding)
    value = dequantize_rows(row, name, 3 * size)
    assert value.isnan()[0].tolist() == [False] * size + [True] * size + [False] * size
    assert (value[~value.isnan()] == -1).all()
    block = quantize_rows(x[:, size : 2 * size], name, rounding=rounding)[0].tolist()
    tail = [255, 0] if name in SHARED else [255]
    assert block == [0] * (len(block) - len(tail)) + tail


TYPES = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", OCP_FLOATS)
def test_element_codes(name: str) -> None:
    """Every code, midpoints and their neighbours, and random values have the codes of ml_dtypes and torch.float8."""
    element = mx.ELEMENTS[name]
    grid = np.arange(1 << element.bits - 1, dtype=np.uint8).view(TYPES[name]).astype(np.float32)
    grid = grid[np.isfinite(grid)]
    assert grid.max() == element.largest
    middle = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(m, np.float32(to)) for m in (grid, middle) for to in (0, np.inf)]
    drawn = np.exp2(np.random.default_rng(1).uniform(-20, 16, 500).astype(np.float32))
    v = np.concatenate([grid, middle, *near, drawn])
    v = np.concatenate([v, -v])
    v = v[np.abs(v) <= element.largest]
    v = np.pad(v, (0, -len(v) % 31)).reshape(-1, 31)
    x = np.concatenate([np.full((len(v), 1), element.largest, np.float32), v], axis=1)
    found = [read_ocp(row, name) for row in quantize_rows(torch.from_numpy(x), name).tolist()]
    assert {scale for scale, _ in found} == {127}
    codes = np.array([codes for _, codes in found])
    assert np.array_equal(codes, x.astype(TYPES[name]).view(np.uint8))
    if "mxfp8" in name:
        dtype = torch.float8_e4m3fn if name == "mxfp8_e4m3" else torch.float8_e5m2
        assert np.array_equal(codes, torch.from_numpy(x).to(dtype).view(torch.uint8).numpy())
        every = torch.arange(256).to(torch.uint8)
        assert same_bits(torch.from_numpy(mx.element_values(element)), every.view(dtype).float())


def test_mxint8_by_hand() -> None:
    """Two's complement without -0, clamped at 127; rceil rounds a ratio up."""
    x = torch.tensor([[1.999, -1.999, 1.0, -1.0, 1 / 64, -1 / 128, 3 / 128, -0.0]])
    floor, rceil = quantize_rows(x, "mxint8")[0].tolist(), quantize_rows(x, "mxint8", scale_rule="rceil")[0].tolist()
    assert (floor[32], floor[:8]) == (127, [127, 129, 64, 192, 1, 0, 2, 0])
    assert (rceil[32], rceil[:8]) == (128, [64, 192, 32, 224, 0, 0, 1, 0])
    assert dequantize_rows(torch.tensor([[128] * 32 + [128]], dtype=torch.uint8), "mxint8", 1).item() == -4


@pytest.mark.parametrize("name", mx.ELEMENTS)
def test_scale_at_the_ends(name: str) -> None:
    """Scales saturate below 255; 2^-127 and 2^-126 are reached; zeros have scale 0."""
    element = mx.ELEMENTS[name]
    tiny = element.largest * 2.0**-127
    most = float(np.finfo(np.float32).max)
    cases = {tiny: 0, tiny * (1 + 2.0**-20): 1, 2 * tiny: 1, 2 * tiny * (1 + 2.0**-20): 2, 2.0**-149: 0, 0.0: 0}
    for amax, scale in cases.items():
        assert quantize_rows(torch.tensor([[amax]]), name, scale_rule="rceil")[0, -1].item() == scale
    for rule in ("floor", "rceil"):
        assert (
            quantize_rows(torch.tensor([[most]]), name, scale_rule=rule)[0, -1].item() == 254 - element.largest_exponent
        )
        assert round_trip(torch.tensor([[most, -most]]), name, scale_rule=rule).isfinite().all()
    assert round_trip(torch.tensor([[2.0**-130]]), name).item() == (2.0**-130 if name != "mxfp4_e2m1" else 0)
    lowest = 2.0 ** (1 - element.bias - element.mantissa_bits) * 2.0**-127
    assert round_trip(torch.tensor([[lowest, -lowest]]), name).tolist() == [[lowest, -lowest]]
    assert quantize_rows(torch.tensor([[1.0]]), name)[0, -1].item() == 127 - element.largest_exponent


@pytest.mark.parametrize("name", SHARED)
def test_shared_at_the_ends(name: str) -> None:
    """The step is at least 2^-126, there without microexponents; the exponent is at most 254."""
    m = SHARED[name]
    x = torch.tensor([[2.0**-126, 0.0, -(2.0**-128), 2.0**-149]])
    for field in range(1, m + 3):
        exponent, micro, magnitudes, signs = read_shared(quantize_rows(x * 2.0 ** (field - 1), name)[0].tolist(), name)
        assert exponent == field
        assert micro[1:] == [int(field > m)] * 7
        assert magnitudes[0] == (2 ** (field - 1) if field <= m else 2 ** (m - 1))
        assert signs[:4] == [0, 0, 1, 0]
    most = float(np.finfo(np.float32).max)
    for rule in ("floor", "rceil"):
        exponent, micro, magnitudes, _ = read_shared(
            quantize_rows(torch.tensor([[most, 0.0, most / 4, 0.0]]), name, scale_rule=rule)[0].tolist(), name
        )
        assert (exponent, micro[:2], magnitudes[0]) == (254, [0, 1], 2**m - 1)
    assert quantize_rows(torch.zeros(1, 16), name).tolist() == [[0] * row_bytes(name, 16)]
