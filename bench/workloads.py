"""Named workloads, `python -m bench.run --workload NAME`: the sizes of public models, scaled to one machine's memory.

Ids are synthetic. docs/benchmarks.md has a table of all.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.reuse import REUSE_2021, REUSE_2022, reused_ids
from bench.shapes import Shape, Workload, places, zipf_ranks

#: Tables of a whole number of cache lines in every row format follow one another without a gap.
ROW_MULTIPLE = 64
#: Exponent of skewed ids, chosen so that a batch of criteo-kaggle has about as many distinct ids as one of Criteo's.
ZIPF = 1.05

#: Criteo Kaggle with all ids (facebookresearch/dlrm).
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
#: MLPerf training, DLRM-DCNv2 (mlcommons/training, recommendation_v2): Criteo 1TB, at most 40,000,000 ids of a feature.
MLPERF_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class MultiHot(Shape):
    """Tables of unequal sizes; the first id of a bag is Zipf, and the others are functions of it.

    MLPerf's multi-hot data are made of Criteo's in this way: an id always brings the same uniform ids with it.

    Args:
        num_embeddings: ids of each table, as published.
        table_bags: [T] L of each table.
        scale: num_embeddings above ``ROW_MULTIPLE`` are divided by it.
    """

    name: str
    batch: int
    dim: int
    num_embeddings: tuple[int, ...]
    table_bags: tuple[int, ...] = ()
    scale: int = 1

    @property
    def tables(self) -> int:
        """T."""
        return len(self.num_embeddings)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """[T]: the number of distinct ids of each table."""
        return tuple(n if n <= ROW_MULTIPLE else max(ROW_MULTIPLE, n // self.scale) for n in self.num_embeddings)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """[T]: the cardinalities, rounded up."""
        return tuple(-(-n // ROW_MULTIPLE) * ROW_MULTIPLE for n in self.cardinalities)

    def ids(self, seed: int) -> Tensor:
        """[N] int64, key-major."""
        rng, found = np.random.default_rng(seed), []
        for t, (rows, bag) in enumerate(zip(self.cardinalities, self.table_bags, strict=True)):
            first = places(rows, t)[zipf_ranks(rows, ZIPF, rng.random(self.batch))]
            rest = _mixed(first[:, None] * bag + np.arange(1, bag), t) % np.uint64(rows)
            found.append(np.concatenate([first[:, None], rest.astype(np.int64)], axis=1).reshape(-1))
        return torch.from_numpy(np.concatenate(found))


def _mixed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """SplitMix64's outputs, uint64, at these positions of its stream (Steele, Lea, Flood 2014)."""
    x = (numbers.astype(np.uint64) + np.uint64(seed << 40)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Reused(Workload):
    """Synthetic ids with the reuse of a published histogram (bench/reuse.py)."""

    reuse: tuple[tuple[float, float], ...] = ()

    def ids(self, seed: int) -> Tensor:
        """[T * B * L] int64, key-major."""
        rng, n, reuse = np.random.default_rng(seed), self.batch * self.bag, dict(self.reuse)
        found = [reused_ids(reuse, n, places(self.rows, t), rng) for t in range(self.tables)]
        return torch.from_numpy(np.concatenate(found))


NAMED: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        # bench/dlrm_s_benchmark.sh of facebookresearch/dlrm.
        Workload("dlrm-small", tables=8, batch=2048, rows=1_000_000, dim=64, bag=100),
        MultiHot("criteo-kaggle", 2048, 16, KAGGLE_ROWS, (1,) * len(KAGGLE_ROWS), scale=4),
        MultiHot("mlperf-dcnv2", 512, 128, MLPERF_ROWS, MLPERF_BAGS, scale=64),
        # L is ids / (tables * batch) of the year's statistics; T, B, E and D are chosen.
        Reused("meta-2021", 8, 4096, 512_000, 64, 16, reuse=tuple(REUSE_2021.items())),
        Reused("meta-2022", 8, 4096, 512_000, 64, 14, reuse=tuple(REUSE_2022.items())),
    )
}
#: The benchmarks that accept these workloads.
OPS = ("embedding_bag", "embedding_bag_formats", "embedding_bag_optimizers")


def workload(text: str) -> Shape:
    """Parses a named workload, or T,B,E,D,L[,ZIPF]: tables, bags, rows, columns, ids per bag, and the Zipf exponent.

    Raises:
        argparse.ArgumentTypeError: it is neither, or FBGEMM has no tables of D columns.
    """
    if text in NAMED:
        return NAMED[text]
    sizes = re.fullmatch(r"(\d+),(\d+),(\d+),(\d+),(\d+)(?:,(\d+\.?\d*))?", text)
    numbers = [int(size) for size in sizes.groups()[:5]] if sizes else [0]
    if not sizes or not all(numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {', '.join(NAMED)} nor T,B,E,D,L[,ZIPF] of numbers above 0, as 8,2048,1000000,64,20"
        )
    if numbers[3] % 4:  # FBGEMM's tables have no others
        raise argparse.ArgumentTypeError(f"D = {numbers[3]} of {text!r} must be a multiple of 4")
    return Workload(text.replace(",", "x"), *numbers, zipf=float(sizes[6]) if sizes[6] else None)
