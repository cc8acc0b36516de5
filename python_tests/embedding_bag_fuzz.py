"""Seeded calls with invalid jagged input, their defects, and the errors or results that the ops must produce."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from backends import Backend
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import EPS, LR
from embedding_bag_checks import (
    Backends,
    before_update,
    check_gradients,
    check_lookups,
    check_update,
    expected_status,
    updated,
)
from embedding_bag_format_cases import ROUNDINGS, STEP, EncodedCase
from embedding_bag_samples import Sample
from layout_calls import OPS
from torch import Tensor

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

INT64_MIN, INT64_MAX = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
FORWARDS = ("embedding_bag", "embedding_bag_fused")
BACKWARDS = ("dense", "sparse", "per_sample_weights", "fused_")


@dataclass(frozen=True)
class ExpectedError:
    """The error that a call must report.

    ``status_code`` is what a device writes to ``status``; None: the host detects it, and raises on a GPU as well.
    """

    error: type[Exception]
    message: str
    status_code: int | None


@dataclass
class BadCall:
    """A sample, and values that replace offsets and ids: (position, value). The last ``cut`` offsets are missing."""

    sample: Sample
    offsets: list[tuple[int, int]] = field(default_factory=list)
    values: list[tuple[int, int]] = field(default_factory=list)
    cut: int = 0

    @functools.cached_property
    def encoded(self) -> EncodedCase:
        encoded = self.sample.encoded()
        case = encoded.case
        _ = case.grad, encoded.layout, case.sum, case.weights  # computed before the changes, for their shapes
        for name in ("offsets", "values"):
            for place, number in getattr(self, name):
                getattr(case, name)[place] = number
        case.offsets = case.offsets[: len(case.offsets) - self.cut].clone()
        return encoded

    @functools.cached_property
    def expected_error(self) -> ExpectedError | None:
        """The first error: the number of offsets, an offset, an id that may not be ignored."""
        case, features = self.encoded.case, len(self.sample.features)
        count = len(case.offsets)
        if count == 0 or (count - 1) % features:
            found = "none" if count == 0 else f"{count} for {features} features"
            return ExpectedError(ValueError, f"offsets must have num_features * batch + 1 elements, got {found}", None)
        return _bad_offset(case.offsets.tolist(), len(case.values), case.batch) or self._bad_id()

    def _bad_id(self) -> ExpectedError | None:
        case = self.encoded.case
        position, _ = expected_status(case)
        if position == INT64_MAX or self.sample.bounds_check != "error":
            return None
        bag = int((case.offsets[:-1] <= position).nonzero()[-1])  # the last bag that starts there is the one with ids
        feature, limit = bag // case.batch, case.num_ids[bag // case.batch]
        place = f"values[{position}] = {int(case.values[position])} (feature {feature}, bag {bag % case.batch})"
        text = f"{place} is out of range: ids of this feature must be in [0, {limit})"
        return ExpectedError(IndexError, text, position)

    @property
    def options(self) -> dict[str, str]:
        """Options of every op."""
        return {"bounds_check": self.sample.bounds_check}

    def forward(self, op: str, ops=OPS) -> tuple[Tensor, Tensor]:
        """Output and status."""
        encoded, jagged = self.encoded, self.encoded.case.jagged
        if op == "embedding_bag":
            return ops.embedding_bag(encoded.flat, *jagged, **encoded.layout, **self.options)
        state = (encoded.flat, None, torch.tensor(STEP), torch.tensor(LR), torch.empty(0))
        options = self.options | {"optimizer": "sgd", "eps": EPS}
        return ops.embedding_bag_fused(*state, *jagged, **encoded.layout, **options)

    def backward(self, op: str, ops=OPS) -> Tensor | tuple[Tensor, ...]:
        """The gradient; for "fused_", bytes, step and all state."""
        encoded, case = self.encoded, self.encoded.case
        values, offsets, _ = case.jagged
        if op == "fused_":
            return updated(self.encoded, self.sample.optimizer, self.sample.rounding, ops, **self.options)
        if op == "per_sample_weights":
            given, layout = (case.grad, encoded.flat, values, offsets), encoded.layout
        else:
            given, layout = (case.grad, list(case.weights.shape), *case.jagged), case.layout | {"weights": case.weights}
        return getattr(ops, f"embedding_bag_backward_{op}")(*given, **layout, **self.options)

    def before(self) -> tuple[Tensor, ...]:
        """State before the ops ending in "fused_"."""
        return before_update(self.encoded, self.sample.optimizer)


def _bad_offset(offsets: list[int], ids: int, batch: int) -> ExpectedError | None:
    for i, offset in enumerate(offsets):
        bag = max(i - 1, 0)
        where = (bag // batch, bag % batch) if batch else (0, 0)
        place = f"offsets[{i}] = {offset} (feature {where[0]}, bag {where[1]})"
        if i > 0 and offset < offsets[i - 1]:
            text = f"{place} is below the offset before it, {offsets[i - 1]}"
        elif not 0 <= offset <= ids:
            text = f"{place} must be in [0, {ids}], the number of values"
        else:
            continue
        return ExpectedError(ValueError, text, INT64_MIN + 1 + i)
    return None


def _parts(r: random.Random, tables: list[tuple[int, int, str]], table: int, most: int) -> Parts:
    """A partitioned feature of ``table`` and compatible tables; its ids are below ``most``, or unlimited."""
    if most > 5 and r.random() < 0.3:
        return Parts([table], [(1, r.randint(1, tables[table][0]))], None, "concat")
    combine = r.choice(["concat", "add", "mult", "mult"])
    # Rows that are added or multiplied need the same dimension and format.
    others = [
        t for t, kind in enumerate(tables) if t != table and (combine == "concat" or kind[1:] == tables[table][1:])
    ]
    chosen = [table, *r.sample(others, r.randint(0, len(others)))]
    partitions = [(r.choice([1, 2, 3, 7]), tables[t][0]) for t in chosen]
    return Parts(chosen, partitions, r.choice([n for n in (5, 40, 1000, 2**33) if n <= most]), combine)


def _sample(r: random.Random) -> Sample:
    bounds_check = r.choice(["error", "error", "ignore", "none"])
    # With bad offsets a feature reads another one's ids, which "none" does not check: they must fit every table.
    rows = [1, 2, 5, 40] if bounds_check != "none" else [5]
    tables = [(r.choice(rows), r.choice([1, 3, 16, 33, 130]), r.choice(BAG_FORMATS)) for _ in range(r.randint(1, 3))]
    features = [(r.randrange(len(tables)), r.choice(["sum", "mean"])) for _ in range(r.randint(1, 4))]
    ids = r.choice([32, 64])
    if r.random() < 0.4:  # partitioned features, and mostly tables of the same dimension and format
        tables = [(e, *tables[0][1:]) for e, _, _ in tables] if r.random() < 0.7 else tables
        most = 5 if bounds_check == "none" else 2**33 if ids == 64 else 1000
        features = [(_parts(r, tables, t, most) if r.random() < 0.7 else t, pooling) for t, pooling in features]
    batch = r.choice([0, 1, 2, 3, 5, 5])
    return Sample(
        tables,
        features,
        [[r.choice([0, 1, 2, 4, r.choice([3, 70])]) for _ in range(batch)] for _ in features],
        weighted=r.random() < 0.5,
        padding_idx=r.choice([-1, 0, 3, [r.choice([-1, 0, 3]) for _ in features]]),
        bounds_check=bounds_check,
        ids=ids,
        offsets=r.choice([32, 64]),
        gaps=r.choice([0, 1]),
        optimizer=r.choice(ALL_OPTIMIZERS),
        rounding=r.choice(ROUNDINGS),
        seed=r.randrange(1000),
    )


def _number(r: random.Random, bits: int, near: list[int]) -> int:
    """A number near a limit, at an end of the type, or any."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    ends = [low, low + 1, high, high - 1, -(2**31), 2**31 - 1]
    wide = [2**31, 2**32, -(2**32), 2**32 + 1, 2**40] if bits == 64 else []
    return r.choice([r.choice(near), r.choice(near), r.choice(ends + wide), r.randint(low, high)])


def bad_call(seed: int) -> BadCall:
    """A call with zero to three changed values; some of these are harmless."""
    r = random.Random(seed)
    call = BadCall(_sample(r))
    sample, offsets = call.sample, call.encoded.case.offsets.tolist()
    ids, features = offsets[-1], len(sample.features)
    if features > 1 and r.random() < 0.1:
        fewer = [n for n in range(1, len(offsets) + 1) if n == len(offsets) or (len(offsets) - n - 1) % features]
        return replace(call, cut=r.choice(fewer))
    of_offsets, of_ids = [], []
    names = r.choice(["ids", "ids", "offsets", "offsets", "ids offsets"]).split()
    for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
        if r.choice(names) == "offsets":
            i = r.choice([0, len(offsets) - 1, *(r.randrange(len(offsets)) for _ in range(4))])
            near = [-1, 1, ids + 1, ids, offsets[max(i - 1, 0)] - 1, offsets[min(i + 1, len(offsets) - 1)] + 1]
            of_offsets.append((i, _number(r, sample.offsets, near)))
        elif ids and sample.bounds_check != "none":
            limits = call.encoded.case.num_ids
            near = [-1, *(n + more for n in limits if n is not None for more in (0, 1))]
            of_ids.append((r.randrange(ids), _number(r, sample.ids, near)))
    return replace(call, offsets=of_offsets, values=of_ids)


def check(call: BadCall, backend: Backend) -> None:
    """Checks one call on one backend; a failure prints the call."""
    try:
        if call.expected_error is None:
            check_right(call, backend)
        elif call.expected_error.status_code is None or backend.kind == "cpu":
            check_raises(call, backend)
        else:
            check_status(call, backend)
    except Exception as error:
        raise AssertionError(f"{backend.name}: {call}: {call.expected_error}: {error!r}") from error


def check_right(call: BadCall, backend: Backend) -> None:
    """A valid call has the reference's result without ignored ids."""
    here = only_backend(backend)
    check_lookups(call.encoded, here, **call.options)
    check_gradients(call.encoded.case, here, **call.options)
    check_update(call.encoded, call.sample.optimizer, call.sample.rounding, here, **call.options)


def only_backend(backend: Backend) -> Backends:
    return lambda: iter([backend])


def error_of(function: Callable[[], object]) -> Exception | None:
    """Returns the error that a call raises."""
    try:
        function()
    except (IndexError, ValueError, RuntimeError) as error:
        return error
    return None


def check_raises(call: BadCall, backend: Backend) -> None:
    """Every op raises the expected error and changes nothing."""
    before = [t.clone() for t in call.before()]
    for run, names in ((call.forward, FORWARDS), (call.backward, BACKWARDS)):
        for op in names:
            error = error_of(lambda run=run, op=op: run(op, backend.ops))
            if op == "per_sample_weights" and call.expected_error.error is IndexError:  # the forward raises this one
                assert error is None, error
                continue
            assert type(error) is call.expected_error.error, (op, error)
            assert str(error).startswith(call.expected_error.message), (op, error)
    assert all(map(same_bits, call.before(), before)), "an op that raised has changed something"


def check_status(call: BadCall, backend: Backend) -> None:
    """A device does not raise: the status has the error, no update happens, every result is finite."""
    expected_error, ops = call.expected_error, backend.ops
    for op in FORWARDS:
        output, status = call.forward(op, ops)
        assert status[0].item() == expected_error.status_code, (op, status)
        assert expected_error.error is ValueError or status.tolist() == expected_status(call.encoded.case), (op, status)
        assert output.isfinite().all(), op
    assert all(map(same_bits, call.backward("fused_", ops), call.before())), "the update changed something"
    assert call.backward("per_sample_weights", ops).isfinite().all()
    if expected_error.error is IndexError:  # gradients have no status; they ignore the id
        check_gradients(call.encoded.case, only_backend(backend), **call.options)
        return
    assert not call.backward("dense", ops).any(), "a dense gradient of bad offsets"
    error = error_of(lambda: call.backward("sparse", ops))  # the host must know the result's size
    assert "the layout, the offsets or inverse are not valid" in str(error), error
