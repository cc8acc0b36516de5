"""The benchmarks' workloads: sizes, ids and bytes computed by hand, and peers compared with each other."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rec_kernels as rk
from bench import bench_embedding_bag_formats as formats
from bench import peers, run
from bench.cases import Case, Pass, Way, trained_case
from bench.limits import ProductLimit, StepLimit
from bench.reuse import REUSE_2021, REUSE_2022, STEADY_COUNT, reused_ids
from bench.shapes import Shape, Workload
from bench.subject import Subject
from bench.workloads import KAGGLE_ROWS, MLPERF_BAGS, MLPERF_ROWS, NAMED, OPS, ROW_MULTIPLE, MultiHot, Reused, workload

TINY = MultiHot("tiny", 5, 16, (3, 1000, 70), (1, 4, 4), scale=10)


def test_published_sizes() -> None:
    """Row totals of Criteo Kaggle and of MLPerf's tables, and MLPerf's ids per sample, are the published sums."""
    assert (len(KAGGLE_ROWS), sum(KAGGLE_ROWS)) == (26, 33_762_577)
    assert (len(MLPERF_ROWS), sum(MLPERF_ROWS)) == (26, 204_184_588)
    assert (len(MLPERF_BAGS), sum(MLPERF_BAGS)) == (26, 214)


def test_sizes_by_hand() -> None:
    """Small tables keep their rows, others are scaled; rows are cache lines in every format; equal bags repeat."""
    assert TINY.cardinalities == (3, 100, 64)
    assert TINY.table_rows == (64, 128, 64)
    assert (TINY.tables, TINY.num_ids) == (3, 45)
    assert TINY.offsets().tolist() == [0, 1, 2, 3, 4, 5, *range(9, 46, 4)]
    (one, of_one, first), (four, of_four, rest) = TINY.runs(out := torch.randn(5, 3 * 16))
    assert (one, of_one, four, of_four) == (1, slice(0, 5), 4, slice(5, 45))
    assert torch.equal(torch.cat([first, rest]), out.view(5, 3, 16).transpose(0, 1))
    ids = TINY.ids(0)
    assert [len(part) for part in TINY.split(ids)] == [5, 20, 20]
    linear = TINY.linear(ids)
    assert torch.equal(linear - ids, torch.tensor([0] * 5 + [64] * 20 + [192] * 20))
    assert TINY.forward_bytes() == 45 * 64 + 45 * 8 + 15 * 64
    assert TINY.forward_bytes(24, rows=7) == 7 * 24 + 45 * 8 + 15 * 64
    assert TINY.backward_bytes(7) == 45 * 64 + 2 * 7 * (64 + 4) + 45 * 8
    assert TINY.backward_bytes(7, 24, state_bytes=0, gradient_rows=15) == 15 * 64 + 2 * 7 * 24 + 45 * 8


@pytest.mark.parametrize("name", NAMED)
def test_ids_are_within_their_tables(name: str) -> None:
    """A small batch of each named workload is in range; ids depend on the seed only."""
    w = replace(NAMED[name], batch=64)
    assert w.name == name
    ids = w.ids(3)
    assert ids.dtype == torch.int64
    assert len(ids) == w.num_ids == w.offsets()[-1]
    assert torch.equal(ids, w.ids(3))
    assert not torch.equal(ids, w.ids(4))
    for part, rows in zip(w.split(ids), getattr(w, "cardinalities", w.table_rows), strict=True):
        assert 0 <= part.min() <= part.max() < rows
    assert all(rows % ROW_MULTIPLE == 0 for rows in w.table_rows)


@pytest.mark.parametrize(
    "shape", [TINY, Workload("", 3, 300, 100_000, 32, 1), Workload("", 3, 30, 1000, 128, 20, zipf=1.1)], ids=str
)
def test_the_limit_of_a_step_is_a_step(shape: Shape) -> None:
    """The bare loop performs the update of row-wise Adagrad, up to the order of its sums."""
    torch.manual_seed(0)
    ours = peers.available()["ours"](shape)
    weights, state = ours.module._weights.clone(), ours.module._memory["_sum"].clone()
    step = StepLimit(shape, weights, state, peers.LR, peers.EPS)
    for seed in range(3):
        ids, grad = shape.ids(seed), torch.randn(shape.batch, shape.tables * shape.dim)
        ours.train(ids, grad)
        step(ids, grad)
    torch.testing.assert_close(state, ours.module._memory["_sum"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, ours.module._weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [Workload("", 3, 300, 10_001, 16, 1), Workload("", 2, 30, 1000, 64, 20), Workload("", 2, 9, 90, 128, 7)],
    ids=str,
)
def test_the_limit_of_products_is_a_step(shape: Workload) -> None:
    """The bare loop of quotient-remainder products performs lookup and update, up to the order of sums."""
    torch.manual_seed(0)
    ours = peers.Ours(shape, compression=rk.QuotientRemainder(4))
    weights, state = ours.module._weights.clone(), ours.module._memory["_sum"].clone()
    limit = ProductLimit(shape, 4, weights, state, peers.LR, peers.EPS)
    for seed in range(3):
        ids, grad = shape.ids(seed), torch.randn(shape.batch, shape.tables * shape.dim)
        torch.testing.assert_close(limit.forward(ids), ours.forward(ids), rtol=1e-4, atol=1e-6)
        ours.train(ids, grad)
        limit.train(ids, grad)
    torch.testing.assert_close(state, ours.module._memory["_sum"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights, ours.module._weights, rtol=1e-4, atol=1e-5)


def test_first_id_decides_on_a_bag() -> None:
    """Equal first ids imply equal bags, as in MLPerf's data; other bags differ."""
    bags = replace(TINY, batch=500).split(replace(TINY, batch=500).ids(1))[1].view(-1, 4)
    assert len(bags.unique(dim=0)) == len(bags[:, 0].unique())
    assert len(bags[:, 1:].unique(dim=0)) > 0.9 * len(bags[:, 0].unique())
    other = replace(TINY, batch=500).split(replace(TINY, batch=500).ids(2))[1].view(-1, 4)
    both = torch.cat([bags, other])
    assert len(both.unique(dim=0)) == len(both[:, 0].unique())


@pytest.mark.parametrize(("reuse", "published"), [(REUSE_2021, 887017990 / 128435723), (REUSE_2022, 12.744)])
def test_reuse_is_the_published_one(reuse: dict[float, float], published: float) -> None:
    """Ids per distinct row have the published mean, computed from the table and from drawn ids."""
    fitted = sum(reuse.values()) / sum(share / count for count, share in reuse.items())
    assert fitted == pytest.approx(published, rel=0.005)
    place = np.random.default_rng(0).permutation(500_000)
    ids = reused_ids(reuse, 200_000, place, np.random.default_rng(1))
    assert len(ids) == 200_000
    counts = np.unique(ids, return_counts=True)[1]
    assert counts.mean() == pytest.approx(published, rel=0.005)
    for least in (1.5, 8, 100, 1000):
        expected = sum(share for count, share in reuse.items() if count > least) / sum(reuse.values())
        assert counts[counts > least].sum() / len(ids) == pytest.approx(expected, abs=0.01)


def test_hot_rows_stay_and_cold_rows_change() -> None:
    """Batches of one table share hot rows; their cold rows differ."""
    place = np.random.default_rng(0).permutation(100_000)
    batches = [
        np.unique(reused_ids(REUSE_2021, 50_000, place, np.random.default_rng(s)), return_counts=True) for s in (1, 2)
    ]
    hot, cold = ([set(rows[(counts > STEADY_COUNT) == is_hot]) for rows, counts in batches] for is_hot in (True, False))
    assert hot[0] == hot[1]
    assert len(cold[0] & cold[1]) < 0.2 * len(cold[0])


def test_tables_too_small_for_their_batch() -> None:
    """The error has the numbers."""
    with pytest.raises(ValueError, match=r"ids = 1000 name \d+ rows, but the table has 20"):
        reused_ids(REUSE_2021, 1000, np.arange(20), np.random.default_rng(0))


@pytest.mark.parametrize(
    "w",
    [
        TINY,
        Workload("zipf", tables=3, batch=4, rows=200, dim=16, bag=3, zipf=1.1),
        Reused("reused", 2, 6, 600, 16, 10, reuse=tuple(REUSE_2022.items())),
    ],
    ids=lambda w: w.name,
)
def test_peers_look_up_the_same(w) -> None:
    """Ours, torch's per table, FBGEMM's and the bare loop look up equal rows, also with bags of unequal lengths."""
    subject, ours, torchs = Subject(w, batches=2), peers.Ours(w), peers.TorchTables(w)
    for t, weight in enumerate(torchs.weights):
        ours.module.embedding_bags[f"t{t}"].weight.data.copy_(weight.data)
    ids = subject.batches[1]
    with torch.no_grad():
        expected = torch.cat(torchs.forward(ids), dim=1)
        torch.testing.assert_close(ours.forward(ids), expected)
        if "fbgemm" in peers.available():
            theirs = peers.Fbgemm(w)
            for own, weight in zip(theirs.module.split_embedding_weights(), torchs.weights, strict=True):
                own.copy_(weight)
            torch.testing.assert_close(theirs.forward(ids), expected)
            huge = peers.FbgemmHugePages(w)
            for own, weight in zip(huge.module.split_embedding_weights(), torchs.weights, strict=True):
                own.copy_(weight)
            grad = torch.ones_like(expected)
            with torch.enable_grad():
                theirs.train(ids, grad)
                huge.train(ids, grad)
            assert torch.equal(huge.forward(ids), theirs.forward(ids))
            assert huge.module.weights_host.data_ptr() % peers.HUGE_PAGE == 0
    if shutil.which(os.environ.get("CXX", "c++")) is not None:
        from bench.limits import limits

        out = torch.empty_like(expected)
        for bag, of_ids, columns in w.runs(out):
            limits().gather(ours.module._weights, subject.linear[1][of_ids], bag, w.dim, columns)
        torch.testing.assert_close(out, expected)


def test_features_and_bytes_by_hand() -> None:
    """Features and bytes of two batches agree with distinct rows counted by Python's sets."""
    subject = Subject(TINY, batches=2)
    distinct = [set(rows.tolist()) for rows in subject.linear]
    unique = statistics.fmean(map(len, distinct))
    sizes = {"ids": 45, "bags": 15, "tables": 3, "dim": 16, "row_bytes": 24}
    assert subject.features(24) == sizes | {"unique_rows": unique, "cycle_rows": len(distinct[0] | distinct[1])}
    assert subject.moved("forward", distinct=True) == unique * 64 + 45 * 8 + 15 * 64
    backward = 15 * 64 + 2 * unique * 68 + 45 * 8
    assert math.isclose(subject.moved("train", distinct=True) - subject.moved("forward", distinct=True), backward)


@pytest.mark.parametrize(
    ("name", "direction", "row_bytes"),
    [
        ("ours", "forward", 24),
        ("ours", "train", 24),
        ("ours fp32", "forward", 64),
        ("ours fp32", "train", 64),
        ("fbgemm", "forward", 24),
        ("fbgemm", "train", 64),
        ("limit", "train", 24),
    ],
)
def test_bytes_are_of_the_rows_that_are_read(name: str, direction: str, row_bytes: int) -> None:
    """Bytes are computed with the format that an implementation reads: float32 or int8."""
    case = next(case for case in formats.cases([TINY]) if case.title == f"{direction} int8 tiny")
    subject = Subject(TINY)
    assert case.moved(name) == subject.moved(direction, row_bytes)
    assert case.note(name)["distinct_bytes"] == subject.moved(direction, row_bytes, distinct=True)


def test_workloads_of_a_command_line() -> None:
    """A workload is a name or sizes; for anything else the error describes both."""
    assert workload("meta-2021") is NAMED["meta-2021"]
    assert workload("8,2048,1000,64,20,1.05") == Workload("8x2048x1000x64x20x1.05", 8, 2048, 1000, 64, 20, zipf=1.05)
    assert workload("8,2048,1000,64,20").zipf is None
    for wrong in ("meta-2023", "8,2048,1000,64", "8,0,1000,64,20", "8,2048,1000,64,20,x"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"neither dlrm-small, .* nor T,B,E,D,L\[,ZIPF\]"):
            workload(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match=r"D = 7 of '8,2048,1000,7,20' must be a multiple of 4"):
        workload("8,2048,1000,7,20")


def test_cases_are_timed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass times ours and the selected implementations in rotating order; slow ones have fewer rounds."""
    monkeypatch.setattr("bench.timing.WARMUP_SECONDS", 0.0)
    calls: dict[str, list[int]] = {}

    def call(name: str) -> Callable[[int], object]:
        return calls.setdefault(name, []).append

    names = ["ours", "torch", "limit"]
    made = [Case(title, names, call, 8.0, 2, slow=["torch"], note=lambda n: {"of": n}) for title in ("one", "two")]
    monkeypatch.setitem(sys.modules, "bench.bench_fake", SimpleNamespace(cases=lambda: iter(made)))
    found = Pass(["fake"], rounds=9, only=["tw"], names=["torch"]).measure(turn=1)
    assert {title: list(rows) for title, rows in found.items()} == {"two": ["torch", "ours"]}
    assert found["two"]["torch"].keys() == {"ms", "min_ms", "bytes", "of"}
    assert {name: len(numbers) for name, numbers in calls.items()} == {"torch": 13, "ours": 19}
    assert calls["ours"][:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("op", ["embedding_bag_formats", "embedding_bag_optimizers"])
def test_cases_may_all_be_made_first(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases made in advance, as under pytest-benchmark, keep the tables of their titles, called in any order."""
    made: list[tuple[str, ...]] = []  # options of ours, of a case

    class Ours(peers.Ours):
        def __init__(self, w: Shape, *options: str) -> None:
            super().__init__(w, *options)
            made.append(options)

    monkeypatch.setattr(peers, "Ours", Ours)
    cases = list(Pass([op], [Workload("", tables=3, batch=4, rows=11, dim=20, bag=3)]).cases())
    for case in cases:
        for name in case.names:
            case.call(name)(0)
        beside = {"fp32", "rowwise_adagrad", *case.title.split()}
        assert all(set(options) <= beside for options in made), case.title
        made.clear()


def test_gradients_are_of_those_that_require_them() -> None:
    """A trained case has the gradients of its leaves; outputs of other sizes have gradients of their own."""
    x, factor = (torch.randn(4, requires_grad=True) for _ in range(2))
    case = trained_case("t", {"ours": Way(lambda a, b, n: (a * b)[:n], [(x, factor, 2), (x, factor.detach(), 3)])}, 1.0)
    both, one = (case.call("ours")(i) for i in range(2))
    assert [len(both), len(one)] == [2, 1]
    assert one[0].count_nonzero() == 3


@pytest.mark.full
@pytest.mark.parametrize("op", run.BENCHED)
def test_each_benchmark_runs(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op's first case runs in every implementation."""
    monkeypatch.setattr("bench.timing.WARMUP_SECONDS", 0.0)
    monkeypatch.setattr("bench.timing.WARMUP_CALLS", 1)
    case = next(Pass([op], [TINY] if op in OPS else []).cases())
    assert case.names[0] == "ours"
    rows = [case.measure(name, rounds=1) for name in case.names]
    assert all(row["ms"] > 0 and row["bytes"] > 0 for row in rows)
