"""Writes the generated parts of the documentation: the schema of every op, and the table of ops and backends.

A generated part lies between ``<!-- generated: NAME -->`` and ``<!-- end generated -->``. NAME is ``backends``,
``helpers`` or ``schema OP``. Schemas come from torch's registry, backends from the registrations in ``csrc``: a machine
without a GPU cannot ask the registry for CUDA kernels. ``--check`` writes nothing and exits 1 when a file is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch

import rec_kernels  # noqa: F401  (registers the ops)
from rec_kernels.ops.autograd import REFUSED

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "rec_kernels::"
FILES = ("docs/ops.md", "README.md")
WIDTH = 110
PART = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def op_names() -> list[str]:
    """Every registered op, without the namespace; those that start with an underscore are helpers."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.removeprefix(NAMESPACE) for n in names if n.startswith(NAMESPACE))


def public_ops() -> list[str]:
    """The ops that users call."""
    return [name for name in op_names() if not name.startswith("_")]


def schema(op: str) -> torch._C.FunctionSchema:
    """The op's schema, as registered."""
    return getattr(torch.ops.rec_kernels, op).default._schema


def schema_text(op: str) -> str:
    """The schema in a code block, wrapped between arguments."""
    text = str(schema(op)).removeprefix(NAMESPACE)
    lines = [""]
    for word in re.split(r"(?<=, )", text):
        if len(lines[-1]) + len(word.rstrip()) > WIDTH:
            lines.append("    ")
        lines[-1] += word
    return "```\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def registrations() -> dict[str, set[str]]:
    """dispatch key -> ops that ``csrc`` registers a kernel for."""
    found: dict[str, set[str]] = defaultdict(set)
    block = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(RK_LIBRARY, (\w+), \w+\)(.*?)\n?\}\n", re.DOTALL)
    for path in sorted((ROOT / "csrc").rglob("*.c*")):
        for key, body in block.findall(path.read_text()):
            found[key] |= set(re.findall(r'implement<&\w+>\(m, "(\w+)"\)', body))
    return found


def triton_ops() -> set[str]:
    """The functions of rec_kernels/triton: an op has a kernel there under its own name. Read, not imported."""
    files = (ROOT / "rec_kernels" / "triton").glob("*.py")
    return {name for path in files for name in re.findall(r"^def (\w+)\(", path.read_text(), re.MULTILINE)}


def formats(arguments: set[str]) -> str:
    """The row formats that an op with these arguments knows."""
    if "format" in arguments:
        return "all"
    if arguments & {"tables", "weights_shape"}:  # torch takes their gradient
        return "fp32"
    return "all of tables" if "formats" in arguments else "-"


def backends_table() -> str:
    """One row per public op: where it runs, the row formats it reads, gradient, and what it changes in place."""
    kernels, triton = registrations(), triton_ops()
    lines = [
        "| op | CPU (C++) | CUDA (C++) | Triton | row formats | differentiable | changes in place |",
        "|---|---|---|---|---|---|---|",
    ]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for op in public_ops():
        arguments = schema(op).arguments
        written = [f"`{a.name}`" for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        cells = [
            f"`{op}`",
            "yes" if op in kernels["CPU"] else "-",
            "yes" if op in kernels["RK_CUDA_KEY"] else "-",
            "yes" if op in triton else "-",
            formats({a.name for a in arguments}),
            "yes" if op not in REFUSED and has_kernel(NAMESPACE + op, "Autograd") else "-",
            ", ".join(written) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def helpers() -> str:
    """The schemas of the ops that start with an underscore."""
    return "".join(schema_text(name) for name in op_names() if name.startswith("_")).replace("```\n```\n", "")


def part(name: str) -> str:
    """The text of one generated part."""
    if name == "backends":
        return backends_table()
    if name == "helpers":
        return helpers()
    kind, _, op = name.partition(" ")
    if kind != "schema" or op not in public_ops():
        sys.exit(f"`<!-- generated: {name} -->`: there is no such part; ops are {', '.join(public_ops())}")
    return schema_text(op)


def generate(text: str) -> str:
    """The file's text with every generated part as it should be."""
    return PART.sub(lambda match: match[1] + part(match[2]) + match[3], text)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Writes the generated parts of docs/ops.md and README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    check = parser.parse_args().check
    parts = {name for file in FILES for _, name, _ in PART.findall((ROOT / file).read_text())}
    missing = [op for op in public_ops() if f"schema {op}" not in parts]
    if missing:
        print(f"docs/ops.md has no `<!-- generated: schema OP -->` for {', '.join(missing)}", file=sys.stderr)
        return 1
    stale = []
    for file in FILES:
        path = ROOT / file
        old = path.read_text()
        new = generate(old)
        if new != old:
            stale.append(file)
            if not check:
                path.write_text(new)
    if check and stale:
        print(f"stale: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
