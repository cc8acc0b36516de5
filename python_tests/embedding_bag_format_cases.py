"""Cases of embedding_bag over tables in row formats: their bytes, and the reference's results."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from embedding_bag_cases import EPS, LR, Case, cases
from hypothesis import strategies as st
from layout_calls import OPS
from torch import Tensor

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference import row_formats as reference
from rec_kernels.reference.gradient_step import GradientStep
from rec_kernels.testing import same_bits

ROUNDINGS = ["nearest", "stochastic"]
INT64_MAX = torch.iinfo(torch.int64).max
SEED, STEP = 0x123456789ABCDEF, 2**32 + 6  # both words of the seed; a step that is taken modulo 2^32
GAP = 0xA5  # value of bytes between tables, which stay


class EncodedCase:
    """A ``Case`` with tables in row formats; its float weights become the decoded rows.

    Args:
        case: the call; its gaps are ignored.
        formats: of its tables.
        gaps: bytes before each table; by default 1, or up to the next multiple of 4 before floats.
        rows: the tables' bytes; None: the float weights of ``case``, rounded to nearest.
    """

    def __init__(
        self, case: Case, formats: Sequence[str], *, gaps: list[int] | None = None, rows: list[Tensor] | None = None
    ) -> None:
        self.case, self.formats = case, list(formats)
        self.dims = [d for _, d in case.tables]
        views = case.split(case.weights)
        if rows is None:
            rows = [reference.quantize_rows(v, f) for v, f in zip(views, self.formats, strict=True)]
        for view, decoded in zip(views, self.decode(rows), strict=True):
            view.copy_(decoded)
        self.gaps = gaps or [1] * len(rows)
        self.starts, at = [], 0
        for gap, format, table in zip(self.gaps, self.formats, rows, strict=True):
            start = at + gap if format != "fp32" else -(-(at + gap) // 4) * 4
            self.starts.append(start)
            at = start + table.numel()
        self.flat = torch.full((at + 1,), GAP, dtype=torch.uint8)
        for place, table in zip(self.split(self.flat), rows, strict=True):
            place.copy_(table)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views [E, row_bytes] of the tables in flat bytes."""
        views = []
        for start, format, (rows, columns) in zip(self.starts, self.formats, self.case.tables, strict=True):
            size = reference.row_bytes(format, columns)
            views.append(flat[start : start + rows * size].view(rows, size))
        return views

    def decode(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Decodes each table from [E, row_bytes] to float32 [E, D]."""
        kinds = zip(tables, self.formats, self.dims, strict=True)
        return [reference.dequantize_rows(t, f, d) for t, f, d in kinds]

    @functools.cached_property
    def layout(self) -> dict:
        """The layout arguments of the ops."""
        used, parts = list(dict.fromkeys(self.formats)), self.case.parts
        numbers = {
            "weight_offsets": [self.starts[t] for t in parts],
            "format_of": [used.index(self.formats[t]) for t in parts],
        }
        sizes = {"num_rows": len(self.case.sum), "formats": used}
        return self.case.layout | {name: torch.tensor(n) for name, n in numbers.items()} | sizes

    def table_id(self, table: int) -> int:
        """Number of the table for its noise; it differs from the table's index in the call."""
        return 65535 - 7 * table

    @property
    def noise(self) -> dict:
        """The arguments that determine a fused update's noise; ``step`` is ``STEP``."""
        ids = torch.tensor([self.table_id(t) for t in self.case.parts])
        return {"seed": torch.tensor(SEED), "table_ids": ids}

    def encode_row(self, table: int, row: int, numbers: Tensor, rounding: str, step: int = STEP) -> Tensor:
        """Encodes an updated row [D] of a table."""
        place = {"seed": SEED, "step": step, "table": self.table_id(table), "first_row": row}
        format = self.formats[table]
        return reference.quantize_rows(numbers[None], format, rounding=rounding, raise_not_finite=False, **place)[0]

    def expected_update(
        self, optimizer: str, rounding: str, scale: float = 1.0, step: GradientStep | None = None
    ) -> tuple[Tensor, Tensor]:
        """Bytes and state after one step, from gradients multiplied by ``scale``, then transformed by ``step``."""
        floats, state = self.case.expected_update(optimizer, scale, step)
        updated, flat = self.case.split(floats), self.flat.clone()
        tables = self.split(flat)
        for table, row in self.case.row_gradients:
            tables[table][row] = self.encode_row(table, row, updated[table][row], rounding)
        return flat, self.case.sum if optimizer == "sgd" else state

    def update(self, optimizer: str, rounding: str, ops=OPS, **options) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes, state and step after embedding_bag_backward_fused_ of ``ops``."""
        flat, state, step = self.flat.clone(), self.case.sum.clone(), torch.tensor(options.pop("step", STEP))
        ops.embedding_bag_backward_fused_(
            flat,
            None if optimizer == "sgd" else state,
            step,
            torch.tensor(LR),
            options.pop("grad", self.case.grad),
            *self.case.jagged,
            **(self.layout | self.noise | options),
            optimizer=optimizer,
            eps=EPS,
            rounding=rounding,
        )
        return flat, state, step

    def unchanged(self, found: tuple[Tensor, Tensor, Tensor]) -> bool:
        """True if an update changed nothing."""
        flat, state, step = found
        return torch.equal(flat, self.flat) and same_bits(state, self.case.sum) and step.item() == STEP

    def same_tables(self, found: Tensor, expected: Tensor) -> bool:
        """True if all bytes agree, also between tables; NaN floats may have any payload."""
        if torch.equal(found, expected):
            return True
        between = torch.ones(len(self.flat), dtype=torch.bool)
        for view in self.split(between):
            view.fill_(False)
        views = zip(self.split(found), self.split(expected), self.formats, self.dims, strict=True)
        same = all(
            torch.equal(a, b) if f != "fp32" else same_bits(*(reference.dequantize_rows(t, f, d) for t in (a, b)))
            for a, b, f, d in views
        )
        return same and torch.equal(found[between], expected[between])


@st.composite
def encoded_cases(draw) -> EncodedCase:
    """Up to four features over up to three tables of any formats."""
    case = draw(cases())
    return EncodedCase(case, [draw(st.sampled_from(BAG_FORMATS)) for _ in case.tables])


def every_format_once(case: Case, shift: int = 0, **options) -> EncodedCase:
    """The tables of a case with each format in turn, starting at index ``shift`` of ``BAG_FORMATS``."""
    formats = [BAG_FORMATS[(shift + t) % len(BAG_FORMATS)] for t in range(len(case.tables))]
    return EncodedCase(case, formats, **options)
