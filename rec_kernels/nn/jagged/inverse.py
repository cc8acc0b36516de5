"""InverseKeyedJaggedTensor: a batch that stores repeated bags once, and optionally the ids that bags share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import check_batch, check_keys_differ, has_data, index_of_key
from rec_kernels.nn.jagged.container import JaggedContainer
from rec_kernels.nn.jagged.select_features import BAD_LAYOUT, NOTHING_BAD, check_keys, select_bags
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows
from rec_kernels.ops.layout_records import check_tensor

_ops = torch.ops.rec_kernels


class InverseKeyedJaggedTensor(JaggedContainer):
    """Ids of several features for a batch, with bags that repeat between samples stored once.

    Features form *groups*. A group has U distinct samples, each with one bag per feature of the group, and ``inverse``
    maps each of the B samples of the batch to one of them. Features in no group, the *rest*, have one bag per sample.
    ``from_kjt`` finds the distinct samples of a batch; data with known sessions can use the constructor. Do not modify
    the tensors afterwards.

    Overlapping bags may be stored as windows of one buffer, which is smaller to keep and to move; ``with_windows()``
    finds them. The bags are built from the windows once, on first use; nothing else changes.

    Args:
        unique: the stored bags: those of groups first, group by group, then the rest. ``stride_per_key`` is U for
            features of a group, and B for the rest. ``rk.KeyedJaggedTensor`` or ``rk.KeyedJaggedWindows``.
        groups: feature names of each group, in the order of ``unique``.
        inverse: [G, B] int64: index of the distinct sample, per group and sample of the batch.
        keys: all feature names in the order of the batch; None: the order of ``unique``.

    Source: Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model Training
    Infrastructure", MLSys 2023, arXiv:2211.05239.

    Raises:
        ValueError: an empty group, a feature in two groups or in the wrong position, or batch sizes, dtypes or devices
            that do not match. KeyError: a group names an unknown feature. IndexError: ``inverse`` is out of range (on
            the CPU; on a GPU a collection's lookup reports it, see ``rk.EmbeddingBagCollection.check``, and methods
            that build the whole batch raise it, while ``rk.deduplicated`` returns rows of zeros).
    """

    _tensors = ("_unique", "_inverse")
    _plain = ("_groups", "_keys")

    def __init__(
        self,
        unique: KeyedJaggedTensor | KeyedJaggedWindows,
        groups: Sequence[Sequence[str]],
        inverse: Tensor,
        keys: list[str] | None = None,
    ) -> None:
        if not isinstance(unique, (KeyedJaggedTensor, KeyedJaggedWindows)):
            raise TypeError(
                f"unique must be an rk.KeyedJaggedTensor or rk.KeyedJaggedWindows, got {type(unique).__name__}"
            )
        groups = _checked_groups(groups, unique.keys())
        _check_parts(unique, groups, inverse)
        keys = unique.keys() if keys is None else keys
        check_keys_differ(keys)
        if sorted(keys) != sorted(unique.keys()):
            raise ValueError(f"keys must be those of unique, {unique.keys()}, in the order of the batch, got {keys}")
        if has_data(unique.values()):
            unique.offset_per_key()  # cached from now on, also after a move
        self._unique, self._groups, self._inverse, self._keys = unique, groups, inverse, list(keys)

    @classmethod
    def from_kjt(cls, kjt, groups: Sequence[Sequence[str]]) -> InverseKeyedJaggedTensor:
        """Finds the repeated samples of a batch.

        Two samples are equal in a group if all their bags of its features are: the same ids in the same order, and
        bitwise equal weights (``rk.jagged_dedup``). Put features that change together into one group. On a GPU the host
        waits once, for the sizes.

        Args:
            kjt: ``rk.KeyedJaggedTensor`` or TorchRec's, which is not modified.
            groups: feature names of each group; features in no group are the rest.

        Raises:
            KeyError: a group names an unknown feature. ValueError: an empty group, a feature in two groups, features
            with batch sizes of their own, weights that require a gradient (samples that share a bag would share it),
            bad dtypes or offsets.
        """
        if isinstance(kjt, InverseKeyedJaggedTensor):
            raise TypeError("kjt is already an rk.InverseKeyedJaggedTensor: pass kjt.to_kjt() to group it differently")
        check_batch("kjt", kjt)
        keys = list(kjt.keys())
        groups = _checked_groups(groups, keys)
        if getattr(kjt, "variable_stride_per_key", bool)():
            raise ValueError(
                "the features have their own batch sizes (stride_per_key), so their bags are already distinct"
            )
        values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "weights must not require a gradient, because samples share bags: compute them from unique(), "
                "or detach them"
            )
        group_of = {key: g for g, group in enumerate(groups) for key in group}
        numbers = [group_of.get(key, -1) for key in keys]
        batch = kjt.stride()
        kept, inverse, status = _find_distinct(values, offsets, numbers, weights, batch)
        ordered = [*group_of, *(key for key in keys if key not in group_of)]
        places = {key: f for f, key in enumerate(keys)}
        unique = _select_stored(kjt, [places[key] for key in ordered], numbers, kept, ordered, status)
        return cls._from_parts(unique, groups, inverse, keys)

    @classmethod
    def _from_parts(
        cls, unique: KeyedJaggedTensor | KeyedJaggedWindows, groups: list[list[str]], inverse: Tensor, keys: list[str]
    ) -> InverseKeyedJaggedTensor:
        """Creates a batch from consistent parts, without checks."""
        new = cls.__new__(cls)
        new._unique, new._groups, new._inverse, new._keys = unique, groups, inverse, keys
        return new

    def keys(self) -> list[str]:
        """F feature names, in the batch's order."""
        return list(self._keys)

    def groups(self) -> list[list[str]]:
        """The feature names of each group."""
        return [list(group) for group in self._groups]

    def stride(self) -> int:
        """Batch size B of the whole batch."""
        return self._inverse.shape[1]

    def bags(self) -> KeyedJaggedTensor:
        """All stored bags, in the constructor's order: groups first, with batch sizes per feature.

        Windows are converted to bags on the first call. If the windows were created on a GPU, the host waits in that
        call, which raises IndexError for a window outside of the values.
        """
        return self._unique if isinstance(self._unique, KeyedJaggedTensor) else self._unique.to_kjt()

    def stored(self) -> KeyedJaggedTensor | KeyedJaggedWindows:
        """The stored features: bags, or the windows that bags are built from."""
        return self._unique

    def with_windows(self) -> InverseKeyedJaggedTensor:
        """Stores bags without weights on the CPU as windows of one buffer.

        Raises:
            As ``KeyedJaggedWindows.from_kjt``, which finds the windows.
        """
        if isinstance(self._unique, KeyedJaggedWindows):
            return self
        return self._from_parts(KeyedJaggedWindows.from_kjt(self._unique), self._groups, self._inverse, self._keys)

    def with_rest(self, features: KeyedJaggedTensor) -> InverseKeyedJaggedTensor:
        """Adds features that are in no group, so that one lookup serves all. Windows become bags.

        Raises:
            ValueError: a feature does not have one bag per sample, or as ``rk.KeyedJaggedTensor.concat``.
        """
        check_batch("features", features)
        if any(size != self.stride() for size in features.stride_per_key()):
            raise ValueError(
                f"features must have {self.stride()} bags each, one per sample, got {features.stride_per_key()}"
            )
        bags = self.bags()
        if not features.keys():
            return self._from_parts(bags, self._groups, self._inverse, self._keys)
        joined = KeyedJaggedTensor.concat([bags, features])
        return self._from_parts(joined, self._groups, self._inverse, [*self._keys, *features.keys()])

    def known_offset_per_key(self) -> list[int] | None:
        """[F + 1]: start of each feature's ids in ``bags()``, if the host knows it; else None."""
        if isinstance(self._unique, KeyedJaggedWindows):
            return self._unique.known_offset_per_key()
        known = self._unique._offset_per_key
        if torch.compiler.is_compiling():  # compiled code cannot compare version counters
            return None if known is None else known[1]
        return self._unique.known_offset_per_key()

    def unique(self, group: int | str) -> KeyedJaggedTensor:
        """The distinct samples of a group: U bags per feature.

        Ids and weights are views. On a GPU the host waits if it does not know where the group's ids start; it knows
        this for batches of ``from_kjt`` and for batches created on the CPU.

        Args:
            group: its index, or the name of one of its features.

        Raises:
            KeyError: the feature is in no group. IndexError: the index is out of range.
        """
        g = self._group_index(group)
        first = sum(map(len, self._groups[:g]))
        return self._features(first, first + len(self._groups[g]))

    def inverse(self, group: int | str) -> Tensor:
        """[B] int64: index of each sample's distinct sample. ``group`` and errors: as for ``unique``."""
        return self._inverse[self._group_index(group)]

    def inverse_of_groups(self) -> Tensor:
        """[G, B] int64: ``inverse`` of every group."""
        return self._inverse

    def rest(self) -> KeyedJaggedTensor | None:
        """The features in no group, B bags each; None if every feature is in a group."""
        first = sum(map(len, self._groups))
        return self._features(first, len(self._keys)) if first < len(self._keys) else None

    def group_of_keys(self) -> dict[str, int | None]:
        """Maps each feature to its group's index; None for the rest."""
        return dict.fromkeys(self._keys) | {key: g for g, group in enumerate(self._groups) for key in group}

    def places(self, keys: list[str]) -> Tensor:
        """[F, B] int64: index of each sample's bag within its feature, for at least one feature."""
        every, groups = torch.arange(self.stride(), device=self._inverse.device), self.group_of_keys()
        return torch.stack([every if (g := groups[key]) is None else self._inverse[g] for key in keys])

    def _bag_indices(self, keys: list[str]) -> Tensor:
        """Indices into all stored bags. On a GPU, raises the IndexError that the constructor could not."""
        if self._inverse.device.type != "cpu" and not torch.compiler.is_compiling():
            _check_ranges(self._inverse, self._groups, self._unique)
        names, strides = self._unique.keys(), self._unique.stride_per_key()
        starts = dict(zip(names, itertools.accumulate(strides, initial=0), strict=False))
        first = torch.tensor([starts[key] for key in keys], device=self._inverse.device)
        return self.places(keys) + first[:, None]

    def to_kjt(self) -> KeyedJaggedTensor:
        """The whole batch: original keys, ids, offsets and weights. On a GPU the host waits.

        Raises:
            IndexError: on a GPU, ``inverse`` is out of range.
        """
        index = self._bag_indices(self._keys).reshape(-1) if self._keys else self._inverse.new_zeros(0)
        unique = self.bags()
        values, offsets, weights = select_bags(unique.values(), unique.offsets(), unique.weights_or_none(), index)
        return KeyedJaggedTensor._from_parts(self._keys, values, offsets, weights)

    def dedup_factor(self, key: str | None = None) -> float:
        """Ids of the whole batch per stored id, 1.0 if no ids are stored. On a GPU the host waits.

        Args:
            key: a feature; None: all features in groups.

        Raises:
            KeyError: an unknown feature. IndexError: on a GPU, ``inverse`` is out of range, or a window is outside of
            the values.
        """
        if key is not None:
            index_of_key(key, self._keys)
        names = [name for name, g in self.group_of_keys().items() if g is not None and key in (None, name)]
        kept = self.num_stored(names)
        return int(self._unique.lengths()[self._bag_indices(names)].sum()) / kept if kept else 1.0

    def num_stored(self, keys: Sequence[str]) -> int:
        """Number of stored ids of these features; for windows, of ids that they cover. On a GPU the host waits.

        Raises:
            ValueError: ``keys`` is a string, not a list. KeyError: an unknown feature. IndexError: on a GPU, a window
            is outside of the values.
        """
        check_keys(keys, self._keys)
        if isinstance(self._unique, KeyedJaggedWindows):
            return self._unique.num_stored(keys)
        return sum(count for key, count in self.num_stored_of_keys().items() if key in keys)

    def num_stored_of_keys(self) -> dict[str, int]:
        """``num_stored([key])`` of each key, with the same errors, in one pass."""
        if isinstance(self._unique, KeyedJaggedWindows):
            return self._unique.num_stored_of_keys()
        counts = itertools.pairwise(self._unique.offset_per_key())
        return {key: b - a for key, (a, b) in zip(self._unique.keys(), counts, strict=True)}

    def lengths(self, group: int | str) -> Tensor:
        """[F, U]: bag lengths of a group's distinct samples. ``group`` and errors: as for ``unique``."""
        g = self._group_index(group)
        first, strides = sum(map(len, self._groups[:g])), self._unique.stride_per_key()
        start, features = sum(strides[:first]), len(self._groups[g])
        return self._unique.lengths()[start : start + features * strides[first]].view(features, -1)

    def _group_index(self, group: int | str) -> int:
        if isinstance(group, str):
            index_of_key(group, self._keys)
            number = self.group_of_keys()[group]
            if number is None:
                raise KeyError(f"{group!r} is in no group: the groups are {self._groups}")
            return number
        if isinstance(group, bool) or not isinstance(group, int):
            raise TypeError(f"group must be a group's number or the name of a feature, got {group!r}")
        if not 0 <= group < len(self._groups):
            raise IndexError(f"group {group} must be in [0, {len(self._groups)}): the groups are {self._groups}")
        return group

    def _features(self, first: int, last: int) -> KeyedJaggedTensor:
        """Features ``first`` to ``last`` - 1 of the stored bags, which share a batch size."""
        unique, strides = self.bags(), self._unique.stride_per_key()
        bags = list(itertools.accumulate(strides, initial=0))
        values, offsets, weights = unique.values(), unique.offsets(), unique.weights_or_none()
        if last - first == len(strides):  # all of them: starts are not needed
            found = KeyedJaggedTensor._from_parts(unique.keys(), values, offsets, weights)
            known = unique.known_offset_per_key()
        else:
            known = self.known_offset_per_key() or unique.offset_per_key()
            part, offsets = slice(known[first], known[last]), offsets[bags[first] : bags[last] + 1]
            if first:
                offsets = offsets - known[first]
            weights = None if weights is None else weights[part]
            found = KeyedJaggedTensor._from_parts(unique.keys()[first:last], values[part], offsets, weights)
        if known is not None:
            found.keep_offset_per_key([i - known[first] for i in known[first : last + 1]])
        return found

    def __repr__(self) -> str:
        return (
            f"InverseKeyedJaggedTensor(keys={self._keys}, groups={self._groups}, batch={self.stride()}, "
            f"values={self._unique.values().shape[0]})"
        )


def _checked_groups(groups: Sequence[Sequence[str]], keys: list[str]) -> list[list[str]]:
    is_list = isinstance(groups, (list, tuple))
    if not is_list or any(not isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"groups must be lists of feature names, one for each group, got {groups!r}")
    checked, known = [list(group) for group in groups], set(keys)
    seen: dict[str, int] = {}
    for g, group in enumerate(checked):
        if not group:
            raise ValueError(f"groups[{g}] must name at least one feature, got none")
        for key in group:
            if key not in known:
                raise KeyError(f"groups[{g}] names {key!r}, which is not among the keys {keys}")
            if key in seen:
                other = checked[seen[key]]
                raise ValueError(f"{key!r} is in both groups[{seen[key]}] = {other} and groups[{g}] = {group}")
            seen[key] = g
    return checked


def _check_parts(unique: KeyedJaggedTensor | KeyedJaggedWindows, groups: list[list[str]], inverse: Tensor) -> None:
    names, strides = unique.keys(), unique.stride_per_key()
    grouped = [key for group in groups for key in group]
    if names[: len(grouped)] != grouped:
        raise ValueError(f"unique must have the features of groups first, {grouped}, in this order, got {names}")
    if isinstance(unique, KeyedJaggedTensor) and unique.inverse_indices_or_none() is not None:
        raise ValueError("unique must have no inverse_indices: inverse maps samples to bags")
    check_tensor("inverse", inverse)
    if inverse.dtype != torch.int64 or inverse.dim() != 2 or inverse.shape[0] != len(groups):
        raise ValueError(
            f"inverse must be int64 [{len(groups)}, B] for the {len(groups)} groups, got {inverse.dtype} "
            f"{list(inverse.shape)}"
        )
    if inverse.device != unique.values().device:
        raise ValueError(f"inverse must be on unique's device, {unique.values().device}, got {inverse.device}")
    sizes = dict(zip(names, strides, strict=True))
    for g, group in enumerate(groups):
        if len({sizes[key] for key in group}) > 1:
            raise ValueError(f"features of groups[{g}] must have one batch size, got {[(k, sizes[k]) for k in group]}")
    for key in names[len(grouped) :]:
        if sizes[key] != inverse.shape[1]:
            raise ValueError(
                f"{key!r} is in no group, so its batch size must be that of inverse, {inverse.shape[1]}, got "
                f"{sizes[key]}"
            )
    if has_data(inverse):
        _check_ranges(inverse, groups, unique)


def _check_ranges(inverse: Tensor, groups: list[list[str]], unique: KeyedJaggedTensor | KeyedJaggedWindows) -> None:
    sizes = dict(zip(unique.keys(), unique.stride_per_key(), strict=True))
    for g, group in enumerate(groups):
        size = sizes[group[0]]
        bad = ((inverse[g] < 0) | (inverse[g] >= size)).nonzero()
        if len(bad):
            b = int(bad[0])
            raise IndexError(
                f"inverse[{g}, {b}] = {int(inverse[g, b])} is out of range: it must be in [0, {size}), the distinct "
                f"samples of groups[{g}] = {group}"
            )


def _find_distinct(
    values: Tensor, offsets: Tensor, groups: list[int], weights: Tensor | None, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the bags to store: [G + 1, B] sample indices padded with -1, inverse [G, B], and the status.

    The last row of the first tensor, of the rest, has all samples.
    """
    every = torch.arange(batch, device=offsets.device)[None]
    if max(groups, default=-1) < 0:
        return every, every[:0], every.new_full((2,), NOTHING_BAD)
    rows, inverse, _, status = _ops.jagged_dedup(values, offsets, groups, weights)
    return torch.cat([rows, every]), inverse, status


def _select_stored(
    kjt, order: list[int], groups: list[int], kept: Tensor, names: list[str], status: Tensor
) -> KeyedJaggedTensor:
    """Selects the bags ``kept`` of features ``order``; ``groups``: group of each feature of the batch."""
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    if not order:
        return KeyedJaggedTensor(names, values, offsets=offsets, weights=weights, stride_per_key=[])
    device, batch = offsets.device, kept.shape[1]
    kept = kept[[groups[f] for f in order]]  # group -1 (the rest) is the last row
    bags = kept + torch.tensor(order, device=device)[:, None] * batch
    is_kept = kept >= 0
    ids = torch.where(is_kept, offsets.diff()[bags.clamp(min=0)], 0).sum(1)
    # One device read: all sizes, and the status of a GPU kernel, which could not raise.
    *sizes, bad = torch.cat([is_kept.sum(1), ids, status[:1]]).tolist()
    if bad != NOTHING_BAD:
        raise ValueError(
            f"offsets[{bad - BAD_LAYOUT - 1}] is bad: offsets must be non-decreasing and in [0, {len(values)}]"
        )
    strides, totals = sizes[: len(order)], sizes[len(order) :]
    index = torch.cat([bags[f, :stride] for f, stride in enumerate(strides)])
    values, offsets, weights = select_bags(values, offsets, weights, index, total=sum(totals))
    unique = KeyedJaggedTensor(names, values, offsets=offsets, weights=weights, stride_per_key=strides)
    unique.keep_offset_per_key(list(itertools.accumulate(totals, initial=0)))
    return unique
