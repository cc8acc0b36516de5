"""Implementations of lookup and update: our ops with and without autograd, our Triton kernels, torch, FBGEMM.

All of them work on the same tables, ids and gradient, except FBGEMM, which keeps a copy of the tables.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

import rec_kernels as rk
from bench.gpu.cases import ADAGRAD, ADAM, batches_of_ids, is_weighted
from bench.peers import fbgemm_modules
from bench.shapes import Workload
from rec_kernels._triton_versions import UnsupportedTritonError

LR, EPS, BETAS = 0.01, 1e-8, (0.9, 0.999)


class Tables:
    """The memory of a workload on a device."""

    def __init__(self, w: Workload, device: torch.device) -> None:
        self.workload, self.device = w, device
        self.batches = batches_of_ids(w, device)
        #: Input of the implementations: [T * B * L], key-major. CUDA graphs replay on the same memory.
        self.ids = self.batches[0].clone()
        self.offsets = torch.arange(0, len(self.ids) + 1, w.bag, device=device)
        self.grad = torch.randn(w.batch, w.tables * w.dim, device=device)
        #: [N], or None: each id's factor.
        self.factors = torch.rand(len(self.ids), device=device) if is_weighted(w) else None
        self.weights = torch.empty(w.tables * w.rows * w.dim, device=device).uniform_(-0.1, 0.1)

    def use(self, turn: int) -> None:
        """Copies the next batch to the implementations' input."""
        self.ids.copy_(self.batches[turn % len(self.batches)])

    @property
    def tables(self) -> list[Tensor]:
        """T views [E, D] of the weights."""
        w = self.workload
        return list(self.weights.view(w.tables, w.rows, w.dim))

    @property
    def ids_of_tables(self) -> list[Tensor]:
        """T views [B * L] of the ids."""
        return list(self.ids.view(self.workload.tables, -1))

    @property
    def factors_of_tables(self) -> list[Tensor | None]:
        """T views [B * L] of the factors."""
        tables = self.workload.tables
        return [None] * tables if self.factors is None else list(self.factors.view(tables, -1))

    @property
    def grads_of_tables(self) -> list[Tensor]:
        """T views [B, D] of the gradient."""
        w = self.workload
        return list(self.grad.view(w.batch, w.tables, w.dim).unbind(1))

    @functools.cached_property
    def layout(self) -> dict[str, object]:
        """``layout`` and ``layout_sizes`` of our ops, with consecutive tables."""
        w = self.workload
        return rk.table_layout([w.rows] * w.tables, [w.dim] * w.tables, device=self.device)._asdict()


class Implementation(Protocol):
    """The operations with one optimizer. A CUDA graph can capture those in ``captures``."""

    captures: frozenset[str]
    #: T tables [E, D] that are read and updated.
    tables: list[Tensor]
    #: T tensors of optimizer state, [E] or (element-wise) [E, D], of Adam T pairs; None without state.
    state: list | None
    #: True if an update adds the gradient's terms to a row one by one, rounding the row each time.
    adds_to_rows: bool

    def forward(self) -> object:
        """The pooled output: [B, T * D], or T outputs [B, D]."""

    def before(self, operation: str) -> None:
        """Prepares an operation outside the timed region: autograd's backward needs a forward."""

    def forget(self) -> None:
        """Resets Adam, so that the next update is its first; called only for Adam."""

    def backward(self) -> None:
        """Runs the backward and the update, given the output's gradient."""

    def step(self) -> None:
        """Runs forward, then backward."""


class _Kernels:
    """Kernels of rec_kernels, called directly; ``functions`` maps names to them."""

    captures = frozenset({"forward", "backward", "step"})
    adds_to_rows = False

    def __init__(self, data: Tables, optimizer: str, functions: object) -> None:
        self.data, self.functions, self.tables = data, functions, data.tables
        w, device = data.workload, data.device
        self.sum = torch.zeros(w.tables * w.rows, device=device) if optimizer == ADAGRAD else None
        self.state = None if self.sum is None else list(self.sum.view(w.tables, -1))
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.lr = torch.tensor(LR, device=device)
        self.options: dict[str, object] = {"optimizer": optimizer, "eps": EPS}
        if optimizer == ADAM:
            moments = [torch.zeros_like(data.weights) for _ in range(2)]
            self.state = list(zip(*(list(m.view(w.tables, w.rows, w.dim)) for m in moments), strict=True))
            self.options |= {
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
                "beta_powers": torch.ones(2, device=device),
            }
        if data.factors is not None:
            self.options["per_sample_weights"] = data.factors

    def forget(self) -> None:
        """Zeros Adam's state and step counts, so that the next update is the first."""
        for moments in self.state or []:
            for moment in moments:
                moment.zero_()
        self.count.zero_()
        self.options["beta_powers"].fill_(1)

    def _lookup(self) -> tuple[Tensor, Tensor]:
        data = self.data
        options = data.layout | {"per_sample_weights": data.factors}
        return self.functions.embedding_bag.layout(data.weights, data.ids, data.offsets, **options)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._lookup()[0]

    def before(self, operation: str) -> None:
        pass

    def backward(self, status: Tensor | None = None) -> None:
        data, mine = self.data, (self.data.weights, self.sum, self.count, self.lr)
        options = data.layout | self.options | {"status": status}
        self.functions.embedding_bag_backward_fused_.layout(*mine, data.grad, data.ids, data.offsets, **options)

    def step(self) -> None:
        _, status = self._lookup()
        self.backward(status)


class Triton(_Kernels):
    """Functions of rec_kernels.triton, called directly, without autograd."""

    def __init__(self, data: Tables, optimizer: str) -> None:
        # Imported lazily: importing Triton takes seconds, and the compiled library may be in use instead.
        from rec_kernels import triton

        super().__init__(data, optimizer, triton)


class Ops(_Kernels):
    """torch.ops.rec_kernels, called directly, so that a CUDA graph can capture the backward without autograd."""

    def __init__(self, data: Tables, optimizer: str) -> None:
        super().__init__(data, optimizer, torch.ops.rec_kernels)


class _Autograd:
    """Base class of implementations whose backward needs its own forward."""

    _output: object = None
    adds_to_rows = False

    def before(self, operation: str) -> None:
        self._output = self._lookup() if operation == "backward" else None

    def forward(self) -> object:
        with torch.no_grad():
            return self._lookup()

    def step(self) -> None:
        self._output = self._lookup()
        self.backward()


class Ours(_Autograd):
    """torch.ops.rec_kernels through autograd, as in a model."""

    captures = frozenset({"forward", "step"})

    def __init__(self, data: Tables, optimizer: str) -> None:
        kernels = _Kernels(data, optimizer, torch.ops.rec_kernels)
        self.data, self.tables, self.state, self.forget = data, kernels.tables, kernels.state, kernels.forget
        self.token = torch.empty(0, device=data.device, requires_grad=True)
        self.state_arguments = (data.weights, kernels.sum, kernels.count, kernels.lr, self.token)
        self.options = data.layout | kernels.options

    def _lookup(self) -> Tensor:
        bags = self.data.ids, self.data.offsets
        return torch.ops.rec_kernels.embedding_bag_fused.layout(*self.state_arguments, *bags, **self.options)[0]

    def backward(self) -> None:
        torch.autograd.grad(self._output, self.token, self.data.grad)
        self._output = None


class Torch(_Autograd):
    """torch.nn.functional.embedding_bag per table, sparse gradients, torch.optim.SGD or (element-wise) Adagrad."""

    # Coalescing a sparse gradient synchronizes with the GPU, which graph capture does not allow.
    captures = frozenset({"forward"})

    def __init__(self, data: Tables, optimizer: str) -> None:
        self.data, self.tables, self.state = data, data.tables, None
        self.parameters = [torch.nn.Parameter(table) for table in self.tables]
        if optimizer == ADAGRAD:
            self.optimizer = torch.optim.Adagrad(self.parameters, lr=LR, eps=EPS)
            self.state = [self.optimizer.state[p]["sum"] for p in self.parameters]
        else:
            self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
            # torch's SGD adds a sparse gradient to the table without coalescing it.
            self.adds_to_rows = True
        w = data.workload
        self.starts = data.offsets[: w.batch].clone()

    def _lookup(self) -> list[Tensor]:
        lookup = functools.partial(torch.nn.functional.embedding_bag, offsets=self.starts, mode="sum", sparse=True)
        parts = zip(self.data.ids_of_tables, self.parameters, self.data.factors_of_tables, strict=True)
        return [lookup(ids, table, per_sample_weights=factors) for ids, table, factors in parts]

    def backward(self) -> None:
        torch.autograd.backward(self._output, self.data.grads_of_tables)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._output = None


class Fbgemm(_Autograd):
    """FBGEMM's SplitTableBatchedEmbeddingBagsCodegen on its own copy of the tables, the optimizer fused."""

    captures = frozenset({"forward", "step"})

    def __init__(self, data: Tables, optimizer: str) -> None:
        (configs, fbgemm), w = fbgemm_modules(), data.workload
        place = ("HOST", "CPU") if data.device.type == "cpu" else ("DEVICE", "CUDA")
        spec = (w.rows, w.dim, fbgemm.EmbeddingLocation[place[0]], fbgemm.ComputeDevice[place[1]])
        name = "EXACT_ROWWISE_ADAGRAD" if optimizer == ADAGRAD else "EXACT_SGD"
        self.data, kind = data, configs.EmbOptimType[name]
        self.module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * w.tables, optimizer=kind, learning_rate=LR, eps=EPS
        )
        self.tables = self.module.split_embedding_weights()
        for mine, table in zip(self.tables, data.tables, strict=True):
            mine.copy_(table)
        self.state = [sums[0] for sums in self.module.split_optimizer_states()] if optimizer == ADAGRAD else None

    def _lookup(self) -> Tensor:
        return self.module(self.data.ids, self.data.offsets, per_sample_weights=self.data.factors)

    def backward(self) -> None:
        self._output.backward(self.data.grad)
        self._output = None


def _why_not_ours(device: torch.device) -> str | None:
    return None if device.type == "cpu" else rk.build_info()["cuda_unavailable"]


def _why_not_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on CPU tensors Triton needs TRITON_INTERPRET=1"
    try:
        importlib.import_module("rec_kernels.triton")
    except UnsupportedTritonError as error:
        return str(error)
    return None


def _why_not_fbgemm(device: torch.device) -> str | None:
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return "fbgemm_gpu is not installed"
    try:
        # A CPU build also imports on a machine with a GPU, and a build for another torch fails in various ways.
        probe = Fbgemm(Tables(Workload("probe", 1, 1, 4, 16, 1), device), ADAGRAD)
        probe.step()
        probe.forward()[0, 0].item()
    except Exception as error:
        return f"fbgemm_gpu is installed but does not run here: {type(error).__name__}: {error}".splitlines()[0]
    return None


Make = Callable[[Tables, str], Implementation]

#: Timed operations of an implementation, if not all. The forward and the step of "ops" are already captured in the
#: graphs of "ours".
ONLY = {"ops": ("backward",)}
#: Implementations timed with Adam. The others define Adam differently, so ours is compared with published figures.
WITH_ADAM = ("ours", "ops")


def _kinds() -> Iterator[tuple[str, Make, Callable[[torch.device], str | None]]]:
    yield "ours", Ours, _why_not_ours
    yield "ops", Ops, _why_not_ours
    yield "triton", Triton, _why_not_triton
    yield "torch", Torch, lambda device: None
    yield "fbgemm", Fbgemm, _why_not_fbgemm


def available(device: torch.device) -> tuple[dict[str, Make], dict[str, str]]:
    """Returns the available implementations, and the reasons why others are left out, by name."""
    reasons = {name: why(device) for name, _, why in _kinds()}
    found = {name: make for name, make, _ in _kinds() if reasons[name] is None}
    return found, {name: reason for name, reason in reasons.items() if reason is not None}
