"""docs/fbgemm.md names everything in the installed FBGEMM, and its recipes have the results of FBGEMM's ops."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rec_kernels as rk

pytest.importorskip("fbgemm_gpu")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "fbgemm.md").read_text()
#: Suffixes of ops that implement parts of another FBGEMM op.
PARTS = "(_backward|_forward|_cpu|_cuda|_gpu|_impl|_v2|_out|_function|_auto_grad|_split|_tensor|_inference)"
PARTS += "|(_input1D|_2d_weights|_byte|_grad|_to_cpu)"


def missing(names: Iterable[str]) -> list[str]:
    """The names that no code of the page's tables matches."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    patterns = [re.sub(r"\(.*\)", "", code) for cell in cells for code in re.findall("`([^`]+)`", cell)]
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def test_ops() -> None:
    """Every op that FBGEMM registers has a row in the tables, itself or as a part of another op."""
    schemas = torch._C._jit_get_all_schemas()
    found = {schema.name.split("::")[1] for schema in schemas if schema.name.startswith("fbgemm::")}
    assert len(found) > 100
    assert [name for name in missing(sorted(found)) if missing([re.sub(f"({PARTS})+$", "", name)])] == []


def test_arguments_and_methods() -> None:
    """Every argument of the training module and of its lookup, every method and optimizer has a row."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Tables

    arguments = [name for f in (Tables.__init__, Tables.forward) for name in inspect.signature(f).parameters]
    assert missing(name for name in arguments if name != "self") == []
    methods = {name for name, value in vars(Tables).items() if callable(value) and not name.startswith("_")}
    assert missing(methods - {"forward"}) == []
    assert missing(kind.name for kind in EmbOptimType) == []


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_recipes(ids: torch.dtype) -> None:
    """The page's recipes have FBGEMM's results on random bags, including empty ones."""
    fbgemm: Any = torch.ops.fbgemm
    lengths = torch.randint(4, (30,), generator=torch.Generator().manual_seed(0))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    values, rows = torch.randint(100, (total,)).to(ids), torch.randn(total, 4)
    dense, mask = torch.randn(30, 3, 4), torch.rand(total) < 0.5

    def same(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, check_dtype=False)

    same(offsets, fbgemm.asynchronous_complete_cumsum(lengths))
    cut = fbgemm.jagged_1d_to_truncated_values(values, lengths.to(ids), 2)
    same(rk.jagged_windows(values, offsets[:-1], lengths.clamp(max=2))[0], cut)
    kept, counts = fbgemm.masked_select_jagged_1d(values, lengths, mask)
    same(values[mask], kept)
    same(torch.nn.functional.pad(mask.cumsum(0), (1, 0))[offsets].diff(), counts)
    places = torch.arange(total) - offsets[:-1].repeat_interleave(lengths)
    same(places, fbgemm.offsets_range(offsets[:-1].contiguous(), total))
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets)
    same(nested.softmax(dim=1).values(), fbgemm.jagged_softmax(rows, offsets, 3)[0])
    factors = torch.randn(30, 4, 5)
    same((nested @ factors).values(), fbgemm.jagged_dense_bmm(rows, offsets, factors, 3)[0])
    padded = rk.JaggedTensor.from_dense_lengths(dense, lengths).values()
    same(rows + padded, fbgemm.jagged_dense_elementwise_add_jagged_output(rows, [offsets], dense)[0])
    same(rows * padded, fbgemm.jagged_dense_elementwise_mul(rows, [offsets], dense)[0])
    column = rows[:, 0].contiguous()
    same(torch.segment_reduce(column, "sum", offsets=offsets), fbgemm.segment_sum_csr(1, offsets, column))
    packed = rk.JaggedTensor(rows, offsets=offsets).to_padded_dense(3)
    same(packed, fbgemm.pack_segments(rows, lengths, 3))
    same(packed, fbgemm.jagged_to_padded_dense(rows, [offsets], [3], 0.0))
