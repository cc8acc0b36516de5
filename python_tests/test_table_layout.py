"""``rk.table_layout``: its records, and shards whose rows have the bits of the whole table's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from backends import every_backend
from torch import Tensor

import rec_kernels as rk
from rec_kernels.ops.table_layout import Column
from rec_kernels.testing import same_bits

ROWS, COLUMNS = 13, 48
IDS = torch.tensor([0, 12, 5, 5, 8, 7, 1, 12, 4, 6])
GRAD = torch.linspace(-1, 1, len(IDS) * COLUMNS).view(len(IDS), COLUMNS).sin() * 0.01
NOISE = {"rounding": "stochastic", "seed": torch.tensor(11)}


def _update(ops, rows: Tensor, ids: Tensor, grad: Tensor, layout: rk.TableLayout, **optimizer: object) -> Tensor:
    """Quantized rows [E, bytes] after one step with a gradient for each id."""
    flat, offsets = rows.reshape(-1).clone(), torch.arange(len(ids) + 1)
    options = {"sum": None, "optimizer": "sgd"} | optimizer
    ops.ops.embedding_bag_backward_fused_.layout(
        flat,
        step=torch.tensor(3),
        lr=torch.tensor(0.1),
        grad=grad.contiguous(),
        values=ids,
        offsets=offsets,
        **layout._asdict(),
        **NOISE,
        **options,
    )
    return flat.view(rows.shape)


def _whole(ops, format: str) -> tuple[Tensor, Tensor]:
    rows = rk.quantize_rows(torch.linspace(-2, 2, ROWS * COLUMNS).view(ROWS, COLUMNS), format)
    layout = rk.table_layout([ROWS], [COLUMNS], formats=[format], table_ids=[7])
    return rows, _update(ops, rows, IDS, GRAD, layout)


@pytest.mark.parametrize("format", ["fp16", "bf16", "int8", "int4", "mx9", "mx6", "mx4"])
def test_noise_of_a_shard_by_rows(format: str) -> None:
    """Rows 5 to 12 as a shard have the whole table's noise, with first_rows only."""
    here = IDS >= 5
    for backend in every_backend():
        rows, expected = _whole(backend.ops, format)
        options = {"formats": [format], "table_ids": [7]}
        found = {}
        for first in (5, 0):
            layout = rk.table_layout([ROWS - 5], [COLUMNS], shards=rk.Shards([ROWS], [first], [0]), **options)
            found[first] = _update(backend.ops, rows[5:], IDS[here] - 5, GRAD[here], layout)
        assert torch.equal(found[5], expected[5:]), backend.name
        assert not torch.equal(found[0], expected[5:]), backend.name


@pytest.mark.parametrize("format", ["fp16", "bf16", "mx9", "mx6", "mx4"])
@pytest.mark.parametrize(("first", "last"), [(16, 48), (32, 48), (0, 16)])
def test_noise_of_a_shard_by_columns(format: str, first: int, last: int) -> None:
    """In formats without a row scale, a shard's columns have the whole table's noise."""
    for backend in every_backend():
        rows, expected = _whole(backend.ops, format)
        numbers, becomes = (rk.dequantize_rows(t, format, COLUMNS)[:, first:last] for t in (rows, expected))
        options = {"formats": [format], "table_ids": [7], "shards": rk.Shards([ROWS], [0], [first])}
        layout = rk.table_layout([ROWS], [last - first], **options)
        found = _update(backend.ops, rk.quantize_rows(numbers, format), IDS, GRAD[:, first:last], layout)
        assert torch.equal(rk.dequantize_rows(found, format, last - first), becomes), backend.name


def test_noise_of_a_shards_moments() -> None:
    """bfloat16 state of a shard has the whole table's noise, too."""
    for backend in every_backend():
        results = []
        for first, ids, grad in ((0, IDS, GRAD), (5, IDS[IDS >= 5] - 5, GRAD[IDS >= 5])):
            rows, state = torch.ones(ROWS - first, COLUMNS), torch.ones((ROWS - first) * COLUMNS, dtype=torch.bfloat16)
            shards = rk.Shards([ROWS], [first], [0])
            layout = rk.table_layout([ROWS - first], [COLUMNS], table_ids=[7], shards=shards)
            updated = _update(backend.ops, rows, ids, grad, layout, sum=state, optimizer="adagrad")
            results.append((updated, state.view(-1, COLUMNS)))
        (rows, state), (rows_of_shard, state_of_shard) = results
        assert same_bits(rows[5:], rows_of_shard), backend.name
        assert same_bits(state[5:], state_of_shard), backend.name


_HASHED = {"starts": [0, 1, 2], "divisors": [1, 1], "moduli": [5, 3], "id_limits": [9, 9], "combine": [0, 0]}


def _hashed(**changes: list[int] | None) -> dict[str, rk.IdPartitions]:
    """Layout of hashed tables of 5 and 3 rows."""
    return {"partitions": rk.IdPartitions(**(_HASHED | changes))}


def _cache(**changes: object) -> dict[str, rk.CachePlaces]:
    """A set for rows of the first of two tables."""
    given: dict = {"ways": 1, "sets": [1, 0], "first_sets": [0, 0], "row_offsets": [0, 0]}
    return {"cache": rk.CachePlaces(**(given | changes))}


def _shards(**changes: list | None) -> dict[str, rk.Shards]:
    """Shards of tables of 5 x 16 and 3 x 32."""
    return {"shards": rk.Shards(**({"table_rows": [5, 6], "first_rows": [0, 0], "first_columns": [0, 0]} | changes))}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (_shards(first_rows=[-1, 0]), "shards.first_rows[0] = -1 must not be negative"),
        (_shards(first_rows=[0, 4]), "shards.table_rows[1] = 6 must be at least 7, the end of the shard's rows"),
        (_shards(table_rows=[2**44 + 1, 6]), f"shards.table_rows[0] = {2**44 + 1} must be at most 2^44"),
        (_shards(first_columns=[0, 2]), "shards.first_columns[1] = 2 must be a multiple of 4 in [0, 2^31)"),
        (_shards(first_columns=[4, 0]) | {"formats": ["mx6", "fp32"], "weight_offsets": [0, 400]}, "multiple of 16"),
        (_shards(first_columns=[0]), "shards.first_columns must have an element for each of the 2 parts, got 1"),
        ({"mean": [True]}, "mean must have an element for each of the 2 features, got 1"),
        ({"frozen": [True] * 3}, "frozen must have an element for each of the 2 features, got 3"),
        ({"widest_feature": 31}, "widest_feature = 31 must be at least 32, the columns of the widest feature"),
        ({"state_offsets": [0, 79]}, "state_offsets[1] = 79 is inside the table of feature 0"),
        ({"num_rows": 2**63}, f"num_rows = {2**63} must be below 2^63"),
        (
            {"partitions": rk.IdPartitions([0, 1, 2], [2**63, 1], [5, 3], [5, 3], ["concat"] * 2)},
            f"partitions.divisors[0] = {2**63} must be below 2^63",
        ),
        (
            {"cache": rk.CachePlaces(1, [1, 0], [0, 0], [2**63, 0])},
            f"cache.row_offsets[0] = {2**63} must be below 2^63",
        ),
        ({"row_offsets": [0, 4]}, "row_offsets[1] = 4 is inside the table of feature 0"),
        ({"mean": ["sum", "mean"]}, "mean[0] = 'sum' must be True (1) or False (0)"),
        ({"frozen": [0, 2]}, "frozen[1] = 2 must be True (1) or False (0)"),
        ({"frozen": True}, "frozen = True must be a list, an array or a tensor of one dimension"),
        ({"widest_feature": 32.5}, "widest_feature = 32.5 must be an integer"),
        ({"num_rows": True}, "num_rows = True must be an integer"),
        ({"table_ids": [0, True]}, "table_ids[1] = True must be an integer"),
        (_cache(ways=None), "cache.ways = None must be an integer"),
        (_cache(ways=True), "cache.ways = True must be an integer"),
        (_cache(sets=None), "cache.sets = None must be a list"),
        (_cache(row_offsets=[0, None]), "cache.row_offsets[1] = None must be an integer"),
        ({"cache": (1, [1, 0])}, "cache = (1, [1, 0]) must be an rk.CachePlaces or None"),
        (_shards(table_rows=None), "shards.table_rows = None must be a list"),
        (_shards(first_rows=[None, 0]), "shards.first_rows[0] = None must be an integer"),
        ({"shards": [5, 6]}, "shards = [5, 6] must be an rk.Shards or None"),
        *((_hashed(**{name: None}), f"partitions.{name} = None must be a list") for name in _HASHED),
        *((_hashed(**{n: [1, None]}), f"partitions.{n}[1] = None must be") for n in _HASHED if n != "id_limits"),
        ({"partitions": [0, 1, 2]}, "partitions = [0, 1, 2] must be an rk.IdPartitions or None"),
        ({"weight_offsets": [0, 2**60]}, f"weight_offsets[1] = {2**60} must be in [0, 2^60)"),
        ({"weight_offsets": [0, 2**64]}, f"weight_offsets[1] = {2**64} must be below 2^63"),
        ({"state_offsets": [-(2**63) - 1, 0]}, f"state_offsets[0] = {-(2**63) - 1} must be at least -2^63"),
        (
            {"row_offsets": [0, 0]},
            "row_offsets[1] = 0 is also that of feature 0, but num_embeddings[1] = 3 differs from its 5, "
            "embedding_dims[1] = 32 differs from its 16, weight_offsets[1] = 80 differs from its 0: features",
        ),
        (
            {"formats": ["int8", "int4"], "weight_offsets": [0, 0]},
            'formats[1] = "int4" differs from its "int8", row_offsets[1] = 5 differs from its 0',
        ),
    ],
)
def test_what_does_not_fit(given: dict[str, list], message: str) -> None:
    """Errors have the argument, the element, its value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.table_layout([5, 3], [16, 32], **given)


@pytest.mark.parametrize(
    ("rows", "dims", "message"),
    [
        ([2**62, 5], [16, 32], f"num_embeddings[0] = {2**62} must be at most {2**44} for embedding_dims[0] = 16"),
        (
            [5, 2**31],
            [16, 2**30],
            f"num_embeddings[1] = {2**31} must be at most {2**29} for embedding_dims[1] = {2**30}",
        ),
        ([5, 2**63], [16, 32], f"num_embeddings[1] = {2**63} must be below 2^63"),
        ([-5, 3], [16, 32], "num_embeddings[0] = -5 must not be negative"),
        ([2**44] * 3, [2**15] * 3, f"num_embeddings are too large: the default weight_offsets[2] = {2**60} must be"),
        (None, [16], "num_embeddings = None must be a list"),
        ([5, None], [16, 32], "num_embeddings[1] = None must be an integer"),
        (5, [16], "num_embeddings = 5 must be a list"),
    ],
)
def test_tables_too_large(rows: list[int], dims: list[int], message: str) -> None:
    """Errors name the argument at fault, not one that follows from it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.table_layout(rows, dims)


def test_features_of_one_table_agree() -> None:
    """Two features of one table must have equal table arguments."""
    one = {"weight_offsets": [0, 0], "row_offsets": [0, 0], "state_offsets": [0, 0]}
    rk.table_layout([5, 5], [8, 8], **one)
    for name in ("first_rows", "first_columns", "table_rows"):
        given = _shards(**({"table_rows": [64, 64]} | {name: [64 if name == "table_rows" else 0, 32]}))
        message = rf"shards.{name}\[1\] = 32 must be .*, that of feature 0, which reads the same"
        with pytest.raises(ValueError, match=message):
            rk.table_layout([5, 5], [8, 8], **one, **given)


def test_integers_of_any_kind() -> None:
    """Tensors, arrays and lists of integers are accepted; a layout's sizes are Python's, and nothing is truncated."""
    expected = rk.table_layout([5, 3], [16, 32])
    for kind in (torch.tensor, np.array):
        found = rk.table_layout(kind([5, 3]), kind([16, 32]), row_offsets=kind([0, 5]))
        assert torch.equal(found.layout, expected.layout)
        assert found.layout_sizes == expected.layout_sizes
        assert {type(n) for n in found.layout_sizes} == {int}
    with pytest.raises(ValueError, match=r"num_embeddings\[1\] = 5.5 must be an integer"):
        rk.table_layout([5, 5.5], [16, 32])
    with pytest.raises(ValueError, match=r"table_ids\[0\] = 'a' must be an integer"):
        rk.table_layout([5, 5], [16, 32], table_ids=["a", 1])


def test_no_tables() -> None:
    """Without tables there is a layout, and a lookup has no columns."""
    layout = rk.table_layout([], [])
    output, _ = torch.ops.rec_kernels.embedding_bag.layout(
        torch.zeros(0), torch.tensor([], dtype=torch.int64), torch.tensor([0]), **layout._asdict()
    )
    assert output.shape[1] == 0


def test_frozen_between_lookup_and_backward() -> None:
    """The backward uses the frozen features at that time, also of a layout made in inference mode."""
    with torch.inference_mode():
        layout = rk.table_layout([10, 4], [3, 2])
    weights = torch.zeros(38, requires_grad=True)
    bags = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    output, _ = torch.ops.rec_kernels.embedding_bag.layout(weights, *bags, *layout)
    with pytest.raises(RuntimeError, match="set_frozen changes layout; call it inside"):
        rk.set_frozen(layout, [True, False])
    with torch.inference_mode():
        rk.set_frozen(layout, [True, False])
    output.sum().backward()
    assert weights.grad.nonzero()[:, 0].tolist() == [34, 35]  # row 2 of the second table


def test_what_can_be_frozen() -> None:
    """set_frozen takes a layout or its records, with a flag per feature; nothing changes after an error."""
    layout = rk.table_layout([5, 3], [16, 32])
    for given in (layout, layout.layout):
        for flags in ([False, True], torch.tensor([0, 1]), np.array([False, True])):
            rk.set_frozen(given, [True, False])
            rk.set_frozen(given, flags)
            assert layout.column(Column.frozen).tolist() == [0, 1]
        for flags, message in (
            ([True], "frozen must have an element for each of the 2 features, got 1"),
            ([True, False, True], "frozen must have an element for each of the 2 features, got 3"),
            (["yes", False], "frozen[0] = 'yes' must be True (1) or False (0)"),
            ([True, None], "frozen[1] = None must be True (1) or False (0)"),
            (None, "frozen = None must be a list, an array or a tensor of one dimension"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                rk.set_frozen(given, flags)
        assert layout.column(Column.frozen).tolist() == [0, 1]
    for given in (None, layout.layout.float(), layout.layout[:, 1:]):
        with pytest.raises(ValueError, match=r"layout must be an rk.TableLayout, or its int64 \[parts, 26\], got"):
            rk.set_frozen(given, [True, False])


def test_layouts_and_compiled_code() -> None:
    """A layout is made between graphs; ``set_frozen`` is part of one."""

    def made(x: Tensor) -> Tensor:
        return x + rk.table_layout([5, 3], [16, 32], mean=[True, False]).layout.sum()

    x, layout = torch.zeros(2), rk.table_layout([5, 3], [16, 32])
    torch._dynamo.reset()
    assert torch.equal(torch.compile(made, backend="eager")(x), made(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="make layouts outside of compiled code"):
        torch.compile(made, backend="eager", fullgraph=True)(x)

    @torch.compile(backend="eager", fullgraph=True)
    def froze(layout: rk.TableLayout, x: Tensor) -> Tensor:
        rk.set_frozen(layout, [False, True])
        return x + layout.layout[:, Column.frozen].sum()

    assert froze(layout, x).tolist() == [1, 1]


def test_saved_layout(tmp_path: Path) -> None:
    """torch.load restores it with weights_only."""
    layout = rk.table_layout([5, 3], [16, 32])
    torch.save(layout, tmp_path / "layout.pt")
    found = torch.load(tmp_path / "layout.pt", weights_only=True)
    assert isinstance(found, rk.TableLayout)
    assert torch.equal(found.layout, layout.layout)
    assert found.layout_sizes == layout.layout_sizes
