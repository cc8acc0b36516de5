"""Bags shared by samples (``inverse`` and ``groups``) equal the expanded results of a plain call on distinct bags.

Tests of lookups and updates also cover features with different batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from backends import cpu_backends, device_backends, every_backend
from embedding_bag_cases import Case, make_case, wide_floats
from embedding_bag_format_cases import EncodedCase, encoded_cases
from hypothesis import strategies as st
from test_embedding_bag_partitions import partitioned
from test_embedding_bag_strides import Strided, strided_cases
from tiers import drawn
from torch import Tensor

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference.numerics import chunked_sum
from rec_kernels.testing import same_bits

BAD_LAYOUT = torch.iinfo(torch.int64).min


@dataclass
class Shared:
    """A call with samples that select bags of the plain call: for features in groups, by ``inverse``."""

    encoded: EncodedCase
    groups: list[int]
    sizes: list[int]  # bags of each feature: the first ones of the plain call
    inverse: Tensor

    @property
    def case(self) -> Case:
        return self.encoded.case

    @property
    def batch(self) -> int:
        return self.inverse.shape[1]

    @property
    def arguments(self) -> dict[str, object]:
        case = self.case
        diff = case.offsets.diff()
        lengths = torch.cat([diff[f * case.batch : f * case.batch + size] for f, size in enumerate(self.sizes)])
        first = case.offsets[:1]
        return self.encoded.layout | {
            "values": case.values,
            "offsets": torch.cat([first, first + lengths.cumsum(0)]).to(case.offsets.dtype),
            "bag_starts": torch.tensor([0, *self.sizes]).cumsum(0),
            "inverse": self.inverse,
            "groups": self.groups,
        }

    def blocks(self, wide: Tensor) -> list[tuple[int, Tensor]]:
        """Each feature's group and columns."""
        widths = [width for _, width in self.case.columns]
        return list(zip(self.groups, wide.split(widths, dim=1), strict=True))

    @property
    def grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of this call's output and of the plain call's."""
        grad = wide_floats(self.batch, self.encoded.layout["output_dim"], seed=self.case.seed + 7)
        return grad, self.summed(grad)

    def outputs(self, wide: Tensor) -> Tensor:
        """[B, all columns] from the plain call's output."""
        return torch.cat([x if g < 0 else x[self.inverse[g]] for g, x in self.blocks(wide)], dim=1)

    def summed(self, grad: Tensor) -> Tensor:
        """The plain call's gradient from this one's, [B, all columns]."""
        return torch.cat([x if g < 0 else self._sums(g, x) for g, x in self.blocks(grad)], dim=1)

    def _sums(self, group: int, block: Tensor) -> Tensor:
        samples = [(self.inverse[group] == bag).nonzero()[:, 0] for bag in range(self.case.batch)]
        none = block.new_zeros(block.shape[1])
        sums = [chunked_sum(block[of]) if len(of) else none for of in samples]
        return torch.stack(sums) if sums else block[:0]


def share(encoded: EncodedCase, groups: list[int], inverse: Tensor) -> Shared:
    """Groups keep the bags up to the last with ids or a sample."""
    case, sizes = encoded.case, []
    kept = dict.fromkeys(groups, 0)
    for f, group in enumerate(groups):
        filled = case.offsets.diff()[f * case.batch : (f + 1) * case.batch].nonzero()
        named = int(inverse[group].max()) + 1 if inverse.shape[1] else 0
        kept[group] = max(kept[group], int(filled.max()) + 1 if len(filled) else 0, named)
    for group in groups:
        sizes.append(case.batch if group < 0 else kept[group])
    return Shared(encoded, groups, sizes, inverse)


@st.composite
def shared_cases(draw) -> Shared:
    """Any case and formats, also partitioned features; groups of any features, one possibly empty."""
    encoded = draw(encoded_cases() | partitioned(list(BAG_FORMATS)).map(lambda of: EncodedCase(*of)))
    case = encoded.case
    groups = [draw(st.integers(-1, 2)) for _ in case.features]
    more = 0 if -1 in groups or case.batch == 0 else draw(st.sampled_from([0, 1, 90]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    inverse = torch.randint(max(case.batch, 1), (3, case.batch + more), generator=generator)
    return share(encoded, groups, inverse.sort(1).values if draw(st.booleans()) else inverse)


@drawn(120, shared_cases() | strided_cases())
def test_lookups(part: Shared | Strided) -> None:
    """Output in all dtypes, status, and the gradient of per_sample_weights."""
    case, encoded, (grad, wide_grad) = part.case, part.encoded, part.grads
    arguments = part.arguments
    for backend in every_backend():
        wide, status = backend.ops.embedding_bag(encoded.flat, *case.jagged, **encoded.layout)
        given = {"per_sample_weights": case.per_sample_weights} | arguments
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found, found_status = backend.ops.embedding_bag(encoded.flat, **given, output_dtype=dtype)
            assert found.is_contiguous()
            assert same_bits(found.float(), part.outputs(wide).to(dtype).float()), backend.name
            assert torch.equal(found_status, status)
        backward = backend.ops.embedding_bag_backward_per_sample_weights
        factors = backward(wide_grad, encoded.flat, case.values, case.offsets, **encoded.layout)
        assert same_bits(backward(grad, encoded.flat, **arguments), factors), backend.name


@drawn(120, shared_cases() | strided_cases(), st.sampled_from(["sgd", "rowwise_adagrad"]))
def test_updates(part: Shared | Strided, optimizer: str) -> None:
    """Fused updates sum samples of a bag first, then (feature, bag, position), and change each row once."""
    encoded, (grad, wide_grad) = part.encoded, part.grads
    arguments, before = part.arguments, grad.clone()
    values, offsets = arguments.pop("values"), arguments.pop("offsets")
    for backend in every_backend():
        expected = encoded.update(optimizer, "stochastic", backend.ops, grad=wide_grad)
        whole = encoded.case.values, encoded.case.offsets
        encoded.case.values, encoded.case.offsets = values, offsets
        found = encoded.update(optimizer, "stochastic", backend.ops, grad=grad, **arguments)
        encoded.case.values, encoded.case.offsets = whole
        assert encoded.same_tables(found[0], expected[0]), backend.name
        assert same_bits(found[1], expected[1]), backend.name
        assert torch.equal(found[2], expected[2])
        assert same_bits(grad, before)


def _clustered(batch: int, bags: int) -> Tensor:
    """Bags of samples in sessions of all lengths, which repeat later."""
    generator = torch.Generator().manual_seed(batch)
    sessions = torch.randint(bags, (batch // 4 + 1,), generator=generator)
    return sessions.repeat_interleave(torch.randint(1, 9, sessions.shape, generator=generator))[:batch]


INVERSES = {
    "all one": torch.zeros(5000, dtype=torch.int64),
    "a chunk": torch.zeros(64, dtype=torch.int64),
    "a chunk and one": torch.arange(65) // 64,
    "long and short": torch.cat([torch.full((n,), u) for u, n in enumerate((130, 1, 64, 65, 3, 200, 0, 63))]),
    "chunks of chunks": torch.cat([torch.full((4161,), 1), torch.arange(3), torch.full((70,), 2)]),
    "clustered": _clustered(700, 3),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", INVERSES)
def test_gradients(kind: str, weighted: bool) -> None:
    """Dense and sparse gradients of a table with two features and of one in another group; rows with many samples."""
    inverse = INVERSES[kind]
    bags = int(inverse.max()) + 1
    lengths = torch.randint(0, 4, (3 * bags,), generator=torch.Generator().manual_seed(1)).tolist()
    case = make_case([(5, 6), (3, 33)], [0, 1, 0], lengths, mean=[False, True, False], weighted=weighted, seed=3)
    encoded = EncodedCase(case, ["fp32", "fp32"])
    shared = share(encoded, [1, 0, 1], torch.stack([inverse.flip(0), inverse]))
    (grad, summed), shape = shared.grads, list(case.weights.shape)
    arguments = shared.arguments | case.layout
    given = {"per_sample_weights": case.per_sample_weights} | arguments
    for name in ("formats", "format_of"):
        given.pop(name, None)
    for backend in every_backend():
        for op in ("embedding_bag_backward_dense", "embedding_bag_backward_sparse"):
            call = getattr(backend.ops, op)
            expected = call(summed, shape, *case.jagged, **case.layout)
            found = call(grad, shape, **given)
            pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            assert all(same_bits(*pair) for pair in pairs), (backend.name, op)


def _two_groups() -> tuple[Case, dict]:
    """Bags [2, 0], [3, 1] of one feature in a group, and one in none."""
    case = make_case([(5, 8), (3, 4)], [0, 1], [2, 0, 3, 1], seed=1)
    return case, case.layout | {
        "bag_starts": torch.tensor([0, 2, 4]),
        "inverse": torch.tensor([[1, 0]]),
        "groups": [0, -1],
    }


BAD_INPUT = {
    "no bags": (
        {"offsets": torch.tensor([0]), "bag_starts": torch.tensor([0, 0, 0])},
        ValueError,
        "feature 1 has 0 bags, and must have 2",
    ),
    "inverse too large": ({"inverse": torch.tensor([[1, 2]])}, IndexError, r"inverse\[0, 1\] = 2 is out of range: .*2"),
    "inverse negative": ({"inverse": torch.tensor([[-1, 0]])}, IndexError, r"inverse\[0, 0\] = -1 is out of range"),
    "too few bags": (
        {"inverse": torch.tensor([[1, 0, 0]])},
        ValueError,
        "feature 1 has 2 bags, and must have 3, one for each sample of inverse",
    ),
    "too many bags": (
        {"inverse": torch.tensor([[0]]), "groups": [0, 0]},
        ValueError,
        "feature 0 has 2 bags, and inverse only 1 samples",
    ),
    "unequal": (
        {"bag_starts": torch.tensor([0, 1, 4]), "inverse": torch.tensor([[0, 0, 0]]), "groups": [0, 0]},
        ValueError,
        "feature 1 has 3 bags, and must have as many as feature 0, 1: both are in group 0",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name: str) -> None:
    """The CPU raises; a device sets status, and updates nothing."""
    change, error, words = BAD_INPUT[name]
    case, layout = _two_groups()
    layout |= change
    case.offsets = layout.pop("offsets", case.offsets)
    for backend in cpu_backends():
        with pytest.raises(error, match=words):
            backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
    for backend in device_backends():
        output, status = backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
        if error is ValueError:
            assert status[0] == BAD_LAYOUT
            assert output.isnan().all()
        else:
            bad = layout["inverse"][0].tolist().index(-1 if "negative" in name else 2)
            assert status[0] == BAD_LAYOUT + 1 + len(case.offsets) + bad
            assert not output[bad, :8].any()
            assert output[1 - bad, :8].any() == (layout["inverse"][0, 1 - bad] == 0)
        case.layout.update(layout)
        grad = torch.ones(layout["inverse"].shape[1], 12)
        weights, state, step = case.update("rowwise_adagrad", backend.ops, grad=grad)
        assert same_bits(weights, case.weights)
        assert same_bits(state, case.sum)
        assert step == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": None}, "inverse and groups must be given together"),
        ({"inverse": None}, "inverse and groups must be given together"),
        ({"bag_starts": None}, "bag_starts is missing: inverse and groups mean nothing without it"),
        ({"groups": [0]}, "groups must have an element for each of the 2 features, got 1"),
        ({"groups": [0, 1]}, r"groups\[1\] = 1 must be in \[0, 1\), the rows of inverse, or -1"),
        ({"groups": [-2, 0]}, r"groups\[0\] = -2 must be in"),
        ({"inverse": torch.tensor([1, 0])}, "inverse must have 2 dimension"),
        ({"inverse": torch.tensor([[1, 0]], dtype=torch.int32)}, "inverse must be (torch.)?int64"),
    ],
)
def test_bad_arguments(change: dict, words: str) -> None:
    """Every backend rejects bad arguments before it reads anything."""
    case, layout = _two_groups()
    for backend in every_backend():
        with pytest.raises(ValueError, match=words):
            backend.ops.embedding_bag(case.weights, *case.jagged, **(layout | change))


@pytest.mark.parametrize("last", [2, 1])
def test_groups_of_many_features(last: int) -> None:
    """In a group of 70 features, a device detects that only the last one lacks a bag."""
    lengths = [1] * (2 * 69 + last)
    case = make_case([(2, 4)] * 70, list(range(70)), [1] * 140, seed=70)
    case.offsets = torch.tensor([0, *lengths]).cumsum(0)
    case.values = case.values[: len(lengths)]
    starts = torch.tensor([*range(0, 2 * 69 + 1, 2), len(lengths)])
    layout = case.layout | {"bag_starts": starts, "inverse": torch.tensor([[1, 0, 0]]), "groups": [0] * 70}
    for backend in device_backends():
        output, status = backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
        assert (status[0] == BAD_LAYOUT) == (last == 1), backend.name
        assert output.isnan().all() == (last == 1)
