"""quantize_rows and dequantize_rows compared with torch's prepack, unpack and casts, and FBGEMM's fused rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import rec_kernels as rk
from bench.cases import INPUTS, Case, Way, op_case
from bench.peers import fbgemm_ops
from bench.timing import Call

SIZES = [(32_768, 128), (131_072, 16)]
FORMATS = ("int8", "int4", "mx6", "bf16")

quantized = torch.ops.quantized
Function = Callable[[Tensor], Tensor]


def quantizers(format: str, rounding: str) -> dict[str, Function]:
    """Implementation -> its function of rows of floats; all write equal bytes. Peers do not round stochastically."""
    step, ops = torch.tensor(1), fbgemm_ops()
    ours = {"ours": lambda x: rk.quantize_rows(x, format, rounding=rounding, seed=step, step=step)}
    prepack = {"int8": quantized.embedding_bag_byte_prepack, "int4": quantized.embedding_bag_4bit_prepack}
    prepack["bf16"] = Tensor.bfloat16
    if rounding == "stochastic" or format not in prepack:
        return ours
    theirs = {"torch": prepack[format]}
    if ops and format == "int8":
        theirs["fbgemm"] = ops.FloatToFused8BitRowwiseQuantized
    elif ops and format == "int4":
        theirs["fbgemm"] = lambda x: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(x, 4)
    return ours | theirs


def dequantizers(format: str, columns: int) -> dict[str, Function]:
    """Implementation -> its function of encoded rows; all return equal values."""
    ops = fbgemm_ops()
    ours = {"ours": lambda rows: rk.dequantize_rows(rows, format, columns)}
    unpack = {"int8": quantized.embedding_bag_byte_unpack, "int4": quantized.embedding_bag_4bit_unpack}
    unpack["bf16"] = lambda rows: rows.view(torch.bfloat16).float()
    theirs = {"torch": unpack[format]} if format in unpack else {}
    if ops and format == "int8":
        theirs["fbgemm"] = ops.Fused8BitRowwiseQuantizedToFloat
    elif ops and format == "int4":
        theirs["fbgemm"] = lambda rows: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(rows, 4)
    return ours | theirs


def cases() -> Iterator[Case]:
    """Yields the cases. All inputs together exceed the caches. Bytes count the floats once in both directions."""
    for (rows, columns), format in itertools.product(SIZES, FORMATS):
        x = list(torch.randn(INPUTS, rows, columns).unbind())
        for rounding in ("nearest", "stochastic"):
            yield _checked(
                f"quantize {format} {rounding} {rows}x{columns}", quantizers(format, rounding), x, x[0].nbytes
            )
        encoded = [rk.quantize_rows(of, format) for of in x]
        yield _checked(f"dequantize {format} {rows}x{columns}", dequantizers(format, columns), encoded, x[0].nbytes)


def _checked(title: str, functions: dict[str, Function], inputs: list[Tensor], moved: int) -> Case:
    case = op_case(title, {name: Way(f, [(x,) for x in inputs]) for name, f in functions.items()}, moved)
    wanted = functions["ours"](inputs[0])

    def call(name: str) -> Call:
        found = functions[name](inputs[0]).view(wanted.dtype)
        assert torch.equal(found, wanted), f"{name} has other bytes: no figure"
        return case.call(name)

    return dataclasses.replace(case, call=call)
