"""Papers' claims: the measure that tests each claim, and the rule for its verdict."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from bench.studies.compare_report import CONFIDENCE, half_width, machines_of

#: More seeds than anybody trains.
MOST_SEEDS = 10_000
MET, NOT_MET, CANNOT_TELL = VERDICTS = ("met", "not met", "cannot tell")
RULE = (
    f'"{MET}": the 95 % interval of our number lies at or above the bound, and above it where the claim is that '
    f'something is better or faster. "{NOT_MET}": all of it lies below, or not above. "{CANNOT_TELL}": the bound lies '
    "inside it, there is no interval, a run failed, speeds are of several machines or numbers of threads, or a size "
    "that the claim speaks of is another here. A number of bytes or parameters is the same for every seed, and the "
    "largest difference is one of all seeds: they have no interval, and are compared with the bound as they are."
)


@dataclass(frozen=True)
class Finding:
    """A measured value.

    Args:
        value: None if required runs are missing.
        low, high: 95 % interval over the seeds; None below 2 seeds.
        pairs: number of seeds; None for a count, which is equal for all seeds.
        failed: number of required runs that did not finish.
        unlike: the reason why the runs are not comparable; empty if they are.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    failed: int = 0
    unlike: str = ""


def over_seeds(values: list[float]) -> Finding:
    """The mean over seeds and its confidence interval."""
    if not values:
        return Finding(None, pairs=0)
    mean, half = float(np.mean(values)), half_width(values)
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return Finding(mean, low, high, len(values))


def _failed(result: dict, names: Sequence[str]) -> int:
    """Unfinished runs of these configurations."""
    return sum(run["outcome"] != "test" for name in names for run in _configuration(result, name)["runs"])


def _configuration(result: dict, name: str) -> dict:
    return next(c for c in result["configurations"] if c["name"] == name)


def _scores(result: dict, name: str, key: str) -> dict[int, float]:
    """A value of a configuration's finished runs, by seed."""
    runs = _configuration(result, name)["runs"]
    return {run["seed"]: run[key] for run in runs if run["outcome"] == "test" and run[key] is not None}


@dataclass(frozen=True)
class Auc:
    """Paired difference of a configuration's test AUC to another's, or to the mean of several."""

    name: str
    over: tuple[str, ...]
    unit = "AUC"

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations that the measure requires."""
        return self.name, *self.over

    def __str__(self) -> str:
        over = " and ".join(self.over)
        return f"AUC, {self.name} - {over if len(self.over) == 1 else f'the mean of {over}'}"

    def __call__(self, result: dict) -> Finding:
        """Computes the finding from the result of ``compare_report.summarise``."""
        own, *others = (_scores(result, name, "auc") for name in self.names)
        seeds = sorted(set(own).intersection(*others))
        found = over_seeds([own[seed] - sum(other[seed] for other in others) / len(others) for seed in seeds])
        return dataclasses.replace(found, failed=_failed(result, self.names))


class _OfTwo:
    """A measure of two configurations."""

    name: str
    than: str

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations that the measure requires."""
        return self.name, self.than


@dataclass(frozen=True)
class Faster(_OfTwo):
    """Paired ratio of a configuration's training examples per second to another's."""

    name: str
    than: str
    unit = "times"

    def __str__(self) -> str:
        return f"examples/s, {self.name} / {self.than}"

    def __call__(self, result: dict) -> Finding:
        """Computes the finding from the result of ``compare_report.summarise``."""
        own, other = (_scores(result, name, "examples_per_second") for name in self.names)
        found = over_seeds([own[seed] / other[seed] for seed in sorted(own.keys() & other.keys())])
        return dataclasses.replace(found, failed=_failed(result, self.names), unlike=self._unlike(result))

    def _unlike(self, result: dict) -> str:
        where = machines_of(run for name in self.names for run in _configuration(result, name)["runs"])
        if where == ["not recorded"]:
            return "the machine and the threads of its runs are not recorded"
        return f"its runs are of several machines or numbers of threads: {'; '.join(where)}" if len(where) > 1 else ""


@dataclass(frozen=True)
class Same(_OfTwo):
    """Negated maximum over seeds of the absolute difference of two test AUCs; the best value is 0."""

    name: str
    than: str
    unit = "AUC"

    def __str__(self) -> str:
        return f"AUC, -|{self.name} - {self.than}| where it is largest"

    def __call__(self, result: dict) -> Finding:
        """Computes the finding from the result of ``compare_report.summarise``."""
        own, other = (_scores(result, name, "auc") for name in self.names)
        apart = [abs(own[seed] - other[seed]) for seed in own.keys() & other.keys()]
        return Finding(-max(apart) if apart else None, failed=_failed(result, self.names))


@dataclass(frozen=True)
class Fewer(_OfTwo):
    """Ratio of another configuration's "parameters" or "weight_bytes" (rows and cache) to a configuration's."""

    what: str
    name: str
    than: str
    unit = "times"

    def __str__(self) -> str:
        what = {"parameters": "parameters", "weight_bytes": "bytes of rows"}[self.what]
        return f"{what}, {self.than} / {self.name}"

    def __call__(self, result: dict) -> Finding:
        """Computes the finding from the result of ``compare_report.summarise``."""
        own, other = (_configuration(result, name)[self.what] for name in self.names)
        return Finding(None if own is None or other is None else other / own)


@dataclass(frozen=True)
class Premise:
    """A premise of a claim: the claim applies only if ``measure`` is within the bounds.

    Both bounds matter: a quality at half the size may be out of reach at a twentieth.
    """

    measure: Fewer
    at_least: float
    at_most: float

    def __call__(self, result: dict | None) -> dict:
        """The measured value and its verdict, as plain data; None without a value."""
        value = None if result is None else self.measure(result).value
        holds = None if value is None else self.at_least <= value <= self.at_most
        about = {"measure": str(self.measure), "value": value, "holds": holds}
        return about | {"at_least": self.at_least, "at_most": self.at_most}


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        says: the claim.
        source: the paper, as "arXiv:2211.05239", or "target" for this project's own.
        measure: the measure that tests the claim.
        at_least: lower bound of the measured value.
        differs: differences between this measurement and the paper's.
        strictly: the value must be above the bound, not equal.
        premises: the sizes for which the claim holds.
    """

    says: str
    source: str
    measure: Auc | Faster | Fewer | Same
    at_least: float
    differs: str = ""
    strictly: bool = False
    premises: tuple[Premise, ...] = ()


def judge(finding: Finding, at_least: float, *, strictly: bool = False) -> tuple[str, str]:
    """The verdict by ``RULE`` and its reason; ``strictly``: the bound must be exceeded."""
    reaches = operator.gt if strictly else operator.ge
    above, below = ("is above", "is not above") if strictly else ("reaches", "is below")
    if finding.value is None:
        return CANNOT_TELL, "the runs are not there"
    if finding.failed:
        return CANNOT_TELL, f"{finding.failed} of its runs failed"
    if finding.unlike:
        return CANNOT_TELL, finding.unlike
    if finding.pairs is None:
        return (MET, f"{above} the bound") if reaches(finding.value, at_least) else (NOT_MET, f"{below} the bound")
    if finding.low is None:
        return CANNOT_TELL, "there is no interval from 1 seed"
    if reaches(finding.low, at_least):
        return MET, f"the whole interval {above} the bound"
    if not reaches(finding.high, at_least):
        return NOT_MET, f"the whole interval {below} the bound"
    return CANNOT_TELL, f"the bound is inside the interval of {finding.pairs} seeds"


def answer(claim: Claim, result: dict | None) -> dict:
    """A claim, the measured value and the verdict as plain data; ``result`` is from ``compare_report.summarise``."""
    finding = Finding(None) if result is None else claim.measure(result)
    verdict, why = judge(finding, claim.at_least, strictly=claim.strictly)
    premises = [premise(result) for premise in claim.premises]
    if verdict != CANNOT_TELL and not all(premise["holds"] for premise in premises):
        verdict, why = CANNOT_TELL, "a size is not as the claim has it"
    return {
        "says": claim.says,
        "source": claim.source,
        "differs": claim.differs,
        "measure": str(claim.measure),
        "unit": claim.measure.unit,
        "at_least": claim.at_least,
        "strictly": claim.strictly,
        "premises": premises,
        "value": finding.value,
        "low": finding.low,
        "high": finding.high,
        "pairs": finding.pairs,
        "verdict": verdict,
        "why": why,
    }


def seeds_to_tell(claim: dict) -> int | None:
    """The number of seeds at which the interval would exclude the bound, for unchanged mean and spread.

    Args:
        claim: of ``answer``, with an interval.

    Returns:
        None above ``MOST_SEEDS``.
    """
    seeds = np.arange(2, MOST_SEEDS + 1)
    halves = stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1) / np.sqrt(seeds)  # of a spread of 1
    spread = (claim["value"] - claim["low"]) / halves[claim["pairs"] - 2]
    enough = seeds[spread * halves < abs(claim["value"] - claim["at_least"])]
    return int(enough[0]) if len(enough) else None


def shortfall(claim: dict) -> str:
    """Describes why a claim is undecided, e.g. "0.0015 from the bound, ±0.0022: 15 seeds would tell".

    Empty for other verdicts; the reason of the verdict without an interval, or if sizes or machines do not fit.
    """
    if claim["verdict"] != CANNOT_TELL:
        return ""
    if claim["low"] is None or not claim["low"] <= claim["at_least"] <= claim["high"]:
        return claim["why"]
    away, half = abs(claim["value"] - claim["at_least"]), claim["value"] - claim["low"]
    text = "{:.4f} from the bound, ±{:.4f}" if claim["unit"] == "AUC" else "{:.2f}x from the bound, ±{:.2f}x"
    needed = seeds_to_tell(claim) or f"more than {MOST_SEEDS:,}"
    return f"{text.format(away, half)}: {needed} seeds would tell"
