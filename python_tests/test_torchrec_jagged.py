"""The jagged containers against TorchRec's: every common method, on equal batches with equal arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rec_kernels as rk

theirs = pytest.importorskip("torchrec.sparse.jagged_tensor")
KINDS = ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")

INT32 = torch.int32
_FACTORS = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0, 1.5, 0.125])
_IDS = torch.tensor([4, 8, 15, 16, 23, 42, 7])
#: The arguments of a container, for each kind, by the name of the case.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "KeyedJaggedTensor": {
        "ragged": {"keys": ["a", "b", "c"], "values": _IDS, "lengths": torch.tensor([2, 0, 1, 1, 3, 0])},
        "offsets": {"keys": ["a", "b"], "values": _IDS, "offsets": torch.tensor([0, 3, 3, 4, 7], dtype=INT32)},
        "both": {
            "keys": ["a", "b"],
            "values": _IDS.int(),
            "lengths": torch.tensor([7, 0]),
            "offsets": torch.tensor([0, 7, 7]),
        },
        "weights": {
            "keys": ["a", "b"],
            "values": _IDS,
            "weights": _FACTORS,
            "lengths": torch.tensor([0, 2, 4, 1], dtype=INT32),
        },
        "empty bags": {
            "keys": ["a", "b"],
            "values": _IDS[:0],
            "weights": _FACTORS[:0],
            "lengths": torch.zeros(4, dtype=INT32),
        },
        "own sizes": {
            "keys": ["a", "b", "c"],
            "values": _IDS,
            "weights": _FACTORS,
            "lengths": torch.tensor([1, 2, 3, 0, 1]),
            "stride_per_key_per_rank": [[1], [3], [1]],
        },
        "inverse": {
            "keys": ["a", "b"],
            "values": _IDS,
            "lengths": torch.tensor([4, 1, 2]),
            "stride_per_key_per_rank": [[1], [2]],
            "inverse_indices": (["a", "b"], torch.tensor([[0, 0, 0, 0], [1, 0, 0, 1]])),
        },
        "one key": {"keys": ["only"], "values": _IDS.float(), "lengths": torch.tensor([3, 4]), "stride": 2},
        "wide": {"keys": ["a", "b"], "values": _IDS[:, None] * torch.ones(2), "lengths": torch.tensor([3, 4])},
        "no key": {"keys": [], "values": _IDS[:0], "lengths": torch.zeros(0, dtype=INT32), "stride": 5},
        "facts": {
            "keys": ["a", "b"],
            "values": _IDS,
            "lengths": torch.tensor([2, 1, 4, 0]),
            "stride": 2,
            "length_per_key": [3, 4],
            "offset_per_key": [0, 3, 7],
            "index_per_key": {"a": 0, "b": 1},
        },
    },
    "JaggedTensor": {
        "ragged": {"values": _FACTORS, "lengths": torch.tensor([2, 0, 4, 1], dtype=INT32)},
        "offsets": {"values": _IDS, "offsets": torch.tensor([0, 7, 7])},
        "weights": {"values": _IDS, "weights": _FACTORS, "offsets": torch.tensor([0, 0, 5, 7])},
        "empty rows": {"values": _FACTORS[:0], "weights": _FACTORS[:0], "lengths": torch.zeros(3, dtype=torch.int64)},
        "wide": {"values": torch.rand(7, 2), "lengths": torch.tensor([3, 0, 4])},
        "both": {"values": _FACTORS, "lengths": torch.tensor([7]), "offsets": torch.tensor([0, 7])},
    },
    "KeyedTensor": {
        "columns": {"keys": ["a", "b", "c"], "length_per_key": [2, 1, 3], "values": torch.rand(4, 6)},
        "one key": {"keys": ["only"], "length_per_key": [3], "values": torch.rand(2, 3).half(), "key_dim": 1},
        "no rows": {"keys": ["a", "b"], "length_per_key": [1, 2], "values": torch.rand(0, 3)},
    },
}

#: Calls of methods that have arguments: of the class, and of a container of it.
CALLS: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "KeyedJaggedTensor": {
        "concat": lambda cls, x: cls.concat(x.split([1] * len(x.keys())) or [x]),
        "empty": lambda cls, x: cls.empty(x.weights_or_none() is not None, values_dtype=torch.int64),
        "empty_like": lambda cls, x: cls.empty_like(x),
        "flatten_lengths": lambda _, x: [x.flatten_lengths(), x.flatten_lengths().offset_per_key()],
        "from_jt_dict": lambda cls, x: cls.from_jt_dict(x.to_dict()),
        "from_lengths_sync": lambda cls, x: cls.from_lengths_sync(
            *(x.keys(), x.values(), x.lengths(), x.weights_or_none(), x.stride()),
            stride_per_key_per_rank=x.stride_per_key_per_rank() or None,
            inverse_indices=x.inverse_indices_or_none(),
        ),
        "from_offsets_sync": lambda cls, x: cls.from_offsets_sync(
            *(x.keys(), x.values(), x.offsets(), x.weights_or_none(), x.stride()),
            stride_per_key_per_rank=x.stride_per_key_per_rank() or None,
        ),
        "permute": lambda _, x: x.permute([*reversed(range(len(x.keys()))), 0][: 2 * len(x.keys())]),
        "split": lambda _, x: (
            [x.split([1, len(x.keys()) - 1]) if x.keys()[1:] else x.split([len(x.keys())])]
            + [(part.keys(), part.values(), part.stride()) for part in x.split([0, len(x.keys())])]
        ),
        "to": lambda _, x: x.to(torch.device("cpu"), non_blocking=True, dtype=torch.float64),
        "to_dict": lambda _, x: [x.to_dict(), x.to_dict(compute_offsets=True)],
    },
    "JaggedTensor": {
        "empty": lambda cls, x: cls.empty(x.weights_or_none() is not None, values_dtype=torch.float64).values(),
        "empty_like": lambda cls, x: cls.empty_like(x),
        "from_dense": lambda cls, x: cls.from_dense(x.to_dense(), x.to_dense_weights()),
        "from_dense_lengths": lambda cls, _: [
            cls.from_dense_lengths(torch.arange(6).view(2, 3), torch.tensor([1, 3]), torch.rand(2, 3).fill_(0.5)),
            cls.from_dense_lengths(torch.arange(6).view(2, 3), torch.tensor([0, 2], dtype=INT32)),
        ],
        "to": lambda _, x: x.to(torch.device("cpu"), non_blocking=True),
        "to_padded_dense": lambda _, x: [x.to_padded_dense(), x.to_padded_dense(2), x.to_padded_dense(5, 1.5)],
        "to_padded_dense_weights": lambda _, x: [x.to_padded_dense_weights(), x.to_padded_dense_weights(3, 0.5)],
    },
    "KeyedTensor": {
        "from_tensor_list": lambda cls, x: cls.from_tensor_list(x.keys(), list(x.to_dict().values()), 1, cat_dim=1),
        "regroup": lambda cls, x: cls.regroup([x], [x.keys()[::-1], x.keys()[:1]]),
        "regroup_as_dict": lambda cls, x: cls.regroup_as_dict([x], [x.keys()[::-1], x.keys()[:1]], ["one", "two"]),
        "to": lambda _, x: x.to(torch.device("cpu"), True),
    },
}
#: Methods for GPUs only; python_tests/test_jagged_containers.py tests them.
ON_GPU = {"pin_memory", "record_stream"}

_OF_BOTH = "ours keep offsets whatever they are given, and have lengths of them; TorchRec's have what they were given"
_OF_ALL = "inverse indices are of all features of a batch: ours refuse to cut it, where TorchRec's drop them"
#: Methods that differ, by kind and name: cases and reason.
DIFFERENT: dict[tuple[str, str], tuple[set[str], str]] = {
    ("JaggedTensor", "lengths_or_none"): ({"offsets", "weights"}, _OF_BOTH),
    ("JaggedTensor", "offsets_or_none"): ({"ragged", "empty rows", "wide"}, _OF_BOTH),
    ("JaggedTensor", "size_in_bytes"): ({"ragged", "empty rows", "wide", "both"}, _OF_BOTH),
    ("KeyedJaggedTensor", "lengths_or_none"): ({"offsets"}, _OF_BOTH),
    ("KeyedJaggedTensor", "offsets_or_none"): (set(CASES["KeyedJaggedTensor"]) - {"offsets", "both"}, _OF_BOTH),
    ("KeyedJaggedTensor", "size_in_bytes"): (set(CASES["KeyedJaggedTensor"]) - {"offsets"}, _OF_BOTH),
    ("KeyedJaggedTensor", "split"): (
        {"inverse", "wide"},
        f"{_OF_ALL}; a piece of TorchRec's without features has values of one dimension",
    ),
    ("KeyedJaggedTensor", "concat"): ({"inverse"}, _OF_ALL),
    ("KeyedJaggedTensor", "permute"): (
        {"inverse", "wide", "no key"},
        f"{_OF_ALL}; TorchRec's take numbers of other rows where values are wide, and no batch without features",
    ),
    ("KeyedJaggedTensor", "empty_like"): (
        {"own sizes", "inverse"},
        "ours keep the batch size, where TorchRec's have 0 and the sizes of features that they do not have",
    ),
    ("KeyedJaggedTensor", "flatten_lengths"): ({"inverse"}, "ours keep inverse indices, which TorchRec's drop"),
    ("KeyedJaggedTensor", "from_jt_dict"): ({"no key"}, "TorchRec's make no batch without features"),
}
#: Methods of TorchRec's that ours lack, and why.
_TRAINERS = "of TorchRec's distributed trainer, which moves batches by its own collectives"
_BUFFERS = "of TorchRec's pipelines, which copy into buffers that are kept; a batch is copied by to()"
LACKING = {
    "JaggedTensor": {"copy_": _BUFFERS},
    "KeyedJaggedTensor": {
        "clear_storage": _TRAINERS,
        "copy_": _BUFFERS,
        "dist_init": _TRAINERS,
        "dist_labels": _TRAINERS,
        "dist_splits": _TRAINERS,
        "dist_tensors": _TRAINERS,
    },
    "KeyedTensor": {},
}


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} | {"__getitem__", "__str__"} & set(dir(kind))


def _methods(kind: str) -> list[str]:
    return sorted(_public(getattr(rk, kind)) & _public(getattr(theirs, kind)) - ON_GPU)


def _plain(x: Any) -> Any:
    """Converts a result for comparison: containers to their parts."""
    kind = type(x).__name__
    if kind == "KeyedJaggedTensor":
        parts = (x.keys(), x.values(), x.lengths(), x.weights_or_none(), x.stride(), x.stride_per_key())
        return kind, _plain([*parts, x.variable_stride_per_key(), x.inverse_indices_or_none()])
    if kind == "JaggedTensor":
        return kind, _plain([x.values(), x.lengths(), x.offsets(), x.weights_or_none()])
    if kind == "KeyedTensor":
        return kind, _plain([x.keys(), x.length_per_key(), x.values()])
    if isinstance(x, Tensor):
        return str(x.dtype), list(x.shape), x.tolist()
    if isinstance(x, (list, tuple)):
        return [_plain(item) for item in x]
    return {key: _plain(item) for key, item in x.items()} if isinstance(x, dict) else x


def _result(module: Any, kind: str, case: str, method: str) -> Any:
    """The result of a method, as plain values; the word "raises" if it does."""
    cls = getattr(module, kind)
    x = cls(**CASES[kind][case])
    call = CALLS[kind].get(method)
    try:
        if method == "__getitem__":
            return _plain([x[key] for key in x.keys()])  # noqa: SIM118
        return _plain(call(cls, x) if call else getattr(x, method)())
    except Exception:
        return "raises"


def _are_equal(kind: str, case: str, method: str) -> bool:
    return _result(rk, kind, case, method) == _result(theirs, kind, case, method)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_do_what_torchrecs_do(kind: str) -> None:
    """All common methods have equal results, except those of the table."""
    found = {
        (kind, method): {case for case in CASES[kind] if not _are_equal(kind, case, method)}
        for method in _methods(kind)
    }
    assert {name: cases for name, cases in found.items() if cases} == {
        name: cases for name, (cases, _) in DIFFERENT.items() if name[0] == kind
    }


@pytest.mark.parametrize("kind", KINDS)
def test_methods_that_are_lacking(kind: str) -> None:
    """Every method of TorchRec's exists here or is in the table, not both."""
    ours, others = _public(getattr(rk, kind)), _public(getattr(theirs, kind))
    assert others - ours <= set(LACKING[kind])
    assert not ours & set(LACKING[kind])
    assert set(CALLS[kind]) <= ours


def test_torchrecs_modules_take_ours() -> None:
    """TorchRec's collections, position weights and models have equal results for batches of either package."""
    torchrec = pytest.importorskip("torchrec")
    processors = pytest.importorskip("torchrec.modules.feature_processor_")
    models, regroup = pytest.importorskip("torchrec.models.dlrm"), pytest.importorskip("torchrec.modules.regroup")
    given = {"keys": ["a", "b"], "values": _IDS % 10, "lengths": torch.tensor([2, 0, 4, 1])}
    own, other = rk.KeyedJaggedTensor(**given), theirs.KeyedJaggedTensor(**given)
    sizes = {"name": "t", "embedding_dim": 4, "num_embeddings": 10, "feature_names": ["a", "b"]}
    pooled = torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(**sizes)])
    rows = torchrec.EmbeddingCollection(tables=[torchrec.EmbeddingConfig(**sizes)])
    weighted, dense = processors.PositionWeightedModuleCollection({"a": 5, "b": 5}), torch.rand(2, 3)
    model = models.DLRM(pooled, 3, [4, 4], [4, 1])
    for use in (
        lambda x: pooled(x).values(),
        lambda x: rows(x)["b"].values(),
        lambda x: weighted(x).weights(),
        lambda x: model(dense, x),
    ):
        assert torch.equal(use(own), use(other))
    # The module keeps the widths of its first columns.
    groups = regroup.KTRegroupAsDict([["b"], ["b", "a"]], ["x", "y"])
    columns = (kind(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3)) for kind in (rk.KeyedTensor, theirs.KeyedTensor))
    found, expected = (groups([block])["y"] for block in columns)
    assert torch.equal(found, expected)
