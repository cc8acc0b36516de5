"""Deduplication: the bags that rows of a batch have in common are moved, looked up and updated once.

With windows, ids that different bags have in common are moved once, too. A stage of the reader, behind the data set and
on its thread: a step does not wait for it while it takes less time than the step. Source: Zhao et al., "RecD:
Deduplication for End-to-End Deep Learning Recommendation Model Training Infrastructure", MLSys 2023, arXiv:2211.05239.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import rec_kernels as rk
from rec_kernels.dlrm import files
from rec_kernels.dlrm.data import Batch, DataError
from rec_kernels.dlrm.runs import CONFIG
from rec_kernels.dlrm.shapes import FLAG, Maybe, mismatch, number

#: Ids before over ids stored from which "auto" deduplicates. Below it, writing pooled rows out to all samples takes as
#: long as the lookups and updates that are saved: with histories of 50 ids, they break even at 1.1 (docs/results.md,
#: "Deduplicated batches"); the rest is for finding the bags, and for what varies from batch to batch.
THRESHOLD = 4 / 3
#: Batches that "auto" looks at: so many with ids in shared features, among so many from the beginning of the training.
#: The first rows of a log may have no past.
MEASURED, LOOKED_AT = 8, 64


class Decision(NamedTuple):
    """A run's decision to deduplicate or not.

    Args:
        on: yes or no.
        factor: what "auto" has measured; None without "auto", and of data without shared features.
    """

    on: bool
    factor: float | None = None


def dedup_batch(batch: Batch, windows: bool = False) -> Batch:
    """The batch with its shared features as one group of distinct bags; those of a data set that knows them stay.

    With ``windows``, the bags are windows of one buffer.
    """
    shared = batch.shared
    if shared is None:
        return batch
    if not isinstance(shared, rk.InverseKeyedJaggedTensor):
        shared = rk.InverseKeyedJaggedTensor.from_kjt(shared, [list(shared.keys())])
    return batch._replace(shared=shared.with_windows() if windows else shared)


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
    if wrong := mismatch(found, {"on": FLAG, "factor": Maybe(number())}, "dedup"):
        raise DataError(f"{run / CONFIG}: {wrong}")
    return Decision(found["on"], found["factor"])


def measured(batches: Iterable[Batch]) -> Decision:
    """Decision of "auto", by the mean factor of the first batches of the training that have shared ids."""
    factors: list[float] = []
    for batch in islice(batches, LOOKED_AT):
        shared: Any = dedup_batch(batch).shared
        if shared is not None and len(shared.stored().values()):
            factors.append(shared.dedup_factor())
        if len(factors) == MEASURED:
            break
    factor = sum(factors) / len(factors) if factors else 1.0
    return Decision(factor >= THRESHOLD, factor)
