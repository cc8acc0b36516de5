"""Measures the row formats: bits, noise, the worst block, and the bias of stochastic rounding.

Prints a table; with --write, writes bench/results/format_quality.json and the table of docs/quality.md between its
markers. Takes seconds; nothing here depends on the machine, only on torch's random numbers.
"""

from __future__ import annotations

import argparse
import math
import re
from datetime import datetime, timezone

import torch
from torch import Tensor

import bench
import rec_kernels as rk
from bench import RESULTS, ROOT

RESULT = RESULTS / "format_quality.json"
PAGE = ROOT / "docs" / "quality.md"
PART = re.compile(r"(<!-- generated: format quality -->\n).*?(<!-- end generated -->)", re.DOTALL)

ROWS, COLUMNS = 20_000, 128
BLOCKS = {f: 16 if f in ("mx9", "mx6", "mx4") else 32 for f in rk.ROW_FORMATS if f.startswith("mx")}
RULES = ("floor", "rceil")
#: The minimum signal-to-noise ratio, dB, that docs/numerics.md, "Promises of the formats", guarantees finite blocks.
BOUNDS = {"mx9": (34.7, 34.67), "mx6": (16.7, 16.2), "mx4": (4.6, 3.89)}


def gaussian_rows(rows: int) -> Tensor:
    """[rows, COLUMNS] normal values; each row has its own standard deviation, |normal|."""
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(rows, 1, generator=generator).abs()
    return torch.randn(rows, COLUMNS, generator=generator) * size


def error(x: Tensor, format: str, **options: object) -> Tensor:
    """Error of encoding x, float64."""
    rows = rk.quantize_rows(x, format, **options)
    return rk.dequantize_rows(rows, format, x.shape[1]).double() - x.double()


def decibels(x: Tensor, noise: Tensor) -> float | None:
    """Energy of x over the energy of the noise in dB; None without noise."""
    energy = noise.square().sum().item()
    return 10 * math.log10(x.double().square().sum().item() / energy) if energy else None


def hard_blocks(columns: int) -> Tensor:
    """[N, columns]: a large value in [1, 2], a smaller neighbour, and a third value in all other columns.

    The smaller ones are at, just below and just above 2^-k and 3 * 2^-k, where the ties of every format are.
    """
    large = torch.cat([1 + torch.arange(129) / 128, torch.tensor([1 + 2.0**-12, 1.5 + 2.0**-12, 2 - 2.0**-12])])
    powers = torch.exp2(-torch.arange(11.0))[:, None] * torch.tensor([1.0, 0.75, 1 - 2.0**-12, 1 + 2.0**-12])
    small = torch.cat([torch.zeros(1), powers.flatten()])
    chosen = torch.cartesian_prod(large, small, small)
    chosen = chosen[(chosen[:, 1:] <= chosen[:, :1]).all(1)]
    return torch.cat([chosen, chosen[:, 2:].expand(-1, columns - 3)], dim=1)


def worst_block(format: str, rule: str) -> float:
    """The least signal-to-noise ratio of hard_blocks, dB."""
    x = hard_blocks(BLOCKS[format])
    noise = error(x, format, scale_rule=rule).square().sum(1)
    return (10 * torch.log10(x.double().square().sum(1) / noise)).min().item()


def bias(x: Tensor, format: str, **options: object) -> float:
    """Mean growth of the magnitudes under stochastic rounding, in units of its standard error."""
    growth = error(x, format, rounding="stochastic", seed=1, **options) * x.sign() / x.abs().mean(1, keepdim=True)
    deviation = growth.std().item()
    return growth.mean().item() / (deviation / math.sqrt(growth.numel())) if deviation else 0.0


def measure(format: str, rows: int) -> dict[str, object]:
    """The figures of a format."""
    x = gaussian_rows(rows)
    found: dict[str, object] = {
        "bits_per_column": 8 * rk.row_bytes(format, COLUMNS) / COLUMNS,
        "nearest_db": {rule: decibels(x, error(x, format, scale_rule=rule)) for rule in RULES},
        "stochastic_db": decibels(x, error(x, format, rounding="stochastic")),
        "bias": {rule: bias(x, format, scale_rule=rule) for rule in RULES},
    }
    if format in BLOCKS:
        found["worst_block_db"] = {rule: worst_block(format, rule) for rule in RULES}
    return found


def table(formats: dict[str, dict]) -> str:
    """The table of docs/quality.md."""
    heads = ["format", "bits", "nearest, floor", "nearest, rceil", "stochastic"]
    heads += ["worst block, floor", "worst block, rceil", "bias", "bias, floor"]
    lines = []
    for name, row in formats.items():
        blocks = name in BLOCKS
        near = [_db(row["nearest_db"][rule]) if blocks or rule == "floor" else "" for rule in RULES]
        worst = [_worst(row, name, number) if blocks else "" for number in range(2)]
        biases = [f"{row['bias']['rceil']:+.1f}", f"{row['bias']['floor']:+.1f}" if blocks else ""]
        if row["stochastic_db"] is None:
            biases = ["", ""]
        bits = f"{row['bits_per_column']:.4g}"
        lines.append((f"`{name}`", bits, *near, _db(row["stochastic_db"]), *worst, *biases))
    return bench.table(heads, lines) + "\n"


def _db(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f}"


def _worst(row: dict, name: str, number: int) -> str:
    found = f"{row['worst_block_db'][RULES[number]]:.1f}"
    return f"{found} (>= {BOUNDS[name][number]})" if name in BOUNDS else found


def main(given: list[str] | None = None) -> None:
    """Measures, prints and optionally writes the results; ``given`` replaces the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the JSON file and the table of docs/quality.md")
    write = parser.parse_args(given).write
    formats = {format: measure(format, ROWS) for format in rk.ROW_FORMATS}
    about = {
        "command": "python -m bench.format_quality --write",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "rec_kernels": rk.__version__,
        "rows": ROWS,
        "columns": COLUMNS,
    }
    print(table(formats))
    if write:
        bench.save({"about": about, "formats": formats}, RESULT)
        PAGE.write_text(PART.sub(lambda match: match[1] + table(formats) + match[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
