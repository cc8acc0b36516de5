"""Helpers for testing code built on rec_kernels: jagged batches, CPU instruction sets, tolerances.

In the package, only ``rk.fuse_embedding_bags`` uses this module; the tests and benchmarks use it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_ops = torch.ops.rec_kernels

# Oldest to newest; a machine that supports one supports all earlier ones.
_ISAS = ("baseline", "v3", "v4")


def cpu_isas() -> list[str]:
    """Lists the instruction sets that this machine supports, oldest first: "baseline", "v3" (AVX2), "v4" (AVX-512)."""
    current, supported = _ops._get_cpu_isa(), []
    for name in _ISAS:
        try:
            _ops._set_cpu_isa(name)
        except ValueError:
            break
        supported.append(name)
    _ops._set_cpu_isa(current)
    return supported


@contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """Context that runs the CPU kernels with an instruction set of ``cpu_isas()``, in every thread of the process.

    Raises:
        ValueError: this machine does not support it.
    """
    if name not in (allowed := cpu_isas()):
        raise ValueError(f"name must be one of this machine's instruction sets, {', '.join(allowed)}, got {name!r}")
    previous = _ops._set_cpu_isa(name)
    try:
        yield
    finally:
        _ops._set_cpu_isa(previous)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Context that sets ``torch.set_num_threads(count)`` and restores the previous count on exit."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Context that sets ``torch.set_flush_denormal(True)``: the calling thread treats denormals as zeros."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def uniform_ids(count: int, num_embeddings: int, generator: torch.Generator) -> Tensor:
    """Draws int64 ids [count] uniformly from [0, num_embeddings)."""
    return torch.randint(num_embeddings, (count,), generator=generator)


def zipf_ids(count: int, num_embeddings: int, generator: torch.Generator, exponent: float = 1.05) -> Tensor:
    """Draws int64 ids [count] from a Zipf distribution: the k-th most frequent id has probability ~ k^-exponent.

    Frequent ids are scattered over the table, like hashed ids.
    """
    weight = torch.arange(1, num_embeddings + 1, dtype=torch.float64) ** -exponent
    upper = weight.cumsum(0)
    drawn = torch.rand(count, dtype=torch.float64, generator=generator) * upper[-1]
    rank = torch.searchsorted(upper, drawn).clamp_(max=num_embeddings - 1)
    return torch.randperm(num_embeddings, generator=generator)[rank]


def bag_lengths(
    bags: int, mean_length: float, generator: torch.Generator, *, empty: float = 0.0, session: int = 1
) -> Tensor:
    """Draws int64 bag lengths [bags], uniform in [0, 2 * mean_length]; a fraction ``empty`` of them is set to 0.

    With ``session`` > 1, each run of that many consecutive bags has the same length.
    """
    distinct = -(-bags // session)
    lengths = torch.randint(int(2 * mean_length) + 1, (distinct,), generator=generator)
    lengths[torch.rand(distinct, generator=generator) < empty] = 0
    return lengths.repeat_interleave(session)[:bags]


def jagged_batch(
    num_embeddings: Sequence[int],
    batch: int,
    *,
    mean_length: float = 4.0,
    ids: str = "uniform",
    empty: float = 0.1,
    hot: float = 0.0,
    session: int = 1,
    ids_dtype: torch.dtype = torch.int64,
    offsets_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Generates a key-major jagged batch of ids: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    Args:
        num_embeddings: rows of each feature's table, at least 1; the length is F, the number of features.
        batch: B, number of samples.
        mean_length: mean number of ids per bag, before some bags are emptied.
        ids: "uniform" or "zipf".
        empty: fraction of empty bags.
        hot: fraction of the ids replaced by id 0, to create a hot row.
        session: samples per session: all samples of a session have identical bags, like impressions of one user.
        ids_dtype, offsets_dtype: torch.int32 or torch.int64.
        seed: equal arguments and seed give an equal batch.

    Returns:
        values [N], offsets [F * B + 1].

    Raises:
        ValueError: ``ids`` is unknown, or a table has no rows.
    """
    if ids not in ("uniform", "zipf"):
        raise ValueError(f'ids must be "uniform" or "zipf", got {ids!r}')
    if bad := [rows for rows in num_embeddings if rows < 1]:
        raise ValueError(f"num_embeddings must be at least 1 each, got {bad[0]}")
    generator = torch.Generator().manual_seed(seed)
    draw = {"uniform": uniform_ids, "zipf": zipf_ids}[ids]
    values, lengths = [], []
    for rows in num_embeddings:
        bag_sizes = bag_lengths(batch, mean_length, generator, empty=empty, session=session)
        sampled = draw(int(bag_sizes.sum()), rows, generator)
        sampled[torch.rand(len(sampled), generator=generator) < hot] = 0
        if session > 1:
            sampled = _repeat_sessions(sampled, bag_sizes, session)
        values.append(sampled)
        lengths.append(bag_sizes)
    empty_ids = [torch.zeros(0, dtype=torch.int64)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(empty_ids + lengths).cumsum(0)])
    return torch.cat(empty_ids + values).to(ids_dtype), offsets.to(offsets_dtype)


def _repeat_sessions(values: Tensor, lengths: Tensor, session: int) -> Tensor:
    """Replaces every bag with the first bag of its session."""
    bags = list(values.split(lengths.tolist()))
    return torch.cat([bags[i - i % session] for i in range(len(bags))]) if bags else values


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if shape, dtype and bits are equal: 0 and -0 differ; all NaNs are equal (payloads are unspecified).

    Sparse COO tensors are equal if their stored indices and values are.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout == torch.sparse_coo:
        return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    return bool((same | (a.double().isnan() & b.double().isnan())).all())


def rounding_bound(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound the rounding error of a sum of products, relative to the sum of the terms' magnitudes.

    The bound is n u / (1 - n u) with unit roundoff u, for any order of at most n rounded operations per term (Higham,
    "Accuracy and Stability of Numerical Algorithms", section 3.1).
    """
    n_u = terms * torch.finfo(dtype).eps / 2
    return n_u / (1 - n_u)


def assert_same_sum(
    actual: Tensor, expected: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype = torch.float32
) -> None:
    """Asserts that two sums of the same terms, accumulated in ``dtype`` in any order, agree within rounding.

    Args:
        actual, expected: the sums.
        magnitude: sum of the terms' absolute values, in float64.
        terms: maximum number of roundings applied to any term: one per addition, multiplication or division.

    Raises:
        AssertionError: the sums differ in shape, or by more than the rounding errors of both can explain.
    """
    shapes = [list(t.shape) for t in (actual, expected, magnitude)]
    if shapes != [shapes[0]] * 3:
        raise AssertionError(f"actual, expected and magnitude must have the same shape, got {shapes}")
    tiny = torch.finfo(dtype).tiny  # an underflow rounds by at most half the smallest denormal, per operation
    allowed = 2 * rounding_bound(terms, dtype) * magnitude + terms * tiny * torch.finfo(dtype).eps
    difference = (actual.double() - expected.double()).abs()
    difference[actual.isinf() & (actual == expected)] = 0.0
    worst = (difference - allowed).max().item() if difference.numel() else 0.0
    if not worst <= 0:
        raise AssertionError(f"sums differ by {worst:.3e} more than the rounding of {terms} operations explains")
