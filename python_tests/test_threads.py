"""Ops and collections in several threads at once have the bits of consecutive calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch
from op_fuzz import Call, by_name
from test_opcheck import registered, samples
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import rec_kernels as rk
from rec_kernels.testing import cpu_isas, jagged_batch, same_bits, use_cpu_isa, use_threads

KEYS = ["f", "g", "h"]
BATCH, STEPS, THREADS = 600, 4, 3
OPTIMIZERS = [rk.SGD(lr=0.1), rk.RowwiseAdagrad(lr=0.1), rk.Adam(lr=0.01), rk.LAMB(lr=0.01)]


def at_once(*functions: Callable[[], object]) -> list[object]:
    """Results of functions that start together, each in a thread of its own; the first error is raised."""
    start, results, errors = threading.Barrier(len(functions)), [None] * len(functions), []

    def run(place: int, function: Callable[[], object]) -> None:
        try:
            with use_threads(2):  # a setting per thread
                start.wait()
                results[place] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def collection(optimizer: rk.FusedOptimizer | None, cache: rk.RowCache | None = None) -> rk.EmbeddingBagCollection:
    """Tables of three formats, or of one without a fused optimizer."""
    torch.manual_seed(0)
    formats = ["fp32", "int8", "bf16"] if optimizer else ["fp32"] * 3
    tables = [
        rk.EmbeddingBagConfig(3000, 20, name=key, feature_names=[key], format=format)
        for key, format in zip(KEYS, formats, strict=True)
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, cache=cache)


def batch(step: int) -> rk.KeyedJaggedTensor:
    """Ids with a few frequent ones."""
    values, offsets = jagged_batch([3000] * 3, BATCH, ids="zipf", hot=0.1, seed=step)
    return rk.KeyedJaggedTensor(KEYS, values, offsets=offsets)


def train(tables: rk.EmbeddingBagCollection, batches: list[rk.KeyedJaggedTensor]) -> list[Tensor]:
    """Outputs of a few steps, and the final state."""
    found = []
    for given in batches:
        out = tables(given).values()
        out.square().sum().backward()
        found.append(out.detach())
    found += [p.grad for p in tables.parameters() if p.grad is not None]
    return found + [t.clone() for t in tables.state_dict().values() if isinstance(t, Tensor)]


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("cached", [False, True])
def test_training_in_threads(optimizer: rk.FusedOptimizer | None, cached: bool) -> None:
    """Separate collections trained on the same batches, with separate OpenMP threads, have equal bits."""
    if cached and optimizer is None:
        pytest.skip("a row cache needs a fused optimizer")
    batches = [batch(step) for step in range(STEPS)]
    own = [collection(optimizer, rk.RowCache(0.1) if cached else None) for _ in range(THREADS + 1)]
    expected = train(own[0], batches)
    found = at_once(*(lambda tables=tables: train(tables, batches) for tables in own[1:]))
    for each in found:
        assert len(each) == len(expected) > STEPS
        assert all(map(same_bits, each, expected))


def test_lookups_of_one_collection() -> None:
    """Unchanged tables may be read by all threads."""
    served = collection(rk.SGD(lr=0.1)).for_serving()
    batches = [batch(step) for step in range(THREADS)]
    expected = [served(given).values() for given in batches]
    with torch.no_grad():
        found = at_once(*(lambda g=g: [served(g).values() for _ in range(20)] for g in batches))
    for each, right in zip(found, expected, strict=True):
        assert all(same_bits(out, right) for out in each)


def everything(op: str) -> list[Tensor]:
    """Results and changes of an op's samples; threads share the arguments that it may not change."""
    found = []
    for call in CALLS[op]:
        own = {n: a.clone() for n, a in call.arguments.items() if n in call.written and isinstance(a, Tensor)}
        given = Call(op, call.arguments | own)
        found += [t for t in tree_leaves((given.run(), given.arguments)) if isinstance(t, Tensor)]
    return found


torch.manual_seed(0)
CALLS = {
    op: [Call(op, tree_map_only(Tensor, Tensor.detach, by_name(op, *given))) for given in samples(op)]
    for op in registered()
}


def test_every_op_in_threads() -> None:
    """All samples of all ops, in another order in each thread."""
    ops = list(CALLS)
    expected = {op: everything(op) for op in ops}
    turned = [ops[i:] + ops[:i] for i in (0, len(ops) // 3, 2 * len(ops) // 3)]
    found = at_once(*(lambda order=order: {op: everything(op) for op in order} for order in turned))
    for each in found:
        assert all(all(map(same_bits, each[op], expected[op])) for op in ops)


def test_an_error_of_one_thread_is_its_own() -> None:
    """Calls that raise do not affect calls in other threads."""
    batches = [batch(step) for step in range(STEPS)]
    tables, expected = collection(rk.Adam(lr=0.01)), train(collection(rk.Adam(lr=0.01)), batches)
    bad, other = (collection(rk.Adam(lr=0.01)) for _ in range(2))
    before = other.state_dict()
    wrong = rk.KeyedJaggedTensor(KEYS, torch.full((6,), 3000), offsets=torch.arange(7))

    def fail() -> int:
        raised = 0
        for _ in range(200):
            with pytest.raises(IndexError, match="out of range"):
                bad(wrong)
            raised += 1
        return raised

    found, raised = at_once(lambda: train(tables, batches), fail)
    assert all(map(same_bits, found, expected))
    assert raised == 200
    now = bad.state_dict()
    assert all(torch.equal(t, now[name]) for name, t in before.items() if isinstance(t, Tensor))


def test_unknown_instruction_sets() -> None:
    """The error lists those of the machine."""
    message = f"name must be one of this machine's instruction sets, {', '.join(cpu_isas())}, got 'v5'"
    with pytest.raises(ValueError, match=re.escape(message)), use_cpu_isa("v5"):
        pass
