"""Deduplication: the bags that rows of a batch have in common are moved, looked up and updated once.

With windows, ids that different bags have in common are moved once, too. A stage of the reader, behind the data set and
on its thread: a step does not wait for it while it takes less time than the step. Source: Zhao et al., "RecD:
Deduplication for End-to-End Deep Learning Recommendation Model Training Infrastructure", MLSys 2023, arXiv:2211.05239.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import rec_kernels as rk
from rec_kernels.dlrm import files
from rec_kernels.dlrm.data import Batch, DataError, HeldOut
from rec_kernels.dlrm.runs import CONFIG

#: Ids before over ids stored from which "auto" deduplicates. Below it, writing pooled rows out to all samples takes as
#: long as the lookups and updates that are saved: with histories of 50 ids, they break even at 1.1 (docs/results.md,
#: "Deduplicated batches"); the rest is for finding the bags, and for what varies from batch to batch.
THRESHOLD = 4 / 3
#: Batches that "auto" looks at: so many with ids in shared features, among so many from the beginning of the training.
#: The first rows of a log may have no past.
MEASURED, LOOKED_AT = 8, 64


class Tally:
    """Time of the stage and ids before and after it, added up over batches.

    Args:
        state: of another one, as ``state()`` gives it.

    Attributes:
        seconds: on the reader's thread.
        ids: by feature, those of all rows and those that are kept: of the distinct bags, or of their windows.
        windows: whether a batch had its bags as windows.
    """

    def __init__(self, state: dict | None = None):
        self.seconds: float = state["seconds"] if state else 0.0
        self.ids: dict[str, tuple[int, int]] = {k: tuple(v) for k, v in state["ids"].items()} if state else {}
        self.windows: bool = state.get("windows", False) if state else False  # not in older checkpoints

    def add(self, other: Tally) -> None:
        """Adds what another one has."""
        self.seconds += other.seconds
        self.windows |= other.windows
        for name, (before, stored) in other.ids.items():
            so_far = self.ids.get(name, (0, 0))
            self.ids[name] = so_far[0] + before, so_far[1] + stored

    def factors(self) -> dict[str, float]:
        """By feature, ids before over ids stored; 1 of none."""
        return {name: before / stored if stored else 1.0 for name, (before, stored) in self.ids.items()}

    def factor(self) -> float:
        """The same of all features together."""
        before, stored = (sum(counts) for counts in zip(*self.ids.values(), strict=True)) if self.ids else (0, 0)
        return before / stored if stored else 1.0

    def state(self) -> dict:
        """For a checkpoint."""
        ids = {name: list(counts) for name, counts in self.ids.items()}
        return {"seconds": self.seconds, "ids": ids, "windows": self.windows}

    def record(self) -> dict:
        """For ``metrics.jsonl``; empty if nothing was counted."""
        return {"dedup_factors": self.factors(), "dedup_seconds": self.seconds} if self.ids else {}


class Decision(NamedTuple):
    """Whether a run deduplicates.

    Args:
        on: yes or no.
        factor: what "auto" has measured; None without "auto", and of data without shared features.
    """

    on: bool
    factor: float | None = None


class DedupReader:
    """The rows of a data set with equal shared bags once (on), or with a bag for every row (off).

    Args:
        data: the data set and its split.
        on: whether bags are given once.
        windows: whether these are windows of one buffer, then.
    """

    def __init__(self, data: HeldOut, on: bool, windows: bool = False):
        self.data, self.on, self.windows = data, on, windows
        self.name, self.num_dense, self.features = data.name, data.num_dense, data.features
        self.batch_size, self.fingerprint = data.batch_size, data.fingerprint

    def num_rows(self, split: str) -> int:
        """Rows of "train", "valid" or "test"."""
        return self.data.num_rows(split)

    def batches(
        self, split: str, batch_size: int, start: int = 0, tallies: deque[Tally] | None = None
    ) -> Iterator[Batch]:
        """As ``HeldOut.batches``, joined unless of windows.

        A batch's tally is appended to ``tallies`` before the batch is there.

        Raises:
            DataError: a batch's shared features have weights, of which there are no windows.
        """
        for batch in self.data.batches(split, batch_size, start):
            if self.windows:
                _refuse_weights(batch, self.name)
            batch, tally = dedup_batch(batch, self.windows) if self.on else expanded(batch)
            if tallies is not None:
                tallies.append(tally)
            yield batch if self.windows else batch.joined()  # windows are smaller to move than the bags they become


def _refuse_weights(batch: Batch, name: str) -> None:
    shared = batch.shared
    stored = shared.stored() if isinstance(shared, rk.InverseKeyedJaggedTensor) else shared
    if isinstance(stored, rk.KeyedJaggedTensor) and stored.weights_or_none() is not None:
        raise DataError(
            f"data set {name!r} gave a batch whose shared features have weights, and dedup is 'windows', which have "
            "none: allowed is auto, on or off"
        )


def dedup_batch(batch: Batch, windows: bool = False) -> tuple[Batch, Tally]:
    """The batch with its shared features as one group of distinct bags; those of a data set that knows them stay.

    With ``windows``, the bags are windows of one buffer.
    """
    tally = Tally()
    if batch.shared is None:
        return batch, tally
    started = time.perf_counter()
    shared = batch.shared
    if not isinstance(shared, rk.InverseKeyedJaggedTensor):
        shared = rk.InverseKeyedJaggedTensor.from_kjt(shared, [list(shared.keys())])
    if windows:
        shared = shared.with_windows()
    tally.windows = isinstance(shared.stored(), rk.KeyedJaggedWindows)
    tally.ids = _count(batch.shared, shared)
    tally.seconds = time.perf_counter() - started
    return batch._replace(shared=shared), tally


def expanded(batch: Batch) -> tuple[Batch, Tally]:
    """The batch with a bag for every row."""
    tally = Tally()
    if not isinstance(batch.shared, rk.InverseKeyedJaggedTensor):
        return batch, tally
    started = time.perf_counter()
    batch = batch._replace(shared=batch.shared.to_kjt())
    tally.seconds = time.perf_counter() - started
    return batch, tally


def _count(
    given: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor, kept: rk.InverseKeyedJaggedTensor
) -> dict[str, tuple[int, int]]:
    """By feature, ids of all rows and those that are kept."""
    stored = kept.num_stored_of_keys()
    if isinstance(given, rk.KeyedJaggedTensor):
        bounds = zip(given.keys(), itertools.pairwise(given.offset_per_key()), strict=True)
        return {key: (last - first, stored[key]) for key, (first, last) in bounds}
    counts: dict[str, tuple[int, int]] = {}
    for group, keys in enumerate(kept.groups()):
        before = kept.lengths(group).index_select(1, kept.inverse(group)).sum(1).tolist()
        counts |= {key: (ids, stored[key]) for key, ids in zip(keys, before, strict=True)}
    return counts


def decide(mode: str, data: HeldOut, run: Path | None = None) -> Decision:
    """Whether a run deduplicates.

    Args:
        mode: "on", "windows", "off" or "auto", which measures the first batches of the training.
        data: of the run.
        run: folder of one that is gone on with: what "auto" has decided there holds.

    Raises:
        DataError: as ``DedupReader.batches``, or the run's ``config.json`` has something else there.
    """
    if mode != "auto":
        return Decision(mode != "off")
    return _recorded(run) or _measured(data)


def _recorded(run: Path | None) -> Decision | None:
    if run is None:
        return None
    found = files.read_json(run / CONFIG).get("dedup")
    if found is None:  # of a run before there was this
        return None
    try:
        return Decision(bool(found["on"]), found["factor"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{run / CONFIG} has dedup {found!r}, allowed are 'on' and 'factor'") from error


def _measured(data: HeldOut) -> Decision:
    if not any(feature.shared for feature in data.features):
        return Decision(False)
    total, counted = Tally(), 0
    for batch in islice(data.batches("train", data.batch_size), LOOKED_AT):
        _, tally = dedup_batch(batch)
        total.add(tally)
        counted += any(before for before, _ in tally.ids.values())
        if counted == MEASURED:
            break
    return Decision(total.factor() >= THRESHOLD, total.factor())
