"""Seeded calls of public ops with invalid arguments, made from the samples of test_opcheck.py, and their checks.

A call is a sample of a registered op with zero to three arguments changed: dtype, rank, sizes, strides, values,
options. The op must raise a Python error that names an argument and leave every argument unchanged; or return the
result of the same call with contiguous arguments, on one thread, with the oldest instruction set. The fake kernel must
predict shapes and dtypes. Each op's own tests check results of valid calls.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from op_fuzz_changes import change
from test_opcheck import registered, samples
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rec_kernels.ops.autograd import overload_of
from rec_kernels.testing import same_bits, use_cpu_isa, use_threads

#: Errors of missing memory, which name the requested size.
OF_MEMORY = re.compile(r"cannot allocate (a \w+ tensor of shape|\d+ bytes)|std::bad_alloc|not enough memory")
#: Errors that name no argument: those, and torch's for values that do not fit the schema or the backend.
OF_NO_ARGUMENT = re.compile(
    r"rec_kernels::[\w.]+\(\) (Expected|expected|is missing)|Could not run|Overflow when unpacking|"
    r"stableivalue_conversions|" + OF_MEMORY.pattern
)
#: One call in this many is also compared with the fake kernel, which is far slower than the call.
FAKE_EVERY = 4


class FoundError(AssertionError):
    """A fault in an op's handling of its arguments."""

    op = ""


@dataclass
class Call:
    """An op, its arguments by name, and the changes to them."""

    op: str
    arguments: dict[str, object]
    changes: list[str] = field(default_factory=list)

    @property
    def schema(self) -> torch._C.FunctionSchema:
        return overload_of(self.op)._schema

    @property
    def written(self) -> set[str]:
        """Names of the arguments that the op may change."""
        return {a.name for a in self.schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def run(self) -> object:
        return overload_of(self.op)(**self.arguments)

    def __str__(self) -> str:
        return f"{self.op}: {'; '.join(self.changes) or 'nothing changed'}"


class Samples:
    """The valid calls of some ops, or of every registered one; clones of them are changed."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        torch.manual_seed(0)
        self.names = list(names or registered())
        self._calls = {name: [by_name(name, *call) for call in samples(name)] for name in self.names}
        self._expected: dict[tuple[str, int], list[Tensor]] = {}

    def draw(self, r: random.Random, op: str | None = None) -> tuple[str, int]:
        """An op and the index of one of its samples."""
        name = op or r.choice(self.names)
        return name, r.randrange(len(self._calls[name]))

    def call(self, name: str, number: int) -> Call:
        """A sample with cloned tensors."""
        return Call(name, tree_map_only(Tensor, _own, self._calls[name][number]))

    def check_unharmed(self, name: str, number: int) -> None:
        """Asserts that the sample still has the result that ``remember`` recorded."""
        if not _same(self._results(name, number), self._expected[name, number]):
            raise FoundError("after an error, a valid call gives other results than before")

    def remember(self, name: str, number: int) -> None:
        """Records the sample's result, before the first invalid call of the op."""
        if (name, number) not in self._expected:
            self._expected[name, number] = self._results(name, number)

    def _results(self, name: str, number: int) -> list[Tensor]:
        call = self.call(name, number)
        result = call.run()
        return _tensors([result, *(call.arguments[n] for n in sorted(call.written & {*call.arguments}))])


def by_name(name: str, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments of a call of an op, by name."""
    names = [a.name for a in overload_of(name)._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _own(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def bad_call(valid: Samples, seed: str, op: str | None = None) -> tuple[Call, tuple[str, int]]:
    """A sample with zero to three changes, and its op and index."""
    r = random.Random(seed)
    sample = valid.draw(r, op)
    call = valid.call(*sample)
    # bounds_check="none" trusts ids and layouts: it is never combined with another change.
    if "bounds_check" in {a.name for a in call.schema.arguments} and r.random() < 0.03:
        call.arguments["bounds_check"] = "none"
        call.changes.append('bounds_check = "none"')
        return call, sample
    for _ in range(r.choice([0, 1, 1, 1, 1, 2, 2, 3])):
        argument = r.choice(call.schema.arguments)
        call.changes.append(change(r, argument, call.arguments))
    return call, sample


def check(valid: Samples, seed: str, op: str | None = None) -> tuple[str, str]:
    """Makes and checks one call, determined by the seed.

    Args:
        valid: the calls to change.
        seed: of the changes.
        op: the op to call; None: any.

    Returns:
        The op, and "right" or "raised".

    Raises:
        FoundError: the op violates the contract.
    """
    call, sample = bad_call(valid, seed, op)
    with _named(call):
        plain = Call(call.op, tree_map_only(Tensor, _contiguous, call.arguments))
        before = {name: _memory(a) for name, a in call.arguments.items()}
        valid.remember(*sample)
        try:
            result = call.run()
        except Exception as error:
            _check_error(call, error)
            _check_unchanged(before, call.arguments, set())
            valid.check_unharmed(*sample)
            return call.op, "raised"
        _check_unchanged(before, call.arguments, call.written)
        _check_result(call, result, plain)
        if random.Random(seed + " fake").randrange(FAKE_EVERY) == 0:
            _check_fake(call, result)
        return call.op, "right"


@contextmanager
def _named(call: Call) -> Iterator[None]:
    try:
        yield
    except FoundError as finding:
        named = FoundError(f"{call}: {finding}")
        named.op = call.op
        raise named from finding.__cause__


def _check_error(call: Call, error: Exception) -> None:
    text = str(error)
    if not isinstance(error, ValueError | IndexError | TypeError | RuntimeError | MemoryError):
        raise FoundError(f"raises {error!r}") from error
    if any(t.is_meta for t in _tensors(call.arguments)):
        return  # the fake kernel raises errors of shapes only
    named = {a.name for a in call.schema.arguments}
    if OF_NO_ARGUMENT.search(text) or named & {*re.findall(r"\w+", text)}:
        return
    raise FoundError(f"an error that names no argument: {error!r}") from error


def _memory(argument: object) -> list[Tensor]:
    """Copies of the storages of an argument's tensors."""
    return [_bytes(t).clone() for t in _tensors(argument) if _has_memory(t)]


def _bytes(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(t.detach().untyped_storage())


def _has_memory(t: Tensor) -> bool:
    return t.layout == torch.strided and t.device.type == "cpu"


def _check_unchanged(before: dict[str, list[Tensor]], arguments: dict[str, object], written: set[str]) -> None:
    for name, copies in before.items():
        if name in written:
            continue
        now = [_bytes(t) for t in _tensors(arguments[name]) if _has_memory(t)]
        if not all(map(torch.equal, copies, now)):
            raise FoundError(f"{name} was changed")


def _contiguous(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format) if _has_memory(t) else t


def _check_result(call: Call, result: object, plain: Call) -> None:
    """Compares with the same call on contiguous arguments, one thread and the oldest instruction set."""
    found = _tensors(result)
    if not all(map(_has_memory, _tensors([result, list(call.arguments.values())]))):
        return
    try:
        with use_cpu_isa("baseline"), use_threads(1):
            expected = _tensors(plain.run())
    except (RuntimeError, MemoryError) as error:
        if OF_MEMORY.search(str(error)):
            return  # enough memory for one result, but not for two
        raise
    if not _same(found, expected):
        raise FoundError("other results than with contiguous arguments, one thread and the oldest instruction set")
    for name in call.written & set(call.arguments):
        if not _same(_tensors(call.arguments[name]), _tensors(plain.arguments[name])):
            raise FoundError(f"{name} becomes other numbers than with contiguous arguments")


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x.detach(), y.detach()) for x, y in zip(a, b, strict=True))


def _check_fake(call: Call, result: object) -> None:
    """The fake kernel accepts what the op accepts, with its shapes and dtypes; data-dependent sizes are free."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            fake = overload_of(call.op)(**tree_map_only(Tensor, lambda t: mode.from_tensor(t.detach()), call.arguments))
        except (DynamicOutputShapeException, DataDependentOutputException):
            return
        except Exception as error:
            raise FoundError(f"the op takes what its fake kernel refuses: {error!r}") from error
    for mine, foretold in zip(_tensors(result), _tensors(fake), strict=True):
        sizes = [n if isinstance(n, int) else m for n, m in zip(foretold.shape, mine.shape, strict=True)]
        if sizes != list(mine.shape) or foretold.dtype != mine.dtype:
            raise FoundError(f"the fake kernel foretells {sizes} {foretold.dtype}, not {list(mine.shape)} {mine.dtype}")


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
