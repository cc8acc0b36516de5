"""A workload under test: its batches, and the implementations built for it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.cases import Case
from bench.shapes import BATCHES, Shape
from bench.timing import Call

DIRECTIONS = ("forward", "train")


class Subject:
    """A workload and its batches. Benchmarks subclass it and define how implementations are made."""

    def __init__(self, workload: Shape, batches: int = BATCHES) -> None:
        self.workload = workload
        self.batches = [workload.ids(seed) for seed in range(batches)]
        self.grad = torch.randn(workload.batch, workload.tables * workload.dim)
        self._built: dict[object, object] = {}

    def make(self, name: str):
        """Tables with the methods ``forward`` and ``train`` (bench/peers.py)."""
        raise NotImplementedError

    def built(self, name: str):
        """The implementation called ``name``, made on first use."""
        if name not in self._built:
            self._built[name] = self.make(name)
        return self._built[name]

    def call(self, direction: str, name: str) -> Call:
        """Returns a function of a batch index that looks up the batch ("forward") or also trains on it ("train")."""
        return self.calls(direction, self.built(name), self.batches)

    def calls(self, direction: str, tables, batches: Sequence[torch.Tensor]) -> Call:
        """Returns the function ``call`` for given tables and batches."""
        if direction == "forward":
            return lambda i: tables.forward(batches[i])
        return lambda i: tables.train(batches[i], self.grad)

    def cases(self, names: Sequence[str], directions: Sequence[str] = DIRECTIONS) -> Iterator[Case]:
        """Yields a case for each direction; torch's steps have fewer rounds because they are slow."""
        for direction in directions:
            yield Case(
                f"{direction} {self.workload.name}",
                names,
                functools.partial(self.call, direction),
                self.moved(direction),
                len(self.batches),
                gradients=direction == "train",
                slow=["torch"] if direction == "train" else [],
                note=functools.partial(self.note, direction),
            )

    @functools.cached_property
    def linear(self) -> list[torch.Tensor]:
        """Rows of each batch, numbered over consecutive tables."""
        return [self.workload.linear(ids) for ids in self.batches]

    @functools.cached_property
    def unique(self) -> list[torch.Tensor]:
        """Distinct rows of each batch, sorted."""
        return [rows.unique() for rows in self.linear]

    def unique_rows(self) -> float:
        """Distinct rows of a batch, on average."""
        return sum(len(rows) for rows in self.unique) / len(self.unique)

    @functools.cached_property
    def cycle_rows(self) -> int:
        """Distinct rows of all batches together."""
        return len(torch.cat(self.unique).unique())

    def moved(self, direction: str, row_bytes: int | None = None, distinct: bool = False) -> float:
        """Bytes of a call, "forward" or "train" with row-wise Adagrad; ``distinct``: no row is counted twice."""
        w, unique = self.workload, self.unique_rows()
        moved = w.forward_bytes(row_bytes, unique if distinct else None)
        if direction == "forward":
            return moved
        return moved + w.backward_bytes(unique, row_bytes, gradient_rows=w.tables * w.batch if distinct else None)

    def features(self, row_bytes: int | None = None) -> dict[str, float]:
        """Sizes of a call, the input of the cost model (``Load`` of bench/tuning/model.py).

        Args:
            row_bytes: a float32 row's by default.
        """
        w = self.workload
        sizes = {"ids": w.num_ids, "bags": w.tables * w.batch, "tables": w.tables, "dim": w.dim}
        rows = {"unique_rows": self.unique_rows(), "cycle_rows": self.cycle_rows}
        return sizes | {"row_bytes": row_bytes or 4 * w.dim} | rows

    def note(self, direction: str, name: str, row_bytes: int | None = None) -> dict[str, object]:
        """Additional fields of the JSON file: distinct bytes and, for ours, the features."""
        said: dict[str, object] = {"distinct_bytes": self.moved(direction, row_bytes, distinct=True)}
        if name == "ours":
            said["features"] = {"direction": direction} | self.features(row_bytes)
        return said

    def drop(self, keep: Callable[[object], bool] = lambda _: False) -> None:
        """Frees implementations built under keys for which ``keep`` is false."""
        for key in [key for key in self._built if not keep(key)]:
            del self._built[key]
        gc.collect()
