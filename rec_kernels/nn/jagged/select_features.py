"""Features and bags of a jagged batch, chosen: what collections look up of it."""

from __future__ import annotations

import collections
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import bad_offset, has_data, place_of_bag
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.ops.autograd import call
from rec_kernels.ops.jagged_index_select import jagged_index_select

_ops = torch.ops.rec_kernels

#: The first element of a ``status`` of the ops on bags is the smallest bad position; this, if nothing is bad.
NOTHING_BAD = torch.iinfo(torch.int64).max
#: A bad id has its position in ``values``, ``offsets[i]`` has BAD_LAYOUT + 1 + i, and ``inverse`` lies behind as many
#: of these as there are offsets.
BAD_LAYOUT = torch.iinfo(torch.int64).min


class Origin(NamedTuple):
    """The batch that features were chosen from, for messages about its offsets.

    Args:
        offsets: [bags + 1]; keys: F names; strides: F batch sizes; num_values: how many ids it has.
        from_lengths: whether the batch was made from lengths.
    """

    offsets: Tensor
    keys: list[str]
    strides: list[int]
    num_values: int
    from_lengths: bool

    def describe_bad(self) -> str | None:
        """Describes what is wrong with its offsets; None: nothing. On a GPU the host waits."""
        return bad_offset(
            self.offsets.tolist(),
            self.num_values,
            lambda bag: place_of_bag(bag, self.keys, self.strides),
            from_lengths=self.from_lengths,
        )


class SelectedKeys(NamedTuple):
    """Features of a KeyedJaggedTensor in an order that was asked for.

    Args:
        values: [N] ids; offsets: [bags + 1]; weights: [N] or None.
        strides: their batch sizes where these differ, or None.
        origin: what they were copied from on a GPU, or None.
        from_lengths: whether ``offsets`` were made from lengths, which messages then name.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    strides: list[int] | None
    origin: Origin | None = None
    from_lengths: bool = False

    def weighted(self, is_weighted: bool | None) -> SelectedKeys:
        """Drops weights that are not wanted; casts others to float32, where a gradient goes back in their own dtype.

        Args:
            is_weighted: ``rk.EmbeddingBagCollection``'s.

        Raises:
            ValueError: there are no weights, and there must be.
        """
        if self.weights is None:
            if is_weighted:
                raise ValueError("the batch must have weights, as the collection was made with is_weighted=True")
            return self
        if is_weighted is False:
            return self._replace(weights=None)
        if self.weights.dtype == torch.float32 or not self.weights.is_floating_point():
            return self
        return self._replace(weights=self.weights.float())

    def bag_starts(self, features: int) -> list[int]:
        """[F + 1]: where the bags of each of ``features`` features start."""
        batch = (self.offsets.shape[0] - 1) // max(features, 1)
        return list(itertools.accumulate(self.strides or [batch] * features, initial=0))

    def own_starts(self) -> Tensor:
        """[F + 1] int64: where the bags of each feature start, by their batch sizes ``strides``.

        A GPU is not waited for, as a copy of a list would.
        """
        sizes: Any = self.strides
        if has_data(self.offsets):
            starts = array("q", [0, *itertools.accumulate(sizes)])
            return torch.frombuffer(starts, dtype=torch.int64)  # in a third of the time of torch.tensor
        device = self.offsets.device
        if device.type == "cpu":
            return torch.tensor([0, *itertools.accumulate(sizes)], device=device)
        runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
        of_features = [torch.full((count,), size, dtype=torch.int64, device=device) for size, count in runs]
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return torch.cat([zero, *of_features]).cumsum(0)


def ids_of(given: SelectedKeys, features: int) -> list[int]:
    """Numbers of ids of each of ``features`` features."""
    return given.offsets[given.bag_starts(features)].diff().tolist()


def bags_of(given: SelectedKeys, feature: int, features: int) -> SelectedKeys:
    """The bags of one of ``features`` features."""
    first, last = given.bag_starts(features)[feature : feature + 2]
    offsets = given.offsets[first : last + 1]
    ids = slice(int(offsets[0]), int(offsets[-1]))
    weights = None if given.weights is None else given.weights[ids]
    return SelectedKeys(given.values[ids], offsets - offsets[0], weights, None)


def as_batch(features: Any, names: list[str]) -> Any:
    """A batch of the features in a dict (``rk.KeyedJaggedTensor.from_dict``); anything else as it is."""
    if not isinstance(features, Mapping):
        return features
    missing = [name for name in names if name not in features]
    if missing:
        raise KeyError(f"features {missing} are not in the batch, which has {list(features)}")
    return KeyedJaggedTensor.from_dict({name: features[name] for name in dict.fromkeys(names)})


def select_keys(kjt, keys: list[str], offset_per_key: list[int] | None = None, *, exact: bool = False) -> SelectedKeys:
    """``keys`` in that order (repeats allowed), from a KeyedJaggedTensor or TorchRec's.

    No copy when the keys are already these. Bad offsets raise on the CPU; of a batch on a GPU, bags with bad offsets
    are empty, and the first of the result's offsets is bad for the lookup to tell.

    Args:
        offset_per_key: where the ids of ``kjt``'s features start, if it is known. Without it, on a GPU, there may be
            ids in no bag behind the others, as nobody waits to learn how many there are.
        exact: whether there may be none of these. The host waits for a GPU then, unless it is known, or each feature of
            the batch is in ``keys`` once.

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
    # Compiled code names no place, and would be compiled anew for batches of the other kind.
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
    chosen = _permuted(values, offsets, weights, order, sizes, known, exact)
    origin = Origin(offsets, have, sizes, values.shape[0], from_lengths) if _tells_late(values) else None
    return SelectedKeys(*chosen, None if strides is None else [strides[f] for f in order], origin)


def _tells_late(values: Tensor) -> bool:
    """True if a status reports bad offsets, in place of an error."""
    return values.device.type != "cpu"


def _permuted(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    order: list[int],
    strides: list[int],
    offset_per_key: list[int] | None,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features in that order; ``offset_per_key`` if it is known."""
    once = len(order) == len(set(order)) == len(strides)
    total = None
    if offset_per_key:
        total = max(sum(offset_per_key[f + 1] - offset_per_key[f] for f in order), 0)  # bad offsets may fall
    elif _tells_late(values):
        # Allocates for as many as there may be, so that no host waits for their number.
        total = None if once or exact else values.shape[0] * max(collections.Counter(order).values())
    elif has_data(offsets) and once:
        # Ids in no bag are left out, as where nothing is permuted; the op takes it for a mistake if it is not told.
        first, last = int(offsets[0]), int(offsets[-1])
        total = None if last - first == values.shape[0] else max(last - first, 0)
    # The op takes float32; which others a lookup takes is for the lookup to say.
    wide = None if weights is None else weights.float()
    out, new_offsets, new_wide, status = call(_ops.jagged_permute.default, values, offsets, order, strides, wide, total)
    if _tells_late(values):
        # Bags that were bad are empty, and so good. One that is bad again has the lookup tell, and skip its update. A
        # total that is not the bags' is no error, unless it was said to be theirs.
        # (A copy: the gradient of weights needs the offsets as they are.)
        bad = status[:1] < (NOTHING_BAD if offset_per_key else 0)
        new_offsets = torch.cat([new_offsets[:1].masked_fill(bad, -1), new_offsets[1:]])
    return out, new_offsets, None if weights is None else new_wide.to(weights.dtype)


def select_bags(
    values: Tensor, offsets: Tensor, weights: Tensor | None, index: Tensor, total: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, offsets and weights of the bags that ``index`` names; ``total``: as of ``rk.jagged_index_select``."""
    chosen, new_offsets = jagged_index_select(values, offsets, index, total=total)
    if weights is not None:
        weights, _ = jagged_index_select(weights, offsets, index, total=chosen.shape[0])
    return chosen, new_offsets, weights


def no_common_batch(names: Sequence[str], strides: Sequence[int]) -> ValueError:
    """The error of features with batch sizes of their own, where one row for each sample of a batch is asked for."""
    odd = next((f for f, size in enumerate(strides) if size != strides[0]), 0)
    which = f": {names[0]!r} has {strides[0]} samples, {names[odd]!r} has {strides[odd]}" if odd else ""
    return ValueError(
        f"the features have batch sizes of their own and no inverse indices{which}, so there is no batch that their "
        "outputs could be rows of: give all as many samples, or inverse_indices, or use by_feature()"
    )


def check_keys(keys: Sequence[str], have: list[str]) -> None:
    """Raises KeyError unless a batch that has features ``have`` has all of ``keys``; ValueError of one name alone."""
    if isinstance(keys, str):
        raise ValueError(f"keys must be a list of feature names, got {keys!r}")
    known = set(have)
    if not known.issuperset(keys):
        raise KeyError(f"features {[k for k in keys if k not in known]} are not among the input's keys {have}")
