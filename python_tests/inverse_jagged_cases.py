"""Batches of sessions for the tests of InverseKeyedJaggedTensor: samples that share bags."""

from __future__ import annotations

import torch
from collection_cases import OtherJagged
from hypothesis import strategies as st

import rec_kernels as rk
from rec_kernels.testing import same_bits


def sessions(
    keys: list[str],
    distinct: int = 4,
    batch: int = 9,
    *,
    seed: int = 0,
    most: int = 3,
    rows: int = 12,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> rk.KeyedJaggedTensor:
    """Each sample has one of ``distinct`` random sets of bags, of 0 to ``most`` ids below ``rows``.

    Weights are 1, 2 or 3, so that sums of their products with integers are exact.
    """
    generator = torch.Generator().manual_seed(seed)
    of_sample = torch.randint(distinct, (batch,), generator=generator)
    values, weights, lengths = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0)], []
    for _ in keys:
        length = torch.randint(most + 1, (distinct,), generator=generator)
        ids = torch.randint(rows, (distinct, most), generator=generator)
        factors = torch.randint(1, 4, (distinct, most), generator=generator).float()
        for s in of_sample.tolist():
            values.append(ids[s, : length[s]])
            weights.append(factors[s, : length[s]])
            lengths.append(int(length[s]))
    return rk.KeyedJaggedTensor(
        keys,
        torch.cat(values).to(dtype),
        lengths=torch.tensor(lengths).to(dtype),
        weights=torch.cat(weights) if weighted else None,
    )


def assert_same_batch(found: rk.KeyedJaggedTensor, expected: rk.KeyedJaggedTensor) -> None:
    """Asserts equal keys, ids, offsets and weights, including dtypes."""
    assert found.keys() == list(expected.keys())
    assert same_bits(found.values(), expected.values())
    assert same_bits(found.offsets(), expected.offsets())
    weights, expected_weights = found.weights_or_none(), expected.weights_or_none()
    assert (weights is None) == (expected_weights is None)
    assert weights is None or same_bits(weights, expected_weights)


@st.composite
def grouped_batches(draw) -> tuple[rk.KeyedJaggedTensor, list[list[str]]]:
    """A batch of any sizes, and groups of some of its features, in any order."""
    keys = draw(st.permutations("abcd").map(lambda keys: keys[: draw(st.integers(0, 4))]))
    batch, distinct = draw(st.integers(0, 12)), draw(st.integers(1, 12))
    options = {
        "seed": draw(st.integers(0, 99)),
        "most": draw(st.integers(0, 3)),
        "rows": draw(st.sampled_from([1, 2, 50])),
        "weighted": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.int32, torch.int64])),
    }
    groups: dict[int, list[str]] = {}
    for key in draw(st.permutations(keys)):
        group = draw(st.integers(-1, 2))
        if group >= 0:
            groups.setdefault(group, []).append(key)
    return sessions(list(keys), distinct, batch, **options), list(groups.values())


class OtherWithStride(OtherJagged):
    def stride(self) -> int:
        return self._kjt.stride()
