"""Invalid formats, noise and byte rows are rejected by the embedding_bag ops; nothing changes."""

from __future__ import annotations

import re

import pytest
import torch
from backends import emulated
from embedding_bag_cases import make_case
from embedding_bag_format_cases import EncodedCase
from layout_calls import OPS
from test_embedding_bag_bad_input import arguments_of, call
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.ops.autograd import signature_of
from rec_kernels.testing import same_bits

ops = OPS
TAKE_BYTES = [
    "embedding_bag",
    "embedding_bag_fused",
    "embedding_bag_backward_fused_",
    "embedding_bag_backward_per_sample_weights",
]
ONE_TABLE = ["embedding_bag", "embedding_bag_backward_per_sample_weights"]
TAKE_FLOATS = ["embedding_bag_tables", "embedding_bag_backward_dense", "embedding_bag_backward_sparse"]
NAMES = ", ".join(BAG_FORMATS)
FORMATS = ["int8", "mx6"]


def arguments() -> dict[str, object]:
    """Valid arguments by name: int8 rows of 5 x 16, mx6 rows of 3 x 32, the first table with two features."""
    case = make_case([(5, 16), (3, 32)], [0, 1, 0], [1, 2, 0, 1, 2, 1], weighted=True, seed=1)
    encoded = EncodedCase(case, FORMATS, gaps=[0, 8])  # at 0 and 128; 200 bytes and one more
    tables = {"weights": encoded.flat, "tables": [torch.zeros(5, 16), torch.zeros(3, 32)]}
    return arguments_of(case) | encoded.layout | encoded.noise | tables | {"rounding": "stochastic"}


def one_table() -> dict[str, object]:
    """Valid arguments without a layout: int8 rows of 4 x 16."""
    rows = rk.quantize_rows(torch.randn(4, 16), "int8")
    bags = {"values": torch.tensor([0, 3, 1]), "offsets": torch.tensor([0, 2, 3])}
    state = {"sum": torch.ones(4), "step": torch.tensor(3), "lr": torch.tensor(0.1), "token": torch.empty(0)}
    return bags | state | {"weights": rows, "formats": ["int8"], "embedding_dim": 16, "grad": torch.ones(2, 16)}


def ops_with(name: str) -> list[str]:
    """The ops that accept bytes and have an argument."""
    return [op for op in TAKE_BYTES if name in signature_of(f"{op}.layout")]


def check_refused(op: str, given: dict[str, object], message: str, namespace=ops) -> None:
    """Asserts ValueError with the message, and that no output argument changed."""
    written = [given[name] for name in ("weights", "sum", "step")]
    before = [None if t.is_meta else t.clone() for t in written]
    with pytest.raises((ValueError, RuntimeError) if namespace is not ops else ValueError, match=re.escape(message)):
        call(op, given, namespace)
    assert all(b is None or same_bits(t, b) for t, b in zip(written, before, strict=True))


def test_the_calls_to_be_spoilt_are_good() -> None:
    """The ops accept the arguments that the tests below change."""
    for namespace in (ops, emulated()):
        for op in TAKE_BYTES:
            call(op, arguments(), namespace)
        for op in ONE_TABLE:
            call(op, one_table(), namespace)


def strided(t: Tensor) -> Tensor:
    """A non-contiguous tensor with equal values."""
    return torch.stack([t, t], 1)[:, 0]


ON_EVERY_BACKEND = [
    ("weights", lambda t: t.float(), "weights must be uint8, got float32"),
    ("weights", lambda t: t.char(), "weights must be uint8, got int8"),
    ("weights", lambda t: t[None], "weights must have 1 dimension(s), got shape [1, 201]"),
    ("weights", strided, "weights must be contiguous"),
    ("seed", lambda t: t.int(), "seed must be int64, got int32"),
    ("seed", lambda t: t.double(), "seed must be int64, got float64"),
    ("seed", lambda t: t[None], "seed must have 0 dimension(s), got shape [1]"),
    ("rounding", lambda _: "up", 'rounding must be "nearest" or "stochastic", got "up"'),
]
NEITHER = [f for f in rk.ROW_FORMATS if f not in BAG_FORMATS]


@pytest.mark.parametrize(("name", "change", "message"), ON_EVERY_BACKEND)
def test_bad_argument(name: str, change, message: str) -> None:
    """Every op with the argument raises ValueError on every kind of backend."""
    assert ops_with(name), name
    for op in ops_with(name):
        for namespace in (ops, emulated()):
            given = arguments()
            check_refused(op, given | {name: change(given.get(name))}, message, namespace)


def test_other_device() -> None:
    """Tensors on another device are rejected instead of returning uninitialized memory."""
    for op in ops_with("seed"):
        given = arguments()
        check_refused(op, given | {"seed": given["seed"].to("meta")}, "same device")


@pytest.mark.parametrize("format", [*NEITHER, "int9", "INT8"])
def test_formats_that_tables_cannot_have(format: str) -> None:
    """The error lists the formats of tables, also for a format of other rows."""
    message = f'formats[1] = "{format}" must be one of {NAMES}'
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.table_layout([5, 3], [16, 32], formats=["int8", format])
    for op in ONE_TABLE:
        for namespace in (ops, emulated()):
            check_refused(op, one_table() | {"formats": [format]}, f'"{format}"', namespace)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_of": [0]}, "formats must have an element for each of the 2 parts, got 1"),
        ({"embedding_dims": [16, 2**31]}, f"embedding_dims[1] = {2**31} must be in [1, 2^31)"),
        ({"table_ids": [0, 65536]}, "table_ids[1] = 65536 must be in [0, 65536)"),
        ({"table_ids": [0, -1]}, "table_ids[1] = -1 must be in [0, 65536)"),
        ({"table_ids": [0]}, "table_ids must have an element for each of the 2 parts, got 1"),
        ({"weight_offsets": [0, 119]}, "weight_offsets[1] = 119 is inside the table of feature 0"),
        ({"formats": ["mx6", "int8"], "weight_offsets": [0, 59]}, "[1] = 59 is inside the table of feature 0"),
        ({"weight_offsets": [-1, 120]}, "weight_offsets[0] = -1 must be in [0, 2^62)"),
        ({"formats": ["int8", "fp32"], "weight_offsets": [0, 121]}, "[1] = 121 must be a multiple of 4 for format"),
    ],
)
def test_bad_layout(changes: dict[str, list], message: str) -> None:
    """``table_layout`` rejects bad layouts; int8 rows of 5 x 16 take 120 bytes, mx6 rows 60."""
    given = {"embedding_dims": [16, 32], "formats": FORMATS} | changes
    given["formats"] = [given["formats"][i] for i in given.pop("format_of", [0, 1])]
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.table_layout([5, 3], given.pop("embedding_dims"), **given)


def test_table_that_ends_behind_the_weights() -> None:
    """An op, not the layout, rejects it; on a device, status reports it (test_embedding_bag_formats.py)."""
    for op in TAKE_BYTES:
        changes = {"weight_offsets": torch.tensor([0, 130, 0])}
        check_refused(
            op,
            arguments() | changes,
            "layout[1]: a table of 3 x 32 (mx6) at byte 130 does not fit in weights of 201 bytes",
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_dim": 0}, "format and embedding_dim must be given together"),
        ({"embedding_dim": -1}, "embedding_dim = -1 must be in [1, 2^31)"),
        ({"embedding_dim": 2**31}, f"embedding_dim = {2**31} must be in [1, 2^31)"),
        ({"embedding_dim": 17}, 'weights must have rows of 25 bytes for format "int8" and embedding_dim = 17, got 24'),
        ({"formats": ["mx4"]}, 'weights must have rows of 8 bytes for format "mx4" and embedding_dim = 16, got 24'),
        ({"formats": ["fp32"]}, 'weights must have rows of 64 bytes for format "fp32" and embedding_dim = 16, got 24'),
        ({"formats": None}, "weights must be float32, float16 or bfloat16, got uint8"),
    ],
)
def test_bad_table(changes: dict[str, object], message: str) -> None:
    """One table without a layout needs a D that matches the width of the rows."""
    for op in ONE_TABLE:
        for namespace in (ops, emulated()):
            check_refused(op, one_table() | changes, message, namespace)


@pytest.mark.parametrize("op", TAKE_FLOATS)
def test_ops_for_floats_refuse_formats(op: str) -> None:
    """Differentiable ops take floats only, in bytes if their layout says so."""
    messages = ["weights must have rows of fp32, fp16 or bf16 only", "weights must be uint8, got float32"]
    for formats, message in zip((FORMATS, ["fp32"]), messages, strict=True):
        given = arguments() | {"formats": formats, "format_of": torch.zeros(3, dtype=torch.int64)}
        given |= {"weight_offsets": torch.tensor([0, 512, 0]), "weights": torch.zeros(176), "weights_shape": [176]}
        for namespace in (ops, emulated()):
            check_refused(op, given, message, namespace)


def test_gradient_of_bytes() -> None:
    """Quantized rows have no sparse gradient; torch itself has none of bytes."""
    rows, options = one_table()["weights"], {"formats": ["int8"], "embedding_dim": 16}
    output, _ = ops.embedding_bag(rows, torch.tensor([0]), torch.tensor([0, 1]), **options, sparse=True)
    assert not output.requires_grad
    with pytest.raises(RuntimeError, match=r"[Oo]nly [Tt]ensors of floating point"):
        rows.requires_grad_()
