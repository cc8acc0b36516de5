"""Runs the steps of a part, or of all, and keeps the page whole after each.

    python -m first_light --part 1 --output OUT

writes into OUT: `first_light.md` (the page) and `first_light.json` (what it is made from), `log.txt` (what the steps
print), `bench.json` and its picture, `kernels.ncu-rep`. Steps that the `first_light.json` there, or in a folder given
by --earlier, has as finished are not run again: a machine may be lost between two parts. Time that a part has left goes
to steps of other parts. `--page` makes one page of several folders.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from first_light import CARRY, ROOT, carried, limited, page
from first_light.carried import commit, sources
from first_light.limited import Ended
from first_light.plan import PART_SECONDS, PARTS, Step, steps

STATE, PAGE, LOG = "first_light.json", "first_light.md", "log.txt"
#: Seconds below which a step of the part is not begun.
LEAST = 20
BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
LEFT_OUT = re.compile(r"^(compute-sanitizer|Nsight Compute) .*left out$", re.MULTILINE)


def read(folder: Path) -> dict:
    """Returns the recorded state of a run, or {} where it is missing or was cut while it was written."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}


def save(state: dict, folder: Path) -> None:
    """Page and state, each whole at any time."""
    for name, text in ((STATE, json.dumps(state, indent=1) + "\n"), (PAGE, page.render(state))):
        new = folder / f"{name}.new"
        new.write_text(text)
        new.replace(folder / name)


class Run:
    """A run of steps: what is known of each, and the time there is.

    Args:
        output: the folder for everything that is written.
        states: what earlier runs have written, the latest last.
        seconds: how long the run may last; None: as long as it takes.
        rehearse: on this machine's CPU, a few cases a step.
    """

    def __init__(self, output: Path, states: list[dict], seconds: float | None, rehearse: bool) -> None:
        self.output, self.rehearse, self._log = output, rehearse, output / LOG
        self._end = None if seconds is None else time.monotonic() + seconds
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        # Output appears at once; no .pyc file is written beside the sources.
        self.environment |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.plan = steps(output, rehearse=rehearse, commit=commit())
        self._knows_others = bool(states)
        begun = page.merge(states)
        self.state = {"about": begun["about"], "steps": {}}
        for step in self.plan:
            waiting = {"part": step.part, "what": step.what, "limit": step.seconds, "state": "waiting"}
            self.state["steps"][step.name] = begun["steps"].get(step.name, waiting)

    def left(self) -> float:
        """Seconds that the run may still last."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def about(self, **facts: object) -> None:
        """Notes facts of the machine."""
        self.state["about"] |= facts
        save(self.state, self.output)

    def _run(self, command: Sequence[str | Path], seconds: float, environment: dict[str, str] | None = None) -> Ended:
        """A command within the time that is left, in the log."""
        return limited.run(command, self._log, min(seconds, self.left()), self.environment | (environment or {}))

    def prepare(self) -> None:
        """Adds what is packed, builds what is missing, and asks the machine what it is."""
        site = ROOT / "build" / "first-light-site"
        if added := carried.add_packages(site):
            self.environment["PYTHONPATH"] += os.pathsep + str(site)
        about = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        about |= {"commit": commit(), "sources": sources()}
        self.about(**about, rehearsal=self.rehearse, packages_added=", ".join(added) or "none")
        if not self.rehearse:
            placed = carried.place_libraries(carried.capability())
            self.about(libraries=placed)
            self._run(["nvidia-smi"], 20)
            if not carried.have_cuda_library():
                done = self._run([*BUILD], 1800, {"REC_KERNELS_CUDA": "1"})
                self.about(built=f"in {done.seconds:.0f} s, status {done.status}")
        done = self._run([sys.executable, "-m", "first_light.machine"], 90)
        try:
            self.about(**json.loads(done.tail.strip().splitlines()[-1]))
        except ValueError:
            self.about(machine=page.summary(done.tail))

    def step(self, step: Step) -> None:
        """Runs a step, within the time that is left."""
        known, seconds = self.state["steps"][step.name], min(step.seconds, self.left())
        known |= {"state": "running", "limit": step.seconds}
        save(self.state, self.output)
        print(f"{step.name}: at most {seconds:.0f} s", flush=True)
        done = self._run(step.command, step.seconds, step.environment)
        states = {0: "passed", None: "stopped" if seconds == step.seconds else "cut"}
        state = states.get(done.status, "failed")
        if done.status == 0 and LEFT_OUT.search(done.tail):
            state = "left out"
        known |= {"state": state, "seconds": round(done.seconds, 1), "status": done.status}
        known |= {"summary": page.summary(done.tail), "tail": done.tail[-page.SHOWN :]}
        save(self.state, self.output)
        print(f"{step.name}: {state} after {done.seconds:.0f} s: {known['summary']}", flush=True)
        if step.rescue and done.status is None and self.left() > LEAST:
            self._run(step.rescue, LEAST, step.environment)

    def part(self, part: int | None) -> None:
        """The steps of a part that are not finished, then those of others for which there is time."""
        todo = [step for step in self.plan if not page.finished(self.state["steps"][step.name])]
        for step in todo:
            if step.part == part and self.left() > LEAST:
                self.step(step)
        for step in todo:
            # An earlier part has run elsewhere, or not at all: without its files nobody knows.
            unknown = part is not None and step.part < part and not self._knows_others
            if step.part != part and not unknown and self.left() > step.seconds:
                self.step(step)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m first_light", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=PARTS, help="this part (default: all, for as long as they take)")
    parser.add_argument("--output", type=Path, required=True, help="the folder for everything that is written")
    parser.add_argument("--seconds", type=float, help=f"how long a part may last (default: {PART_SECONDS})")
    earlier = "what an earlier part has written elsewhere (repeatable; default: carry/earlier)"
    parser.add_argument("--earlier", type=Path, action="append", metavar="FOLDER", help=earlier)
    parser.add_argument("--again", action="store_true", help="runs what is finished, too")
    parser.add_argument("--rehearse", action="store_true", help="a few cases of each step on the CPU, without a GPU")
    parser.add_argument("--page", type=Path, nargs="+", metavar="FOLDER", help="only makes one page of these folders")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """The command; 0 if every step of the part has passed or was left out."""
    args = arguments(given)
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.page:
        save(page.merge([read(folder) for folder in args.page]), args.output)
        print(args.output / PAGE)
        return 0
    known = [] if args.again else [read(f) for f in (*(args.earlier or [CARRY / "earlier"]), args.output)]
    same = {"commit": commit(), "sources": sources(), "rehearsal": args.rehearse}
    known = [state for state in known if same.items() <= state.get("about", {}).items()]
    seconds = args.seconds or (PART_SECONDS if args.part else None)
    run = Run(args.output, known, seconds, args.rehearse)
    run.prepare()
    run.part(args.part)
    print((args.output / PAGE).read_text())
    mine = [s for s in run.state["steps"].values() if args.part in (None, s["part"])]
    return int(any(s["state"] not in ("passed", "left out") for s in mine))


if __name__ == "__main__":
    sys.exit(main())
