"""Seeded calls of ops with forged layouts, made from the samples of test_opcheck.py, and checks of their effects.

A forged record may do no harm: the call ends, and accesses no memory outside of its tensors. On the CPU the op raises
ValueError or IndexError before it changes anything, or does what the record says. On a GPU the status has the error and
nothing changes. These checks find writes outside of tensors; the sanitizers also find reads (sanitize_cuda.py).
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, field

import torch
from backends import Backend
from layout_calls import ListOps
from test_opcheck import registered, samples
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rec_kernels.ops.autograd import overload_of, signature_of
from rec_kernels.ops.table_layout import Column, Size
from rec_kernels.testing import same_bits

BAD_LAYOUT = -(2**63)  # the status on a GPU
GUARD = 96  # bytes before and after a tensor that the op may write
NUMBERS = [0, 1, 2, 3, 4, 7, 16, -1, -2, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63)]
#: Messages for results too large to allocate.
MEMORY_ERRORS = re.compile(r"cannot allocate|not enough memory|std::bad_alloc|Storage size calculation overflowed")


@dataclass
class Forgery:
    """A call by its arguments' names, and the changes to its layout."""

    op: str
    arguments: dict[str, object]
    changes: list[str] = field(default_factory=list)

    @property
    def written(self) -> list[str]:
        """The arguments that the op may change."""
        schema = overload_of(self.op)._schema.arguments
        changed = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        return [name for name, t in self.arguments.items() if name in changed and isinstance(t, Tensor)]

    def run(self, ops: object) -> tuple[list[Tensor] | None, Exception | None, dict[str, Tensor]]:
        """Results or the error, and the written arguments afterwards."""
        guards = {name: _Guarded(self.arguments[name]) for name in self.written}
        given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in self.arguments.items()}
        found, error = None, None
        try:
            name, _, overload = self.op.partition(".")
            call = getattr(getattr(ops.ops if isinstance(ops, ListOps) else ops, name), overload)
            result = call(**given | {n: g.tensor for n, g in guards.items()})
            found = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        except (ValueError, IndexError, RuntimeError, MemoryError) as raised:
            error = raised
        for n, guard in guards.items():
            assert guard.is_intact(), f"{n}: written outside of it"
        unwritten = [n for n, t in given.items() if isinstance(t, Tensor) and n not in guards]
        assert all(same_bits(given[n], self.arguments[n]) for n in unwritten), "what is not the op's was written"
        return found, error, {n: g.tensor for n, g in guards.items()}


class _Guarded:
    """A copy of a tensor between guard bytes."""

    def __init__(self, t: Tensor) -> None:
        size = t.numel() * t.element_size()
        self._memory = torch.full((size + 2 * GUARD,), 0x5A, dtype=torch.uint8)
        self._size = size
        self.tensor = self._memory[GUARD : GUARD + size].view(t.dtype).view(t.shape)
        self.tensor.copy_(t)

    def is_intact(self) -> bool:
        """True if the guard bytes are unchanged."""
        around = torch.cat([self._memory[:GUARD], self._memory[GUARD + self._size :]])
        return bool((around == 0x5A).all())


@functools.cache
def _calls() -> dict[str, list[dict[str, object]]]:
    """The samples of the ops with a layout, by name."""
    torch.manual_seed(0)
    found = {}
    for op in registered():
        if op.endswith(".layout"):
            names = list(signature_of(op))
            found[op] = [dict(zip(names, args, strict=False)) | kwargs for args, kwargs in samples(op)]
    return found


def _detached(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [t.detach() for t in value]
    return value.detach() if isinstance(value, Tensor) else value


def forge(number: int) -> Forgery:
    """A numbered call with up to three changes to its layout."""
    r, calls = random.Random(number), _calls()
    op = r.choice(list(calls))
    forgery = Forgery(op, {name: _detached(v) for name, v in r.choice(calls[op]).items()})
    given = forgery.arguments
    if "bounds_check" in signature_of(op):
        given["bounds_check"] = r.choice(["error", "error", "ignore"])
    given["layout"], given["layout_sizes"] = given["layout"].clone(), list(given["layout_sizes"])
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        forgery.changes.append(r.choice([_record] * 6 + [_size] * 2 + [_rows])(r, given))
    return forgery


def _near(r: random.Random, before: int, others: list[int]) -> int:
    number = r.choice([r.choice(NUMBERS), r.choice(others), before + r.choice([-1, 1, 4]), 2 * before, -before])
    return max(min(number, 2**63 - 1), -(2**63))


def _record(r: random.Random, given: dict[str, object]) -> str:
    """Changes one number of a record."""
    layout = given["layout"]
    if not len(layout):
        return "no record"
    i, column = r.randrange(len(layout)), r.choice(list(Column))
    number = _near(r, int(layout[i, column]), layout[r.randrange(len(layout))].tolist() + layout[:, column].tolist())
    layout[i, column] = number
    return f"layout[{i}].{column.name} = {number}"


def _size(r: random.Random, given: dict[str, object]) -> str:
    """Changes one of layout_sizes."""
    sizes, which = given["layout_sizes"], r.choice(list(Size))
    sizes[which] = _near(r, sizes[which], sizes)
    return f"layout_sizes.{which.name} = {sizes[which]}"


def _rows(r: random.Random, given: dict[str, object]) -> str:
    """Reorders, drops or repeats records."""
    count = len(given["layout"])
    rows = [r.randrange(count) for _ in range(r.choice([count, count, count - 1, count + 1, 0]))] if count else []
    given["layout"] = given["layout"][rows].contiguous()
    return f"records {rows}"


def check(number: int, backend: Backend) -> str:
    """Makes one call on a backend; returns its outcome: "raised", "noted" or "done".

    Raises:
        AssertionError: harm was done, or the error was not reported.
    """
    forgery = forge(number)
    try:
        return check_forgery(forgery, backend)
    except Exception as error:
        raise AssertionError(f"{backend.name}: call {number}: {forgery.op}: {forgery.changes}: {error!r}") from error


def check_forgery(forgery: Forgery, backend: Backend) -> str:
    """Returns the outcome of a forged call, as ``check`` does."""
    found, error, state = forgery.run(backend.ops)
    if error is not None:
        expected = (ValueError, IndexError) if backend.kind == "cpu" else (ValueError, IndexError, RuntimeError)
        assert isinstance(error, expected) or MEMORY_ERRORS.search(str(error)), repr(error)
        assert all(same_bits(t, forgery.arguments[n]) for n, t in state.items()), f"changed before it raised: {error}"
        return "raised"
    if backend.kind == "cpu":
        return "done"
    cpu_results, cpu_error, expected_state = forgery.run(torch.ops.rec_kernels)
    if cpu_error is None:
        assert all(map(same_bits, found, cpu_results)), "other results than the CPU's"
        assert not [n for n in state if not same_bits(state[n], expected_state[n])], "another state than the CPU's"
        return "done"
    if not str(cpu_error).startswith("layout["):
        return "done"
    if "cache_sets, cache_first_set" in str(cpu_error) and forgery.op == "embedding_bag_fused.layout":
        return "done"  # only the update, which comes later, looks for rows in the cache
    if forgery.op.startswith(("embedding_bag.", "embedding_bag_fused.", "embedding_bag_tables.")):
        assert found[1][0].item() == BAD_LAYOUT, f"a status of {found[1].tolist()}, where the CPU raises {cpu_error}"
    kept = [n for n in state if n != "cache_clock"]
    assert all(same_bits(state[n], forgery.arguments[n]) for n in kept), f"changed, where the CPU raises {cpu_error}"
    return "noted"
