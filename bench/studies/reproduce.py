"""Reproduction of papers' claims on real data: ``python -m bench.studies reproduce``."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import pictures
from bench.studies import compare, compare_report, reproduce_pictures, reproduce_report
from bench.studies.claims import answer
from bench.studies.experiments import EXPERIMENTS, QUICK_SEEDS, QUICK_WEEKS, Experiment
from rec_kernels.dlrm import devices, files
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.train import RunInterruptedError

RESULTS = "results.json"
CLOCKS = ("seconds", "cpu_seconds")
# States of an experiment.
DONE, FAILED, LEFT_OUT, UNFINISHED, NOT_RUN = "done", "failed", "left out", "not finished", "not run"


@dataclass(frozen=True)
class Request:
    """Request for a set of experiments.

    Args:
        base: execution options: ``threads``, ``runs_dir``, ``data_dir``.
        only: names of experiments; empty: all.
        quick: fewer weeks and seeds.
        movielens: folder of a MovieLens data set; None skips experiments that need one.

    Raises:
        ValueError: a name is unknown or repeated.
    """

    base: TrainConfig
    only: tuple[str, ...] = ()
    quick: bool = False
    movielens: str | None = None

    def __post_init__(self):
        allowed = [experiment.name for experiment in EXPERIMENTS]
        wrong = [name for name in self.only if name not in allowed or self.only.count(name) > 1]
        if wrong:
            raise ValueError(f"only has {wrong[0]!r}, allowed are {', '.join(allowed)}, each of them once")

    @property
    def folder(self) -> Path:
        """The folder of the page and of the experiments' folders."""
        return Path(self.base.runs_dir) / ("reproduce-quick" if self.quick else "reproduce")

    def plan(self, experiment: Experiment) -> compare.Comparison:
        """The comparison of an experiment."""
        base = TrainConfig(threads=self.base.threads, data_dir=self.base.data_dir, runs_dir=str(self.folder))
        return experiment.plan(base, quick=self.quick, path=self.movielens)

    def chosen(self) -> tuple[Experiment, ...]:
        """The selected experiments in the order of the list."""
        return tuple(e for e in EXPERIMENTS if e.name in self.only or not self.only)


def listing() -> str:
    """The list of experiments as text."""
    lines = []
    for experiment in EXPERIMENTS:
        path, count = "; needs --movielens PATH" if experiment.needs_path else "", len(experiment.claims)
        lines.append(f"{experiment.name:<14}{experiment.shows}")
        lines.append(
            f"{'':<14}{count} claim{'s' if count > 1 else ''}; {experiment.minutes:g} min, with --quick "
            f"{experiment.quick_minutes:g} min{path}"
        )
    whole, quick = (sum(getattr(e, key) for e in EXPERIMENTS) for key in ("minutes", "quick_minutes"))
    lines.append(f"{'all':<14}{whole / 60:.1f} h, with --quick {quick:.0f} min, of one core")
    return "\n".join(lines)


def run(request: Request) -> dict:
    """Trains the missing runs, writes the page after every experiment, and returns ``results.json``.

    A failed experiment is listed on the page; the others continue.

    Raises:
        RunInterruptedError, KeyboardInterrupt: a repeated call resumes.
        OSError: the folder cannot be written to.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    states = _earlier(request.folder)
    for number, experiment in enumerate(request.chosen(), 1):
        name = experiment.name
        print(f"[{number}/{len(request.chosen())}] {name}: {experiment.shows}", file=sys.stderr)
        spent, start = {clock: states.get(name, {}).get(clock, 0.0) for clock in CLOCKS}, _clocks()
        states[name] = {"status": UNFINISHED, "why": "interrupted"}
        try:
            states[name] = _attempt(request, experiment)
        finally:
            states[name] |= {clock: spent[clock] + now - start[clock] for clock, now in _clocks().items()}
            results = _write(request, states)
    return results


def _write(request: Request, states: dict[str, dict]) -> dict:
    """Writes ``results.json`` atomically, then the page; returns the results."""
    results = gather(request, states)
    files.write_text(request.folder / RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")
    reproduce_report.write(request.folder, results)
    return results


def _clocks() -> dict[str, float]:
    """Wall-clock seconds, and CPU seconds of this process, which do not depend on other load."""
    return dict(zip(CLOCKS, (time.monotonic(), time.process_time()), strict=True))


def _attempt(request: Request, experiment: Experiment) -> dict:
    """Trains a comparison and writes its files and pictures; returns its state."""
    if experiment.needs_path and request.movielens is None:
        if _result(request, experiment) is not None:  # of an earlier call with the path
            return {"status": DONE}
        return {"status": LEFT_OUT, "why": "give --movielens PATH, the folder of a MovieLens data set"}
    try:
        comparison = request.plan(experiment)
        files.refuse_foreign(comparison.folder, folder=True)
        result = compare_report.summarise(comparison, compare.run(comparison))
        compare_report.write(comparison, result)
        pictures.save(reproduce_pictures.speed(result), comparison.folder / reproduce_report.SPEED, dpi=110)
    except RunInterruptedError:
        raise
    except Exception as error:  # any error: other experiments continue
        traceback.print_exc()
        print(f"{experiment.name} failed: {error}", file=sys.stderr)
        return {"status": FAILED, "why": f"{type(error).__name__}: {error}"}
    return {"status": DONE}


def _earlier(folder: Path) -> dict[str, dict]:
    """The states saved by an earlier call, by experiment."""
    try:
        entries = files.read_json(folder / RESULTS)["experiments"]
        return {e["name"]: {key: e[key] for key in ("status", "why", *CLOCKS) if e[key] is not None} for e in entries}
    except (OSError, DataError, KeyError, TypeError):  # missing or invalid: only times and reasons are lost
        return {}


def gather(request: Request, states: dict[str, dict]) -> dict:
    """All results of this and earlier calls, as plain data."""
    entries = []
    for experiment in EXPERIMENTS:
        state = {"status": NOT_RUN, "why": None} | dict.fromkeys(CLOCKS) | states.get(experiment.name, {})
        result = _result(request, experiment) if state["status"] in (DONE, NOT_RUN) else None
        if state["status"] == DONE and result is None:
            state |= {"status": NOT_RUN, "why": "what an earlier call left is of another list, or gone"}
        elif result is not None:  # also of an earlier call without results.json
            state |= {"status": DONE, "why": None}
        minutes = experiment.quick_minutes if request.quick else experiment.minutes
        command = experiment.command(quick=request.quick)
        about = {"name": experiment.name, "shows": experiment.shows, "command": command}
        claims = [answer(claim, result) for claim in experiment.claims]
        entries.append(about | state | {"stated_minutes": minutes, "claims": claims, "result": result})
    return {
        "quick": {"weeks": QUICK_WEEKS, "seeds": QUICK_SEEDS} if request.quick else None,
        "machine": _machine(),
        "experiments": entries,
    }


def _result(request: Request, experiment: Experiment) -> dict | None:
    """The comparison's saved result; None if it is missing, invalid or of another plan, except for the data's path."""
    plan = request.plan(experiment)
    try:
        result = files.read_json(plan.folder / "compare.json")
        found = [(c["name"], c["options"] | {"path": None}) for c in result["configurations"]]
        expected = [(name, compare_report.changed_options(c) | {"path": None}) for name, c in plan.configs.items()]
        same = (found, result["seeds"]) == (expected, list(plan.seeds))
        return result if same and compare_report.is_result(result) else None
    except (OSError, DataError, LookupError, TypeError, ValueError):
        return None


def _machine() -> dict:
    """Describes this machine and its packages."""
    versions = devices.versions()
    packages = {package: versions[package] for package in ("rec_kernels", "torch")}
    return {"cpu": devices.cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()} | packages


def failures(results: dict, names: Sequence[str]) -> list[str]:
    """Reasons why experiments in ``names`` failed, or why all were skipped."""
    chosen = [entry for entry in results["experiments"] if entry["name"] in names]
    all_out = all(entry["status"] == LEFT_OUT for entry in chosen)
    return [f"{entry['name']}: {entry['why']}" for entry in chosen if all_out or entry["status"] == FAILED]
