"""Deduplication: the bags that rows of a batch have in common are moved, looked up and updated once.

With windows, ids that different bags have in common are moved once, too. A stage of the reader, behind the data set and
on its thread: a step does not wait for it while it takes less time than the step. Source: Zhao et al., "RecD:
Deduplication for End-to-End Deep Learning Recommendation Model Training Infrastructure", MLSys 2023, arXiv:2211.05239.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import rec_kernels as rk
from rec_kernels.dlrm import files
from rec_kernels.dlrm.data import Batch, DataError
from rec_kernels.dlrm.runs import CONFIG

#: Ids before over ids stored from which "auto" deduplicates. Below it, writing pooled rows out to all samples takes as
#: long as the lookups and updates that are saved: with histories of 50 ids, they break even at 1.1 (docs/results.md,
#: "Deduplicated batches"); the rest is for finding the bags, and for what varies from batch to batch.
THRESHOLD = 4 / 3
#: Batches that "auto" looks at: so many with ids in shared features, among so many from the beginning of the training.
#: The first rows of a log may have no past.
MEASURED, LOOKED_AT = 8, 64


@dataclass
class Tally:
    """Time of the stage and ids before and after it, added up over batches.

    Args:
        seconds: on the reader's thread.
        ids: by feature, those of all rows and those that are kept: of the distinct bags, or of their windows.
        windows: whether a batch had its bags as windows.
    """

    seconds: float = 0.0
    ids: dict[str, list[int]] = field(default_factory=dict)
    windows: bool = False

    def add(self, other: Tally) -> None:
        """Adds what another one has."""
        self.seconds += other.seconds
        self.windows |= other.windows
        for name, counts in other.ids.items():
            self.ids[name] = [a + b for a, b in zip(self.ids.get(name, [0, 0]), counts, strict=True)]

    def factors(self) -> dict[str, float]:
        """Ratio, by feature, of ids before to ids stored; 1 without ids."""
        return {name: before / stored if stored else 1.0 for name, (before, stored) in self.ids.items()}

    def factor(self) -> float:
        """Ratio of ids before to ids stored, of all features together."""
        before, stored = (sum(counts[i] for counts in self.ids.values()) for i in (0, 1))
        return before / stored if stored else 1.0

    def record(self) -> dict:
        """Entries for ``metrics.jsonl``; empty if nothing was counted."""
        return {"dedup_factors": self.factors(), "dedup_seconds": self.seconds} if self.ids else {}


class Decision(NamedTuple):
    """A run's decision to deduplicate or not.

    Args:
        on: yes or no.
        factor: what "auto" has measured; None without "auto", and of data without shared features.
    """

    on: bool
    factor: float | None = None


def dedup_batch(batch: Batch, windows: bool = False) -> tuple[Batch, Tally]:
    """The batch with its shared features as one group of distinct bags; those of a data set that knows them stay.

    With ``windows``, the bags are windows of one buffer.
    """
    if batch.shared is None:
        return batch, Tally()
    started, shared = time.perf_counter(), batch.shared
    if not isinstance(shared, rk.InverseKeyedJaggedTensor):
        shared = rk.InverseKeyedJaggedTensor.from_kjt(shared, [list(shared.keys())])
    if windows:
        shared = shared.with_windows()
    counted, of_windows = _count(batch.shared, shared), isinstance(shared.stored(), rk.KeyedJaggedWindows)
    return batch._replace(shared=shared), Tally(time.perf_counter() - started, counted, of_windows)


def _count(
    given: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor, kept: rk.InverseKeyedJaggedTensor
) -> dict[str, list[int]]:
    """Counts, by feature, ids of all rows and ids that are kept."""
    before: dict[str, int] = {}
    if isinstance(given, rk.KeyedJaggedTensor):
        before = dict(zip(given.keys(), given.length_per_key(), strict=True))
    else:
        for group, keys in enumerate(kept.groups()):
            ids = kept.lengths(group).index_select(1, kept.inverse(group)).sum(1).tolist()
            before |= dict(zip(keys, ids, strict=True))
    stored = kept.num_stored_of_keys()
    return {key: [ids, stored[key]] for key, ids in before.items()}


def recorded(mode: str, run: Path | None = None) -> Decision | None:
    """Decision by the option ``dedup``, or by "auto" in a run before; None: it is to be measured.

    Raises:
        DataError: the run's ``config.json`` has something else there.
    """
    if mode != "auto":
        return Decision(mode != "off")
    if run is None:
        return None
    found = files.read_json(run / CONFIG).get("dedup")
    try:
        return Decision(bool(found["on"]), found["factor"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{run}/{CONFIG} has dedup {found!r}, allowed are 'on' and 'factor'") from error


def measured(batches: Iterable[Batch]) -> Decision:
    """Decision of "auto", measured on the first batches of the training."""
    total, counted = Tally(), 0
    for batch in islice(batches, LOOKED_AT):
        _, tally = dedup_batch(batch)
        total.add(tally)
        counted += any(before for before, _ in tally.ids.values())
        if counted == MEASURED:
            break
    return Decision(total.factor() >= THRESHOLD, total.factor())
