"""The page: what passed, what failed, what was not reached, and what a failed step said at its end."""

from __future__ import annotations

import re

#: States of a step, as the page names them.
STATES = {
    "passed": "passed",
    "failed": "**failed**",
    "stopped": "**stopped at its limit**",
    "left out": "left out",
    "running": "**was cut**: the run ended before the step did",
    "cut": "**was cut**: the part had no more time",
    "waiting": "not reached",
}
#: Characters of a failed step's output that the page shows.
SHOWN = 6000


def finished(state: dict) -> bool:
    """True if a step ended by itself, so that it is not run again."""
    return state.get("state") in ("passed", "failed", "stopped", "left out")


def merge(states: list[dict]) -> dict:
    """One state of several, later ones first in doubt: of each step what is finished, else what was begun."""
    merged: dict = {"about": {}, "steps": {}}
    for state in states:
        merged["about"] |= state.get("about", {})
        for name, step in state.get("steps", {}).items():
            before = merged["steps"].get(name, {})
            if finished(step) or not finished(before):
                merged["steps"][name] = step
    return merged


def summary(tail: str) -> str:
    """The last line that says something, without a frame of pytest's, made fit for a table."""
    lines = [line.strip(" =!") for line in tail.splitlines() if re.search(r"\w", line)]
    # pytest's own count is more than what comes behind it.
    counts = [line for line in lines if re.match(r"\d+ (passed|failed|skipped|error)", line)]
    chosen = (counts or lines or ["nothing was printed"])[-1]
    return chosen.replace("|", "/")[:160]


def _table(steps: dict) -> list[str]:
    lines = ["| part | step | what | came to | seconds | its last words |", "|---|---|---|---|---:|---|"]
    for name, step in steps.items():
        seconds = f"{step['seconds']:.0f} of {step['limit']}" if "seconds" in step else f"at most {step['limit']}"
        said = step.get("summary", "")
        lines.append(f"| {step['part']} | {name} | {step['what']} | {STATES[step['state']]} | {seconds} | {said} |")
    return lines


def _counts(steps: dict) -> str:
    counts = [(label, sum(s["state"] == state for s in steps.values())) for state, label in STATES.items()]
    return ", ".join(f"{count} {label.strip('*').split('**')[0]}" for label, count in counts if count)


def render(state: dict) -> str:
    """The page in Markdown.

    Args:
        state: "about", the machine and the sources; "steps", by name: part, what, limit and state, and of a step that
            has ended seconds, summary and tail.
    """
    about, steps = state["about"], state["steps"]
    lines = ["# First light", ""]
    if about.get("rehearsal"):
        lines += ["**A rehearsal without a GPU**: a few cases in the emulator. It says nothing of any GPU.", ""]
    lines += [f"{_counts(steps)}.", "", *_table(steps), "", "## The machine", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in about.items()]
    for name, step in steps.items():
        if step["state"] in ("failed", "stopped", "running", "cut"):
            tail = step.get("tail", "")[-SHOWN:].replace("```", "'''")
            lines += ["", f"## {name}: the end of what it printed", "", "```text", tail.strip("\n"), "```"]
    return "\n".join(lines) + "\n"
