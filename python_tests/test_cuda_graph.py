"""Forward and fused backward as a CUDA graph: replays over the same memory equal calls, and nothing waits for the GPU.

Without a GPU, the emulator runs the same calls over buffers with changing contents. The sources and the Python layers
are searched for operations that make the host wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import row_cache_cases
import torch
from backends import PASSED, ROOT, SELECTED, SOURCES, device_backends, emulated
from embedding_bag_cases import EPS, LR, OPTIMIZERS, Case, make_case
from layout_calls import make_layout
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from rec_kernels.testing import same_bits

KINDS = ["tables", "weighted", "one table"]
REPLAYS = 3
# Two features share a table; a row of the third has more than 64 ids: its sum takes separate kernels.
TABLES, FEATURES = [(9, 16), (1, 33), (40, 132)], [0, 1, 0, 2]
LENGTHS = [3, 0, 70, 1, 20, 90, 5, 5, 1, 0, 2, 1]


def _make(kind: str, seed: int) -> Case:
    """Cases of one kind differ only in ids, gradients and bag lengths, which a graph does not fix."""
    if kind == "one table":
        return make_case([(50, 20)], [0], [80 + seed, 0, 7 - seed], seed=seed)
    lengths = [LENGTHS[0] + seed, LENGTHS[1], LENGTHS[2] - seed, *LENGTHS[3:]]
    weighted = kind == "weighted"
    mean = [weighted, False, weighted, weighted]
    return make_case(TABLES, FEATURES, lengths, mean=mean, weighted=weighted, gaps=[0, 4, 3], seed=seed)


class Buffers:
    """The memory that a captured forward and backward read and write."""

    def __init__(self, kind: str, optimizer: str, device: str = "cpu") -> None:
        self.cases, self.optimizer = [_make(kind, seed) for seed in range(REPLAYS)], optimizer
        case = self.cases[0]
        move = lambda t: t.to(device, copy=True)  # noqa: E731
        self.weights, self.sum, self.step = move(case.weights), move(case.sum), torch.tensor(6, device=device)
        self.lr, self.grad = torch.tensor(LR, device=device), move(case.grad)
        self.values, self.offsets = move(case.values), move(case.offsets)
        factors = case.per_sample_weights
        self.factors = None if factors is None else move(factors)
        self.token = torch.empty(0, device=device, requires_grad=True)
        # Made once: a graph cannot contain copies of the host's lists.
        self.layout: dict[str, object] = make_layout(case.layout, device=device)._asdict()
        if kind == "one table":  # the forward has no layout
            self.weights = self.weights.view(50, 20)

    def fill(self, number: int) -> None:
        """Writes the ids, offsets, factors and gradient of another batch to the same addresses."""
        case = self.cases[number]
        for mine, other in (
            (self.values, case.values),
            (self.offsets, case.offsets),
            (self.factors, case.per_sample_weights),
            (self.grad, case.grad),
        ):
            if mine is not None:
                mine.copy_(other)

    def reset(self) -> None:
        """Restores the initial tables and state."""
        case = self.cases[0]
        self.weights.view(-1).copy_(case.weights)
        self.sum.copy_(case.sum)
        self.step.fill_(6)

    @property
    def flat(self) -> Tensor:
        """The tables in the memory of a layout."""
        return self.weights.view(-1)

    @property
    def state(self) -> Tensor | None:
        """The optimizer's state."""
        return None if self.optimizer == "sgd" else self.sum

    def run(self, ops) -> Tensor:
        """A forward and an update by two calls of ops; returns the pooled output."""
        bags, flat = {"values": self.values, "offsets": self.offsets, "per_sample_weights": self.factors}, self.flat
        if self.weights.dim() == 2:
            output, status = ops.embedding_bag.table(self.weights, **bags)
        else:
            output, status = ops.embedding_bag.layout(flat, **bags, **self.layout)
        options = {"optimizer": self.optimizer, "eps": EPS, "status": status}
        state = (flat, self.state, self.step, self.lr)
        ops.embedding_bag_backward_fused_.layout(*state, self.grad, **bags, **self.layout, **options)
        return output

    def run_autograd(self, ops) -> Tensor:
        """Runs the calls through autograd: the update is in the backward."""
        bags = {"values": self.values, "offsets": self.offsets, "per_sample_weights": self.factors}
        state, options = (self.flat, self.state, self.step, self.lr), {"optimizer": self.optimizer, "eps": EPS}
        output, _ = ops.embedding_bag_fused.layout(*state, self.token, **bags, **self.layout, **options)
        torch.autograd.grad(output, self.token, self.grad)
        return output.detach()

    def found(self, output: Tensor) -> list[Tensor]:
        """Copies of everything that a run has written, on the CPU."""
        return [t.cpu().clone() for t in (output, self.weights, self.sum, self.step)]


def _replays(buffers: Buffers, call: Callable[[], Tensor]) -> list[list[Tensor]]:
    """Results of calls with consecutive batches, from the initial tables."""
    buffers.reset()
    found = []
    for number in range(REPLAYS):
        buffers.fill(number)
        found.append(buffers.found(call()))
    return found


def _expected(kind: str, optimizer: str) -> list[list[Tensor]]:
    buffers = Buffers(kind, optimizer)
    expected = _replays(buffers, lambda: buffers.run(torch.ops.rec_kernels))
    assert [step.item() for *_, step in expected] == [7, 8, 9]
    outputs, weights = ([replay[i] for replay in expected] for i in (0, 1))
    for one, other in ((0, 1), (1, 2)):  # batches must differ for the test to be valid
        assert not same_bits(outputs[one], outputs[other])
        assert not same_bits(weights[one], weights[other])
    return expected


def _assert_same(found: list[list[Tensor]], expected: list[list[Tensor]], where: str) -> None:
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert all(map(same_bits, mine, other)), f"{where}, replay {number}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_over_the_same_memory(kind: str, optimizer: str) -> None:
    """On every backend, each call computes its batch's output and update, and advances the step by one."""
    expected = _expected(kind, optimizer)
    for backend in device_backends():
        if backend.kind != "cuda":  # copies arguments; test_replays covers it
            buffers = Buffers(kind, optimizer)
            found = _replays(buffers, lambda b=buffers, ops=backend.ops.ops: b.run(ops))
            _assert_same(found, expected, backend.name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_does_the_same(kind: str, optimizer: str) -> None:
    """embedding_bag_fused and its backward over the same memory, on the CPU."""
    buffers = Buffers(kind, optimizer)
    found = _replays(buffers, lambda: buffers.run_autograd(torch.ops.rec_kernels))
    _assert_same(found, _expected(kind, optimizer), "autograd")


def test_a_bad_batch_skips_its_own_replay_only() -> None:
    """Without a check of ``status`` on the host, the device skips the update of a bad batch only."""
    expected = _expected("tables", "rowwise_adagrad")
    for backend in device_backends():
        buffers = Buffers("tables", "rowwise_adagrad")
        buffers.reset()
        buffers.fill(0)
        buffers.values[5] = 10_000
        buffers.run(backend.ops.ops)
        assert buffers.step.item() == 6, backend.name
        assert same_bits(buffers.weights, buffers.cases[0].weights), backend.name
        _assert_same(_replays(buffers, lambda b=buffers, ops=backend.ops.ops: b.run(ops)), expected, backend.name)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU; the tests above stand in")


def _capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures the call in a graph, which fails if anything waits for the GPU."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@needs_gpu
@pytest.mark.parametrize("way", ["run", "run_autograd"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_replays(kind: str, optimizer: str, way: str) -> None:
    """A captured forward and backward has the bits of calls on the GPU and on the CPU, for every batch."""
    expected, buffers = _expected(kind, optimizer), Buffers(kind, optimizer, "cuda")
    call = lambda: getattr(buffers, way)(torch.ops.rec_kernels)  # noqa: E731
    _assert_same(_replays(buffers, call), expected, "eager")
    PASSED["cuda"] += REPLAYS
    replay = _capture(call)
    _assert_same(_replays(buffers, replay), expected, "graph")
    PASSED["cuda graph"] += REPLAYS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["run", "run_autograd"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_another_gpu_than_the_current(kind: str, way: str) -> None:
    """Kernels run on the tensors' GPU, on a stream of their own there; the current GPU stays."""
    expected, buffers = _expected(kind, "rowwise_adagrad"), Buffers(kind, "rowwise_adagrad", "cuda:1")
    side = torch.cuda.Stream(1)

    def call() -> Tensor:
        side.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(side), torch.cuda.device(0):
            output = getattr(buffers, way)(torch.ops.rec_kernels)
            assert torch.cuda.current_device() == 0
        side.synchronize()
        return output

    _assert_same(_replays(buffers, call), expected, "cuda:1")
    PASSED["cuda"] += REPLAYS


@needs_gpu
@pytest.mark.parametrize("way", ["run", "run_autograd"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_sees_no_wait(kind: str, way: str) -> None:
    """torch.cuda.set_sync_debug_mode reports no synchronization in torch's operations around the kernels."""
    buffers = Buffers(kind, "rowwise_adagrad", "cuda")
    getattr(buffers, way)(torch.ops.rec_kernels)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(buffers, way)(torch.ops.rec_kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


#: Calls in C++ that make the host wait for the GPU, or read its memory.
WAITS = (
    r"\w*[sS]ynchronize|cudaMemcpy\w*|cudaMemset|cudaMalloc\w*|cudaFree\w*|cudaEventQuery|cudaStreamQuery"
    r"|copy_to_host|to_host|item|to|cpu|aoti_torch_item_\w+"
)
#: Functions that may: they compute sizes of sparse gradients and of selected rows.
MAY_WAIT = {
    ("csrc/core/cuda/launch.h", "copy_to_host", "cudaMemcpyAsync"),
    ("csrc/core/cuda/launch.h", "copy_to_host", "cudaStreamSynchronize"),
    ("csrc/embedding_bag/cuda/backward.cu", "backward_sparse", "copy_to_host"),
    ("csrc/jagged/cuda/copy_rows.cu", "place_rows", "copy_to_host"),
}


def _code(path: Path) -> str:
    """A C++ file without comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


def _calls(code: str, names: str) -> list[tuple[str, str]]:
    """(enclosing function, called function) of every call; a function starts a line and opens a body."""
    functions = [
        (m.start(), m[1])
        for m in re.finditer(r"^[A-Za-z_][\w:<>,&* ]*?(\w+)\([^;{}]*\)(?: const)? \{$", code, re.MULTILINE)
    ]
    found = []
    for call in re.finditer(rf"(?<![\w.])({names})\(", code):
        around = [name for start, name in functions if start < call.start()]
        line = code[code.rfind("\n", 0, call.start()) + 1 : call.start()]
        if not re.fullmatch(r"(?:inline |static )?[\w:<>,]+[&*]? ", line):  # a definition, not a call
            found.append((around[-1] if around else "", call[1]))
    return found


def _device_sources() -> list[Path]:
    """Source files of librec_kernels_cuda.so."""
    folders = ("core", "rows", "embedding_bag", "row_cache", "jagged", "dense")
    files = [path for folder in folders for path in sorted((ROOT / "csrc" / folder).rglob("*.*"))]
    return [path for path in files if path.parent.name != "cpu"]


def test_few_ops_wait_in_the_sources() -> None:
    """The host waits only in sparse gradients, and for totals that are not given."""
    found = {(str(path.relative_to(ROOT)), *call) for path in _device_sources() for call in _calls(_code(path), WAITS)}
    assert found == MAY_WAIT


def test_errors_are_taken_back() -> None:
    """Every CUDA call is checked by the one function that resets the error for the next launch."""
    found = {
        (str(path.relative_to(ROOT)), *call)
        for path in _device_sources()
        for call in _calls(_code(path), r"STD_CUDA\w*|cudaGetLastError|cudaPeekAtLastError")
    }
    header = "csrc/core/cuda/launch.h"
    assert found == {
        (header, "check_cuda", "cudaGetLastError"),
        (header, "check_cuda", "STD_CUDA_CHECK"),
        (header, "launch", "cudaGetLastError"),
    }
    called = r"(?<!\w)(?:cuda[A-Z]\w*|cub::\w+::\w+)\("
    for path in _device_sources():
        code = _code(path)
        for call in re.finditer(called, code):
            before = code[: call.start()]
            assert before.endswith(("check_cuda(", "static_cast<void>(")), (path, call[0])


def test_small_calls_have_few_nodes() -> None:
    """Calls with few ids have few graph nodes, which determine their time: kernels, a sum (2 nodes) and a sort."""
    if "cuda_emulated" not in SELECTED or not SOURCES.exists():
        pytest.skip("there are no emulated kernels to count")
    ops, ids, offsets = emulated(), torch.tensor([3, 1, 2, 3]), torch.arange(5)
    sample = row_cache_cases.CacheSample([(40, 16, "fp32")], [(0, "sum")], {16: 1}, 2, (4,), "lru", "nearest", 0)
    case = row_cache_cases.CacheCase(sample)
    given = case.arguments | case.state() | {"values": ids, "offsets": offsets}
    calls = {
        "jagged_dedup": (7, lambda: ops.jagged_dedup(ids, offsets, [0, 0])),
        "jagged_permute": (6, lambda: ops.jagged_permute(ids, offsets, [1, 0], [2, 2])),
        "jagged_index_select": (5, lambda: ops.jagged_index_select(ids, offsets, torch.tensor([2]))),
        "row_cache_insert_": (15, lambda: row_cache_cases.call("row_cache_insert_", given, ops)),
    }
    found = {}
    for name, (_, once) in calls.items():
        ops._count_nodes()
        once()
        found[name] = ops._count_nodes()
    assert found == {name: nodes for name, (nodes, _) in calls.items()}


def test_a_total_is_not_read_back() -> None:
    """Given totals of jagged_index_select, jagged_windows and jagged_permute are not read back."""
    code = _code(ROOT / "csrc/jagged/cuda/copy_rows.cu")
    assert re.search(r"if \(total\) s.total = \*total;\s+else copy_to_host\(", code)
    assert "if (!total && names_each_once(" in _code(ROOT / "csrc/jagged/cuda/jagged_permute.cu")


def test_waits_are_found() -> None:
    """The search finds a call with its function, but not definitions, members and comments."""
    code = """
inline void copy_to_host(void* to) {
  STD_CUDA_CHECK(cudaStreamSynchronize(stream));
}
std::vector<int64_t> to_host(const Tensor& t,
                             cudaStream_t stream) {
  copy_to_host(out.data());
  values.item();
}
"""
    found = _calls(code, WAITS)
    assert found == [("copy_to_host", "cudaStreamSynchronize"), ("to_host", "copy_to_host")]


#: torch's errors for reading data of a tensor without data, or a data-dependent shape.
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def without_numbers(buffers: Buffers) -> Iterator[None]:
    """Replaces tensors by fakes without data: reading one, for which the host would wait, raises."""
    with FakeTensorMode() as mode:
        for holder in (vars(buffers), buffers.layout):
            holder.update({k: mode.from_tensor(v) for k, v in holder.items() if isinstance(v, Tensor)})
        yield


@pytest.mark.parametrize("way", ["run", "run_autograd"])
@pytest.mark.parametrize("kind", KINDS)
def test_python_reads_no_tensor(kind: str, way: str) -> None:
    """The autograd layer above the compiled ops reads no tensor."""
    buffers = Buffers(kind, "rowwise_adagrad")
    with without_numbers(buffers):
        output = getattr(buffers, way)(torch.ops.rec_kernels)
        assert output.shape == buffers.grad.shape
        with pytest.raises(NEEDS_NUMBERS):
            buffers.step.item()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_reads_no_tensor(kind: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code around the Triton launches, which are omitted here, reads no tensor."""
    jit = pytest.importorskip("triton.runtime.jit")
    from rec_kernels import triton

    launched = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, **options: launched.append(self.fn.__name__))
    buffers = Buffers(kind, optimizer)
    with without_numbers(buffers):
        assert buffers.run(triton).shape == buffers.grad.shape
        assert launched.count("start_kernel") == 2
        assert launched[-1] == "advance_step_kernel"
        with pytest.raises(NEEDS_NUMBERS):
            buffers.layout["layout"].tolist()
