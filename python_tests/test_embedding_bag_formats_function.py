"""rk.embedding_bag of rows in a format, and the ops in torch: opcheck, fake tensors, torch.compile."""

from __future__ import annotations

import re

import pytest
import torch
from layout_calls import OPS
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.testing import same_bits

ops = OPS
ROWS, DIM = 30, 21
HALVES = [torch.float16, torch.bfloat16]
IDS, OFFSETS = torch.tensor([0, 29, 3, 3, 7, 11, 2]), torch.tensor([0, 2, 2, 6])
CALLS = {
    "sum": {"input": IDS, "offsets": OFFSETS, "mode": "sum"},
    "mean": {"input": IDS.int(), "offsets": OFFSETS, "padding_idx": -27},
    "2-D": {"input": torch.arange(24).view(6, 4), "mode": "sum"},
    "weighted": {
        "input": IDS,
        "offsets": torch.tensor([0, 3, 7]),
        "mode": "sum",
        "include_last_offset": True,
        "per_sample_weights": torch.linspace(-2, 3, 7),
    },
}


def table(format: str) -> tuple[Tensor, Tensor]:
    """Rows of a format, and their float32 values."""
    rows = rk.quantize_rows(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)), format)
    return rows, rk.dequantize_rows(rows, format, DIM)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("format", BAG_FORMATS)
def test_equals_the_lookup_of_decoded_rows(format: str, call: str) -> None:
    """With and without gradients, which use different paths, results equal the lookup of decoded rows."""
    rows, floats = table(format)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found = rk.embedding_bag(weight=rows, format=format, embedding_dim=DIM, **CALLS[call])
            assert same_bits(found, rk.embedding_bag(weight=floats, **CALLS[call]))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves(dtype: torch.dtype, call: str) -> None:
    """float16 and bfloat16 weights need no format; it may be given."""
    weight, name = torch.randn(ROWS, DIM).to(dtype), {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    expected = rk.embedding_bag(weight=weight.float(), **CALLS[call])
    for options in ({}, {"format": name}, {"embedding_dim": DIM}, {"format": name, "embedding_dim": DIM}):
        assert same_bits(rk.embedding_bag(weight=weight, **options, **CALLS[call]), expected)


def test_floats_may_say_what_they_are() -> None:
    """Giving fp32 and D changes nothing, including the gradient."""
    weight = torch.randn(ROWS, DIM, requires_grad=True)
    output = rk.embedding_bag(weight=weight, format="fp32", embedding_dim=DIM, **CALLS["sum"])
    assert same_bits(output.detach(), rk.embedding_bag(weight=weight, **CALLS["sum"]).detach())
    output.sum().backward()
    assert weight.grad[3].tolist() == [2.0] * DIM


@pytest.mark.parametrize("format", BAG_FORMATS)
def test_gradient_of_factors(format: str) -> None:
    """The gradient of per_sample_weights is that of decoded rows."""
    rows, floats = table(format)
    grads = []
    for weight, options in ((rows, {"format": format, "embedding_dim": DIM}), (floats, {})):
        factors = CALLS["weighted"]["per_sample_weights"].clone().requires_grad_()
        output = rk.embedding_bag(weight=weight, **(CALLS["weighted"] | {"per_sample_weights": factors}), **options)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
        grads.append(factors.grad)
    assert same_bits(*grads)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_of_halves(dtype: torch.dtype, call: str, sparse: bool) -> None:
    """The gradient of a half-precision weight is the float32 one rounded once, also in compiled code."""
    half = torch.randn(ROWS, DIM).to(dtype)
    torch.compiler.reset()
    functions = [rk.embedding_bag]
    if not sparse:
        functions.append(torch.compile(rk.embedding_bag, backend="aot_eager", fullgraph=True))
    for function in functions:
        weights = [half.clone().requires_grad_(), half.float().requires_grad_()]
        outputs = [function(weight=weight, **CALLS[call], sparse=sparse) for weight in weights]
        assert same_bits(*(output.detach() for output in outputs))
        for output in outputs:
            output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
        found, expected = (weight.grad.to_dense() for weight in weights)
        assert weights[0].grad.is_sparse == sparse
        assert same_bits(found, expected.to(dtype))


FLOATS, HALF, BYTES = torch.randn(ROWS, DIM), torch.randn(ROWS, DIM).half(), table("int8")[0]
NAMES = "fp32, fp16, bf16, int8, int4, mx9, mx6, mx4"


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (FLOATS, {"format": "int8"}, "weight is float32 [E, 21]: format must be None or 'fp32', got 'int8'"),
        (FLOATS, {"embedding_dim": 20}, "and embedding_dim None, got 20; rk.quantize_rows makes rows of other formats"),
        (HALF, {"format": "bf16"}, "weight is torch.float16 [E, 21], got format='bf16'"),
        (HALF, {"embedding_dim": 42}, "weight is torch.float16 [E, 21], got format=None, embedding_dim=42"),
        (HALF.T, {}, "weight must have two dimensions and be contiguous, got shape [21, 30]"),
        (HALF[:, :7], {}, "weight must have two dimensions and be contiguous, got shape [30, 7]"),
        (HALF[0], {}, "weight must have two dimensions and be contiguous, got shape [21]"),
        (BYTES, {}, "weight is torch.uint8: format and embedding_dim must describe its rows"),
        (BYTES, {"format": "int8"}, "format and embedding_dim must describe its rows"),
        (BYTES, {"embedding_dim": DIM}, "format and embedding_dim must describe its rows"),
        (
            BYTES,
            {"format": "int8", "embedding_dim": 22},
            'weights must have rows of 30 bytes for format "int8" and embedding_dim = 22, got 29',
        ),
        (
            BYTES,
            {"format": "mx9", "embedding_dim": 33},
            'weights must have rows of 54 bytes for format "mx9" and embedding_dim = 33, got 29',
        ),
        (BYTES, {"format": "int8", "embedding_dim": -1}, "embedding_dim = -1 must be in [1, 2^31)"),
        (BYTES, {"format": "int2", "embedding_dim": DIM}, f'= "int2" must be one of {NAMES}'),
        (BYTES, {"format": "mxint8", "embedding_dim": DIM}, f'= "mxint8" must be one of {NAMES}'),
        (
            BYTES,
            {"format": "int7", "embedding_dim": DIM},
            f"format must be one of {NAMES.replace('int4', 'int4, int2')}",
        ),
        (BYTES.T, {"format": "int8", "embedding_dim": 22}, "and be contiguous, got shape [29, 30]"),
        (
            BYTES[0],
            {"format": "int8", "embedding_dim": DIM},
            "weight must have two dimensions and be contiguous, got shape [29]",
        ),
        (FLOATS.double(), {}, "weight must be float32, float16, bfloat16 or uint8 rows of a format, got torch.float64"),
        (BYTES.int(), {"format": "int8", "embedding_dim": DIM}, "weight must be float32, float16, bfloat16 or uint8"),
    ],
)
def test_weights_that_cannot_be_looked_up(weight: Tensor, options: dict, message: str) -> None:
    """The error has the weight's dtype and format, and the allowed ones."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.embedding_bag(weight=weight, **options, **CALLS["sum"])


def test_bad_ids() -> None:
    """Bad ids raise as for float tables."""
    rows, _ = table("mx6")
    with pytest.raises(IndexError, match=r"input\[1\] = 30 \(bag 0\) .* \[0, 30\)"):
        rk.embedding_bag(torch.tensor([0, 30]), rows, torch.tensor([0]), format="mx6", embedding_dim=DIM)
    with pytest.raises(ValueError, match=r"padding_idx = 30 must be in \[-30, 30\)"):
        rk.embedding_bag(IDS, rows, OFFSETS, padding_idx=30, format="mx6", embedding_dim=DIM)


def test_meta() -> None:
    """The meta output has D columns of float32, not a row's bytes."""
    meta = {name: t.to("meta") if isinstance(t, Tensor) else t for name, t in CALLS["sum"].items()}
    for weight, options in ((BYTES, {"format": "int8", "embedding_dim": DIM}), (HALF, {})):
        output = rk.embedding_bag(weight=weight.to("meta"), **options, **meta)
        assert (output.shape, output.dtype, output.device.type) == ((4, DIM), torch.float32, "meta")
