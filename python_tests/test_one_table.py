"""Modules of one table: rows in blocks by popularity, and rows transformed by functions."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import rec_kernels as rk
from rec_kernels.testing import same_bits

SIZES, DIMS, D = [2, 5, 13], [6, 3, 1], 6
E = sum(SIZES)


def _ranks() -> torch.Tensor:
    return torch.randperm(E, generator=torch.Generator().manual_seed(2))


def _batch(weighted: bool = False, dtype: torch.dtype = torch.int64) -> rk.JaggedTensor:
    """Nine bags, some empty."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 0, 7, 1, 1, 4, 0, 12, 2])
    values = torch.randint(0, E, (int(lengths.sum()),), generator=generator).to(dtype)
    weights = torch.randn(len(values), generator=generator) if weighted else None
    return rk.JaggedTensor(values, offsets=functional.pad(lengths.cumsum(0), (1, 0)).to(dtype), weights=weights)


def _pooled(rows: torch.Tensor, batch: rk.JaggedTensor, pooling: str) -> torch.Tensor:
    """Pooled rows, in the precision of ``rows``."""
    rows = rows[batch.values().long()]
    if batch.weights_or_none() is not None:
        rows = rows * batch.weights_or_none()[:, None]
    bags = [r.sum(0) / (max(len(r), 1) if pooling == "mean" else 1) for r in rows.split(batch.lengths().tolist())]
    return torch.stack(bags)


def _blocks(**options) -> rk.MixedDimensionEmbeddingBag:
    torch.manual_seed(0)
    return rk.MixedDimensionEmbeddingBag(SIZES, DIMS, D, ranks=_ranks(), name="item", **options)


def _rows_of_blocks(tables: list[torch.Tensor], projection: torch.Tensor) -> torch.Tensor:
    """[E, D]: the rows that the blocks represent."""
    matrices = iter(projection.split([d for d in DIMS if d < D], dim=1))
    rows = [t if t.shape[1] == D else t @ next(matrices).t() for t in tables]
    return torch.cat(rows)[_ranks()]


def _path(**options) -> rk.PathEmbeddingBag:
    torch.manual_seed(0)
    return rk.PathEmbeddingBag(E, D, 3, base_dim=4, name="item", **options)


def _rows_of_path(rows: torch.Tensor, functions: dict[str, torch.Tensor]) -> torch.Tensor:
    """[E, D]: the rows that the path represents."""
    out = []
    for i in range(E):
        x, k = rows[i % 7], i // 7
        if "bias" in functions:
            x = (functions["hidden_weight"][k] @ x + functions["hidden_bias"][k]).relu()
        x = functions["weight"][k] @ x
        out.append(x + functions["bias"][k] if "bias" in functions else x)
    return torch.stack(out)


def _by_hand(module: torch.nn.Module, batch: rk.JaggedTensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(module, rk.PathEmbeddingBag):
        functions = dict(zip([n for n, _ in module.named_parameters(recurse=False)], inputs[1:], strict=True))
        return _pooled(_rows_of_path(inputs[0], functions), batch, module.pooling)
    return _pooled(_rows_of_blocks(inputs[:-1], inputs[-1]), batch, module.pooling)


def _parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tables first, then the other parameters."""
    own = [p for _, p in module.named_parameters(recurse=False)]
    return [*(p for p in module.parameters() if all(p is not q for q in own)), *own]


MODULES = {
    "blocks": _blocks,
    "matrices": _path,
    "perceptrons": lambda **options: _path(hidden=5, **options),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_as_by_hand(kind: str, pooling: str, weighted: bool) -> None:
    """Outputs and all gradients equal the definition in double precision, whose gradients are finite differences."""
    module, batch = MODULES[kind](pooling=pooling), _batch(weighted)
    with torch.no_grad():
        for p in _parameters(module):  # of similar size, so that every term matters
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    inputs = [p.detach().double().requires_grad_(True) for p in _parameters(module)]
    output, exact = module(batch), _by_hand(module, batch, inputs)
    torch.testing.assert_close(output, exact.float(), rtol=1e-5, atol=1e-5)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(output, _parameters(module), grad)
    for a, b in zip(found, torch.autograd.grad(exact, inputs, grad.double()), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)
    assert torch.autograd.gradcheck(lambda *given: _by_hand(module, batch, list(given)), inputs)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_training(kind: str, format: str) -> None:
    """Fused optimizers train tables, torch's the dense parameters; a state restores both."""
    module = MODULES[kind](optimizer=rk.RowwiseAdagrad(lr=0.1), format=format)
    dense = rk.dense_parameters(module)
    assert len(dense) == len(list(module.named_parameters(recurse=False)))
    optimizer, target, losses = torch.optim.Adam(dense, lr=0.05), torch.randn(9, D), []
    before = copy.deepcopy(module.state_dict())
    for _ in range(40):
        loss = (module(_batch()) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    state = module.state_dict()
    same = [name for name, t in state.items() if torch.equal(t, before[name])]
    assert all("ranks" in name or name.endswith("format") for name in same)
    other = MODULES[kind](optimizer=rk.RowwiseAdagrad(lr=0.1), format=format)
    other.load_state_dict(state)
    assert same_bits(module(_batch()), other(_batch()))
    assert same_bits(copy.deepcopy(module)(_batch()), other(_batch()))


@pytest.mark.parametrize("kind", MODULES)
def test_ids_of_either_width(kind: str) -> None:
    """int32 ids and offsets give equal bits."""
    module = MODULES[kind]()
    assert same_bits(module(_batch()), module(_batch(dtype=torch.int32)))
    nothing = rk.JaggedTensor(torch.tensor([], dtype=torch.int64), offsets=torch.tensor([0, 0, 0]))
    assert same_bits(module(nothing), torch.zeros(2, D))
    assert module(rk.JaggedTensor(nothing.values(), offsets=torch.tensor([0]))).shape == (0, D)


@pytest.mark.parametrize("kind", MODULES)
def test_bad_input(kind: str) -> None:
    """Bad ids and offsets raise; ignored ids are left out, also of means."""
    module = MODULES[kind]()
    for bad, place in ((E, 1), (-1, 1)):
        with pytest.raises(IndexError, match=rf"values\[{place}\] = {bad} is out of range.*\[0, {E}\)"):
            module(rk.JaggedTensor(torch.tensor([3, bad]), offsets=torch.tensor([0, 2])))
    with pytest.raises(ValueError, match="offsets must start at 0 and end at 2"):
        module(rk.JaggedTensor(torch.tensor([3, 4]), offsets=torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"values must be int32 or int64 \[N\], got torch\.float32"):
        module(rk.JaggedTensor(torch.rand(2), offsets=torch.tensor([0, 2])))
    ids = torch.tensor([3, 4])
    for offsets in (torch.tensor([], dtype=torch.int64), torch.tensor([[0, 2]]), torch.tensor([0.0, 2.0])):
        with pytest.raises(ValueError, match=r"offsets must be int32 or int64 \[B \+ 1\], got"):
            module(rk.JaggedTensor._from_parts(ids, offsets))
    with pytest.raises(ValueError, match=r"weights must have values' shape \[2\], got \[5\]"):
        module(rk.JaggedTensor._from_parts(ids, torch.tensor([0, 2]), torch.ones(5)))
    two = rk.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(2, dtype=torch.int64))
    for given, got in ((two, r"one with features \['a', 'b'\]"), (ids[None], "Tensor"), ({"a": ids}, "dict")):
        with pytest.raises(ValueError, match=f"features must be an rk.JaggedTensor .* of one feature, got {got}"):
            module(given)
    ignoring = MODULES[kind](pooling="mean", bounds_check="ignore", optimizer=rk.Adam(lr=0.1, weight_decay=0.5))
    twin = copy.deepcopy(ignoring)
    given = rk.JaggedTensor(torch.tensor([E, 3, -5, 4, E]), offsets=torch.tensor([0, 4, 5]))
    without = rk.JaggedTensor(torch.tensor([3, 4]), offsets=torch.tensor([0, 2, 2]))
    output = ignoring(given)
    assert same_bits(output, twin(without))
    output.sum().backward()
    twin(without).sum().backward()
    for (name, a), b in zip(ignoring.state_dict().items(), twin.state_dict().values(), strict=True):
        assert same_bits(a, b), name


def test_blocks_compile() -> None:
    """One graph for any batch has eager's outputs and updates; bad ids are ignored."""
    modules = [_blocks(pooling="mean", optimizer=rk.SGD(lr=0.5)) for _ in range(2)]
    compiled = torch.compile(modules[0], fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (9, 4, 7):
        batch = rk.JaggedTensor(_batch().values(), offsets=torch.cat([_batch().offsets()[:size], torch.tensor([30])]))
        outputs = compiled(batch), modules[1](batch)
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.square().sum().backward()
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    good = rk.JaggedTensor(torch.tensor([1]), offsets=torch.tensor([0, 1]))
    bad = rk.JaggedTensor(torch.tensor([E, 1, -1]), offsets=torch.tensor([0, 3]))
    torch.testing.assert_close(compiled(bad), modules[1](good))


@pytest.mark.parametrize("kind", MODULES)
def test_copies(kind: str) -> None:
    """Pickled, made on the meta device, cast, and under autocast, modules have equal values."""
    module, batch = MODULES[kind](format="int8", optimizer=rk.Adam(lr=0.1)), _batch(weighted=True)
    expected = module(batch).detach()
    assert same_bits(pickle.loads(pickle.dumps(module))(batch), expected)
    empty = MODULES[kind](format="int8", optimizer=rk.Adam(lr=0.1), device="meta").to_empty(device="cpu")
    empty.load_state_dict(module.state_dict())
    assert same_bits(empty(batch), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(module(batch), expected)
    for cast in (torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double):
        whole = torch.nn.Sequential(copy.deepcopy(module), torch.nn.Linear(2, 2))
        output = cast(whole)[0](batch)
        assert same_bits(output, expected)
        output.sum().backward()
        assert all(p.dtype != whole[1].weight.dtype for p in whole[0].parameters())


def test_ranks_of_a_state() -> None:
    """Ranks that are no permutation are rejected, and nothing changes."""
    module = _blocks()
    state = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=r"ranks\[0\] = 99 must be in \[0, 20\); nothing was loaded"):
        module.load_state_dict(state | {"ranks": torch.full((E,), 99)})
    assert same_bits(module.ranks, state["ranks"])


@pytest.mark.parametrize("kind", MODULES)
def test_nothing_to_learn_from(kind: str) -> None:
    """A batch without a valid id has zero gradients."""
    module = MODULES[kind](bounds_check="ignore")
    module(rk.JaggedTensor(torch.tensor([E, -1]), offsets=torch.tensor([0, 1, 2]))).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())
    assert any(p.grad is not None for p in module.parameters())


def test_fake_tensors() -> None:
    """Blocks have a shape under FakeTensorMode, where ids cannot be sorted."""
    with FakeTensorMode():
        module = rk.MixedDimensionEmbeddingBag(SIZES, DIMS, D)
        assert module(rk.JaggedTensor(torch.zeros(5, dtype=torch.int64), offsets=torch.arange(6))).shape == (5, D)


def test_many_functions() -> None:
    """Memory and time of a step are linear in the number of functions."""
    module = rk.PathEmbeddingBag(100_000, 8, 300, hidden=16)
    ids = torch.randint(0, 100_000, (2000,), generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(profile_memory=True) as profile:
        module(rk.JaggedTensor(ids, offsets=torch.arange(2001))).sum().backward()
    taken = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert taken < 100 * sum(p.numel() * 4 for _, p in module.named_parameters(recurse=False))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_sorted_or_repeated(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting ids by block, as on the CPU, and repeating bags per block, as elsewhere, have equal bits."""
    modules = [_blocks(pooling=pooling, bounds_check="ignore", optimizer=rk.Adam(lr=0.1)) for _ in range(2)]
    monkeypatch.setattr(modules[1], "_sort_by_block", modules[1]._repeat_per_block)
    given = _batch(weighted=True)
    given.values()[[0, 5]] = torch.tensor([E, -1])
    outputs = [module(given) for module in modules]
    assert same_bits(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for a, b in zip(*(module.state_dict().values() for module in modules), strict=True):
        assert same_bits(a, b)
    many = rk.MixedDimensionEmbeddingBag([1] * 300, [1] * 300, 2)
    ids = rk.JaggedTensor(torch.arange(300).flip(0), offsets=torch.arange(301))
    assert same_bits(many._sort_by_block(*_arguments(ids)).lengths(), torch.eye(300).flip(0).t().flatten().long())
    assert same_bits(many(ids), _with(many, ids, monkeypatch))


def _arguments(ids: rk.JaggedTensor) -> tuple:
    return ids.values(), ids.offsets(), ids.weights_or_none()


def _with(module: rk.MixedDimensionEmbeddingBag, ids: rk.JaggedTensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(module, "_sort_by_block", module._repeat_per_block)
    return module(ids)


def test_popularity_blocks() -> None:
    """Blocks have equal shares, the most popular ids first; with few ids, there are fewer blocks."""
    ranks, sizes = rk.popularity_blocks(torch.tensor([1, 5, 3, 0, 2, 1]), 3)
    assert ranks.tolist() == [3, 0, 1, 5, 2, 4]
    assert sizes == [1, 1, 4]
    counts = (1e6 / torch.arange(1, 10_001)).round()
    shuffle = torch.randperm(10_000)
    ranks, sizes = rk.popularity_blocks(counts[shuffle], 8)
    assert sum(sizes) == 10_000
    assert sizes == sorted(sizes)
    assert len(sizes) == 8
    assert torch.equal(counts[shuffle][torch.argsort(ranks)], counts)
    shares = [float(part.sum() / counts.sum()) for part in counts.split(sizes)]
    assert all(abs(share - 1 / 8) < 0.11 for share in shares)  # the most popular id alone has more
    dims = rk.mixed_dimensions(sizes, 16, 0.5, threshold=0)
    module = rk.MixedDimensionEmbeddingBag(sizes, dims, 16, ranks=ranks)
    assert dims == sorted(dims, reverse=True)
    assert sum(p.numel() for p in module.parameters()) < 10_000 * 16 / 4
    assert rk.popularity_blocks(torch.zeros(4), 3)[1] == [4]
    assert rk.popularity_blocks(torch.ones(10), 4)[1] == [3, 3, 4]
    assert rk.popularity_blocks(torch.tensor([5, 5, 5, 1, 1]), 3)[1] == [2, 3]
    for seed in range(100):  # blocks never shrink
        counts = torch.randint(0, 9, (30,), generator=torch.Generator().manual_seed(seed))
        sizes = rk.popularity_blocks(counts, 5)[1]
        assert sizes == sorted(sizes)
        assert sum(sizes) == 30
    assert rk.popularity_blocks(torch.tensor([7.0]), 3)[1] == [1]


def test_all_blocks_wide_or_narrow() -> None:
    """Without narrow blocks, the module has no matrix; without wide ones, no block of the model's width."""
    for dims in ([D, D], [2, 1]):
        module = rk.MixedDimensionEmbeddingBag([3, 17], dims, D)
        assert (module.projection is None) == (dims[0] == D)
        tables = torch.cat([t.detach() if dims[0] == D else t.detach() @ m.t() for t, m in _pairs(module, dims)])
        torch.testing.assert_close(module(_batch()), _pooled(tables, _batch(), "sum"))


def _pairs(module: rk.MixedDimensionEmbeddingBag, dims: list[int]):
    tables = [module.blocks.embedding_bags[f"block_{k}"].weight for k in range(2)]
    matrices = [None, None] if module.projection is None else module.projection.detach().split(dims, dim=1)
    return list(zip(tables, matrices, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.popularity_blocks(torch.tensor([1.0, -2.0]), 2), r"counts\[1\] = -2.0 must be finite"),
        (lambda: rk.popularity_blocks(torch.ones(2, 2), 2), r"counts must be \[E\].*\[2, 2\]"),
        (lambda: rk.popularity_blocks(torch.ones(2), 0), "num_blocks must be an integer, at least 1 .*, got 0"),
        (lambda: rk.MixedDimensionEmbeddingBag([2], [2, 1], 4), "the same length, at least 1, got 1 and 2"),
        (lambda: rk.MixedDimensionEmbeddingBag([2, 0], [2, 1], 4), r"block_sizes\[1\] must be an integer, .*, got 0"),
        (lambda: rk.MixedDimensionEmbeddingBag([2, 2], [2, 5], 4), r"block_dims\[1\] = 5 must be at most 4"),
        (lambda: rk.MixedDimensionEmbeddingBag([2, 2], [2, 1], 0), "embedding_dim must be an integer, .*, got 0"),
        (
            lambda: rk.MixedDimensionEmbeddingBag([2, 2], [2, 1], 4, ranks=torch.tensor([0, 1, 2, 4])),
            r"ranks\[3\] = 4 must be in \[0, 4\)",
        ),
        (
            lambda: rk.MixedDimensionEmbeddingBag([2, 2], [2, 1], 4, ranks=torch.tensor([0, 1, 2, 2])),
            "ranks must be distinct, got 2 more than once",
        ),
        (lambda: rk.MixedDimensionEmbeddingBag([2, 2], [2, 1], 4, ranks=torch.ones(4)), r"ranks must be int64 \[4\]"),
        (lambda: rk.MixedDimensionEmbeddingBag([2], [2], 4, pooling="max"), "pooling must be 'sum' or 'mean'"),
        (lambda: rk.MixedDimensionEmbeddingBag([2], [2], 4, bounds_check="none"), "must be 'error' or 'ignore'"),
        (
            lambda: rk.MixedDimensionEmbeddingBag([2, 2], [2, 1], 4, ranks=[0, 1, 2, 3]),
            "ranks must be int64 .*, got list",
        ),
        (lambda: rk.MixedDimensionEmbeddingBag([2.0, 2], [2, 1], 4), r"block_sizes\[0\] must be .*, got 2\.0"),
        (
            lambda: rk.MixedDimensionEmbeddingBag([2], [2], 4, ranks=torch.empty(2, dtype=torch.int64, device="meta")),
            "ranks must have data, got a meta tensor",
        ),
        (lambda: rk.PathEmbeddingBag(1e6, 4, 2), r"num_embeddings must be an integer, .*, got 1000000\.0"),
        (lambda: rk.PathEmbeddingBag(10, 4, 0), "collisions must be an integer, .*, got 0"),
        (lambda: rk.PathEmbeddingBag(10, 4, 2, hidden=2.5), r"hidden must be an integer, .*, got 2\.5"),
        (lambda: rk.PathEmbeddingBag(10, 4, 2, pooling="max"), "pooling must be 'sum' or 'mean', got 'max'"),
    ],
)
def test_bad_arguments(make, message: str) -> None:
    """Errors name the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        make()


def test_functions_that_no_id_has() -> None:
    """Functions without ids are left out: 10 ids have 3 rows with 4 functions; 6 become 5 functions with 2 rows."""
    module = rk.PathEmbeddingBag(10, 4, 4)
    assert (module.buckets, module.collisions) == (3, 4)
    assert rk.PathEmbeddingBag(10, 4, 6).collisions == 5
    output = module(rk.JaggedTensor(torch.tensor([9]), offsets=torch.tensor([0, 1])))
    assert torch.equal(output[0], module.weight[3] @ module.rows.embedding_bags["path"].weight[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("make", [_blocks, _path, functools.partial(_path, hidden=5)], ids=["blocks", "path", "hidden"])
def test_default_dtype(make, format, dtype) -> None:
    """Parameters are float32, whatever torch's default is, with equal initial bits."""
    expected = make(format=format).state_dict()
    torch.set_default_dtype(dtype)
    try:
        found = make(format=format).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def test_casts_leave_ranks_alone() -> None:
    """Module.type(), which casts integers, too, leaves the ranks unchanged."""
    module = _blocks()
    expected = module(_batch())
    for dtype in (torch.float16, torch.int32):
        module.type(dtype)
        assert module.ranks.dtype == torch.int64
        assert same_bits(module(_batch()), expected)
