"""Bits of embedding_bag and its updates do not depend on the items listed in docs/numerics.md, "Promises".

Every backend is tested. test_embedding_bag_sampled.py covers id and offset widths.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import layout_calls
import pytest
import torch
from backends import build, device_backends, emulated, every_backend
from embedding_bag_call_cases import ALL_OPTIMIZERS, Call, Results, differences, select
from embedding_bag_cases import make_case
from embedding_bag_format_cases import EncodedCase, every_format_once
from layout_calls import OPS, ListOps, make_layout
from tiers import cross

import rec_kernels as rk
from rec_kernels.ops.table_layout import Size
from rec_kernels.testing import bag_lengths, use_threads

CHUNK = 64  # of docs/numerics.md, "Row gradients"
PIECE = 32768  # minimum of floats per thread (csrc/embedding_bag/cpu)


def hot(call: Call) -> int:
    """Most occurrences of a row in one feature."""
    counts = [torch.bincount(call.case.values[call.ids_of(f)].long()).max() for f in range(len(call.features))]
    return int(max(counts))


def threaded_call() -> Call:
    """Tables of all formats; all threads sort the first two features' rows together, one of which is hot."""
    tables = [(3000, 24), *[(500 + 10 * t, 9 + 3 * t) for t in range(7)]]
    features, batch = [0, *range(8), 0], 1600
    generator = torch.Generator().manual_seed(1)
    lengths = [bag_lengths(batch, 14 if t == 0 else 2, generator, empty=0.1) for t in features]
    mean = [f % 4 == 1 for f in range(len(features))]
    case = make_case(tables, features, torch.cat(lengths).tolist(), mean=mean, weighted=True, seed=2)
    case.values[torch.rand(len(case.values), generator=generator) < 0.3] = 5
    return Call(every_format_once(case))


def test_threads() -> None:
    """The number of threads does not matter; each has work, up to a row with chunks of chunks."""
    call = threaded_call()
    most = len(call.case.values[call.ids_of(0)]) * 24
    assert most > 5 * PIECE
    assert hot(call) > CHUNK * CHUNK
    with use_threads(1):
        expected = call.everything()
    for threads in (2, 3, 5):
        with use_threads(threads):
            assert not differences(call.everything(), expected), threads


def mixed_call(largest: int = 40, *, weighted: bool = True, most: int = 150, floats: bool = False) -> Call:
    """All formats, two tables of two features each; empty bags, mean and sum, rows with more than a chunk."""
    dims = [largest, 5, 16, 3, largest - 7, 8, 12, largest // 2]
    tables = [(2 + t % 3, d) for t, d in enumerate(dims)]
    features = [0, 1, 2, 3, 2, 4, 5, 6, 7, 0]
    lengths = [most, 0, 3, *[(5 * i) % 4 for i in range(3 * len(features) - 3)]]
    mean = [f % 3 == 1 for f in range(len(features))]
    case = make_case(tables, features, lengths, mean=mean, weighted=weighted, seed=3)
    return Call(EncodedCase(case, ["fp32"] * len(tables)) if floats else every_format_once(case, 3))


#: Maximum bag size, whether all tables are float32, and the columns of the widest table.
SHAPES = [(most, floats, dim) for most, floats in ((4, False), (70, True), (70, False)) for dim in (16, 100)]


@contextmanager
def declared_widest(widest: int) -> Iterator[None]:
    """Makes layouts declare ``widest`` columns for their widest table, at least its actual number."""

    def made(*given: object, **options: object) -> rk.TableLayout:
        layout = make_layout(*given, **options)
        layout.layout_sizes[Size.max_embedding_dim] = widest
        return layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_calls, "make_layout", made)
        yield


@pytest.mark.parametrize(("optimizer", "shape"), cross(ALL_OPTIMIZERS, SHAPES, SHAPES[-1]))
def test_launch_shape(optimizer: str, shape: tuple[int, bool, int]) -> None:
    """Lanes per row, columns per lane, numbers of blocks (1, 2 or 3) and their order do not matter.

    The kernels choose the first two by ``max_embedding_dim`` and the third by the number of ids; ids outside of all
    bags change nothing else.
    """
    most, floats, largest = shape
    call = mixed_call(largest, most=most, floats=floats)

    def results(ops: ListOps = OPS) -> Results:
        # Lookups and gradients do not depend on the optimizer.
        return call.everything(ops, [optimizer]) if optimizer == ALL_OPTIMIZERS[0] else call.update(optimizer, ops)

    case, expected = call.case, results()
    ids, factors = case.values, case.per_sample_weights
    for backend in device_backends():
        for widest, unused in ((largest, 0), (largest, 700), (2 * largest, 0), (511, 700)):
            case.values = torch.cat([ids, ids.new_full((unused,), -7)])
            case.per_sample_weights = torch.cat([factors, torch.full((unused,), torch.nan)])
            with declared_widest(widest):
                assert not differences(results(backend.ops), expected), (backend.name, widest, unused)


def test_launch_shape_of_long_sums() -> None:
    """The launch's shape does not change sums of three levels."""
    call = mixed_call(16, most=CHUNK * CHUNK + 70)
    assert hot(call) > CHUNK * 20
    expected = call.update("adam")
    for backend in device_backends():
        for widest in (16, 64, 511):
            with declared_widest(widest):
                assert not differences(call.update("adam", backend.ops), expected), (backend.name, widest)


def shuffled(tables: list[int], generator: torch.Generator) -> list[int]:
    """Features in a random order that preserves the order within each table."""
    order = torch.randperm(len(tables), generator=generator).tolist()
    for table in set(tables):
        slots = [i for i, f in enumerate(order) if tables[f] == table]
        for slot, f in zip(slots, sorted(order[i] for i in slots), strict=True):
            order[slot] = f
    return order


@pytest.mark.parametrize("weighted", [False, True])
def test_order_of_features(weighted: bool) -> None:
    """The orders of tables in memory, and of features in the call except those of one table, do not matter."""
    call, generator = mixed_call(weighted=weighted), torch.Generator().manual_seed(4)
    expected = call.everything()
    for number in range(4):
        features = shuffled(call.case.features, generator)
        tables = torch.randperm(8, generator=generator).tolist() if number % 2 else list(range(8))
        moved = select(call, features, tables)
        assert moved.features != call.features
        for backend in every_backend():
            found = moved.everything(backend.ops)
            assert found.keys() == expected.keys()
            assert not differences(found, expected), (backend.name, features, tables)


def test_order_of_features_that_share_a_table() -> None:
    """The order of features of one table matters: a row's occurrences are summed by feature."""
    call = mixed_call()
    features = [9, *range(1, 9), 0]
    changed = differences(select(call, features, list(range(8))).everything(), call.everything())
    assert ("dense", 0) in changed
    assert {number for what, number in changed} == {0}  # table 0
    assert not {what for what, number in changed} & {"output", "gradient of factors", "rows"}


@pytest.mark.parametrize("weighted", [False, True])
def test_other_tables_of_the_call(weighted: bool) -> None:
    """A table has equal results alone, beside one other and beside all, of other poolings, widths and formats."""
    call = mixed_call(weighted=weighted)
    expected = call.everything()
    for table in range(8):
        for tables in ([table], [table, (table + 3) % 8]):
            features = [f for f, t in enumerate(call.case.features) if t in tables]
            part = select(call, features, tables)
            for backend in every_backend():
                assert not differences(part.everything(backend.ops), expected), (backend.name, tables)


def digest(results: Results) -> str:
    """A short digest of the results' bits."""
    found = hashlib.sha256()
    for key in sorted(results):
        found.update(repr((key, results[key].shape)).encode())
        found.update(results[key].contiguous().numpy().tobytes())
    return found.hexdigest()


def digests() -> list[str]:
    """Digests of a large call on the CPU, and of a small one on the CPU and with the emulated kernels."""
    small = mixed_call()
    return [digest(r) for r in (threaded_call().everything(), small.everything(), small.everything(emulated()))]


def test_runs() -> None:
    """Results repeat within a process, and in another one with other memory, threads and addresses."""
    expected = digests()
    assert expected[1] == expected[2]
    assert digests() == expected
    here = Path(__file__).parent
    code = "import test_embedding_bag_determinism as t; print(*t.digests())"
    changes = {
        "PYTHONPATH": f"{here.parent}{os.pathsep}{here}",
        "OMP_NUM_THREADS": "3",
        "MALLOC_PERTURB_": "85",  # byte with which glibc fills allocated and freed memory
        "REC_KERNELS_TEST_LIBRARY": os.environ.get("REC_KERNELS_TEST_LIBRARY") or str(build("rec_kernels_emulated")),
    }
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | changes, capture_output=True, text=True)
    assert done.stdout.split() == expected, done.stderr
