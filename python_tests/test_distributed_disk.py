"""rk.distributed with each rank's tables in a file, on two gloo processes against one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_cases import Case, check_found, collection, differences, same_bits
from distributed_cases import one_process as one_process_of
from distributed_disk_cases import BUDGET, on_disk, one_process
from distributed_pool import pool
from row_cache_disk_cases import skip_without_host
from tiers import full
from torch.distributed.optim import _apply_optimizer_in_backward

import rec_kernels as rk

HERE = "distributed_disk_cases"
pytest.importorskip("torchrec.distributed")
skip_without_host()


@pytest.mark.parametrize(("plan", "other"), [("mixed", "row_wise"), *full(("table_wise", "mixed"), ("one_rank",) * 2)])
def test_training(plan: str, other: str, tmp_path: Path) -> None:
    """Training has one process's bits without a cache; so do the files, and a checkpoint in any plan."""
    case = Case(plan, optimizer="adam", sizes=(8, 5), one_id=True)
    begun = dict(collection(case).state_dict())
    (tmp_path / "other").mkdir()
    found = pool(2).run(HERE, "train_and_open", case, replace(case, plan=other), begun, str(tmp_path))
    outputs, state = one_process(case, begun)
    for i, want in enumerate(outputs[:7]):
        assert same_bits(torch.cat([own["outputs"][i] for own in found]), want)
    for name in ("state", "loaded"):
        assert differences(state, [own[name] for own in found]) == []
    weights = {name: t for name, t in state.items() if name.endswith(".weight")}
    read = [{name: own["read"][name] for name in weights} for own in found]
    assert differences(weights, read) == []
    assert int(found[0]["later"]["step"][0][1]) == int(state["step"]) + 1
    assert differences(state, [own["later"] for own in found]) != []
    names = ["rows.0-of-2"] if plan == "one_rank" else ["rows.0-of-2", "rows.1-of-2"]
    assert [name for name in found[0]["files"] if not name.endswith(".log")] == names


@pytest.mark.parametrize("plan", ["mixed", *full("one_rank")])
def test_prefetch(plan: str, tmp_path: Path) -> None:
    """Every rank with a file prefetches from it, without a change of bits."""
    case = Case(plan, optimizer="adam", sizes=(8, 5), one_id=True)
    begun = dict(collection(case).state_dict())
    found = pool(2).run(HERE, "read_ahead", case, begun, str(tmp_path))
    check_found([own[:2] for own in found], *one_process_of(case))
    for rank, (*_, counts) in enumerate(found):
        assert len(counts) == (0 if plan == "one_rank" and rank == 1 else case.steps)
        assert all(count > 0 for count in counts)


def test_reports(tmp_path: Path) -> None:
    """Reports are sums over ranks; rows in memory are within each rank's budget, and files have all rows."""
    case = Case("row_wise", "int8", "rowwise_adagrad", sizes=(8, 5))
    begun = dict(collection(case).state_dict())
    (tmp_path / "other").mkdir()
    found = pool(2).run(HERE, "train_and_open", case, case, begun, str(tmp_path))
    assert found[0]["report"] == found[1]["report"]
    owns, tiers = zip(*(own["own"] for own in found), strict=True)
    for i, table in enumerate(found[0]["report"]):
        assert table["name"] == f"t{i}"
        for key in ("weight_bytes", "state_bytes", "cached_rows", "cache_bytes", "lookups", "hits", "inserted"):
            assert table[key] == sum(report[i][key] for report in owns), key
        assert table["hit_rate"] == table["hits"] / table["lookups"]
    assert found[0]["tiers"] == {key: sum(own[key] for own in tiers) for key in tiers[0]}
    assert found[0]["tiers"]["file_bytes"] >= sum(table["weight_bytes"] for table in found[0]["report"])
    assert all(0 < own["cache_bytes"] + own["row_bytes"] <= BUDGET for own in tiers)


def test_no_space(tmp_path: Path) -> None:
    """An error of one rank's file raises on all ranks in every use; files that other ranks created are deleted."""
    (other, left, kept), (own, _, kept_too) = pool(2).run(
        HERE, "disk_errors", Case("row_wise", sizes=(8, 5)), str(tmp_path)
    )
    assert left == ["rows.1-of-2", "rows.1-of-2.log"]  # without rows: opened as a new file next time
    assert kept == kept_too == [True, False]
    assert len(own) == len(other) == 5
    for error_of, told_other in zip(own, other, strict=True):
        assert error_of == "OSError: [Errno 28] No space left on device"
        what = "could not (make its shards|use its file of tables)"
        assert re.fullmatch(rf"OtherRankError: another rank {what}: rank 1: {re.escape(error_of)}", told_other)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    """Missing files, files of another plan or generation, a missing folder and a small budget are rejected."""
    own = pool(2).run(HERE, "file_errors", Case("row_wise", sizes=(8, 5)), str(tmp_path))
    for missing, plan, generation, nowhere, _, small in own:
        assert re.search("rows.0-of-2 has rows of generation 1 and .*rows.1-of-2 is new", missing)
        assert re.match(
            "(ValueError|OtherRankError: another rank could not make its shards: rank .: ValueError): ", plan
        )
        assert "rows." in plan
        assert re.search("0-of-2 has rows of generation 2 and .*1-of-2 has rows of generation 1: choose", generation)
        assert nowhere.startswith("FileNotFoundError: ")
        assert re.match(r"ValueError: memory_budget = 1000 must be at least \d+", small)
    assert own[1][4].startswith("IsADirectoryError: ")
    assert own[0][4] == f"OtherRankError: another rank could not make its shards: rank 1: {own[1][4]}"


def test_collections(tmp_path: Path) -> None:
    """A collection with a file cannot be sharded; one on the meta device opens no file, and takes no memory."""
    case = on_disk(Case(), str(tmp_path))
    ebc = collection(case)
    with pytest.raises(
        ValueError, match=r"whose tables are in .*rows cannot be sharded, because each rank needs its own file"
    ):
        rk.distributed.EmbeddingBagCollectionSharder().constraints(ebc)
    ebc.close()
    before = sorted(tmp_path.iterdir())
    whole = collection(case, device="meta")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(NotImplementedError, match=r"tables on disk .* on the meta device have no file"):
        whole.to_empty(device="cpu")
    assert set(rk.distributed.EmbeddingBagCollectionSharder().constraints(whole)) == {"t0", "t1", "t2"}


def test_optimizers_applied_in_the_backward() -> None:
    """Optimizers applied by torch in the backward are rejected; the error names the alternative."""
    tables = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(10, 4, name="a", feature_names=["x"])])
    _apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"SGD was applied in the backward.*optimizer=rk\.SGD\(lr=0\.1\)"):
        rk.distributed.EmbeddingBagCollectionSharder().constraints(tables)
