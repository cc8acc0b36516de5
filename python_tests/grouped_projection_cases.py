"""Groups of every kind for the tests of grouped_projection, and sums with bounded rounding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.ops.grouped_projection import num_weights


class Dims(NamedTuple):
    """The ops' lists, in their order."""

    in_dims: list[int]
    out_dims: list[int]
    outputs: list[int]

    def __str__(self) -> str:
        return "-".join("x".join(map(str, dims)) for dims in self)


DIMS = [
    Dims([3, 2, 5], [4, 4, 4], [0, 1, 2]),
    Dims([1], [1], [0]),  # the identity of one column
    Dims([1, 1], [2], [0, 0]),
    Dims([1, 2, 3, 4, 8, 9, 10, 11, 15, 16], [16] * 10, list(range(10))),
    Dims([2, 5, 5, 7, 1], [5, 7], [0, 0, 0, 1, 1]),  # identities before and after other groups
    Dims([17, 33, 20], [1, 129], [0, 1, 1]),
    Dims([70, 31, 65, 64, 5], [65, 64, 130], [0, 0, 0, 1, 2]),  # several panels, with partial registers
]
LARGE = Dims([300, 512], [512, 512], [0, 1])
TRAINED = Dims([3, 5, 4, 16], [5, 16], [0, 0, 1, 1])
#: Arguments of make_call: compared with torch; split among threads; called twice; empty.
COMPARED = [(dims, 70) for dims in (*DIMS, LARGE)]
SHARED_OUT = [(DIMS[3], 1500), (DIMS[6], 1500)]  # split by rows, and by panels
REPEATED = (DIMS[6], 70)
EMPTY = [*((dims, 0) for dims in DIMS), *((Dims([], [], []), batch) for batch in (0, 5))]


class Call(NamedTuple):
    """x [B, sum(in_dims)], flat weights, grad [B, sum(out_dims)], and the lists."""

    x: Tensor
    weights: Tensor
    grad: Tensor
    dims: Dims

    @property
    def options(self) -> Dims:
        """The op's arguments after its tensors."""
        return self.dims

    def by_torch(self, x: Tensor, weights: Tensor) -> Tensor:
        """Computes the op with torch.nn.functional.linear and torch.cat, in any float dtype."""
        blocks: list[Tensor | None] = [None] * len(self.dims.out_dims)
        groups = zip(x.split(self.dims.in_dims, 1), self.dims.in_dims, self.dims.outputs, strict=True)
        for columns, in_dim, block in groups:
            out_dim = self.dims.out_dims[block]
            if in_dim != out_dim:
                matrix, weights = weights[: in_dim * out_dim], weights[in_dim * out_dim :]
                columns = torch.nn.functional.linear(columns, matrix.view(out_dim, in_dim))
            before = blocks[block]
            blocks[block] = columns if before is None else before + columns
        return torch.cat([x[:, :0], *blocks], 1)

    def most_terms(self) -> tuple[int, int, int]:
        """The maximum number of terms in the sum of an element of the result and of each gradient."""
        terms = [0] * len(self.dims.out_dims)
        for in_dim, block in zip(self.dims.in_dims, self.dims.outputs, strict=True):
            terms[block] += in_dim
        return max(terms), max(self.dims.out_dims), len(self.x)

    def bound(self, precision: str) -> tuple[int, float]:
        """Further additions, and a term's error: no factor is cut to TF32."""
        return 8, 0.0

    def map(self, function) -> Call:
        """The call with ``function`` applied to its tensors."""
        return Call(*map(function, self[:3]), self.dims)

    def each(self, ops: object) -> tuple[Tensor, Tensor, Tensor]:
        """The result and both gradients, from three ops of ``ops``."""
        return (
            ops.grouped_projection(self.x, self.weights, *self.dims),
            ops.grouped_projection_backward_input(self.grad, self.weights, *self.dims),
            ops.grouped_projection_backward_weights(self.grad, self.x, *self.dims),
        )


def make_call(dims: Dims, batch: int, dtype: torch.dtype = torch.float32) -> Call:
    """Random values for these widths."""
    sizes = (batch, sum(dims.in_dims)), (num_weights(*dims),), (batch, sum(dims.out_dims))
    return Call(*(torch.randn(size, dtype=dtype) for size in sizes), dims)


def typical(batch: int) -> Call:
    """A call with few groups, with and without matrices."""
    return make_call(TRAINED, batch)


def tiny(batch: int) -> Call:
    """A call whose sums are denormal."""
    call = make_call(TRAINED, batch)
    return call._replace(x=call.x * 2.0**-130, grad=call.grad * 2.0**-10)


T, U = torch.ones(2, 5), torch.ones(8)
GOOD = {"x": T, "weights": U, "in_dims": [2, 3], "out_dims": [4, 3], "outputs": [0, 1]}
#: Errors of every op for wrong lists.
BAD_DIMS = {
    "in_dims[1] = 0 must be in [1, 1048576]": {"in_dims": [2, 0]},
    "in_dims[0] = 1048577 must be in [1, 1048576]": {"in_dims": [2**20 + 1, 3]},
    "out_dims[0] = -4 must be in [1, 1048576]": {"out_dims": [-4, 3]},
    "outputs must have one element for each of the 2 in_dims, got 1": {"outputs": [0]},
    "outputs[0] = 1 must be 0": {"outputs": [1, 1]},
    "outputs[0] = -1 must be 0": {"outputs": [-1, 0]},
    "outputs[1] = 2 must be outputs[0] = 0 or one more": {"outputs": [0, 2]},
    "outputs[1] = -1 must be outputs[0] = 0 or one more": {"outputs": [0, -1]},
    "out_dims must have one element for each of the 1 blocks that outputs names, got 2": {"outputs": [0, 0]},
    "out_dims must have one element for each of the 2 blocks that outputs names, got 1": {"out_dims": [4]},
}
BAD_WEIGHTS = {
    "weights must have 8 elements, the matrices of all groups that are not the identity, got 17": {
        "weights": torch.ones(17)
    },
    "weights must have 1 dimension(s), got shape [4, 2]": {"weights": torch.ones(4, 2)},
    "weights must be float32, got float64": {"weights": U.double()},
}
BAD_X = {
    "x must have sum(in_dims) = 5 columns, got shape [2, 6]": {"x": torch.ones(2, 6)},
    "x must have 2 dimension(s), got shape [5]": {"x": torch.ones(5)},
    "x must be float32, got float16": {"x": T.half()},
}
BAD_GRAD = {
    "grad must have sum(out_dims) = 7 columns, got shape [2, 6]": {"grad": torch.ones(2, 6)},
    "grad must have 2 dimension(s), got shape [7]": {"grad": torch.ones(7)},
    "grad must be float32, got bfloat16": {"grad": torch.ones(2, 7).bfloat16()},
}
BAD_BATCH = {"x must have shape [2, 5], got [3, 5]": {"x": torch.ones(3, 5)}}
#: The arguments of each op, and its messages.
BAD = {
    "grouped_projection": (("x", "weights"), BAD_DIMS | BAD_WEIGHTS | BAD_X),
    "grouped_projection_backward_input": (("grad", "weights"), BAD_DIMS | BAD_WEIGHTS | BAD_GRAD),
    "grouped_projection_backward_weights": (("grad", "x"), BAD_DIMS | BAD_X | BAD_GRAD | BAD_BATCH),
}
BAD_CALLS = [(op, message) for op, (_, messages) in BAD.items() for message in messages]


def bad_arguments(op: str, message: str) -> tuple[tuple, tuple]:
    """Valid arguments of an op, and arguments for which it must raise the message."""
    tensors, messages = BAD[op]
    names = (*tensors, "in_dims", "out_dims", "outputs")
    good = GOOD | {"grad": torch.ones(2, 7)}
    return tuple(good[n] for n in names), tuple((good | messages[message])[n] for n in names)
