"""Bags that the samples of a batch share, as the ops of embedding_bag take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SharedBags(NamedTuple):
    """Which bags of a group each sample of a batch has.

    Args:
        inverse: [G, B] int64: which of the bags of each group's features.
        groups: of each feature, its group; -1: it is in none, and has B bags.
        sizes: how many bags each feature has.
        keys: the features' names.
    """

    inverse: Tensor
    groups: list[int]
    sizes: list[int]
    keys: list[str]

    def is_one_group(self) -> bool:
        """Whether all features are in one."""
        return self.groups[0] >= 0 and len(set(self.groups)) == 1

    def group_sizes(self) -> list[int]:
        """[G]: bags of the features of each group; 0 of a group without features."""
        sizes = [0] * self.inverse.shape[0]
        for group, size in zip(self.groups, self.sizes, strict=True):
            if group >= 0:
                sizes[group] = size
        return sizes

    def together(self) -> dict[int, list[int]]:
        """The features of each group that has any."""
        found: dict[int, list[int]] = {}
        for f, group in enumerate(self.groups):
            if group >= 0:
                found.setdefault(group, []).append(f)
        return found

    def of_group(self, group: int) -> SharedBags:
        """One group's alone, of one of its features."""
        f = self.groups.index(group)
        return SharedBags(self.inverse[group : group + 1], [0], self.sizes[f : f + 1], self.keys[f : f + 1])

    def fits_ops(self) -> bool:
        """Whether no group has more bags than the batch has samples, as the ops want it."""
        return all(size <= self.inverse.shape[1] for size in self.group_sizes())

    def first_bad(self) -> tuple[int, int] | None:
        """Group and sample of the first number that is out of range. On a GPU the host waits."""
        sizes = torch.tensor(self.group_sizes(), device=self.inverse.device)[:, None]
        bad = (self.inverse < 0) | (self.inverse >= sizes)
        bad[[g for g in range(len(bad)) if g not in self.groups]] = False
        return tuple(bad.nonzero()[0].tolist()) if bad.any() else None

    def message(self, group: int, sample: int) -> str | None:
        """What is wrong with a number; None: nothing."""
        f, number = self.groups.index(group), int(self.inverse[group, sample])
        if 0 <= number < self.sizes[f]:
            return None
        return (
            f"inverse_indices of {self.keys[f]!r} have {number} at row {sample}: they must be in [0, {self.sizes[f]}), "
            "the feature's bags"
        )


def join(batches: list[SharedBags]) -> SharedBags:
    """That of micro-batches of the same groups, whose bags follow each other feature by feature."""
    sizes = [torch.tensor(b.group_sizes(), dtype=torch.int64) for b in batches]
    before = torch.stack([torch.zeros_like(sizes[0]), *sizes[:-1]]).cumsum(0)
    moved = [b.inverse + start.to(b.inverse.device)[:, None] for b, start in zip(batches, before, strict=True)]
    together = [sum(each) for each in zip(*(b.sizes for b in batches), strict=True)]
    return batches[0]._replace(inverse=torch.cat(moved, dim=1), sizes=together)
