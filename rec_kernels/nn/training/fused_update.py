"""Update of a collection with a fused optimizer: hyperparameters, loss scaling, deferred updates."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.layout import LayoutBuffers
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.storage import zeros
from rec_kernels.nn.training.accumulate import Lookup, Pending
from rec_kernels.nn.training.fused_optimizer import FusedOptimizer, RateGroup
from rec_kernels.nn.training.tied_weights import DenseGradients
from rec_kernels.ops.autograd import arguments_of, call
from rec_kernels.ops.embedding_bag_autograd import call_with_updates, overflow_of, update_by_each

_ops = torch.ops.rec_kernels

Buffers = Mapping[str, Any]


def optimizer_tensors(features: FeatureMap, device: torch.device | str | None) -> dict[str, Tensor]:
    """Creates the tensors that updates of a collection read and write.

    ``lr``, ``step`` and ``beta_powers`` are scalars or short vectors; ``lr`` has one element per table if a table has
    its own. ``_sum``, ``_exp_avg`` and ``_exp_avg_sq`` hold the state of all tables, if the optimizer has this kind.
    With several optimizers, each has its own state, with its index in the name, and those with betas their own
    ``beta_powers``.
    """
    tensors: dict[str, Tensor] = {}
    default = features.optimizers.default
    if default is not None:
        size = [max(features.table_ids) + 1] if any(t.rate is not None for t in features.tables) else []
        tensors["lr"] = torch.full(size, default.lr, dtype=torch.float32, device=device)
        tensors["step"] = torch.zeros((), dtype=torch.int64, device=device)
    for number, places in enumerate(features.states):
        for kind in places.kinds:
            tensors[features.state_name(kind, number)] = zeros(places.size(kind), places.dtype(kind), device)
    for name in power_names(features.optimizers.distinct).values():
        tensors[name] = torch.ones(2, dtype=torch.float32, device=device)
    return tensors


def power_names(optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Maps the index of each optimizer with powers of beta to their name in a state."""
    having = [number for number, optimizer in enumerate(optimizers) if "exp_avg" in optimizer.state]
    return {number: f"beta_powers_{i}" if i else "beta_powers" for i, number in enumerate(having)}


def fit_powers(state_dict: dict, prefix: str, optimizers: Sequence[Optimizer]) -> None:
    """Gives each optimizer in a state the powers of its betas after ``step`` updates.

    They follow from ``step`` and the betas, bit for bit, although tables and optimizers of the state may be others.
    """
    step = state_dict.get(f"{prefix}step")
    if not isinstance(step, Tensor) or step.is_meta or isinstance(step, FakeTensor) or step.dim() or int(step) < 0:
        return
    for number, name in power_names(optimizers).items():
        powers = [_power_after(beta, int(step)) for beta in cast(Any, optimizers[number]).betas]
        state_dict[prefix + name] = torch.tensor(powers, dtype=torch.float32, device=step.device)


def _power_after(beta: float, steps: int) -> float:
    """``beta ** steps``, by repeated float32 multiplication as updates compute it."""
    power = np.float32(1)
    while steps > 0:
        factors = np.full(min(steps, 1 << 16), beta, dtype=np.float32)
        factors[0] *= power
        before, power = power, np.multiply.accumulate(factors)[-1]
        if power == before:
            break
        steps -= len(factors)
    return float(power)


def rate_groups(features: FeatureMap) -> list[RateGroup]:
    """Groups tables by learning rate: one group for the collection's optimizer and rate, then one per other table.

    The first group is omitted if it is empty and others exist. Groups show their optimizer and its hyperparameters if a
    table has its own.
    """
    default: Any = features.optimizers.default
    named = any(table.optimizer is not None for table in features.tables)
    first, others = RateGroup(default.lr, [], [], [], _hyperparameters(default), named), []
    i = 0
    for table in features.tables:
        stored = range(i, i + len(table.stored))
        i = stored.stop
        group = first
        if table.rate is not None:
            group = RateGroup(float(table.rate), [], [], [], _hyperparameters(table.optimizer or default), named)
            others.append(group)
        group.names.append(table.name)
        group.stored.extend(stored)
        group.table_ids.extend(features.table_ids[k] for k in stored)
    return [first, *others] if first.stored or not others else others


def _hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Class name and hyperparameters of an optimizer, without the learning rate, which changes."""
    fields = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}
    return {"optimizer": type(optimizer).__name__} | {name: value for name, value in fields.items() if name != "lr"}


def _state_buffers(features: FeatureMap, number: int) -> dict[str, str]:
    """Maps the ops' arguments for an optimizer's state to buffer names."""
    found = {kind: features.state_name(kind, number) for kind in features.states[number].kinds}
    powers = power_names(features.optimizers.distinct)
    return found | ({"beta_powers": powers[number]} if number in powers else {})


def state_of(buffers: Buffers) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The ops' first arguments. Reading the dict avoids nn.Module's slow attribute lookup."""
    return buffers["_weights"], buffers.get("_sum"), buffers["step"], buffers["lr"]


def update_tables(
    lookup: Lookup, buffers: Buffers, options: dict[str, object], updates: Sequence[dict[str, object]]
) -> None:
    """Updates the tables with the gradient of a lookup.

    Args:
        options: the ops' arguments by name. updates: the arguments of each optimizer.
    """
    bags = {"grad": lookup.grad, "values": lookup.values, "offsets": lookup.offsets}
    given = arguments_of("embedding_bag_backward_fused_.layout", state_of(buffers), options | bags)
    given |= {"per_sample_weights": lookup.weights, "status": lookup.status}
    with torch.no_grad():
        update_by_each(given, updates)


class FusedUpdate:
    """Updates a collection's tables in the backward.

    ``token`` is the tensor whose gradient makes autograd run a fused update. With a ``GradScaler`` it has one element,
    whose gradient shows whether an update was skipped, and ``fused_optimizer`` exposes it to the scaler; without one it
    is empty.

    Args:
        features: features, tables and optimizers. weights: the tables' parameters.
        buffers: the collection's buffers; methods that call an op also take its flat tensors, by name in one dict.
        dense: watches the parameters for gradients from other uses of the weights.

    Attributes:
        fused_optimizer: the ``torch.optim.Optimizer`` for schedulers and scalers.
        pending: the lookups of the open ``accumulate()`` block, or None.
        has_several: whether the tables have several optimizers, each of which makes its own update.
    """

    token: Any  # a tensor with extra attributes
    dense: DenseGradients

    def __init__(
        self,
        features: FeatureMap,
        weights: list[nn.Parameter],
        buffers: Buffers,
        dense: DenseGradients,
    ) -> None:
        optimizers = features.optimizers.distinct
        self.has_several = len(optimizers) > 1
        self._per_optimizer = [(o.options(), _state_buffers(features, n)) for n, o in enumerate(optimizers)]
        self._options, state = ({"optimizer": "sgd"}, {}) if self.has_several else self._per_optimizer[0]
        self._state = {name: own for name, own in state.items() if name != "sum"}  # a positional argument of the ops
        self.fused_optimizer = FusedOptimizer(weights, rate_groups(features), buffers["lr"], buffers["step"])
        self.pending: Pending | None = None
        self._scaler: GradScaler | None = None
        self._lost_scaler = False  # whether this is a copy of a collection that had one
        self._renew_token(buffers["lr"].device)
        self.tie(weights, buffers, dense)

    def _renew_token(self, device: torch.device) -> None:
        size = 0 if self._scaler is None else 1
        self.token = torch.zeros(size, dtype=torch.float32, device=device, requires_grad=True)
        self._one = torch.ones(1, dtype=torch.float32, device=device)

    def follow(self, weights: list[nn.Parameter], buffers: Buffers) -> None:
        """Rebinds to the collection's tensors after a move."""
        self.token.has_moved = buffers["step"] is not self.fused_optimizer._step  # read by backwards of earlier lookups
        self._renew_token(buffers["lr"].device)
        self.tie(weights, buffers, self.dense)

    def release(self) -> None:
        """Releases the parameters before they are moved."""
        if "dense" in self.__dict__:  # a copy has none yet
            self.dense.release()

    def tie(self, weights: list[nn.Parameter], buffers: Buffers, dense: DenseGradients) -> None:
        """Binds ``fused_optimizer`` to these tensors, and ``dense`` to the parameters."""
        self.dense = dense
        dense.watch(weights)
        self.token.take_over = dense.take_over  # called by the lookups' backward
        self.fused_optimizer.rebind(
            weights, buffers["lr"], buffers["step"], None if self._scaler is None else self.token
        )

    def __getstate__(self) -> dict[str, Any]:
        # No loss is scaled for a copy, and a scaler cannot be pickled between a backward and its update().
        token = torch.empty(0, dtype=torch.float32, device=self.token.device, requires_grad=True)
        lost = self._lost_scaler or self._scaler is not None
        own = {"pending": None, "_scaler": None, "_lost_scaler": lost, "token": token}
        return {name: value for name, value in self.__dict__.items() if name != "dense"} | own

    def alone(self) -> FusedUpdate:
        """A copy for a collection that shares the tables' memory."""
        other = copy.copy(self)
        other.fused_optimizer = copy.copy(self.fused_optimizer)
        return other

    def options(self, buffers: Buffers) -> dict[str, object]:
        """The ops' arguments for the optimizer; with several optimizers, those of SGD without state."""
        if not self._state:
            return self._options.copy()
        return self._options | {name: buffers[own] for name, own in self._state.items()}

    def of_each(self, buffers: Buffers, layouts: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """The arguments of each optimizer's update, which override those of ``options``.

        Args:
            layouts: one per optimizer, from ``LayoutBuffers.of_updates``.
        """
        each = self._per_optimizer if self.has_several else [({}, {})]  # a single optimizer uses those of ``options``
        states = [options | {name: buffers[own] for name, own in state.items()} for options, state in each]
        return [state | layout for state, layout in zip(states, layouts, strict=True)]

    def look_up(
        self,
        buffers: Buffers,
        bags: tuple[Tensor, Tensor],
        options: dict[str, Any],
        layout: LayoutBuffers,
        *,
        is_compiling: bool,
    ) -> tuple[Tensor, Tensor]:
        """Output and status of a lookup whose backward updates the tables; ``options``: the op's, and ``options()``."""
        self.dense.before_lookup(is_compiling=is_compiling)
        options |= self.scaling()
        given = (*state_of(buffers), self.token, *bags)
        if self.has_several:
            output, status = call_with_updates(self.of_each(buffers, layout.of_updates()), *given, **options)
        else:
            output, status = call(_ops.embedding_bag_fused.layout, *given, **options)
        if not is_compiling:
            self.dense.register_lookup(output)
        return output, status

    def refuse_in_block(self, what: str) -> None:
        """Raises RuntimeError inside ``accumulate()``, whose single update has one set of options."""
        if self.pending is not None:
            raise RuntimeError(f"{what} is not allowed inside accumulate(): do it before or after the block")

    def set_grad_scaler(self, scaler: GradScaler | None, weights: list[nn.Parameter], buffers: Buffers) -> None:
        """Implements ``set_grad_scaler()`` of a collection with these tensors."""
        self.refuse_in_block("set_grad_scaler()")
        enabled = getattr(scaler, "is_enabled", None)
        scaler = scaler if enabled is None or enabled() else None
        self.token.has_other_scaler = scaler is not self._scaler  # read by backwards of earlier lookups
        self._scaler, self._lost_scaler = scaler, False
        self.follow(weights, buffers)

    def take_scaler(self, other: FusedUpdate, weights: list[nn.Parameter], buffers: Buffers) -> None:
        """Takes over another update's scaler (or None), for a copy that replaces it."""
        self._scaler, self._lost_scaler = other._scaler, other._lost_scaler
        self.follow(weights, buffers)

    def scaling(self) -> dict[str, Tensor]:
        """The ops' arguments for loss scaling: a copy of the current scale, not the scaler's tensor.

        Raises:
            RuntimeError: this is a copy of a collection with a scaler, and has none.
        """
        if self._scaler is not None:
            if torch.compiler.is_compiling():
                from rec_kernels.ops.graph_breaks import scale_while_traced

                return {"grad_scale": scale_while_traced(self._scaler, self._one)}
            if self.token.is_cuda and torch.cuda.is_current_stream_capturing():
                self.fused_optimizer.is_captured = True
            return {"grad_scale": self._scaler.scale(self._one)}
        if self._lost_scaler:
            raise RuntimeError(
                "this is a copy of a collection with a GradScaler, which copies do not inherit: call "
                "set_grad_scaler() with the scaler of the copy's losses, or with None if they are not scaled"
            )
        return {}

    def found_by(self, scaling: dict[str, Tensor], lookup: Lookup) -> dict[str, Tensor]:
        """Adds to ``scaling`` whether the gradient of a lookup's output overflowed; also records it for the scaler."""
        if not scaling:
            return {}
        overflow, token = overflow_of(lookup.grad) if lookup.found_inf is None else lookup.found_inf, self.token
        if token.grad is None:
            token.grad = torch.zeros_like(token)
        token.grad += overflow
        return scaling | {"found_inf": overflow}

    @contextlib.contextmanager
    def accumulate(self, finish: Callable[[list[Lookup], dict[str, Tensor]], None]) -> Iterator[None]:
        """Collects lookups within the block; at its end, calls ``finish(lookups, scaling)``.

        Raises:
            RuntimeError: the block is nested in another one.
        """
        if self.pending is not None:
            raise RuntimeError("accumulate() blocks of one collection cannot be nested: end the outer block first")
        scaling = self.scaling()
        self.pending = pending = Pending(self.token)
        self.dense.is_deferred = True
        self.dense.take()  # discard leftovers of a failed backward
        try:
            yield
            finish(pending.queue.take(), scaling)
        finally:
            pending.close()
            self.dense.take()
            self.pending, self.dense.is_deferred = None, False
