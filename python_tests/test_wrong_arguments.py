"""Arguments of wrong types or values: each error names the argument, the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import rec_kernels as rk


def _table(**given: object) -> rk.EmbeddingBagConfig:
    return rk.EmbeddingBagConfig(100, 8, **{"name": "t", "feature_names": ["a"], **given})


def _batch(**given: object) -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]), **given)


def _rate(value: object) -> None:
    collection = rk.EmbeddingBagCollection([_table()], optimizer=rk.SGD(lr=0.1))
    collection.fused_optimizer.param_groups[0]["lr"] = value


def _placed(**given: object) -> dict[str, rk.Placement]:
    return rk.place_tables([_table()], {"t": torch.ones(100)}, **given)


def _padded(**given: object) -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor.from_dict({"a": torch.tensor([[1, 0]])}, **given)


BAGS = [rk.EmbeddingBag(20, 4), rk.EmbeddingBag(20, 4, format="int8"), rk.EmbeddingBag(20, 4, mode="max")]
NUMBER = "must be a number, at least 0, and finite as float32"
COUNT = "must be an integer, at least 0 and below 2^63"
POSITIVE = "must be an integer, at least 1 and below 2^63"
NAN = float("nan")
IDS, ONE = torch.tensor([[1, 2]]), torch.tensor([1])
COLUMNS = rk.KeyedTensor(["a", "b"], [1, 1], torch.ones(2, 2))
NAMES = "must be a non-empty list of names, which are non-empty strings"
RADIX = rk.Partitions.mixed_radix
INVERSE = rk.InverseKeyedJaggedTensor
MIXED = {"a": torch.tensor([1]), "b": torch.tensor([1], device="meta")}
Cases = list[tuple[Callable[[], object], str]]
VALUES: Cases = [
    (lambda: _table(name=3), "table name 3 must be a string, non-empty and without dots"),
    (lambda: _table(feature_names=[1]), f"table 't': feature_names {NAMES}, got [1]"),
    (lambda: _table(feature_names=[""]), f"table 't': feature_names {NAMES}, got ['']"),
    (lambda: _table(feature_names=5), f"table 't': feature_names {NAMES}, got 5"),
    (lambda: _table(init="zeros"), "table 't': init must be a function of the weight, or None, got 'zeros'"),
    (lambda: _table(lr="x"), f"table 't': lr = 'x' {NUMBER}"),
    (lambda: rk.SGD(lr=None), f"lr = None {NUMBER}"),
    (lambda: rk.Adam(lr=10**400), f"{NUMBER}"),
    (lambda: rk.Adam(lr=torch.ones(2)), f"lr = tensor([1., 1.]) {NUMBER}"),
    (lambda: rk.Adam(lr=0.1, eps=None), f"eps = None {NUMBER}"),
    (lambda: rk.Adam(lr=0.1, weight_decay="x"), f"weight_decay = 'x' {NUMBER}"),
    (lambda: rk.SGD(lr=0.1, clip_grad_norm="x"), "clip_grad_norm = 'x' must be a number above 0, or None"),
    (lambda: _rate("x"), "lr = 'x' must be at least 0, and finite as float32"),
    (lambda: rk.EmbeddingBagCollection([_table()], seed=True), "seed must be an int in [-2^63, 2^63), got True"),
    (lambda: rk.Partitions(None), "Partitions: pairs must have 1 to 4 elements (divisor, modulus), got None"),
    (lambda: rk.Partitions([(1,)]), "Partitions: pairs[0] must be (divisor, modulus), got (1,)"),
    (lambda: rk.Partitions([(1, 2), 3]), "Partitions: pairs[1] must be (divisor, modulus), got 3"),
    (lambda: rk.Partitions([(1, 9)], columns=3), "Partitions: columns must be a sequence of integers, each at least 1"),
    (lambda: RADIX(5), "radices must be a sequence of integers, each at least 1, got 5"),
    (lambda: RADIX([2, "x"]), "radices[1] must be an integer, at least 1 and below 2^63, got 'x'"),
    (lambda: rk.Partitions.chinese_remainder(None), "moduli must be a sequence of integers, each at least 1, got None"),
    (
        lambda: rk.KeyedJaggedTensor.from_lists({"a": [[2**70]]}),
        f"features['a'] must have ids in [-2^63, 2^63), got {2**70}",
    ),
    (
        lambda: rk.KeyedJaggedTensor.from_dict({"a": torch.tensor([[1]]).to_sparse()}),
        "features['a'] must be ids, int32 or int64 [B] or [B, L], got a tensor of layout torch.sparse_coo",
    ),
    (
        lambda: rk.KeyedJaggedTensor.from_dict(MIXED),
        "features must be on one device: feature 'a' is on cpu, and 'b' on meta",
    ),
    (lambda: INVERSE.from_kjt(_batch(), None), "groups must be lists of feature names, one for each group, got None"),
    (lambda: rk.Embedding(10, 4)(torch.tensor([1.0])), "input must be int32 or int64 ids, got torch.float32 [1]"),
    (lambda: _placed(cache_bytes="1GB"), f"cache_bytes {COUNT}, got '1GB'"),
    (lambda: _placed(cache_bytes=None), f"cache_bytes {COUNT}, got None"),
    (lambda: _placed(cache_bytes=True), f"cache_bytes {COUNT}, got True"),
    (lambda: _placed(cache_bytes=0, device_bytes=1e9), f"device_bytes {COUNT}, got 1000000000.0"),
    (lambda: _placed(cache_bytes=0, host_bytes="1GB"), f"host_bytes {COUNT}, got '1GB'"),
    (lambda: rk.RowCache(0.5, policy="lfu", decay_every=True), f"decay_every {COUNT}, got True"),
    (lambda: rk.mixed_dimensions([10, "a"], 8, 0.3), f"num_embeddings[1] {POSITIVE}, got 'a'"),
    (lambda: rk.mixed_dimensions(10, 8, 0.3), "num_embeddings must be a sequence of integers, each at least 1, got 10"),
    (lambda: rk.mixed_dimensions([10], "8", 0.3), f"base_dim {POSITIVE}, got '8'"),
    (lambda: rk.mixed_dimensions([10], 8.5, 0.3), f"base_dim {POSITIVE}, got 8.5"),
    (lambda: rk.mixed_dimensions([10], 8, True), "temperature = True must be at least 0 and finite"),
    (lambda: rk.Adam(lr=True), f"lr = True {NUMBER}"),
    (lambda: rk.Adam(betas=(False, 0.9)), "betas = (False, 0.9) must be two numbers in [0, 1) as float32"),
    (lambda: rk.SGD(clip_grad_norm=True), "clip_grad_norm = True must be a number above 0, or None"),
    (lambda: rk.row_bytes("int8", 1.5), "embedding_dim = 1.5 must be an integer"),
    (lambda: rk.row_bytes("int8", True), "embedding_dim = True must be an integer"),
    (lambda: rk.embedding_bag(IDS, torch.ones(9, 4), padding_idx=True), "padding_idx = True must be an integer"),
    (lambda: rk.embedding_bag(IDS, torch.ones(9, 4), padding_idx="1"), "padding_idx = '1' must be an integer"),
    (lambda: _batch().split([True]), "segments[0] = True must be an integer"),
    (lambda: _batch().split(["1"]), "segments[0] = '1' must be an integer"),
    (lambda: _batch().permute([1.5]), "indices[0] = 1.5 must be an integer"),
    (lambda: _batch(stride=True), "stride = True must be an integer"),
    (lambda: _batch(stride_per_key=[True]), "stride_per_key[0] = True must be an integer"),
    (lambda: _batch()["a"].to_padded_dense(-1), f"desired_length {COUNT}, got -1"),
    (lambda: _batch()["a"].to_padded_dense(True), f"desired_length {COUNT}, got True"),
    (lambda: rk.KeyedTensor(["a"], ["1"], torch.ones(2, 1)), "length_per_key[0] = '1' must be an integer"),
    (lambda: rk.KeyedJaggedWindows(["a"], ONE, ONE, ONE, stride_per_key="1"), "stride_per_key[0] = '1' must be"),
    (lambda: rk.rows_from_fbgemm(IDS, "int8", 2.0), "embedding_dim = 2.0 must be an integer"),
    (
        lambda: rk.rows_to_fbgemm(torch.zeros(1, 9, dtype=torch.uint8), "int8", 1, row_alignment=1.5),
        "row_alignment = 1.5 must be an integer",
    ),
    (lambda: rk.grouped_projection(torch.ones(2, 3), ONE, 3, [2]), "in_dims = 3 must be a list"),
    (lambda: rk.jagged_permute(ONE, torch.tensor([0, 1]), 0, [1]), "permute = 0 must be a list"),
    (lambda: rk.jagged_dedup(ONE, torch.tensor([0, 1]), 0), "groups = 0 must be a list"),
    (lambda: rk.jagged_bucketize(ONE, torch.tensor([0, 1]), ONE, 2, 1), "strides = 1 must be a list"),
    (lambda: rk.JaggedTensor.from_dense(None), "values = None must be a list, an array or a tensor"),
    (lambda: rk.KeyedTensor.regroup([COLUMNS], [3]), "groups[0] must be a non-empty list of keys, got 3"),
    (lambda: rk.KeyedTensor.regroup([COLUMNS], ["ab"]), "groups[0] must be a non-empty list of keys, got 'ab'"),
    (lambda: rk.KeyedTensor.regroup([COLUMNS], [["a"], []]), "groups[1] must be a non-empty list of keys, got []"),
    (lambda: rk.mixed_dimensions([10], 8, "0.3"), "temperature = '0.3' must be at least 0 and finite"),
    (lambda: rk.mixed_dimensions([10], 8, 0.3, threshold="5"), f"threshold {COUNT}, got '5'"),
    (lambda: rk.mixed_dimensions([10], 8, 0.3, budget="5"), "budget = '5' must be above 0 and finite"),
    (lambda: _batch(stride_per_key=1), "stride_per_key = 1 must be a list"),
    (lambda: _batch(stride_per_key="1"), "stride_per_key[0] = '1' must be an integer"),
    (lambda: _batch(stride_per_key=[1.0]), "stride_per_key[0] = 1.0 must be an integer"),
    (lambda: _batch(stride="1"), "stride = '1' must be an integer"),
    (lambda: _batch(stride=2), "stride must be 1, the number of bags of each of 1 keys, got 2"),
    (lambda: _batch(stride_per_key_per_rank=[1]), "stride_per_key_per_rank[0] = 1 must be a list"),
    (lambda: _batch(stride_per_key_per_rank=[["1"]]), "stride_per_key_per_rank[0][0] = '1' must be an integer"),
    (lambda: _batch(length_per_key=1), "length_per_key = 1 must be a list"),
    (lambda: _batch(offset_per_key=[0, "1"]), "offset_per_key[1] = '1' must be an integer"),
    (lambda: _padded(padding_value="-1"), "padding_value = '-1' must be an integer"),
    (lambda: _padded(padding_value=0.5), "padding_value = 0.5 must be an integer"),
    (lambda: _padded(padding_value=2**70), f"padding_value = {2**70} must be below 2^63"),
    (
        lambda: rk.KeyedJaggedTensor.from_padded(["a"], torch.tensor([[[1, 0]]]), 0.5),
        "padding_value = 0.5 must be an integer",
    ),
    (
        lambda: rk.replace_embeddings(torch.nn.Sequential(torch.nn.Embedding(10, 4)), format="x"),
        "0: format must be 'fp32', 'fp16', 'bf16', 'int8', 'int4', 'mx9', 'mx6' or 'mx4', got 'x'",
    ),
    *[
        (
            lambda sizes=sizes: rk.EmbeddingBagConfig(*sizes, name="t", feature_names=["a"]),
            f"table 't': {name} {POSITIVE}, got {size!r}",
        )
        for size in (10.0, "10", True, 0, -1, 2**63, None)
        for name, sizes in (("num_embeddings", (size, 4)), ("embedding_dim", (10, size)))
    ],
    *[
        (
            lambda padding=padding: rk.EmbeddingBagConfig(10, 4, name="t", feature_names=["a"], padding_idx=padding),
            f"table 't': padding_idx = {padding!r} must be {what}",
        )
        for padding, what in ((10, "in [-10, 10)"), (-11, "in [-10, 10)"), (1.5, "an integer"), (True, "an integer"))
    ],
    (
        lambda: rk.table_layout([5, 3], [16, 32], padding_idx=[5, None]),
        "padding_idx[0] = 5 must be None or an id of the feature, in [0, 5)",
    ),
    (
        lambda: rk.table_layout([5, 3], [16, 32], padding_idx=[None, -1]),
        "padding_idx[1] = -1 must be None or an id of the feature, in [0, 3)",
    ),
    (
        lambda: rk.table_layout([5, 3], [16, 32], padding_idx=[None]),
        "padding_idx must have an element for each of the 2 features, got 1",
    ),
    (lambda: rk.table_layout([5, 3], [16, 32], padding_idx=2), "padding_idx = 2 must be a list"),
    *[
        (lambda rate=rate: _table(lr=rate), f"table 't': lr = {rate} {NUMBER}")
        for rate in (-0.1, torch.inf, torch.nan, 1e39)
    ],
    (lambda: rk.EmbeddingBagCollection([_table(lr=0.3)]), "table 't': lr = 0.3 requires a fused optimizer"),
    *[
        (lambda betas=betas: rk.Adam(betas=betas), f"betas = {betas!r} must be two numbers in [0, 1)")
        for betas in (0.9, (0.9,), "ab", (0.9, "b"), (0.9, None), None, ((0.9,), (0.9,)), (0.9, 1.0))
    ],
    *[
        (
            lambda value=value: rk.RowCache(backing="disk", path="rows", memory_budget=10**6, generation=value),
            f"generation {COUNT}, got {value!r}",
        )
        for value in (-1, "1", 1.0, True)
    ],
    *[
        row
        for kind in (rk.EmbeddingBagCollection, rk.EmbeddingCollection)
        for row in (
            (lambda kind=kind: kind(_table()), "tables must be a list of rk.EmbeddingBagConfig"),
            (lambda kind=kind: kind([_table(), "u"]), "tables[1] must be an rk.EmbeddingBagConfig"),
            (
                lambda kind=kind: kind([_table(feature_names=["a", "a"])]),
                "name ['a@t']: a table must list a feature only once",
            ),
            (
                lambda kind=kind: kind([_table(feature_names=["a", "a@u"]), _table(name="u")]),
                "name ['a@u']: a table must list a feature only once",
            ),
        )
    ],
    (lambda: rk.mixed_dimensions([], 4, 0.3), "num_embeddings must name at least one table, got none"),
    (lambda: rk.mixed_dimensions([5, 0], 4, 0.3), f"num_embeddings[1] {POSITIVE}, got 0"),
    (lambda: rk.mixed_dimensions([NAN, 3], 4, 0.3), f"num_embeddings[0] {POSITIVE}, got nan"),
    (lambda: rk.mixed_dimensions([5, 6], 0, 0.3), f"base_dim {POSITIVE}, got 0"),
    (lambda: rk.mixed_dimensions([5, 6], 4, -0.1), "temperature = -0.1 must be at least 0 and finite"),
    (lambda: rk.mixed_dimensions([5, 6], 4, NAN), "temperature = nan must be at least 0 and finite"),
    (lambda: rk.mixed_dimensions([5, 6], 4, 0.3, threshold=NAN), f"threshold {COUNT}, got nan"),
    (lambda: rk.mixed_dimensions([5, 6], 4, 0.3, threshold=-1), f"threshold {COUNT}, got -1"),
    (lambda: rk.mixed_dimensions([5, 6], 4, 0.3, budget=0), "budget = 0 must be above 0 and finite"),
    (lambda: _placed(cache_bytes=NAN), f"cache_bytes {COUNT}, got nan"),
    (lambda: _placed(cache_bytes=-1), f"cache_bytes {COUNT}, got -1"),
    (lambda: _placed(cache_bytes=0, host_bytes=-5), f"host_bytes {COUNT}, got -5"),
    (lambda: _placed(cache_bytes=100, ways=0), "ways must be"),
    (lambda: _placed(cache_bytes=100, policy="fifo"), "policy must be 'lru' or 'lfu', got 'fifo'"),
    (
        lambda: rk.place_tables([_table()] * 2, {"t": torch.ones(100)}, cache_bytes=100),
        "got ['t'] more than once",
    ),
    (lambda: rk.place_tables([_table()], {}, cache_bytes=100), "an entry for table 't'"),
    (lambda: rk.place_tables([_table()], {"t": torch.ones(3)}, cache_bytes=100), "table 't' must be [100]"),
    *[
        (
            lambda bad=bad: rk.place_tables(
                [_table()], {"t": torch.ones(100).index_fill(0, ONE, bad)}, cache_bytes=100
            ),
            f"counts of table 't': element 1 = {bad} must be finite and at least 0",
        )
        for bad in (-1.0, NAN)
    ],
    (lambda: rk.Hash(0), f"Hash: buckets {POSITIVE}, got 0"),
    (lambda: rk.Hash(1e3), f"Hash: buckets {POSITIVE}, got 1000.0"),
    (lambda: rk.Hash(2**63), f"Hash: buckets {POSITIVE}, got 9223372036854775808"),
    *[
        (lambda n=n: rk.QuotientRemainder(n), f"QuotientRemainder: collisions {POSITIVE}, got {n!r}")
        for n in (0, 4.0, True)
    ],
    (lambda: rk.QuotientRemainder(2, "max"), "combine must be one of concat, add, mult, got 'max'"),
    (lambda: rk.QuotientRemainder(2, compose="bag"), "compose must be 'per_id' or 'pooled', got 'bag'"),
    (lambda: rk.MixedDimension(2.5), f"MixedDimension: dim {POSITIVE}, got 2.5"),
    (lambda: rk.MixedDimension(0), f"MixedDimension: dim {POSITIVE}, got 0"),
    (
        lambda: _table(compression=rk.MixedDimension(9)),
        "table 't': MixedDimension: dim = 9 must be at most embedding_dim = 8",
    ),
    (
        lambda: rk.EmbeddingConfig(5, 8, name="t", feature_names=["a"], compression=rk.MixedDimension(2)),
        "= MixedDimension(dim=2) must be None or have compose",
    ),
    (lambda: _table(compression="hash"), "compression must be rk.Hash, "),
    (lambda: rk.Partitions([(1, 0)]), f"Partitions: pairs[0]: modulus {POSITIVE}, got 0"),
    (lambda: rk.Partitions([(1, 10.9)]), f"Partitions: pairs[0]: modulus {POSITIVE}, got 10.9"),
    (lambda: rk.Partitions([("1", 9)]), f"Partitions: pairs[0]: divisor {POSITIVE}, got '1'"),
    (lambda: RADIX([2**32, 2**32, 2]), f"divisor {POSITIVE}, got {2**64}"),
    (lambda: rk.Partitions([(1, 9)], combine="concat", columns=[2.0]), f"Partitions: columns[0] {POSITIVE}, got 2.0"),
    (lambda: rk.Partitions([(1, 2)] * 5), "pairs must have 1 to 4"),
    (lambda: rk.Partitions([]), "pairs must have 1 to 4"),
    (lambda: rk.Partitions([(1, 9)], columns=[4]), "columns must have one width for each pair"),
    (
        lambda: _table(compression=rk.Partitions([(1, 4), (1, 6)])),
        "table 't': partitions [(1, 4), (1, 6)] are not complementary for 100 ids: ids 0 and 12 both",
    ),
    (
        lambda: rk.EmbeddingBagConfig(
            9, 7, name="t", feature_names=["a"], compression=rk.QuotientRemainder(4, "concat")
        ),
        "embedding_dim = 7 must be a multiple of 2, for 2 concatenated parts of equal width; use an even one, ",
    ),
    (
        lambda: _table(compression=rk.Partitions([(1, 10), (10, 10)], combine="concat", columns=[4, 2])),
        "columns = [4, 2] must add up to embedding_dim = 8",
    ),
    (
        lambda: rk.fake_quantize(torch.ones(2, 16), "mx6", step=1.5),
        "step must be an int or an int64 tensor with 0 dimensions, got 1.5",
    ),
    (
        lambda: rk.fake_quantize(torch.ones(2, 16, device="meta"), "mx6", rounding="stochastic", seed=torch.tensor(1)),
        "same device",
    ),
    (
        lambda: rk.fuse_embedding_bags(torch.nn.Sequential(rk.EmbeddingBag(9, 4))),
        "example_inputs must be arguments of the model's forward",
    ),
]
KINDS: Cases = [
    (
        lambda: rk.RowCache(0.5, backing="disk", path=7, memory_budget=10**6),
        "path must be a str or an os.PathLike, got 7",
    ),
    (lambda: rk.KeyedJaggedTensor.from_lists(None), "features must be a dict with the names of features, got NoneType"),
    (lambda: rk.KeyedJaggedTensor.from_dict([1]), "features must be a dict with the names of features, got list"),
    (
        lambda: _batch(stride_per_key=[1], inverse_indices=torch.tensor([[0]])),
        "inverse_indices must be names and their bags, (list, int64 [F, B]), got tensor([[0]])",
    ),
    (lambda: INVERSE.from_kjt(None, [["a"]]), "kjt must be an rk.KeyedJaggedTensor or TorchRec's, got NoneType"),
    (
        lambda: INVERSE.from_kjt(_batch(), [["a"]]).with_rest(None),
        "features must be an rk.KeyedJaggedTensor or TorchRec's, got NoneType",
    ),
    (lambda: rk.deduplicated(5, "a"), "module must be a torch.nn.Module, got int"),
    (lambda: rk.deduplicated(torch.nn.Linear(1, 1), None), "group must be a group's number, or the name of one of its"),
    (lambda: rk.LowRankCrossNet(4, num_layers=1, low_rank=1)(None), "input must be a tensor, got NoneType"),
    *[
        (lambda layer=layer: layer(torch.tensor([1, 2]), [0, 1]), "offsets must be a tensor, got list")
        for layer in BAGS
    ],
    *[
        (lambda layer=layer: layer(torch.tensor([[1, 2]]), None, [[1.0, 1.0]]), "per_sample_weights must be a tensor")
        for layer in BAGS
    ],
    (
        lambda: BAGS[1](torch.tensor([1, 2]), torch.tensor([0]), [1.0, 1.0]),
        "per_sample_weights must be a tensor, got list",
    ),
    (lambda: rk.embedding_bag(torch.tensor([[1]]), [[1.0]]), "weight must be a tensor, got list"),
    (lambda: rk.Embedding.from_pretrained([[1.0, 2.0]]), "embeddings must be a tensor, got list"),
    (lambda: rk.EmbeddingBag.from_pretrained([[1.0, 2.0]]), "embeddings must be a tensor, got list"),
    (lambda: rk.Embedding(1, 2, _weight=[[1.0, 2.0]]), "_weight must be a tensor, got list"),
    (lambda: rk.EmbeddingBag(1, 2, _weight=[[1.0, 2.0]], format="int8"), "_weight must be a tensor, got list"),
    (lambda: rk.expand([1.0], ONE), "x must be a tensor, got list"),
    (lambda: rk.expand(torch.ones(1, 2), [0]), "inverse must be a tensor, got list"),
    (lambda: rk.fake_quantize([1.0], "int8"), "x must be a tensor, got list"),
    (lambda: rk.rows_from_fbgemm([1], "int8", 2), "rows must be a tensor, got list"),
    (lambda: rk.JaggedTensor.from_dense([[1, 2]]), "values[0] must be a tensor, got list"),
    (lambda: rk.JaggedTensor.from_dense([ONE], [[1.0]]), "weights[0] must be a tensor, got list"),
    (lambda: rk.JaggedTensor.from_dense_lengths(IDS, ONE, [[1.0, 2.0]]), "weights must be a tensor, got list"),
    (
        lambda: rk.KeyedJaggedTensor.from_offsets_list(["a"], [ONE], [torch.tensor([0])], [[1.0]]),
        "weights[0] must be a tensor, got list",
    ),
    (lambda: rk.KeyedTensor.from_tensor_list(["a"], [[1]]), "tensors[0] must be a tensor, got list"),
    (lambda: rk.KeyedJaggedWindows.from_kjt({"a": ONE}), "kjt must be an rk.KeyedJaggedTensor or TorchRec's, got dict"),
    (lambda: INVERSE.from_kjt(_batch(), [["a"]]).inverse(False), "group must be a group's number or the name of a"),
    *[
        (
            lambda kind=kind: kind([_table()])(rk.JaggedTensor(ONE, offsets=torch.tensor([0, 1]))),
            "features must be an rk.KeyedJaggedTensor",
        )
        for kind in (rk.EmbeddingBagCollection, rk.EmbeddingCollection)
    ],
    *[
        (
            lambda wrong=wrong: rk.EmbeddingBagCollection([_table()], optimizer=rk.SGD()).set_grad_scaler(wrong),
            "scaler must be a torch.amp.GradScaler or None, got",
        )
        for wrong in (2.0, ONE, "scaler", torch.amp.GradScaler)
    ],
    (lambda: rk.fuse_embedding_bags(3, torch.ones(1)), "model must be a torch.nn.Module, got int"),
]
CASES = [*((ValueError, *case) for case in VALUES), *((TypeError, *case) for case in KINDS)]


@pytest.mark.parametrize(("error", "call", "message"), CASES, ids=[message[:40] for *_, message in CASES])
def test_errors_say_what_is_wrong(error: type[Exception], call: Callable[[], object], message: str) -> None:
    """Errors are this package's own, instead of those of a later operation."""
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_tensors_as_numbers() -> None:
    """An option given as a tensor keeps its value if the tensor changes."""
    number = torch.tensor(0.5)
    optimizer = rk.SGD(lr=number, clip_grad_norm=number, clip_grad_value=number, weight_decay=number)
    table = rk.EmbeddingBagConfig(4, 2, name="t", feature_names=["f"], lr=number)
    adam = rk.Adam(betas=[number, 0.9])
    number.fill_(7)
    assert adam == rk.Adam(betas=(0.5, 0.9))
    assert hash(adam) == hash(rk.Adam(betas=(0.5, 0.9)))
    assert (optimizer.lr, optimizer.clip_grad_norm, optimizer.clip_grad_value, optimizer.weight_decay) == (0.5,) * 4
    assert table.lr == 0.5
