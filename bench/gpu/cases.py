"""Workloads of embedding_bag, the ids they look up, and the bytes that each operation moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

import rec_kernels as rk
from bench.shapes import BATCHES, Workload

ADAGRAD, SGD, ADAM = "rowwise_adagrad", "sgd", "adam"
#: Operations timed with each optimizer; the forward needs no optimizer and is timed with the first.
OPERATIONS = {ADAGRAD: ("forward", "backward", "step"), SGD: ("backward", "step")}


@dataclass(frozen=True)
class GpuWorkload(Workload):
    """A workload with published figures of others, or one like it.

    Attributes:
        power: exponent of a power law on [1, E + 1), whose whole parts are the ranks of ids; None: as ``zipf`` says.
        weighted: whether every id has a factor (``per_sample_weights``).
        operations: what is timed with which optimizer.
    """

    power: float | None = None
    weighted: bool = False
    operations: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: OPERATIONS, hash=False)


def operations(w: Workload) -> Mapping[str, tuple[str, ...]]:
    """Operations to time: name -> optimizers."""
    return w.operations if isinstance(w, GpuWorkload) else OPERATIONS


def is_weighted(w: Workload) -> bool:
    """True if every id has a factor."""
    return isinstance(w, GpuWorkload) and w.weighted


def shares(w: Workload, device: torch.device | str = "cpu") -> Tensor | None:
    """[E] float64: cumulative probability of the first k + 1 ranks of a table; None: ids are uniform."""
    ranks = torch.arange(1, w.rows + 1, dtype=torch.float64, device=device)
    if isinstance(w, GpuWorkload) and w.power is not None:
        flat = 1 - w.power  # the law's integral is x^flat / flat
        upper = ((ranks + 1) ** flat).sub_(1).div_((w.rows + 1.0) ** flat - 1)
    elif w.zipf is not None:
        upper = ranks.pow_(-w.zipf).cumsum_(0)
    else:
        return None
    return upper.div_(upper[-1].clone())


ZIPF = 1.15
#: The widest tables' share of GPU memory: torch's Adagrad has state of the same size, FBGEMM its own copy.
SHARE_OF_MEMORY = 0.3
# A prime above every table's size: rank * PLACE % E then visits every row once.
PLACE = 2_654_435_761


def _both(tables: int, batch: int, rows: int, dim: int, bag: int) -> list[Workload]:
    """Returns the workload with uniform and with Zipf ids, named by its sizes; ``rows`` is a power of ten."""
    name = f"t{tables}-b{batch}-e1e{round(math.log10(rows))}-d{dim}"
    sizes = (tables, batch, rows, dim, bag)
    return [Workload(f"{name}-uniform", *sizes), Workload(f"{name}-zipf", *sizes, zipf=ZIPF)]


def tables_that_fit(rows: int, dim: int, memory: int) -> int:
    """The largest power of two, from 1 to 32, of float32 tables [rows, dim] within their share of the memory.

    Args:
        memory: bytes of the device.
    """
    tables = 32
    while tables > 1 and tables * rows * dim * 4 > SHARE_OF_MEMORY * memory:
        tables //= 2
    return tables


#: Unpooled lookups of 1.05 million power-law ids, as in dynamicemb's benchmark, and pooling with a factor for every
#: id. bench/gpu/published.py has the published figures.
PUBLISHED = [
    GpuWorkload(
        "unpooled-1m-d128",
        *(10, 104_857, 1_677_721, 128, 1),
        power=1.05,
        operations={SGD: ("forward", "backward"), ADAM: ("backward",)},
    ),
    GpuWorkload(
        "weighted-t32-b4096-e1e6-d128",
        *(32, 4096, 1_000_000, 128, 20),
        weighted=True,
        operations={ADAGRAD: ("forward", "backward")},
    ),
]


def workloads(memory: int) -> list[Workload]:
    """All workloads for a device with this much memory in bytes, the most important first.

    FBGEMM's default benchmark (32 tables x 512 bags x 20 ids, D = 128, E = 1e5) and larger tables; shapes that others
    have published figures of; larger batches with every width; and Criteo's shape: 26 features of one id.
    """
    found = [*_both(32, 512, 100_000, 128, 20), *PUBLISHED]
    found.append(Workload("criteo-like", 26, 2048, 100_000, 16, 1, zipf=ZIPF))
    for dim in (128, 64, 32, 16, 256, 512):
        found += _both(32, 2048, 100_000, dim, 20)
    for rows in (1_000_000, 10_000_000):
        found += _both(tables_that_fit(rows, 128, memory), 512, rows, 128, 20)
    return found


#: Batch, columns of each group and of each block: 26 features of widths that rk.mixed_dimensions gives, and wider ones.
GROUPS = [
    (8192, [(1, 2, 3, 4, 8, 9, 10, 11, 15, 16)[g % 10] for g in range(26)], 16),
    (8192, [4 + 60 * g // 25 for g in range(26)], 64),
]

#: Sizes of dot_interaction and factorization_machine: batch, sparse vectors, columns.
INTERACTIONS = [(8192, 27, 64), (8192, 27, 128)]

#: Sizes of expand: samples, columns of a row.
SAMPLES = [(2**18, 128), (2**20, 16)]
#: Sizes of the ops on jagged rows: features, samples, ids of a bag. Criteo's shape, and histories.
BAGS = [(26, 8192, 1), (26, 8192, 20), (4, 8192, 200)]

#: For trial runs of the harness on a CPU, whose times are meaningless.
TRIAL = [
    Workload("trial-uniform", 2, 3, 20, 16, 2),
    Workload("trial-zipf", 2, 2, 40, 32, 3, zipf=ZIPF),
    Workload("trial-criteo", 3, 2, 30, 16, 1, zipf=ZIPF),
    GpuWorkload(
        "trial-power", 2, 5, 30, 16, 1, power=1.05, weighted=True, operations={SGD: ("forward",), ADAM: ("backward",)}
    ),
]
#: Row formats of lookups, all of one workload.
FORMATS = ("fp16", "bf16", "int8", "int4", "mx9", "mx4")
ENCODED = Workload("t32-b2048-e1e5-d128", 32, 2048, 100_000, 128, 20)
TRIAL_ENCODED = Workload("trial", 2, 3, 20, 16, 2)


class _Ranks:
    """Draws ranks in [0, E) with the distribution ``shares``, or uniformly."""

    def __init__(self, w: Workload, generator: torch.Generator) -> None:
        self._rows, self._generator, self._upper = w.rows, generator, shares(w, generator.device)

    @property
    def are_skewed(self) -> bool:
        """True if some ranks are drawn more often than others."""
        return self._upper is not None

    def __call__(self, *shape: int) -> Tensor:
        """Draws int64 ranks of this shape."""
        device = self._generator.device
        if self._upper is None:
            return torch.randint(self._rows, shape, generator=self._generator, device=device)
        drawn = torch.rand(shape, dtype=torch.float64, generator=self._generator, device=device)
        return torch.searchsorted(self._upper, drawn).clamp_(max=self._rows - 1)


def _distinct(ranks: _Ranks, tables: int, batch: int, bag: int, generator: torch.Generator) -> Tensor:
    """Draws ranks [T, B, L] that are distinct within a bag: redraws repeated ones, then shuffles."""
    found = ranks(tables, batch, bag)
    while True:
        found = found.sort(dim=-1).values
        again = torch.zeros_like(found, dtype=torch.bool)
        again[..., 1:] = found[..., 1:] == found[..., :-1]
        count = int(again.sum())
        if not count:
            break
        found[again] = ranks(count)
    shuffled = torch.rand(found.shape, generator=generator, device=generator.device).argsort(dim=-1)
    return found.gather(-1, shuffled)


def batches_of_ids(w: Workload, device: torch.device, count: int = BATCHES) -> list[Tensor]:
    """``count`` batches of ids, each [T * B * L] int64, key-major; no id twice in a bag, as FBGEMM's benchmark has it.

    Frequent Zipf ids have a random-looking place in the table, another one in each table, the same in every batch.

    Raises:
        ValueError: bags of more than half the table, which would have to be drawn again and again.
    """
    if 2 * w.bag > w.rows:
        raise ValueError(f"{w.name}: bags of {w.bag} distinct ids need tables of {2 * w.bag} rows, got {w.rows}")
    generator = torch.Generator(device).manual_seed(0)
    ranks, batches = _Ranks(w, generator), []
    table = torch.arange(w.tables, device=device)[:, None, None]
    for _ in range(count):
        ids = _distinct(ranks, w.tables, w.batch, w.bag, generator)
        if ranks.are_skewed:
            ids = (ids * PLACE + table * (w.rows // w.tables)) % w.rows
        batches.append(ids.view(-1))
    return batches


def unique_rows(w: Workload, batches: list[Tensor]) -> float:
    """Mean over the batches of the distinct rows that a batch looks up in all tables."""
    counts = [sum(len(ids.unique()) for ids in batch.view(w.tables, -1)) for batch in batches]
    return sum(counts) / len(counts)


#: Bytes of optimizer state that an update reads, and writes, per row of D columns.
STATE_BYTES = {SGD: lambda dim: 0, ADAGRAD: lambda dim: 4, ADAM: lambda dim: 8 * dim}


def bytes_moved(w: Workload, operation: str, optimizer: str, unique: float, format: str = "fp32") -> dict[str, float]:
    """Bytes that an operation must move, by two counts.

    "all" counts a row for every id that names it, as if nothing were found in a cache. "unique" counts every row once:
    what has to go through the memory even with a perfect cache. By either count, a forward reads the rows, the ids
    (with their factors) and the offsets and writes the output; a backward reads the gradient, the ids and the offsets
    once, and reads and writes the rows and their state: a float of row-wise Adagrad, two for each column of Adam. A
    step is one after the other.
    """
    ids = w.tables * w.batch * w.bag
    pooled = w.tables * w.batch * w.dim * 4
    bags = ids * (12 if is_weighted(w) else 8) + (w.tables * w.batch + 1) * 8
    row = rk.row_bytes(format, w.dim)
    moved = {}
    for count, rows in (("all", ids), ("unique", unique)):
        forward = rows * row + pooled + bags
        backward = 2 * rows * (row + STATE_BYTES[optimizer](w.dim)) + pooled + bags
        moved[count] = {"forward": forward, "backward": backward, "step": forward + backward}[operation]
    return moved
