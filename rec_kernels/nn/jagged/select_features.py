"""Selects features and bags of a jagged batch for a lookup."""

from __future__ import annotations

import collections
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import describe_bad_offset, describe_bag, has_data
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.ops.autograd import call
from rec_kernels.ops.jagged_index_select import jagged_index_select

_ops = torch.ops.rec_kernels

#: First element of an op's ``status`` (the smallest bad position) if nothing is bad.
NOTHING_BAD = torch.iinfo(torch.int64).max
#: A bad id is reported by its position in ``values``, ``offsets[i]`` as BAD_LAYOUT + 1 + i, and ``inverse[j]`` as
#: BAD_LAYOUT + 1 + len(offsets) + j.
BAD_LAYOUT = torch.iinfo(torch.int64).min


class Origin(NamedTuple):
    """The batch that features were selected from, kept for messages about its offsets.

    Args:
        offsets: [bags + 1]; keys: F names; strides: F batch sizes; num_values: number of ids.
        from_lengths: whether the batch was created from lengths.
    """

    offsets: Tensor
    keys: list[str]
    strides: list[int]
    num_values: int
    from_lengths: bool

    def describe_bad(self) -> str | None:
        """Describes the first bad offset; None if all are valid. On a GPU the host waits."""
        return describe_bad_offset(
            self.offsets.tolist(),
            self.num_values,
            lambda bag: describe_bag(bag, self.keys, self.strides),
            from_lengths=self.from_lengths,
        )


class SelectedKeys(NamedTuple):
    """Features of a KeyedJaggedTensor in the order of a lookup.

    Args:
        values: [N] ids; offsets: [bags + 1]; weights: [N] or None.
        strides: batch size per feature if they differ, or None.
        origin: the batch that they were copied from on a GPU, or None.
        from_lengths: whether ``offsets`` were computed from lengths, which messages then name.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    strides: list[int] | None
    origin: Origin | None = None
    from_lengths: bool = False

    def weighted(self, is_weighted: bool | None) -> SelectedKeys:
        """Drops unused weights; converts others to float32, with gradients in the original dtype.

        Args:
            is_weighted: option of ``rk.EmbeddingBagCollection``.

        Raises:
            ValueError: weights are required, and the batch has none.
        """
        if self.weights is None:
            if is_weighted:
                raise ValueError("the batch must have weights, because the collection was built with is_weighted=True")
            return self
        if is_weighted is False:
            return self._replace(weights=None)
        if self.weights.dtype == torch.float32 or not self.weights.is_floating_point():
            return self
        return self._replace(weights=self.weights.float())

    def bag_starts(self, features: int) -> list[int]:
        """[F + 1]: index of the first bag of each of ``features`` features."""
        batch = (self.offsets.shape[0] - 1) // max(features, 1)
        return list(itertools.accumulate(self.strides or [batch] * features, initial=0))

    def own_starts(self) -> Tensor:
        """[F + 1] int64: index of the first bag of each feature, from the batch sizes ``strides``.

        Never waits for a GPU, unlike a copy of a list.
        """
        sizes: Any = self.strides
        if has_data(self.offsets):
            starts = array("q", [0, *itertools.accumulate(sizes)])
            return torch.frombuffer(starts, dtype=torch.int64)  # three times as fast as torch.tensor
        device = self.offsets.device
        if device.type == "cpu":
            return torch.tensor([0, *itertools.accumulate(sizes)], device=device)
        runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
        of_features = [torch.full((count,), size, dtype=torch.int64, device=device) for size, count in runs]
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return torch.cat([zero, *of_features]).cumsum(0)


def ids_per_feature(given: SelectedKeys, features: int) -> list[int]:
    """Number of ids of each of ``features`` features."""
    return given.offsets[given.bag_starts(features)].diff().tolist()


def bags_of_feature(given: SelectedKeys, feature: int, features: int) -> SelectedKeys:
    """The bags of one of ``features`` features."""
    first, last = given.bag_starts(features)[feature : feature + 2]
    offsets = given.offsets[first : last + 1]
    ids = slice(int(offsets[0]), int(offsets[-1]))
    weights = None if given.weights is None else given.weights[ids]
    return SelectedKeys(given.values[ids], offsets - offsets[0], weights, None)


def as_batch(features: Any, names: list[str]) -> Any:
    """Converts a dict of features to a batch (``rk.KeyedJaggedTensor.from_dict``); returns anything else unchanged."""
    if not isinstance(features, Mapping):
        return features
    missing = [name for name in names if name not in features]
    if missing:
        raise KeyError(f"features {missing} are not in the batch, which has {list(features)}")
    return KeyedJaggedTensor.from_dict({name: features[name] for name in dict.fromkeys(names)})


def select_keys(kjt, keys: list[str], offset_per_key: list[int] | None = None, *, exact: bool = False) -> SelectedKeys:
    """Selects ``keys`` in that order (repeats allowed) from a KeyedJaggedTensor or TorchRec's.

    Copies nothing if the batch has exactly these keys. Bad offsets raise on the CPU; on a GPU, bags with bad offsets
    become empty, and the first offset of the result is made bad, for the lookup to report.

    Args:
        offset_per_key: start of each feature's ids in ``kjt``, if known. Without it, on a GPU, the result may end with
            ids in no bag, because the host does not wait to learn their number.
        exact: whether the result must have no such ids. The host then waits for a GPU, unless the starts are known, or
            each feature of the batch is in ``keys`` once.

    Raises:
        KeyError: a key is missing. TypeError: another kind of batch. ValueError: bad offsets, on the CPU.
    """
    if not (hasattr(kjt, "keys") and hasattr(kjt, "offsets")):
        raise TypeError(
            f"features must be an rk.KeyedJaggedTensor or TorchRec's, or a dict of tensors, got {type(kjt).__name__}: "
            f'of ids give {{"name": ids}}, with a name of {keys}; of rk.KeyedJaggedWindows give to_kjt(), or to a '
            "pooled lookup an rk.InverseKeyedJaggedTensor"
        )
    have = list(kjt.keys())
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    variable = getattr(kjt, "variable_stride_per_key", bool)()
    strides = list(kjt.stride_per_key()) if variable and have else None
    # Compiled code raises no such messages, and would recompile for batches of the other kind.
    from_lengths = not torch.compiler.is_compiling() and getattr(kjt, "_from_lengths", False)
    if have == keys:
        return SelectedKeys(values, offsets, weights, strides, from_lengths=from_lengths)
    check_keys(keys, have)
    places = {k: f for f, k in enumerate(have)}
    order = [places[k] for k in keys]
    if not order:
        return SelectedKeys(values[:0], offsets.new_zeros(1), None if weights is None else weights[:0], None)
    sizes = [(offsets.shape[0] - 1) // len(have)] * len(have) if strides is None else strides
    known = offset_per_key
    if known is None and isinstance(kjt, KeyedJaggedTensor):
        known = kjt.known_offset_per_key()
    chosen = _permute(values, offsets, weights, order, sizes, known, exact)
    origin = Origin(offsets, have, sizes, values.shape[0], from_lengths) if _reports_late(values) else None
    return SelectedKeys(*chosen, None if strides is None else [strides[f] for f in order], origin)


def _reports_late(values: Tensor) -> bool:
    """True if a status reports bad offsets, instead of an error."""
    return values.device.type != "cpu"


def _permute(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    order: list[int],
    strides: list[int],
    offset_per_key: list[int] | None,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Permutes features into that order; ``offset_per_key``: starts of their ids, or None if unknown."""
    once = len(order) == len(set(order)) == len(strides)
    total = None
    if offset_per_key:
        total = max(sum(offset_per_key[f + 1] - offset_per_key[f] for f in order), 0)  # bad offsets may decrease
    elif _reports_late(values):
        # Allocate for the largest possible number of ids, so that the host does not wait for the actual one.
        total = None if once or exact else values.shape[0] * max(collections.Counter(order).values())
    elif has_data(offsets) and once:
        # Drop ids in no bag, as without a permutation; without a total the op would raise.
        first, last = int(offsets[0]), int(offsets[-1])
        total = None if last - first == values.shape[0] else max(last - first, 0)
    # The op takes float32 only; the lookup checks the original dtype.
    wide = None if weights is None else weights.float()
    out, new_offsets, new_wide, status = call(_ops.jagged_permute.default, values, offsets, order, strides, wide, total)
    if _reports_late(values):
        # The op made bad bags empty, hence valid. Make one offset bad again, so that the lookup reports it and skips
        # its update. A total that differs from the bags' is an error only if the caller gave it.
        # The offsets are copied, because the gradient of weights needs the unmodified ones.
        bad = status[:1] < (NOTHING_BAD if offset_per_key else 0)
        new_offsets = torch.cat([new_offsets[:1].masked_fill(bad, -1), new_offsets[1:]])
    return out, new_offsets, None if weights is None else new_wide.to(weights.dtype)


def select_bags(
    values: Tensor, offsets: Tensor, weights: Tensor | None, index: Tensor, total: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, offsets and weights of the bags ``index``; ``total``: as for ``rk.jagged_index_select``."""
    chosen, new_offsets = jagged_index_select(values, offsets, index, total=total)
    if weights is not None:
        weights, _ = jagged_index_select(weights, offsets, index, total=chosen.shape[0])
    return chosen, new_offsets, weights


def check_keys(keys: Sequence[str], have: list[str]) -> None:
    """Raises KeyError unless ``have`` contains all ``keys``; ValueError if ``keys`` is a string."""
    if isinstance(keys, str):
        raise ValueError(f"keys must be a list of feature names, got {keys!r}")
    known = set(have)
    if not known.issuperset(keys):
        raise KeyError(f"features {[k for k in keys if k not in known]} are not among the input's keys {have}")
