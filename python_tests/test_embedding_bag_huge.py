"""Tables beyond 2^31 elements, 2^32 bytes and 2^32 rows: rows at their ends have correct bits.

Memory is mapped from sparse files: of up to tens of gigabytes, only the few pages that a call accesses exist. The
reference has the accessed rows alone, under other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backends import host_backends
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import EPS, LR, make_case
from embedding_bag_format_cases import ROUNDINGS, STEP, EncodedCase
from embedding_bag_moment_cases import BETAS, ELEMENTWISE, MomentCase
from torch import Tensor

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference import row_formats as reference
from rec_kernels.testing import same_bits

Mapped = Callable[[int, torch.dtype], Tensor]


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    """Returns a function that maps a tensor of zeros without allocated pages."""

    def make(elements: int, dtype: torch.dtype) -> Tensor:
        path = tmp_path / "hole"
        tensor = torch.from_file(str(path), shared=True, size=elements, dtype=dtype)
        path.unlink()
        return tensor

    return make


class Far(EncodedCase):
    """A huge table followed by a small one. The case itself has only the huge one's accessed rows.

    Args:
        format: of the huge table.
        columns: of the huge table.
        num_embeddings: rows of the huge table.
        far: its accessed rows; row i of the case is row far[i].
        optimizer: determines the state in mapped memory.
        mapped: allocates mapped memory.
    """

    def __init__(
        self, format: str, columns: int, num_embeddings: int, far: list[int], optimizer: str, mapped: Mapped
    ) -> None:
        tables, lengths = [(len(far), columns), (5, 7)], [len(far), 0, 2, 3, 3, 0, 4, 2, 1]
        case = make_case(tables, [0, 1, 0], lengths, mean=[False, True, True], weighted=True, seed=columns)
        case.values[: len(far)] = torch.arange(len(far))
        super().__init__(case, [format, "int8"])
        self.far, self.num_embeddings, self.optimizer = far, num_embeddings, optimizer
        self.moments = MomentCase(self, optimizer) if optimizer in ELEMENTWISE else None
        # The small table and its state are last in memory, unlike in the case.
        self.second_table = -(-num_embeddings * reference.row_bytes(format, columns) // 16) * 16
        self.memory = mapped(self.second_table + 5 * reference.row_bytes("int8", 7), torch.uint8)
        self.states = {name: mapped(self._size(name), torch.float32) for name in self._state() if name != "beta_powers"}

    def _state(self) -> dict[str, Tensor]:
        """State of the case."""
        if self.moments:
            return self.moments.state
        return {} if self.optimizer == "sgd" else {"sum": self.case.sum}

    def _size(self, name: str) -> int:
        rowwise = len(self._state()[name]) == len(self.case.sum)
        return self.num_embeddings + 5 if rowwise else self.num_embeddings * self.dims[0] + 5 * 7

    def encode_row(self, table: int, row: int, numbers: Tensor, rounding: str, step: int = STEP) -> Tensor:
        """The noise is that of the row's number in the huge table."""
        return super().encode_row(table, self.far[row] if table == 0 else row, numbers, rounding, step)

    def tables_of(self, memory: Tensor) -> list[Tensor]:
        """Views of both tables: [E, row_bytes]; of state [E, D] or [E]."""
        if memory.dtype == torch.uint8:
            sizes = [reference.row_bytes(f, d) for f, d in zip(self.formats, self.dims, strict=True)]
            starts = [0, self.second_table]
        else:
            rowwise = len(memory) == self.num_embeddings + 5
            sizes = [1, 1] if rowwise else self.dims
            starts = [0, self.num_embeddings * sizes[0]]
        rows = [self.num_embeddings, 5]
        views = [memory[s : s + e * d].view(e, d) for s, e, d in zip(starts, rows, sizes, strict=True)]
        return [v[:, 0] if sizes == [1, 1] else v for v in views]

    def split_state(self, state: Tensor) -> list[Tensor]:
        """Splits the case's own state."""
        split = self.moments.split if self.moments else MomentCase(self, "lamb").split
        return split(state)

    def fill(self) -> dict[str, Tensor]:
        """Copies rows and state to mapped memory; returns the small tensors of the state."""
        self._copy(self.split(self.flat), self.memory)
        for name, memory in self.states.items():
            self._copy(self.split_state(self._state()[name]), memory)
        return {name: t.clone() for name, t in self._state().items() if name == "beta_powers"}

    def _copy(self, tables: list[Tensor], memory: Tensor) -> None:
        huge, small = self.tables_of(memory)
        huge[self.far] = tables[0]
        small.copy_(tables[1])

    @property
    def layout(self) -> dict:
        """The layout arguments of the ops."""
        sizes, rows = [self.num_embeddings, 5], [0, self.num_embeddings]
        numbers = {
            "weight_offsets": [[0, self.second_table][t] for t in self.case.features],
            "row_offsets": [rows[t] for t in self.case.features],
            "num_embeddings": [sizes[t] for t in self.case.features],
            "format_of": [int(t != 0 and self.formats[0] != "int8") for t in self.case.features],
        }
        used = list(dict.fromkeys(self.formats))
        changed = {name: torch.tensor(n) for name, n in numbers.items()} | {"formats": used}
        return self.case.layout | changed

    @property
    def jagged(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The bags, with the ids of the huge table."""
        values, (_, offsets, factors) = self.case.values.clone(), self.case.jagged
        for f, table in enumerate(self.case.features):
            if table == 0:
                mine = slice(int(offsets[3 * f]), int(offsets[3 * f + 3]))
                values[mine] = torch.tensor(self.far)[values[mine]]
        return values, offsets, factors

    def update_memory(self, rounding: str, ops) -> dict[str, Tensor]:
        """A fused update of the mapped memory; returns the other state."""
        small, step = self.fill(), torch.tensor(STEP)
        state = self.states | small
        options = {name: t for name, t in state.items() if name != "sum"} | {"beta1": BETAS[0], "beta2": BETAS[1]}
        if self.moments:
            starts = [0, self.num_embeddings * self.dims[0]]
            options["moment_offsets"] = torch.tensor([starts[t] for t in self.case.features])
        arguments = (self.memory, state.get("sum"), step, torch.tensor(LR), self.case.grad, *self.jagged)
        named = self.layout | self.noise | options
        ops.embedding_bag_backward_fused_(*arguments, **named, optimizer=self.optimizer, eps=EPS, rounding=rounding)
        return small | {"step": step}

    def check_update(self, rounding: str, ops, where: object) -> None:
        """Asserts the reference's rows and state, and that nothing else has changed."""
        if self.moments:
            flat, state = self.moments.expected(rounding)
        else:
            flat, state = self.expected_update(self.optimizer, rounding)
            state = {"sum": state}
        found = self.update_memory(rounding, ops)
        assert found["step"].item() == STEP + 1, where
        self._compare(self.memory, self.split(flat), (where, "rows"))
        for name, memory in self.states.items():
            self._compare(memory, self.split_state(state[name]), (where, name))
        assert same_bits(found.get("beta_powers", torch.ones(2)), state.get("beta_powers", torch.ones(2))), where

    def _compare(self, memory: Tensor, expected: list[Tensor], where: object) -> None:
        huge, small = self.tables_of(memory)
        assert same_bits(huge[self.far], expected[0]), where
        assert same_bits(small, expected[1]), where
        # Guards are next to every row, and at a row's address without its upper bits.
        assert not huge[self.beside()].any(), where
        size = huge[0].numel()
        for row in self.far:
            for bits in (31, 32):
                wrapped = row * size % 2**bits // size
                assert wrapped in self.far or not huge[wrapped].any(), (where, row)

    def beside(self) -> list[int]:
        """The unused neighbours of accessed rows."""
        near = {row + d for row in self.far for d in (-1, 1)} - set(self.far)
        return sorted(row for row in near if 0 <= row < self.num_embeddings)


def far_case(format: str, columns: int, optimizer: str, mapped: Mapped) -> Far:
    """A case above 2^31 elements and 2^32 bytes, with rows at both ends and around powers of two."""
    row_bytes = reference.row_bytes(format, columns)
    rows = max(2**31 // columns, 2**32 // row_bytes) + 9
    crossing = [2**31 // columns, 2**31 // row_bytes, 2**31 // (4 * columns), 2**32 // row_bytes]
    return Far(format, columns, rows, sorted({0, 2, *crossing, rows - 3, rows - 1}), optimizer, mapped)


@pytest.mark.parametrize("format", BAG_FORMATS)
def test_lookups(format: str, mapped: Mapped) -> None:
    """Output and the gradient of per_sample_weights, with ids of either width."""
    case = far_case(format, 33, "sgd", mapped)
    case.fill()
    expected, factors = case.case.expected_output(), case.case.expected_factor_gradient()
    values, offsets, weights = case.jagged
    for backend in host_backends():
        for ids in (values, values.int()):
            output, _ = backend.ops.embedding_bag(case.memory, ids, offsets, weights, **case.layout)
            assert same_bits(output, expected), backend.name
            found = backend.ops.embedding_bag_backward_per_sample_weights(
                case.case.grad, case.memory, ids, offsets, **case.layout
            )
            assert same_bits(found, factors), backend.name


# A row's address depends on its format, its state's on the optimizer: two optimizers for each format, in turn.
@pytest.mark.parametrize(
    ("format", "optimizer"),
    [(f, o) for i, f in enumerate(BAG_FORMATS) for j, o in enumerate(ALL_OPTIMIZERS) if (i - j) % 3 == 0],
)
def test_fused_updates(format: str, optimizer: str, mapped: Mapped) -> None:
    """Rows, and state of more than 2^31 elements, are updated with both roundings."""
    case = far_case(format, 33, optimizer, mapped)
    for rounding in ROUNDINGS:
        for backend in host_backends():
            case.check_update(rounding, backend.ops, (backend.name, rounding))


@pytest.mark.parametrize("format", ["fp16", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_rows_beyond_32_bits(format: str, optimizer: str, mapped: Mapped) -> None:
    """Row numbers of 33 bits work in ids, in the sort and in the noise."""
    rows = 2**32 + 9
    case = Far(format, 1, rows, [0, 2, 8, 2**31, 2**32 - 1, 2**32, 2**32 + 2, rows - 1], optimizer, mapped)
    case.fill()
    expected = case.case.expected_output()
    for backend in host_backends():
        case.fill()
        output, _ = backend.ops.embedding_bag(case.memory, *case.jagged, **case.layout)
        assert same_bits(output, expected), backend.name
        for rounding in ROUNDINGS:
            case.check_update(rounding, backend.ops, (backend.name, rounding))


@pytest.mark.parametrize("rows", [2**32 - 6, 2**32 - 5])
def test_rows_that_just_fit_in_32_bits(rows: int, mapped: Mapped) -> None:
    """The total number of rows, including five of the small table, needs 32 or 33 bits."""
    case = Far("fp16", 1, rows, [0, 2**31 - 1, 2**31, rows - 2, rows - 1], "rowwise_adagrad", mapped)
    for backend in host_backends():
        case.check_update("nearest", backend.ops, backend.name)


def test_one_float_table(mapped: Mapped) -> None:
    """Lookup, sparse gradient and update of weights [E, D] without a layout equal those of the accessed rows."""
    rows, columns = 2**31 // 20 + 7, 20
    far = torch.tensor([0, 3, 2**29 // columns, 2**31 // columns, rows - 1])
    huge, small = mapped(rows * columns, torch.float32).view(rows, columns), torch.randn(5, columns)
    ids, offsets = torch.tensor([4, 1, 4, 0, 2, 3, 4]), torch.tensor([0, 3, 3, 7])
    grad, rate = torch.randn(3, columns), torch.tensor(LR)
    for backend in host_backends():
        ops, weights, both = backend.ops, small.clone(), []
        huge[far] = small
        for table, values in ((weights, ids), (huge, far[ids])):
            output, _ = ops.embedding_bag(table, values, offsets, pooling="mean")
            found = ops.embedding_bag_backward_sparse(grad, list(table.shape), values, offsets)
            ops.embedding_bag_backward_fused_(
                table, None, torch.tensor(0), rate, grad, values, offsets, optimizer="sgd"
            )
            both.append((output, *found))
        assert torch.equal(both[1][1], far[both[0][1]]), backend.name
        for i in (0, 2, 3):
            assert same_bits(both[1][i], both[0][i]), backend.name
        assert same_bits(huge[far], weights), backend.name
        assert not huge[far[1:] - 1].any(), backend.name
