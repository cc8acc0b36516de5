"""Jagged batches from dicts, lists, padded tensors and offsets per feature; parts of batches, as in TorchRec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import _config

import rec_kernels as rk

KJT = rk.KeyedJaggedTensor


def batch(*, weights: bool = False) -> rk.KeyedJaggedTensor:
    """Three features of two samples."""
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    values = torch.arange(10, 17)
    return KJT(["a", "b", "c"], values, lengths=lengths, weights=torch.rand(7) if weights else None)


def assert_same(found: rk.KeyedJaggedTensor, expected: rk.KeyedJaggedTensor) -> None:
    """Asserts equal keys, ids, bags and weights."""
    assert found.keys() == expected.keys()
    assert found.stride_per_key() == expected.stride_per_key()
    for one, other in ((found.values(), expected.values()), (found.lengths(), expected.lengths())):
        assert torch.equal(one.long(), other.long())
    assert (found.weights_or_none() is None) == (expected.weights_or_none() is None)
    if found.weights_or_none() is not None:
        assert torch.equal(found.weights(), expected.weights())
    assert found.offset_per_key() == expected.offset_per_key()


def _strides(strides: list[int] | None, keys: str = "", inverse: Tensor | None = None) -> rk.KeyedJaggedTensor:
    """Nine bags of one id each, of features with different batch sizes."""
    indices = None if inverse is None else (list(keys), inverse)
    lengths = torch.ones(9).long()
    return KJT(list("abc"), torch.arange(9), lengths=lengths, stride_per_key=strides, inverse_indices=indices)


def test_from_lists() -> None:
    """Each sample is a list of ids, with weights or without."""
    given = {"a": [[10, 11], []], "b": [[12], [13]], "c": [(14, 15, 16), ()]}
    assert_same(KJT.from_lists(given), batch())
    weights = {name: [[0.5 * x for x in bag] for bag in bags] for name, bags in given.items()}
    found = KJT.from_lists(given, weights)
    assert torch.equal(found.weights(), found.values() * 0.5)
    assert KJT.from_lists(given, device="meta").values().is_meta


def test_from_dict() -> None:
    """Tensors of one or several ids, padded and jagged tensors and lists may be combined."""
    given = {
        "one": torch.tensor([3, 4]),
        "two": torch.tensor([[5, 6], [7, 8]], dtype=torch.int32),
        "jagged": rk.JaggedTensor(torch.tensor([9, 9]), offsets=torch.tensor([0, 0, 2])),
        "list": [[1], [2, 3]],
    }
    expected = KJT(
        list(given),
        torch.tensor([3, 4, 5, 6, 7, 8, 9, 9, 1, 2, 3]),
        lengths=torch.tensor([1, 1, 2, 2, 0, 2, 1, 2]),
    )
    assert_same(KJT.from_dict(given), expected)
    assert_same(
        KJT.from_dict({"a": torch.tensor([[10, 11], [0, 0]]), "b": torch.tensor([12, 0])}, padding_value=0),
        KJT(["a", "b"], torch.tensor([10, 11, 12]), lengths=torch.tensor([2, 0, 1, 0])),
    )
    assert KJT.from_dict({"a": torch.arange(3), "b": torch.arange(2)}).stride_per_key() == [3, 2]
    gaps = rk.JaggedTensor(torch.tensor([7, 1, 2, 8, 8]), offsets=torch.tensor([1, 3, 3]), weights=torch.arange(5.0))
    other = rk.JaggedTensor(torch.tensor([5]), offsets=torch.tensor([0, 1, 1]), weights=torch.ones(1))
    joined = KJT.from_dict({"a": gaps, "b": other})  # ids outside of bags are left out
    assert joined.values().tolist() == [1, 2, 5]
    assert joined.weights().tolist() == [1.0, 2.0, 1.0]
    assert KJT.from_dict({}).keys() == []


def test_from_padded() -> None:
    """Padding is left out of bags."""
    padded = torch.tensor([[[10, 11, -1], [-1, -1, -1]], [[12, -1, -1], [13, -1, -1]], [[14, 15, 16], [-1, -1, -1]]])
    assert_same(KJT.from_padded(["a", "b", "c"], padded, -1), batch())


def test_from_offsets_list() -> None:
    """Inputs and offsets of torch.nn.EmbeddingBag give its sums."""
    values = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    offsets = [torch.tensor([0, 2]), torch.tensor([0, 0])]
    weights = [torch.rand(3), torch.rand(2)]
    found = KJT.from_offsets_list(["a", "b"], values, offsets, weights)
    assert found.lengths().tolist() == [2, 1, 0, 2]
    table = torch.randn(6, 4)
    collection = rk.EmbeddingBagCollection(
        [rk.EmbeddingBagConfig(6, 4, name="t", feature_names=["a", "b"], init=lambda w: w.copy_(table))]
    )
    expected = [
        torch.nn.functional.embedding_bag(x, table, o, mode="sum", per_sample_weights=w)
        for x, o, w in zip(values, offsets, weights, strict=True)
    ]
    torch.testing.assert_close(collection(found).values(), torch.cat(expected, dim=1))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: KJT.from_dict({"a": torch.rand(3)}), ValueError, r"features\['a'\] must be ids, int32 or int64"),
        (
            lambda: KJT.from_dict({"a": torch.zeros(1, 1, 1).long()}),
            ValueError,
            r"\[B\] or \[B, L\], got .*\[1, 1, 1\]",
        ),
        (lambda: KJT.from_lists({"a": [1, 2]}), TypeError, r"features\['a'\] must be a list of lists"),
        (lambda: KJT.from_lists({"a": [[1.5]]}), TypeError, r"features\['a'\] must have ids, got 1\.5"),
        (lambda: KJT.from_lists({"a": [[True]]}), TypeError, r"must have ids, got True"),
        (lambda: KJT.from_lists({"a": [[1]]}, {"b": [[1]]}), ValueError, r"weights must have the features \['a'\]"),
        (lambda: KJT.from_lists({"a": [[1]]}, {"a": [[]]}), ValueError, r"one weight for each id"),
        (lambda: KJT.from_padded(["a"], torch.zeros(2, 3, 4).long(), 0), ValueError, r"\[F, B, L\] of 1 keys"),
        (lambda: KJT.from_padded(["a", "a"], torch.zeros(2, 3, 4).long(), 0), ValueError, r"unique, got \['a', 'a'\]"),
        (lambda: KJT.from_padded("ab", torch.zeros(2, 3, 4).long(), 0), ValueError, r"keys must be a list .* 'ab'"),
        (
            lambda: KJT.from_offsets_list(["a", "a"], [torch.arange(3)] * 2, [torch.tensor([0])] * 2),
            ValueError,
            r"keys must be unique, got \['a', 'a'\]",
        ),
        (
            lambda: KJT.from_offsets_list(["a"], [torch.arange(3)], []),
            ValueError,
            r"offsets must have a tensor for each",
        ),
        (lambda: KJT.from_offsets_list(["a"], None, []), ValueError, r"values must have .* for each .*, got None"),
        (
            lambda: KJT.from_offsets_list(["a"], [torch.arange(3)], [torch.tensor([0, 4])]),
            ValueError,
            r"offsets\[0\]\[1\] = 4 must be at most the number of values, 3",
        ),
        (
            lambda: KJT.from_offsets_list(["a"], [torch.arange(3)], [torch.tensor([1])]),
            ValueError,
            r"offsets\[0\]\[0\] must be 0, got 1",
        ),
        (
            lambda: KJT.from_offsets_list(["a"], [torch.arange(3)], [torch.tensor([0, 2, 1])]),
            ValueError,
            r"offsets\[0\]\[2\] = 1 must be at least the one before, 2",
        ),
        (
            lambda: KJT.from_offsets_list(
                ["a", "b"], [torch.arange(3), torch.arange(2)], [torch.tensor([0])] * 2, [torch.ones(2), torch.ones(3)]
            ),
            ValueError,
            r"weights\[0\] must have values\[0\]'s shape, \[3\], got \[2\]",
        ),
        (lambda: batch().split([1, 1]), ValueError, r"segments must be at least 0 and add up to 3"),
        (lambda: batch().permute([3]), IndexError, r"in \[0, 3\), got 3"),
        (lambda: batch().weights(), ValueError, r"weights_or_none\(\)"),
        (lambda: batch().inverse_indices(), ValueError, r"inverse_indices_or_none\(\)"),
        (
            lambda: KJT(["a"], torch.arange(2), lengths=torch.tensor([2]), stride=2),
            ValueError,
            "stride must be 1, .* 2",
        ),
        (
            lambda: KJT(["a"], torch.arange(2), lengths=torch.tensor([2]), offsets=torch.tensor([0, 1])),
            ValueError,
            r"lengths\[0\] = 2 must be 1, the length that offsets give",
        ),
        (
            lambda: KJT(["a"], torch.arange(2), lengths=torch.tensor([2]), offsets=torch.tensor([0, 1, 2])),
            ValueError,
            "lengths describe 1 bags, but offsets 2",
        ),
        (
            lambda: KJT(["a"], torch.arange(2), lengths=torch.tensor([1, 1]), offset_per_key=[0, 1]),
            ValueError,
            r"offset_per_key must be \[0, 2\], .* got \[0, 1\]",
        ),
        (
            lambda: KJT(["a"], torch.arange(2), lengths=torch.tensor([1, 1]), length_per_key=[1, 1]),
            ValueError,
            r"offset_per_key must have 2 elements, .*\[0, 1, 2\]",
        ),
        (
            lambda: KJT(["a"], torch.arange(2), lengths=torch.tensor([2]), length_per_key=[1], offset_per_key=[0, 2]),
            ValueError,
            r"length_per_key must be the differences of offset_per_key, \[0, 2\], got \[1\]",
        ),
        (
            lambda: KJT(
                ["a"],
                torch.arange(2),
                lengths=torch.tensor([1, 1]),
                stride_per_key=[1],
                stride_per_key_per_rank=[[1, 1]],
            ),
            ValueError,
            r"stride_per_key must be the sums of stride_per_key_per_rank, \[2\], got \[1\]",
        ),
        (lambda: _strides([2, 3]), ValueError, "stride_per_key must have a batch size for each of the 3 keys"),
        (lambda: _strides([2, 3, 3]), ValueError, "lengths describe 9 bags, but stride_per_key adds up to 8"),
        (lambda: _strides(None, "a", torch.zeros(1, 2).long()), ValueError, "give stride_per_key"),
        (
            lambda: _strides([2, 3, 4], "a", torch.zeros(1, 2).long()),
            ValueError,
            r"inverse_indices are missing the keys \['b', 'c'\]",
        ),
        (
            lambda: _strides([2, 3, 4], "abc", torch.zeros(3, 2)),
            ValueError,
            r"inverse_indices must be int64 \[3, B\]",
        ),
        (lambda: rk.JaggedTensor.from_dense([]), ValueError, "values must have at least one tensor"),
        (lambda: rk.JaggedTensor.from_dense(*[[torch.arange(2)]] * 2), ValueError, r"floating-point .* torch\.int64"),
        (
            lambda: rk.JaggedTensor.from_dense([torch.rand(2)], [torch.rand(2, 3)]),
            ValueError,
            r"weights must have values' shape \[2\], got \[2, 3\]",
        ),
        (
            lambda: rk.JaggedTensor.from_dense_lengths(torch.rand(1, 2), torch.tensor([1]), torch.ones(1, 2).long()),
            ValueError,
            r"weights must be floating-point numbers, got torch\.int64",
        ),
        (
            lambda: rk.JaggedTensor.from_dense([torch.rand(2)], [torch.rand(1)]),
            ValueError,
            r"weights must have rows as long as those of values, \[2\], got \[1\]",
        ),
        (lambda: rk.JaggedTensor.from_dense_lengths(*[torch.arange(2)] * 2), ValueError, r"\[B, L, ...\], got \[2\]"),
        (
            lambda: rk.JaggedTensor.from_dense_lengths(torch.rand(2, 3), torch.tensor([1])),
            ValueError,
            r"lengths must be \[2\], one per row of values, got \[1\]",
        ),
        (
            lambda: rk.JaggedTensor.from_dense_lengths(torch.rand(2, 3), torch.tensor([1, 4])),
            ValueError,
            r"lengths\[1\] = 4 must be in \[0, 3\]",
        ),
        (
            lambda: rk.JaggedTensor.from_dense_lengths(torch.rand(2, 3), torch.tensor([1, 3]), torch.rand(2)),
            ValueError,
            r"weights must be \[2, 3\], like values, got \[2\]",
        ),
        (lambda: rk.KeyedTensor(["a"], [1], torch.rand(1, 1), 0), ValueError, "key_dim must be 1, the columns, got 0"),
        (lambda: rk.KeyedTensor.from_tensor_list([], [], 1, 0), ValueError, "cat_dim must be 1, the columns, got 0"),
    ],
)
def test_errors(make, error: type[Exception], text: str) -> None:
    """Errors name the argument, the value and what is allowed."""
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("weights", [False, True])
def test_pieces(weights: bool) -> None:
    """split, permute, to_dict and length_per_key select parts of a batch, which concat joins."""
    whole = batch(weights=weights)
    first, none, rest = whole.split([1, 0, 2])
    assert (first.keys(), none.keys(), rest.keys()) == (["a"], [], ["b", "c"])
    assert_same(KJT.concat([first, rest]), whole)
    turned = whole.permute([2, 0])
    assert turned.keys() == ["c", "a"]
    assert turned.values().tolist() == [14, 15, 16, 10, 11]
    assert_same(turned.permute([1, 0]), whole.permute([0, 2]))
    assert whole.length_per_key() == [2, 2, 3]
    assert {k: v.values().tolist() for k, v in whole.to_dict().items()} == {
        "a": [10, 11],
        "b": [12, 13],
        "c": [14, 15, 16],
    }
    assert KJT.empty(is_weighted=True).weights().shape == (0,)


class Turned(torch.nn.Module):
    """A module that moves and permutes a batch."""

    def forward(self, batch: rk.KeyedJaggedTensor) -> tuple[Tensor, ...]:
        """The ids, offsets and weights of two features and one of them again."""
        turned = batch.to("cpu").permute([2, 0, 2])
        return turned.values(), turned.offsets(), turned.weights()


def test_pieces_in_compiled_and_exported_code() -> None:
    """Batches of several sizes: numbers of ids are unknown while torch traces."""
    dynamic = [[{0: torch.export.Dim.DYNAMIC}] * 3 + [None]]
    with _config.patch(backed_size_oblivious=True):
        exported = torch.export.export(Turned(), (batch(weights=True),), dynamic_shapes=dynamic).module()
    compiled = torch.compile(Turned(), fullgraph=True, backend="aot_eager")
    other = KJT(["a", "b", "c"], torch.arange(4), torch.rand(4), lengths=torch.tensor([0, 0, 3, 1, 0, 0, 0, 0, 0]))
    for each in (batch(weights=True), other):
        expected = Turned()(each)
        for traced in (compiled, exported):
            assert all(map(torch.equal, traced(each), expected))


def test_arguments_by_place() -> None:
    """Positional arguments have TorchRec's order, including those that TorchRec passes beside lengths and offsets."""
    whole = batch(weights=True)
    lengths, offsets, starts = whole.lengths(), whole.offsets(), whole.offset_per_key()
    made = KJT(whole.keys(), whole.values(), whole.weights(), lengths, offsets, whole.stride(), offset_per_key=starts)
    assert_same(made, whole)
    assert made.known_offset_per_key() == starts
    assert made.unsync().known_offset_per_key() is None
    assert made.sync().offset_per_key_or_none() == starts
    uniform = KJT(["a"], torch.arange(2), lengths=torch.tensor([1, 1]), stride=2, stride_per_key=[2])
    assert not uniform.variable_stride_per_key()
    ranks = KJT(["a"], torch.arange(2), lengths=torch.tensor([1, 1]), stride_per_key_per_rank=torch.tensor([[1, 1]]))
    assert ranks.stride_per_key() == [2]
    assert ranks.stride_per_key_per_rank() == [[2]]
    assert KJT([], torch.rand(0)).stride() == 0
    nothing = torch.tensor([])
    assert (
        KJT(["a"], nothing, lengths=nothing).offsets().tolist()
        == KJT(["a"], nothing, offsets=nothing).offsets().tolist()
    )
    on_meta = KJT.from_lengths_sync(["a"], whole.values().to("meta"), lengths.to("meta"))
    assert on_meta.known_offset_per_key() is None


def test_features_that_come_twice() -> None:
    """Lookups accept a permuted batch with a repeated feature; methods that need names reject it."""
    twice = batch().permute([1, 0, 1])
    assert twice.keys() == ["b", "a", "b"]
    assert twice["b"].values().tolist() == [12, 13]
    table = rk.EmbeddingBagConfig(20, 4, name="t", feature_names=["a", "b"])
    collection = rk.EmbeddingBagCollection([table])
    assert torch.equal(collection(twice).values(), collection(batch()).values())
    with pytest.raises(ValueError, match="keys must be unique"):
        rk.InverseKeyedJaggedTensor.from_kjt(twice, [["a"]])


def test_numbers_that_are_no_ids() -> None:
    """Batches of any dtype can be split and moved; lookups reject it and name the allowed ones."""
    numbers = KJT(["a", "b"], torch.rand(4), lengths=torch.tensor([1, 3]))
    assert torch.equal(numbers.permute([1, 0]).values(), numbers.values()[[1, 2, 3, 0]])
    rows = KJT(["a", "b"], torch.arange(8).view(4, 2), lengths=torch.tensor([1, 3]))
    assert rows["b"].values().shape == (3, 2)
    bags = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(20, 4, name="t", feature_names=["a", "b"])])
    ids = rk.EmbeddingCollection([rk.EmbeddingConfig(20, 4, name="t", feature_names=["b", "a"])])
    for collection in (bags, ids, bags.for_serving()):
        with pytest.raises(ValueError, match="values must be int32 or int64, got float32"):
            collection(numbers)
        with pytest.raises(ValueError, match=r"values must have 1 dimension\(s\), got shape \[4, 2\]"):
            collection(rows)


def test_printed() -> None:
    """The repr has keys and rows, few of many, and only shapes of tensors without data."""
    assert (
        repr(batch())
        == 'KeyedJaggedTensor({\n    "a": [[10, 11], []],\n    "b": [[12], [13]],\n    "c": [[14, 15, 16], []]\n})'
    )
    assert str(batch()) == f"{batch()!r}\n"
    many = KJT(["a", "b"], torch.arange(2000), lengths=torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 993, *[1000], *[0] * 8]))
    assert repr(many) == (
        "KeyedJaggedTensor({\n"
        '    "a": [[0], [1], [2], ... 3 more ..., [5], [6], [7, 8, 9, ... 987 more ..., 997, 998, 999]],\n'
        '    "b": [[1000, 1001, 1002, ... 994 more ..., 1997, 1998, 1999], [], [], ... 3 more ..., [], [], []]\n})'
    )
    shapes = "stride_per_key=[2, 2, 2], values=torch.int64 [7] on meta, with weights"
    assert repr(batch(weights=True).to("meta")) == f"KeyedJaggedTensor(keys=['a', 'b', 'c'], {shapes})"
    assert repr(rk.JaggedTensor(ids := torch.arange(2, device="meta"), offsets=ids)) == (
        "JaggedTensor(rows=1, values=torch.int64 [2] on meta)"
    )
    columns = rk.KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    assert repr(columns) == 'KeyedTensor({\n    "a": [[0.0], [3.0]],\n    "b": [[1.0, 2.0], [4.0, 5.0]]\n})'
    assert (
        repr(columns.to("meta")) == "KeyedTensor(length_per_key={'a': 1, 'b': 2}, values=torch.float32 [2, 3] on meta)"
    )
    with FakeTensorMode() as mode:
        assert "on cpu" in repr(
            KJT(["a"], mode.from_tensor(torch.arange(2)), offsets=mode.from_tensor(torch.arange(2)))
        )


def test_regrouped_columns() -> None:
    """Column blocks of several pooled results are regrouped as by TorchRec."""
    tensors = [torch.randn(3, d) for d in (2, 4, 1)]
    one, two = rk.KeyedTensor.from_tensor_list(["a", "b"], tensors[:2]), rk.KeyedTensor(["c"], [1], tensors[2])
    assert one.offset_per_key() == [0, 2, 6]
    groups = [["c", "a"], ["b"]]
    found = rk.KeyedTensor.regroup([one, two], groups)
    assert torch.equal(found[0], torch.cat([tensors[2], tensors[0]], dim=1))
    assert torch.equal(found[1], tensors[1])
    assert list(rk.KeyedTensor.regroup_as_dict([one, two], groups, ["x", "y"])) == ["x", "y"]
    with pytest.raises(KeyError, match=r"groups name \['z'\]"):
        rk.KeyedTensor.regroup([one], [["z"]])
    with pytest.raises(ValueError, match="keys must be unique"):
        rk.KeyedTensor.regroup([one, one], groups)
    with pytest.raises(ValueError, match="keys must have one name for each of 2 groups"):
        rk.KeyedTensor.regroup_as_dict([one, two], groups, ["x"])
    with pytest.raises(ValueError, match=r"keys must be unique, got \['x', 'x'\]"):
        rk.KeyedTensor.regroup_as_dict([one, two], groups, ["x", "x"])
    with pytest.raises(ValueError, match="one \\[B, D\\] for each of 1 keys"):
        rk.KeyedTensor.from_tensor_list(["a"], tensors)


def test_collections_take_dicts() -> None:
    """A dict of tensors is accepted as a batch of the collection's features."""
    bags = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(20, 4, name="t", feature_names=["a", "b"])])
    rows = rk.EmbeddingCollection([rk.EmbeddingConfig(20, 4, name="t", feature_names=["a"])])
    given: dict[str, Tensor] = {"b": torch.arange(3), "a": torch.arange(6).view(3, 2), "label": torch.rand(3)}
    batch = KJT.from_dict({"a": given["a"], "b": given["b"]})
    assert torch.equal(bags(given).values(), bags(batch).values())
    assert torch.equal(bags.by_feature(given)["a"], bags.by_feature(batch)["a"])
    assert torch.equal(rows(given)["a"].values(), rows(batch)["a"].values())
    assert torch.equal(rows.rows(given), rows.rows(batch))
    assert torch.equal(bags.for_serving()(given).values(), bags(batch).values())
    with pytest.raises(KeyError, match=r"features \['b'\] are not in the batch, which has \['a'\]"):
        bags({"a": given["a"]})
    with pytest.raises(
        TypeError, match=r'or a dict of tensors, got Tensor: of ids give \{"name": ids\}, with a name of'
    ):
        bags(given["a"])


def test_negative_ids() -> None:
    """The error of a negative id suggests a working alternative; that of a large id does not."""
    table = rk.EmbeddingBagConfig(2**63 - 1, 4, name="t", feature_names=["a"], compression=rk.Hash(buckets=7))
    padded = {"a": torch.tensor([[3, -1], [-1, -1]])}
    for collection in (rk.EmbeddingBagCollection([table]), rk.EmbeddingCollection([table])):
        for lookup in (collection, collection.for_serving()):
            with pytest.raises(
                IndexError, match=r"values\[1\] = -1 .*\); a negative id that is padding .*=rk\.Hash\(buckets\)$"
            ):
                lookup(padded)
        collection(KJT.from_dict(padded, padding_value=-1))
    every = rk.EmbeddingBagConfig(None, 4, name="t", feature_names=["a"], compression=rk.Hash(buckets=7))
    assert rk.EmbeddingBagCollection([every])(padded).values().shape == (2, 4)
    small = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(5, 4, name="t", feature_names=["a"])])
    with pytest.raises(IndexError, match=r"must be in \[0, 5\)$"):
        small({"a": torch.tensor([5])})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.1)], ids=["torch", "fused"])
def test_weights_of_other_dtypes(dtype: torch.dtype, optimizer: object) -> None:
    """Weights of other dtypes are computed as float32; their gradients have the original dtype."""
    bags = rk.EmbeddingBagCollection(
        [rk.EmbeddingBagConfig(20, 4, name="t", feature_names=["a", "b", "c"])], optimizer=optimizer
    )
    given, exact = (batch(weights=True) for _ in range(2))
    given._weights = given._weights.to(dtype).requires_grad_()
    exact._weights = given._weights.detach().float().requires_grad_()
    sums = [bags.for_serving()(x).values() for x in (given, exact)]
    assert torch.equal(*sums)
    grads = []
    for x in (given, exact):
        bags(x).values().sum().backward()
        grads.append(x.weights().grad)
        if optimizer is not None:
            break
    assert grads[0].dtype == dtype
    if optimizer is None:
        torch.testing.assert_close(grads[0].float(), grads[1], rtol=1e-2, atol=1e-3)
