"""Writes the generated parts of the documentation: the schema of every op, and the table of ops and backends.

A generated part lies between ``<!-- generated: NAME -->`` and ``<!-- end generated -->``. NAME is ``backends``,
``helpers`` or ``schema OP``. Schemas come from torch's registry, backends from the registrations in ``csrc``: a machine
without a GPU cannot ask the registry for CUDA kernels. ``--check`` writes nothing and exits 1 when the page is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch

import rec_kernels  # noqa: F401  (registers the ops)
from rec_kernels.ops.autograd import REFUSED, overload_of

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "rec_kernels::"
PAGE = ROOT / "docs" / "ops.md"
WIDTH = 110
PART = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def op_names() -> list[str]:
    """Every registered op with its overload, "embedding_bag.layout", without the namespace.

    Those that start with an underscore are helpers.
    """
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.removeprefix(NAMESPACE) for n in names if n.startswith(NAMESPACE))


def public_ops() -> dict[str, list[str]]:
    """The ops that users call -> what ``op_names`` has of them: their overloads, or the op itself."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in op_names():
        if not name.startswith("_"):
            found[name.partition(".")[0]].append(name)
    return dict(found)


def schema(name: str) -> torch._C.FunctionSchema:
    """The schema of one of ``op_names``, as registered."""
    return overload_of(name)._schema


def schema_text(names: list[str]) -> str:
    """The schemas in a code block, wrapped between arguments."""
    blocks = []
    for name in names:
        lines = [""]
        for word in re.split(r"(?<=, )", str(schema(name)).removeprefix(NAMESPACE)):
            if len(lines[-1]) + len(word.rstrip()) > WIDTH:
                lines.append("    ")
            lines[-1] += word
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "```\n" + "\n\n".join(blocks) + "\n```\n"


def registrations() -> dict[str, set[str]]:
    """dispatch key -> ops that ``csrc`` registers a kernel for."""
    found: dict[str, set[str]] = defaultdict(set)
    block = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(RK_LIBRARY, (\w+), \w+\)(.*?)\n?\}\n", re.DOTALL)
    for path in sorted((ROOT / "csrc").rglob("*.c*")):
        for key, body in block.findall(path.read_text()):
            found[key] |= set(re.findall(r'implement<&[^(]+>\(m, "([\w.]+)"\)', body))
    return found


def triton_ops() -> set[str]:
    """The names of rec_kernels/triton: an op has a kernel there under its own name. Read, not imported."""
    named = re.compile(r"^(?:def (\w+)\(|(\w+) = Overloads\()", re.MULTILINE)
    files = (ROOT / "rec_kernels" / "triton").glob("*.py")
    return {name or overloads for path in files for name, overloads in named.findall(path.read_text())}


def formats(arguments: set[str]) -> str:
    """The row formats that an op, whose overloads have these arguments, knows."""
    if arguments & {"tables", "weights_shape"}:  # torch takes their gradient
        return "fp32, fp16, bf16"
    if "layout" in arguments:
        return "all of tables" if arguments & {"values", "weights"} else "-"
    return "all" if "format" in arguments else "-"


def backends_table() -> str:
    """One row per public op: where it runs, the row formats it reads, and whether it has a gradient.

    The overloads of an op run in the same places, and have gradients or not.
    """
    kernels, triton = registrations(), triton_ops()
    lines = [
        "| op | CPU (C++) | CUDA (C++) | Triton | row formats | differentiable |",
        "|---|---|---|---|---|---|",
    ]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for op, names in public_ops().items():
        arguments = [a for name in names for a in schema(name).arguments]
        cells = [
            f"`{op}`",
            "yes" if kernels["CPU"].issuperset(names) else "-",
            "yes" if kernels["RK_CUDA_KEY"].issuperset(names) else "-",
            "yes" if op in triton else "-",
            formats({a.name for a in arguments}),
            "yes" if all(n not in REFUSED and has_kernel(NAMESPACE + n, "Autograd") for n in names) else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def helpers() -> str:
    """The schemas of the ops that start with an underscore."""
    return schema_text([name for name in op_names() if name.startswith("_")]).replace("\n\n", "\n")


def part(name: str) -> str:
    """The text of one generated part."""
    if name == "backends":
        return backends_table()
    if name == "helpers":
        return helpers()
    kind, _, op = name.partition(" ")
    if kind != "schema" or op not in public_ops():
        sys.exit(f"`<!-- generated: {name} -->`: there is no such part; ops are {', '.join(public_ops())}")
    return schema_text(public_ops()[op])


def generate(text: str) -> str:
    """The file's text with every generated part as it should be."""
    return PART.sub(lambda match: match[1] + part(match[2]) + match[3], text)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Writes the generated parts of docs/ops.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    check = parser.parse_args().check
    old = PAGE.read_text()
    parts = {name for _, name, _ in PART.findall(old)}
    missing = [op for op in public_ops() if f"schema {op}" not in parts]
    if missing:
        print(f"docs/ops.md has no `<!-- generated: schema OP -->` for {', '.join(missing)}", file=sys.stderr)
        return 1
    new = generate(old)
    if check and new != old:
        print("stale: docs/ops.md; run `make docs`", file=sys.stderr)
    elif new != old:
        PAGE.write_text(new)
    return int(check and new != old)


if __name__ == "__main__":
    sys.exit(main())
