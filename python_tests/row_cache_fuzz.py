"""The invalid calls of embedding_bag_fuzz.py with a row cache: insertion, lookup, update and flush."""

from __future__ import annotations

import random

import torch
from backends import Backend
from embedding_bag_cases import LR
from embedding_bag_format_cases import STEP
from embedding_bag_fuzz import BadCall, error_of
from row_cache_cases import State, call, layout_of, normalized
from torch import Tensor

import rec_kernels as rk
from rec_kernels.ops.table_layout import Size
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.reference.row_cache import POLICIES
from rec_kernels.testing import same_bits

CPU = torch.ops.rec_kernels


class CachedCall:
    """A call with a cache of a few sets: its arguments, and the state after another batch and its update.

    The sets are drawn from ``seed``.
    """

    def __init__(self, bad: BadCall, seed: int) -> None:
        r, self.bad, sample = random.Random(seed), bad, bad.sample
        encoded = bad.encoded
        tables, dims = encoded.case.parts, encoded.dims
        composed = {t for f in encoded.case.features if isinstance(f, Parts) and len(f.tables) > 1 for t in f.tables}
        ways, policy = r.choice([1, 2, 5, 33]), r.choice(POLICIES)
        first = dict.fromkeys(dims, (0, 0, 0))  # sets, the first of them, the first element
        at = elements = 0
        for dim in first:
            sets = r.choice([1, 1, 2, 3])
            first[dim] = (sets, at, elements - at * ways * dim)
            at, elements = at + sets, elements + sets * ways * dim
        places = [(0, 0, 0) if t in composed else first[dims[t]] for t in tables]
        layout = layout_of(encoded, table_ids=tables, cache=rk.CachePlaces(ways, *zip(*places, strict=True)))
        options = {"policy": policy, "rounding": sample.rounding, "optimizer": "sgd", "sum": None}
        options |= {"lr": torch.tensor(LR)}
        self.arguments = layout._asdict() | bad.options | options
        self.state = self._state(elements, at * ways, policy)
        good = BadCall(sample).encoded.case
        if sample.bounds_check != "ignore":
            self.run(CPU, "row_cache_insert_", self.state, good.jagged)
        self.state["cache_dirty"].copy_(torch.arange(at * ways) % 2)

    def _state(self, elements: int, slots: int, policy: str) -> State:
        """State of an empty cache for the unchanged tables."""
        rows, encoded = self.arguments["layout_sizes"][Size.num_rows], self.bad.encoded
        state = {
            "weights": encoded.flat.clone(),
            "cache_rows": torch.zeros(elements),
            "cache_tags": torch.full((slots,), -1),
            "cache_marks": torch.zeros(slots, dtype=torch.uint8),
            "cache_stamps": torch.zeros(slots, dtype=torch.int64),
            "cache_dirty": torch.zeros(slots, dtype=torch.uint8),
            "cache_clock": torch.tensor(0),
            "cache_stats": torch.zeros(len(encoded.case.tables), 6, dtype=torch.int64),
            "step": torch.tensor(STEP),
        }
        if policy == "lfu":
            state["cache_counts"] = torch.zeros(slots, dtype=torch.uint8)
            state["row_counts"] = torch.zeros(rows, dtype=torch.uint8)
        return state

    def run(self, ops: object, op: str, state: State, jagged: tuple[Tensor, ...], **more: object) -> object:
        """Calls an op with these bags and this state."""
        names = ("values", "offsets", "per_sample_weights")
        return call(op, self.arguments | state | dict(zip(names, jagged, strict=False)) | more, ops)

    def everything(self, ops: object) -> tuple[list[Tensor], State]:
        """Results of a training step and a flush, and the state after them."""
        case, state = self.bad.encoded.case, _copied(self.state)
        slots = self.run(ops, "row_cache_insert_", state, case.jagged)
        found = [slots, self.run(ops, "row_cache_lookup", state, case.jagged)]
        given = {"cache_slots": slots, "grad": case.grad}
        output, status = self.run(ops, "embedding_bag", state, case.jagged, **given)
        found += [output, self.run(ops, "embedding_bag_backward_per_sample_weights", state, case.jagged, **given)]
        self.run(ops, "embedding_bag_backward_fused_", state, case.jagged, status=status, **given)
        before = _copied(state)
        self.run(ops, "row_cache_flush_", state, case.jagged)
        return found, before | {"flushed": state["weights"]}


def _copied(state: State) -> State:
    return {name: t.clone() for name, t in state.items()}


def _differing(a: State, b: State) -> list[str]:
    return [name for name in b if not same_bits(a[name], b[name])]


def check(bad: BadCall, seed: int, backend: Backend) -> None:
    """Checks one call on one backend: a valid call has the CPU's results; an invalid one changes nothing."""
    cached = CachedCall(bad, seed)
    try:
        _check(cached, bad, backend)
    except Exception as error:
        raise AssertionError(f"{backend.name}: {bad}, seed {seed}: {bad.expected_error}: {error!r}") from error


def _check(cached: CachedCall, bad: BadCall, backend: Backend) -> None:
    if bad.expected_error is None:
        (found, state), (expected, expected_state) = cached.everything(backend.ops), cached.everything(CPU)
        assert all(map(same_bits, found, expected)), "other results than the CPU's"
        different = _differing(normalized(state), normalized(expected_state))
        assert not different, different
    elif bad.expected_error.status_code is None or backend.kind == "cpu":
        for op in ("row_cache_insert_", "row_cache_lookup"):
            state = _copied(cached.state)
            error = error_of(lambda op=op, state=state: cached.run(backend.ops, op, state, bad.encoded.case.jagged))
            assert type(error) is bad.expected_error.error, (op, error)
            assert str(error).startswith(bad.expected_error.message), (op, error)
            assert not _differing(state, cached.state), op
    else:
        (slots, _, output, gradient), state = cached.everything(backend.ops)
        different = _differing({n: t for n, t in state.items() if n != "flushed"}, cached.state)
        assert not different, different
        assert ((slots >= -1) & (slots < len(cached.state["cache_tags"]))).all(), slots
        assert output.isfinite().all()
        assert gradient.isfinite().all()
        flushed = _copied(cached.state)
        cached.run(CPU, "row_cache_flush_", flushed, ())
        assert torch.equal(flushed["weights"], state["flushed"]), "another flush than the CPU's"
