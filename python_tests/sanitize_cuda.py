"""Calls every CUDA op on small, odd shapes and compares with the CPU; `--sanitizer` does so under NVIDIA's sanitizer.

`--fuzz N` needs no GPU: N calls of embedding_bag and its backward ops with bad offsets and ids, without and with a row
cache, N of the ops on jagged rows and N with forged layouts run on the emulated kernels, built with AddressSanitizer
and UndefinedBehaviorSanitizer (embedding_bag_fuzz.py, row_cache_fuzz.py, jagged_fuzz.py and layout_fuzz.py).

compute-sanitizer makes a process many times slower: this selection of calls does not replace the tests. `make test-gpu`
runs it under every tool of ``TOOLS``; `--sanitizer memcheck` runs this tool. Every op is called twice: with aligned
tensors, and with tensors one element past an aligned address. If Triton is installed, ops with Triton kernels are
called, too (triton_calls.py).
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT

import embedding_bag_fuzz
import jagged_fuzz
import layout_fuzz
import row_cache_fuzz
import torch
from backends import Backend, OnCuda, OnDevice, build, emulated, sanitized_environment, unaligned
from embedding_bag_cases import EPS, LR, Case, make_case
from embedding_bag_format_cases import EncodedCase, every_format_once
from embedding_bag_moment_cases import ELEMENTWISE, MomentCase
from jagged_cases import make_batch
from layout_calls import OPS, ListOps
from row_cache_cases import Batch, CacheCase, CacheSample, call, layout_of, layout_of_floats, normalized
from torch import Tensor
from torch.utils._pytree import tree_flatten
from triton_calls import triton_calls

import rec_kernels as rk
from rec_kernels import _triton_versions
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.reference.row_cache import POLICIES
from rec_kernels.reference.row_formats import ROW_FORMATS
from rec_kernels.testing import same_bits

#: memcheck: accesses outside of memory, or not aligned; synccheck: barriers and masks; racecheck: shared memory.
TOOLS = ("memcheck", "synccheck", "racecheck")
#: Messages of the tool for GPUs and virtual machines that it does not support.
UNSUPPORTED = "Device not supported"


def ops_with_kernels(namespace: str, key: str, *, compiled: bool = True) -> set[str]:
    """Public ops of a namespace with a kernel for a dispatch key, from a library or registered in Python."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::") and has_kernel(n, key)]
    names = {n.removeprefix(f"{namespace}::") for n in found if compiled != _registered_in_python(n, key)}
    # A leading underscore marks ops for tests.
    return {name for name in names if not name.startswith("_")}


def _registered_in_python(op: str, key: str) -> bool:
    """True if the dispatcher reports a Python file as the registration of the kernel."""
    lines = torch._C._dispatch_dump(op)
    return re.search(rf"^{key}: registered at [^\n]*\.py:\d+ ::", lines, re.MULTILINE) is not None


def _cases() -> Iterator[Case]:
    """Every width of a lane group, rows aligned to 16 bytes or not, and rows with 150 ids."""
    tables, features = [(5, 16), (3, 33), (1, 4), (4, 130), (2, 601)], [0, 1, 0, 2, 3, 4]
    lengths = [3, 0, 70, 1, 2, 2, 5, 0, 1, 60, 40, 50, 1, 2, 3, 2, 0, 1]
    yield make_case(tables, features, lengths, gaps=[0, 1, 0, 3, 0], seed=1)
    yield make_case(
        tables,
        features,
        lengths,
        mean=[True, False, True, True, False, True],
        weighted=True,
        ids_dtype=torch.int32,
        offsets_dtype=torch.int32,
        padding_idx=0,
        unused=(2, 3),
        seed=2,
    )


def _partitioned() -> Case:
    """Features with products, sums and concatenations of rows, and a plain one; tables with several features."""
    tables = [(40, 12), (3, 12), (5, 130), (4, 12)]
    features = [
        Parts([0, 1], [(3, 40), (1, 3)], 120, "mult"),
        Parts([1, 3, 0], [(40, 3), (10, 4), (1, 40)], 120, "add"),
        Parts([2, 0], [(7, 5), (1, 40)], 999, "concat"),
        2,
        Parts([3], [(1, 4)], 2**40, "concat"),
    ]
    return make_case(tables, features, [70, 0, 3, 9, 1, 2, 1, 0, 4, 2, 0, 66, 2, 1, 0], weighted=True, seed=3)


def _one_table(ops) -> object:
    weights, ids = torch.arange(7 * 5).view(7, 5).float(), torch.tensor([3, 6, 0, 6])
    return ops.embedding_bag(weights, ids, torch.tensor([0, 1, 1]), include_last_offset=False)


def _tables(ops) -> object:
    weights = torch.arange(16.0 * 6)
    tables = [weights[:15].view(5, 3), weights[16:].view(5, 16)]
    layout = rk.table_layout([5, 5], [3, 16], weight_offsets=[0, 16])._asdict()
    return ops.embedding_bag_tables(weights, tables, torch.tensor([4, 0, 2]), torch.tensor([0, 2, 3]), **layout)


def _half_gradients(ops) -> Tensor:
    """Dense gradients of tables in three dtypes, of hot rows, and of rows wider than a warp's registers."""
    case = make_case([(5, 16), (3, 33), (2, 600)], [0, 1, 2, 0], [70, 3, 0, 5, 2, 1, 4, 9], seed=6)
    encoded = EncodedCase(case, ["fp32", "bf16", "fp16"])
    given = {"grad": case.grad, "weights": encoded.flat, "values": case.values, "offsets": case.offsets}
    return ops.embedding_bag_backward_dense(**given, **layout_of(encoded)._asdict())


def _shared(ops) -> Iterator[object]:
    """Bags shared by samples, in two groups, and a feature in none; most samples share the first bag."""
    inverse = (torch.arange(600) ** 2).view(2, 300) % 4 * (torch.arange(300) % 5 > 3)
    sizes, groups = [4, 300, 4, 4], [0, -1, 1, 0]
    case = make_case([(5, 16), (5, 33)], [0, 1, 0, 1], [1] * 1200, weighted=True, seed=4)
    encoded = every_format_once(case)
    of_feature = case.offsets.diff().view(4, 300)
    lengths = torch.cat([each[:size] for each, size in zip(of_feature, sizes, strict=True)])
    shared = {"bag_starts": torch.tensor([0, *sizes]).cumsum(0), "inverse": inverse, "groups": groups}
    layout = layout_of(encoded)._asdict() | shared
    bags = case.values[: int(lengths.sum())], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    factors, grad = {"per_sample_weights": case.per_sample_weights[: len(bags[0])]}, case.grad
    for dtype in (torch.float32, torch.bfloat16):
        yield ops.embedding_bag(encoded.flat, *bags, **layout, **factors, output_dtype=dtype)
    yield ops.embedding_bag_backward_per_sample_weights(grad, encoded.flat, *bags, **layout)
    weights, step = encoded.flat.clone(), torch.tensor(6)
    state, how = (weights, None, step, torch.tensor(LR)), {"optimizer": "sgd", "rounding": "nearest"}
    ops.embedding_bag_backward_fused_(*state, grad, *bags, **layout, **factors, **how)
    yield weights, step
    floats = layout_of_floats(case)._asdict() | shared
    for op in (ops.embedding_bag_backward_dense, ops.embedding_bag_backward_sparse):
        yield op(grad=grad, weights=case.weights, values=bags[0], offsets=bags[1], **floats, **factors)


def _one_table_backward(ops) -> Iterator[object]:
    """The gradients of one table without a layout, of floats and of bytes."""
    weights, bags = torch.arange(7 * 5).view(7, 5).float(), (torch.tensor([3, 6, 0, 6]), torch.tensor([0, 1, 4]))
    grad, factors = torch.linspace(-1, 2, 10).view(2, 5), torch.linspace(0, 1, 4)
    yield ops.embedding_bag_backward_dense(grad, [7, 5], *bags, factors, pooling="mean")
    yield ops.embedding_bag_backward_sparse(grad, [7, 5], *bags, factors, pooling="mean")
    yield ops.embedding_bag_backward_per_sample_weights(grad, weights, *bags)
    rows, _ = ops.quantize_rows(weights, "int8")
    yield ops.embedding_bag_backward_per_sample_weights(grad, rows, *bags, formats=["int8"], embedding_dim=5)


def _row_formats(ops) -> Iterator[Tensor]:
    """Each format's codec both ways, on rows of a few lanes and of more than a warp, with a remainder of columns."""
    for columns in (5, 131):
        x = torch.linspace(-3, 5, 3 * columns).view(3, columns)
        for name in ROW_FORMATS:
            rows, status = ops.quantize_rows(x, name)
            noise = {"seed": torch.tensor(3), "step": torch.tensor(7)}
            noisy, _ = ops.quantize_rows(x.half(), name, "stochastic", **noise, first_row=9)
            dtype = torch.bfloat16 if columns == 5 else torch.float32
            yield from (rows, status, noisy, ops.dequantize_rows(rows, name, columns, dtype))


def _everything(encoded: EncodedCase, ops) -> list[object]:
    case = encoded.case
    values, offsets, factors = case.jagged
    state = (case.sum, torch.tensor(6), torch.tensor(LR), torch.empty(0))
    layout = layout_of_floats(case)._asdict()
    weighted, bags = layout | {"per_sample_weights": factors}, {"values": values, "offsets": offsets}
    return [
        ops.embedding_bag(case.weights, values, offsets, **weighted),
        ops.embedding_bag_fused(case.weights, *state, values, offsets, **weighted, eps=EPS),
        ops.embedding_bag_backward_dense(grad=case.grad, weights=case.weights, **bags, **weighted),
        ops.embedding_bag_backward_sparse(grad=case.grad, weights=case.weights, **bags, **weighted),
        ops.embedding_bag_backward_per_sample_weights(case.grad, case.weights, values, offsets, **layout),
        case.update("sgd", ops),
        case.update("rowwise_adagrad", ops, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)),
        *(MomentCase(encoded, name).update("stochastic", ops) for name in ELEMENTWISE),
    ]


def _row_cache(ops, policy: str) -> Iterator[object]:
    """Rows inserted, read, updated, evicted and flushed: two widths, three formats, one table with two features."""
    tables = [(40, 5, "int8"), (33, 5, "int4"), (21, 130, "mx6"), (9, 5, "bf16")]
    features = [(0, "sum"), (1, "mean"), (2, "sum"), (0, "mean"), (3, "sum")]
    decay_every = 2 if policy == "lfu" else 0
    case = CacheCase(CacheSample(tables, features, {5: 2, 130: 1}, 3, (3,), policy, "stochastic", decay_every))
    state, step = case.state(), {"step": torch.tensor(6), "lr": torch.tensor(LR), "sum": None, "optimizer": "sgd"}
    for seed in range(3):
        batch = case.batch(Batch([[3, 0, 70]] * len(features), seed=seed))
        given = case.arguments | state | step | {"values": batch.values, "offsets": batch.offsets}
        given["cache_slots"] = call("row_cache_insert_", given, ops)
        pooled, _ = call("embedding_bag", given, ops)
        given["grad"] = torch.linspace(-1, 2, pooled.numel()).view_as(pooled)
        yield (pooled, given["cache_slots"], call("embedding_bag_backward_per_sample_weights", given, ops))
        call("embedding_bag_backward_fused_", given, ops)
        yield call("row_cache_lookup", given, ops)
    yield call("row_cache_stats", given, ops)
    call("row_cache_flush_", given, ops)
    yield normalized(state)


def _jagged(ops) -> Iterator[object]:
    """Sessions, long and empty bags; colliding hashes, and rows aligned to words of every size."""
    batch = make_batch(3, 60, session=5, mean_length=9, seed=1)
    small = make_batch(2, 40, rows=3, mean_length=1, ids=torch.int32, offsets=torch.int32, seed=2)
    for each, groups in ((batch, [0, 1, 0]), (small, [0, -1])):
        for bits in (64, 0):
            yield ops.jagged_dedup(each.values, each.offsets, groups, each.weights, bits)
        index = torch.arange(each.bags).flip(0).repeat(2)
        for columns, dtype in ((1, torch.int8), (3, torch.float16), (4, torch.float32), (130, torch.float64)):
            rows = torch.arange(len(each.values) * columns).view(-1, columns).to(dtype)
            yield ops.jagged_index_select(rows, each.offsets, index)
            yield ops.jagged_windows(rows, each.offsets[:-2], each.offsets[2:] - each.offsets[:-2])
        strides, order = each.strides, list(range(len(each.strides)))[::-1]
        yield ops.jagged_permute(each.values, each.offsets, order, strides, each.weights)
        yield ops.jagged_permute(each.values, each.offsets, order[:1] * 2, strides)
        blocks = torch.tensor([9, 17, 50][: len(strides)])
        yield ops.jagged_bucketize(each.values, each.offsets, blocks, 6, strides, each.weights)
    inverse = (torch.arange(300) ** 2) % 7 * (torch.arange(300) % 5 > 3)  # most samples have row 0
    for columns in (3, 4, 130):
        x = torch.linspace(-3, 5, 7 * columns).view(7, columns)
        yield ops.expand(x, inverse)
        yield ops.expand_backward(torch.linspace(-1, 2, 300 * columns).view(300, columns), inverse.int(), 9)


def _simple(ops) -> list[Tensor]:
    x, y = torch.linspace(-3, 5, 5 * 131).view(5, 131), torch.linspace(2, -1, 5 * 131).view(5, 131)
    return [ops.scale_rows(x, x[:, 7]), ops.row_dot(x, y)]


def calls() -> dict[str, Callable]:
    """Named functions that call ops of a given namespace and return every tensor that they return or change."""
    return {
        "scale_rows and row_dot": _simple,
        "one table": _one_table,
        "one table, backward": _one_table_backward,
        "tables": _tables,
        "half gradients": _half_gradients,
        "row formats": _row_formats,
        # Calls change their case: each makes its own.
        "features": lambda ops: _everything(every_format_once(next(_cases())), ops),
        "features with options": lambda ops: _everything(every_format_once(list(_cases())[1]), ops),
        "parts": lambda ops: _everything(EncodedCase(_partitioned(), ["int8", "int8", "fp16", "int8"]), ops),
        **{f"row cache, {policy}": functools.partial(_row_cache, policy=policy) for policy in POLICIES},
        "shared bags": _shared,
        "jagged rows": _jagged,
    }


class Recorder:
    """Forwards calls to ``ops`` and records their names: "scale_rows", or "embedding_bag.layout"."""

    def __init__(self, ops) -> None:
        self._ops, self.called, self.last = ops, set(), None

    def __getattr__(self, name: str) -> Callable:
        self.last = name
        op, recorder = getattr(self._ops, name), self

        class Recorded:
            def __call__(self, *args, **kwargs) -> object:
                recorder.record_call(name)
                return op(*args, **kwargs)

            def __getattr__(self, overload: str) -> Callable:
                recorder.record_call(f"{name}.{overload}")
                return getattr(op, overload)

        return Recorded()

    def record_call(self, name: str) -> None:
        self.last = name
        self.called.add(name)


def _tensors(found: object) -> list[Tensor]:
    return tree_flatten(list(found) if isinstance(found, Iterator) else found)[0]


def _error_text(error: Exception) -> str:
    """An error's type and text; for an assertion, whose text only pytest fills in, also file and line."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, AssertionError):
        return text
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(at.filename).name}:{at.lineno}: {at.line})"


def check(
    ops, required: set[str], report: Callable[[str], None] = lambda line: None, some: dict[str, Callable] | None = None
) -> int:
    """Makes every call on ``ops`` and on the CPU; an error in one call does not end the others.

    Args:
        required: names of the ops that must be called.
        report: called with each call's outcome.
        some: the calls (default: ``calls()``).

    Returns:
        The number of compared tensors.

    Raises:
        AssertionError: bits differ from the CPU's, a call raises, or an op is missing.
    """
    recorder, faults, compared = Recorder(ops.ops if isinstance(ops, ListOps) else ops), [], 0
    for name, call_some in (calls() if some is None else some).items():
        expected = _tensors(call_some(OPS))
        try:
            found = _tensors(call_some(ListOps(recorder)))
        except Exception as error:
            faults.append(f"{name}: {recorder.last} raises {_error_text(error)}"[:1000])
            report(faults[-1])
            continue
        different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not same_bits(a, b)]
        compared += len(found)
        if different:
            faults.append(f"{name}: tensors {different} of {len(found)} differ from the CPU's")
        report(faults[-1] if different else f"{name}: {len(found)} tensors")
    if required - recorder.called:
        where = "calls()" if some is None else "triton_calls.py"
        faults.append(f"no call of {sorted(required - recorder.called)}: add it to {where}")
    assert not faults, "\n".join(faults)
    return compared


def find_sanitizer() -> str | None:
    """compute-sanitizer on the PATH, or in the CUDA toolkit of nvcc."""
    found, nvcc = shutil.which("compute-sanitizer"), shutil.which("nvcc")
    if found or nvcc is None:
        return found
    folders = {Path(nvcc).parent, Path(nvcc).resolve().parent}
    return next((str(f / "compute-sanitizer") for f in folders if (f / "compute-sanitizer").exists()), None)


def run_under_sanitizer(tools: Sequence[str], *options: str) -> int:
    """Runs this file under each tool; returns the first status other than 0, or 0 without compute-sanitizer."""
    sanitizer, names = find_sanitizer(), ", ".join(tools)
    if sanitizer is None:
        print(f"compute-sanitizer is neither on the PATH nor beside nvcc: {names} left out")
        return 0
    # One allocation per tensor: memcheck finds nothing inside of torch's large ones.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in tools:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, str(Path(__file__)), *options]
        print(" ".join(command), flush=True)
        unsupported = False
        with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True) as process:
            for line in process.stdout:  # printed immediately, in case the run is ended
                print(line, end="", flush=True)
                unsupported |= UNSUPPORTED in line
        if unsupported:
            print(f"compute-sanitizer cannot look into this machine's GPU: {names} left out")
            return 0
        if process.returncode:
            return process.returncode
    return 0


def fuzz(count: int, first: int) -> int:
    """Checks calls on the emulated kernels in a process with sanitizers; returns its exit status."""
    if "REC_KERNELS_TEST_LIBRARY" not in os.environ:
        library = {"REC_KERNELS_TEST_LIBRARY": str(build("rec_kernels_emulated_asan"))}
        command = [sys.executable, __file__, "--fuzz", str(count), "--seed", str(first)]
        return subprocess.run(command, env=sanitized_environment() | library).returncode
    backend = Backend("cuda_emulated", emulated())
    calls = {seed: embedding_bag_fuzz.bad_call(seed) for seed in range(first, first + count)}
    for seed, each in calls.items():
        embedding_bag_fuzz.check(each, backend)
        row_cache_fuzz.check(each, seed, backend)
        layout_fuzz.check(seed, backend)
    wrong = sum(each.expected_error is not None for each in calls.values())
    wrong += sum(jagged_fuzz.check(seed, backend) for seed in calls)
    print(f"{2 * count} calls, {wrong} of them wrong: every result is right, every fault is noted")
    return 0


def compare(ways: dict[str, object], required: set[str], some: dict[str, Callable] | None = None) -> int:
    """Checks the ops of each of ``ways``, prints the outcomes, and returns the exit status."""
    status = 0
    for name, ops in ways.items():
        try:
            compared = check(ops, required, lambda line: print(f"  {line}", flush=True), some)
            print(f"{name}: {compared} tensors have the CPU's bits", flush=True)
        except AssertionError as error:
            print(f"{name}:\n{error}", flush=True)
            status = 1
    return status


def on_gpu(ways: dict[str, object]) -> int:
    """Checks the CUDA library's ops, and Triton's if the installed version is supported; returns the exit status."""
    status = compare(ways, ops_with_kernels("rec_kernels", "CUDA"))
    version = _triton_versions.installed()
    if version is None or _triton_versions.is_too_old(version):
        print(f"the ops whose kernels are in Triton are not called: they need {_triton_versions.SUPPORTED}")
        return status
    in_triton = {f"{name}, Triton": ops for name, ops in ways.items()}
    return compare(in_triton, ops_with_kernels("rec_kernels", "CUDA", compiled=False), triton_calls()) or status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sanitizer",
        nargs="*",
        choices=TOOLS,
        metavar="TOOL",
        help=f"within compute-sanitizer, where it is installed; its tools are {', '.join(TOOLS)} (default: all)",
    )
    parser.add_argument("--fuzz", type=int, metavar="N", help="N wrong calls of the emulated kernels")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them (default: 0)")
    parser.add_argument("--emulated", action="store_true", help="the emulated kernels, without a GPU")
    options = parser.parse_args()
    if options.fuzz is not None:
        return fuzz(options.fuzz, options.seed)
    if options.sanitizer is not None:
        return run_under_sanitizer(options.sanitizer or TOOLS, *(["--emulated"] if options.emulated else []))
    if options.emulated:
        ways = {"aligned": emulated(), "not aligned": OnDevice(emulated().ops, unaligned, torch.Tensor.clone)}
        return compare(ways, ops_with_kernels("rec_kernels_emulated", "CPU"))
    missing = rk.build_info()["cuda_unavailable"]
    if missing or not torch.cuda.is_available():
        sys.exit(f"there is nothing to check: {missing or 'torch sees no CUDA device'}")
    return on_gpu({"aligned": OnCuda(), "not aligned": OnCuda(unaligned)})


if __name__ == "__main__":
    sys.exit(main())
