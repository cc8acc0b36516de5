"""Calls of ops leak no memory, whether they return or raise, nor does long training."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from process_cases import run_script
from test_opcheck import registered, samples

from rec_kernels.ops.autograd import overload_of

CALLS, ROUNDS = 40, 4
CSRC = Path(__file__).parents[1] / "csrc"


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "hblkhd", "e", "f", "uordblks", "g", "h")]


def _mallinfo2() -> Callable | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


mallinfo2 = _mallinfo2()
needs_glibc = pytest.mark.skipif(mallinfo2 is None, reason="counts bytes in use by mallinfo2, of glibc 2.33 or newer")


def bytes_in_use() -> int:
    """Bytes allocated by malloc and not freed."""
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def bytes_kept(call: Callable[[], object]) -> float:
    """Bytes that one call leaves allocated: the minimum of some rounds, as other threads and caches may allocate."""
    least = float("inf")
    for _ in range(ROUNDS):
        before = bytes_in_use()
        for _ in range(CALLS):
            call()
        least = min(least, (bytes_in_use() - before) / CALLS)
        if least < 1:
            break
    return least


def raising(call: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that asserts that ``call`` raises."""

    def attempt() -> None:
        try:
            call()
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            return
        pytest.fail("the call was to raise")

    return attempt


@needs_glibc
@pytest.mark.parametrize("op", registered())
def test_calls_keep_nothing(op: str) -> None:
    """Every sample of the op leaks nothing."""
    for args, kwargs in samples(op):
        with torch.no_grad():
            assert bytes_kept(lambda args=args, kwargs=kwargs: overload_of(op)(*args, **kwargs)) < 1


def wrong_calls(op: str) -> Iterator[tuple[str, dict]]:
    """A sample with one invalid argument at a time, covering every kind that must be freed."""
    args, kwargs = samples(op)[0]
    arguments = overload_of(op)._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    large = torch.zeros(1, 1, 1, 2500, dtype=torch.complex64)
    for a in arguments:
        kind = str(a.type)
        if kind in ("str", "Optional[str]"):
            yield a.name, given | {a.name: "a text that is too long for a string to keep in itself"}
        elif kind in ("Tensor", "Optional[Tensor]"):
            yield a.name, given | {a.name: large}
        elif kind == "Optional[List[str]]":
            yield a.name, given | {a.name: ["fp32", "another text that is too long for a string to keep in itself"]}


@needs_glibc
@pytest.mark.parametrize("op", registered())
def test_calls_that_raise_keep_nothing(op: str) -> None:
    """Calls with one invalid argument free all the others."""
    found = 0
    for name, given in wrong_calls(op):
        with torch.no_grad():
            try:
                overload_of(op)(**given)
                continue  # an argument that this call does not read
            except (RuntimeError, ValueError, IndexError, NotImplementedError):
                found += 1
            kept = bytes_kept(raising(lambda given=given: overload_of(op)(**given)))
            assert kept < 1, (name, kept)
    assert found


#: Dtypes that the kernels do not support: torch passes some, and rejects others in the conversion.
ODD_DTYPES = [torch.float64, torch.float8_e8m0fnu, torch.complex64, torch.quint8, torch.uint1]


@needs_glibc
@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
@pytest.mark.parametrize(
    "op", [*(f"embedding_bag{name}.layout" for name in ("", "_fused", "_tables")), "dequantize_rows"]
)
def test_odd_dtypes_keep_nothing(op: str, dtype: torch.dtype) -> None:
    """Rejected dtypes leak nothing; torch would not free arguments that it converted before."""
    args, kwargs = samples(op)[0]
    if op == "dequantize_rows":
        call = raising(lambda: overload_of(op)(*args[:-1], dtype))
    elif op == "embedding_bag_tables.layout":
        call = raising(lambda: overload_of(op)(*args, **kwargs, output_dtype=dtype))
    else:
        cache = {"cache_rows": torch.zeros(10_000)}
        call = raising(lambda: overload_of(op)(*args, **kwargs, **cache, output_dtype=dtype))
    with torch.no_grad():
        assert bytes_kept(call) < 1


def test_dtypes_are_last() -> None:
    """Dtypes are last: torch converts arguments from the last, and leaks converted ones if a dtype fails."""
    for op in registered():
        kinds = ["ScalarType" in str(a.real_type) for a in overload_of(op)._schema.arguments]
        assert not any(kinds[:-1]), op


#: The number that stands for a dtype at the ABI.
OF_A_DTYPE = "torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype))"


def test_torch_converts_no_handles() -> None:
    """Only core/received.h receives strings: torch's conversion leaks them, and freeing afterwards frees twice."""
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu") and path.name not in ("received.h", "boxing.h"):
            text = path.read_text().replace(OF_A_DTYPE, "")
            assert not re.search(r"TORCH_BOX|ToImpl|detail::(to|from)\b|\.impl\(", text), path
    boxing = (CSRC / "core" / "boxing.h").read_text()
    assert "detail::to<" not in boxing
    assert "ToImpl" not in boxing
    received = (CSRC / "core" / "received.h").read_text()
    handled = re.findall(r"detail::to<([^>]*)>", received)
    assert sorted(handled) == ["Handle", "StableIValue*", "T"], handled


#: Prints by how many bytes a training of a model with an MLP has grown.
TRAINING = """
import torch
import rec_kernels as rk
from rec_kernels.testing import jagged_batch
from test_leaks import bytes_in_use

torch.manual_seed(0)
torch.set_num_threads(1)
keys = ["f", "g"]
tables = [rk.EmbeddingBagConfig(100, 16, name=k, feature_names=[k]) for k in keys]
collection = rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=0.01))
mlp = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(mlp.parameters(), lr=0.01)
values, offsets = jagged_batch([100, 100], 32)
batch = rk.KeyedJaggedTensor(keys, values, offsets=offsets)

def step():
    optimizer.zero_grad()
    mlp(collection(batch).values()).square().mean().backward()
    optimizer.step()

for _ in range(100):
    step()
before = bytes_in_use()
for _ in range(2000):
    step()
print(bytes_in_use() - before)
"""


@needs_glibc
def test_training_does_not_grow() -> None:
    """2,000 steps of a collection and an MLP in a subprocess grow memory by less than 10 MB."""
    done = run_script(TRAINING)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10e6
