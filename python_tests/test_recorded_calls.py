"""Calls of recorded_calls.zip: every op has the recorded bits and errors."""

from __future__ import annotations

import functools

import pytest
import torch
from backends import SOURCES, emulated
from layout_calls import LAYOUT_OPS
from recording import Reader
from replay import replay, replay_error
from torch import Tensor

from rec_kernels.testing import use_threads

RECORDING = Reader("recorded_calls.zip")
OPS = sorted(RECORDING.index["schemas"])
#: Ops without a CUDA kernel.
CPU_ONLY = {
    *("dot_interaction", "dot_interaction_backward", "factorization_machine", "factorization_machine_backward"),
    *("grouped_projection", "grouped_projection_backward_input", "grouped_projection_backward_weights"),
    *("fake_quantize", "jagged_overlaps", "row_cache_plan"),
}


def _of(kind: str, op: str) -> list[tuple[int, dict]]:
    """The calls or errors of an op, with their numbers."""
    return [(number, entry) for number, entry in enumerate(RECORDING.index[kind]) if entry["op"] == op]


@pytest.mark.parametrize("op", OPS)
def test_calls(op: str) -> None:
    """Outputs, gradients and changed arguments have equal bits, with any number of threads."""
    found, calls = {}, _of("calls", op)
    assert len(calls) >= 4
    for number, entry in calls:
        with use_threads(1 + number % 3):
            found[number] = replay(RECORDING, entry, torch.ops.rec_kernels)
    assert {number: f for number, f in found.items() if f} == {}


GONE_ARGUMENTS = (12, 15, 20, 23, 33, 34, 37, 38, 40, 100, 101, 102, 103, 105, 106, 107, 111, 112, 115)
#: Errors, by their number in the recording, that differ since layouts exist.
OTHERWISE_NOW = {
    "the argument is gone, or an overload does not have it": GONE_ARGUMENTS,
    "lists of another length make no layout, and the first of them is named": (17, 39, 114, 116, 117, 119),
    "lists of formats and flags have no dtype or shape, and formats no numbers": (24, 25, 26, 110),
    "of two mistakes in a call, the layout's is named first": (19, 27, 31, 108, 109, 113),
    "a number has another range: no cache, or no rows": (21, 29),
}
OTHERWISE = {number for numbers in OTHERWISE_NOW.values() for number in numbers}


@pytest.mark.parametrize("op", OPS)
def test_errors(op: str) -> None:
    """Rejected calls are still rejected, with equal error types, arguments and numbers; nothing changes."""
    errors = _of("errors", op)
    assert len(errors) >= 3
    found = {n: replay_error(RECORDING, entry, torch.ops.rec_kernels) for n, entry in errors if n not in OTHERWISE}
    assert {number: f for number, f in found.items() if f} == {}


def test_errors_that_are_otherwise_now() -> None:
    """Changed errors are few, of ops with a layout, and all really differ."""
    of = {op for op in OPS for n, _ in _of("errors", op) if n in OTHERWISE}
    assert of <= set(LAYOUT_OPS)
    assert (
        len(OTHERWISE) == sum(len(numbers) for numbers in OTHERWISE_NOW.values()) < 0.3 * len(RECORDING.index["errors"])
    )
    entries = [RECORDING.index["errors"][n] for n in OTHERWISE]
    assert all(replay_error(RECORDING, entry, torch.ops.rec_kernels) for entry in entries)


@pytest.mark.skipif(not SOURCES.exists(), reason="the sources are not beside the tests")
@pytest.mark.parametrize("op", [op for op in OPS if op not in CPU_ONLY])
def test_emulated(op: str) -> None:
    """The emulated CUDA kernels have the recorded results, without gradients."""
    found = {number: replay(RECORDING, entry, emulated().ops, backward=False) for number, entry in _of("calls", op)}
    assert {number: f for number, f in found.items() if f} == {}


def test_another_bit_is_found() -> None:
    """A replay detects a changed bit of an output, of a gradient and of a mutated argument."""
    fused = [
        e for e in RECORDING.index["calls"] if e["op"] == "embedding_bag_fused" and "grads" in e and e["changed"]["of"]
    ]
    dense = [e for e in RECORDING.index["calls"] if e["op"] == "row_dot" and "grads" in e]
    for entry, part in ((fused[0], "results"), (fused[0], "changed"), (dense[0], "gradients")):
        other = Reader("recorded_calls.zip")
        assert replay(other, entry, torch.ops.rec_kernels) == []
        other.decode = functools.partial(_decode, other, entry[part])
        assert replay(other, entry, torch.ops.rec_kernels) != [], part


def test_another_error_is_found() -> None:
    """A replay detects an error with another type, argument or number, and a missing one."""
    entry = next(entry for n, entry in _of("errors", "embedding_bag") if n not in OTHERWISE)
    assert replay_error(RECORDING, entry, torch.ops.rec_kernels) == []
    error, (_, right) = entry["error"], _of("calls", "embedding_bag")[0]
    others = [error | {"type": "KeyError"}, error | {"message": error["message"] + " 4711"}]
    others.append(error | {"message": "grad", "arguments": ["grad"]})
    for other in others:
        assert replay_error(RECORDING, entry | {"error": other}, torch.ops.rec_kernels) != []
    assert replay_error(RECORDING, right | {"error": error}, torch.ops.rec_kernels) != []


def _decode(reader: Reader, wrong: object, entry: object) -> object:
    """Decodes as the reader does, except the last bit of one element of ``wrong``."""
    value = Reader.decode(reader, entry)
    if entry is not wrong:
        return value
    floats = [t for t in _tensors(value) if t.dtype == torch.float32 and t.numel()]
    floats[0].view(torch.int32).view(-1)[0] ^= 1
    return value


def _tensors(value: object) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, Tensor) else [t for v in values for t in _tensors(v)]
