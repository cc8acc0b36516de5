"""Model of a kernel's time on a GPU from bytes, instructions and latencies; docs/gpu-model.md explains it."""

from __future__ import annotations

from dataclasses import dataclass

WARP, THREADS = 32, 256
#: Instructions that a multiprocessor issues per cycle, one per scheduler.
SCHEDULERS = 4


@dataclass(frozen=True)
class Gpu:
    """Rates in GB/s: a plain copy (reads plus writes), the memory's peak, and the L2."""

    name: str
    memory_bytes: int
    copy: float
    peak: float
    multiprocessors: int = 132
    clock_ghz: float = 1.98
    l2: float = 8000.0
    l2_bytes: int = 50 * 2**20


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 85_000_000_000, 3000.0, 3350.0),
        Gpu("H200", 150_000_000_000, 4300.0, 4800.0, l2_bytes=60 * 2**20),
    )
}

#: Overheads in microseconds: of a call or replay between two events, and of each further kernel in a graph.
CALL_US, KERNEL_US = 4.0, 1.5
#: Latency of a load under load, in nanoseconds.
LATENCY_NS = 450.0
#: Cycles between a warp's consecutive instructions without memory stalls.
CYCLES = 3.0
#: Additional bytes that a randomly placed row costs compared with a copy: partially used sectors, pages.
ROW_OVERHEAD = 48
#: Exponent by which bounds add up: the longest alone if it is much longer; three equal ones take 1.44 of one.
POWER = 3.0


@dataclass(frozen=True)
class Work:
    """Work of one kernel.

    Attributes:
        name: of it, for people.
        memory: bytes that come from memory or go there.
        cached: bytes that go through the L2, those of ``memory`` included; 0: as many as ``memory``.
        warps: how many pieces the work has, each for a warp.
        instructions, waits: of a piece; waits are loads of memory of which one needs what the one before brings.
        blocks: of 256 threads that a multiprocessor holds.
        flops, flops_rate: floating-point operations, and how many a second.
        kernels: launches, each with its gap.
        fixed_us: what does not depend on rates.
    """

    name: str
    memory: float = 0.0
    cached: float = 0.0
    warps: float = 0.0
    instructions: float = 0.0
    waits: float = 0.0
    blocks: int = 8
    flops: float = 0.0
    flops_rate: float = 1.0
    kernels: int = 1
    fixed_us: float = 0.0


def bounds(work: Work, gpu: Gpu) -> dict[str, float]:
    """Milliseconds that each resource would take alone."""
    resident = gpu.multiprocessors * work.blocks * THREADS // WARP
    piece_ns = work.instructions * CYCLES / gpu.clock_ghz + work.waits * LATENCY_NS
    started = gpu.multiprocessors * SCHEDULERS * gpu.clock_ghz * 1e6  # instructions in a millisecond
    return {
        "memory": work.memory / gpu.copy / 1e6,
        "L2": max(work.cached, work.memory) / gpu.l2 / 1e6,
        "instructions": work.warps * work.instructions / started,
        "waiting": (max(1.0, work.warps / resident) if work.warps else 0.0) * piece_ns / 1e6,
        "arithmetic": work.flops / work.flops_rate / 1e9,
    }


def milliseconds(work: Work, gpu: Gpu) -> float:
    """Time of the kernel, and of the gaps before its launches."""
    together = sum(bound**POWER for bound in bounds(work, gpu).values()) ** (1 / POWER)
    return together + (work.fixed_us + work.kernels * KERNEL_US) / 1e3


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a call, the factor of error in either direction, and the dominant limit."""

    ms: float
    error: float
    limit: str


def predict(works: list[Work], gpu: Gpu, error: float) -> Prediction:
    """Predicts the time of consecutive kernels."""
    times = [milliseconds(work, gpu) for work in works]
    longest = works[times.index(max(times))]
    parts = bounds(longest, gpu)
    reason = max(parts, key=lambda name: parts[name])
    gaps = (CALL_US + sum(w.fixed_us + w.kernels * KERNEL_US for w in works)) / 1e3
    total = CALL_US / 1e3 + sum(times)
    limit = "launches" if 2 * gaps > total else f"{longest.name}: {reason}"
    return Prediction(total, error, limit)
