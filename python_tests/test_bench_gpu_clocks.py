"""bench.gpu's timers without a GPU: preparation of calls, graphs, medians, the copy rate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_bench_gpu import CPU, Ticks

from bench.gpu import timing


class FakeCuda:
    """Imitates torch.cuda as far as CudaTimer uses it; records the order of events."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock = 0.0

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=100)

    def current_device(self) -> int:
        return 0

    def Event(self, enable_timing: bool) -> SimpleNamespace:  # noqa: N802 (torch's name)
        assert enable_timing
        event = SimpleNamespace(at=None)

        def record() -> None:
            self.log.append("event")
            event.at = self.clock

        event.record, event.elapsed_time = record, lambda other: other.at - event.at
        return event

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Stream(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(wait_stream=lambda other: self.log.append("wait"))

    current_stream = Stream

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def _recorded(self, name: str):
        log = self.log

        class Recorded:
            def __enter__(self) -> None:
                log.append(f"{name} {{")

            def __exit__(self, *error) -> None:
                log.append("}")

        return Recorded()

    def stream(self, stream: object):
        return self._recorded("stream")

    def graph(self, graph: object):
        return self._recorded("graph")


def test_cuda_timer() -> None:
    """Each call's ids and flush come before its events; the timer synchronizes once, at the end."""
    cuda = FakeCuda()
    timer = timing.CudaTimer(cuda, device="cpu")
    assert timer._written.nbytes == timer._clean.nbytes == 4 * 100
    timer._clean.fill_(1)

    def call() -> None:
        assert not timer._written.any()
        assert timer._sum == 100  # reading after writing evicts the dirty lines
        cuda.log.append("call")
        cuda.clock += 2

    def prepare(i: int) -> None:
        timer._written.fill_(1)
        timer._sum.zero_()
        cuda.log.append(f"prepare {i}")
        cuda.clock += 100

    assert timer.times(call, prepare, 2) == [2, 2]
    one = ["event", "call", "event"]
    assert cuda.log == ["prepare 0", *one, "prepare 1", *one, "synchronize"]


def test_cuda_graph() -> None:
    """Warm-up calls run on another stream, one call is captured, and the graph replaces the call."""
    cuda = FakeCuda()
    replay = timing.CudaTimer(cuda, device="cpu").capture(lambda: cuda.log.append("call"))
    warm = ["wait", "stream {", *["call"] * timing.WARMUP_CALLS, "}", "wait"]
    assert cuda.log == [*warm, "graph {", "call", "}"]
    replay()
    assert cuda.log[-1] == "replay"


def test_median_and_repetitions() -> None:
    """The number of calls fills the budget, including flushes, within bounds."""
    for ms, expected in ((0.8, 100), (40.0, 10), (0.001, 300)):
        timer = Ticks(ms)
        found = timing.median_ms(timer, lambda: None, lambda i: None, budget_ms=100)
        assert (found["ms"], found["quartiles_ms"], found["repetitions"]) == (ms, [ms, ms], expected)
        assert timer.log == [timing.WARMUP_CALLS, 3, expected]


def test_copy_rate_counts_both_ways() -> None:
    assert timing.copy_gb_per_s(Ticks(0.5), CPU, 10**6) == pytest.approx(2 * 10**6 / 0.5e-3 / 1e9)
