"""Checks an encoded case on backends, op by op, against the reference, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
from backends import Backend, every_backend
from embedding_bag_cases import OPTIMIZERS, Case
from embedding_bag_format_cases import INT64_MAX, ROUNDINGS, STEP, EncodedCase
from embedding_bag_moment_cases import ELEMENTWISE, MomentCase
from torch import Tensor

from rec_kernels.reference.gradient_step import GradientStep
from rec_kernels.testing import same_bits

Backends = Callable[[], Iterator[Backend]]


def expected_status(case: Case) -> list[int]:
    """The first position of an id out of range, and the number of such ids."""
    sizes = torch.tensor([-1 if n is None else n for n in case.num_ids]).repeat_interleave(case.batch)
    limits, first = sizes.repeat_interleave(case.offsets.diff().long()), int(case.offsets[0])
    ids = case.values[first : first + len(limits)].long()
    bad = ((limits >= 0) & ((ids < 0) | (ids >= limits))).nonzero().flatten() + first
    return [int(bad[0]) if len(bad) else INT64_MAX, len(bad)]


def check_lookups(encoded: EncodedCase, backends: Backends = every_backend, **options) -> None:
    """Checks output, status and the gradient of per_sample_weights."""
    case, layout = encoded.case, encoded.layout | options
    output, factors, status = case.expected_output(), case.expected_factor_gradient(), expected_status(case)
    values, offsets, _ = case.jagged
    for backend in backends():
        found, noted = backend.ops.embedding_bag(encoded.flat, *case.jagged, **layout)
        assert same_bits(found, output), ("output", backend.name)
        assert noted.tolist() == status, ("status", backend.name)
        found = backend.ops.embedding_bag_backward_per_sample_weights(
            case.grad, encoded.flat, values, offsets, **layout
        )
        assert same_bits(found, factors), ("gradient of per_sample_weights", backend.name)


def check_gradients(case: Case, backends: Backends = every_backend, **options) -> None:
    """Checks dense and sparse gradients of the tables, as float32."""
    dense, touched = case.expected_dense_gradient(), sorted(case.row_gradients)
    row_grads = torch.cat([torch.zeros(0), *(case.row_gradients[key] for key in touched)])
    given = (case.grad, list(case.weights.shape), *case.jagged)
    for backend in backends():
        found = backend.ops.embedding_bag_backward_dense(*given, **case.layout, **options, weights=case.weights)
        assert same_bits(found, dense), ("dense gradient", backend.name)
        rows, found, counts = backend.ops.embedding_bag_backward_sparse(
            *given, **case.layout, **options, weights=case.weights
        )
        assert rows.tolist() == [row for _, row in touched], ("rows of the sparse gradient", backend.name)
        assert counts.tolist() == [sum(t == table for t, _ in touched) for table in case.parts], backend.name
        assert same_bits(found, row_grads), ("sparse gradient", backend.name)


def check_update(
    encoded: EncodedCase,
    optimizer: str,
    rounding: str,
    backends: Backends = every_backend,
    grad_scale: float = 1.0,
    step: GradientStep | None = None,
    *,
    half: bool = False,
    **options,
) -> None:
    """Checks bytes, state and step after a fused update; rows without ids and bytes between tables stay.

    Args:
        step: clipping and weight decay between a row's gradient and the optimizer.
        half: whether elementwise state is bfloat16.
    """
    scale = (1 / torch.tensor(grad_scale)).item()
    if grad_scale != 1:
        options["grad_scale"] = torch.tensor(grad_scale)
    if step is not None:
        options |= asdict(step)
    if optimizer in ELEMENTWISE:
        moments = MomentCase(encoded, optimizer, half=half)
        update, (flat, state) = functools.partial(moments.update, rounding), moments.expected(rounding, scale, step)
    else:
        flat, state = encoded.expected_update(optimizer, rounding, scale, step)
        update = functools.partial(encoded.update, optimizer, rounding)
    for backend in backends():
        found, found_state, count = update(backend.ops, **options)
        assert encoded.same_tables(found, flat), ("rows", changed_tables(encoded, found, flat), backend.name)
        assert not differing(found_state, state), ("state", differing(found_state, state), backend.name)
        assert count.item() == STEP + 1, backend.name


def updated(encoded: EncodedCase, optimizer: str, rounding: str, ops: object, **options) -> tuple[Tensor, ...]:
    """Bytes, step and all state after a fused update."""
    if optimizer in ELEMENTWISE:
        flat, state, step = MomentCase(encoded, optimizer).update(rounding, ops, **options)
        return (flat, step, *state.values())
    flat, state, step = encoded.update(optimizer, rounding, ops, **options)
    return flat, step, state


def before_update(encoded: EncodedCase, optimizer: str) -> tuple[Tensor, ...]:
    """Bytes, step and all state before ``updated``."""
    state = MomentCase(encoded, optimizer).state.values() if optimizer in ELEMENTWISE else [encoded.case.sum]
    return (encoded.flat, torch.tensor(STEP), *state)


def check_updates(
    encoded: EncodedCase,
    optimizers: Sequence[str] = OPTIMIZERS,
    roundings: Sequence[str] = ROUNDINGS,
    backends: Backends = every_backend,
    **options,
) -> None:
    """Checks each optimizer with each rounding; ``options`` are those of ``check_update``."""
    for optimizer in optimizers:
        for rounding in roundings:
            check_update(encoded, optimizer, rounding, backends, **options)


def changed_tables(encoded: EncodedCase, found: Tensor, expected: Tensor) -> list[tuple]:
    """Indices of the tables whose bytes differ; if none, the bytes between tables do."""
    kinds = zip(encoded.case.tables, encoded.formats, encoded.split(found), encoded.split(expected), strict=True)
    return [(*shape, format) for shape, format, a, b in kinds if not torch.equal(a, b)]


def differing(found: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor]) -> list[str]:
    """Names of the state that has other bits."""
    if isinstance(found, Tensor):
        found, expected = {"sum": found}, {"sum": expected}
    return [name for name, t in expected.items() if not same_bits(found[name], t)]
