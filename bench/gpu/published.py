"""Published figures of others' kernels, in shapes that bench.gpu has as cases."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """One figure: milliseconds, or the share of the memory's peak rate, in percent, every row counted."""

    case: str
    operation: str  # as the report names it
    whose: str
    ms: float | None
    percent_of_peak: float | None
    source: str


DYNAMICEMB = (
    "github.com/jiashuy/recsys-examples, commit 165ffa5, corelib/dynamicemb/benchmark/benchmark_results.json: "
    "NVIDIA H100 80GB HBM3, 10 tables, cap=1M, pooling none, power law 1.05"
)
#: Its table sizes are not public, so ours is another weighted shape. The percentages refer to 3.90 TB/s, which follows
#: from the thread's own figures (2.525 TB/s are 64.7 %) for an unnamed GPU.
TORCHREC = (
    "github.com/meta-pytorch/torchrec, pull request 4757: a weighted production workload, its original runner's means"
)

UNPOOLED, WEIGHTED = "unpooled-1m-d128", "weighted-t32-b4096-e1e6-d128"
PUBLISHED = [
    Published(UNPOOLED, "forward", "FBGEMM", 0.345, None, DYNAMICEMB),
    Published(UNPOOLED, "backward, sgd", "dynamicemb, ids deduplicated in its forward", 0.593, None, DYNAMICEMB),
    Published(UNPOOLED, "backward, sgd", "FBGEMM", 0.614, None, DYNAMICEMB),
    Published(UNPOOLED, "backward, adam", "dynamicemb, ids deduplicated in its forward", 0.847, None, DYNAMICEMB),
    Published(UNPOOLED, "backward, adam", "FBGEMM", 1.005, None, DYNAMICEMB),
    Published(WEIGHTED, "forward", "FBGEMM", None, 64.7, TORCHREC),
    Published(WEIGHTED, "forward", "TorchRec's Triton kernels", None, 56.6, TORCHREC),
    Published(WEIGHTED, "backward, rowwise_adagrad", "TorchRec's Triton kernels", None, 28.2, TORCHREC),
    Published(WEIGHTED, "backward, rowwise_adagrad", "FBGEMM", None, 26.5, TORCHREC),
]


def best(case: str, operation: str) -> Published | None:
    """The best published figure of an operation."""
    found = [p for p in PUBLISHED if (p.case, p.operation) == (case, operation)]
    return min(found, key=lambda p: p.ms or -(p.percent_of_peak or 0), default=None)


def said(figure: Published) -> str:
    """Formats a figure: "0.345 ms (FBGEMM)"."""
    value = f"{figure.ms:.3f} ms" if figure.ms is not None else f"{figure.percent_of_peak} % of peak"
    return f"{value} ({figure.whose.partition(',')[0]})"
