"""Programs saved by an earlier commit fail with an error, because ops have changed; its checkpoints are readable."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from layout_calls import LAYOUT_OPS
from recording import Reader
from replay_programs import call, resume_run

from rec_kernels.testing import same_bits

RECORDING = Reader("recorded_programs.zip")
PROGRAMS = {f"{entry['of']['op']}, {entry['of']['kind']}": entry for entry in RECORDING.index["programs"]}
same_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0] != RECORDING.index["torch"].split("+")[0] or platform.machine() != "x86_64",
    reason=f"saved programs are those of torch {RECORDING.index['torch']} on x86-64",
)


@same_torch
@pytest.mark.parametrize(
    ("kind", "message"),
    [("export", "error when deserializing"), ("package", "Could not find schema for rec_kernels::")],
)
def test_programs(kind: str, message: str, tmp_path: Path) -> None:
    """Ops are now overloads with other arguments: loading a saved program raises, and never misreads it.

    One op's program of each kind is enough: the next test covers every op.
    """
    program = RECORDING.decode(PROGRAMS[f"embedding_bag, {kind}"])
    with pytest.raises(RuntimeError, match=message):
        call(program, tmp_path)


def test_no_op_has_the_name_of_before() -> None:
    """Saved programs find ops by overload name; none has the name of an earlier overload."""
    recorded = {entry["of"]["op"] for entry in PROGRAMS.values()}
    assert recorded | {"row_cache_stats"} == set(LAYOUT_OPS)
    assert [op for op in LAYOUT_OPS if "default" in getattr(torch.ops.rec_kernels, op).overloads()] == []


@pytest.mark.parametrize("number", range(len(RECORDING.index["training"])))
def test_training(number: int, tmp_path: Path, no_pictures: None) -> None:
    """A checkpoint of the trainer is read exactly, and training resumes from it."""
    recorded = RECORDING.decode(RECORDING.index["training"][number])
    before, after = resume_run(recorded, tmp_path)
    assert before.keys() == recorded["model"].keys()
    assert all(same_bits(t, before[name]) for name, t in recorded["model"].items())
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {
        name: (t.shape, t.dtype) for name, t in recorded["trained"].items()
    }
    if "format" not in recorded["options"]:  # quantized rows are rounded stochastically
        for name, t in recorded["trained"].items():  # torch's matrix products have other bits on other machines
            torch.testing.assert_close(after[name], t, rtol=1e-3, atol=1e-4)
