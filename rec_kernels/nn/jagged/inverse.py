"""InverseKeyedJaggedTensor: a batch that keeps repeated bags once, and on request the ids that bags share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import check_batch, check_keys_differ, has_data, place_of_key
from rec_kernels.nn.jagged.container import JaggedContainer
from rec_kernels.nn.jagged.select_features import BAD_LAYOUT, NOTHING_BAD, check_keys, select_bags
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows
from rec_kernels.ops.layout_records import check_tensor

_ops = torch.ops.rec_kernels


class InverseKeyedJaggedTensor(JaggedContainer):
    """Ids of several features for a batch; bags that samples have in common are kept once.

    Features are in *groups*. A group has U distinct samples, each a bag of every feature of it, and ``inverse`` says
    which of them each of the B samples of the batch has. Features in no group, the *rest*, have a bag for each sample.
    ``from_kjt`` finds the distinct samples of a batch; data that knows its sessions gives them here. Nobody writes to
    the tensors afterwards.

    Bags that overlap may be windows of one buffer, which is smaller to keep and to move; ``with_windows()`` finds them.
    Bags are made of them once, where ids are first asked for; nothing else changes.

    Args:
        unique: the bags, those of groups first, group after group, then the rest; ``stride_per_key`` is U for features
            of a group, and B for the rest. ``rk.KeyedJaggedTensor`` or ``rk.KeyedJaggedWindows``.
        groups: names of the features of each group, in the order of ``unique``.
        inverse: [G, B] int64: which distinct sample of each group each sample of the batch is.
        keys: all feature names in the order of the batch; None: that of ``unique``.

    Source: Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model Training
    Infrastructure", MLSys 2023, arXiv:2211.05239.

    Raises:
        ValueError: an empty group, features that are in two groups or not where they must be, batch sizes, dtypes or
            devices that do not fit. KeyError: a group names a feature that is not there. IndexError: ``inverse`` is out
            of range (on the CPU; on a GPU a collection's lookup tells, see ``rk.EmbeddingBagCollection.check``, and
            so does what makes the whole batch, while ``rk.deduplicated`` gives rows of zeros).
    """

    _parts = ("_unique", "_inverse")
    _others = ("_groups", "_keys")

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
            raise ValueError(f"keys must be those of unique, {unique.keys()}, in the batch's order, got {keys}")
        if has_data(unique.values()):
            unique.offset_per_key()  # is known from now on, when it has been moved, too
        self._unique, self._groups, self._inverse, self._keys = unique, groups, inverse, list(keys)

    @classmethod
    def from_kjt(cls, kjt, groups: Sequence[Sequence[str]]) -> InverseKeyedJaggedTensor:
        """Finds what is repeated in a batch.

        Two samples are the same in a group if all their bags of its features are: as many ids, the same in the same
        order, and the same bits of their weights (``rk.jagged_dedup``). Put features that change together in one group.
        On a GPU the host waits once, for the sizes.

        Args:
            kjt: ``rk.KeyedJaggedTensor`` or TorchRec's, which stays as it is.
            groups: names of the features of each group; features in none are the rest.

        Raises:
            KeyError: a group names a feature that is not there. ValueError: an empty group, a feature in two groups,
            features with batch sizes of their own, weights that require a gradient (samples that share a bag would
            share it), bad dtypes or offsets.
        """
        if isinstance(kjt, InverseKeyedJaggedTensor):
            raise TypeError("kjt is an rk.InverseKeyedJaggedTensor: give kjt.to_kjt() to group it in another way")
        check_batch("kjt", kjt)
        keys = list(kjt.keys())
        groups = _checked_groups(groups, keys)
        if getattr(kjt, "variable_stride_per_key", bool)():
            raise ValueError("the features have batch sizes of their own (stride_per_key): their bags are distinct")
        values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "weights require a gradient, which would be that of all samples that share a bag: compute them from "
                "unique(), or detach them"
            )
        group_of = {key: g for g, group in enumerate(groups) for key in group}
        numbers = [group_of.get(key, -1) for key in keys]
        batch = kjt.stride()
        kept, inverse, status = _kept(values, offsets, numbers, weights, batch)
        ordered = [*group_of, *(key for key in keys if key not in group_of)]
        places = {key: f for f, key in enumerate(keys)}
        unique = _select(kjt, [places[key] for key in ordered], numbers, kept, ordered, status)
        return cls._of(unique, groups, inverse, keys)

    @classmethod
    def _of(
        cls, unique: KeyedJaggedTensor | KeyedJaggedWindows, groups: list[list[str]], inverse: Tensor, keys: list[str]
    ) -> InverseKeyedJaggedTensor:
        """Makes a batch from parts that fit, without checks."""
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
        """Batch size B: samples of the whole batch."""
        return self._inverse.shape[1]

    def bags(self) -> KeyedJaggedTensor:
        """All bags that are kept, as the constructor has them: groups first, batch sizes of their own.

        Those of windows are made now, if they were not before. On a GPU the host waits for windows that were given
        there, and then: IndexError, if one is not within their values.
        """
        return self._unique if isinstance(self._unique, KeyedJaggedTensor) else self._unique.to_kjt()

    def stored(self) -> KeyedJaggedTensor | KeyedJaggedWindows:
        """The stored features: bags, or windows that bags are made of."""
        return self._unique

    def with_windows(self) -> InverseKeyedJaggedTensor:
        """Stores bags without weights on the CPU as windows of one buffer (``KeyedJaggedWindows.from_kjt``, whose
        errors it raises)."""
        if isinstance(self._unique, KeyedJaggedWindows):
            return self
        return self._of(KeyedJaggedWindows.from_kjt(self._unique), self._groups, self._inverse, self._keys)

    def with_rest(self, features: KeyedJaggedTensor) -> InverseKeyedJaggedTensor:
        """Adds features that are in no group: one batch, one lookup. Windows become bags.

        Raises:
            ValueError: they have not a bag for each sample, or as ``rk.KeyedJaggedTensor.concat``.
        """
        check_batch("features", features)
        if any(size != self.stride() for size in features.stride_per_key()):
            raise ValueError(
                f"features must have {self.stride()} bags each, one for each sample, got {features.stride_per_key()}"
            )
        bags = self.bags()
        if not features.keys():
            return self._of(bags, self._groups, self._inverse, self._keys)
        joined = KeyedJaggedTensor.concat([bags, features])
        return self._of(joined, self._groups, self._inverse, [*self._keys, *features.keys()])

    def known_offset_per_key(self) -> list[int] | None:
        """[F + 1]: where the ids of each feature of ``bags()`` start, if the host knows it."""
        if isinstance(self._unique, KeyedJaggedWindows):
            return self._unique.known_offset_per_key()
        known = self._unique._offset_per_key
        if torch.compiler.is_compiling():  # which cannot see that nobody has written to the offsets
            return None if known is None else known[1]
        return self._unique.known_offset_per_key()

    def unique(self, group: int | str) -> KeyedJaggedTensor:
        """The distinct samples of a group: U bags of each of its features.

        Ids and weights are views. On a GPU the host waits if it does not know where the group's ids begin; of batches
        of ``from_kjt``, and those that were made on the CPU, it does.

        Args:
            group: its number, or the name of one of its features.

        Raises:
            KeyError: no group has the feature. IndexError: there is no such group.
        """
        g = self._number(group)
        first = sum(map(len, self._groups[:g]))
        return self._features(first, first + len(self._groups[g]))

    def inverse(self, group: int | str) -> Tensor:
        """[B] int64: which distinct sample of the group each sample is. ``group`` and errors: as of ``unique``."""
        return self._inverse[self._number(group)]

    def inverse_of_groups(self) -> Tensor:
        """[G, B] int64: ``inverse`` of every group."""
        return self._inverse

    def rest(self) -> KeyedJaggedTensor | None:
        """The features in no group, B bags each; None if there are none."""
        first = sum(map(len, self._groups))
        return self._features(first, len(self._keys)) if first < len(self._keys) else None

    def group_of_keys(self) -> dict[str, int | None]:
        """The number of each feature's group; None: it is of the rest."""
        return dict.fromkeys(self._keys) | {key: g for g, group in enumerate(self._groups) for key in group}

    def places(self, keys: list[str]) -> Tensor:
        """[F, B] int64: for at least one feature, the number of each sample's bag among those of its feature."""
        every, groups = torch.arange(self.stride(), device=self._inverse.device), self.group_of_keys()
        return torch.stack([every if (g := groups[key]) is None else self._inverse[g] for key in keys])

    def _bags_of(self, keys: list[str]) -> Tensor:
        """Positions among all stored bags. Raises the constructor's IndexError, which does not come on a GPU."""
        if self._inverse.device.type != "cpu" and not torch.compiler.is_compiling():
            _check_ranges(self._inverse, self._groups, self._unique)
        names, strides = self._unique.keys(), self._unique.stride_per_key()
        starts = dict(zip(names, itertools.accumulate(strides, initial=0), strict=False))
        first = torch.tensor([starts[key] for key in keys], device=self._inverse.device)
        return self.places(keys) + first[:, None]

    def to_kjt(self) -> KeyedJaggedTensor:
        """The whole batch: keys, ids, offsets and weights as they were. On a GPU the host waits.

        Raises:
            IndexError: on a GPU, ``inverse`` is out of range.
        """
        index = self._bags_of(self._keys).reshape(-1) if self._keys else self._inverse.new_zeros(0)
        unique = self.bags()
        values, offsets, weights = select_bags(unique.values(), unique.offsets(), unique.weights_or_none(), index)
        return KeyedJaggedTensor._of(self._keys, values, offsets, weights)

    def dedup_factor(self, key: str | None = None) -> float:
        """Ids of the batch for each id that is kept, 1.0 where there are none. On a GPU the host waits.

        Args:
            key: a feature; None: all features that are in groups.

        Raises:
            KeyError: there is no such feature. IndexError: on a GPU, ``inverse`` is out of range, or a window is not
            within the values.
        """
        if key is not None:
            place_of_key(key, self._keys)
        names = [name for name, g in self.group_of_keys().items() if g is not None and key in (None, name)]
        kept = self.num_stored(names)
        return int(self._unique.lengths()[self._bags_of(names)].sum()) / kept if kept else 1.0

    def num_stored(self, keys: Sequence[str]) -> int:
        """Number of stored ids of these features; of windows, those that they cover. On a GPU the host waits.

        Raises:
            ValueError: ``keys`` is a name and no list. KeyError: there is no such feature. IndexError: on a GPU, a
            window is not within the values.
        """
        check_keys(keys, self._keys)
        if isinstance(self._unique, KeyedJaggedWindows):
            return self._unique.num_stored(keys)
        return sum(count for key, count in self.num_stored_of_keys().items() if key in keys)

    def num_stored_of_keys(self) -> dict[str, int]:
        """``num_stored([key])`` of each key, whose errors it raises, all counted at once."""
        if isinstance(self._unique, KeyedJaggedWindows):
            return self._unique.num_stored_of_keys()
        counts = itertools.pairwise(self._unique.offset_per_key())
        return {key: b - a for key, (a, b) in zip(self._unique.keys(), counts, strict=True)}

    def lengths(self, group: int | str) -> Tensor:
        """[F, U]: bag lengths of the distinct samples of a group. ``group`` and errors: as of ``unique``."""
        g = self._number(group)
        first, strides = sum(map(len, self._groups[:g])), self._unique.stride_per_key()
        start, features = sum(strides[:first]), len(self._groups[g])
        return self._unique.lengths()[start : start + features * strides[first]].view(features, -1)

    def _number(self, group: int | str) -> int:
        if isinstance(group, str):
            place_of_key(group, self._keys)
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
        """Features ``first`` up to ``last`` of the kept bags, which have one batch size."""
        unique, strides = self.bags(), self._unique.stride_per_key()
        bags = list(itertools.accumulate(strides, initial=0))
        values, offsets, weights = unique.values(), unique.offsets(), unique.weights_or_none()
        if last - first == len(strides):  # all of them: where they begin need not be known
            found = KeyedJaggedTensor._of(unique.keys(), values, offsets, weights)
            known = unique.known_offset_per_key()
        else:
            known = self.known_offset_per_key() or unique.offset_per_key()
            part, offsets = slice(known[first], known[last]), offsets[bags[first] : bags[last] + 1]
            if first:
                offsets = offsets - known[first]
            weights = None if weights is None else weights[part]
            found = KeyedJaggedTensor._of(unique.keys()[first:last], values[part], offsets, weights)
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
            raise ValueError(f"groups[{g}] is empty: it must name a feature at least")
        for key in group:
            if key not in known:
                raise KeyError(f"groups[{g}] names {key!r}, which is not among the keys {keys}")
            if key in seen:
                other = checked[seen[key]]
                raise ValueError(f"{key!r} is in groups[{seen[key]}] = {other} and in groups[{g}] = {group}")
            seen[key] = g
    return checked


def _check_parts(unique: KeyedJaggedTensor | KeyedJaggedWindows, groups: list[list[str]], inverse: Tensor) -> None:
    names, strides = unique.keys(), unique.stride_per_key()
    grouped = [key for group in groups for key in group]
    if names[: len(grouped)] != grouped:
        raise ValueError(f"unique must have the features of groups first, {grouped}, in this order, got {names}")
    if isinstance(unique, KeyedJaggedTensor) and unique.inverse_indices_or_none() is not None:
        raise ValueError("unique must have no inverse_indices: inverse says which bags samples have")
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


def _kept(
    values: Tensor, offsets: Tensor, groups: list[int], weights: Tensor | None, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[G + 1, B]: samples whose bags are kept, then -1; of the rest, in the last row, all. Inverse [G, B]; status."""
    every = torch.arange(batch, device=offsets.device)[None]
    if max(groups, default=-1) < 0:
        return every, every[:0], every.new_full((2,), NOTHING_BAD)
    rows, inverse, _, status = _ops.jagged_dedup(values, offsets, groups, weights)
    return torch.cat([rows, every]), inverse, status


def _select(
    kjt, order: list[int], groups: list[int], kept: Tensor, names: list[str], status: Tensor
) -> KeyedJaggedTensor:
    """The bags of features ``order`` that are ``kept``, for the groups of the batch's features."""
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    if not order:
        return KeyedJaggedTensor(names, values, offsets=offsets, weights=weights, stride_per_key=[])
    device, batch = offsets.device, kept.shape[1]
    kept = kept[[groups[f] for f in order]]  # -1, no group, is the last
    bags = kept + torch.tensor(order, device=device)[:, None] * batch
    is_kept = kept >= 0
    ids = torch.where(is_kept, offsets.diff()[bags.clamp(min=0)], 0).sum(1)
    # The one read: sizes of everything, and what a GPU found bad, which it could not raise.
    *sizes, bad = torch.cat([is_kept.sum(1), ids, status[:1]]).tolist()
    if bad != NOTHING_BAD:
        raise ValueError(f"offsets[{bad - BAD_LAYOUT - 1}] is bad: offsets must rise, in [0, {len(values)}]")
    strides, totals = sizes[: len(order)], sizes[len(order) :]
    index = torch.cat([bags[f, :stride] for f, stride in enumerate(strides)])
    values, offsets, weights = select_bags(values, offsets, weights, index, total=sum(totals))
    unique = KeyedJaggedTensor(names, values, offsets=offsets, weights=weights, stride_per_key=strides)
    unique.keep_offset_per_key(list(itertools.accumulate(totals, initial=0)))
    return unique
