"""Clocks: CUDA events and graph replays on a GPU, the wall clock for a run of the harness on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

#: Untimed calls at the start: Triton compiles, allocators settle, clocks rise.
WARMUP_CALLS = 3
#: Untimed milliseconds per call: flushing (a write and a read) and copying the ids.
BESIDE_MS = 0.2


class Timer(Protocol):
    """Times calls one by one."""

    def times(self, call: Callable[[], object], prepare: Callable[[int], None], count: int) -> list[float]:
        """Milliseconds of each of ``count`` calls; ``prepare(i)`` runs before the i-th and is not timed."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Returns a function that does the work of ``call`` without the host's part."""


class CudaTimer:
    """CUDA events around each call, before which one buffer of several L2 sizes is written and another is read.

    What is written stays in the L2 as dirty lines. The call would have to write them back to memory, at its own cost;
    the buffer that is read takes their place with clean lines, which cost nothing to drop.

    Args:
        cuda: torch.cuda, or what a test puts in its place.
        device: where the buffers are.
    """

    def __init__(self, cuda: ModuleType = torch.cuda, device: str = "cuda") -> None:
        self._cuda = cuda
        size = 4 * cuda.get_device_properties(cuda.current_device()).L2_cache_size
        self._written = torch.empty(size, dtype=torch.uint8, device=device)
        self._clean = torch.zeros(-(-size // 4), dtype=torch.float32, device=device)
        self._sum = torch.zeros((), device=device)

    def times(self, call: Callable[[], object], prepare: Callable[[int], None], count: int) -> list[float]:
        pairs = [(self._event(), self._event()) for _ in range(count)]
        for i, (start, stop) in enumerate(pairs):
            prepare(i)
            self.flush()
            start.record()
            call()
            stop.record()
        self._cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]

    def flush(self) -> None:
        """Evicts data of earlier calls from the L2, and leaves no dirty lines."""
        # Meanwhile the host runs ahead, so that a call's first launch waits for the GPU instead of the reverse.
        self._written.zero_()
        torch.sum(self._clean, dim=0, out=self._sum)

    def _event(self) -> torch.cuda.Event:
        return self._cuda.Event(enable_timing=True)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Captures the call in a CUDA graph, after warm-up calls on a side stream, as torch's documentation says."""
        cuda = self._cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(WARMUP_CALLS):
                call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        return graph.replay


class WallClock:
    """time.perf_counter around each call."""

    def times(self, call: Callable[[], object], prepare: Callable[[int], None], count: int) -> list[float]:
        found = []
        for i in range(count):
            prepare(i)
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e3)
        return found

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        return call


def median_ms(
    timer: Timer,
    call: Callable[[], object],
    prepare: Callable[[int], None],
    budget_ms: float,
    least: int = 10,
    most: int = 300,
) -> dict[str, object]:
    """Median of as many calls as fit ``budget_ms``, from ``least`` to ``most``.

    Returns:
        "ms": the median, "quartiles_ms": [first, third], "repetitions".
    """
    timer.times(call, prepare, WARMUP_CALLS)
    estimate = statistics.median(timer.times(call, prepare, 3))
    count = max(least, min(most, int(budget_ms / (estimate + BESIDE_MS))))
    first, median, third = (round(ms, 6) for ms in statistics.quantiles(timer.times(call, prepare, count), n=4))
    return {"ms": median, "quartiles_ms": [first, third], "repetitions": count}


def copy_gb_per_s(timer: Timer, device: torch.device, size: int, count: int = 30) -> float:
    """Median GB/s of a device-to-device copy of ``size`` bytes, counting bytes read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    timer.times(lambda: target.copy_(source), lambda i: None, WARMUP_CALLS)
    return 2 * size / statistics.median(timer.times(lambda: target.copy_(source), lambda i: None, count)) / 1e6
