"""User data that deviates from the trainer's interface: accepted if unambiguous, otherwise a one-line error."""

from __future__ import annotations

import itertools
import re
import sys
import types

import numpy as np
import pytest
import torch
from dlrm_cases import Changed, reader
from dlrm_tiny import TinyData

import rec_kernels as rk
from rec_kernels.dlrm import Batch, Feature, TrainConfig, train
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.data import DataError

pytestmark = pytest.mark.usefixtures("no_pictures")


def bags(values, key="id", **more):
    return rk.KeyedJaggedTensor([key], values, offsets=torch.arange(len(values) + 1), **more)


def with_ids(change, **more):
    return lambda batch: batch._replace(features=bags(change(batch.features.values()), **more))


def with_weights(weights):
    return lambda batch: batch._replace(features=bags(batch.features.values(), weights=weights))


def with_dense_value(value):
    def change(batch):
        dense = batch.dense.double()
        dense[3, 1] = value
        return batch._replace(dense=dense)

    return change


def changed(change, split="train", number=1):
    """The tiny data set with a change to one batch of a split, or to all (number None)."""
    data = Changed(TinyData(), lambda batches: batches)

    def batches(name, batch_size, start=0):
        for at, batch in enumerate(TinyData().batches(name, batch_size, start), start):
            yield change(batch) if name == split and number in (at, None) else batch

    data.batches = batches
    return data


def uneven():
    """A batch of 50 bags of one feature, and one of another."""
    ids = torch.zeros(51, dtype=torch.int64)
    return rk.KeyedJaggedTensor(["id", "more"], ids, offsets=torch.arange(52), stride_per_key=[50, 1])


ACCEPTED = {
    "int64 labels": lambda b: b._replace(label=b.label.long()),
    "bool labels": lambda b: b._replace(label=b.label.bool()),
    "labels [B, 1]": lambda b: b._replace(label=b.label[:, None]),
    "float64 dense": lambda b: b._replace(dense=b.dense.double()),
    "int32 ids": with_ids(torch.Tensor.int),
    "gradients": lambda b: b._replace(dense=b.dense.clone().requires_grad_(), label=b.label.clone().requires_grad_()),
}
WRONG = {
    "columns": (lambda b: b._replace(dense=b.dense[:, :1]), r"dense has shape \[50, 1\], must be \[50, 2\]: \[rows"),
    "labels": (lambda b: b._replace(label=b.label.repeat(2, 1).T), r"label has shape \[50, 2\], must be \[B\] or"),
    "array": (lambda b: b._replace(dense=b.dense.numpy()), "dense is ndarray, must be a tensor"),
    "label": (
        lambda b: b._replace(label=b.label.index_fill(0, torch.tensor([7]), 3)),
        r"label\[7\] is 3\.0, must be 0",
    ),
    "sparse": (lambda b: b._replace(dense=b.dense.to_sparse()), "dense has layout torch.sparse_coo, must be torch.str"),
    "shared bags": (lambda b: b._replace(shared=bags(b.features.values()[1:], "s")), "shared has 49 bags for each key"),
    "complex": (lambda b: b._replace(dense=b.dense + 0j), "dense is torch.complex64, must be float32"),
    "nan": (with_dense_value(np.nan), r"dense\[3, 1\] is nan, must be a finite number of float32"),
    "too large": (with_dense_value(1e300), r"dense\[3, 1\] is 1e\+300, must be a finite number of float32"),
    "key": (with_ids(lambda ids: ids, key="ID"), r"features has keys \['ID'\], which must include feature 'id'"),
    "unused key": (
        lambda b: b._replace(shared=bags(b.features.values(), "s")),
        r"features and shared have keys \['s'\] without a Feature: add one for each",
    ),
    "no bags": (lambda b: b._replace(features=b.features.values()), "features is Tensor, must be a KeyedJaggedTensor"),
    "bags": (with_ids(lambda ids: ids[:-1]), "features has 49 bags for each key, but label has 50 rows"),
    "float ids": (
        with_ids(torch.Tensor.float),
        r"ids of features are torch\.float32, must be torch\.int32 or torch\.int64",
    ),
    "weights": (with_weights(torch.ones(50).double()), "weights of features are torch.float64, must be torch.float32"),
    "nan weights": (with_weights(torch.full((50,), np.nan)), r"weights\[0\] of features is nan, must be finite"),
    "bags of their own": (
        lambda b: b._replace(features=uneven()),
        r"features has \[50, 1\] bags for its keys \['id', 'more'\], but label has 50 rows",
    ),
    "twice": (lambda b: b._replace(shared=b.features), r"features and shared have keys \['id'\] more than once"),
    "tuple": (tuple, r"it is tuple, must be rec_kernels\.dlrm\.Batch"),
}


def config(tmp_path):
    return TrainConfig(data="x:y", batch_size=50, runs_dir=str(tmp_path))


def test_what_can_only_mean_one_thing_has_the_same_bits(tmp_path):
    expected = train(config(tmp_path), TinyData(), progress=False)
    for name, change in ACCEPTED.items():
        for split in ("train", "test"):
            found = train(config(tmp_path), changed(change, split, None), progress=False)
            assert found["log_loss"] == expected["log_loss"], name


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches_are_told_in_one_line(name, tmp_path, monkeypatch, capsys):
    change, message = WRONG[name]
    module = types.ModuleType("own")
    module.make = lambda: changed(change)
    monkeypatch.setitem(sys.modules, "own", module)
    assert main(["train", "--data", "own:make", "--batch-size", "50", "--runs-dir", str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: data set 'tiny', batch 1 of split 'train'")
    with pytest.raises(DataError, match=message):
        raise DataError(line)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda *_: None, r"batch 0 of split 'train': batches\(\) returned NoneType, must be an iterator of Batch"),
        (lambda *_: int("x"), r"batch 0 of split 'train', made in test_dlrm_own_data\.py, line \d+: invalid literal"),
        (lambda *_: iter(()), "batch 0 of split 'train' is missing"),
        (lambda *_: TinyData().batches("train", 20), "batch 0 of split 'train': it has 20 rows, must be 50"),
    ],
)
def test_batches_that_are_none_are_told(batches, message, tmp_path):
    data = changed(None)
    data.batches = batches
    with pytest.raises(DataError, match=message):
        train(config(tmp_path), data, progress=False)


def test_wrong_test_rows_are_told(tmp_path):
    with pytest.raises(DataError, match=r"batch 0 of split 'test': dense\[3, 1\] is inf, must be a finite number"):
        train(config(tmp_path), changed(with_dense_value(np.inf), "test", 0), progress=False)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("num_dense", 2.0, "num_dense is 2.0, must be a whole number of 0 or more"),
        ("features", [("id", 20)], r"a feature is \('id', 20\), must be Feature\(name, num_embeddings\)"),
        ("features", [Feature("id", 0)], "num_embeddings of feature 'id' is 0, must be a whole number of 1 or more"),
        (
            "features",
            [Feature("id", 20, "max")],
            "which cannot have a table: .*pooling must be 'sum' or 'mean', got 'max'",
        ),
        ("features", [Feature(3, 20)], "which cannot have a table: table name 3 must be a string"),
        ("features", [Feature("id", 20)] * 2, r"has features \['id', 'id'\], whose names must be unique"),
        ("features", [], "has no features: a model needs one or more"),
        ("features", [Feature("i.d", 20)], "which cannot have a table: .*'i.d' must be .* without dots"),
        ("num_rows", lambda split: 400.0, r"num_rows\('train'\) is 400.0, must be a whole number of 0 or more"),
    ],
)
def test_wrong_members_are_named(member, value, message, tmp_path):
    data = changed(lambda batch: batch)
    setattr(data, member, value)
    with pytest.raises(DataError, match=message):
        train(config(tmp_path), data, progress=False)


def test_numbers_of_numpy_are_numbers():
    data = changed(lambda batch: batch)
    data.features, data.num_dense = [Feature("id", np.int64(20))], np.int32(2)
    checked = reader(data, 50)
    assert {type(checked.features[0].num_embeddings), type(checked.num_dense)} == {int}
    assert len(list(itertools.islice(checked.batches("train", 50, 3), 9))) == 5


def reused(batches):
    """Batches that reuse the same tensors, as NumPy buffers do."""
    buffers = {name: np.zeros(200, kind) for name, kind in (("label", "f4"), ("ids", "i8"))}
    dense = torch.zeros(200, 2)
    for batch in batches:
        rows = len(batch.label)
        buffers["label"][:rows], buffers["ids"][:rows] = batch.label, batch.features.values()
        dense[:rows] = batch.dense
        label, ids = (torch.from_numpy(buffers[name])[:rows] for name in ("label", "ids"))
        yield Batch(dense[:rows], bags(ids), label)


def endless(batches):
    yield from batches
    raise AssertionError("a batch behind num_rows is asked for")


@pytest.mark.parametrize("change", [reused, endless])
def test_data_sets_that_have_the_same_bits(change, tmp_path):
    """Batches may reuse memory, and more of them than num_rows says are ignored."""
    expected = train(config(tmp_path), TinyData(), progress=False)
    found = train(config(tmp_path), Changed(TinyData(), change), progress=False)
    assert {name: found[name] for name in ("auc", "log_loss")} == {n: expected[n] for n in ("auc", "log_loss")}


def test_an_error_of_a_loader_has_its_place(tmp_path):
    """An IndexError of a loader is not reported as an id out of range."""

    def failing(batches):
        yield next(batches)
        [][3]

    message = r"batch 1 of split 'train', made in test_dlrm_own_data.py, line \d+: list index out of range"
    with pytest.raises(DataError, match=message):
        train(config(tmp_path), Changed(TinyData(), failing), progress=False)


def test_bags_that_rows_share_by_their_inverse(tmp_path):
    """Distinct bags with inverse indices are a batch with all rows."""

    def distinct(batch):
        ids, inverse = batch.features.values().unique(return_inverse=True)
        sizes = {"stride_per_key": [len(ids)], "inverse_indices": (["id"], inverse[None])}
        jagged = rk.KeyedJaggedTensor(["id"], ids, offsets=torch.arange(len(ids) + 1), **sizes)
        return batch._replace(features=jagged)

    expected = train(config(tmp_path), TinyData(), progress=False)
    found = train(config(tmp_path), Changed(TinyData(), lambda batches: map(distinct, batches)), progress=False)
    assert found["log_loss"] == pytest.approx(expected["log_loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"embedding": "qr_concat", "embedding_dim": 3, "threshold": 0},
            "no model can have these options: .* use an even one",
        ),
        ({"embedding_dim": 2**20}, r"no model can have these options: num_embeddings\[0\] = \d+ must be at most"),
    ],
)
def test_options_that_no_model_has_leave_no_run(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TinyData, "features", (Feature("id", 2**40 if "embedding" not in options else 20),))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["train", "--data", "dlrm_tiny:tiny", "--runs-dir", str(tmp_path), *flags]) == 1
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.MULTILINE)
    assert not list(tmp_path.iterdir())
