"""Makes data/recorded_programs.zip: saved programs that call ops, and a run of the trainer that was stopped.

    python python_tests/record_programs.py FOLDER

Of every op that has a layout of tables: a program of torch.export, and a package of AOTInductor. Compiling a package
takes a minute, so FOLDER keeps what is there. As record_calls.py: made once, from the ops of the commit it names.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import dlrm_tiny
import torch
from dlrm_stops import StopAfter
from recording import DATA, Writer
from replay_programs import TRAINED, Program, config_of, sample_of
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from rec_kernels.dlrm import checkpoint, train
from rec_kernels.dlrm.train import Run, RunInterruptedError

#: The ops that have a layout, those that serve a model first.
OPS = (
    *("embedding_bag", "row_cache_lookup", "embedding_bag_fused", "row_cache_insert_", "embedding_bag_tables"),
    *("embedding_bag_backward_fused_", "embedding_bag_backward_dense", "embedding_bag_backward_per_sample_weights"),
    *("row_cache_plan", "row_cache_flush_", "embedding_bag_backward_sparse"),
)
#: Files that a run goes on from, without pictures.
RESUMED = {".json", ".jsonl", ".pt"}
#: Small, and any x86-64 runs it: programs of ops alone have no loop of their own to make fast.
_OPTIONS = {"cpp.simdlen": 1, "aot_inductor.compile_wrapper_opt_level": "Os"}


def exported(program: Program) -> torch.export.ExportedProgram:
    """The program, for inputs of the sizes it was made with, without the places of its source."""
    found = torch.export.export(program.eval(), program.inputs())
    for node in found.graph.nodes:
        node.meta.pop("stack_trace", None)
    return found


def _flags(_: str) -> list[str]:
    """Compiler flags: any x86-64, and no folder of this machine in messages."""
    return ["march=x86-64-v2", *(f"fmacro-prefix-map={folder}=" for folder in (torch.__path__[0], cache_dir()))]


def export_of(program: Program) -> bytes:
    """A file of torch.export."""
    file = io.BytesIO()
    torch.export.save(exported(program), file)
    return file.getvalue()


def package_of(program: Program, path: Path) -> bytes:
    """A package of AOTInductor, whose library has no symbols and whose sources are left out."""
    if not path.exists():
        architecture = mock.patch("torch._inductor.cpp_builder._get_cpu_arch_cflags", _flags)
        with architecture, torch._inductor.config.patch(_OPTIONS):
            torch._inductor.aoti_compile_and_package(exported(program), package_path=str(path))
    return _stripped(path)


def _stripped(path: Path) -> bytes:
    found, library = io.BytesIO(), path.with_suffix(".so")
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(found, "w") as after:
        for member in before.infolist():
            content = before.read(member)
            if member.filename.endswith(".cpp"):
                continue
            if member.filename.endswith(".so"):
                library.write_bytes(content)
                subprocess.run(["strip", "--strip-all", library], check=True)
                content = library.read_bytes()
            after.writestr(zipfile.ZipInfo(member.filename, (1980, 1, 1, 0, 0, 0)), content)
    return found.getvalue()


def record(op: str, kind: str, content: bytes) -> dict[str, object]:
    """A saved program, its inputs, and what it gives: the op's outputs, and the inputs that it changes."""
    inputs, results = Program(op, sample_of(op)).inputs(), Program(op, sample_of(op))
    return {
        "op": op,
        "kind": kind,
        "file": _tensor(content),
        "inputs": inputs,
        "results": list(results(*results.inputs())),
    }


def record_training(options: dict[str, object]) -> dict[str, object]:
    """The folder of a run of the trainer that was stopped in the middle, and the model that it ends with."""
    with tempfile.TemporaryDirectory() as folder:
        config, fit = config_of(options, Path(folder)), Run.fit
        stopped = mock.patch.object(Run, "fit", lambda run, stop, **more: fit(run, StopAfter(9), **more))
        with stopped, contextlib.suppress(RunInterruptedError):
            train(config, dlrm_tiny.TinyData(), progress=False)
        directory = Path(folder) / "run"
        files = {p.name: _tensor(p.read_bytes()) for p in sorted(directory.iterdir()) if p.suffix in RESUMED}
        model = checkpoint.load(directory)["model"]
        train(config, dlrm_tiny.TinyData(), resume=directory, progress=False)
        return {"options": options, "files": files, "model": model, "trained": checkpoint.load(directory)["model"]}


def _tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compile-only", action="store_true", help="compile packages that FOLDER lacks")
    arguments, writer, programs = parser.parse_args(), Writer(), []
    for op in OPS:
        path = arguments.folder / f"{op}.pt2"
        if arguments.compile_only:
            package_of(Program(op, sample_of(op)), path)
            continue
        programs.append(record(op, "export", export_of(Program(op, sample_of(op)))))
        if path.exists():
            programs.append(record(op, "package", package_of(Program(op, sample_of(op)), path)))
    if arguments.compile_only:
        return
    commit = subprocess.run(["git", "merge-base", "HEAD", "main"], capture_output=True, text=True, check=True)
    index = {"commit": commit.stdout.strip(), "torch": torch.__version__, "programs": writer.encode(programs)}
    index["training"] = writer.encode([record_training(options) for options in TRAINED])
    path = DATA / "recorded_programs.zip"
    writer.write(path, index, zipfile.ZIP_LZMA)
    sys.stdout.write(f"{path.name}: {len(programs)} programs, {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
