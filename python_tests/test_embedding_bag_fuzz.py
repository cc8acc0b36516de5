"""Invalid offsets and ids: the CPU raises, a device sets status, and nothing changes."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from backends import Backend, device_backends
from embedding_bag_fuzz import BadCall, bad_call, check
from embedding_bag_samples import Sample
from layout_calls import OPS
from tiers import full

from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import use_threads

CPU = Backend("cpu", OPS)
#: Every second call runs in the full tier only.
HALVES = [0, *full(1)]


@functools.cache
def calls() -> list[BadCall]:
    """Calls of all tests below."""
    return [bad_call(seed) for seed in range(360)]


def test_every_kind_of_fault_is_there() -> None:
    """Calls have decreasing, too large and too few offsets; ids of each width; partitioned features; valid calls."""
    kinds = collections.Counter()
    for call in calls():
        text = call.expected_error.message if call.expected_error else "right, " + call.sample.bounds_check
        for part in ("is below", "number of values", "num_features * batch + 1", "is out of range", "right"):
            kinds[text if part == "right" else part] += part in text
        if "out of range" in text:
            kinds[f"{call.sample.ids} bits"] += 1
        for error in ("out of range", "is below"):
            composed = any(isinstance(table, Parts) for table, _ in call.sample.features)
            kinds[f"composed, {error}"] += composed and error in text
    required = ["is below", "number of values", "num_features * batch + 1", "is out of range", "32 bits", "64 bits"]
    required += ["composed, out of range", "composed, is below"]
    assert all(kinds[name] >= 15 for name in [*required, "right, ignore", "right, error", "right, none"]), kinds


@pytest.mark.parametrize("half", HALVES)
def test_cpu(half: int) -> None:
    """Every op raises with position, value and range, or has correct results if ids are ignored."""
    for call in calls()[half::2]:
        check(call, CPU)


@pytest.mark.parametrize("half", HALVES)
def test_devices(half: int) -> None:
    """The CUDA kernels set status, and change nothing."""
    for place, backend in enumerate(device_backends()):
        for call in calls()[half::2][place % 3 :: 3]:
            check(call, backend)


@pytest.mark.parametrize(
    ("lengths", "offsets"), [([[]], [(0, 1)]), ([[]], [(0, -1)]), ([[0, 0]], [(1, 5)]), ([[0, 0]], [(0, -3)])]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_calls_without_ids(lengths: list[list[int]], offsets: list[tuple[int, int]], optimizer: str) -> None:
    """Offsets are checked without ids and without bags, and a device then does not count the step."""
    call = BadCall(Sample([(3, 4, "fp32")], [(0, "sum")], lengths, optimizer=optimizer), offsets)
    assert call.expected_error.error is ValueError
    check(call, CPU)
    for backend in device_backends():
        check(call, backend)


@pytest.mark.parametrize("bounds_check", ["error", "ignore"])
def test_large_calls(bounds_check: str) -> None:
    """The message does not depend on how the work is split among threads."""
    tables, features = [(500, 8, "fp32"), (300, 20, "int8")], [(0, "sum"), (1, "mean"), (0, "sum"), (1, "sum")]
    r, batch = random.Random(5), 3000
    lengths = [[r.choice([0, 1, 3, 6]) for _ in range(batch)] for _ in features]
    call = BadCall(Sample(tables, features, lengths, bounds_check=bounds_check, optimizer="adam"))
    case, kinds = call.encoded.case, set()
    offsets, ids = case.offsets.clone(), case.values.clone()
    assert ids.numel() * 8 > 4 * 32768  # floats: work for several threads (csrc/embedding_bag/cpu)
    for _ in range(25):
        case.offsets, case.values = offsets.clone(), ids.clone()
        for _ in range(r.randint(1, 3)):
            i = r.randrange(1, len(offsets) - 2)
            if r.random() < 0.5:
                case.offsets[i] = r.choice([offsets[i - 1] - 1, offsets[i + 2] + 5, len(ids) + 1, 2**40, -(2**63)])
            else:
                case.values[r.randrange(len(ids))] = r.choice([-1, 500, 2**62])
        broken = replace(call)
        broken.encoded = call.encoded  # expensive to make
        if broken.expected_error is None:
            continue
        kinds.add(broken.expected_error.error)
        for threads in (1, 3):
            with use_threads(threads):
                check(broken, CPU)
    assert kinds == ({ValueError, IndexError} if bounds_check == "error" else {ValueError})


def test_failures_say_what_the_call_was() -> None:
    """A failure prints the sample, its changes, and the expected message."""

    class Trusting:
        def __getattr__(self, name: str) -> Callable:
            op = getattr(OPS, name)
            return lambda *args, **kwargs: op(*args, **(kwargs | {"bounds_check": "ignore"}))

    call = BadCall(Sample([(3, 4, "int8")], [(0, "sum")], [[2, 0]]), values=[(1, 3)])
    check(call, CPU)
    with pytest.raises(AssertionError) as found:
        check(call, Backend("cpu", Trusting()))
    for part in (repr(call), "values[1] = 3 (feature 0, bag 0) is out of range"):
        assert part in str(found.value)
