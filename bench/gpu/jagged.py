"""The ops on jagged rows, and expand, compared with plain torch and, where it runs, FBGEMM.

Bags have one length, so that plain torch has an answer, too: it works on the ids as a dense array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import rec_kernels as rk
from bench.gpu.subjects import Built, GradientCase, Subject

#: Mean samples per distinct sample; inputs that calls cycle through; rows of a table; shards.
SESSION, INPUTS, ROWS, BUCKETS = 8, 3, 1_000_000, 8

ops = torch.ops.rec_kernels


class Expand(GradientCase):
    """expand of distinct samples' rows to all samples, and its gradient, compared with index_select."""

    def __init__(self, samples: int, columns: int) -> None:
        self.samples, self.columns = samples, columns
        self.distinct = -(-samples // SESSION)
        self.name = f"expand-{samples}x{columns}"

    def about(self) -> dict[str, object]:
        """Samples, distinct ones, columns."""
        sizes = {"batch": self.samples, "distinct": self.distinct, "dim": self.columns}
        return {"name": self.name, "op": "expand"} | sizes

    def moved(self) -> dict[str, dict[str, int]]:
        row, ids = 4 * self.columns, 8 * self.samples
        # Both directions move a row per sample and per distinct sample; "all" counts reading the latter every time.
        once = (self.samples + self.distinct) * row + ids
        return {
            "forward": {"all": 2 * self.samples * row + ids, "unique": once},
            "backward": {"all": once, "unique": once},
        }

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        return {"ours": rk.expand, "torch": lambda x, inverse: x.index_select(0, inverse)}

    def given(self, device: torch.device) -> tuple[Tensor, ...]:
        x = torch.randn(self.distinct, self.columns, device=device, requires_grad=True)
        return x, torch.randint(self.distinct, (self.samples,), device=device)

    def bounds(self, name: str) -> Sequence[float]:
        return 0.0, self.samples * 2.0**-23  # FP32 additions in any order


class Jagged:
    """F features of B bags of L ids: samples found that are alike, bags chosen, windows copied, features permuted, ids
    bucketized."""

    def __init__(self, features: int, batch: int, bag: int, fbgemm: bool = False) -> None:
        self.features, self.batch, self.bag = features, batch, bag
        self.peers = ["fbgemm"] if fbgemm else []
        self.name = f"jagged-f{features}-b{batch}-l{bag}"

    def about(self) -> dict[str, object]:
        """F, B, L."""
        sizes = {"features": self.features, "batch": self.batch, "bag": self.bag, "session": SESSION}
        return {"name": self.name, "op": "jagged"} | sizes

    def moved(self) -> dict[str, dict[str, int]]:
        """Bytes of the operations, by both counts."""
        bags = 8 * self.features * self.batch
        ids, chosen = bags * self.bag, 8 * (self.features * self.batch // 2)
        return {
            "dedup": {"all": 2 * ids + bags + 16 * self.batch, "unique": ids + bags + 16 * self.batch},
            "select": dict.fromkeys(("all", "unique"), 2 * chosen * self.bag + 3 * chosen + bags),
            "windows": dict.fromkeys(("all", "unique"), 2 * chosen * self.bag + 6 * chosen),
            "permute": dict.fromkeys(("all", "unique"), 2 * ids + 2 * bags),
            "bucketize": dict.fromkeys(("all", "unique"), 3 * ids + (1 + BUCKETS) * bags),
        }

    def subjects(self, device: torch.device) -> Iterator[Subject]:
        self._allocate(device)
        for name in ("ours", "torch", *self.peers):
            for operation, size in self.moved().items():
                function = getattr(self, f"_{operation}_by_{name}", None)
                if function is not None:
                    yield Subject(
                        name, operation, None, size, functools.partial(self._build, function, operation, name)
                    )

    def _allocate(self, device: torch.device) -> None:
        F, B, L = self.features, self.batch, self.bag  # noqa: N806
        distinct = -(-B // SESSION)
        self.inputs = []
        for _ in range(INPUTS):
            rows = torch.randint(ROWS, (F, distinct, L), device=device)
            self.inputs.append(rows[:, torch.randint(distinct, (B,), device=device)].contiguous())
        #: [F, B, L]: input of the implementations. CUDA graphs replay on the same memory.
        self.ids = self.inputs[0].clone()
        self.offsets = torch.arange(0, F * B * L + 1, L, device=device)
        self.lengths = torch.full((F * B,), L, device=device)
        self.index = torch.randint(F * B, (F * B // 2,), device=device)
        #: Windows over all ids, regardless of bags.
        self.starts = torch.randint((F * B - 1) * L + 1, (F * B // 2,), device=device)
        self.window_lengths = torch.full_like(self.starts, L)
        self.order = list(range(F))[::-1]
        self.permutation = torch.tensor(self.order, device=device)
        self.permutation32 = self.permutation.int()
        self.blocks = torch.full((F,), -(-ROWS // BUCKETS), device=device)

    def _dedup_by_ours(self) -> tuple[Tensor, ...]:
        return rk.jagged_dedup(self.ids.view(-1), self.offsets, [0] * self.features)

    def _dedup_by_torch(self) -> tuple[Tensor, ...]:
        samples = self.ids.transpose(0, 1).reshape(self.batch, -1)
        return torch.unique(samples, dim=0, return_inverse=True)

    def _select_by_ours(self) -> Tensor:
        total = len(self.index) * self.bag
        return rk.jagged_index_select(self.ids.view(-1), self.offsets, self.index, total=total)[0]

    def _select_by_torch(self) -> Tensor:
        return self.ids.view(-1, self.bag).index_select(0, self.index).view(-1)

    def _select_by_fbgemm(self) -> Tensor:
        values = self.ids.view(-1, 1)
        return torch.ops.fbgemm.jagged_index_select(values, self.lengths, self.index)[0].view(-1)

    def _windows_by_ours(self) -> Tensor:
        total = len(self.starts) * self.bag
        return rk.jagged_windows(self.ids.view(-1), self.starts, self.window_lengths, total=total)[0]

    def _windows_by_torch(self) -> Tensor:
        within = torch.arange(self.bag, device=self.starts.device)
        return self.ids.view(-1)[(self.starts[:, None] + within).view(-1)]

    def _permute_by_ours(self) -> Tensor:
        strides = [self.batch] * self.features
        return rk.jagged_permute(self.ids.view(-1), self.offsets, self.order, strides)[0]

    def _permute_by_torch(self) -> Tensor:
        return self.ids.index_select(0, self.permutation).view(-1)

    def _permute_by_fbgemm(self) -> Tensor:
        lengths, values = self.lengths.view(self.features, -1), self.ids.view(-1)
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(self.permutation32, lengths, values, None, values.numel())
        return permuted[1]

    def _bucketize_by_ours(self) -> Tensor:
        strides = [self.batch] * self.features
        return rk.jagged_bucketize(self.ids.view(-1), self.offsets, self.blocks, BUCKETS, strides).values

    def _bucketize_by_torch(self) -> Tensor:
        bucket = self.ids // self.blocks[:, None, None]
        order = bucket.view(-1).sort(stable=True).indices
        return (self.ids % self.blocks[:, None, None]).view(-1)[order]

    def _bucketize_by_fbgemm(self) -> Tensor:
        return torch.ops.fbgemm.block_bucketize_sparse_features(
            self.lengths, self.ids.view(-1), False, True, self.blocks, BUCKETS
        )[1]

    def _build(self, function: Callable, operation: str, name: str) -> Built:
        def check() -> None:
            found, expected = function(), getattr(self, f"_{operation}_by_torch")()
            if operation != "dedup":
                assert torch.equal(found, expected)
            elif name == "ours":
                rows, inverse, counts = found
                assert counts.item() == len(expected[0])
                assert torch.equal(self.ids[:, rows[0][inverse[0]]], self.ids)

        # FBGEMM's op and torch.unique read result sizes from the GPU.
        waits = name == "fbgemm" or (name, operation) == ("torch", "dedup")
        return Built(function, lambda turn: self.ids.copy_(self.inputs[turn % INPUTS]), check, not waits)
