"""TorchRec's configurations as tables of our collections."""

from __future__ import annotations

import re
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

import rec_kernels as rk


def modules():
    """TorchRec's configurations and modules, or a skipped test."""
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    return configs, pytest.importorskip("torchrec.modules.embedding_modules")


def test_pooled() -> None:
    """The collection loads the state of TorchRec's, and has equal outputs."""
    configs, torchrec = modules()
    tables = [
        configs.EmbeddingBagConfig(10, 4, name="t", feature_names=["a"], pooling=configs.PoolingType.MEAN),
        configs.EmbeddingBagConfig(12, 8, name="u", feature_names=["b"], init_fn=torch.nn.init.normal_),
    ]
    theirs = torchrec.EmbeddingBagCollection(tables=tables)
    ours = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.1))
    ours.load_state_dict(theirs.state_dict())
    assert [table.pooling for table in ours.tables] == ["mean", "sum"]
    features = rk.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 9, 5]), lengths=torch.tensor([1, 2, 0, 2]))
    kjt = pytest.importorskip("torchrec.sparse.jagged_tensor").KeyedJaggedTensor(
        keys=["a", "b"], values=features.values(), lengths=features.lengths()
    )
    torch.testing.assert_close(ours(kjt).values(), theirs(kjt).values(), rtol=1e-6, atol=1e-6)


def test_per_id_and_formats() -> None:
    """Data types are row formats, also for sequences."""
    configs, _ = modules()
    for data_type, format in (("FP16", "fp16"), ("BF16", "bf16"), ("INT8", "int8"), ("INT4", "int4")):
        table = configs.EmbeddingConfig(
            10, 8, name="t", feature_names=["a"], data_type=configs.DataType[data_type], weight_init_min=0.25
        )
        collection = rk.EmbeddingCollection([table], optimizer=rk.SGD(lr=0.1))
        assert [(type(t), t.format) for t in collection.tables] == [(rk.EmbeddingConfig, format)]
        rows = collection(rk.KeyedJaggedTensor(["a"], torch.arange(10), lengths=torch.ones(10, dtype=torch.int64)))
        assert rows["a"].values().min() > 0.2  # values of init_fn


class Pooling(Enum):
    """Stands for TorchRec's PoolingType if TorchRec is not installed."""

    MEAN = "MEAN"
    NONE = "NONE"


def duck(**options) -> SimpleNamespace:
    """A table with the fields of TorchRec's configuration."""
    fields = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "feature_names": ["a"], "data_type": "FP32"}
    return SimpleNamespace(**{**fields, "init_fn": None, **options})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (duck(data_type="INT2"), "table 't': data_type must be one of FP32, FP16, BF16, INT8, INT4, got 'INT2'"),
        (duck(use_virtual_table=True), "table 't': use_virtual_table must be left at its default, got True"),
        (duck(num_embeddings_post_pruning=5), "table 't': num_embeddings_post_pruning must be left at its default"),
        (duck(pooling=Pooling.NONE), "table 't': pooling must be "),
        (duck(feature_names=[]), "table 't': feature_names must be a non-empty list"),
        (duck(num_embeddings=0), "table 't': num_embeddings"),
    ],
)
def test_refused(table, message: str) -> None:
    """Errors name the table, the field, the value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.EmbeddingBagCollection([table])


def test_pooling_type() -> None:
    """Our own configuration takes TorchRec's PoolingType."""
    assert rk.EmbeddingBagConfig(10, 4, name="t", feature_names=["a"], pooling=Pooling.MEAN).pooling == "mean"
