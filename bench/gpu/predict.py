"""Predicts the time of every case of bench.gpu on an H100 and an H200, from the machine code of today's build.

docs/gpu-model.md explains the model. Run it before anything is measured, and commit what --record writes: the JSON file
and the page's tables. After a change to the model alone, --recorded --record needs no build.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import bench
from bench import ROOT
from bench.gpu import code_paths, machine_code, published, recorded, report
from bench.gpu.code_paths import Paths
from bench.gpu.every_case import every_case
from bench.gpu.expected import bytes_of, works_of
from bench.gpu.model import GPUS, Gpu, predict

PAGE = ROOT / "docs" / "gpu-model.md"
#: Rows of the page: the start of a case's name, and of the operation's.
SHORT = [
    ("t32-b512-e1e5-d128-uniform", ("forward", "backward")),
    ("unpooled", ("forward", "backward")),
    ("weighted", ("forward", "backward")),
    ("criteo", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d16-uniform", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d64-uniform", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d128-uniform", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d128-zipf", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d256-uniform", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d512-uniform", ("forward", "backward, rowwise")),
    ("t32-b2048-e1e5-d128-", ("forward",)),
    ("scale-rows-1", ("forward",)),
    ("expand-2", ("forward", "backward")),
    ("dot-interaction-8192x27x128", ("forward",)),
    ("jagged-f26-b8192-l20", ("dedup", "permute")),
]


class Noting(dict[str, Paths]):
    """Kernels by name; records which ones are looked up."""

    def __init__(self, kernels: Mapping[str, Paths]) -> None:
        super().__init__(kernels)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Paths:
        self.asked.add(name)
        return super().__getitem__(name)


def predictions(kernels: Mapping[str, Paths], gpu: Gpu) -> list[dict[str, object]]:
    """One row per operation of ours and case: "ms", "error", "limit", and rates in percent of a copy's."""
    rows = []
    for case in every_case({report.OURS: None}, gpu.memory_bytes):
        operations, error = works_of(case, kernels, gpu)
        for operation, works in operations.items():
            found = predict(works, gpu, error)
            percent = {c: round(100 * b / found.ms / 1e6 / gpu.copy, 1) for c, b in bytes_of(case, operation).items()}
            row = {"case": case.name, "operation": operation, "ms": round(found.ms, 4), "error": found.error}
            rows.append(row | {"limit": found.limit, "percent_of_copy": percent})
    return rows


def of_kernels(kernels: Mapping[str, Paths]) -> dict[str, list[dict[str, object]]]:
    """Predicts for every GPU from these kernels."""
    return {name: predictions(kernels, gpu) for name, gpu in GPUS.items()}


def commit_of_kernels() -> str:
    """The last commit that changed the kernels, and whether they differ from it."""
    files = ["--", "csrc", ":!csrc/*/cpu", ":!csrc/host", ":!csrc/emulator"]
    changed = report.output_of("git", "status", "--porcelain", *files)
    return report.output_of("git", "log", "-1", "--format=%h", *files) + (" and changes" if changed else "")


def today(libraries: Sequence[str] = ()) -> dict[str, object]:
    """All predictions and their inputs, for the JSON file.

    Raises:
        RuntimeError: the CUDA library is not built, or nothing here reads it.
    """
    read = code_paths.read(libraries)
    if read is None:
        raise RuntimeError(f"no machine code to predict from: {machine_code.missing()}")
    kernels = Noting(read)
    rows = of_kernels(kernels)
    compiler = re.search(r"release .*", report.output_of("nvcc", "--version"))
    about = {
        "commit": commit_of_kernels(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "nvcc": compiler[0] if compiler else None,
        "architecture": machine_code.ARCHITECTURE,
    }
    return {"about": about, "kernels": code_paths.as_json(read, kernels.asked), "gpus": rows}


def is_short(row: dict) -> bool:
    """True if the table of docs/gpu-model.md shows the row."""
    return any(row["case"].startswith(case) and row["operation"].startswith(ops) for case, ops in SHORT)


def table(found: dict, short: bool = False) -> str:
    """Markdown table with a line per operation and a column group per GPU; rates count every row."""
    others = {name: {(r["case"], r["operation"]): r for r in rows} for name, rows in found["gpus"].items()}
    keys = list(dict.fromkeys(key for rows in others.values() for key in rows))
    heads = [head for name in others for head in (f"{name}, ms", "% of copy")]
    lines = []
    for key in keys:
        rows = [rows.get(key) for rows in others.values()]
        first = next(row for row in rows if row)
        if short and not is_short(first):
            continue
        cells = [c for r in rows for c in ((f"{r['ms']:.3f}", f"{r['percent_of_copy']['all']:.0f}") if r else ("", ""))]
        figure = published.best(*key)
        lines.append([*key, *cells, first["limit"], published.said(figure) if figure else ""])
    texts = ("operation", "limit", "published")
    return bench.table(["case", "operation", *heads, "limit", "published"], lines, texts)


def beside_others(found: dict) -> str:
    """Markdown table of the best published figure of each operation and our prediction for an H100, and their ratio."""
    lines, heads = [], ("case", "operation", "theirs", "ours, predicted", "ours are")
    for row in found["gpus"]["H100"]:
        figure = published.best(row["case"], row["operation"])
        if figure is None:
            continue
        of_peak = row["percent_of_copy"]["all"] * GPUS["H100"].copy / GPUS["H100"].peak
        ratio = figure.ms / row["ms"] if figure.ms else of_peak / figure.percent_of_peak
        verdict = "ahead" if ratio >= 1 else "behind"
        if 1 / row["error"] < ratio < row["error"]:
            verdict += ", by less than the error"
        ours = f"{row['ms']:.3f} ms" + ("" if figure.ms else f", {of_peak:.0f} % of peak")
        lines.append([row["case"], row["operation"], published.said(figure), ours, f"{verdict} ({ratio:.2f}x)"])
    return bench.table(heads, lines, texts=heads)


def write(found: dict) -> None:
    """Writes the JSON file, and the tables of docs/gpu-model.md between their markers."""
    bench.save(found, recorded.PATH)
    page = PAGE.read_text()
    for name, text in (("predictions", table(found, short=True)), ("others", beside_others(found))):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + f"\n{text}\n\n" + end + rest.partition(end)[2]
    PAGE.write_text(page)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.predict", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {recorded.PATH.name} and the page's tables")
    parser.add_argument(
        "--recorded",
        action="store_true",
        help="print what was recorded (with --record: anew, of the kernels as read then)",
    )
    parser.add_argument("--short", action="store_true", help="only the rows of docs/gpu-model.md")
    parser.add_argument("--library", nargs="+", default=[], help="libraries or object files (default: the package's)")
    args = parser.parse_args()
    if args.recorded:
        found = recorded.load()
        if args.record:
            found["gpus"] = of_kernels({name: Paths(**numbers) for name, numbers in found["kernels"].items()})
    else:
        try:
            found = today(args.library)
        except RuntimeError as error:
            parser.error(str(error))
    if args.record:
        write(found)
    print(table(found, args.short), beside_others(found), sep="\n\n")


if __name__ == "__main__":
    main()
