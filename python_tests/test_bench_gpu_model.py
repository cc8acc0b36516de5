"""The model of GPU times: its terms, a prediction for every case, and agreement of the docs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from backends import ROOT, emulated
from embedding_bag_cases import make_case
from test_bench_gpu import CPU

from bench.gpu import cases, code_paths, expected, model, predict, recorded, report
from bench.gpu.code_paths import Paths
from bench.gpu.every_case import every_case
from bench.gpu.machine_code import Instruction

H100 = model.GPUS["H100"]
FILE = recorded.load()
KERNELS = {name: Paths(**numbers) for name, numbers in FILE["kernels"].items()}
BUSY = model.Work("busy", memory=1e8, cached=2e8, warps=1e5, instructions=300, waits=3, blocks=3, flops=1e9)


@pytest.mark.parametrize(
    "more", ["memory", "cached", "warps", "instructions", "waits", "flops", "kernels", "fixed_us"], ids=str
)
def test_more_of_anything_takes_longer(more: str) -> None:
    """More work takes longer; a faster GPU or more resident blocks take less time."""
    larger = dataclasses.replace(BUSY, **{more: getattr(BUSY, more) * 2 + 1})
    assert model.milliseconds(larger, H100) > model.milliseconds(BUSY, H100)
    assert model.milliseconds(dataclasses.replace(BUSY, blocks=4), H100) < model.milliseconds(BUSY, H100)
    faster = dataclasses.replace(H100, copy=6000.0, l2=9000.0, clock_ghz=2.0)
    assert model.milliseconds(BUSY, faster) < model.milliseconds(BUSY, H100)


def test_bounds_by_hand() -> None:
    """300 MB at 3 TB/s take 0.1 ms; two equal bounds take 1.26 times one; launches and calls add fixed times."""
    copied = model.Work("copy", memory=3e8)
    parts = model.bounds(copied, H100)
    assert parts["memory"] == pytest.approx(0.1)
    assert parts["L2"] == pytest.approx(0.3 / 8.0)
    alone = model.Work("copy", memory=3e8, flops=2.5e9, flops_rate=25.0)
    gpu = dataclasses.replace(H100, l2=1e9)
    assert model.milliseconds(alone, gpu) == pytest.approx(0.1 * 2 ** (1 / 3) + 0.0015, rel=1e-6)
    waiting = model.Work("wait", warps=132 * 3 * 8 * 2, waits=2, blocks=3)
    assert model.bounds(waiting, H100)["waiting"] == pytest.approx(2 * 2 * 450e-6)
    found = model.predict([copied, model.Work("small")], gpu, 1.4)
    assert found.ms == pytest.approx(0.004 + 0.1015 + 0.0015)
    assert found.limit == "copy: memory"
    assert model.predict([model.Work("small")] * 3, gpu, 1.4).limit == "launches"


def test_expected_rows_are_those_of_drawn_ids() -> None:
    """Expected counts of rows match drawn ids, uniform and skewed; only skewed ids have long runs."""
    for w in (cases.Workload("u", 2, 600, 1000, 4, 2), cases.Workload("z", 2, 600, 1000, 4, 1, zipf=1.15)):
        reuse = expected.reuse_of(w)
        assert reuse.unique == pytest.approx(cases.unique_rows(w, cases.batches_of_ids(w, CPU)), rel=0.03)
        assert (reuse.chunks > 0) == reuse.repeats_cached == (w.zipf is not None)


def test_widths_are_those_of_the_kernels() -> None:
    """Widths are those of with_widths and with_few_lanes (core/cuda/group.cuh) and lookup widths of pool_table.cu."""
    assert [expected.widths(d) for d in (1, 16, 17, 64, 128, 129, 256, 512, 2000)] == [
        *((4, 1), (4, 1), (8, 1), (16, 1), (32, 1), (32, 2), (32, 2), (32, 4), (32, 4))
    ]
    assert [expected.update_widths(d, cases.SGD) for d in (16, 17, 64, 128, 129, 257)] == [
        *((4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (32, 4))
    ]
    assert [expected.update_widths(d, cases.ADAM) for d in (64, 128, 129, 257)] == [(8, 2), (16, 2), (32, 2), (32, 4)]
    of_int8 = [expected.lookup_widths(d, "int8") for d in (16, 17, 64, 128, 129, 512)]
    assert of_int8 == [(4, 1), (4, 2), (8, 2), (16, 2), (32, 2), (32, 4)]
    assert expected.lookup_widths(128, "mx4") == (16, 2)
    assert expected.lookup_widths(128, "bf16") == expected.widths(128)


def test_short_bags_are_taken_together() -> None:
    """The model's rule is that of are_short and launch_format in csrc/embedding_bag/cuda/pool_table.cu."""
    of = {
        (dim, bag): expected.bags_together(cases.Workload("w", 1, 1, 9, dim, bag), "fp32")
        for dim, bag in ((16, 1), (16, 2), (20, 2), (128, 1), (128, 2), (128, 3), (129, 1), (126, 1), (256, 1))
    }
    assert [key for key, together in of.items() if together == 4] == [(16, 1), (20, 2), (128, 1), (128, 2)]
    assert set(of.values()) == {1, 4}
    assert [expected.bags_together(cases.Workload("w", 1, 1, 9, 128, 1), f) for f in ("bf16", "int8")] == [4, 1]


@pytest.mark.parametrize("optimizer", [cases.SGD, cases.ADAGRAD])
def test_an_update_has_the_kernels_of_the_model(optimizer: str) -> None:
    """The model has the emulated kernels' launches, and CUB's as counted in csrc/core/cuda/device_algorithms.h."""
    w = cases.Workload("w", 2, 40, 1000, 16, 3)
    case = make_case([(w.rows, w.dim)] * w.tables, [*range(w.tables)], [w.bag] * w.tables * w.batch)
    ops = emulated()
    ops._count_nodes()
    case.update(optimizer, ops)
    works = expected.backward(w, optimizer, expected.reuse_of(w), KERNELS, H100)
    assert ops._count_nodes() == sum(work.kernels for work in works) == 16


@pytest.mark.parametrize("gpu", model.GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_operation_has_a_prediction(gpu: model.Gpu) -> None:
    """The recorded predictions are exactly those of our timed operations."""
    timed = set()
    for case in every_case({"ours": None}, gpu.memory_bytes):
        operations, _ = expected.works_of(case, KERNELS, gpu)
        timed |= {(case.name, operation) for operation in operations}
    assert {(row["case"], row["operation"]) for row in FILE["gpus"][gpu.name]} == timed
    assert len(FILE["gpus"][gpu.name]) == len(timed)


def test_operations_are_those_that_are_measured() -> None:
    """The model has the report's operation names and the cases' bytes, for one small case of each kind."""
    for case in every_case({"ours": lambda data, optimizer: None}, 0, trial=True):
        if case.about()["op"] in ("embedding_bag", "embedding_bag_formats"):
            w = case.workload
            plain = case.about()["op"] == "embedding_bag" and not cases.is_weighted(w)
            bag = w.bag if plain else max(3, w.bag)
            case.workload = dataclasses.replace(w, dim=128, bag=bag)  # the case of the recorded machine code
        subjects = [s for s in case.subjects(CPU) if s.implementation == "ours"]
        labels = {report.label({"operation": s.operation, "optimizer": s.optimizer}): s.moved for s in subjects}
        operations, _ = expected.works_of(case, KERNELS, H100)
        assert operations.keys() == labels.keys(), case.name
        for operation, moved in labels.items():
            assert expected.bytes_of(case, operation)["all"] == moved["all"], (case.name, operation)


def test_recorded_predictions_are_the_models() -> None:
    """The recorded predictions follow from the recorded kernels: changing the model requires a new record."""
    for name, gpu in model.GPUS.items():
        assert predict.predictions(KERNELS, gpu) == FILE["gpus"][name]
    assert {"commit", "nvcc", "date", "architecture"} <= FILE["about"].keys()
    assert "changes" not in FILE["about"]["commit"]


def test_the_docs_have_the_recorded_table() -> None:
    """docs/gpu-model.md has the output of `python -m bench.gpu.predict --recorded --short`, with published figures."""
    page = (ROOT / "docs" / "gpu-model.md").read_text()
    assert predict.table(FILE, short=True) in page, "docs/gpu-model.md: python -m bench.gpu.predict --recorded --short"
    assert predict.beside_others(FILE) in page


def test_who_is_ahead() -> None:
    """The verdict compares times or shares of the peak, and is qualified if the difference is below the error."""
    rows = [
        {
            "case": "unpooled-1m-d128",
            "operation": "forward",
            "ms": 0.69,
            "error": 1.4,
            "percent_of_copy": {"all": 50.0},
        },
        {"case": "weighted-t32-b4096-e1e6-d128", "operation": "forward", "ms": 0.5, "error": 1.4}
        | {"percent_of_copy": {"all": 83.75}},
    ]
    found = predict.beside_others({"gpus": {"H100": rows}}).splitlines()[2:]
    assert found[0].endswith("| 0.345 ms (FBGEMM) | 0.690 ms | behind (0.50x) |")
    assert found[1].endswith(
        "| 64.7 % of peak (FBGEMM) | 0.500 ms, 75 % of peak | ahead, by less than the error (1.16x) |"
    )


def test_constants_of_the_docs() -> None:
    page = (ROOT / "docs" / "gpu-model.md").read_text()
    for text in (
        f"{model.LATENCY_NS:.0f} ns",
        f"{model.KERNEL_US} µs per launch",
        f"as {model.ROW_OVERHEAD} more bytes",
    ):
        assert text in page
    for text in (
        f"{H100.l2 / 1000} TB/s, 50 MB",
        f"132, {H100.clock_ghz} GHz",
        f"factor of {expected.READ} either way",
        f"{expected.START_US} µs, {expected.SORT_PASS_US} µs per pass, {expected.RUNS_US:.0f} µs",
        f"x {expected.TAKEN}",
    ):
        assert text in page


# Paths through machine code


def listing(*lines: str) -> list[Instruction]:
    return [Instruction(16 * number, text, 7, 0) for number, text in enumerate(lines)]


CODE = listing(
    "S2R R0, SR_TID.X",  # 0x00
    "ISETP.GE.AND P0, PT, R0, R1, PT",
    "@P0 BRA 0x80",  # 0x20: past the loop
    "IADD3 R2, R2, 0x1, RZ",
    "SHFL.IDX PT, R4, R2, R0, R3",  # 0x40: the loop
    "SHFL.IDX PT, R5, R2, R0, R3",
    "LDG.E.128 R8, desc[UR4][R4.64]",
    "@P1 BRA 0x40",  # 0x70
    "@P2 BRA 0xa0",  # 0x80: past the rare case
    "CALL.REL.NOINC 0xd0",
    "STG.E.128 desc[UR4][R6.64], R8",  # 0xa0
    "EXIT",
    "BRA 0xc0",
)


def test_paths_by_hand() -> None:
    paths = code_paths.paths_of("pool_kernel<Fp32, 32, 1, false>", 72, 0, CODE)
    # Two instructions from the loop's last one to the store, and one to the end.
    assert paths == Paths(registers=72, blocks=3, before=4, round=4, rows=1, after=3)
    assert code_paths.paths_of("pool_kernel<Fp32, 32, 1, false>", 72, 0, CODE[:4]) is None


SHORT = listing(
    "ISETP.GE.AND P0, PT, R0, R1, PT",  # 0x00
    "@P0 EXIT",
    "BRA.DIV UR4, 0xd0",  # 0x20: no divergence
    "SHFL.IDX PT, R4, R2, R0, R3",
    "LDG.E.128 R8, desc[UR4][R4.64]",  # 0x40
    "@P1 BRA 0x80",  # past the sums that are stored one by one
    "STG.E.128 desc[UR4][R6.64], R8",
    "@P2 BRA 0x60",
    "STG.E.128 desc[UR4][R6.64], R8",  # 0x80
    "IADD3 R0, R0, 0x4, RZ",
    "@P3 BRA 0x30",  # 0xa0: the loop over rows ends
    "@P4 BRA 0x00",
    "EXIT",
    "WARPSYNC.COLLECTIVE R5, 0x30",
    "BRA 0x30",
)


def test_paths_of_short_bags_by_hand() -> None:
    """Sums are stored in the loop: the path is the shortest past the store outside of its inner loops."""
    paths = code_paths.paths_of("pool_short_kernel<Fp32, 32, false>", 80, 0, SHORT)
    assert paths == Paths(registers=80, blocks=3, before=3, round=6, rows=1, after=2)


AHEAD = listing(
    "ISETP.GE.AND P0, PT, R0, R1, PT",  # 0x00
    "@P0 BRA 0x40",  # past the prefetched search
    "IADD3 R2, R2, 0x1, RZ",  # 0x20
    "I2F.U32.RP R3, R2",
    "SHFL.IDX PT, R4, R2, R0, R3",  # 0x40: the loop
    "SHFL.IDX PT, R5, R2, R0, R3",
    "SHFL.IDX PT, R6, R2, R0, R3",
    "LDG.E.128 R8, desc[UR4][R4.64]",
    "@P1 BRA 0x40",  # 0x80
    "STG.E.128 desc[UR4][R6.64], R8",
    "EXIT",
)


def test_paths_past_what_is_looked_up_ahead_by_hand() -> None:
    """Two instructions lead to the loop, and two more on the path past the division."""
    paths = code_paths.paths_of("finish_kernel<32, 1, UpdateTarget>", 64, 0, AHEAD)
    assert paths == Paths(registers=64, blocks=4, before=2, round=5, rows=1, after=2, ahead=2)


def test_runs_are_looked_up_together_where_groups_have_several() -> None:
    """With many rows, a lane group shares the search and its waits among several; otherwise each row has a group."""
    for batch, waits in ((800_000, 2 / 4 + 2), (1000, 2 + 2)):
        w = cases.Workload("u", 1, batch, 10**7, 128, 1)
        works = expected.backward(w, cases.ADAGRAD, expected.reuse_of(w), KERNELS, H100)
        assert next(work for work in works if work.name == "update").waits == pytest.approx(waits, abs=0.03)


def test_held_or_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay's time decides if there is one; a backward uses the time of "ops"; other GPUs have no predictions."""
    case = {"name": "unpooled-1m-d128", "op": "embedding_bag"}
    right = recorded.find("NVIDIA H100 80GB HBM3", case["name"], "forward")["ms"]
    update = recorded.find("NVIDIA H100 80GB HBM3", case["name"], "backward, sgd")["ms"]

    def row(**others) -> dict:
        return {"implementation": "ours", "operation": "forward", "optimizer": None} | others

    sgd = {"operation": "backward", "optimizer": "sgd"}
    case["results"] = [
        row(ms=9.0, graph_ms=right * 1.39),
        row(ms=9.0, **sgd),
        row(implementation="ops", ms=9.0, graph_ms=update / 1.41, **sgd),
        row(error="AssertionError", operation="step", optimizer="sgd"),
        row(implementation="torch", ms=0.1),
    ]
    found = recorded.beside(case, "NVIDIA H100 80GB HBM3")
    assert {operation: p["held"] for operation, p in found.items()} == {"forward": True, "backward, sgd": False}
    assert found["backward, sgd"]["measured_ms"] == update / 1.41
    assert recorded.beside(case, "NVIDIA A100-SXM4-40GB") == recorded.beside(case, None) == {}
    others = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert [recorded.gpu_of(name) for name in ("NVIDIA H200", *others)] == ["H200", None, None, None, None]
    json.dumps(found)


def test_the_report_has_what_was_said_before(tmp_path: Path) -> None:
    """Predictions and published figures have columns, and appear in the picture."""
    rates = {"gb_per_s": {"all": 1500.0, "unique": 1000.0}, "percent_of_copy": {"all": 50.0, "unique": 33.0}}
    row = {"implementation": "ours", "operation": "forward", "optimizer": None, "ms": 0.8, "graph_ms": 0.7} | rates
    case = {"name": "unpooled-1m-d128", "op": "embedding_bag", "results": [row]}
    weighted = {"name": "weighted-t32-b4096-e1e6-d128", "op": "embedding_bag", "results": [row]}
    found = {"about": {"gpu": {"name": "NVIDIA H100 80GB HBM3"}}, "cases": [case, weighted]}
    case["predicted"] = {"forward": recorded.hold(row, {"ms": 0.6, "error": 1.4})}
    head, _, first, second, _, held = report.table(found).splitlines()
    assert held == "Predictions of our times: 1 of 1 held."
    assert head.endswith("| predicted, ms | published |")
    assert first.endswith("| 0.6000, held (within 1.4x) | 0.345 ms (FBGEMM) |")
    assert second.endswith("| | 64.7 % of peak (FBGEMM) |")
    drawn = report.picture(found, tmp_path / "gpu.png")
    assert drawn.startswith("picture: ") or "matplotlib is not installed" in drawn
