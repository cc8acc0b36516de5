"""What a paper claims, the number of ours that answers it, and the rule that says whether it is met."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rec_kernels.dlrm.compare_report import half_width

MET, NOT_MET, CANNOT_TELL = VERDICTS = ("met", "not met", "cannot tell")
RULE = (
    f'"{MET}": the 95 % interval of our number lies at or above the bound. "{NOT_MET}": all of it lies below. '
    f'"{CANNOT_TELL}": the bound lies inside it, there is no interval, or a run failed. A number of bytes or '
    "parameters is the same for every seed and has no interval: it is compared with the bound as it is."
)


@dataclass(frozen=True)
class Finding:
    """A number of ours.

    Args:
        value: None if the runs that it needs are not there.
        low, high: its 95 % interval over the seeds; None below 2 of them.
        pairs: seeds that it is from; None for a count, which is the same for all.
        failed: runs that it needs and that did not finish.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    failed: int = 0


def over_seeds(values: list[float]) -> Finding:
    """The mean of a value of every seed, and its interval."""
    if not values:
        return Finding(None, pairs=0)
    mean, half = float(np.mean(values)), half_width(values)
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return Finding(mean, low, high, len(values))


def _failed(result: dict, names: Sequence[str]) -> int:
    """Runs of these configurations that did not finish."""
    return sum(run["outcome"] != "test" for name in names for run in _configuration(result, name)["runs"])


def _configuration(result: dict, name: str) -> dict:
    return next(c for c in result["configurations"] if c["name"] == name)


def _scores(result: dict, name: str, key: str) -> dict[int, float]:
    """A number of the finished runs of a configuration, by their seed."""
    runs = _configuration(result, name)["runs"]
    return {run["seed"]: run[key] for run in runs if run["outcome"] == "test" and run[key] is not None}


@dataclass(frozen=True)
class Auc:
    """By how much a configuration's test AUC is above another's of the same seed, or above the mean of several."""

    name: str
    over: tuple[str, ...]
    unit = "AUC"

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations that it needs."""
        return self.name, *self.over

    def __str__(self) -> str:
        over = " and ".join(self.over)
        return f"AUC, {self.name} - {over if len(self.over) == 1 else f'the mean of {over}'}"

    def __call__(self, result: dict) -> Finding:
        """From the result of ``compare_report.summarise``."""
        own, *others = (_scores(result, name, "auc") for name in self.names)
        seeds = sorted(set(own).intersection(*others))
        found = over_seeds([own[seed] - sum(other[seed] for other in others) / len(others) for seed in seeds])
        return dataclasses.replace(found, failed=_failed(result, self.names))


@dataclass(frozen=True)
class Faster:
    """How many times a configuration's training examples per second are another's of the same seed."""

    name: str
    than: str
    unit = "times"

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations that it needs."""
        return self.name, self.than

    def __str__(self) -> str:
        return f"examples/s, {self.name} / {self.than}"

    def __call__(self, result: dict) -> Finding:
        """From the result of ``compare_report.summarise``."""
        own, other = (_scores(result, name, "examples_per_second") for name in self.names)
        found = over_seeds([own[seed] / other[seed] for seed in sorted(own.keys() & other.keys())])
        return dataclasses.replace(found, failed=_failed(result, self.names))


@dataclass(frozen=True)
class Fewer:
    """How many times fewer "parameters" or "weight_bytes" (of rows and cache) a configuration has than another."""

    what: str
    name: str
    than: str
    unit = "times"

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations that it needs."""
        return self.name, self.than

    def __str__(self) -> str:
        what = {"parameters": "parameters", "weight_bytes": "bytes of rows"}[self.what]
        return f"{what}, {self.than} / {self.name}"

    def __call__(self, result: dict) -> Finding:
        """From the result of ``compare_report.summarise``."""
        own, other = (_configuration(result, name)[self.what] for name in self.names)
        return Finding(None if own is None or other is None else other / own)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        says: the claim.
        source: the paper, as "arXiv:2211.05239", or "target" for one that this project set itself.
        measure: the number of ours that answers it.
        at_least: the bound that the number must reach.
        differs: how what is measured here differs from what the paper measured.
    """

    says: str
    source: str
    measure: Auc | Faster | Fewer
    at_least: float
    differs: str = ""


def judge(finding: Finding, at_least: float) -> tuple[str, str]:
    """The verdict of ``RULE``, and why."""
    if finding.value is None:
        return CANNOT_TELL, "the runs are not there"
    if finding.failed:
        return CANNOT_TELL, f"{finding.failed} of its runs failed"
    if finding.pairs is None:
        return (MET, "reaches the bound") if finding.value >= at_least else (NOT_MET, "is below the bound")
    if finding.low is None:
        return CANNOT_TELL, "there is no interval from 1 seed"
    if finding.low >= at_least:
        return MET, "the whole interval reaches the bound"
    if finding.high < at_least:
        return NOT_MET, "the whole interval is below the bound"
    return CANNOT_TELL, f"the bound is inside the interval of {finding.pairs} seeds"


def answer(claim: Claim, result: dict | None) -> dict:
    """A claim, our number and the verdict as plain data; ``result`` is that of ``compare_report.summarise``, if any."""
    finding = Finding(None) if result is None else claim.measure(result)
    verdict, why = judge(finding, claim.at_least)
    return {
        "says": claim.says,
        "source": claim.source,
        "differs": claim.differs,
        "measure": str(claim.measure),
        "unit": claim.measure.unit,
        "at_least": claim.at_least,
        "value": finding.value,
        "low": finding.low,
        "high": finding.high,
        "pairs": finding.pairs,
        "verdict": verdict,
        "why": why,
    }
