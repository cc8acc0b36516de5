"""rk.distributed.Wire on two gloo processes: contents, rounding and order of messages."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from distributed_backward_cases import scaled_alone
from distributed_cases import DIM, KEYS, PLANS, ROWS, Case, batch, differences, one_process, same_bits
from distributed_distinct_cases import Distinct
from distributed_distinct_cases import one_process as one_distinct_process
from distributed_pool import WorkerError, pool
from distributed_sequence_cases import Sequences
from distributed_sequence_cases import one_process as one_sequence_process
from distributed_wire_cases import alone
from test_distributed_planner import planned, tables_of
from tiers import full

import rec_kernels as rk

pytest.importorskip("torchrec.distributed")
Wire = rk.distributed.Wire
HERE = "distributed_wire_cases"
FORMATS = ["int8", "bf16", *full("fp16", "int4", "int2", "mx9", "mx6", "mxfp8_e4m3", "mxint8")]


@pytest.mark.parametrize("plan", ["table_wise", "mixed", *full("row_wise", "data_parallel", "column_wise")])
@pytest.mark.parametrize("rounding", ["nearest", *full("stochastic")])
def test_numbers_of_the_format(plan: str, rounding: str) -> None:
    """Values that the format represents are not rounded: one process's bits."""
    wire = Wire("bf16", "bf16", rounding)
    if rounding == "stochastic" and "data_parallel" in PLANS[plan]:
        with pytest.raises(WorkerError, match="replicas of data_parallel tables would diverge"):
            pool(2).run(HERE, "in_bf16", Case(plan, "bf16", "sgd", wire=wire))
        return
    # bfloat16 rows of SGD with updates that are rounded
    case = Case(plan, "bf16", "sgd", "nearest", one_id=True, sizes=(8, 5), wire=wire)
    found = pool(2).run(HERE, "in_bf16", case)
    outputs, state = alone(case)
    assert differences(state, [own for _, own in found]) == []
    assert all(same_bits(torch.cat([out[step] for out, _ in found]), whole) for step, whole in enumerate(outputs))


@pytest.mark.parametrize("plan", ["mixed", *full("table_wise", "row_wise", "data_parallel", "grid_shard")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_float32(plan: str, pooling: str) -> None:
    """The format "fp32" changes no bits."""
    cases = [Case(plan, "bf16", pooling=pooling, sizes=(8, 5), wire=wire) for wire in (None, Wire("fp32", "fp32"))]
    (first, second) = (pool(2).run("distributed_cases", "run", case) for case in cases)
    for (out, own), (other, others) in zip(first, second, strict=True):
        assert all(map(same_bits, out, other))
        assert all(torch.equal(a[1], b[1]) for name in own for a, b in zip(own[name], others[name], strict=True))


@pytest.mark.parametrize("plan", ["table_wise", "row_wise"])
@pytest.mark.parametrize("format", FORMATS)
def test_error_of_outputs(plan: str, format: str) -> None:
    """Row-wise sums are rounded once per shard, as quantize_rows rounds one process's bags."""
    case = Case(plan, optimizer="sgd", sizes=(8, 5), steps=1, wire=Wire(format))
    found = pool(2).run("distributed_cases", "run", case)
    (whole,), _ = one_process(case)
    got = torch.cat([out[0] for out, _ in found])
    rows = whole.view(-1, DIM)
    rounded = rk.dequantize_rows(rk.quantize_rows(rows, format), format, DIM).view_as(whole)
    if plan == "table_wise":
        is_sent = rk.row_bytes(format, DIM) < 4 * DIM
        assert same_bits(got, rounded if is_sent else whole)
    else:  # parts may be larger than their sum
        limit = 3 * float((rounded - whole).abs().max())
        torch.testing.assert_close(got, whole, rtol=0, atol=max(limit, 1e-6))
        assert not torch.equal(got, whole)


@pytest.mark.parametrize("plan", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("format", ["int8", *full("mx9", "bf16")])
def test_rows_of_ids(format: str, plan: str) -> None:
    """Rows are rounded as by quantize_rows, except replicas' and rows of 8 columns, which int8 does not shrink."""
    case = Sequences(plan, sizes=(8, 5), steps=1, wire=Wire(format))
    found = pool(2).run("distributed_sequence_cases", "run", case)
    for f, (_, whole) in enumerate(one_sequence_process(case)[0][0]):
        dim = whole.shape[1]
        if rk.row_bytes(format, dim) < 4 * dim and plan != "data_parallel":
            whole = rk.dequantize_rows(rk.quantize_rows(whole, format), format, dim)
        assert same_bits(torch.cat([own[0][f][1] for own, _ in found]), whole)


@pytest.mark.parametrize("formats", [("int8", "bf16"), (None, "mx6"), *full((("fp16", None),), (("int2", "int4"),))])
def test_bytes(formats: tuple[str | None, str | None]) -> None:
    """Messages have the format's bytes per row, padded to 4; control values of a backward are float32."""
    case = Case(sizes=(8, 5), wire=Wire(*formats))  # rank 0 has t1, rank 1 t0 and t2; two features use t2
    row = [4 * DIM if f is None else rk.row_bytes(f, DIM) for f in formats]

    def padded(count: int, way: int) -> int:
        return -(-count * row[way] // 4) * 4

    assert pool(2).run(HERE, "bytes_sent", case) == [
        [padded(5 * 1, 0), padded(8 * 3, 1) + 28],
        [padded(8 * 3, 0), padded(5 * 1, 1) + 28],
    ]


def test_bytes_of_ids() -> None:
    """With row_wise="exact", each id's row is sent once to the requesting rank, and its gradient back."""
    case = Case("row_wise", sizes=(8, 5), row_wise="exact", wire=Wire("int8"))
    away = []
    for rank in range(2):
        given = batch(case, 0, [rank])
        owners = [given[key].values() // -(-ROWS[min(f, 2)] // 2) for f, key in enumerate(KEYS)]
        away.append(int((torch.cat(owners) != rank).sum()))
    # Multiples of 4 bytes.
    assert pool(2).run(HERE, "bytes_sent", case) == [
        [away[1] * 24, away[0] * 4 * DIM + 28],
        [away[0] * 24, away[1] * 4 * DIM + 28],
    ]


def test_bytes_of_narrow_rows() -> None:
    """Rows that a format does not shrink are sent as float32."""
    case = Case("column_wise", wire=Wire("mxint8", "mxfp8_e4m3"))  # 8 columns: 32 bytes, or 33
    for forward, backward in pool(2).run(HERE, "bytes_sent", case):
        assert (forward, backward) == (8 * 4 * 8 * 4, 8 * 4 * 8 * 4 + 28)


@pytest.mark.parametrize("plan", ["row_wise", *full("table_wise", "column_wise")])
def test_stochastic_rounding(plan: str) -> None:
    """Stochastic rounding is reproducible, also after loading a state, and differs between lookups of a step."""
    case = Case(plan, "bf16", sizes=(8, 5), wire=Wire("int8", "int8", "stochastic"))
    first, again = pool(2).run(HERE, "resumed", case), pool(2).run(HERE, "resumed", case)
    for (found, later, same), (other, *_) in zip(first, again, strict=True):
        assert all(map(same_bits, found, other))
        assert all(map(same_bits, found[2:], later))
        assert not same


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean over many lookups is the exact value."""
    case = Case(sizes=(400, 400), one_id=True, steps=1, wire=Wire("int4", None, "stochastic"))
    (whole,), _ = one_process(case)
    got = torch.cat([out[0] for out, _ in pool(2).run("distributed_cases", "run", case)])
    error = got - whole
    step = float(error.abs().max())
    assert step > 0
    assert abs(float(error.mean())) < 0.01 * step


@pytest.mark.parametrize(
    "wire", [Wire("bf16", "bf16"), Wire("int8", "bf16", "stochastic"), *full(Wire("int8", "int8"), Wire("mx6", "mx9"))]
)
def test_training(wire: rk.distributed.Wire) -> None:
    """Training ends near the loss of float32, but not at it."""
    plan = "row_wise" if wire.rounding == "stochastic" else "mixed"
    case = Case(plan, optimizer="adagrad", sizes=(32, 32), gradient="global_mean")
    exact = pool(2).run(HERE, "losses", case, 40)
    found = pool(2).run(HERE, "losses", dataclasses.replace(case, wire=wire), 40)
    for own, other in zip(exact, found, strict=True):
        assert own[-1] < 0.5 * own[0]
        assert other[-1] == pytest.approx(own[-1], rel=0.05)
        assert other != own


@pytest.mark.parametrize("format", ["int8", "fp16", *full("int4", "bf16", "mx6")])
def test_overflows(format: str) -> None:
    """An infinite gradient skips the update on all ranks."""
    case = Case("row_wise", "bf16", "adam", steps=4, wire=Wire(None, format))
    found = pool(2).run("distributed_backward_cases", "scaled", case)
    scales, _ = scaled_alone(case)
    assert all(own == scales for own, _ in found)
    assert all(bool(block.isfinite().all()) for _, own in found for name in own for _, block in own[name])


@pytest.mark.parametrize("format", ["fp16", "bf16", *full("int4", "int2", "int8", None)])
def test_gradients_beyond_the_format(format: str | None) -> None:
    """A scaled gradient that overflows only in the format skips the update on all ranks."""
    found = pool(2).run(HERE, "too_large", Case(optimizer="sgd", wire=Wire(None, format)))
    is_beyond = format in ("fp16", "int4", "int2")
    assert found == [(512.0, True) if is_beyond else (1024.0, False)] * 2


def test_replicas() -> None:
    """Replicas stay equal: all ranks receive the same rounded gradients. Their outputs are not rounded."""
    case = Case("data_parallel", optimizer="sgd", wire=Wire("int8", "int8"))
    (_, first), (_, second) = pool(2).run("distributed_cases", "run", case)
    assert all(same_bits(first[name][0][1], second[name][0][1]) for name in first)
    exact = pool(2).run("distributed_cases", "run", dataclasses.replace(case, wire=None))[0][1]
    assert not torch.equal(exact["embedding_bags.t0.weight"][0][1], first["embedding_bags.t0.weight"][0][1])
    distinct = Distinct(Case("data_parallel", optimizer="sgd", sizes=(8, 5), steps=1, wire=Wire("int8")))
    (rounded, _), (others, _) = pool(2).run("distributed_distinct_cases", "run", distinct)
    assert same_bits(torch.cat([rounded[0], others[0]]), one_distinct_process(distinct)[0][0])


def test_infinite_rows() -> None:
    """A row with a value that the format cannot represent arrives as NaN, and no rank hangs."""
    (got, expected), (others, theirs) = pool(2).run(HERE, "infinite", Case(one_id=True, wire=Wire("int8")))
    assert (got, others) == (expected, theirs)
    assert expected[0]
    assert not all(expected)


def test_when_it_is_waited_for() -> None:
    """Ranks wait for columns when read, and for gradients after the layers; no_grad() reads keep gradients."""
    for events, trained in pool(2).run(HERE, "order", Case()):
        assert events == ["sent", "looked up", "waited", "sent", "layer's backward", "waited"]
        assert trained


@pytest.mark.parametrize("row_wise", ["ordered", "exact", "reduce_scatter"])
def test_collectives(row_wise: str) -> None:
    """A step has five collectives (batch headers, lengths, ids, columns, gradients), and a sixth for sizes of bags."""
    columns = ["reduce_scatter"] if row_wise == "reduce_scatter" else ["all_to_all_single"]
    lengths_and_sizes = ["all_to_all_single"] * (3 if row_wise == "exact" else 2)
    expected = [*lengths_and_sizes, "all_to_all_single", *columns, "all_to_all_single"]
    assert pool(2).run(HERE, "collectives", Case("row_wise", row_wise=row_wise)) == [expected] * 2


def test_lazy_containers() -> None:
    """Lazy containers equal one process's: copies, pickles and moves have the values, and wait once."""
    from rec_kernels.distributed.output_dist import LazyJaggedTensor, LazyKeyedTensor

    calls: list[int] = []

    def arrived() -> torch.Tensor:
        calls.append(1)
        return torch.arange(6.0).view(2, 3)

    columns = LazyKeyedTensor(["a", "b"], [1, 2], arrived)
    rows = LazyJaggedTensor(arrived, torch.tensor([0, 0, 2]))
    assert (columns.keys(), rows.lengths().tolist(), calls) == (["a", "b"], [0, 2], [])
    assert isinstance(columns, rk.KeyedTensor)
    assert isinstance(rows, rk.JaggedTensor)
    for container, kind in ((columns, rk.KeyedTensor), (rows, rk.JaggedTensor)):
        for other in (pickle.loads(pickle.dumps(container)), copy.copy(container), container.to("cpu")):
            assert torch.equal(other.values(), torch.arange(6.0).view(2, 3))
            assert isinstance(other, kind)
        assert type(pickle.loads(pickle.dumps(container))) is kind
    assert torch.equal(columns["b"], torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    assert len(calls) == 2


def test_refused() -> None:
    """Unknown formats, formats that a reduction cannot add, and different formats on ranks are rejected."""
    with pytest.raises(ValueError, match=r"wire.backward must be .*got 'int7'"):
        Wire("int8", "int7")
    with pytest.raises(ValueError, match=r"wire.rounding must be"):
        Wire(rounding="up")
    for sharder in (rk.distributed.EmbeddingBagCollectionSharder, rk.distributed.EmbeddingCollectionSharder):
        with pytest.raises(ValueError, match=r"wire must be an rk.distributed.Wire or None, got 'int8'"):
            sharder(wire="int8")
    with pytest.raises(ValueError, match=r'wire.forward = "bf16" cannot be combined with row_wise="reduce_scatter"'):
        rk.distributed.EmbeddingBagCollectionSharder(row_wise="reduce_scatter", wire=Wire("bf16"))
    rk.distributed.EmbeddingBagCollectionSharder(row_wise="reduce_scatter", wire=Wire(None, "bf16"))
    for text in pool(2).run(HERE, "different_wires"):
        assert text.startswith("wire must be the same on all ranks: rank 0 has Wire(forward='int8'")


def test_planner() -> None:
    """The planner counts the bytes of the formats."""
    tables = tables_of([1000])
    floats, encoded = (
        next(iter(planned(tables, types=("table_wise",), wire=wire)[1])).shards[0].perf
        for wire in (None, Wire("int8", "bf16"))
    )
    assert encoded.fwd_comms == pytest.approx(floats.fwd_comms * 24 / 64)
    assert encoded.bwd_comms == pytest.approx(floats.bwd_comms * 32 / 64)
    assert encoded.input_dist_comms == floats.input_dist_comms
