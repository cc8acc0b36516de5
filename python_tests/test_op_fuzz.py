"""A part of fuzz_ops.py, and its detection of planted faults."""

from __future__ import annotations

import json
import subprocess
import sys

import fuzz_ops
import op_fuzz
import pytest
import torch
from test_opcheck import registered
from tiers import full
from torch import Tensor
from torch._subclasses import FakeTensor

COMMAND = [sys.executable, fuzz_ops.__file__]


@pytest.mark.parametrize("number", [450, *full(900)])
def test_a_slice_of_the_fuzz(number: int) -> None:
    """Calls of seed 0 in a subprocess cover every op with valid and rejected calls."""
    done = subprocess.run([*COMMAND, "--calls", str(number), "--minutes", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    counts = {name: [int(n.replace(",", "")) for n in rest] for name, *rest in lines[1:]}  # after the heading
    assert set(counts) == {*registered(), "with a reference", "all"}
    calls, right, raised, findings = counts["all"]
    assert (calls, findings) == (number, 0)
    assert min(right, raised) > number // 5


@pytest.fixture(scope="module")
def valid() -> op_fuzz.Samples:
    """The calls to change."""
    return op_fuzz.Samples()


def test_calls_are_those_of_their_seed(valid: op_fuzz.Samples) -> None:
    """A call is determined by its number."""
    for seed in ("0:1", "0:2", "5:77"):
        first, again = (op_fuzz.bad_call(valid, seed)[0] for _ in range(2))
        assert str(first) == str(again)
        assert list(first.arguments) == list(again.arguments)


def no(what: str) -> None:
    """Raises an error that names no argument."""
    raise ValueError(what)


class Harmed:
    """An op that misbehaves once it has raised."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self._op, self._has_raised = op, False

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        try:
            return self._op(x, scale) + self._has_raised
        except Exception:
            self._has_raised = True
            raise


WRONG = {
    "writes what is not its to write": lambda op: lambda x, scale: (x.detach().zero_(), op(x, scale))[1],
    "other results than with contiguous": lambda op: lambda x, scale: op(x, scale) + x.stride(0),
    "names no argument": lambda op: lambda x, scale: op(x, scale) if x.dtype == torch.float32 else no("matter"),
    "division by zero": lambda op: lambda x, scale: op(x, scale) if x.dtype == torch.float32 else 1 / 0.0,
    "other results than before": lambda op: Harmed(op),
    "foretells": lambda op: lambda x, scale: op(x, scale) if isinstance(x, FakeTensor) else op(x, scale).double(),
}


class Broken:
    """An op with another implementation under its schema."""

    def __init__(self, op: torch._ops.OpOverload, function) -> None:
        self._schema, self._call = op._schema, function

    def __call__(self, **arguments: Tensor) -> Tensor:
        return self._call(**arguments)


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are found, also an op that changes something before its first error."""
    valid = op_fuzz.Samples(["scale_rows"])  # unaffected by the other faults
    op = torch.ops.rec_kernels.scale_rows.default
    broken = Broken(op, WRONG[fault](op))
    monkeypatch.setattr(op_fuzz, "overload_of", lambda name: broken)
    found = []
    for number in range(200):
        try:
            op_fuzz.check(valid, f"1:{number}", "scale_rows")
        except op_fuzz.FoundError as finding:
            found.append(f"{finding.op} {finding}")
    expected = {"writes what is not its to write": "x was changed"}
    assert any(expected.get(fault, fault) in text for text in found), found[:5]
    assert all(text.startswith("scale_rows scale_rows: ") for text in found)


def test_processes_that_die_or_hang_are_findings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A process that dies or hangs is a finding, and another one continues after the call."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys, time\n"
        "first = int(sys.argv[sys.argv.index('--first') + 1])\n"
        "for n in range(first, 4):\n"
        "    print(json.dumps(['call', n]), flush=True)\n"
        "    if n == 1: os.abort()\n"
        "    if n == 2: time.sleep(60)\n"
        "    print(json.dumps(['done', 'an op', 'right']), flush=True)\n"
    )
    monkeypatch.setattr(fuzz_ops, "__file__", str(worker))
    monkeypatch.setattr(fuzz_ops, "TIMEOUT", 2)
    options = {"minutes": 1, "asan": False, "seed": 0, "first": 0, "calls": 4, "op": None}
    campaign = fuzz_ops.Campaign(type("Options", (), options))
    campaign.run()
    assert [text.split(":")[0] for text in campaign.findings] == ["the process died with -6", "nothing came within 2 s"]
    assert json.loads(json.dumps(campaign.outcomes)) == {"an op": {"right": 2}}
    assert "| an op | 2 | 2 | 0 | 0 |" in campaign.table()
