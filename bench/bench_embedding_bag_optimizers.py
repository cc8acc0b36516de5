"""A training step of embedding_bag with each fused optimizer, rows of float32 and of int8.

Beside it in the same turn: torch with sparse gradients and its own optimizer where it has one for them (Adagrad, Adam),
FBGEMM where its CPU kernels have the optimizer (row-wise Adagrad, Adagrad), and our row-wise Adagrad.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import rec_kernels as rk
from bench import peers
from bench.cases import Case
from bench.shapes import WORKLOADS, Shape
from bench.subject import Subject

HAS_FBGEMM = "fbgemm" in peers.available()


def implementations(optimizer: str, format: str) -> list[str]:
    """Names of the implementations to time."""
    plain = ["ours rowwise_adagrad"] if optimizer != "rowwise_adagrad" else []
    others = {"torch": peers.TORCH_OPTIMIZERS, "fbgemm": peers.FBGEMM_OPTIMIZERS if HAS_FBGEMM else {}}
    return ["ours", *plain, *(name for name, has in others.items() if optimizer in has and format == "fp32")]


class Steps(Subject):
    """One workload with one optimizer and format at a time."""

    optimizer, format = "", ""

    def using(self, optimizer: str, format: str) -> Steps:
        """Returns itself, with these; drops other tables: Adam's state alone is twice as large as the tables."""
        if (optimizer, format) != (self.optimizer, self.format):
            self.optimizer, self.format = optimizer, format
            self.drop()
        return self

    def optimizer_of(self, name: str) -> str:
        """Returns an implementation's optimizer: its case's, or row-wise Adagrad for the entry beside it."""
        return "rowwise_adagrad" if name.endswith("rowwise_adagrad") else self.optimizer

    def make(self, name: str):
        optimizer = self.optimizer_of(name)
        if name == "torch":
            return peers.TorchTables(self.workload, optimizer)
        return (peers.Fbgemm if name == "fbgemm" else peers.Ours)(self.workload, self.format, optimizer)

    def bytes_moved(self, name: str) -> float:
        """Bytes that our step moves with the implementation's optimizer."""
        w, row = self.workload, rk.row_bytes(self.format, self.workload.dim)
        each = peers.OPTIMIZERS[self.optimizer_of(name)]().state.values()
        state = sum(4 * w.dim if of_element else 4 for of_element in each)
        return w.forward_bytes(row) + w.backward_bytes(self.unique_rows(), row, state)


def cases(workloads: Sequence[Shape] = WORKLOADS) -> Iterator[Case]:
    """Yields the cases. Bytes are those of our step with the optimizer (bench/shapes.py)."""
    for workload in workloads:
        steps = Steps(workload)
        for optimizer, format in itertools.product(peers.OPTIMIZERS, ("fp32", "int8")):
            using = functools.partial(steps.using, optimizer, format)
            yield Case(
                f"train {optimizer} {format} {workload.name}",
                implementations(optimizer, format),
                lambda name, using=using: using().call("train", name),
                lambda name, using=using: using().bytes_moved(name),
                gradients=True,
                slow=["torch"],
            )
