"""quantize_rows and dequantize_rows beside torch's prepack and unpack ops, torch's casts and FBGEMM's fused rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from bench.peers import fbgemm_ops
from bench.timing import time_calls, turned

SIZES = [(32_768, 128), (131_072, 16)]
# Inputs that the calls take in turn: together more than a cache holds.
INPUTS = 6
BITS = {"int8": 8, "int4": 4}

quantized = torch.ops.quantized
Function = Callable[[Tensor], Tensor]


def quantizers(format: str, rounding: str) -> dict[str, Function]:
    """Implementation -> its function of rows of floats; the same bytes. Nobody else rounds stochastically."""
    step = torch.tensor(1)
    found: dict[str, Function] = {
        "ours": lambda x: rk.quantize_rows(x, format, rounding=rounding, seed=step, step=step)
    }
    if rounding == "stochastic":
        return found
    if format == "bf16":
        found["torch"] = lambda x: x.bfloat16()
    elif format in BITS:
        found["torch"] = {"int8": quantized.embedding_bag_byte_prepack, "int4": quantized.embedding_bag_4bit_prepack}[
            format
        ]
    if format in BITS and (ops := fbgemm_ops()):
        by_format = {
            "int8": ops.FloatToFused8BitRowwiseQuantized,
            "int4": lambda x: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(x, 4),
        }
        found["fbgemm"] = by_format[format]
    return found


def dequantizers(format: str, columns: int) -> dict[str, Function]:
    """Implementation -> its function of encoded rows; the same numbers."""
    found: dict[str, Function] = {"ours": lambda rows: rk.dequantize_rows(rows, format, columns)}
    if format == "bf16":
        found["torch"] = lambda rows: rows.view(torch.bfloat16).float()
    elif format in BITS:
        found["torch"] = {"int8": quantized.embedding_bag_byte_unpack, "int4": quantized.embedding_bag_4bit_unpack}[
            format
        ]
    if format in BITS and (ops := fbgemm_ops()):
        by_format = {
            "int8": ops.Fused8BitRowwiseQuantizedToFloat,
            "int4": lambda rows: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(rows, 4),
        }
        found["fbgemm"] = by_format[format]
    return found


QUANTIZE = [(f, r) for f in ("int8", "int4", "mx6", "bf16") for r in ("nearest", "stochastic")]
DEQUANTIZE = ["int8", "int4", "mx6", "bf16"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    if metafunc.function is test_quantize:
        cases = [(*way, name) for way in QUANTIZE for name in turned(quantizers(*way), metafunc.config)]
        metafunc.parametrize(("format", "rounding", "name"), cases)
    elif metafunc.function is test_dequantize:
        cases = [(f, name) for f in DEQUANTIZE for name in turned(dequantizers(f, 1), metafunc.config)]
        metafunc.parametrize(("format", "name"), cases)


def _time(benchmark, functions: dict[str, Function], name: str, inputs: list[Tensor], rounds: int, numel: int) -> None:
    function, first = functions[name], inputs[0]
    wanted = functions["ours"](first)
    assert torch.equal(function(first).view(wanted.dtype), wanted), f"{name} has other bytes: no figure"
    time_calls(benchmark, lambda i: function(inputs[i]), len(inputs), rounds, 4 * numel)


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_quantize(benchmark, size: tuple[int, int], format: str, rounding: str, name: str, rounds: int) -> None:
    """Bytes: the float32 input, read once."""
    inputs = list(torch.randn(INPUTS, *size).unbind())
    benchmark.group = f"quantize {format} {rounding} {size[0]}x{size[1]}"
    _time(benchmark, quantizers(format, rounding), name, inputs, rounds, size[0] * size[1])


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_dequantize(benchmark, size: tuple[int, int], format: str, name: str, rounds: int) -> None:
    """Bytes: the float32 output, written once, so that the rates compare with those of quantize."""
    inputs = [rk.quantize_rows(x, format) for x in torch.randn(INPUTS, *size).unbind()]
    benchmark.group = f"dequantize {format} {size[0]}x{size[1]}"
    _time(benchmark, dequantizers(format, size[1]), name, inputs, rounds, size[0] * size[1])
