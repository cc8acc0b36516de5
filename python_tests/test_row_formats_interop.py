"""Rows of other libraries: torch's and FBGEMM's integer rows, FBGEMM's inference tables, torch's dtypes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from types import ModuleType

import numpy as np
import pytest
import torch
from row_format_bytes import INTEGERS
from row_format_cases import PREPACK, finite_rows, plain_rows
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import assert_same_sum, same_bits

quantized = torch.ops.quantized
UNPACK = {
    "int8": quantized.embedding_bag_byte_unpack,
    "int4": quantized.embedding_bag_4bit_unpack,
    "int2": quantized.embedding_bag_2bit_unpack,
}
LOOKUP = {
    "int8": quantized.embedding_bag_byte_rowwise_offsets,
    "int4": quantized.embedding_bag_4bit_rowwise_offsets,
    "int2": quantized.embedding_bag_2bit_rowwise_offsets,
}
GRID = {"int8": 8, "int4": 4, "int2": 4}  # bytes of scale and bias
needs_fbgemm = pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="fbgemm_gpu is not installed")


def fbgemm() -> ModuleType:
    """fbgemm_gpu's inference module; importing it registers torch.ops.fbgemm and prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from fbgemm_gpu import split_table_batched_embeddings_ops_inference as module
    return module


@pytest.mark.parametrize("format", INTEGERS)
def test_where_prepack_differs(format: str) -> None:
    """torch's zero bias may have another sign, depending on D; it stores overflows as Inf, ours as a NaN row."""
    x = finite_rows(100)
    ours, theirs = rk.quantize_rows(x, format), PREPACK[format](x)
    differs = (ours != theirs).any(1)
    lost = rk.dequantize_rows(ours, format, 100).isnan().all(1)
    assert lost.any()
    grid = theirs[:, -GRID[format] :].clone().view(torch.float32 if format == "int8" else torch.float16)
    assert torch.equal(grid.isfinite().all(1), ~lost)
    for row in (differs & ~lost).nonzero().flatten().tolist():
        assert x[row].amin() == 0
        change = ours[row] ^ theirs[row]
        assert change.tolist() == [0] * (len(change) - 1) + [128]


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_torch_reads_rows(format: str, rounding: str) -> None:
    """torch unpacks rows or looks them up, also after stochastic rounding."""
    x = plain_rows(64, format)
    rows = rk.quantize_rows(x, format, rounding=rounding, seed=5)
    numbers = rk.dequantize_rows(rows, format, 64)
    kept = numbers.isfinite().all(1)  # a scale rounded up may overflow
    assert kept.sum() > 50
    rows, numbers = rows[kept], numbers[kept]
    assert torch.equal(UNPACK[format](rows), numbers)
    count = len(rows)
    bags = LOOKUP[format](rows, torch.arange(count), torch.arange(count + 1), include_last_offset=True, mode=0)
    assert torch.equal(bags, numbers)


@needs_fbgemm
@pytest.mark.parametrize("format", INTEGERS)
def test_fbgemm_fused_rows(format: str) -> None:
    """FBGEMM's fused row-wise quantization has equal bytes in both directions."""
    fbgemm()
    ops, bits = torch.ops.fbgemm, INTEGERS[format]
    x = plain_rows(64, format)
    rows = rk.quantize_rows(x, format)
    if format == "int8":
        theirs = ops.FloatToFused8BitRowwiseQuantized(x)
        numbers = ops.Fused8BitRowwiseQuantizedToFloat(rows)
    else:
        theirs = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(x, bits)
        numbers = ops.FusedNBitRowwiseQuantizedSBHalfToFloat(rows, bits)
    assert torch.equal(rows, theirs)
    assert torch.equal(numbers, rk.dequantize_rows(rows, format, 64))


@needs_fbgemm
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pruned_tables(pooling: str) -> None:
    """Pruned ids are left out of sums as in FBGEMM, but FBGEMM counts them in means."""
    module = fbgemm()
    remapping = torch.full((40,), -1, dtype=torch.int32)
    remapping[::2] = torch.arange(20, dtype=torch.int32)
    bags = module.IntNBitTableBatchedEmbeddingBagsCodegen(
        [("table", 20, 8, module.SparseType.INT8, module.EmbeddingLocation.HOST)],
        device="cpu",
        output_dtype=module.SparseType.FP32,
        index_remapping=[remapping],
        pooling_mode=module.PoolingMode[pooling.upper()],
    )
    bags.fill_random_weights()
    rows = rk.rows_to_fbgemm(rk.quantize_rows(torch.randn(20, 8), "int8"), "int8", 8)
    bags.split_embedding_weights(split_scale_shifts=False)[0][0].copy_(rows)
    table = rk.EmbeddingBagConfig(20, 8, name="t", feature_names=["f"], format="int8", pooling=pooling)
    ours = rk.EmbeddingBagCollection([table], bounds_check="ignore")
    with torch.no_grad():
        ours.embedding_bags["t"].weight.copy_(rk.rows_from_fbgemm(rows, "int8", 8))
    ids = torch.arange(40).view(4, 10)
    found = ours.for_serving()({"f": remapping[ids]}).values()
    theirs = bags(ids.flatten().int(), torch.arange(0, 41, 10, dtype=torch.int32))
    torch.testing.assert_close(found / (2 if pooling == "mean" else 1), theirs)


def fbgemm_lookup(
    table: Tensor, format: str, columns: int, alignment: int | None, ids: Tensor, offsets: Tensor
) -> Tensor:
    """Pooled float32 rows of an inference table whose memory is a copy of ``table``."""
    module = fbgemm()
    kind = getattr(module.SparseType, format.upper())
    spec = ("table", len(table), columns, kind, module.EmbeddingLocation.HOST)
    bags = module.IntNBitTableBatchedEmbeddingBagsCodegen(
        [spec], device="cpu", output_dtype=module.SparseType.FP32, row_alignment=alignment
    )
    bags.fill_random_weights()
    memory = bags.split_embedding_weights(split_scale_shifts=False)[0][0]
    assert memory.shape == table.shape
    memory.copy_(table)
    return bags(ids.int(), offsets.int())


@needs_fbgemm
@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("alignment", [None, 16])
@pytest.mark.parametrize("columns", [4, 36, 128])
def test_fbgemm_inference(format: str, alignment: int | None, columns: int) -> None:
    """IntNBitTableBatchedEmbeddingBagsCodegen looks up the rows' values, and its rows can be converted back."""
    x = torch.cat([torch.randn(40, columns) * torch.exp2(torch.randint(-8, 8, (40, 1))), torch.zeros(2, columns)])
    rows = rk.quantize_rows(x, format)
    table = rk.rows_to_fbgemm(rows, format, columns, row_alignment=alignment or 1)
    back = rk.rows_from_fbgemm(table, format, columns)
    numbers = rk.dequantize_rows(back, format, columns)
    every = torch.arange(42)
    assert torch.equal(fbgemm_lookup(table, format, columns, alignment, every, torch.arange(43)), numbers)
    ids, offsets = torch.randint(0, 42, (60,)), torch.arange(0, 61, 3)
    sums = torch.nn.functional.embedding_bag(ids, numbers, offsets[:-1], mode="sum")
    # FBGEMM adds each row's bias and its code * scale, |value| + |bias| at most, one after the other.
    size = numbers.double().abs() + 2 * numbers.double().amin(1, keepdim=True).abs()
    magnitude = torch.nn.functional.embedding_bag(ids, size, offsets[:-1], mode="sum")
    assert_same_sum(fbgemm_lookup(table, format, columns, alignment, ids, offsets), sums, magnitude, terms=6)
    if format == "int8":
        codes, grid = rows.split([columns, 8], dim=1)
        halved = grid.clone(memory_format=torch.contiguous_format).view(torch.float32).half().float().view(torch.uint8)
        assert torch.equal(back, torch.cat([codes, halved], dim=1))
        assert torch.equal(rk.rows_to_fbgemm(back, format, columns, row_alignment=alignment or 1), table)
    else:
        assert torch.equal(back, rows)


def test_fbgemm_layout_by_hand() -> None:
    """Scale and bias as leading float16, codes, zeros up to the alignment; NaN rows and strided rows."""
    x = torch.tensor([[0.0, 255.0, 2.0, 3.0]])
    assert rk.rows_to_fbgemm(rk.quantize_rows(x, "int8"), "int8", 4).tolist() == [[0, 0x3C, 0, 0, 0, 255, 2, 3]]
    x = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    assert rk.rows_to_fbgemm(rk.quantize_rows(x, "int2"), "int2", 4, row_alignment=16).tolist() == [
        [0, 0x3C, 0, 0xBC, 0b11100100] + [0] * 11
    ]
    lost = torch.tensor([[3e38, -3e38]])
    assert (
        rk.dequantize_rows(
            rk.rows_from_fbgemm(rk.rows_to_fbgemm(rk.quantize_rows(lost, "int8"), "int8", 2), "int8", 2), "int8", 2
        )
        .isnan()
        .all()
    )
    x = torch.randn(6, 8)
    for format in INTEGERS:
        rows = rk.quantize_rows(x, format)
        wide = torch.zeros(6, rows.shape[1] + 1, dtype=torch.uint8)
        wide[:, 1:] = rows
        table = rk.rows_to_fbgemm(rows, format, 8)
        for strided in (wide[:, 1:], rows.T.contiguous().T):
            assert torch.equal(rk.rows_to_fbgemm(strided, format, 8), table)
        assert torch.equal(rk.rows_to_fbgemm(wide[::2, 1:], format, 8), table[::2])
        assert torch.equal(rk.rows_from_fbgemm(table[1:2], format, 8), rk.rows_from_fbgemm(table, format, 8)[1:2])
        assert rk.rows_to_fbgemm(rows[:0], format, 8).shape == (0, table.shape[1])


@pytest.mark.parametrize(
    ("rows", "format", "columns", "message"),
    [
        (torch.zeros(1, 8), "int4", 8, "rows must be uint8 with 2 dimensions, got torch.float32"),
        (torch.zeros(8).byte(), "int4", 8, r"rows must be uint8 with 2 dimensions, got torch.uint8 \[8\]"),
        (torch.zeros(1, 8).byte(), "mx6", 8, 'format must be one of int8, int4, int2; got "mx6"'),
        (torch.zeros(1, 8).byte(), "int4", 7, 'embedding_dim = 7 must be a positive multiple of 2 for "int4"'),
        (torch.zeros(1, 8).byte(), "int2", 0, 'embedding_dim = 0 must be a positive multiple of 4 for "int2"'),
        (torch.zeros(1, 9).byte(), "int4", 12, 'rows must be .*10 bytes wide for format "int4" and embedding_dim = 12'),
    ],
)
def test_bad_rows_for_fbgemm(rows: Tensor, format: str, columns: int, message: str) -> None:
    """Both directions reject bad rows."""
    for convert in (rk.rows_to_fbgemm, rk.rows_from_fbgemm):
        with pytest.raises(ValueError, match=message):
            convert(rows, format, columns)


def test_what_a_half_cannot_hold() -> None:
    """int8 rows beyond float16 are rejected with their row; an alignment must be positive."""
    rows = rk.quantize_rows(torch.tensor([[0.0, 1.0], [7e4, 7.1e4]]), "int8")
    with pytest.raises(ValueError, match=r"rows\[1\] has scale 3.92157 and bias 70000"):
        rk.rows_to_fbgemm(rows, "int8", 2)
    with pytest.raises(ValueError, match="row_alignment = 0 must be at least 1"):
        rk.rows_to_fbgemm(rows, "int8", 2, row_alignment=0)


FLOATS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}


@pytest.mark.parametrize("format", FLOATS)
def test_codes_are_torchs_floats(format: str) -> None:
    """The first plane viewed as torch's dtype, times the last as float8_e8m0fnu, is the row."""
    blocks = 5
    x = torch.randn(50, 32 * blocks) * torch.exp2(torch.randint(-60, 60, (50, blocks))).repeat_interleave(32, dim=1)
    rows = rk.quantize_rows(x, format)
    size = rows.shape[1] - blocks
    codes, scales = rows[:, :size].view(FLOATS[format]), rows[:, size:].view(torch.float8_e8m0fnu)
    if format == "mxfp4_e2m1":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        # torch has the dtype, two codes to an element with the first in the low bits, but no conversion of it.
        assert codes.shape == (50, 16 * blocks)
        packed = codes.view(torch.uint8).numpy()
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(50, -1)
        elements = torch.from_numpy(nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    else:
        elements = codes.float()
        block_scale = scales.float().repeat_interleave(32, dim=1)
        largest = torch.finfo(FLOATS[format]).max
        assert torch.equal((x / block_scale).clamp(-largest, largest).to(FLOATS[format]).float(), elements)
    product = elements * scales.float().repeat_interleave(32, dim=1)
    assert same_bits(product, rk.dequantize_rows(rows, format, 32 * blocks))


def test_mxint8_codes_are_int8() -> None:
    """mxint8 is two's complement, in steps of 2^-6 of the scale."""
    x = torch.randn(20, 64)
    rows = rk.quantize_rows(x, "mxint8")
    codes, scales = rows[:, :64].view(torch.int8), rows[:, 64:].view(torch.float8_e8m0fnu)
    product = codes.float() / 64 * scales.float().repeat_interleave(32, dim=1)
    assert same_bits(product, rk.dequantize_rows(rows, "mxint8", 64))
