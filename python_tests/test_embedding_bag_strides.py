"""Batch sizes per feature (``bag_starts``), and half-precision outputs, equal the plain call.

test_embedding_bag_shared.py has lookups and updates with batch sizes per feature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from backends import cpu_backends, device_backends, every_backend
from embedding_bag_cases import Case, make_case
from embedding_bag_format_cases import EncodedCase, encoded_cases, every_format_once
from hypothesis import strategies as st
from layout_calls import OPS
from test_embedding_bag_partitions import partitioned
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.testing import same_bits

BAD_LAYOUT = torch.iinfo(torch.int64).min


@dataclass
class Strided:
    """A call without trailing empty bags of features: equal lookups in other output rows."""

    encoded: EncodedCase
    sizes: list[int]  # bags of each feature

    @property
    def case(self) -> Case:
        return self.encoded.case

    def bags(self, feature: int) -> slice:
        first = feature * self.case.batch
        return slice(first, first + self.sizes[feature])

    @property
    def arguments(self) -> dict[str, object]:
        case = self.case
        features = range(len(self.sizes))
        lengths = torch.cat([case.offsets.diff()[self.bags(f)] for f in features])
        first = case.offsets[:1]
        return self.encoded.layout | {
            "values": case.values,
            "offsets": torch.cat([first, first + lengths.cumsum(0)]).to(case.offsets.dtype),
            "output_dim": max(width for _, width in case.columns),
            "bag_starts": torch.tensor([0, *self.sizes]).cumsum(0),
        }

    @property
    def grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of this call's output and of the plain call's."""
        return self.outputs(self.case.grad), self.case.grad

    def outputs(self, wide: Tensor) -> Tensor:
        """[bags, most columns], zeros after a feature's columns, from [B, all columns]."""
        case, column, blocks = self.case, 0, []
        widest = max(width for _, width in case.columns)
        for size, (_, width) in zip(self.sizes, case.columns, strict=True):
            block = wide[:size, column : column + width]
            blocks.append(torch.nn.functional.pad(block, (0, widest - width)))
            column += width
        return torch.cat(blocks)


@st.composite
def strided_cases(draw) -> Strided:
    """Any case and formats, also partitioned features, with some of its empty bags left out."""
    encoded = draw(encoded_cases() | partitioned(list(BAG_FORMATS)).map(lambda of: EncodedCase(*of)))
    case = encoded.case
    sizes = []
    for f in range(len(case.features)):
        lengths = case.offsets.diff()[f * case.batch : (f + 1) * case.batch]
        last = int(lengths.nonzero().max()) + 1 if lengths.any() else 0
        sizes.append(draw(st.integers(last, case.batch)))
    return Strided(encoded, sizes)


def test_gradients() -> None:
    """Dense and sparse gradients of float tables."""
    case = make_case([(5, 18), (3, 130)], [0, 1, 0], [2, 3, 0, 1, 0, 0, 4, 0, 2], mean=[False, True, False], seed=3)
    layout, shape = case.layout, list(case.weights.shape)
    sizes, lengths = [2, 1, 3], [2, 3, 1, 4, 0, 2]
    mine = layout | {
        "output_dim": 130,
        "bag_starts": torch.tensor([0, *sizes]).cumsum(0),
    }
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    blocks = case.grad.split([18, 130, 18], dim=1)
    grad = torch.cat(
        [torch.nn.functional.pad(b[:n], (0, 130 - b.shape[1])) for b, n in zip(blocks, sizes, strict=True)]
    )
    for backend in every_backend():
        dense = backend.ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **layout)
        found = backend.ops.embedding_bag_backward_dense(grad, shape, case.values, offsets, **mine)
        assert same_bits(found, dense), backend.name
        sparse = backend.ops.embedding_bag_backward_sparse(case.grad, shape, *case.jagged, **layout)
        found = backend.ops.embedding_bag_backward_sparse(grad, shape, case.values, offsets, **mine)
        assert all(map(same_bits, found, sparse)), backend.name


BAD_STARTS = [
    ([1, 2, 4], r"bag_starts\[0\] = 1 must be 0"),
    ([0, 5, 4], r"bag_starts\[2\] = 4 is below the one before it, 5"),
    ([0, 2, 3], r"bag_starts\[2\] = 3 must be 4, the number of bags that offsets describe"),
]


def _two_features() -> tuple[Case, dict]:
    case = make_case([(5, 8), (3, 4)], [0, 1], [2, 0, 3, 1], seed=1)
    return case, case.layout | {"output_dim": 8}


@pytest.mark.parametrize(("starts", "message"), BAD_STARTS)
def test_bad_starts(starts: list[int], message: str) -> None:
    """The CPU names the element; a device reports a bad layout, returns NaN and updates nothing."""
    case, layout = _two_features()
    layout["bag_starts"] = torch.tensor(starts)
    for backend in cpu_backends():
        with pytest.raises(ValueError, match=message):
            backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
    for backend in device_backends():
        output, status = backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
        assert status[0] == BAD_LAYOUT
        assert output.isnan().all()
        case.layout.update(layout)
        weights, state, step = case.update("rowwise_adagrad", backend.ops, grad=torch.zeros(4, 8))
        assert same_bits(weights, case.weights)
        assert same_bits(state, case.sum)
        assert step == 6


def test_messages_name_feature_and_bag() -> None:
    """Bags are counted from the first of their feature."""
    case, layout = _two_features()
    layout["bag_starts"] = torch.tensor([0, 3, 4])
    case.values[2:6] = torch.tensor([0, 1, 2, 3])
    with pytest.raises(IndexError, match=r"values\[5\] = 3 \(feature 1, bag 0\) is out of range.*\[0, 3\)"):
        OPS.embedding_bag(case.weights, *case.jagged, **layout)
    case.values[5] = 0
    case.offsets[4] = 1
    with pytest.raises(ValueError, match=r"offsets\[4\] = 1 \(feature 1, bag 0\) is below"):
        OPS.embedding_bag(case.weights, *case.jagged, **layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bag_starts": torch.tensor([0, 4])}, "bag_starts must have shape"),
        ({"bag_starts": torch.tensor([0, 2, 4], dtype=torch.int32)}, "bag_starts must be"),
        ({"output_dim": 7}, "widest_feature = 7 must be at least 8, the columns of the widest feature"),
    ],
)
def test_bad_layout(change: dict, message: str) -> None:
    """Arguments that depend on bag_starts are checked."""
    case, layout = _two_features()
    with pytest.raises(ValueError, match=message):
        OPS.embedding_bag(case.weights, *case.jagged, **(layout | {"bag_starts": torch.tensor([0, 2, 4])} | change))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 3, 4, 16, 33, 128, 300, 2048, 2051])
def test_half_precision_outputs(dim: int, dtype: torch.dtype) -> None:
    """Outputs are float32 sums, rounded once: every format, with and without weights, mean, several features."""
    count = len(rk.BAG_FORMATS)
    for weighted in (False, True):
        case = make_case(
            [(3, dim), (4, 5)] * (count // 2),
            [*range(count), 0],
            [2, 0, 1] * (count + 1),
            mean=[f % 3 == 0 for f in range(count + 1)],
            weighted=weighted,
            seed=dim,
        )
        for shift in (0, 1):
            encoded = every_format_once(case, shift)
            for backend in every_backend():
                given = (encoded.flat, *case.jagged)
                whole, _ = backend.ops.embedding_bag(*given, **encoded.layout)
                found, _ = backend.ops.embedding_bag(*given, **encoded.layout, output_dtype=dtype)
                assert found.dtype == dtype
                assert same_bits(found.float(), whole.to(dtype).float()), (backend.name, encoded.formats)


def test_output_dtype_must_be_a_float() -> None:
    case = make_case([(5, 8)], [0], [2], seed=1)
    for dtype, name in ((torch.float64, "float64"), (torch.int32, "int32")):
        message = f"output_dtype must be torch.float32, torch.float16 or torch.bfloat16, got {name}"
        with pytest.raises(ValueError, match=re.escape(message)):
            OPS.embedding_bag(case.weights, *case.jagged, **case.layout, output_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_outputs(dtype: torch.dtype) -> None:
    """Gradients have the output's dtype and are used as float32."""
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 20, generator=g, requires_grad=True)
    ids, offsets = torch.tensor([1, 4, 1, 5]), torch.tensor([0, 2, 3])
    factors, grad = torch.rand(4, generator=g, requires_grad=True), torch.randn(3, 20, generator=g)
    output = rk.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=factors, output_dtype=dtype)
    found = torch.autograd.grad(output, (weight, factors), grad.to(dtype))
    plain = rk.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=factors)
    expected = torch.autograd.grad(plain, (weight, factors), grad.to(dtype).float())
    assert all(map(same_bits, found, expected))
