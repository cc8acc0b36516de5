"""State of collections with tables in row formats: saved, loaded, rejected, converted, copied, moved."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import row_cache_collections as cached
import torch
import torch.distributed.checkpoint as dcp
from collection_cases import assert_same, copied, is_tied
from collection_format_cases import DIMS, DTYPES, OPTIMIZERS, ROWS, WITH_MOMENTS, make, numbers, train
from torch import Tensor, nn

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.testing import same_bits

WAYS = ["deepcopy", "pickle", "save", "state_dict", "assign", "file", "meta", "meta context"]
#: Optimizers and formats: float tables alone have another kind of memory.
HALF = rk.Adam(lr=0.1, state_dtype=torch.bfloat16)
KINDS = [*((o, BAG_FORMATS) for o in [*OPTIMIZERS, *WITH_MOMENTS, HALF]), *((o, ["fp32"]) for o in OPTIMIZERS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("optimizer", "formats"), KINDS, ids=str)
def test_copies_go_on_alike(way: str, optimizer, formats: list[str]) -> None:
    """A copy, however made, has the learning rate, and trains independently to equal bytes, including noise."""
    original = make(optimizer, formats)
    train(original)
    original.fused_optimizer.param_groups[0]["lr"] = 0.125
    other = _saved(original) if way == "save" else copied(original, functools.partial(make, optimizer, formats), way)
    if way in ("deepcopy", "pickle", "save"):
        assert other.lr.item() == other.fused_optimizer.param_groups[0]["lr"] == 0.125
    for rate in (9.0, 0.125):  # which no state has
        other.fused_optimizer.param_groups[0]["lr"] = rate
        assert original.lr.item() == 0.125
    params = other.fused_optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(params, other.parameters(), strict=True))
    assert is_tied(other)
    assert_same(original, other)
    assert all(t.device.type == "cpu" for t in other.state_dict().values())
    before = original._weights.clone()
    train(other)
    assert torch.equal(original._weights, before)
    train(original)
    assert_same(original, other)
    assert [p.dtype for p in other.parameters()] == [p.dtype for p in original.parameters()]


def _saved(collection: rk.EmbeddingBagCollection) -> rk.EmbeddingBagCollection:
    """The collection, saved inside a model and loaded."""
    file = io.BytesIO()
    torch.save(nn.Sequential(collection), file)
    file.seek(0)
    return torch.load(file, weights_only=False)[0]


#: Float tables, tables in every format, and tables with a row cache.
MADE = {
    "floats": lambda: make(OPTIMIZERS[1], ["fp32"]),
    "formats": lambda: make(OPTIMIZERS[1]),
    "cached": lambda: cached.make(cached.OPTIMIZERS[2]),
}
CASTS = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double": nn.Module.double,
    "float": nn.Module.float,
    "to": lambda module: module.to("cpu", torch.float16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", MADE)
def test_casts_leave_tables_alone(kind: str, cast: str) -> None:
    """A parent's cast changes neither rows, state, slots nor the learning rate."""
    collection, expected = MADE[kind](), MADE[kind]()
    for either in (collection, expected):
        train(either)
        either.fused_optimizer.param_groups[0]["lr"] = 0.1  # not representable in float16
    before = cached.everything(collection)
    parent = CASTS[cast](nn.ModuleList([collection, nn.Linear(2, 2)]))
    assert (parent[1].weight.dtype == torch.float32) == (cast == "float")
    assert not cached.differing(cached.everything(collection), before)
    assert same_bits(collection.lr, torch.tensor(0.1))
    assert is_tied(collection)
    for either in (collection, expected):
        train(either)
    assert_same(collection, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", MADE)
def test_distributed_checkpoint(kind: str, tmp_path) -> None:
    """torch.distributed.checkpoint in one process restores rows of every dtype, in place and by name."""
    original, other = nn.Sequential(MADE[kind]()), nn.Sequential(MADE[kind]())
    train(original[0])
    train(other[0], 1)
    dcp.save(original.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    for _ in range(2):
        assert_same(original[0], other[0])
        assert is_tied(other[0])
        for either in (original, other):
            train(either[0])


def test_moves() -> None:
    """`.to` moves bytes, views, formats and noise together."""
    collection = make(rk.SGD(lr=0.5), seed=7).to("meta")
    assert all(t.is_meta for t in collection.state_dict().values())
    collection.to_empty(device="cpu")
    assert collection._layout.seed.item() == 7
    assert bytes(collection.embedding_bags["t3"].format.tolist()) == b"int8"
    assert is_tied(collection)


def _one(format: str, dim: int = 16, optimizer=OPTIMIZERS[1]) -> rk.EmbeddingBagCollection:
    return make(optimizer, [format], {format: dim})


@pytest.mark.parametrize("given", BAG_FORMATS)
@pytest.mark.parametrize("own", BAG_FORMATS)
def test_other_formats_are_refused_or_converted(own: str, given: str) -> None:
    """Formats of equal row width are distinguished: int4 and mx6 have 12 bytes for 16 columns."""
    collection, other = _one(own), _one(given)
    train(other)
    before, state = copy.deepcopy(collection), other.state_dict()
    kept = {k: v.clone() for k, v in state.items()}
    if own != given:
        message = f"embedding_bags.t0.weight has rows of format {given}, this collection's are {own}: "
        with pytest.raises(RuntimeError, match=rf"{message}pass convert=True"):
            collection.load_state_dict(state)
        assert_same(collection, before)
    for assign in (False, True):
        collection = copy.deepcopy(before)
        assert not any(collection.load_state_dict(state, assign=assign, convert=True))
        floats = numbers(other, "t0")
        expected = floats if own == given else rk.dequantize_rows(rk.quantize_rows(floats, own), own, 16)
        assert same_bits(numbers(collection, "t0"), expected)
        assert same_bits(collection.embedding_bags["t0"].sum, other.embedding_bags["t0"].sum)
        assert collection.step.item() == 3
        assert is_tied(collection)
        assert collection.state_dict().keys() == before.state_dict().keys()
        # Loading does not change the caller's state.
        assert all(same_bits(state[k], v) for k, v in kept.items())
        train(collection, 1)


def test_widths_that_agree_by_chance() -> None:
    """Equal widths are as in the case above: only the format's name distinguishes them."""
    assert rk.row_bytes("int4", 16) == rk.row_bytes("mx6", 16)


def test_convert_some_of_many_tables() -> None:
    """Tables with another format are converted; the others' bytes are copied."""
    source = make(rk.RowwiseAdagrad(lr=0.1))
    train(source)
    formats = dict(zip(BAG_FORMATS, ["fp32", "fp32", "bf16", "int4", "int4", "mx9", "mx4", "bf16"], strict=True))
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingBagConfig(
            ROWS + i, DIMS[f], name=f"t{i}", feature_names=source.tables[i].feature_names, format=formats[f]
        )
        for i, f in enumerate(BAG_FORMATS)
    ]
    target = rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=0.1))
    with pytest.raises(RuntimeError, match=r"embedding_bags\.t1\.weight has rows of format fp16"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(source.state_dict(), convert=True)
    for i, (given, own) in enumerate(formats.items()):
        rows = [c.embedding_bags[f"t{i}"].weight for c in (source, target)]
        if own == given:
            assert torch.equal(*rows)
        else:
            encoded = rk.quantize_rows(numbers(source, f"t{i}"), own)
            assert torch.equal(rows[1].view(torch.uint8), encoded)


def test_convert_inside_a_parent() -> None:
    """convert_formats() lasts for its block, also when that ends with an exception."""
    parents = [nn.ModuleDict({"tables": _one(f), "dense": nn.Linear(2, 2)}) for f in ("int8", "fp32")]
    narrow, wide = parents
    train(wide["tables"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"tables\.embedding_bags\.t0\.weight has rows of format fp32"):
            narrow.load_state_dict(wide.state_dict())
        with narrow["tables"].convert_formats():
            narrow.load_state_dict(wide.state_dict())
        with pytest.raises(KeyError), narrow["tables"].convert_formats():
            raise KeyError
    assert same_bits(narrow["dense"].weight, wide["dense"].weight)
    expected = rk.quantize_rows(numbers(wide["tables"], "t0"), "int8")
    assert torch.equal(narrow["tables"].embedding_bags["t0"].weight, expected)
    with wide["tables"].convert_formats():
        wide.load_state_dict(narrow.state_dict())
    assert same_bits(numbers(wide["tables"], "t0"), rk.dequantize_rows(expected, "int8", 16))


def _weights(rows: Tensor, name: bytes | None = None) -> dict[str, Tensor]:
    """A state of one table and no optimizer."""
    format = {} if name is None else {"embedding_bags.t0.format": torch.tensor(list(name), dtype=torch.uint8)}
    return {"embedding_bags.t0.weight": rows} | format


BYTES = torch.zeros(ROWS, 24, dtype=torch.uint8)  # int8 rows of 16 columns


MISFITS = [
    (_weights(torch.zeros(ROWS, 15)), True, RuntimeError, r"size mismatch for embedding_bags\.t0\.weight: \[12, 15\]"),
    (_weights(BYTES[:, 1:], b"mx9"), True, RuntimeError, "but rows of format mx9 are 18 wide for 16 columns"),
    (_weights(torch.zeros(ROWS + 1, 16)), True, RuntimeError, r"has \[13, 24\], this collection has \[12, 24\]"),
    (_weights(BYTES[1:], b"int8"), False, RuntimeError, r"has \[11, 24\], this collection has \[12, 24\]"),
    (_weights(BYTES, b"int9"), True, RuntimeError, "one of fp32, fp16, bf16, int8, int4, mx9, mx6, mx4, got 'int9'"),
    (_weights(BYTES, b"int2"), False, RuntimeError, "one of fp32, .*, got 'int2'"),
    (_weights(BYTES.double(), b"int8"), False, RuntimeError, "this collection's are int8"),
    (_weights(BYTES), False, RuntimeError, r"embedding_bags\.t0\.format must be the row format"),
    (_weights(BYTES) | {"embedding_bags.t0.format": torch.tensor([1.5])}, True, RuntimeError, "must be the row format"),
    (_weights(torch.full((ROWS, 16), torch.nan)), True, ValueError, r'x\[0, 0\] = nan: format "int8" holds finite'),
]


@pytest.mark.parametrize(("state", "convert", "error", "message"), MISFITS)
def test_states_that_do_not_fit(state: dict, convert: bool, error: type[Exception], message: str) -> None:
    """Each is rejected with a message; checks before the first write leave everything unchanged."""
    collection = _one("int8", optimizer=None)
    before = copy.deepcopy(collection)
    with pytest.raises(error, match=message):
        collection.load_state_dict(state, convert=convert)
    assert_same(collection, before)
    assert bytes(collection.embedding_bags["t0"].format.tolist()) == b"int8"


def test_incomplete_states() -> None:
    """strict=False ignores a state without the table; bytes without a format's name are ambiguous."""
    collection = _one("int8", optimizer=None)
    rows = rk.quantize_rows(torch.randn(ROWS, 16), "int8")
    with pytest.raises(RuntimeError, match="must be the row format"):
        collection.load_state_dict(_weights(rows), strict=False)
    collection.load_state_dict(_weights(rows, b"int8"))
    assert torch.equal(collection.embedding_bags["t0"].weight, rows)
    collection.load_state_dict({}, strict=False)
    assert torch.equal(collection.embedding_bags["t0"].weight, rows)
    assert bytes(collection.state_dict()["embedding_bags.t0.format"].tolist()) == b"int8"


@pytest.mark.parametrize("format", DTYPES)
def test_wider_floats_are_cast(format: str) -> None:
    """float64 in a state is cast to the table's dtype, as in torch."""
    collection, rows = _one(format, optimizer=None), torch.randn(ROWS, 16).double()
    for assign in (False, True):
        collection.load_state_dict(_weights(rows), assign=assign)
        assert same_bits(collection.embedding_bags["t0"].weight.detach(), rows.to(DTYPES[format]))
        assert is_tied(collection)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_torch_save_of_the_state(keep_vars) -> None:
    """State and parameters are saved with each table's rows as a separate storage, in shared memory."""
    collection = make(rk.RowwiseAdagrad(lr=0.5))
    state = collection.state_dict(keep_vars=keep_vars)
    for name, weight in collection.named_parameters():
        assert isinstance(state[name], torch.nn.Parameter) == keep_vars
        assert (state[name].data_ptr(), state[name].dtype) == (weight.data_ptr(), weight.dtype)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = make(rk.RowwiseAdagrad(lr=0.5))
    other.load_state_dict(torch.load(file))
    assert_same(other, collection)


@pytest.mark.parametrize("cache", [None, rk.RowCache(0.5, ways=4), rk.RowCache(0.5, policy="lfu", ways=4)], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
def test_to_empty_of_a_collection_with_memory(nested, cache) -> None:
    """to_empty keeps non-persistent settings: lookups, frozen features and learning rate."""
    collection, expected = (make(rk.Adam(lr=0.25), seed=7, cache=cache) for _ in range(2))
    for one in (collection, expected):
        train(one)
        one.freeze("f1")
    state = {name: t.clone() for name, t in collection.state_dict().items()}
    kept = {name: collection._layout._buffers[name].clone() for name in ("seed", "records")}

    def filled(t: Tensor) -> Tensor:  # imitates to_empty(), in initialized memory
        return torch.empty_like(t).view(torch.uint8).fill_(77).view(t.dtype) if t.dim() else torch.full_like(t, 1)

    module = nn.Sequential(collection) if nested else collection
    module._apply(filled)
    module.to_empty(device="cpu")
    with pytest.raises(
        RuntimeError, match=r"reset_parameters\(\) of EmbeddingBagCollection: the rows of its tables are"
    ):
        collection.reset_parameters()
    assert all(same_bits(collection._layout._buffers[name], t) for name, t in kept.items())
    collection.load_state_dict(state)
    assert collection.lr.item() == 0.25
    assert_same(collection, expected)
    assert collection.memory_report() == expected.memory_report()
    for one in (collection, expected):
        train(one)
    assert_same(collection, expected)
    assert collection.memory_report() == expected.memory_report()
