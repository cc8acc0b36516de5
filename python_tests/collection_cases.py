"""Collections and batches shared by several test files, with comparisons and copies of collections."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Mapping

import torch

import rec_kernels as rk
from rec_kernels.testing import same_bits

OPTIMIZERS = [None, rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5), rk.Adam(lr=0.1)]


def pooled(optimizer=None, **options) -> rk.EmbeddingBagCollection:
    """Tables of 5 x 3 and 4 x 20 elements; the first is padded in the flat tensor."""
    torch.manual_seed(1)
    tables = [
        rk.EmbeddingBagConfig(5, 3, name="a", feature_names=["f"]),
        rk.EmbeddingBagConfig(4, 20, name="b", feature_names=["g", "h"], pooling="mean"),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def sequences(optimizer=None, formats=("fp32", "fp32"), **options) -> rk.EmbeddingCollection:
    """Two tables of different dimensions: the first has features f and g, the second g."""
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingConfig(50, 6, name="a", feature_names=["f", "g"], format=formats[0]),
        rk.EmbeddingConfig(70, 20, name="b", feature_names=["g", "h"], format=formats[1]),
    ]
    return rk.EmbeddingCollection(tables, optimizer=optimizer, **options)


def deduplicated(keys="fgh", seed: int = 1) -> tuple[rk.KeyedJaggedTensor, rk.KeyedJaggedTensor]:
    """Features with 2, 3 and 4 distinct bags in a batch of 7, and the same batch with every bag repeated."""
    g = torch.Generator().manual_seed(seed)
    strides = [2, 3, 4]
    places = torch.stack([torch.randint(0, s, (7,), generator=g) for s in strides])
    lengths = torch.randint(0, 4, (sum(strides),), generator=g)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=g)
    few = rk.KeyedJaggedTensor(
        list("fgh"), values, lengths=lengths, stride_per_key=strides, inverse_indices=(list("fgh"), places)
    )
    parts = {}
    for key, row in zip("fgh", places, strict=True):
        dense = few[key].to_dense()
        parts[key] = [dense[i] for i in row]
    whole = [bag for key in keys for bag in parts[key]]
    return few, rk.KeyedJaggedTensor(list(keys), torch.cat(whole), lengths=torch.tensor([len(bag) for bag in whole]))


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers."""
    return copy.deepcopy(module.state_dict())


def assert_same(
    found: torch.nn.Module | Mapping[str, torch.Tensor], expected: torch.nn.Module | Mapping[str, torch.Tensor]
) -> None:
    """Asserts that two modules or states have equal names and bits: weights, formats, optimizer state, step."""
    one, other = (x.state_dict() if isinstance(x, torch.nn.Module) else x for x in (found, expected))
    assert list(one) == list(other)
    for name, tensor in other.items():
        assert same_bits(one[name], tensor), name


def is_tied(collection: rk.EmbeddingBagCollection) -> bool:
    """Returns True if every table's weight is a view of the flat tensor."""
    storage = collection._weights.untyped_storage().data_ptr()
    return all(p.untyped_storage().data_ptr() == storage for p in collection.parameters())


def copied(
    original: rk.EmbeddingBagCollection, new: Callable[..., rk.EmbeddingBagCollection], way: str
) -> rk.EmbeddingBagCollection:
    """Copies a collection by "deepcopy" or "pickle", or loads its state into a ``new`` collection.

    The ways to load are "state_dict", "assign" and "file". "meta" passes ``device`` to ``new``; "meta context"
    constructs the collection inside a meta device context.
    """
    if way == "deepcopy":
        return copy.deepcopy(original)
    if way == "pickle":
        return pickle.loads(pickle.dumps(original))
    state = snapshot(original)
    if way == "file":
        file = io.BytesIO()
        torch.save(original.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    with torch.device("meta") if way == "meta context" else contextlib.nullcontext():
        other = new(device="meta") if way == "meta" else new()
    if other._weights.is_meta:
        other.to_empty(device="cpu")
    other.load_state_dict(state, assign=way == "assign")
    return other


class OtherJagged:
    """A KeyedJaggedTensor of another library, with only the methods of TorchRec's."""

    def __init__(self, kjt: rk.KeyedJaggedTensor) -> None:
        self._kjt = kjt

    def keys(self) -> list[str]:
        return list(self._kjt.keys())

    def values(self) -> torch.Tensor:
        return self._kjt.values()

    def offsets(self) -> torch.Tensor:
        return self._kjt.offsets()

    def weights_or_none(self) -> torch.Tensor | None:
        return self._kjt.weights_or_none()
