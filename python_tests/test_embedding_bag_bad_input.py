"""Invalid arguments of embedding_bag: errors have name, value, place and allowed range; nothing changes."""

from __future__ import annotations

import re

import pytest
import torch
from backends import emulated
from embedding_bag_cases import Case, make_case
from layout_calls import LAYOUT_NAMES, OPS, ListOps, as_call, make_layout

from rec_kernels.ops.autograd import signature_of
from rec_kernels.testing import same_bits, use_threads

ops = OPS
FAMILY = [
    "embedding_bag",
    "embedding_bag_tables",
    "embedding_bag_fused",
    "embedding_bag_backward_fused_",
    "embedding_bag_backward_dense",
    "embedding_bag_backward_sparse",
    "embedding_bag_backward_per_sample_weights",
]
INT64_MAX = torch.iinfo(torch.int64).max
LAYOUT = ["weight_offsets", "row_offsets", "num_embeddings", "embedding_dims"]


WRITTEN = ("weights", "sum", "step", "exp_avg", "exp_avg_sq", "beta_powers")


def arguments() -> dict[str, object]:
    """Valid arguments of the whole family, by name: features of 5, 3 and 5 rows, two bags each, 7 ids."""
    case = make_case([(5, 16), (3, 32)], [0, 1, 0], [1, 2, 0, 1, 2, 1], weighted=True, seed=1)
    case.values.copy_(torch.tensor([4, 0, 1, 2, 3, 3, 4]))
    # embedding_bag_tables takes no unused rows
    return arguments_of(case) | {"row_offsets": torch.tensor([0, 5, 0]), "sum": torch.ones(8)}


def arguments_of(case: Case) -> dict[str, object]:
    """The arguments of the whole family for a case."""
    return case.layout | {
        "padding_idx": -1,
        "weights": case.weights,
        "tables": case.split(case.weights),
        "values": case.values,
        "offsets": case.offsets,
        "per_sample_weights": case.per_sample_weights,
        "grad": case.grad,
        "sum": torch.ones(len(case.sum)),
        "step": torch.tensor(3),
        "lr": torch.tensor(0.1),
        "token": torch.empty(0, requires_grad=True),
        "status": torch.tensor([INT64_MAX, 0]),
        "grad_scale": torch.tensor(1.0),
        "found_inf": torch.tensor(0.0),
    }


def argument_names(op: str) -> list[str]:
    """Argument names of an op with a layout."""
    return list(signature_of(f"{op}.layout"))


def call(op: str, given: dict[str, object], namespace: ListOps = ops) -> object:
    """Calls an op with the arguments in its schema, and the layout of the others."""
    name, arguments = as_call(op, given)
    overload = getattr(getattr(namespace.ops, op), name.partition(".")[2])
    return overload(**{n: a for n, a in arguments.items() if n in signature_of(name)})


def with_layout(given: dict[str, object]) -> dict[str, object]:
    """The arguments with a copy of their layout, to be forged."""
    return {n: a for n, a in given.items() if n not in LAYOUT_NAMES} | make_layout(given)._asdict()


def ops_with(name: str) -> list[str]:
    """The ops with an argument, directly or in their layout."""
    return [op for op in FAMILY if name in LAYOUT_NAMES or name in argument_names(op)]


def check_refused(
    op: str, changes: dict[str, object], error: type[Exception], message: str, namespace: ListOps = ops
) -> None:
    """Asserts that the call raises exactly the message, and that no output argument changed."""
    given = arguments() | changes
    written = {name: given[name] for name in WRITTEN if given.get(name) is not None}
    before = {name: t.clone() for name, t in written.items() if not t.is_meta}
    with pytest.raises(error, match=re.escape(message)):
        call(op, given, namespace)
    assert all(same_bits(written[name], t) for name, t in before.items())


def test_the_call_to_be_spoilt_is_good() -> None:
    """Every op accepts the arguments that the tests below change."""
    for op in FAMILY:
        call(op, arguments())


def _ids(position: int, value: int) -> dict[str, object]:
    values = arguments()["values"].clone()
    values[position] = value
    return {"values": values}


@pytest.mark.parametrize(
    ("position", "value", "place"),
    [
        (0, 5, "values[0] = 5 (feature 0, bag 0) is out of range: ids of this feature must be in [0, 5)"),
        (2, -1, "values[2] = -1 (feature 0, bag 1) is out of range: ids of this feature must be in [0, 5)"),
        (3, 3, "values[3] = 3 (feature 1, bag 1) is out of range: ids of this feature must be in [0, 3)"),
        (6, 2**40, f"values[6] = {2**40} (feature 2, bag 1) is out of range: ids of this feature must be in [0, 5)"),
        (5, -(2**63), f"values[5] = {-(2**63)} (feature 2, bag 0) is out of range"),
    ],
)
def test_id_out_of_range(position: int, value: int, place: str) -> None:
    """Forward and backward raise IndexError with the id's position, value, feature, bag and range."""
    for op in ops_with("bounds_check"):
        check_refused(op, _ids(position, value), IndexError, place)
    factors = "embedding_bag_backward_per_sample_weights"  # has no bounds_check: the forward raises
    assert call(factors, arguments() | _ids(position, value))[position] == 0


def test_first_bad_id_is_named() -> None:
    """The error names the bad id with the smallest position, however the work is split."""
    count = 40_000
    values = torch.zeros(count, dtype=torch.int64)
    values[[31_234, 7_777, 39_999]] = torch.tensor([-5, 9, 77])
    offsets = torch.arange(0, count + 1, 4)
    changes = {"values": values, "offsets": offsets, "weights": torch.zeros(9, 20)}
    for threads in (1, 3):
        with (
            use_threads(threads),
            pytest.raises(IndexError, match=r"values\[7777\] = 9 .feature 0, bag 1944"),
        ):
            ops.embedding_bag(**changes)
        with (
            use_threads(threads),
            pytest.raises(IndexError, match=r"values\[7777\] = 9 .feature 0, bag 1944"),
        ):
            ops.embedding_bag_backward_dense(torch.ones(len(offsets) - 1, 20), [9, 20], values, offsets)


@pytest.mark.parametrize("op", ["embedding_bag", "embedding_bag_backward_fused_", "embedding_bag_backward_sparse"])
@pytest.mark.parametrize(
    ("offsets", "place"),
    [
        ([0, 1, 3, 2, 4, 6, 7], "offsets[3] = 2 (feature 1, bag 0) is below the offset before it, 3"),
        ([0, 1, 3, 3, 4, 6, 8], "offsets[6] = 8 (feature 2, bag 1) must be in [0, 7], the number of values"),
        ([0, 99, 3, 3, 4, 6, 7], "offsets[1] = 99 (feature 0, bag 0) must be in [0, 7], the number of values"),
        ([-1, 1, 3, 3, 4, 6, 7], "offsets[0] = -1 (feature 0, bag 0) must be in [0, 7], the number of values"),
        ([8, 8, 8, 8, 8, 8, 8], "offsets[0] = 8 (feature 0, bag 0) must be in [0, 7], the number of values"),
        ([0, 1, -3, 3, 4, 6, 7], "offsets[2] = -3 (feature 0, bag 1) is below the offset before it, 1"),
    ],
)
@pytest.mark.parametrize("bounds_check", ["error", "ignore", "none"])
def test_bad_offsets(op: str, offsets: list[int], place: str, bounds_check: str) -> None:
    """Offsets are checked in every mode: ids outside of values are never read."""
    for dtype in (torch.int32, torch.int64):
        changes = {"offsets": torch.tensor(offsets, dtype=dtype), "bounds_check": bounds_check}
        check_refused(op, changes, ValueError, place)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        (
            {2500: 80_000, 2501: 80_000},
            "offsets[2502] = 10008 (feature 0, bag 2501) is below the offset before it, 80000",
        ),
        ({15_000: 80_000}, "offsets[15001] = 60004 (feature 1, bag 5000) is below the offset before it, 80000"),
        ({12_500: 39_000}, "offsets[12500] = 39000 (feature 1, bag 2499) is below the offset before it, 49996"),
    ],
)
def test_offsets_lead_out_of_a_feature(changes: dict[int, int], place: str) -> None:
    """Offsets that decrease between features or threads raise: the backward writes where they point."""
    values, offsets = torch.zeros(80_000, dtype=torch.int64), torch.arange(0, 80_001, 4)
    for i, offset in changes.items():
        offsets[i] = offset
    layout = dict(zip(LAYOUT, torch.tensor([[0, 16], [0, 4], [4, 4], [4, 4]]), strict=True))
    options = {"output_dim": 8, "bounds_check": "ignore"}
    with pytest.raises(ValueError, match=re.escape(place)):
        ops.embedding_bag_backward_dense(torch.ones(10_000, 8), [32], values, offsets, **layout, **options)


def test_first_bad_offset_is_named() -> None:
    """The error names the first bad offset, however the work is split."""
    values, offsets = torch.zeros(40_000, dtype=torch.int64), torch.arange(0, 40_001, 4)
    offsets[[9_000, 4_321, 10_000]] = torch.tensor([5, 3, -1])
    for threads in (1, 3):
        with (
            use_threads(threads),
            pytest.raises(ValueError, match=r"offsets\[4321\] = 3 .feature 0, bag 4320"),
        ):
            ops.embedding_bag(torch.zeros(9, 20), values, offsets)


def test_ignored_ids() -> None:
    """Ignored ids are left out of sums, counts and gradients, counted in status, and do not train row 0."""
    values, offsets = torch.tensor([1, 7, 2, -1, 9, 3]), torch.tensor([0, 3, 5, 6])
    table, kept = torch.randn(4, 130), (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3]))
    for pooling in ("sum", "mean"):
        options = {"pooling": pooling, "bounds_check": "ignore"}
        output, status = ops.embedding_bag(table, values, offsets, **options)
        assert same_bits(output, ops.embedding_bag(table, *kept, pooling=pooling)[0])
        assert status.tolist() == [1, 3]
        grad = torch.randn(3, 130)
        dense = ops.embedding_bag_backward_dense(grad, [4, 130], values, offsets, **options)
        assert same_bits(dense, ops.embedding_bag_backward_dense(grad, [4, 130], *kept, pooling=pooling))
        factors = ops.embedding_bag_backward_per_sample_weights(grad, table, values, offsets, **options)
        assert not factors[[1, 3, 4]].any()
        results = []
        for jagged in ((values, offsets), kept):
            state = (table.clone(), torch.ones(4), torch.tensor(0))
            ops.embedding_bag_backward_fused_(*state, torch.tensor(0.1), grad, *jagged, **options, status=status)
            results.append(state)
        assert all(map(same_bits, *results))
        assert same_bits(results[0][0][0], table[0])


def test_unchecked_ids() -> None:
    """bounds_check="none" has equal results for valid ids, and an empty status."""
    given = arguments()
    for op in FAMILY:
        results = []
        for mode in ("error", "none"):
            mine = {name: t.clone() if name in ("weights", "sum", "step") else t for name, t in given.items()}
            found = call(op, mine | {"bounds_check": mode})
            found = (found,) if isinstance(found, torch.Tensor) else (found or ())
            results.append([*found, mine["weights"], mine["sum"], mine["step"]])
        assert all(map(same_bits, *results)), op


BAD_ARGUMENTS = [
    ("values", lambda t: t.float(), "values must be int32 or int64, got float32"),
    ("values", lambda t: t[None], "values must have 1 dimension(s), got shape [1, 7]"),
    ("offsets", lambda t: t.float(), "offsets must be int32 or int64, got float32"),
    ("offsets", lambda t: t[:, None], "offsets must have 1 dimension(s), got shape [7, 1]"),
    ("offsets", lambda t: t[:0], "offsets must have num_features * batch + 1 elements, got none"),
    ("offsets", lambda t: t[:-1], "offsets must have num_features * batch + 1 elements, got 6 for 3 features"),
    ("per_sample_weights", lambda t: t[1:], "per_sample_weights must have shape [7], got [6]"),
    ("per_sample_weights", lambda t: t.double(), "per_sample_weights must be float32, got float64"),
    ("weights", lambda t: t.half(), "weights must be float32, got float16"),
    ("weights", lambda t: t[None], "weights must have 1 dimension(s), got shape [1, 176]"),
    ("weights", lambda t: torch.stack([t, t], 1)[:, 0], "weights must be contiguous"),
    ("tables", lambda t: t[:1], "weights must have 80 elements, the tables one after the other"),
    ("tables", lambda t: t[::-1], "layout[0]: weight_offset 0 and row_offset 0 (5 x 16, fp32) are the place of none"),
    ("tables", lambda t: [t[0].reshape(-1), t[1]], "tables[0] must have 2 dimension(s), got shape [80]"),
    ("tables", lambda t: [t[0], t[1].double()], "tables[1] must be float32, got float64"),
    ("embedding_dims", lambda t: torch.tensor([0, 32, 16]), "embedding_dims[0] = 0 must be in [1, 2^31)"),
    ("embedding_dims", lambda t: torch.tensor([16, 2**31, 16]), f"embedding_dims[1] = {2**31} must be in [1, 2^31)"),
    ("num_embeddings", lambda t: torch.tensor([5, -1, 5]), "num_embeddings[1] = -1 must not be negative"),
    ("row_offsets", lambda t: torch.tensor([0, -1, 0]), "row_offsets[1] = -1 must be in [0, 2^63 - num_embeddings[1])"),
    ("row_offsets", lambda t: torch.tensor([0, INT64_MAX, 0]), f"row_offsets[1] = {INT64_MAX} must be in [0, 2^63"),
    ("weight_offsets", lambda t: torch.tensor([0, -1, 0]), "weight_offsets[1] = -1 must be in [0, 2^60)"),
    ("weight_offsets", lambda t: torch.tensor([0, 177, 0]), "layout[1]: a table of 3 x 32 (fp32) at byte "),
    ("weight_offsets", lambda t: torch.tensor([0, 81, 0]), "layout[1]: a table of 3 x 32 (fp32) at byte "),
    ("weight_offsets", lambda t: t[1:], "weight_offsets must have an element for each of the 3 parts, got 2"),
    ("num_rows", lambda n: 7, "num_rows = 7 must be at least 8, the maximum of row_offsets + num_embeddings"),
    ("mean", lambda t: t[1:], "mean must have an element for each of the 3 features, got 2"),
    ("bounds_check", lambda _: "warn", 'bounds_check must be "error", "ignore" or "none", got "warn"'),
    ("grad", lambda t: t[:, 1:], "grad must have shape [2, 64], got [2, 63]"),
    ("grad", lambda t: t[:1], "grad must have shape [2, 64], got [1, 64]"),
    ("grad", lambda t: t.bfloat16(), "grad must be float32, got bfloat16"),
    (
        "optimizer",
        lambda _: "adamw",
        'optimizer must be one of sgd, rowwise_adagrad, adagrad, adam, rowwise_adam, lamb, got "adamw"',
    ),
    ("optimizer", lambda _: "sgd", 'sum must not be given for optimizer "sgd"'),
    ("optimizer", lambda _: "adam", 'sum must not be given for optimizer "adam"'),
    ("sum", lambda _: None, 'sum must be given for optimizer "rowwise_adagrad"'),
    ("exp_avg", lambda _: torch.ones(176), 'exp_avg must not be given for optimizer "rowwise_adagrad"'),
    ("eps", lambda _: -1.0, "eps = -1 must be at least 0, and finite as float32"),
    ("eps", lambda _: float("nan"), "eps = nan must be at least 0"),
    ("eps", lambda _: 1e39, "eps = 1e+39 must be at least 0, and finite as float32"),
    ("beta1", lambda _: 1.0, "beta1 and beta2 must be in [0, 1) as float32, got 1 and 0.999"),
    ("beta2", lambda _: -0.5, "beta1 and beta2 must be in [0, 1) as float32, got 0.9 and -0.5"),
    ("sum", lambda t: t[None], "sum must have 1 dimension(s), got shape [1, 8]"),
    ("sum", lambda t: t.double(), "sum must be float32, got float64"),
    ("sum", lambda t: torch.ones(8, 2)[:, 0], "sum must be contiguous"),
    ("step", lambda t: t.int(), "step must be int64, got int32"),
    ("step", lambda t: t[None], "step must have 0 dimension(s), got shape [1]"),
    ("lr", lambda t: t.double(), "lr must be float32, got float64"),
    ("lr", lambda t: t[None, None], "lr must have at most 1 dimension, got shape [1, 1]"),
    ("status", lambda t: t[:1], "status must have shape [2], got [1]"),
    ("status", lambda t: t.int(), "status must be int64, got int32"),
    ("grad_scale", lambda _: torch.ones(2), "grad_scale must have one element, got shape [2]"),
    ("grad_scale", lambda t: t.double(), "grad_scale must be float32, got float64"),
    ("found_inf", lambda t: t.bool(), "found_inf must be float32, got bool"),
]


def is_on_the_host(name: str, message: str) -> bool:
    """True of errors found before an op reads the layout, whose records the device checks."""
    return name not in LAYOUT_NAMES and not message.startswith("layout[")


@pytest.mark.parametrize(("name", "change", "message"), BAD_ARGUMENTS)
def test_bad_argument(name: str, change, message: str) -> None:
    """Every op with the argument raises ValueError on every kind of backend."""
    assert ops_with(name), name
    for op in ops_with(name):
        for namespace in (ops, emulated()) if is_on_the_host(name, message) else (ops,):
            check_refused(op, {name: change(arguments().get(name))}, ValueError, message, namespace)


#: Layouts with records that contradict their sizes, which is detected before any record is read.
NOT_LAYOUTS = [
    ("layout", lambda t: t[0], "layout must have 2 dimension(s), got shape [26]"),
    ("layout", lambda t: t[:, 1:], "layout must have shape [3, 26], got [3, 25]"),
    ("layout", lambda t: t.int(), "layout must be int64, got int32"),
    ("layout", lambda t: torch.stack([t, t], 2)[:, :, 0], "layout must be contiguous"),
    ("layout", lambda t: t[:2], "layout_sizes[0] = 3 must be the number of features"),
    ("layout_sizes", lambda sizes: sizes[1:], "layout_sizes must have 9 elements, got 8"),
    ("layout_sizes", lambda sizes: [-1, *sizes[1:]], "layout_sizes[0] = -1 must be the number of features"),
    ("layout_sizes", lambda sizes: [sizes[0], -1, *sizes[2:]], "layout_sizes[1] = -1 must be the columns of all"),
    ("layout_sizes", lambda sizes: [*sizes[:3], -5, *sizes[4:]], "layout_sizes[3] = -5 must be at least 0"),
    ("layout_sizes", lambda sizes: [*sizes[:4], 0, *sizes[5:]], "layout_sizes[4] = 0 must be in [1, 2^31)"),
    ("layout_sizes", lambda sizes: [*sizes[:4], 2**31, *sizes[5:]], f"layout_sizes[4] = {2**31} must be in [1"),
]


@pytest.mark.parametrize(("name", "change", "message"), NOT_LAYOUTS)
def test_not_a_layout(name: str, change, message: str) -> None:
    """Every op checks the sizes of its layout."""
    for op in FAMILY:
        given = with_layout(arguments())
        given[name] = change(given[name])
        for namespace in (ops, emulated()):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(op, given, namespace)


def adam(**changes: object) -> dict[str, object]:
    """The arguments of a valid Adam update, as changes of ``arguments()``, and further changes."""
    state = {"exp_avg": torch.ones(176), "exp_avg_sq": torch.ones(176), "beta_powers": torch.ones(2)}
    places = {"moment_offsets": torch.tensor([0, 80, 0])}
    return {"optimizer": "adam", "sum": None} | state | places | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exp_avg": None}, 'exp_avg must be given for optimizer "adam"'),
        ({"exp_avg_sq": None}, 'exp_avg_sq must be given for optimizer "adam"'),
        ({"beta_powers": None}, 'beta_powers must be given for optimizer "adam"'),
        ({"beta_powers": torch.ones(3)}, "beta_powers must have 2 elements, got 3"),
        ({"exp_avg": torch.ones(176).double()}, "exp_avg must be float32, got float64"),
        ({"exp_avg_sq": torch.ones(11, 16)}, "exp_avg_sq must have 1 dimension(s), got shape [11, 16]"),
        ({"exp_avg_sq": torch.ones(177)}, "exp_avg_sq must have as many elements as exp_avg"),
        (
            {"moment_offsets": torch.tensor([0, 80])},
            "state_offsets must have an element for each of the 3 parts, got 2",
        ),
        (
            {"optimizer": "rowwise_adam", "exp_avg_sq": torch.ones(7)},
            "exp_avg_sq must have one element per row (8), got 7",
        ),
        ({"optimizer": "adagrad", "sum": torch.ones(176)}, 'exp_avg must not be given for optimizer "adagrad"'),
        (
            {"optimizer": "rowwise_adagrad", "sum": torch.ones(7)}
            | dict.fromkeys(("exp_avg", "exp_avg_sq", "beta_powers", "moment_offsets")),
            "sum must have one element per row (8), got 7",
        ),
        (
            {"moment_offsets": torch.tensor([0, 81, 0])},
            "layout[1]: the state of a table of 3 x 32 at state_offset 81 does not fit in optimizer state of 176",
        ),
        ({"moment_offsets": torch.tensor([-1, 80, -1])}, "state_offsets[0] = -1 must be in [0, 2^62)"),
        ({"moment_offsets": torch.tensor([0, 79, 0])}, "state_offsets[1] = 79 is inside the table of feature"),
        (
            {name: torch.ones(256) for name in ("exp_avg", "exp_avg_sq")}
            | {"moment_offsets": torch.tensor([0, 80, 176])},
            "state_offsets[2] = 176 must be 0, that of feature 0, which reads the same table",
        ),
    ],
)
def test_bad_state(changes: dict[str, object], message: str) -> None:
    """State of another shape than the optimizer's, or at offsets where it does not fit, is rejected."""
    call("embedding_bag_backward_fused_", arguments() | adam())
    check_refused("embedding_bag_backward_fused_", adam(**changes), ValueError, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_offsets": [0, 4, 0]}, "row_offsets[1] = 4 is inside the table of feature"),
        ({"row_offsets": [0, 5, 1]}, "row_offsets[2] = 1 is inside the table of feature 0"),
        (
            {"weight_offsets": [0, 80, 16], "row_offsets": [0, 5, 8]},
            "weight_offsets[2] = 16 is inside the table of feature 0",
        ),
        ({"weight_offsets": [0, 80, 0], "row_offsets": [0, 5, 8]}, "weight_offsets["),
        ({"num_embeddings": [5, 3, 4]}, "num_embeddings[2] = 4 differs from its 5"),
    ],
)
def test_overlapping_tables(changes: dict[str, list[int]], message: str) -> None:
    """Features share a whole table or nothing: two threads would otherwise write the same rows."""
    changes = {name: torch.tensor(n) for name, n in changes.items()} | {"sum": torch.ones(13)}
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layout(arguments() | changes)


@pytest.mark.parametrize("op", FAMILY)
def test_other_device(op: str) -> None:
    """Each tensor in turn on the meta device is rejected instead of returning uninitialized memory."""
    given = with_layout(arguments())
    for name in argument_names(op):
        value = given.get(name)
        if isinstance(value, torch.Tensor) or name == "tables":
            moved = [value[0], value[1].to("meta")] if name == "tables" else value.to("meta")
            with pytest.raises(ValueError, match="same device"):
                call(op, given | {name: moved})


def test_strided_inputs_are_read_as_they_are() -> None:
    """values, offsets, per_sample_weights and grad may be any views."""
    given = arguments()
    whole = [(name, given[name]) for name in ("values", "offsets", "per_sample_weights", "grad")]
    views = [(name, torch.stack([t, t + 1], dim=-1)[..., 0]) for name, t in whole]
    views += [("grad", given["grad"].t().contiguous().t()), ("grad", torch.tensor(2.0).expand(given["grad"].shape))]
    for name, view in views:
        assert not view.is_contiguous()
        for op in ops_with(name):
            results = []
            for argument in (view.contiguous(), view):
                mine = given | {n: given[n].clone() for n in ("weights", "sum", "step")} | {name: argument}
                found = call(op, mine)
                found = (found,) if isinstance(found, torch.Tensor) else (found or ())
                results.append([*found, mine["weights"], mine["sum"], mine["step"]])
            assert all(map(same_bits, *results)), (op, name)


def test_table_without_columns() -> None:
    """D = 0 is rejected; E = 0 is accepted without ids."""
    with pytest.raises(ValueError, match=r"weights must have at least one column, got shape \[3, 0\]"):
        ops.embedding_bag(torch.ones(3, 0), torch.tensor([1]), torch.tensor([0, 1]))
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"weights must have fewer than 2\^31 columns, got shape \[0, 2147483648\]"):
        ops.embedding_bag(torch.ones(0, 2**31), nothing, torch.tensor([0, 0]))
    assert torch.equal(ops.embedding_bag(torch.ones(0, 4), nothing, torch.tensor([0, 0]))[0], torch.zeros(1, 4))
    with pytest.raises(IndexError, match=r"values\[0\] = 0 .*must be in \[0, 0\)"):
        ops.embedding_bag(torch.ones(0, 4), torch.tensor([0]), torch.tensor([0, 1]))


def test_sparse_gradient_of_flat_weights() -> None:
    """Flat weights have no sparse gradient; embedding_bag_tables has one per table."""
    given = arguments()
    weights = given["weights"].clone().requires_grad_()
    output, _ = call("embedding_bag", given | {"weights": weights, "sparse": True})
    with pytest.raises(ValueError, match="use embedding_bag_tables"):
        output.sum().backward()
