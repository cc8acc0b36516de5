"""Programs that an earlier commit has saved: they give the same bits, or fail with an error where an op has changed."""

from __future__ import annotations

import io
import platform
import zipfile
from pathlib import Path

import pytest
import torch
from recording import Reader
from replay import differences
from replay_programs import call, go_on

from rec_kernels.testing import same_bits

RECORDING = Reader("recorded_programs.zip")
PROGRAMS = {f"{entry['of']['op']}, {entry['of']['kind']}": entry for entry in RECORDING.index["programs"]}
#: Ops whose schema is another one since: their programs must fail, and never be misread.
CHANGED: set[str] = set()

same_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0] != RECORDING.index["torch"].split("+")[0] or platform.machine() != "x86_64",
    reason=f"saved programs are those of torch {RECORDING.index['torch']} on x86-64",
)


@same_torch
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    """Outputs and changed inputs, bit for bit; an error that is Python's, where the op is another one."""
    program = RECORDING.decode(PROGRAMS[name])
    if program["op"] in CHANGED:
        with pytest.raises(Exception, match=r"rec_kernels|schema|argument"):
            call(program, tmp_path)
    else:
        assert differences(program["results"], call(program, tmp_path), "output") == []


@same_torch
@pytest.mark.parametrize("kind", ["export", "package"])
def test_ops_of_other_names(kind: str, tmp_path: Path) -> None:
    """What happens to a program whose op has another name now: an error when it is loaded."""
    program, files = RECORDING.decode(PROGRAMS[f"embedding_bag, {kind}"]), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program["file"].numpy().tobytes())) as saved, zipfile.ZipFile(files, "w") as other:
        for member in saved.namelist():
            other.writestr(member, saved.read(member).replace(b"embedding_bag", b"embedding_old"))
    program["file"] = torch.tensor(list(files.getvalue()), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="embedding_old" if kind == "package" else "deserializing"):
        call(program, tmp_path)


@pytest.mark.parametrize("number", range(len(RECORDING.index["training"])))
def test_training(number: int, tmp_path: Path, no_pictures: None) -> None:
    """A checkpoint of the trainer is read as it was written, and training goes on from it."""
    recorded = RECORDING.decode(RECORDING.index["training"][number])
    before, after = go_on(recorded, tmp_path)
    assert before.keys() == recorded["model"].keys()
    assert all(same_bits(t, before[name]) for name, t in recorded["model"].items())
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {
        name: (t.shape, t.dtype) for name, t in recorded["trained"].items()
    }
    if "format" not in recorded["options"]:  # rows of bytes are rounded at random
        for name, t in recorded["trained"].items():  # torch's matrix products have other bits on other machines
            torch.testing.assert_close(after[name], t, rtol=1e-3, atol=1e-4)
