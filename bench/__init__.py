"""Benchmarks: every op beside its peers, with bytes moved and the measured limit.

On the CPU: `python -m bench.run --help`. On a GPU: `python -m bench.gpu --help`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
