"""Samples of every size for the tests of dot_interaction, error bounds of their sums, and wrong arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.ops.dot_interaction import num_pairs
from rec_kernels.reference.dot_interaction import interaction_reference

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: F, D: one vector; partial and whole registers and tiles; several.
SIZES = [(0, 1), (0, 20), (1, 1), (3, 5), (4, 16), (13, 10), (15, 32), (27, 64), (40, 70), (5, 130)]
MANY, LONG = (70, 9), (2, 1024)
#: Arguments of make_call: compared with torch; split among threads; called twice; empty.
COMPARED = [(size, 20, self_interaction) for size in (*SIZES, MANY, LONG) for self_interaction in (False, True)]
SHARED_OUT = [((27, 64), 1000, False)]
REPEATED = ((27, 64), 5, False)
EMPTY = [((4, 6), 0, False)]


class Call(NamedTuple):
    """dense [B, D], sparse [B, F, D], grad [B, D + pairs], and whether vectors are paired with themselves."""

    dense: Tensor
    sparse: Tensor
    grad: Tensor
    self_interaction: bool

    @property
    def options(self) -> tuple[bool]:
        """The op's arguments after its tensors."""
        return (self.self_interaction,)

    def by_torch(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Computes the op with torch.bmm, its triangle and torch.cat, in any float dtype."""
        return interaction_reference(dense, sparse, self.self_interaction)

    def most_terms(self) -> tuple[int, int, int]:
        """The maximum number of terms in the sum of an element of the result and of each gradient."""
        vectors = self.sparse.shape[1] + 1
        return self.dense.shape[1], vectors + 1, vectors

    def bound(self, precision: str) -> tuple[int, float]:
        """Further additions, and a term's error: a factor cut to TF32 changes by 2^-10, a product by twice that."""
        return 8, 2.0**-9 if precision == "tf32" and self.dense.dtype == torch.float32 else 0.0

    def each(self, ops: object, *precision: str) -> tuple[Tensor, Tensor, Tensor]:
        """The result and both gradients, from two ops of ``ops``."""
        options = (*self.options, *precision)
        out = ops.dot_interaction(self.dense, self.sparse, *options)
        return out, *ops.dot_interaction_backward(self.grad, self.dense, self.sparse, *options)

    def map(self, function) -> Call:
        """The call with ``function`` applied to its tensors."""
        return Call(*map(function, self[:3]), self.self_interaction)


def make_call(size: tuple[int, int], batch: int, self_interaction: bool, dtype: torch.dtype = torch.float32) -> Call:
    """Random values for (F, D)."""
    (vectors, columns), pairs = size, num_pairs(size[0], self_interaction)
    shapes = (batch, columns), (batch, vectors, columns), (batch, columns + pairs)
    return Call(*(torch.randn(shape).to(dtype) for shape in shapes), self_interaction)


def typical(batch: int) -> Call:
    """A call with few vectors."""
    return make_call((5, 8), batch, True)


def tiny(batch: int) -> Call:
    """A call whose sums are denormal."""
    return make_call((4, 6), batch, True).map(lambda t: t * 2.0**-70)


GOOD = {"dense": torch.ones(2, 3), "sparse": torch.ones(2, 4, 3), "precision": "ieee"}
GRAD = {"grad": torch.ones(2, 13)}
#: Errors of both ops for wrong arguments.
BAD = {
    "dense must have 2 dimension(s), got shape [3]": {"dense": torch.ones(3)},
    "dense must be float32, float16 or bfloat16, got float64": {"dense": torch.ones(2, 3).double()},
    "dense must have 1 to 1048576 columns, got shape [2, 0]": {"dense": torch.ones(2, 0)},
    "dense must have 1 to 1048576 columns, got shape [0, 1048577]": {"dense": torch.ones(0, 2**20 + 1)},
    "sparse must have 3 dimension(s), got shape [2, 12]": {"sparse": torch.ones(2, 12)},
    "sparse must be float32, got bfloat16": {"sparse": torch.ones(2, 4, 3).bfloat16()},
    "sparse must have shape [2, 4, 3], got [5, 4, 3]": {"sparse": torch.ones(5, 4, 3)},
    "sparse must have shape [2, 4, 3], got [2, 4, 2]": {"sparse": torch.ones(2, 4, 2)},
    "sparse must have fewer than 1048576 vectors per sample, got shape [0, 1048576, 3]": {
        "sparse": torch.ones(0, 2**20, 3)
    },
    'precision must be "ieee" or "tf32", got "tf32x3"': {"precision": "tf32x3"},
}
BAD_GRAD = {
    "grad must have shape [2, 13], got [2, 18]": {"grad": torch.ones(2, 18)},
    "grad must have shape [2, 13], got [26]": {"grad": torch.ones(26)},
    "grad must be float32, got float16": {"grad": torch.ones(2, 13).half()},
}
BAD_CALLS = [
    *(("dot_interaction", message) for message in BAD),
    *(("dot_interaction_backward", message) for message in BAD | BAD_GRAD),
]


def bad_arguments(op: str, message: str) -> tuple[tuple, tuple]:
    """Valid arguments of an op, and arguments for which it must raise the message."""
    good = GOOD if op == "dot_interaction" else GRAD | GOOD
    bad = good | (BAD | BAD_GRAD)[message]
    return tuple((*list(a.values())[:-1], False, a["precision"]) for a in (good, bad))
