"""dot_interaction and factorization_machine compared with torch's recipes, in float32 and bfloat16."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import rec_kernels as rk
from bench.gpu.subjects import GradientCase
from rec_kernels.reference.dot_interaction import interaction_reference
from rec_kernels.reference.factorization_machine import formula

#: Columns of factorization_machine's projection.
FACTORS = 16

_FUNCTIONS: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "dot_interaction": {"ours": rk.dot_interaction, "torch": interaction_reference},
    "factorization_machine": {"ours": rk.factorization_machine, "torch": formula},
}


class DenseSide(GradientCase):
    """One of the ops. Everything is read or written once, so both byte counts are equal.

    Args:
        op: "dot_interaction" or "factorization_machine".
        batch, vectors, columns: B, F and D.
        dtype: torch.float32 or torch.bfloat16.
    """

    def __init__(self, op: str, batch: int, vectors: int, columns: int, dtype: torch.dtype = torch.float32) -> None:
        self.op, self.sizes, self.dtype = op, (batch, vectors, columns), dtype
        self.unit = 2.0**-8 if dtype == torch.bfloat16 else 0.0
        kind = "" if dtype == torch.float32 else "-bf16"
        self.name = f"{op.replace('_', '-')}-{batch}x{vectors}x{columns}{kind}"

    def about(self) -> dict[str, object]:
        """Samples, sparse vectors of each, their columns, dtype."""
        sizes = dict(zip(("batch", "vectors", "dim"), self.sizes, strict=True))
        return {"name": self.name, "op": self.op, "dtype": str(self.dtype).removeprefix("torch.")} | sizes

    def moved(self) -> dict[str, int]:
        batch, vectors, columns = self.sizes
        if self.op == "dot_interaction":
            read, out = batch * columns * (1 + vectors), batch * (columns + vectors * (vectors + 1) // 2)
        else:
            read, out = vectors * (batch * columns + FACTORS), batch * vectors * FACTORS
        # Forward: reads arguments, writes the result. Backward: reads its gradient and the arguments, writes theirs.
        return {"forward": self.dtype.itemsize * (read + out), "backward": self.dtype.itemsize * (2 * read + out)}

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        return _FUNCTIONS[self.op]

    def given(self, device: torch.device) -> tuple[Tensor, ...]:
        batch, vectors, columns = self.sizes
        make = functools.partial(torch.randn, device=device, dtype=self.dtype, requires_grad=True)
        small = (batch, columns) if self.op == "dot_interaction" else (vectors, FACTORS)
        wide = make(batch, vectors, columns)
        return (make(small), wide) if self.op == "dot_interaction" else (wide, make(small))

    def bounds(self, name: str) -> Sequence[float]:
        batch, vectors, columns = self.sizes
        half = self.dtype == torch.bfloat16
        if name == "torch":
            # torch's order of summation is unspecified, and it rounds to bfloat16 several times.
            return [2.0**-6 if half else (sum(self.sizes) + 64 * columns + 16) * 2.0**-22] * 3
        # Bounds of docs/numerics.md.
        if self.op == "dot_interaction":
            return [(n + 8) * 2.0**-22 for n in (columns, vectors + 2, vectors + 1)]
        summed = vectors + columns * min(batch, 8) + math.ceil(batch / 8)
        cut = 2.0**-10 if half else 0.0
        return [(n + 16) * 2.0**-22 + cut for n in (vectors + columns, vectors + 2 * FACTORS, summed)]
