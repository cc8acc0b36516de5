"""The template op compared with plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import rec_kernels as rk
from bench.cases import INPUTS, Case, Way, op_case, trained_case

SIZES = [(4096, 16), (65_536, 128)]


def cases() -> Iterator[Case]:
    """Yields the cases. Bytes: x, factors and output; in training also x again, the gradient twice, and grad_x."""
    for rows, columns in SIZES:
        given = [tuple(torch.randn(s, requires_grad=True) for s in ((rows, columns), (rows,))) for _ in range(INPUTS)]
        ways = {"ours": Way(rk.scale_rows, given), "torch": Way(lambda x, scale: x * scale[:, None], given)}
        yield op_case(f"scale_rows {rows}x{columns}", ways, 4 * rows * (2 * columns + 1))
        yield trained_case(f"scale_rows, trained, {rows}x{columns}", ways, 4 * rows * (6 * columns + 3))
