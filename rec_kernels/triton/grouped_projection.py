"""grouped_projection and its gradients in Triton, each for all groups in one launch.

Used for GPU tensors, and for CPU tensors under TRITON_INTERPRET=1. Tiles are multiplied by ``tl.dot``: on an
NVIDIA GPU by the tensor cores in three TF32 passes, whose error is about float32's, on an AMD GPU in float32. Sums are
float32; docs/numerics.md ("grouped_projection") bounds the error. No float is added by an atomic operation: the same
call on the same GPU gives the same bits. It has run on an H200.

The first call with new widths copies a list of tiles to the GPU, which later calls reuse: a CUDA graph can capture
calls whose widths have been used before.
"""

# ruff: noqa: N803 (kernel constants are upper-case)
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rec_kernels.ops.grouped_projection import Dims, check_dims
from rec_kernels.triton.inputs import check, check_tensor

PRECISION = "ieee" if torch.version.hip else "tf32x3"
_ARITHMETIC = {"PRECISION": PRECISION, "enable_fp_fusion": True}
#: Samples of a program; of the weights' gradient those that a program sums up, 32 at a time.
ROWS, SUMMED_ROWS, ROWS_AT_ONCE = 64, 1024, 32

# Columns of the lists of tiles.
_PANEL, _TERM, _TILE = tl.constexpr(4), tl.constexpr(4), tl.constexpr(6)


@triton.jit(do_not_specialize=["num_rows", "num_panels"])
def product_kernel(
    x,  # [num_rows, x_columns]
    weights,
    out,  # [num_rows, out_columns], written
    panels,  # int64 [num_panels, 4]: first column of the result, columns, first and last term
    terms,  # int64 [., 4]: first column of x, depth, where its part of a matrix begins (-1: the identity), in_dim
    num_rows,
    num_panels,
    x_columns,
    out_columns,
    FORWARD: tl.constexpr,  # the matrix has a row for each column of the result; else for each of x
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes ROWS rows of a panel: the sum of its terms, x times a matrix."""
    program = tl.program_id(0)
    panel = panels + program % num_panels * _PANEL
    row = (program // num_panels).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    column, columns = tl.load(panel), tl.load(panel + 1)
    there, wanted = (row < num_rows)[:, None], (n < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for t in range(tl.load(panel + 2), tl.load(panel + 3)):
        term = terms + t * _TERM
        first, depth, matrix, in_dim = tl.load(term), tl.load(term + 1), tl.load(term + 2), tl.load(term + 3)
        rows = x + row[:, None] * x_columns + first
        if matrix < 0:
            total += tl.load(rows + n[None, :], mask=there & wanted, other=0.0)
        else:
            for begin in range(0, depth, DEPTH):
                k = begin + tl.arange(0, DEPTH)
                a = tl.load(rows + k[None, :], mask=there & (k < depth)[None, :], other=0.0)
                if FORWARD:
                    at = weights + matrix + n[:, None] * in_dim + k[None, :]
                    b = tl.trans(tl.load(at, mask=(n < columns)[:, None] & (k < depth)[None, :], other=0.0))
                else:
                    at = weights + matrix + k[:, None] * in_dim + n[None, :]
                    b = tl.load(at, mask=(k < depth)[:, None] & wanted, other=0.0)
                total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(out + row[:, None] * out_columns + column + n[None, :], total, mask=there & wanted)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_weights"])
def weight_gradient_kernel(
    grad,  # [num_rows, out_columns]
    x,  # [num_rows, x_columns]
    out,  # [., num_weights], written: the sums of SUMMED_ROWS rows each
    tiles,  # int64 [num_tiles, 6]: first column of grad, columns, first column of x, depth, where it begins, in_dim
    num_rows,
    num_tiles,
    num_weights,
    x_columns,
    out_columns,
    PRECISION: tl.constexpr,
    SUMMED_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes a tile of a matrix's gradient over SUMMED_ROWS samples."""
    program = tl.program_id(0)
    tile, part = tiles + program % num_tiles * _TILE, (program // num_tiles).to(tl.int64)
    n, k = tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)[None, :]
    grad += tl.load(tile) + n
    x += tl.load(tile + 2) + k
    wanted, inside = n < tl.load(tile + 1), k < tl.load(tile + 3)
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, SUMMED_ROWS, ROWS):
        row = (part * SUMMED_ROWS + first + tl.arange(0, ROWS))[:, None]
        there = row < num_rows
        g = tl.load(grad + row * out_columns, mask=there & wanted, other=0.0)
        a = tl.load(x + row * x_columns, mask=there & inside, other=0.0)
        total = tl.dot(tl.trans(g), a, total, input_precision=PRECISION)
    at = out + part * num_weights + tl.load(tile + 4) + tl.trans(n) * tl.load(tile + 5) + k
    tl.store(at, total, mask=tl.trans(wanted) & inside)


class Group(NamedTuple):
    """Offsets of a group in x, in the result and in the weights (-1: the identity, without weights)."""

    x_column: int
    in_dim: int
    block: int
    out_column: int
    out_dim: int
    weights: int


@functools.lru_cache(maxsize=128)
def _groups(dims: Dims) -> tuple[Group, ...]:
    in_dims, out_dims, outputs = dims
    columns = list(itertools.accumulate(out_dims, initial=0))
    groups, x_column, weights = [], 0, 0
    for in_dim, block in zip(in_dims, outputs, strict=True):
        out_dim = out_dims[block]
        identity = in_dim == out_dim
        groups.append(Group(x_column, in_dim, block, columns[block], out_dim, -1 if identity else weights))
        x_column += in_dim
        weights += 0 if identity else in_dim * out_dim
    return tuple(groups)


def _block(sizes: Sequence[int], most: int) -> int:
    """Columns of a tile: a power of two, at least 16, as tl.dot requires."""
    return max(16, min(most, triton.next_power_of_2(max(sizes))))


class _Product(NamedTuple):
    """Widths of the groups and their panels, for product_kernel."""

    panels: Tensor
    terms: Tensor
    blocks: dict[str, int]


@functools.cache  # captured CUDA graphs may refer to these tensors
def _product(dims: Dims, forward: bool, device: torch.device) -> _Product:
    groups = _groups(dims)
    columns, depths = (dims[1], dims[0]) if forward else (dims[0], dims[1])
    blocks = {"COLUMNS": _block(columns, 64), "DEPTH": _block(depths, 32)}
    panels: list[tuple[int, ...]] = []
    terms: list[tuple[int, int, int, int]] = []
    for members in _by_panel(groups, forward):
        first_column, width = (members[0].out_column, members[0].out_dim) if forward else members[0][:2]
        for c in range(0, width, blocks["COLUMNS"]):
            first_term = len(terms)
            terms += [_term(g, c, forward) for g in members]
            panels.append((first_column + c, min(blocks["COLUMNS"], width - c), first_term, len(terms)))
    return _Product(torch.tensor(panels, device=device), torch.tensor(terms, device=device), blocks)


def _by_panel(groups: Sequence[Group], forward: bool) -> list[list[Group]]:
    """Groups of each block; in the backward, single groups."""
    key: Callable[[Group], int] = (lambda g: g.block) if forward else (lambda g: g.x_column)
    return [list(members) for _, members in itertools.groupby(groups, key)]


def _term(g: Group, c: int, forward: bool) -> tuple[int, int, int, int]:
    """Term of the panel that starts at column c of the block (forward) or of the group (backward)."""
    source, depth = (g.x_column, g.in_dim) if forward else (g.out_column, g.out_dim)
    if g.weights < 0:
        return source + c, 0, -1, g.in_dim
    return source, depth, g.weights + c * (g.in_dim if forward else 1), g.in_dim


@functools.cache
def _gradient_tiles(dims: Dims, device: torch.device) -> tuple[Tensor, dict[str, int]]:
    groups = [g for g in _groups(dims) if g.weights >= 0]
    blocks = {"COLUMNS": _block([g.out_dim for g in groups], 64), "DEPTH": _block([g.in_dim for g in groups], 64)}
    tiles = [
        (
            *(g.out_column + c, min(blocks["COLUMNS"], g.out_dim - c)),
            *(g.x_column + k, min(blocks["DEPTH"], g.in_dim - k)),
            *(g.weights + c * g.in_dim + k, g.in_dim),
        )
        for g in groups
        for c in range(0, g.out_dim, blocks["COLUMNS"])
        for k in range(0, g.in_dim, blocks["DEPTH"])
    ]
    return torch.tensor(tiles, device=device), blocks


def _check_rows(t: Tensor, dims: Sequence[int], name: str, dims_name: str) -> None:
    check_tensor(t, name, (torch.float32,), rank=2)
    right = f"{name} must have sum({dims_name}) = {sum(dims)} columns"
    check(t.shape[1] == sum(dims), f"{right}, got shape {list(t.shape)}")


def _num_weights(dims: Dims) -> int:
    return sum(g.in_dim * g.out_dim for g in _groups(dims) if g.weights >= 0)


def _check_weights(weights: Tensor, dims: Dims, other: Tensor, other_name: str) -> None:
    check_tensor(weights, "weights", (torch.float32,), rank=1)
    wanted = f"weights must have {_num_weights(dims)} elements, the matrices of all groups that are not the identity"
    check(len(weights) == _num_weights(dims), f"{wanted}, got {len(weights)}")
    check(weights.device == other.device, f"weights must be on the same device as {other_name}")


def grouped_projection(
    x: Tensor, weights: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """Computes the op, without a gradient: arguments, result and errors as in docs/ops.md."""
    dims = check_dims(in_dims, out_dims, outputs)
    _check_rows(x, in_dims, "x", "in_dims")
    _check_weights(weights, dims, x, "x")
    return _multiply(x, weights, dims, forward=True)


def grouped_projection_backward_input(
    grad: Tensor, weights: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """Computes the op: arguments, result and errors as in docs/ops.md."""
    dims = check_dims(in_dims, out_dims, outputs)
    _check_rows(grad, out_dims, "grad", "out_dims")
    _check_weights(weights, dims, grad, "grad")
    return _multiply(grad, weights, dims, forward=False)


def _multiply(x: Tensor, weights: Tensor, dims: Dims, forward: bool) -> Tensor:
    out = x.new_empty((len(x), sum(dims[1] if forward else dims[0])))
    if not out.numel():
        return out
    product = _product(dims, forward, x.device)
    given = {"num_rows": len(x), "num_panels": len(product.panels), "FORWARD": forward, **_ARITHMETIC}
    columns = {"x_columns": x.shape[1], "out_columns": out.shape[1]}
    grid = (triton.cdiv(len(x), ROWS) * len(product.panels),)
    # Triton launches on the current device, which may differ from the tensors' device.
    with torch.accelerator.device_index(x.device.index):
        product_kernel[grid](
            x.contiguous(),
            weights.contiguous(),
            out,
            product.panels,
            product.terms,
            **given,
            **columns,
            ROWS=ROWS,
            **product.blocks,
        )
    return out


def grouped_projection_backward_weights(
    grad: Tensor, x: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """Computes the op: arguments, result and errors as in docs/ops.md. Torch adds the sums of several programs."""
    dims = check_dims(in_dims, out_dims, outputs)
    _check_rows(grad, out_dims, "grad", "out_dims")
    _check_rows(x, in_dims, "x", "in_dims")
    check_tensor(x, "x", (torch.float32,), shape=(len(grad), sum(in_dims)))
    check(x.device == grad.device, "x must be on the same device as grad")
    num_weights, parts = _num_weights(dims), triton.cdiv(len(x), SUMMED_ROWS)
    if not num_weights or not parts:
        return x.new_zeros(num_weights)
    tiles, blocks = _gradient_tiles(dims, x.device)
    sums = x.new_empty((parts, num_weights))
    given = {"num_rows": len(x), "num_tiles": len(tiles), "num_weights": num_weights, **_ARITHMETIC}
    columns = {"x_columns": x.shape[1], "out_columns": grad.shape[1]}
    with torch.accelerator.device_index(x.device.index):
        weight_gradient_kernel[(len(tiles) * parts,)](
            grad.contiguous(),
            x.contiguous(),
            sums,
            tiles,
            **given,
            **columns,
            SUMMED_ROWS=SUMMED_ROWS,
            ROWS=ROWS_AT_ONCE,
            **blocks,
        )
    return sums[0] if parts == 1 else sums.sum(0)
