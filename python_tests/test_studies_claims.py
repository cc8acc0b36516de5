"""Papers' claims compared with our figures: measures, premises, and verdicts."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench.studies import claims, compare_report
from bench.studies.claims import CANNOT_TELL, MET, NOT_MET, Auc, Claim, Faster, Fewer, Finding, Premise, Same
from bench.studies.experiments import EXPERIMENTS

ROOT = Path(__file__).parent.parent
HERE = {"cpu": "c", "threads": 1, "gpu": None}


def fabricated(**configurations) -> dict:
    """A result of ``compare_report.summarise``: by name "auc" and "speed" of every seed, and "bytes"."""
    made = []
    for name, given in configurations.items():
        aucs = given["auc"]
        speeds = given.get("speed", [100.0] * len(aucs))
        runs = [
            {"seed": seed, "run": f"{name}-seed{seed}", "outcome": "failed", "error": "why"}
            if auc is None
            else {"seed": seed, "outcome": "test", "auc": auc, "log_loss": 0.5, "examples_per_second": speed}
            for seed, (auc, speed) in enumerate(zip(aucs, speeds, strict=True))
        ]
        made.append({"name": name, "runs": runs, "weight_bytes": given.get("bytes"), "parameters": given.get("bytes")})
    return {"configurations": made}


def test_what_is_lacking_to_tell():
    """The suggested number of seeds is the fewest whose interval, with this spread, excludes the bound."""
    values = [0.001, 0.003, -0.001, 0.002, 0.0, 0.004, -0.002, 0.001]
    found = claims.over_seeds(values)
    claim = {"verdict": CANNOT_TELL, "why": "w", "unit": "AUC", "at_least": 0.0, "pairs": found.pairs}
    claim |= {"value": found.value, "low": found.low, "high": found.high}
    needed, spread = claims.seeds_to_tell(claim), np.std(values, ddof=1)
    halves = [spread * stats.t.ppf(0.975, n - 1) / np.sqrt(n) for n in (needed, needed - 1)]
    assert halves[0] < found.value <= halves[1]
    half = found.value - found.low
    assert claims.shortfall(claim) == f"0.0010 from the bound, ±{half:.4f}: {needed} seeds would tell"
    times = claim | {"unit": "times", "at_least": found.value}
    assert claims.shortfall(times) == f"0.00x from the bound, ±{half:.2f}x: more than 10,000 seeds would tell"
    assert claims.shortfall(claim | {"low": None}) == claims.shortfall(claim | {"at_least": 1.0}) == "w"
    assert claims.shortfall(claim | {"verdict": MET}) == ""


@pytest.mark.parametrize(
    ("finding", "verdict", "why"),
    [
        (Finding(0.3, 0.1, 0.5, 8), MET, "the whole interval reaches the bound"),
        (Finding(0.3, 0.0, 0.6, 8), MET, "the whole interval reaches the bound"),
        (Finding(0.3, -0.1, 0.7, 3), CANNOT_TELL, "the bound is inside the interval of 3 seeds"),
        (Finding(-0.1, -0.2, 0.0, 3), CANNOT_TELL, "the bound is inside the interval of 3 seeds"),
        (Finding(-0.3, -0.5, -0.1, 8), NOT_MET, "the whole interval is below the bound"),
        (Finding(0.3, None, None, 1), CANNOT_TELL, "there is no interval from 1 seed"),
        (Finding(None, pairs=0), CANNOT_TELL, "the runs are not there"),
        (Finding(None), CANNOT_TELL, "the runs are not there"),
        (Finding(0.3, 0.1, 0.5, 8, 1), CANNOT_TELL, "1 of its runs failed"),
        (Finding(0.0), MET, "reaches the bound"),
        (Finding(-1e-9), NOT_MET, "is below the bound"),
    ],
)
def test_verdicts_follow_from_the_interval(finding, verdict, why):
    assert claims.judge(finding, 0.0) == (verdict, why)
    moved = [None if v is None else v + 2.5 for v in (finding.value, finding.low, finding.high)]
    if finding.value != -1e-9:  # which 2.5 absorbs
        assert claims.judge(Finding(*moved, finding.pairs, finding.failed), 2.5) == (verdict, why)


@pytest.mark.parametrize(
    ("finding", "verdict", "why"),
    [
        (Finding(0.3, 0.1, 0.5, 8), MET, "the whole interval is above the bound"),
        (Finding(0.3, 0.0, 0.6, 8), CANNOT_TELL, "the bound is inside the interval of 8 seeds"),
        (Finding(-0.1, -0.2, 0.0, 3), NOT_MET, "the whole interval is not above the bound"),
        (Finding(0.0, 0.0, 0.0, 8), NOT_MET, "the whole interval is not above the bound"),
        (Finding(0.0), NOT_MET, "is not above the bound"),
        (Finding(1e-9), MET, "is above the bound"),
    ],
)
def test_equal_is_not_better(finding, verdict, why):
    assert claims.judge(finding, 0.0, strictly=True) == (verdict, why)


def test_what_is_better_is_so_strictly():
    """Claims of a difference or of a higher speed are strict; claims that nothing is lost are not."""
    for claim in (claim for experiment in EXPERIMENTS for claim in experiment.claims):
        compares = isinstance(claim.measure, (Auc, Faster)) and len(claim.measure.names) == 2
        none = {"AUC": 0.0, "times": 1.0}[claim.measure.unit]
        assert claim.strictly == (compares and claim.at_least == none), claim.says


def test_the_same_is_so_in_both_directions():
    scores = {"a": {"auc": [0.5, 0.6]}}
    for other, value in (([0.5, 0.6], 0.0), ([0.5, 0.62], -0.02), ([0.45, 0.62], -0.05)):
        found = Same("b", "a")(fabricated(**scores, b={"auc": other}))
        assert found == Finding(pytest.approx(value))
        assert claims.judge(found, 0.0)[0] == (MET if value == 0 else NOT_MET)
    failed = Same("b", "a")(fabricated(**scores, b={"auc": [0.5, None]}))
    assert claims.judge(failed, 0.0) == (CANNOT_TELL, "1 of its runs failed")
    assert Same("b", "a")(fabricated(**scores, b={"auc": [None, None]})) == Finding(None, failed=2)
    windows = next(c for e in EXPERIMENTS for c in e.claims if c.says == "windows change no score")
    assert isinstance(windows.measure, Same)


@pytest.mark.parametrize(
    ("fewer", "most", "holds"), [(2.0, 3.0, True), (2.5, 2.5, True), (2.6, 3.0, False), (2.0, 2.4, False)]
)
def test_a_claim_is_of_the_sizes_that_it_speaks_of(fewer, most, holds):
    """A claim at other sizes gets no verdict; without runs it has no premise either."""
    result = fabricated(a={"auc": [0.5, 0.6], "bytes": 100}, b={"auc": [0.6, 0.7], "bytes": 40})
    premise = Premise(Fewer("parameters", "b", "a"), fewer, most)
    claim = Claim("s", "target", Auc("b", ("a",)), 0.0, premises=(premise,))
    found = claims.answer(claim, result)
    assert found["premises"] == [
        {"measure": "parameters, a / b", "value": 2.5, "holds": holds, "at_least": fewer, "at_most": most}
    ]
    assert (found["verdict"], found["why"]) == (
        (MET, "the whole interval reaches the bound") if holds else (CANNOT_TELL, "a size is not as the claim has it")
    )
    nothing = claims.answer(claim, None)
    assert (nothing["why"], nothing["premises"][0]["holds"]) == ("the runs are not there", None)


def test_claims_of_sizes_measure_them():
    """Claims with a factor, half or "the same number" measure sizes; published runs meet them.

    Runs of half or twice the parameters answer none of them, whatever their results.
    """
    published_as = {"collisions": "compression", "dimensions": "dimensions", "movielens": "movielens"}
    for experiment in EXPERIMENTS:
        for claim in experiment.claims:
            has_size = isinstance(claim.measure, Fewer) or bool(claim.premises)
            assert has_size == bool(re.search(r"times (fewer|less)|half the|number of param|takes \d bits", claim.says))
            if claim.premises and experiment.name in published_as:
                result = published(f"{published_as[experiment.name]}_quality")
                held = [premise(result)["holds"] for premise in claim.premises]
                # Remainders of 60 rows have a quarter of the size of tables with 5,257 rows.
                assert all(held) != (experiment.name == "movielens" and "60 ids" in claim.says), claim.says
                for change in (0.5, 2.0):
                    other = copy.deepcopy(result)
                    for configuration in other["configurations"]:
                        configuration["parameters"] *= change if configuration["name"] == claim.measure.name else 1
                    assert claims.answer(claim, other)["verdict"] == CANNOT_TELL, claim.says


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ([[HERE], [HERE]], ""),
        ([[HERE], [HERE | {"threads": 2}]], "several machines or numbers of threads: c, 1 thread; c, 2 threads"),
        ([[HERE], [HERE | {"cpu": "d"}]], "several machines or numbers of threads: c, 1 thread; d, 1 thread"),
        ([[HERE], [HERE | {"gpu": "g"}]], "several machines or numbers of threads: c, 1 thread; c, 1 thread, g"),
        ([[HERE], [HERE, HERE | {"cpu": "d"}]], "several machines or numbers of threads: c, 1 thread; d, 1 thread"),
        ([[HERE], None], "several machines or numbers of threads: c, 1 thread; not recorded"),
        ([None, None], "the machine and the threads of its runs are not recorded"),
    ],
)
def test_speeds_of_several_machines_are_not_judged(places, why):
    """Speeds of several machines are not judged, nor those of one run that moved to another."""
    result = fabricated(a={"auc": [0.5, 0.5]}, b={"auc": [0.5, 0.5], "speed": [200.0, 200.0]})
    for configuration in result["configurations"]:
        for run, place in zip(configuration["runs"], places, strict=True):
            run["machines"] = place
    found = Faster("b", "a")(result)
    verdict, reason = claims.judge(found, 1.0)
    assert found.value == 2.0
    assert verdict == (CANNOT_TELL if why else MET)
    assert reason.endswith(why)
    note = compare_report.machines_note(result)
    assert (note is not None) == ("several" in why)


def test_measures_pair_the_seeds():
    result = fabricated(
        a={"auc": [0.5, 0.6, 0.7, None], "speed": [100, 200, 100, 1], "bytes": 100},
        b={"auc": [0.6, 0.7, 0.9, 0.1], "speed": [200, 500, 150, 1], "bytes": 40},
        c={"auc": [0.9, 0.9, None, 0.9], "bytes": 10},
    )
    found = Auc("b", ("a",))(result)
    # Differences 0.1, 0.1, 0.2: mean 0.4/3, sd 0.1/sqrt(3), and 4.3027 is the 97.5 % point of t with 2 degrees.
    assert (found.value, found.pairs) == (pytest.approx(0.4 / 3), 3)
    assert found.high - found.value == pytest.approx(4.3027 * 0.1 / 3, rel=1e-4)
    assert Auc("b", ("a", "c"))(result).value == pytest.approx(((0.6 - 0.7) + (0.7 - 0.75)) / 2)
    assert Faster("b", "a")(result).value == pytest.approx((2 + 2.5 + 1.5) / 3)
    assert Fewer("weight_bytes", "b", "a")(result) == Finding(2.5)
    assert str(Auc("b", ("a", "c"))) == "AUC, b - the mean of a and c"
    none = fabricated(a={"auc": [None]}, b={"auc": [0.5]})
    assert Auc("b", ("a",))(none) == Finding(None, pairs=0, failed=1)
    assert Fewer("parameters", "b", "a")(none) == Finding(None)


def published(name: str) -> dict:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def test_published_results_give_the_published_numbers():
    """Findings agree with the text of docs/quality.md, whose figures were computed by hand."""
    dimensions, cache = published("dimensions_quality"), published("cache_quality")
    ahead = Auc("mixed8", ("dim2",))(dimensions)
    assert (ahead.value, ahead.low, ahead.high) == tuple(pytest.approx(v, abs=5e-5) for v in (0.0060, 0.0018, 0.0101))
    given_back = (0.87760 - 0.86287) / (0.88151 - 0.86287)  # 79 %
    halfway = Auc("mx4c5", ("mx4", "fp32"))(cache)
    assert halfway.value == pytest.approx((given_back - 0.5) * (0.88151 - 0.86287), abs=2e-5)
    assert Fewer("weight_bytes", "int8c5", "fp32")(cache).value == pytest.approx(2.2, abs=0.05)
