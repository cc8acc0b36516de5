"""Lookups of rows in a row format: the kernels that decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import rec_kernels as rk
from bench.gpu.cases import SGD, bytes_moved, unique_rows
from bench.gpu.implementations import Tables
from bench.gpu.subjects import Built, Subject
from bench.shapes import Workload
from rec_kernels.testing import assert_same_sum


class EncodedLookup:
    """The forward of one workload whose tables are all of one format.

    Args:
        workload: sizes; the case's name is this one's with the format.
        format: of ``rk.ROW_FORMATS``.
    """

    def __init__(self, workload: Workload, format: str) -> None:
        self.workload, self.format = workload, format
        self.name = f"{workload.name}-{format}"
        self._about = dataclasses.asdict(workload) | {
            "name": self.name,
            "op": "embedding_bag_formats",
            "format": format,
        }

    def about(self) -> dict[str, object]:
        """T, B, E, D, L, the format, and the number of distinct rows of a batch once it is known."""
        return self._about

    def subjects(self, device: torch.device) -> Iterator[Subject]:
        w, data = self.workload, Tables(self.workload, device)
        unique = unique_rows(w, data.batches)
        self._about["unique_rows"] = unique
        rows = torch.cat([rk.quantize_rows(table, self.format) for table in data.tables])
        moved = bytes_moved(w, "forward", SGD, unique, self.format)
        yield Subject("ours", "forward", None, moved, functools.partial(self._build, data, rows))

    def _build(self, data: Tables, rows: Tensor) -> Built:
        w = self.workload
        sizes = [w.rows] * w.tables, [w.dim] * w.tables
        layout = rk.table_layout(*sizes, formats=[self.format] * w.tables, device=data.device)._asdict()

        def forward() -> Tensor:
            return torch.ops.rec_kernels.embedding_bag.layout(rows.view(-1), data.ids, data.offsets, **layout)[0]

        def check() -> None:
            parts = zip(forward().split(w.dim, 1), rows.split(w.rows), data.ids_of_tables, strict=True)
            for mine, of_table, ids in parts:
                floats, bags = rk.dequantize_rows(of_table, self.format, w.dim), ids.view(w.batch, w.bag)
                magnitude = floats[bags].abs().double().sum(1)
                assert_same_sum(mine, F.embedding_bag(bags, floats, mode="sum"), magnitude, terms=w.bag)

        return Built(forward, data.use, check, captures=True)
