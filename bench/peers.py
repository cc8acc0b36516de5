"""Peer implementations for comparison: torch, and FBGEMM if it is installed."""

from __future__ import annotations

import contextlib
import io
import mmap
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

import rec_kernels as rk
from bench.shapes import Shape, Workload

LR, EPS = 0.01, 1e-8
HUGE_PAGE = 1 << 21


# torch's optimizers for sparse gradients, by our names.
TORCH_OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
OPTIMIZERS = {
    "rowwise_adagrad": rk.RowwiseAdagrad,
    "adagrad": rk.Adagrad,
    "adam": rk.Adam,
    "rowwise_adam": rk.RowwiseAdam,
    "lamb": rk.LAMB,
}


class TorchTables:
    """One torch.nn.functional.embedding_bag per table; sparse gradients and a torch.optim optimizer for training."""

    def __init__(self, w: Shape, optimizer: str = "adagrad") -> None:
        self.w = w
        self.weights = [torch.nn.Parameter(torch.randn(rows, w.dim) * 0.01) for rows in w.table_rows]
        self.optimizer = TORCH_OPTIMIZERS[optimizer](self.weights, lr=LR, eps=EPS)
        self.starts = [torch.arange(w.batch) * bag for bag in w.table_bags]

    def forward(self, ids: Tensor) -> list[Tensor]:
        """T outputs [B, D]."""
        bags = self.w.split(ids)
        return [
            torch.nn.functional.embedding_bag(i, weight, starts, mode="sum", sparse=True)
            for i, weight, starts in zip(bags, self.weights, self.starts, strict=True)
        ]

    def train(self, ids: Tensor, grad: Tensor) -> None:
        """Forward, backward, optimizer."""
        outputs = self.forward(ids)
        torch.autograd.backward(outputs, list(grad.view(self.w.batch, self.w.tables, -1).unbind(1)))
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchQuotientRemainder(TorchTables):
    """The public recipe: two torch tables per compressed table, each pooled, then multiplied."""

    def __init__(self, w: Workload, collisions: int) -> None:
        super().__init__(w)
        self.buckets = -(-w.rows // collisions)
        rows = [self.buckets, collisions] * w.tables
        self.weights = [torch.nn.Parameter(torch.randn(n, w.dim) * 0.01) for n in rows]
        self.optimizer = torch.optim.Adagrad(self.weights, lr=LR, eps=EPS)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """T outputs [B, D]."""
        outputs, pairs = [], zip(self.weights[::2], self.weights[1::2], strict=True)
        for bags, weights, starts in zip(self.w.split(ids), pairs, self.starts, strict=True):
            rows = bags % self.buckets, bags // self.buckets
            pooled = [
                torch.nn.functional.embedding_bag(i, weight, starts, mode="sum", sparse=True)
                for i, weight in zip(rows, weights, strict=True)
            ]
            outputs.append(pooled[0] * pooled[1])
        return outputs


#: The optimizers that FBGEMM's CPU kernels also have, and the row formats that they train.
FBGEMM_OPTIMIZERS = {"rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adagrad": "EXACT_ADAGRAD"}
FBGEMM_FORMATS = ("fp32", "fp16")


def fbgemm_modules() -> tuple[ModuleType, ModuleType]:
    """Imports FBGEMM's modules of settings and of tables, which print while they are imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        from fbgemm_gpu import split_embedding_configs, split_table_batched_embeddings_ops_training
    return split_embedding_configs, split_table_batched_embeddings_ops_training


def fbgemm_tables(
    sizes: Sequence[tuple[int, int]], format: str = "fp32", optimizer: str = "rowwise_adagrad"
) -> torch.nn.Module:
    """Makes FBGEMM's tables of the given sizes on the CPU, initialized to nonzero values like ours."""
    configs, fbgemm = fbgemm_modules()
    tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(*size, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU) for size in sizes],
        optimizer=configs.EmbOptimType[FBGEMM_OPTIMIZERS[optimizer]],
        weights_precision=configs.SparseType(format),
        learning_rate=LR,
        eps=EPS,
    )
    for weight in tables.split_embedding_weights():
        weight.uniform_(-0.01, 0.01)
    return tables


class Fbgemm:
    """FBGEMM's table-batched embedding with a fused optimizer; rows of float16 are rounded stochastically."""

    def __init__(self, w: Shape, format: str = "fp32", optimizer: str = "rowwise_adagrad") -> None:
        self.module = fbgemm_tables([(rows, w.dim) for rows in w.table_rows], format, optimizer)
        self.offsets = w.offsets()

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T * D]."""
        return self.module(ids, self.offsets)

    def train(self, ids: Tensor, grad: Tensor) -> None:
        """Forward, backward with the update fused in."""
        self.forward(ids).backward(grad)


class FbgemmHugePages(Fbgemm):
    """Fbgemm with rows and state on huge pages, like ours, so that only the kernels differ."""

    def __init__(self, w: Shape) -> None:
        super().__init__(w)
        for name in ("weights_host", "momentum1_host"):
            tensor = getattr(self.module, name)
            tensor.data = in_huge_pages(tensor.data)


def in_huge_pages(x: Tensor) -> Tensor:
    """Copies a tensor to memory with huge pages requested, on systems that grant them."""
    num_bytes = x.numel() * x.element_size()
    memory = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes].view(x.dtype).view(x.shape).copy_(x)


class Ours:
    """rec_kernels.EmbeddingBagCollection with a fused optimizer; rows of a format other than fp32 are rounded
    stochastically."""

    def __init__(
        self, w: Shape, format: str = "fp32", optimizer: str = "rowwise_adagrad", compression=None, cache=None
    ) -> None:
        options = {"format": format, "compression": compression}
        tables = [
            rk.EmbeddingBagConfig(rows, w.dim, name=f"t{t}", feature_names=[f"f{t}"], **options)
            for t, rows in enumerate(w.table_rows)
        ]
        self.module = rk.EmbeddingBagCollection(tables, optimizer=OPTIMIZERS[optimizer](lr=LR, eps=EPS), cache=cache)
        self.keys, self.offsets = self.module.feature_names, w.offsets()

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T * D]."""
        return self.module(rk.KeyedJaggedTensor(self.keys, ids, offsets=self.offsets)).values()

    def train(self, ids: Tensor, grad: Tensor) -> None:
        """Forward, backward with the update fused in."""
        self.forward(ids).backward(grad)


class FbgemmInference:
    """FBGEMM's table-batched lookup of low-precision rows, which cannot be trained; outputs are float32, like ours."""

    FORMATS = ("fp16", "int8", "int4")

    def __init__(self, w: Shape, format: str, ours: Ours) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            from fbgemm_gpu.split_embedding_configs import SparseType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
        specs = [("", rows, w.dim, SparseType(format), EmbeddingLocation.HOST) for rows in w.table_rows]
        self.module = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", output_dtype=SparseType.FP32)
        self.module.initialize_weights()
        for t, (rows, _) in enumerate(self.module.split_embedding_weights(split_scale_shifts=False)):
            own = ours.module.embedding_bags[f"t{t}"].weight.detach()
            rows.copy_(own.view(torch.uint8) if format == "fp16" else rk.rows_to_fbgemm(own, format, w.dim))
        self.offsets = w.offsets()

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T * D]."""
        return self.module(ids, self.offsets)


def fbgemm_ops() -> object | None:
    """torch.ops.fbgemm, or None if it is not installed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError):
        return None
    return torch.ops.fbgemm


def fbgemm_version() -> str | None:
    """Version of the installed FBGEMM package, for CPU or GPU; None where there is none."""
    for package in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def available() -> dict[str, type]:
    """name -> implementation, ours first; FBGEMM only if it can be imported."""
    found: dict[str, type] = {"ours": Ours, "torch": TorchTables}
    return found if fbgemm_ops() is None else found | {"fbgemm": Fbgemm, "fbgemm, huge pages": FbgemmHugePages}
