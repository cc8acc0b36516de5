"""Bags that several samples of a batch share, in the form that the embedding_bag ops take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SharedBags(NamedTuple):
    """Maps the samples of a batch to bags, per group of features.

    Args:
        inverse: [G, B] int64: index of each sample's bag in the features of each group.
        groups: [F] group index of each feature; -1: no group, the feature has B bags. Groups are numbered in the order
            of their first features, and are not empty.
        sizes: [F] number of bags of each feature.
        keys: [F] feature names.
    """

    inverse: Tensor
    groups: list[int]
    sizes: list[int]
    keys: list[str]

    def is_one_group(self) -> bool:
        """True if all features are in one group."""
        return self.groups[0] >= 0 and len(set(self.groups)) == 1

    @classmethod
    def from_rows(cls, inverse: Tensor, names: list[int | None], sizes: list[int], keys: list[str]) -> SharedBags:
        """Creates it from the row of ``inverse`` that each feature uses, in any order; None: no group."""
        number: dict[int, int] = {}
        groups = [-1 if name is None else number.setdefault(name, len(number)) for name in names]
        rows = list(number)
        if rows != list(range(inverse.shape[0])):
            inverse = torch.stack([inverse[row] for row in rows])
        return cls(inverse, groups, sizes, keys)

    def group_sizes(self) -> list[int]:
        """[G]: bags per feature of each group."""
        return [self.sizes[self.groups.index(group)] for group in range(self.inverse.shape[0])]

    def features_by_group(self) -> dict[int, list[int]]:
        """Maps each group to its features."""
        found: dict[int, list[int]] = {}
        for f, group in enumerate(self.groups):
            if group >= 0:
                found.setdefault(group, []).append(f)
        return found

    def select_group(self, group: int) -> SharedBags:
        """The mapping of a single group, with only the first of its features."""
        f = self.groups.index(group)
        return SharedBags(self.inverse[group : group + 1], [0], self.sizes[f : f + 1], self.keys[f : f + 1])

    def fits_ops(self) -> bool:
        """True if no group has more bags than the batch has samples, as the ops require."""
        return max(self.sizes) <= self.inverse.shape[1]  # features in no group have one bag per sample

    def first_bad(self) -> tuple[int, int] | None:
        """Group and sample of the first index out of range, or None. On a GPU the host waits."""
        sizes = torch.tensor(self.group_sizes(), device=self.inverse.device)[:, None]
        bad = (self.inverse < 0) | (self.inverse >= sizes)
        return tuple(bad.nonzero()[0].tolist()) if bad.any() else None

    def message(self, group: int, sample: int) -> str | None:
        """Describes what is wrong with an index; None if it is valid."""
        f, number = self.groups.index(group), int(self.inverse[group, sample])
        if 0 <= number < self.sizes[f]:
            return None
        return (
            f"inverse_indices of {self.keys[f]!r} have {number} at row {sample}: they must be in [0, {self.sizes[f]}), "
            "the feature's bags"
        )


def join(batches: list[SharedBags]) -> SharedBags:
    """Joins micro-batches with the same groups; bags are concatenated per feature."""
    sizes = [torch.tensor(b.group_sizes(), dtype=torch.int64, device="cpu") for b in batches]
    before = torch.stack([torch.zeros_like(sizes[0]), *sizes[:-1]]).cumsum(0)
    moved = [b.inverse + start.to(b.inverse.device)[:, None] for b, start in zip(batches, before, strict=True)]
    sizes_of_features = [sum(each) for each in zip(*(b.sizes for b in batches), strict=True)]
    return batches[0]._replace(inverse=torch.cat(moved, dim=1), sizes=sizes_of_features)
