"""What the ops of embedding_bag say to wrong formats, noise and rows of bytes; and nothing changes."""

from __future__ import annotations

import re

import pytest
import torch
from backends import emulated
from embedding_bag_cases import make_case
from embedding_bag_format_cases import EncodedCase
from layout_calls import OPS
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables import BAG_FORMATS
from rec_kernels.testing import same_bits

ops = OPS
TAKE_BYTES = [
    "embedding_bag",
    "embedding_bag_fused",
    "embedding_bag_backward_fused_",
    "embedding_bag_backward_per_sample_weights",
]
TAKE_FLOATS = ["embedding_bag_tables", "embedding_bag_backward_dense", "embedding_bag_backward_sparse"]
UPDATE = "embedding_bag_backward_fused_"
NAMES = ", ".join(BAG_FORMATS)
FORMATS = ["int8", "mx6"]


def arguments() -> dict[str, object]:
    """A good call by argument name: int8 rows of 5 x 16, mx6 rows of 3 x 32, the first table for two features."""
    case = make_case([(5, 16), (3, 32)], [0, 1, 0], [1, 2, 0, 1, 2, 1], weighted=True, seed=1)
    encoded = EncodedCase(case, FORMATS, gaps=[0, 8])  # at 0 and 128, 200 bytes and one behind
    given = {
        "weights": encoded.flat,
        "weights_shape": [len(encoded.flat)],
        "tables": [torch.zeros(5, 16), torch.zeros(3, 32)],
        "values": case.values,
        "offsets": case.offsets,
        "per_sample_weights": case.per_sample_weights,
        "grad": case.grad,
        "sum": torch.ones(9),
        "step": torch.tensor(3),
        "lr": torch.tensor(0.1),
        "token": torch.empty(0, requires_grad=True),
        "rounding": "stochastic",
    }
    return encoded.layout | encoded.noise | given


def one_table() -> dict[str, object]:
    """A good call without a layout: int8 rows of 4 x 16."""
    rows = rk.quantize_rows(torch.randn(4, 16), "int8")
    bags = {"values": torch.tensor([0, 3, 1]), "offsets": torch.tensor([0, 2, 3])}
    state = {"sum": torch.ones(4), "step": torch.tensor(3), "lr": torch.tensor(0.1), "token": torch.empty(0)}
    return bags | state | {"weights": rows, "formats": ["int8"], "embedding_dim": 16, "grad": torch.ones(2, 16)}


def call(op: str, given: dict[str, object], namespace=ops) -> object:
    """Calls an op with those of the arguments that its schema has."""
    names = [a.name for a in getattr(ops, op).default._schema.arguments]
    return getattr(namespace, op)(**{name: given[name] for name in names if name in given})


def takers(name: str) -> list[str]:
    """The ops that take bytes and have an argument."""
    return [op for op in TAKE_BYTES if name in [a.name for a in getattr(ops, op).default._schema.arguments]]


def check_refused(op: str, given: dict[str, object], message: str, namespace=ops) -> None:
    """ValueError with the message, and nothing that an op could write has changed."""
    written = [given[name] for name in ("weights", "sum", "step")]
    before = [None if t.is_meta else t.clone() for t in written]
    with pytest.raises((ValueError, RuntimeError) if namespace is not ops else ValueError, match=re.escape(message)):
        call(op, given, namespace)
    assert all(b is None or same_bits(t, b) for t, b in zip(written, before, strict=True))


def test_the_calls_to_be_spoilt_are_good() -> None:
    """The ops accept the arguments that the tests below change."""
    for op in TAKE_BYTES:
        call(op, arguments())
        call(op, one_table())
        call(op, one_table(), emulated())


def strided(t: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return torch.stack([t, t], 1)[:, 0]


UNKNOWN = f"formats[1]: format must be one of {', '.join(rk.ROW_FORMATS)}; got "
ON_EVERY_BACKEND = [
    ("formats", lambda _: ["int8", "int9"], UNKNOWN + '"int9"'),
    ("formats", lambda _: ["int8", "INT8"], UNKNOWN + '"INT8"'),
    ("formats", lambda _: ["int8", "int8"], 'formats must differ, got "int8" twice'),
    ("formats", lambda _: ["mx6", "int8", "mx6"], 'formats must differ, got "mx6" twice'),
    ("formats", lambda _: [], "formats must have at least one element"),
    ("formats", lambda _: None, "weights must be float32, got uint8"),
    ("format_of", lambda _: None, "format_of is missing: formats has 2 elements, so every feature's must be named"),
    ("format_of", lambda t: t.int(), "format_of must be int64, got int32"),
    ("format_of", lambda t: t[1:], "format_of must have shape [3], got [2]"),
    ("format_of", strided, "format_of must be contiguous"),
    ("embedding_dim", lambda _: 16, "embedding_dim must be given for one table of bytes and nothing else, got 16"),
    ("weights", lambda t: t.float(), "weights must be uint8, got float32"),
    ("weights", lambda t: t.char(), "weights must be uint8, got int8"),
    ("weights", lambda t: t[None], "weights must have 1 dimension(s), got shape [1, 201]"),
    ("weights", strided, "weights must be contiguous"),
    ("table_ids", lambda t: t.int(), "table_ids must be int64, got int32"),
    ("table_ids", lambda t: t[:2], "table_ids must have shape [3], got [2]"),
    ("table_ids", strided, "table_ids must be contiguous"),
    ("seed", lambda t: t.int(), "seed must be int64, got int32"),
    ("seed", lambda t: t.double(), "seed must be int64, got float64"),
    ("seed", lambda t: t[None], "seed must have 0 dimension(s), got shape [1]"),
    ("rounding", lambda _: "up", 'rounding must be "nearest" or "stochastic", got "up"'),
]
NEITHER = [f for f in rk.ROW_FORMATS if f not in BAG_FORMATS]


@pytest.mark.parametrize(("name", "change", "message"), ON_EVERY_BACKEND)
def test_bad_argument(name: str, change, message: str) -> None:
    """ValueError from every op that takes the argument, on every kind of backend."""
    assert takers(name), name
    for op in takers(name):
        for namespace in (ops, emulated()):
            given = arguments()
            check_refused(op, given | {name: change(given.get(name))}, message, namespace)


@pytest.mark.parametrize("name", ["format_of", "table_ids", "seed"])
def test_other_device(name: str) -> None:
    """Not answered with memory that nobody wrote."""
    for op in takers(name):
        given = arguments()
        check_refused(op, given | {name: given[name].to("meta")}, "same device")


@pytest.mark.parametrize("format", NEITHER)
def test_formats_that_tables_cannot_have(format: str) -> None:
    """They are row formats, but not of tables; the message has those that are."""
    message = f'formats: tables cannot have format "{format}"; it must be one of {NAMES}'
    for op in TAKE_BYTES:
        for namespace in (ops, emulated()):
            check_refused(op, arguments() | {"formats": ["int8", format]}, message, namespace)
            check_refused(op, one_table() | {"formats": [format]}, message, namespace)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("format_of", [0, 2, 0], "format_of[1] = 2 must be in [0, 2), the number of formats"),
        ("format_of", [0, 1, -1], "format_of[2] = -1 must be in [0, 2), the number of formats"),
        ("weight_offsets", [0, 130, 0], "table of feature 1 (3 x 32 at weight_offsets[1] = 130) does not fit in 201"),
        ("weight_offsets", [0, 202, 0], "weight_offsets[1] = 202 must be in [0, 201], the number of weights"),
        ("format_of", [0, 0, 0], "table of feature 1 (3 x 32 at weight_offsets[1] = 128) does not fit in 201 weights"),
        ("embedding_dims", [16, 2**31, 16], f"embedding_dims[1] = {2**31} must be in [1, 2^31)"),
    ],
)
def test_bad_layout(name: str, change: list[int], message: str) -> None:
    """What only the CPU reads before it answers; a device notes it (test_embedding_bag_formats.py)."""
    for op in TAKE_BYTES:
        check_refused(op, arguments() | {name: torch.tensor(change)}, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_ids": [0, 65536, 0]}, "table_ids[1] = 65536 must be in [0, 65536)"),
        ({"table_ids": [0, 0, -1]}, "table_ids[2] = -1 must be in [0, 65536)"),
        ({"weight_offsets": [0, 119, 0]}, "weight_offsets[1] = 119 lies in the table of feature"),
        ({"format_of": [1, 1, 0], "weight_offsets": [0, 120, 0]}, "lies in the table of feature"),
    ],
)
def test_bad_update(changes: dict[str, list[int]], message: str) -> None:
    """Rows that two tables have in common, also in two formats, and noise that no counter has room for."""
    given = arguments() | {name: torch.tensor(numbers) for name, numbers in changes.items()}
    check_refused(UPDATE, given, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_dim": 0}, "embedding_dim must be given for one table of bytes and nothing else, got 0"),
        ({"embedding_dim": -1}, "embedding_dim = -1 must be in [1, 2^31)"),
        ({"embedding_dim": 2**31}, f"embedding_dim = {2**31} must be in [1, 2^31)"),
        ({"embedding_dim": 17}, 'weights must have rows of 25 bytes for format "int8" and embedding_dim = 17, got 24'),
        ({"formats": ["mx4"]}, 'weights must have rows of 8 bytes for format "mx4" and embedding_dim = 16, got 24'),
        ({"formats": ["fp32"]}, 'weights must have rows of 64 bytes for format "fp32" and embedding_dim = 16, got 24'),
        ({"formats": ["int8", "mx4"]}, "format_of is missing: formats has 2 elements"),
        ({"formats": None}, "weights must be float32, got uint8"),
        (
            {"formats": None, "weights": torch.ones(4, 16)},
            "formats is missing: format_of and embedding_dim mean",
        ),
        ({"format_of": torch.tensor([0])}, "embedding_dims is missing: other layout arguments mean nothing without it"),
    ],
)
def test_bad_table(changes: dict[str, object], message: str) -> None:
    """One table without a layout: D must be given, and give the width that the rows have."""
    for op in TAKE_BYTES:
        for namespace in (ops, emulated()):
            check_refused(op, one_table() | changes, message, namespace)


def test_table_ids_without_layout() -> None:
    """They are of features of a layout."""
    message = "embedding_dims is missing: table_ids mean nothing without it"
    for op in takers("table_ids"):
        for namespace in (ops, emulated()):
            check_refused(op, one_table() | {"table_ids": torch.tensor([1])}, message, namespace)


@pytest.mark.parametrize("op", TAKE_FLOATS)
def test_ops_for_floats_refuse_formats(op: str) -> None:
    """Also fp32 in bytes: what has a gradient are floats."""
    message = "formats must be None: " + (
        "embedding_bag_tables is for float32 tables"
        if op == "embedding_bag_tables"
        else "rows of other formats than float32 have no gradient that torch could take"
    )
    floats = torch.zeros(176)
    for formats in (FORMATS, ["fp32"]):
        given = arguments() | {"formats": formats, "weights": floats, "weights_shape": [176]}
        for namespace in (ops, emulated()):
            check_refused(op, given, message, namespace)


def test_gradient_of_bytes() -> None:
    """A sparse gradient of rows that are not floats does not exist; torch itself has none of bytes."""
    rows, options = one_table()["weights"], {"formats": ["int8"], "embedding_dim": 16}
    output, _ = ops.embedding_bag(rows, torch.tensor([0]), torch.tensor([0, 1]), **options, sparse=True)
    assert not output.requires_grad
    with pytest.raises(RuntimeError, match=r"[Oo]nly [Tt]ensors of floating point"):
        rows.requires_grad_()
