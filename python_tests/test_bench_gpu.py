"""bench.gpu without a GPU: its arithmetic, its checks of the kernels and its loop."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from bench import peers
from bench.gpu import cases, checks, jagged, measure, report, subjects
from bench.gpu import implementations as imp
from bench.shapes import Workload

CPU = torch.device("cpu")
SMALL = Workload("small", 2, 3, 10, 4, 2)
ZIPF = Workload("zipf", 3, 400, 1000, 16, 5, zipf=1.15)
COPY = 1000.0  # GB/s


def test_bytes_by_hand() -> None:
    """T = 2, B = 3, L = 2, D = 4: 12 ids of 8 bytes, 7 offsets of 8, 6 pooled rows of 16; 5 distinct rows."""
    around = 12 * 8 + 7 * 8 + 6 * 16
    forward = {"all": 12 * 16 + around, "unique": 5 * 16 + around}
    assert around == 248
    assert cases.bytes_moved(SMALL, "forward", "sgd", 5) == forward == {"all": 440, "unique": 328}
    assert cases.bytes_moved(SMALL, "backward", "sgd", 5) == {"all": 12 * 32 + 248, "unique": 5 * 32 + 248}
    backward = {"all": 12 * (32 + 8) + 248, "unique": 5 * (32 + 8) + 248}
    assert cases.bytes_moved(SMALL, "backward", "rowwise_adagrad", 5) == backward == {"all": 728, "unique": 448}
    step = {"all": 440 + 728, "unique": 328 + 448}
    assert cases.bytes_moved(SMALL, "step", "rowwise_adagrad", 5) == step


def test_unique_rows_by_hand() -> None:
    """Ids of different tables are different rows; the result is the mean over the batches."""
    batches = [torch.tensor([1, 2, 1, 3, 1, 4, 1, 1, 1, 1, 1, 1]), torch.tensor([0, 1] * 6)]
    assert cases.unique_rows(SMALL, batches) == ((4 + 1) + (2 + 2)) / 2


@pytest.mark.parametrize("w", [SMALL, ZIPF], ids=lambda w: w.name)
def test_ids(w: Workload) -> None:
    """Ids are in range, distinct within a bag, different in each batch, and reproducible."""
    batches, again = cases.batches_of_ids(w, CPU, 3), cases.batches_of_ids(w, CPU, 3)
    for ids, same in zip(batches, again, strict=True):
        assert ids.shape == (w.tables * w.batch * w.bag,)
        assert 0 <= ids.min() <= ids.max() < w.rows
        bags = ids.view(-1, w.bag).sort(1).values
        assert (bags.diff(dim=1) > 0).all()
        assert torch.equal(ids, same)
    assert not torch.equal(batches[0], batches[1])


def test_zipf_ids_are_skewed_as_said() -> None:
    """Frequencies of single-id bags fall as rank^-1.15; each table has its own hottest row, equal in all batches."""
    w = Workload("hot", 3, 20_000, 1000, 16, 1, zipf=1.15)
    weight = torch.arange(1, 1001, dtype=torch.float64) ** -1.15
    hottest = []
    for ids in cases.batches_of_ids(w, CPU, 2):
        counts = torch.stack([torch.bincount(table, minlength=1000) for table in ids.view(3, -1)])
        shares = counts.sort(descending=True).values.double() / w.batch
        assert torch.allclose(shares[:, :5].mean(0), (weight / weight.sum())[:5], rtol=0.05)
        hottest.append(counts.argmax(1).tolist())
    assert hottest[0] == hottest[1]
    assert len(set(hottest[0])) == 3
    with pytest.raises(ValueError, match="bags of 6 distinct ids need tables of 12 rows, got 10"):
        cases.batches_of_ids(Workload("full", 1, 1, 10, 4, 6), CPU)


def test_uniform_ids_reach_every_row() -> None:
    counts = torch.bincount(cases.batches_of_ids(Workload("u", 1, 4000, 50, 4, 5), CPU, 1)[0])
    assert counts.min() > 0.8 * 400
    assert counts.max() < 1.2 * 400


def test_the_cases() -> None:
    """FBGEMM's default benchmark comes first; every width occurs; tables have 1e7 rows if they fit."""
    found = {w.name: w for w in cases.workloads(140 * 2**30)}
    first = next(iter(found.values()))
    assert (first.tables, first.batch, first.rows, first.dim, first.bag, first.zipf) == (
        32,
        512,
        100_000,
        128,
        20,
        None,
    )
    large = [w for w in found.values() if w.batch == 2048 and w.bag == 20]
    for zipf in (None, 1.15):
        assert sorted(w.dim for w in large if w.zipf == zipf) == [16, 32, 64, 128, 256, 512]
    assert (found["criteo-like"].tables, found["criteo-like"].bag) == (26, 1)
    assert {w.rows for w in found.values()} == {10**5, 10**6, 10**7, 1_677_721}
    assert found["t8-b512-e1e7-d128-zipf"].tables == 8
    assert cases.tables_that_fit(10**7, 128, 24 * 2**30) == 1
    assert cases.tables_that_fit(10**6, 128, 140 * 2**30) == 32


# Checks


class Planted(imp.Ours):
    """Ours with a planted error."""

    wrong = ""

    def forward(self) -> torch.Tensor:
        output = super().forward()
        if self.wrong == "output":
            output[1, 3] *= 1 + 1e-5
        if self.wrong == "unwritten":
            output[2] = torch.nan
        return output

    def backward(self) -> None:
        before, rows = self.data.weights.clone(), self.data.ids_of_tables[1]
        super().backward()
        if self.wrong == "row left out":
            w = self.data.workload
            old = before.view(w.tables, w.rows, w.dim)
            self.tables[1][rows[0]] = old[1, rows[0]]
        if self.wrong == "rate":
            self.data.weights += (self.data.weights - before) * 2e-4
        if self.wrong == "state":
            self.state[1] *= 1 + 1e-4
        if self.wrong == "NaN":
            self.tables[0][self.data.ids_of_tables[0][0], 1] = torch.nan


@pytest.mark.parametrize("make", [imp.Ours, imp.Ops, imp.Torch])
@pytest.mark.parametrize("optimizer", cases.OPERATIONS)
@pytest.mark.parametrize("w", [SMALL, ZIPF], ids=lambda w: w.name)
def test_right_kernels_pass_the_checks(make: imp.Make, optimizer: str, w: Workload) -> None:
    """The trial of the whole command covers Triton's and FBGEMM's."""
    data = imp.Tables(w, CPU)
    implementation = make(data, optimizer)
    for turn in range(3):
        data.use(turn)
        checks.check_forward(data, implementation)
        for operation in ("backward", "step"):
            built = subjects._operation(data, lambda: implementation, operation)
            built.prepare(turn)
            built.check()


def test_torch_adds_a_batch_to_large_rows() -> None:
    """The check tolerates torch's SGD, which adds each of 1000 gradients to large rows and rounds every time."""
    hot = Workload("hot", 1, 2000, 4, 16, 2, zipf=2.0)
    for make, rounds in ((imp.Torch, True), (imp.Ours, False)):
        data = imp.Tables(hot, CPU)
        data.weights.mul_(1e4)
        data.grad.mul_(1e-2)
        implementation = make(data, cases.SGD)
        assert implementation.adds_to_rows == rounds
        checks.check_update(data, implementation, implementation.step)
        implementation.adds_to_rows = False
        if rounds:
            with pytest.raises(AssertionError, match="rows differ"):
                checks.check_update(data, implementation, implementation.step)
    assert not imp.Torch(imp.Tables(hot, CPU), cases.ADAGRAD).adds_to_rows


@pytest.mark.parametrize("wrong", ["output", "unwritten"])
def test_a_wrong_output_is_found(wrong: str) -> None:
    data = imp.Tables(SMALL, CPU)
    planted = Planted(data, "sgd")
    checks.check_forward(data, planted)
    planted.wrong = wrong
    with pytest.raises(AssertionError, match="differ"):
        checks.check_forward(data, planted)


@pytest.mark.parametrize("wrong", ["row left out", "rate", "state", "NaN"])
@pytest.mark.parametrize("optimizer", cases.OPERATIONS)
def test_a_wrong_update_is_found(wrong: str, optimizer: str) -> None:
    """A row left out, a rate off by 2e-4, a state off by 1e-4 and a NaN are found."""
    if (wrong, optimizer) == ("state", "sgd"):
        return
    data = imp.Tables(ZIPF, CPU)
    planted = Planted(data, optimizer)
    checks.check_update(data, planted, planted.step)
    planted.wrong = wrong
    with pytest.raises(AssertionError, match="state differ" if wrong == "state" else "rows differ"):
        checks.check_update(data, planted, planted.step)


def test_memory_is_poisoned_while_checked() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with checks.poisoned():
            assert torch.empty(1000).isnan().all()
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


# The loop


class Ticks:
    """A clock on which every call takes ``ms``; with ``broken``, ``capture`` raises."""

    def __init__(self, ms: float = 0.5, broken: bool = False) -> None:
        self.ms, self.broken, self.log = ms, broken, []

    def times(self, call, prepare, count: int) -> list[float]:
        for i in range(count):
            prepare(i)
            call()
        self.log.append(count)
        return [self.ms] * count

    def capture(self, call):
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        return call


def effort(limit_s: float = 1e9) -> measure.Effort:
    return measure.Effort(budget_ms=1, least=2, most=3, limit_s=limit_s)


def measured(make, timer=None, limit_s: float = 1e9, w: Workload = SMALL) -> dict:
    case = subjects.EmbeddingBag(w, {"ours": make, "torch": imp.Torch})
    return measure.measure_case(case, CPU, timer or Ticks(), effort(limit_s), COPY)


def test_a_case() -> None:
    """Every operation of every implementation has a result, with rates computed by hand."""
    found = measured(imp.Ours)
    assert found["unique_rows"] == cases.unique_rows(SMALL, cases.batches_of_ids(SMALL, CPU))
    labels = [(row["implementation"], report.label(row)) for row in found["results"]]
    operations = ["forward", "backward, rowwise_adagrad", "step, rowwise_adagrad", "backward, sgd", "step, sgd"]
    assert labels == [(name, operation) for name in ("ours", "torch") for operation in operations]
    row, step = found["results"][1:3]
    assert (step["ms"], step["graph_ms"], step["repetitions"]) == (0.5, 0.5, 2)
    assert ("graph_ms" in row, row["bytes"]["all"]) == (
        False,
        728,
    )  # a graph of autograd's backward would have the forward
    assert row["gb_per_s"]["all"] == round(728 / 0.5e-3 / 1e9, 3)
    assert row["percent_of_copy"]["all"] == round(100 * 728 / 0.5e-3 / 1e9 / COPY, 3)
    graphs = {(row["implementation"], row["operation"]) for row in found["results"] if "graph_ms" in row}
    assert graphs == {("ours", "forward"), ("ours", "step"), ("torch", "forward")}
    json.dumps(found)


def test_our_backward_is_replayed_without_autograd() -> None:
    """Only the backward of "ops" is replayed without autograd; the other graphs are those of "ours"."""
    case = subjects.EmbeddingBag(SMALL, {"ours": imp.Ours, "ops": imp.Ops})
    found = measure.measure_case(case, CPU, Ticks(), effort(), COPY)
    ops = [row for row in found["results"] if row["implementation"] == "ops"]
    assert [report.label(row) for row in ops] == ["backward, rowwise_adagrad", "backward, sgd"]
    assert all("graph_ms" in row for row in ops)


def test_only_short_calls_are_replayed() -> None:
    assert not any("graph_ms" in row for row in measured(imp.Ours, Ticks(measure.GRAPH_BELOW_MS))["results"])


def test_what_fails_is_recorded_and_the_rest_goes_on() -> None:
    """An implementation that cannot be built, a wrong one, a failing graph capture and missing memory are recorded."""

    def no_memory(data: imp.Tables, optimizer: str) -> imp.Implementation:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")

    found = measured(no_memory)["results"]
    assert {row["error"] for row in found[:5]} == {"OutOfMemoryError: CUDA out of memory. Tried to allocate 40 GiB"}
    assert not any("error" in row for row in found[5:])

    class Wrong(Planted):
        wrong = "unwritten"

    found = measured(Wrong)["results"]
    assert "differ" in found[0]["error"]
    assert "ms" not in found[0]
    assert all("ms" in row for row in found[1:])

    found = measured(imp.Ours, Ticks(broken=True))["results"]
    assert "capturing" in found[0]["graph_error"]
    assert found[0]["ms"] == 0.5

    found = measured(imp.Ours, w=Workload("full", 1, 1, 10, 4, 6))
    assert found["name"] == "full"
    assert found["results"] == []
    assert found["error"].startswith("ValueError: full: bags of 6")


def test_the_time_limit() -> None:
    """No case starts after the limit, and every case left out reports it."""
    found = measured(imp.Ours, limit_s=0)
    assert found["results"] == []
    assert found["error"] == "TimeoutError: not run: the time limit of 0 s was reached (--limit)"


def test_one_implementation_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations of a large case do not fit into memory together."""
    alive, most = set(), []

    class Counted(imp.Ours):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    case = subjects.EmbeddingBag(SMALL, {"one": Counted, "two": Counted})
    found = measure.measure_case(case, CPU, Ticks(), effort(), COPY)
    assert not any("error" in row for row in found["results"])
    assert most == [1, 1, 1, 1]
    assert not alive


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        (subjects.ScaleRows(5, 7), [8 * 35 + 4 * 5, 16 * 35 + 8 * 5]),
        (subjects.GroupedProjection(5, [3, 4], 4), [4 * (5 * 7 + 12 + 5 * 8), 8 * (5 * 7 + 12 + 5 * 8)]),
        # 20 samples of 3 distinct rows of 4 columns.
        (jagged.Expand(20, 4), [{"all": 640 + 160, "unique": 368 + 160}, {"all": 368 + 160, "unique": 368 + 160}]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_ops_with_gradients_are_checked(case: subjects.GradientCase, moved: list) -> None:
    """Bytes are those computed by hand; errors above rounding are found, forward and backward."""
    found = measure.measure_case(case, CPU, Ticks(), effort(), COPY)
    assert not any("error" in row for row in found["results"])
    assert [row["bytes"] for row in found["results"]] == [
        size if isinstance(size, dict) else {"all": size, "unique": size} for size in moved
    ] * 2
    given, right = case.given(CPU), case.functions()["ours"]
    for operation in ("forward", "backward"):
        case._build("ours", right, operation, given).check()
        with pytest.raises(AssertionError):
            case._build("ours", lambda *x: right(*x) * (1 + 1e-4), operation, given).check()


def test_jagged_ops_are_checked() -> None:
    """Every jagged op is measured; dedup moves bytes of 120 ids, 40 bags, and two numbers for each of 20 samples."""
    case = jagged.Jagged(2, 20, 3, fbgemm=importlib.util.find_spec("fbgemm_gpu") is not None)
    if case.peers:
        assert peers.fbgemm_ops() is not None
    rows = measure.measure_case(case, CPU, Ticks(), effort(), COPY)["results"]
    assert not [row for row in rows if "error" in row]
    assert [row["operation"] for row in rows[:5]] == ["dedup", "select", "windows", "permute", "bucketize"]
    assert rows[0]["bytes"] == {"all": 2 * 960 + 320 + 320, "unique": 960 + 320 + 320}
    for operation in ("dedup", "select", "windows", "permute", "bucketize"):
        right = getattr(case, f"_{operation}_by_ours")()
        wrong = (right[0], right[1].flip(1), right[2]) if operation == "dedup" else right + 1
        case._build(lambda found=right: found, operation, "ours").check()
        with pytest.raises(AssertionError):
            case._build(lambda found=wrong: found, operation, "ours").check()
