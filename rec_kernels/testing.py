"""Helpers for testing code built on rec_kernels: jagged batches, CPU instruction sets, tolerances.

Nothing here is needed to use the package; its own tests and benchmarks are written with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_ops = torch.ops.rec_kernels

# Oldest to newest; a machine that runs one runs all before it.
_ISAS = ("baseline", "v3", "v4")


def cpu_isas() -> list[str]:
    """The instruction sets that this machine can run, oldest first: "baseline", "v3" (AVX2), "v4" (AVX-512)."""
    current, found = _ops._get_cpu_isa(), []
    for name in _ISAS:
        try:
            _ops._set_cpu_isa(name)
        except ValueError:
            break
        found.append(name)
    _ops._set_cpu_isa(current)
    return found


@contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """Runs the CPU kernels of an instruction set of ``cpu_isas()``, in every thread of the process.

    Raises:
        ValueError: this machine does not have it.
    """
    if name not in (allowed := cpu_isas()):
        raise ValueError(f"name must be one of this machine's instruction sets, {', '.join(allowed)}, got {name!r}")
    before = _ops._set_cpu_isa(name)
    try:
        yield
    finally:
        _ops._set_cpu_isa(before)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """``torch.set_num_threads(count)`` for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """``torch.set_flush_denormal(True)`` for a while: the calling thread takes denormals for zeros."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def uniform_ids(count: int, num_embeddings: int, generator: torch.Generator) -> Tensor:
    """[count] int64 ids in [0, num_embeddings), all equally likely."""
    return torch.randint(num_embeddings, (count,), generator=generator)


def zipf_ids(count: int, num_embeddings: int, generator: torch.Generator, exponent: float = 1.05) -> Tensor:
    """[count] int64 ids whose k-th most frequent has a probability proportional to k^-exponent.

    Frequent ids are spread over the table, as hashed ids are.
    """
    weight = torch.arange(1, num_embeddings + 1, dtype=torch.float64) ** -exponent
    upper = weight.cumsum(0)
    drawn = torch.rand(count, dtype=torch.float64, generator=generator) * upper[-1]
    rank = torch.searchsorted(upper, drawn).clamp_(max=num_embeddings - 1)
    return torch.randperm(num_embeddings, generator=generator)[rank]


def bag_lengths(
    bags: int, mean_length: float, generator: torch.Generator, *, empty: float = 0.0, session: int = 1
) -> Tensor:
    """[bags] int64 lengths, uniform in [0, 2 * mean_length], a share ``empty`` of them 0.

    With ``session`` > 1, that many bags in a row have the same length.
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
    """Key-major jagged ids: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    Args:
        num_embeddings: rows of each feature's table, all at least 1; its length is the number of features F.
        batch: samples B.
        mean_length: ids of a bag on average, before some are emptied.
        ids: "uniform" or "zipf".
        empty: share of empty bags.
        hot: share of the ids replaced by id 0: one row that a large part of the batch shares.
        session: samples of one session: so many in a row repeat the same bag, as impressions of one user do.
        ids_dtype, offsets_dtype: torch.int32 or torch.int64.
        seed: same arguments and seed, same batch.

    Returns:
        values [N], offsets [F * B + 1].

    Raises:
        ValueError: another ``ids``, or a table without rows.
    """
    if ids not in ("uniform", "zipf"):
        raise ValueError(f'ids must be "uniform" or "zipf", got {ids!r}')
    if bad := [rows for rows in num_embeddings if rows < 1]:
        raise ValueError(f"num_embeddings must be at least 1 each, got {bad[0]}")
    generator = torch.Generator().manual_seed(seed)
    draw = {"uniform": uniform_ids, "zipf": zipf_ids}[ids]
    values, lengths = [], []
    for rows in num_embeddings:
        of_bag = bag_lengths(batch, mean_length, generator, empty=empty, session=session)
        drawn = draw(int(of_bag.sum()), rows, generator)
        drawn[torch.rand(len(drawn), generator=generator) < hot] = 0
        if session > 1:
            drawn = _repeat_sessions(drawn, of_bag, session)
        values.append(drawn)
        lengths.append(of_bag)
    none = [torch.zeros(0, dtype=torch.int64)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(none + lengths).cumsum(0)])
    return torch.cat(none + values).to(ids_dtype), offsets.to(offsets_dtype)


def _repeat_sessions(values: Tensor, lengths: Tensor, session: int) -> Tensor:
    """Every bag becomes a copy of its session's first."""
    bags = list(values.split(lengths.tolist()))
    return torch.cat([bags[i - i % session] for i in range(len(bags))]) if bags else values


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if shape, dtype and bits agree: 0 and -0 differ, any NaN equals any other (payloads are not promised)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    return bool((same | (a.double().isnan() & b.double().isnan())).all())


def rounding_bound(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound of the rounding error of a sum of products, as a share of the sum of the terms' magnitudes.

    n u / (1 - n u) with unit roundoff u, for any order of at most n rounded operations per term (Higham, "Accuracy and
    Stability of Numerical Algorithms", section 3.1).
    """
    n_u = terms * torch.finfo(dtype).eps / 2
    return n_u / (1 - n_u)


def assert_same_sum(
    actual: Tensor, expected: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype = torch.float32
) -> None:
    """Checks two sums of the same terms that were added up in different orders, both in ``dtype``.

    Args:
        actual, expected: the sums.
        magnitude: the sum of the terms' absolute values, in float64.
        terms: the most roundings that a term of either sum goes through: one per addition, multiplication, division.

    Raises:
        AssertionError: they differ by more than the rounding errors of both can explain, or in shape.
    """
    shapes = [list(t.shape) for t in (actual, expected, magnitude)]
    if shapes != [shapes[0]] * 3:
        raise AssertionError(f"actual, expected and magnitude must have one shape, got {shapes}")
    tiny = torch.finfo(dtype).tiny  # an underflow rounds by at most half the smallest denormal, per operation
    allowed = 2 * rounding_bound(terms, dtype) * magnitude + terms * tiny * torch.finfo(dtype).eps
    difference = (actual.double() - expected.double()).abs()
    difference[actual.isinf() & (actual == expected)] = 0.0
    worst = (difference - allowed).max().item() if difference.numel() else 0.0
    if not worst <= 0:
        raise AssertionError(f"sums differ by {worst:.3e} more than the rounding of {terms} operations explains")
