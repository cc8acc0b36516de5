"""Small calls of the ops with GPU kernels in Triton, for sanitize_cuda.py.

fake_quantize has the CPU's bits. Products are sums in another order: each call compares results with float64, within
the bounds of docs/numerics.md, and returns no tensors to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dot_interaction_cases
import factorization_machine_cases
import grouped_projection_cases
import torch
from product_checks import check_tiles
from row_format_cases import PLACE, arguments
from torch import Tensor

#: A format of each family, with and without noise: Triton compiles a kernel for every one.
WAYS = [
    ("bf16", "stochastic", None),
    ("int8", "nearest", None),
    ("mx6", "stochastic", "floor"),
    ("mxfp8_e4m3", "nearest", "rceil"),
]


def _products(cases: object, ops: object) -> list[Tensor]:
    """A call of several tiles, and one of partial tiles only, in float16 if the op supports it."""
    small = cases.typical(3)
    for call in (cases.make_call(*cases.REPEATED), small if cases is grouped_projection_cases else small.map(_half)):
        check_tiles(call.each(ops), call)
    return []


def _half(x: Tensor) -> Tensor:
    return x.half()


def _fake_quantize(ops: object) -> Iterator[Tensor]:
    for columns in (5, 131):
        x = torch.linspace(-3, 5, 3 * columns).view(3, columns)
        for way in WAYS:
            yield ops.fake_quantize(x, *arguments(*way, PLACE))


def triton_calls() -> dict[str, Callable]:
    """Named functions that call ops of a given namespace and return tensors to compare with the CPU's bits."""
    return {
        "dot_interaction": lambda ops: _products(dot_interaction_cases, ops),
        "factorization_machine": lambda ops: _products(factorization_machine_cases, ops),
        "grouped_projection": lambda ops: _products(grouped_projection_cases, ops),
        "fake_quantize": _fake_quantize,
    }
