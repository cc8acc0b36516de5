"""Modules and ops use the devices and dtypes of their tensors, independent of torch's default device and dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import rec_kernels as rk
from rec_kernels.testing import same_bits

KEYS = ["f", "g", "h", "k"]
FORMATS = ["fp32", "int8", "bf16", "mx6"]
ADAM = rk.Adam(lr=0.1)
COUNTS = torch.arange(40).flip(0) ** 2


def _batch(seed: int, size: int = 6, **options) -> rk.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator)
    return rk.KeyedJaggedTensor(KEYS, values, lengths=lengths, weights=weights, **options)


BATCHES = [_batch(seed, 3 + seed % 3) for seed in range(4)]
SIZES = rk.KeyedJaggedTensor(
    KEYS, torch.arange(7), lengths=torch.tensor([1, 0, 2, 1, 2, 1]), stride_per_key=[2, 1, 2, 1]
)
ONE = rk.JaggedTensor(torch.tensor([0, 39, 7, 21, 3, 7]), offsets=torch.tensor([0, 2, 2, 5, 6]))
DISTINCT = rk.KeyedJaggedTensor(KEYS, torch.arange(24) // 8 * 3 % 5, lengths=torch.ones(24, dtype=torch.int64))
RUNS = torch.arange(0, 41, 8)
RANKS = torch.randperm(40, generator=torch.Generator().manual_seed(1))
FLOATS = torch.rand(9, 16, generator=torch.Generator().manual_seed(2)) - 0.5


@contextmanager
def elsewhere() -> Iterator[None]:
    """Makes new tensors meta unless they name a device, and float64 unless they name a dtype."""
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(was)


def _tables(kind=rk.EmbeddingBagConfig, **of_each: object) -> list:
    return [
        kind(40, 16, name=f"t_{key}", feature_names=[key], format=format, **{n: v[i] for n, v in of_each.items()})
        for i, (key, format) in enumerate(zip(KEYS, FORMATS, strict=True))
    ]


def _held(module: nn.Module) -> list[Tensor]:
    return [t.detach() for t in (*module.parameters(), *module.buffers())]


def _train(collection, look_up: Callable[[object], Tensor], batches=BATCHES) -> list[Tensor]:
    """Updates alone and in a block; returns outputs and the state."""
    found = []
    for given in batches:
        found.append(look_up(given))
        found[-1].square().sum().backward()
    with collection.accumulate():
        for given in batches:
            look_up(given).square().sum().backward()
    state = {name: t.clone() for name, t in collection.state_dict().items()}
    look_up(batches[0]).sum().backward()
    collection.load_state_dict(state)
    collection.freeze("g")
    look_up(batches[1]).sum().backward()
    collection.check()
    return [t.detach() for t in found] + _held(collection)


def collections() -> list[Tensor]:
    """Bags in several formats, with per-sample weights."""
    torch.manual_seed(0)
    collection = rk.EmbeddingBagCollection(_tables(pooling=["sum", "mean"] * 2), optimizer=ADAM, device="cpu")
    found = _train(collection, lambda given: collection(given).values())
    sizes = collection.by_feature(SIZES)
    return [*found, *sizes.values(), collection.for_serving()(BATCHES[2]).values()]


def plain_collections() -> list[Tensor]:
    """Collections with torch's gradients."""
    torch.manual_seed(0)
    collection = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(40, 8, name="t", feature_names=KEYS)], device="cpu")
    collection(BATCHES[0]).values().square().sum().backward()
    return [*_held(collection), *(p.grad for p in collection.parameters())]


def sequences() -> list[Tensor]:
    """Sequence embeddings."""
    torch.manual_seed(0)
    collection = rk.EmbeddingCollection(_tables(rk.EmbeddingConfig), optimizer=rk.RowwiseAdagrad(), device="cpu")
    found = _train(collection, collection.rows)
    return [*found, *(t.values().detach() for t in collection(BATCHES[0]).values())]


def caches() -> list[Tensor]:
    """Row caches, tables in host memory, reports."""
    found = []
    for cache in (rk.RowCache(0.3, ways=4), rk.RowCache(0.3, ways=4, policy="lfu", decay_every=2, backing="host")):
        torch.manual_seed(0)
        collection = rk.EmbeddingBagCollection(_tables(), optimizer=ADAM, cache=cache, device="cpu")
        found += _train(collection, lambda given, c=collection: c(given).values())
        collection.prefetch(BATCHES[3])
        collection(BATCHES[3]).values().sum().backward()
        reports = [n for t in collection.memory_report() for n in t.values() if isinstance(n, int)]
        found.append(torch.tensor([*reports, *collection.tier_report().values()], device="cpu"))
        collection.flush()
        collection.reset_cache_states()
        collection.load_state_dict({n: t for n, t in collection.state_dict().items() if "row_cache" not in n})
        found += _held(collection)
    return found


def scaled_losses() -> list[Tensor]:
    """Updates with a gradient scaler, one of them skipped because of an overflow."""
    torch.manual_seed(0)
    collection = rk.EmbeddingBagCollection(_tables(), optimizer=ADAM, device="cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    collection.set_grad_scaler(scaler)
    for given, factor in zip(BATCHES, (1.0, 3e38, 0.5, 2.0), strict=True):
        scaler.scale(collection(given).values().sum() * factor).backward()
        scaler.step(collection.fused_optimizer)
        scaler.update()
    return _held(collection)


def compressions() -> list[Tensor]:
    """Compressed tables."""
    kinds = [rk.Hash(9), rk.QuotientRemainder(5), rk.MixedDimension(6), rk.QuotientRemainder(4, compose="pooled")]
    torch.manual_seed(0)
    collection = rk.EmbeddingBagCollection(_tables(compression=kinds), optimizer=ADAM, device="cpu")
    found = []
    for given in BATCHES:
        collection(given).values().square().sum().backward()
        found.append(collection(given).values().detach())
    return [*found, *_held(collection), *(t.detach() for t in collection.by_feature(SIZES).values())]


def single_tables() -> list[Tensor]:
    """Modules of one table, through functions and blocks."""
    found = []
    for make in (
        lambda: rk.PathEmbeddingBag(40, 8, 5, hidden=4, optimizer=ADAM, device="cpu"),
        lambda: rk.PathEmbeddingBag(40, 8, 5, optimizer=ADAM, device="cpu", pooling="mean"),
        lambda: rk.MixedDimensionEmbeddingBag([4, 12, 24], [8, 4, 2], 8, ranks=RANKS, optimizer=ADAM, device="cpu"),
    ):
        torch.manual_seed(0)
        module = make()
        found.append(module(ONE))
        found[-1].square().sum().backward()
        found += _held(module)
    return [t.detach() for t in found]


def choices() -> list[Tensor]:
    """Blocks, dimensions and placements of tables."""
    ranks, sizes = rk.popularity_blocks(COUNTS, 3)
    counts = dict.fromkeys((f"t_{key}" for key in KEYS), COUNTS)
    kinds = [rk.Hash(9), None, None, None]
    placed = rk.place_tables(_tables(compression=kinds), counts, cache_bytes=4_000, device_bytes=3_000, ways=4)
    numbers = [n for p in placed.values() for n in (p.fraction, p.hit_rate, p.encoded_bytes, p.slot_bytes)]
    return [ranks, torch.tensor([*sizes, *numbers], device="cpu", dtype=torch.float64)]


def distinct() -> list[Tensor]:
    """Batches of distinct bags, and windows."""
    few = rk.InverseKeyedJaggedTensor.from_kjt(DISTINCT, [["f", "g"], ["h"]])
    same = rk.InverseKeyedJaggedTensor.from_kjt(DISTINCT, [KEYS])
    windows = few.with_windows()
    torch.manual_seed(0)
    collection = rk.EmbeddingBagCollection(_tables(), optimizer=ADAM, device="cpu")
    pooled = collection(few).values()
    pooled.square().sum().backward()
    with collection.accumulate():
        for given in (few, windows):
            collection(given).values().sum().backward()
    whole = [few.to_kjt().values(), windows.to_kjt().offsets(), few.inverse("h"), few.unique(0).offsets()]
    joined = rk.KeyedJaggedTensor.concat([few.unique("f"), few.unique("h")])
    expanded = rk.deduplicated(collection)(same).values().detach()
    return [pooled.detach(), *_held(collection), *whole, joined.offsets(), expanded]


def containers() -> list[Tensor]:
    """Jagged tensors made from lengths, and padded."""
    made = rk.KeyedJaggedTensor(["f", "g"], ONE.values(), lengths=ONE.lengths())
    windows = rk.KeyedJaggedWindows.from_kjt(rk.KeyedJaggedTensor(["f"], torch.full_like(RANKS, 3), offsets=RUNS))
    return [made.offsets(), ONE.to_padded_dense(3), *ONE.to_dense(), windows.to_kjt().values(), windows.starts()]


def row_formats() -> list[Tensor]:
    """Quantization and dequantization."""
    found = []
    for format in rk.ROW_FORMATS:
        rows = rk.quantize_rows(FLOATS, format, rounding="stochastic", seed=3, step=4)
        found += [rows, rk.dequantize_rows(rows, format, 16), rk.fake_quantize(FLOATS, format)]
    return found


def ops() -> list[Tensor]:
    """Functions of tensors, with their gradients."""
    x, table = FLOATS.clone().requires_grad_(), FLOATS.clone().requires_grad_()
    ids = torch.arange(9, device="cpu")
    found = [
        rk.embedding_bag(ids[None].flip(1), table),
        rk.embedding_bag(ids, table, ids[::3], mode="sum", sparse=False),
        rk.expand(x, ids.flip(0)),
        rk.dot_interaction(x[:3], x[3:].view(3, 2, 16)),
        rk.factorization_machine(x.view(3, 3, 16), FLOATS[:3, :2]),
        rk.grouped_projection(x, FLOATS[:4, :8].reshape(-1), [8, 8], [2, 2]),
        rk.scale_rows(x, FLOATS[:, 0]),
    ]
    sum(t.square().sum() for t in found).backward()
    return [*(t.detach() for t in found), x.grad, table.grad]


def networks() -> list[Tensor]:
    """Layers constructed before."""
    found = []
    for module, x in ((CROSS, FLOATS), (WUKONG, FLOATS.view(3, 3, 16))):
        module.zero_grad()
        output = module(x)
        output.square().sum().backward()
        found += [output.detach(), *(p.grad.clone() for p in module.parameters())]
    return found


torch.manual_seed(0)
CROSS = rk.LowRankCrossNet(16, num_layers=2, low_rank=4)
WUKONG = rk.Wukong(3, 16, num_layers=2, fm_features=2, linear_features=2, factors=2)


@pytest.mark.parametrize(
    "case",
    [
        *(collections, plain_collections, sequences, caches, scaled_losses, compressions, single_tables),
        *(choices, distinct, containers, row_formats, ops, networks),
    ],
    ids=lambda case: case.__name__,
)
def test_elsewhere(case: Callable[[], list[Tensor]]) -> None:
    """Bits, dtypes and devices do not depend on the default device."""
    expected = case()
    with elsewhere():
        found = case()
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.device.type == "cpu", i
        assert same_bits(a, b), i


def test_tables_on_disk_elsewhere(tmp_path) -> None:
    """Tables in a file do not depend on the default device."""
    pytest.importorskip("rec_kernels._host")

    def case(name: str) -> list[Tensor]:
        torch.manual_seed(0)
        cache = rk.RowCache(0.3, ways=4, backing="disk", path=tmp_path / name, memory_budget=300_000)
        collection = rk.EmbeddingBagCollection(_tables(), optimizer=ADAM, cache=cache, device="cpu")
        for this, following in itertools.pairwise(BATCHES):
            pooled = collection(this).values()
            collection.prefetch(following)
            pooled.square().sum().backward()
        state = collection.state_dict()
        collection.load_state_dict(state)
        found = [t.clone() for name, t in state.items() if name != "file_identity"] + [
            collection(BATCHES[3]).values().detach()
        ]
        collection.close()
        return found

    expected = case("here")
    with elsewhere():
        found = case("elsewhere")
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
