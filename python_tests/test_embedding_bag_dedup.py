"""Collections on deduplicated batches equal those on plain ones, to the bit where sums are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import row_cache_collections as cached
import torch
from collection_cases import assert_same, sequences
from collection_format_cases import make as of_formats
from hypothesis import strategies as st
from inverse_jagged_cases import grouped_batches, sessions
from test_embedding_bag_bounds import late, message
from tiers import drawn, full
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.jagged.select_features import BAD_LAYOUT, SelectedKeys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.testing import assert_same_sum, same_bits

FUSED = [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5)]
OPTIMIZERS = [None, *FUSED]
TABLES = {
    "one width": [(8, "sum", "ab"), (8, "mean", "c"), (8, "sum", "d")],
    "widths": [(6, "sum", "ab"), (20, "mean", "c"), (8, "sum", "d")],
}
#: Output columns of all features of "widths".
WIDTH = 40
COMPRESSIONS = {
    "quotients": {"compression": rk.QuotientRemainder(4)},
    "hash": {"compression": rk.Hash(5)},
    "side by side": {"compression": rk.QuotientRemainder(4, combine="concat")},
    "pooled": {"compression": rk.QuotientRemainder(4, compose="pooled")},
    "narrow": {"compression": rk.MixedDimension(3)},
}
GROUPS = {
    "one group": [["a", "b", "c", "d"]],
    "another order": [["d", "b", "c", "a"]],
    "groups": [["c"], ["a", "d"], ["b"]],
    "with a rest": [["b", "d"]],
    "only a rest": [],
}


def collection(optimizer=None, tables: str = "widths", **options) -> rk.EmbeddingBagCollection:
    """Features a, b of one table, c with mean pooling, d; ``options`` are of the tables or of the collection."""
    torch.manual_seed(0)
    own = {key: options.pop(key) for key in ("output_dtype", "cache", "bounds_check") if key in options}
    made = [
        rk.EmbeddingBagConfig(12, dim, name=f"t{keys}", feature_names=list(keys), pooling=pooling, **options)
        for dim, pooling, keys in TABLES[tables]
    ]
    return rk.EmbeddingBagCollection(made, optimizer=optimizer, **own)


def dedup(batch: rk.KeyedJaggedTensor, groups: str | list[list[str]] = "groups") -> rk.InverseKeyedJaggedTensor:
    """Deduplicates the given groups, by name or as lists."""
    named = GROUPS[groups] if isinstance(groups, str) else groups
    return rk.InverseKeyedJaggedTensor.from_kjt(batch, named)


def whole_numbers(*shape: int, seed: int = 1) -> Tensor:
    """Gradients with exact sums."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def step(module, batch, grad: Tensor) -> Tensor:
    """One backward; returns the output."""
    output = module(batch).values()
    output.backward(grad.to(output.dtype))
    return output.detach()


def assert_same_gradients(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or same_bits(a.grad, b.grad), name


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_format(groups: str, dtype: torch.dtype, weighted: bool) -> None:
    """Outputs, and fused updates with exact sums, equal a plain batch's in all formats, widths and poolings."""
    for optimizer in FUSED:
        few, whole = of_formats(optimizer), of_formats(optimizer)
        names = few.feature_names
        named = {"a": names[:2], "b": names[2:4], "c": names[4:6], "d": names[6:]}
        by_name = [[name for key in group for name in named[key]] for group in GROUPS[groups]]
        for seed in range(3):
            # Mean bags have at most one id: 1 / n is exact then.
            batch = sessions(names, seed=seed, most=1, weighted=weighted, dtype=dtype)
            grad = whole_numbers(9, sum(few._features.output_dims), seed=seed)
            assert same_bits(step(few, dedup(batch, by_name), grad), step(whole, batch, grad))
        assert_same(few, whole)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("options", [{}, *COMPRESSIONS.values()], ids=["plain", *COMPRESSIONS])
def test_forward(groups: str, tables: str, options: dict) -> None:
    """Lookups of distinct bags have equal bits: longer bags, half precision, by feature, and for serving."""
    for more in ({}, {"output_dtype": torch.bfloat16}):
        module = collection(rk.SGD(lr=0.5), tables, **options, **more)
        for seed, weighted in ((1, False), (2, True)):
            batch = sessions(list("xdcab"), seed=seed, weighted=weighted)
            few, expected = dedup(batch, groups), module(batch)
            found = module(few)
            assert found.keys() == expected.keys()
            assert same_bits(found.values(), expected.values())
            for key, t in module.by_feature(few).items():
                assert same_bits(t, expected[key])
            assert same_bits(module.for_serving()(few).values(), expected.values())


@pytest.mark.parametrize("compression", [None, *(options["compression"] for options in COMPRESSIONS.values())], ids=str)
@pytest.mark.parametrize("samples", [9, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums(compression, samples: int, dtype: torch.dtype) -> None:
    """Gradients of half precision are summed over samples in float32, also where there are more bags than samples."""
    half, whole = (collection(rk.SGD(lr=0.5), compression=compression, output_dtype=d) for d in (dtype, torch.float32))
    unique = sessions(list("dcab"), distinct=4, batch=4)
    few = rk.InverseKeyedJaggedTensor(unique, [list("dcab")], torch.arange(samples)[None] % 2)
    grad = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert same_bits(step(half, few, grad), step(whole, few, grad).to(dtype))
    assert_same(half, whole)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_exact_sums(groups: str, tables: str, optimizer) -> None:
    """Updates, and gradients of tables and of distinct bags' weights, are equal to the bit."""
    few, whole = collection(optimizer, tables), collection(optimizer, tables)
    for seed in range(3):
        batch = sessions(list("abcd"), seed=seed, most=1, weighted=True)
        grad = whole_numbers(9, sum(few._features.output_dims), seed=seed)
        step(few, dedup(batch, groups), grad)
        step(whole, batch, grad)
    assert_same_gradients(few, whole)
    assert_same(few, whole)


@drawn(60, grouped_batches(), st.sampled_from(list(TABLES)), st.sampled_from(OPTIMIZERS))
def test_any_batch(case: tuple, tables: str, optimizer) -> None:
    """Any sizes including empty batches, any groups, and features in any order."""
    batch, groups = case
    dims = dict(zip("abcd", [dim for dim, _, names in TABLES[tables] for _ in names], strict=True))
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        configs = [rk.EmbeddingBagConfig(50, dims[k], name=k, feature_names=[k]) for k in sorted(batch.keys())]
        made.append(rk.EmbeddingBagCollection(configs, optimizer=optimizer))
    if not batch.keys():
        assert made[0](dedup(batch, groups)).values().shape == (0, 0)
        return
    grad = whole_numbers(batch.stride(), sum(made[0]._features.output_dims))
    assert same_bits(step(made[0], dedup(batch, groups), grad), step(made[1], batch, grad))
    assert_same_gradients(*made)
    assert_same(*made)


def _tables(module: rk.EmbeddingBagCollection, of: Callable[[torch.nn.Parameter], Tensor]) -> list[Tensor]:
    return [of(module.embedding_bags[t.name].weight).clone() for t in module.tables]


@pytest.mark.parametrize("groups", GROUPS)
def test_sums_that_round(groups: str) -> None:
    """Dense gradients and SGD's step differ at most by rounding."""
    batch = sessions(list("abcd"), 3, 200, weighted=True)
    grad = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1))
    modules = [collection() for _ in range(3)]
    for module, given_batch, g in zip(
        modules, [dedup(batch, groups), batch, batch], [grad, grad, grad.abs()], strict=True
    ):
        step(module, given_batch, g)
    found, expected, magnitude = (_tables(module, lambda w: w.grad) for module in modules)
    # A term is multiplied once or twice and added at most once to each other one.
    terms = batch.values().shape[0] + 4
    for a, b, size in zip(found, expected, magnitude, strict=True):
        assert_same_sum(a, b, size.double(), terms)
    few, whole = collection(rk.SGD(lr=0.5)), collection(rk.SGD(lr=0.5))
    before = _tables(few, torch.Tensor.detach)
    step(few, dedup(batch, groups), grad), step(whole, batch, grad)
    after = [_tables(module, torch.Tensor.detach) for module in (few, whole)]
    for a, b, start, size in zip(*after, before, magnitude, strict=True):
        assert_same_sum(a, b, start.abs().double() + 0.5 * size, terms + 2)


def test_the_order_of_the_sum() -> None:
    """Samples of a distinct bag are summed first, ascending and by chunks; then occurrences over distinct bags."""
    from rec_kernels.reference.numerics import chunked_sum

    table = [rk.EmbeddingBagConfig(3, 4, name="t", feature_names=["f"])]
    module = rk.EmbeddingBagCollection(table)
    of_sample = torch.randint(2, (150,), generator=torch.Generator().manual_seed(1))
    values = torch.tensor([[1, 2], [2, 0]])[of_sample].reshape(-1)
    batch = rk.KeyedJaggedTensor(["f"], values, lengths=torch.full((150,), 2))
    grad = torch.randn(150, 4, generator=torch.Generator().manual_seed(2))
    few = dedup(batch, [["f"]])
    step(module, few, grad)
    distinct = [chunked_sum(grad[few.inverse(0) == u]) for u in range(2)]
    ids = few.unique(0)["f"].to_dense()
    for row in range(3):
        terms = [g for bag, g in zip(ids, distinct, strict=True) if row in bag]
        assert same_bits(module.embedding_bags["t"].weight.grad[row], chunked_sum(torch.stack(terms)))


def test_gradients_of_weights_of_distinct_bags() -> None:
    """Learned weights of distinct bags get the sum of all their samples' gradients."""
    module = collection()
    batch = sessions(list("abcd"), weighted=True)
    few = dedup(batch)
    bags = few.bags()
    weights = bags.weights_or_none().requires_grad_()
    unique = rk.KeyedJaggedTensor(
        bags.keys(), bags.values(), offsets=bags.offsets(), weights=weights, stride_per_key=bags.stride_per_key()
    )
    learned = rk.InverseKeyedJaggedTensor(unique, few.groups(), few._inverse, few.keys())
    whole = learned.to_kjt()
    grad = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(module(learned).values(), weights, grad)
    (expected,) = torch.autograd.grad(module(whole).values(), weights, grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("groups", ["one group", "groups"])
@pytest.mark.parametrize("optimizer", FUSED, ids=str)
def test_accumulate(groups: str, optimizer) -> None:
    """Micro-batches make one update, equal to that of plain batches."""
    few, whole = collection(optimizer), collection(optimizer)
    for module in (few, whole):
        with module.accumulate():
            for seed in range(3):
                batch = sessions(list("abcd"), seed=seed, most=1)
                step(module, dedup(batch, groups) if module is few else batch, whole_numbers(9, WIDTH, seed=seed))
        assert module.step == 1
    assert_same(few, whole)


def test_micro_batches_grouped_alike() -> None:
    """Micro-batches must agree in groups of the collection's features; others, and the groups' order, may differ."""
    table = [rk.EmbeddingBagConfig(12, 4, name=k, feature_names=[k]) for k in "ab"]
    few, whole = (rk.EmbeddingBagCollection(table, optimizer=rk.SGD(lr=0.5)) for _ in range(2))
    whole.load_state_dict(few.state_dict())
    for module in (few, whole):
        with module.accumulate():
            for seed, groups in enumerate(([["c"], ["a"], ["b"]], [["b"], ["a"]], [["a"], ["b"], ["c"]])):
                batch = sessions(list("abc"), seed=seed, most=1)
                step(module, dedup(batch, groups) if module is few else batch, whole_numbers(9, 8, seed=seed))
    assert_same(few, whole)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_inverse_that_changes_before_the_backward(optimizer, accumulates: bool) -> None:
    """A change of the inverse indices raises, as of ids: the gradient would go to other bags."""
    if accumulates and optimizer is None:
        return
    module, few = collection(optimizer), dedup(sessions(list("abcd")), "one group")
    with module.accumulate() if accumulates else contextlib.nullcontext():
        output = module(few).values()
        few.inverse_of_groups().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_freeze() -> None:
    """A frozen feature trains nothing."""
    few, whole = collection(rk.SGD(lr=0.5)), collection(rk.SGD(lr=0.5))
    batch = sessions(list("abcd"), most=1)
    for module, given_batch in ((few, dedup(batch)), (whole, batch)):
        module.freeze("a", "d")
        step(module, given_batch, whole_numbers(9, WIDTH))
    assert_same(few, whole)


@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("backing", ["device", "host", "disk"])
def test_row_caches(backing: str, groups: int, tmp_path: Path) -> None:
    """Row caches train as on plain batches, with and without prefetch(); "lru" counts nothing."""

    def made(name: str) -> rk.EmbeddingBagCollection:
        disk = {"path": tmp_path / name, "memory_budget": 400_000} if backing == "disk" else {}
        return cached.make(cache=rk.RowCache(0.4, ways=4, policy="lru", backing=backing, **disk))

    plain, ahead, whole = map(made, "abc")
    keys = plain.feature_names
    by_name = [[keys], [keys[:2], keys[3:]]][groups]
    for seed in range(4):
        batch = sessions(keys, seed=seed, most=1)
        grad = whole_numbers(9, sum(plain._features.output_dims), seed=seed)
        outputs = [step(plain, dedup(batch, by_name), grad), step(whole, batch, grad)]
        few = dedup(batch, by_name)
        ahead.prefetch(few)
        outputs.append(step(ahead, few, grad))
        assert all(same_bits(outputs[0], other) for other in outputs[1:])
    ours = [c.state_dict() for c in (plain, ahead, whole)]
    others = {name for name in ours[0] if "stats" in name or name == "file_identity"}
    for other in ours[1:]:
        assert set(cached.differing(ours[0], other)) <= others


@pytest.mark.parametrize("groups", [0, 1])
def test_prefetched_rows_come_in_early(groups: int) -> None:
    """prefetch() inserts rows before the lookup, after the previous update; another batch is rejected meanwhile."""
    c = cached.make(cache=rk.RowCache(0.4, ways=4, backing="host"))
    keys = c.feature_names
    by_name = [[keys], [keys[:2], keys[3:]]][groups]
    few = [dedup(sessions(keys, seed=s), by_name) for s in range(2)]
    c(few[0]).values().sum().backward()
    c.prefetch(few[1])
    with pytest.raises(RuntimeError, match="a lookup of another batch"):
        c(few[0])
    c(few[1]).values().sum().backward()


def test_lookups_that_are_not_pooled() -> None:
    """Sequence lookups are rejected; the error names the alternative."""
    module = sequences(rk.SGD(lr=0.5), ("int8", "int8"), cache=rk.RowCache(0.3, ways=2, backing="host"))
    for call in (module, module.rows, module.prefetch, module.for_serving()):
        with pytest.raises(
            TypeError, match=r"without pooling .*: pass features\.to_kjt\(\), or wrap the module in rk\.ded"
        ):
            call(dedup(sessions(list("fgh")), [["f", "g", "h"]]))


def test_missing_features() -> None:
    """KeyError lists the existing keys."""
    few = dedup(sessions(list("abc")), [["a"], ["b"]])
    with pytest.raises(KeyError, match=r"features \['d'\] are not among the input's keys \['a', 'b', 'c'\]"):
        collection()(few)


def test_bad_ids() -> None:
    """A bad id of a distinct bag raises and changes nothing."""
    few, module = dedup(sessions(list("abcd"))), collection(rk.SGD(lr=0.5))
    before = module._weights.clone()
    few.bags().values()[-1] = 12
    with pytest.raises(IndexError, match=r"= 12 \(feature '[abc]', bag \d\) is out of range"):
        module(few)
    assert same_bits(module._weights, before)


def test_late_reports() -> None:
    """On a GPU, errors of an earlier batch have the CPU's message, for lookups and for expanded rows."""
    module = collection(rk.SGD(lr=0.5))
    shared = SharedBags(torch.tensor([[0, 1, 2], [1, 4, 0]]), [0, 1, -1, 1], [2, 3, 3, 3], list("abcd"))
    given = SelectedKeys(torch.zeros(0, dtype=torch.int64), torch.zeros(12, dtype=torch.int64), None, shared.sizes)
    later = "; found on the GPU, in an earlier lookup of this collection"
    text = "inverse_indices of {} have {} at row {}: they must be in [0, {}), the feature's bags"
    first = BAD_LAYOUT + 1 + 12
    with late():
        for position, given_bags, of, words in [
            (first + 4, given, shared, text.format("'b'", 4, 1, 3)),
            (first + 2, given, shared, text.format("'a'", 2, 2, 2)),
            (first, given, shared, "inverse_indices were not valid; they have been overwritten since"),
            (1, None, shared.select_group(1), text.format("'b'", 4, 1, 3)),
        ]:
            module._note(torch.tensor([position, 1]), given_bags, torch.tensor([0, 2, 5, 8, 11]), of)
            assert message(module.check) == words + later
        module.check()


@pytest.mark.parametrize(
    ("groups", "tables"),
    [("groups", "widths"), *full(*((g, t) for g in GROUPS for t in TABLES if (g, t) != ("groups", "widths")))],
)
def test_compiled(groups: str, tables: str) -> None:
    """One graph for batches of any sizes, compiled a few times at most."""
    torch._dynamo.reset()
    ours, theirs = collection(rk.SGD(lr=0.5), tables), collection(rk.SGD(lr=0.5), tables)
    compiled = torch.compile(lambda batch: ours(batch).values().square(), backend="aot_eager", fullgraph=True)
    for seed, size in enumerate((8, 12, 20, 9)):
        few = dedup(sessions(list("xabcd"), 5, size, seed=seed), groups)
        outputs = compiled(few), theirs(few).values().square()
        assert same_bits(*outputs)
        for output in outputs:
            output.sum().backward()
    assert_same(ours, theirs)


class Served(torch.nn.Module):
    """Tables for lookups only."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = collection(rk.SGD(lr=0.5)).for_serving()

    def forward(self, batch) -> Tensor:
        return self.tables(batch).values()


@pytest.mark.parametrize("groups", GROUPS)
def test_export(groups: str) -> None:
    """Exports a program for batches of these sizes."""
    model, few = Served().eval(), dedup(sessions(list("abcd")), groups)
    with torch.no_grad():
        program = torch.export.export(model, (few,)).module()
        assert same_bits(program(few), model(few))
