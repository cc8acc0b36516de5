"""Samples of every size for the tests of factorization_machine, error bounds of their sums, and wrong arguments."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.reference.factorization_machine import formula

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: F, D, K: one element; partial and whole registers and tiles; several.
SIZES = [(1, 1, 1), (3, 10, 5), (7, 16, 16), (13, 20, 9), (27, 64, 24), (40, 70, 17), (2, 130, 70)]
#: Arguments of make_call: compared with torch; split among threads; called twice; empty.
COMPARED = [(size, 70, shared) for size in SIZES for shared in (False, True)]
SHARED_OUT = [((27, 64, 16), 1000, shared) for shared in (False, True)]
REPEATED = ((27, 64, 16), 20, True)
EMPTY = [(*made, shared) for made in (((4, 6, 3), 0), ((0, 6, 3), 5)) for shared in (False, True)]


class Call(NamedTuple):
    """x [B, F, D], y [F, K] or [B, F, K], grad [B, F, K]."""

    x: Tensor
    y: Tensor
    grad: Tensor

    @property
    def options(self) -> tuple[()]:
        """The op's arguments after its tensors: none."""
        return ()

    def by_torch(self, x: Tensor, y: Tensor) -> Tensor:
        """Computes the op with torch's products, in any float dtype."""
        return formula(x, y)

    def most_terms(self) -> tuple[int, int, int]:
        """The maximum number of additions of a term in an element of the result and of each gradient."""
        (batch, vectors, columns), factors = self.x.shape, self.y.shape[-1]
        summed = columns * min(batch, 8) + math.ceil(batch / 8) if self.y.dim() == 2 else columns
        return vectors + columns, vectors + 2 * factors, vectors + summed

    def bound(self, precision: str) -> tuple[int, float]:
        """Further additions, and a term's error: of four factors cut to TF32, or of P and Q between the products."""
        return 16, 2.0**-8 if precision == "tf32" else 0.0 if self.x.dtype == torch.float32 else 2.0**-10

    def each(self, ops: object, *precision: str) -> tuple[Tensor, Tensor, Tensor]:
        """The result and both gradients, from two ops of ``ops``."""
        out = ops.factorization_machine(self.x, self.y, *precision)
        return out, *ops.factorization_machine_backward(self.grad, self.x, self.y, *precision)

    def map(self, function) -> Call:
        """The call with ``function`` applied to its tensors."""
        return Call(*map(function, self))


def make_call(size: tuple[int, int, int], batch: int, shared: bool, dtype: torch.dtype = torch.float32) -> Call:
    """Random values for (F, D, K)."""
    vectors, columns, factors = size
    y = (vectors, factors) if shared else (batch, vectors, factors)
    shapes = (batch, vectors, columns), y, (batch, vectors, factors)
    return Call(*(torch.randn(shape).to(dtype) for shape in shapes))


def typical(batch: int) -> Call:
    """A call with few vectors, and one y for all samples."""
    return make_call((5, 8, 3), batch, True)


def tiny(batch: int) -> Call:
    """A call whose sums are denormal; each of 70 samples has its own y."""
    return make_call((4, 6, 3), batch, batch != 70).map(lambda t: t * 2.0**-46)


GOOD = {"x": torch.ones(2, 4, 3), "y": torch.ones(4, 5), "precision": "ieee"}
GRAD = {"grad": torch.ones(2, 4, 5)}
#: Errors of both ops for wrong arguments.
BAD = {
    "x must have 3 dimension(s), got shape [4, 3]": {"x": torch.ones(4, 3)},
    "x must be float32, float16 or bfloat16, got int64": {"x": torch.ones(2, 4, 3).long()},
    "x must have 1 to 1048576 columns, got shape [2, 4, 0]": {"x": torch.ones(2, 4, 0)},
    "x must have at most 1048576 vectors per sample, got shape [0, 1048577, 3]": {"x": torch.ones(0, 2**20 + 1, 3)},
    "y must have 2 or 3 dimensions, got shape [20]": {"y": torch.ones(20)},
    "y must be float32, got float16": {"y": torch.ones(4, 5).half()},
    "y must have 1 to 1048576 columns, got shape [4, 0]": {"y": torch.ones(4, 0)},
    "y must have shape [4, 5], got [3, 5]": {"y": torch.ones(3, 5)},
    "y must have shape [2, 4, 5], got [1, 4, 5]": {"y": torch.ones(1, 4, 5)},
    'precision must be "ieee" or "tf32", got ""': {"precision": ""},
}
BAD_GRAD = {
    "grad must have shape [2, 4, 5], got [2, 4, 3]": {"grad": torch.ones(2, 4, 3)},
    "grad must be float32, got bfloat16": {"grad": torch.ones(2, 4, 5).bfloat16()},
}
BAD_CALLS = [
    *(("factorization_machine", message) for message in BAD),
    *(("factorization_machine_backward", message) for message in BAD | BAD_GRAD),
]


def bad_arguments(op: str, message: str) -> tuple[tuple, tuple]:
    """Valid arguments of an op, and arguments for which it must raise the message."""
    good = GOOD if op == "factorization_machine" else GRAD | GOOD
    return tuple(good.values()), tuple((good | (BAD | BAD_GRAD)[message]).values())
