"""Rounding by the reference of the row formats: exact means, noise by position, bounded error, growth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from row_format_bytes import BLOCKS, ROUNDINGS, SHARED, read_shared, round_trip
from tiers import full
from torch import Tensor

from rec_kernels.reference import row_formats_bits as bits
from rec_kernels.reference import row_formats_mx as mx
from rec_kernels.reference.row_formats import ROW_FORMATS, dequantize_rows, quantize_rows

RULES = ["floor", "rceil"]
# Values of similar magnitude within a block, often on a tie, with zeros.
NUMBERS = st.builds(
    lambda k, shift, sign: sign * math.ldexp(k, -shift),
    st.integers(0, 511),
    st.integers(0, 9),
    st.sampled_from([1, -1]),
)
BLOCK = st.lists(NUMBERS, min_size=16, max_size=16)


def test_to_grid() -> None:
    """Ties go to even without words; over all words of 12 bits, exactly the fraction rounds up."""
    t = np.array([0.5, 1.5, 2.5, -0.5, 0.0, 2.0**-149], np.float32)
    assert bits.to_grid(t, None).tolist() == [0, 2, 2, 0, 0, 0]
    words = np.arange(4096)[:, None] << 20
    t = np.array([0, 1 / 4096, 0.5, 1 / 3, 4095 / 4096, 7, 100.25, -0.25], np.float32)
    up = (bits.to_grid(np.broadcast_to(t, (4096, 8)), words) - np.floor(t)).sum(0)
    assert up.tolist() == [0, 1, 2048, 1366, 4095, 0, 1024, 3072]
    assert bits.to_grid(np.array([200.99998], np.float32), np.array([2**32 - 1])).tolist() == [200]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_16_bit_mean_is_exact(name: str) -> None:
    """Over all words of 16 bits the mean is the value itself; in fp16 also far below its subnormals."""
    x = [
        1 + 2.0**-13,
        -math.pi,
        0.1,
        3 * 2.0**-30,
        -5 * 2.0**-27,
        2.0**-40,
        2.0**-24 * 1.5,
        2.0**-14 - 2.0**-26,
        65503.5,
    ]
    x = torch.tensor(x if name == "fp16" else [*x, 2.0**-149, -3e38], dtype=torch.float32)
    words = np.arange(2**16)[:, None] << 16
    codes = getattr(bits, name + "_bits")(x.expand(2**16, -1).contiguous().numpy(), words)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    assert torch.equal(torch.from_numpy(codes).view(dtype).double().mean(0), x.double())


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_draws_depend_on_the_place_only(name: str) -> None:
    """A shard repeats the whole table's draws; seed, step, table and row change them; nearest draws nothing."""
    x = torch.randn(1, 48).expand(20, -1)
    place = {"seed": 1, "step": 2, "table": 3, "first_row": 2**33}
    whole = quantize_rows(x, name, rounding="stochastic", **place)
    shard = quantize_rows(x[7:11], name, rounding="stochastic", **(place | {"first_row": 2**33 + 7}))
    assert torch.equal(whole[7:11], shard)
    for changed in ({"seed": 1 + 2**40}, {"step": 3}, {"table": 4}, {"first_row": 0}):
        other = quantize_rows(x, name, rounding="stochastic", **(place | changed))
        assert torch.equal(whole, other) == (name == "fp32")
    assert torch.equal(quantize_rows(x, name), quantize_rows(x, name, **place))


@pytest.mark.parametrize("name", BLOCKS)
def test_encoded_twice(name: str) -> None:
    """The encoder's own result is stable, in any mixture of roundings and scale rules that starts with floor."""
    x = torch.randn(200, 64) * torch.exp2(torch.randint(-140, 100, (200, 1)))
    value = round_trip(x, name, scale_rule="floor")
    for rounding in ROUNDINGS:
        for rule in RULES:
            assert torch.equal(round_trip(value, name, rounding=rounding, scale_rule=rule), value)


def qsnr(x: Tensor, name: str, **options: str) -> float:
    """Signal to quantization noise of a row, in dB."""
    noise = (round_trip(x[None], name, **options)[0].double() - x.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(x.double().square().sum().item() / noise)


# floor: the bounds of docs/numerics.md. rceil raises the exponent of a block whose largest magnitude is above 2^m - 1
# steps, which leaves s = (2^m - 1) / 2 steps; with every other element half a step, (s^2 + 1.125) / 1.375.
BOUNDS = {("mx9", "floor"): 34.7, ("mx6", "floor"): 16.7, ("mx4", "floor"): 4.6}
BOUNDS |= {("mx9", "rceil"): 34.67, ("mx6", "rceil"): 16.2, ("mx4", "rceil"): 3.89}


@pytest.mark.parametrize(("name", "rule"), BOUNDS)
@settings(max_examples=150)
@given(block=BLOCK, exponent=st.integers(-100, 100))
def test_quantization_noise(name: str, rule: str, block: list[float], exponent: int) -> None:
    """No block is worse than the bound."""
    x = torch.tensor(block) * 2.0**exponent
    assert qsnr(x, name, scale_rule=rule) >= BOUNDS[name, rule]


@pytest.mark.parametrize(("name", "rule"), BOUNDS)
def test_worst_block(name: str, rule: str) -> None:
    """One large element and others on ties come close to the bound, and not below it."""
    m = SHARED[name]
    large = 2 ** (m - 1) + 0.5 if rule == "floor" else (2**m - 1) / 2 + 2.0**-10
    x = torch.tensor([large, 0.5, *[0.25] * 14])
    assert BOUNDS[name, rule] <= qsnr(x, name, scale_rule=rule) <= BOUNDS[name, rule] + (3 if rule == "floor" else 0.02)


@pytest.mark.parametrize("name", SHARED)
@settings(max_examples=150)
@given(block=BLOCK, exponent=st.integers(-130, 110))
def test_rceil_never_clips(name: str, block: list[float], exponent: int) -> None:
    """Each error is at most half a step, and exponents are raised only as far as this requires."""
    m, x = SHARED[name], torch.tensor(block) * 2.0**exponent
    row = quantize_rows(x[None], name, scale_rule="rceil")
    shared, micro, _, _ = read_shared(row[0].tolist(), name)
    step = [2.0 ** max(shared - 127 - micro[c // 2] + 1 - m, -126) for c in range(16)]
    error = (dequantize_rows(row, name, 16)[0].double() - x.double()).abs()
    assert (error <= torch.tensor(step, dtype=torch.float64) / 2).all()
    field = max(0, math.frexp(x.abs().max().item())[1] + 126) if x.any() else 0
    raised = x.abs().max().item() > (2**m - 1) * 2.0 ** (field - 126 - m)
    assert shared == field + raised


@pytest.mark.parametrize("name", mx.ELEMENTS)
@settings(max_examples=100)
@given(block=BLOCK, exponent=st.integers(-100, 100))
def test_ocp_rceil_never_clips(name: str, block: list[float], exponent: int) -> None:
    """The scale is the smallest power of two that reaches the largest magnitude, up to a ratio's float32 rounding."""
    x = torch.tensor(block) * 2.0**exponent
    assume(x.any())
    scale = 2.0 ** (quantize_rows(x[None], name, scale_rule="rceil")[0, -1].item() - 127)
    most, largest = x.abs().max().item(), mx.ELEMENTS[name].largest
    assert scale * largest / 2 * (1 - 2.0**-22) < most <= scale * largest * (1 + 2.0**-22)


GROWING = {
    "bf16": None,
    "mx9": 1.98,
    "mx6": 1.88,
    "mx4": 1.5,
    "mxfp8_e4m3": 1.75,
    "mxfp6_e3m2": 1.75,
    "mxfp4_e2m1": 1.5,
}
GROWING["mxint8"] = 127 / 64


@pytest.mark.parametrize("name", ["mx6", "mxint8", *full(*(name for name in GROWING if name not in ("mx6", "mxint8")))])
def test_growth_past_a_binade(name: str) -> None:
    """1 plus 375 times 0.004 is 2.5 on average, within five standard errors; floor keeps a block in its binade."""
    x, clipped = torch.ones(32, 32), torch.ones(1, 32)
    for step in range(375):
        x = round_trip(x + 0.004, name, rounding="stochastic", seed=4, step=step)
        if GROWING[name]:
            clipped = round_trip(clipped + 0.004, name, rounding="stochastic", step=step, scale_rule="floor")
    assert abs(x.mean().item() - 2.5) <= min(5 * x.std().item() / 32, 0.3)
    if GROWING[name]:
        assert clipped.max().item() <= GROWING[name] + 0.02


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_are_widened(name: str, dtype: torch.dtype) -> None:
    """Narrow inputs have the bytes of the equal float32 values, also for views."""
    x = torch.randn(40, 6).to(dtype).T
    for rounding in ROUNDINGS:
        assert torch.equal(quantize_rows(x, name, rounding=rounding), quantize_rows(x.float(), name, rounding=rounding))


def test_wrong_arguments() -> None:
    """An error of a name lists the allowed ones, of a tensor the required kind."""
    x = torch.zeros(2, 4)
    for options in ({"format": "mx7"}, {"format": "fp32", "rounding": "up"}, {"format": "mx9", "scale_rule": "ceil"}):
        wrong = list(options.values())[-1]
        allowed = {"mx7": ", ".join(ROW_FORMATS), "up": "nearest, stochastic", "ceil": "floor, rceil"}[wrong]
        with pytest.raises(ValueError, match=f"one of {allowed}, got '{wrong}'"):
            quantize_rows(x, **options)
    with pytest.raises(ValueError, match=r"int64 \[2, 4\]"):
        quantize_rows(x.long(), "fp32")
    with pytest.raises(ValueError, match=r"float32 \[4\]"):
        quantize_rows(x[0], "fp32")
    with pytest.raises(ValueError, match="embedding_dim must be at least 1, got 0"):
        quantize_rows(x[:, :0], "fp32")
    with pytest.raises(ValueError, match=r"uint8 \[N, 18\], got torch.uint8 \[2, 17\]"):
        dequantize_rows(torch.zeros(2, 17, dtype=torch.uint8), "mx9", 3)
    with pytest.raises(ValueError, match="format must be one of"):
        dequantize_rows(x, "fp8", 4)
