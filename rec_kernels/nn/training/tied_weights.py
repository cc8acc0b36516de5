"""Tied weights: one update for all gradients of a table that a backward reaches through lookups and through its weight.

torch gives a weight that is also used outside of lookups, as in an output layer, a dense gradient at some point of the
backward; lookups get theirs at others. If a table gets a dense gradient, or a collection has several lookups in one
graph, the table is updated once, after the whole backward. Otherwise the lookup updates at once; the autograd engine
answers this question in 0.1 microseconds per table.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.functional import pad
from torch.utils.checkpoint import CheckpointFunction

from rec_kernels.nn.jagged.select_features import NOTHING_BAD
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.tables.feature_map import FeatureLookup, FeatureMap
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.nn.training.accumulate import Lookup, LookupQueue, join
from rec_kernels.nn.training.dense_parameters import in_backward, mark_fused
from rec_kernels.ops.autograd import node_of_op

_ops, _functorch = torch.ops.rec_kernels, torch._C._functorch
# Bound once: every lookup's backward calls both.
_current_task, _will_run = torch._C._current_graph_task_id, torch._C._will_engine_execute_node

# torch does not expose nested backwards; this frame on the stack identifies one.
_REENTRANT = CheckpointFunction.backward.__code__

#: Maximum elements of a dense gradient that joins an update: 1 GiB of float32.
LARGEST = 1 << 28

_COMPILED = "torch's compiled autograd runs no callbacks there"


class LookupNodes:
    """Weak set of the autograd nodes of lookups whose graphs are alive."""

    def __init__(self) -> None:
        self._nodes: set[weakref.ref] = set()

    def add(self, node: Any) -> None:
        """Adds a node for the lifetime of its graph."""
        self._nodes.add(weakref.ref(node, self._nodes.discard))

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Any]:
        return iter([node for kept in list(self._nodes) if (node := kept()) is not None])


def hook_gradient(weight: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Calls ``hook`` after a leaf has accumulated a gradient, even if it requires none now; returns the handle."""
    wanted = weight.requires_grad
    weight.requires_grad = True  # torch registers hooks only on such tensors, and keeps them
    handle = weight.register_post_accumulate_grad_hook(hook)
    weight.requires_grad = wanted
    return handle


class DenseGradients:
    """Watches the parameters of a collection for gradients that do not come from its lookups.

    Args:
        names: table names. finish: the collection's method that updates tables after a backward, given its lookups;
            ``take()`` then returns the dense gradients. A weak reference, because the collection owns this object.
        refusal: why the tables cannot have dense gradients, for an error; None: they can.

    Attributes:
        is_deferred: whether the update is deferred to the end of an ``accumulate()`` block.
        weights: the tables' parameters; grad_flags: holds ``requires_grad`` of each.
        is_compiled: whether lookups update inside compiled graphs, where they cannot wait for a dense gradient.
    """

    def __init__(self, names: list[str], finish: weakref.WeakMethod, refusal: str | None) -> None:
        self._names, self._finish, self._refusal = names, finish, refusal
        self._open = LookupNodes()
        self.is_deferred = self.is_compiled = False
        self._updated = -1  # last backward (graph task id, increasing) in which a lookup updated at once
        self._queue = LookupQueue()
        self._dense: dict[int, Tensor] = {}
        self._task: int | None = None
        self._forget()

    def _forget(self) -> None:
        self.weights: list[nn.Parameter] = []
        self.grad_flags: list[Any] = []
        self._handles: list[Any] = []
        self.forget_nodes()

    def forget_nodes(self) -> None:
        """Invalidates the parameters' autograd nodes, after ``requires_grad`` has changed."""
        self._accumulators: dict[str, Any] | None = None
        self._has_frozen = False

    def release(self) -> None:
        """Releases the parameters: torch cannot move one whose autograd node is referenced."""
        for handle in self._handles:
            handle.remove()
        self._forget()

    def watch(self, weights: list[nn.Parameter]) -> None:
        """Watches these parameters, those of the tables in order, from now on."""
        self.release()
        self.weights, self.grad_flags = weights, list(map(RequiresGrad.of, weights))
        for i, weight in enumerate(weights):
            mark_fused(weight)
            if weight.dtype != torch.uint8:
                self._handles.append(hook_gradient(weight, _GradientHook(weakref.ref(self), i)))

    def register_lookup(self, output: Tensor) -> None:
        """Registers a lookup whose backward will update the tables."""
        if (node := node_of_op(output)) is not None:
            self._open.add(node)

    def take_over(self, grad: Tensor, given: dict[str, Any]) -> bool:
        """In a lookup's backward: queues its update if it must wait for other gradients; returns whether it did.

        Args:
            grad: gradient of the lookup's output, float32. given: its arguments by the ops' names, and its ``status``.

        Raises:
            RuntimeError: an ``accumulate()`` block is open, and the lookup was made before it.
        """
        if self.is_deferred:
            raise RuntimeError(
                "a lookup made before this accumulate() block runs its backward inside it and has updated "
                "nothing: call the collection inside the block as well"
            )
        if not self.joins():
            return False
        shared = None if given["inverse"] is None else SharedBags(given["inverse"], given["groups"], [], [])
        bags = given["values"], given["offsets"], given["per_sample_weights"]
        self.add(Lookup(grad, *bags, given["status"], given["bag_starts"], shared))
        return True

    def joins(self, *, waits_for_frozen: bool = True) -> bool:
        """In a lookup's backward: whether its update must wait for other gradients of the same backward.

        Args:
            waits_for_frozen: whether it also waits if autograd may have saved a frozen table.
        """
        if self._accumulators is None:
            self._find_nodes()
        task = _current_task()
        if self._task != task:
            self._refuse_nested(task)
            is_compiled = _is_compiled_backward()
            if not self._needs_joint_update():
                if is_compiled or not (self._has_frozen and waits_for_frozen):
                    self._updated = task
                    return False
            elif is_compiled:
                raise RuntimeError(
                    f"{', '.join(self._names)}: gradients of several lookups, or of a lookup and a weight, form "
                    f"one update after the backward, but {_COMPILED}; no table was changed. Run this backward "
                    "without it"
                )
            self._begin_update()
        return True

    def _find_nodes(self) -> None:
        self._warn_of_others()
        tables = zip(self._names, self.weights, strict=True)
        # Autograd may have saved a frozen table, whose version counter it shares with the updated ones.
        self._has_frozen = any(w.is_floating_point() and not w.requires_grad for w in self.weights)
        with torch.inference_mode(False), torch.enable_grad():  # a backward may run in inference mode
            edge = torch.autograd.graph.get_gradient_edge
            self._accumulators = {n: edge(w).node for n, w in tables if w.requires_grad and not w.is_inference()}

    def are_used(self, names: Sequence[str]) -> bool:
        """In a lookup's backward: whether it also gives a gradient to the weight of one of these tables."""
        if names and self._accumulators is None:
            self._find_nodes()
        nodes: Any = self._accumulators
        return any(name in nodes and runs(nodes[name]) for name in names)

    def _warn_of_others(self) -> None:
        """Emits a UserWarning if an optimizer was set to run in the backward for the tables: it never runs."""
        if found := in_backward(self.weights):
            warnings.warn(
                f"{type(found[0]).__name__} was applied in the backward to tables that a fused optimizer "
                "updates: it does not train them. Set the options of tables in their collection's optimizer; "
                "apply it to rk.dense_parameters(model)",
                stacklevel=2,
            )

    def add(self, lookup: Lookup) -> None:
        """Queues a lookup that ``joins()`` the update of the current backward."""
        self._queue.add(lookup)

    def is_waiting(self) -> bool:
        """True in a backward whose joint update has not been made yet."""
        return self._task is not None and self._task == _current_task()

    def _needs_joint_update(self) -> bool:
        """True if the current backward gives a table a dense gradient, or also runs another lookup's backward."""
        try:
            if any(map(_will_run, self._accumulators.values())):
                return True
            return len(self._open) > 1 and sum(map(_will_run, self._open)) > 1
        except RuntimeError:  # torch.autograd.grad with respect to a table: its node does not run
            return False

    def _is_in_reentrant_checkpoint(self) -> bool:
        """True in a reentrant checkpoint's backward if lookups outside of it may be part of the outer backward."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not _REENTRANT:
            frame = frame.f_back
        try:
            return frame is not None and not all(map(_will_run, self._open))
        except RuntimeError:  # as in _needs_joint_update
            return False

    def _begin_update(self) -> None:
        """Schedules the joint update for the end of the current backward. A backward that fails discards it."""
        self._task, self._queue, self._dense = _current_task(), LookupQueue(), {}
        Variable._execution_engine.queue_callback(self._finish_update)

    def _finish_update(self) -> None:
        self._refuse_nested(self._task)
        self._updated = self._task
        lookups, self._task = self._queue.take(), None
        finish = self._finish()
        if finish is not None:
            finish(lookups)

    def before_lookup(self, *, is_compiling: bool) -> None:
        """Raises RuntimeError for a training lookup whose backward would update the tables incorrectly.

        A reentrant checkpoint repeats lookups in the backward; if that has already updated the tables, the rows differ
        from those of the forward. Inside vmap or grad of torch.func, every slice would be an update, or none. Compiled
        lookups are recorded, not checked.
        """
        if is_compiling:
            self.is_compiled = True
        elif torch._C._are_functorch_transforms_active() and not _is_functionalized():
            raise RuntimeError(
                f"{', '.join(self._names)}: tables of a fused optimizer cannot be trained inside torch.func's "
                "transforms (vmap, grad): look them up outside, or under torch.no_grad()"
            )
        elif (task := _current_task()) >= 0:
            self._refuse_nested(task - 1)

    def _refuse_nested(self, task: int) -> None:
        """Raises RuntimeError if a lookup has already updated in a nested backward, which sees no other gradients."""
        if self._updated > task:
            raise RuntimeError(
                f"{', '.join(self._names)}: lookups of these tables were made in a reentrant checkpoint, whose "
                "own backward updated them before this one was done with them: pass use_reentrant=False, or "
                "run all lookups and the backward inside the collection's accumulate(); or another thread "
                "trains them at the same time: train them in one thread"
            )

    def add_dense(self, i: int) -> None:
        """Takes the dense gradient of table i.

        Raises:
            RuntimeError: it cannot be part of an update; it is discarded.
        """
        weight, reason = self.weights[i], self._refusal
        if weight.grad is None:
            return  # torch also calls hooks for undefined gradients
        if reason is None and self.is_compiled:
            reason = "its lookups are compiled, and update the table before this gradient exists"
        if reason is None and not self.is_deferred and _is_compiled_backward():
            reason = f"it would be added after the backward, but {_COMPILED}, outside of accumulate()"
        if reason is None and not self.is_deferred and self._is_in_reentrant_checkpoint():
            reason = (
                "it comes from a reentrant checkpoint, which runs its own backward: pass use_reentrant=False, "
                "or run the lookups and the backward inside accumulate() of the collection"
            )
        if reason is None and weight.grad.numel() > LARGEST:
            reason = f"it has {weight.grad.numel()} elements, and at most {LARGEST} join an update"
        if reason is not None:
            weight.grad = None
            raise RuntimeError(
                f"the weight of table {self._names[i]!r} is also used outside lookups and has a dense gradient, "
                f"which the fused optimizer cannot add to theirs: {reason}. Look its rows up instead, as a "
                "second feature of the table, or build the collection with optimizer=None; weight.detach() has "
                "no gradient"
            )
        self._refuse_nested(_current_task())
        if not self.is_deferred and self._task != _current_task():
            self._begin_update()
        # Taken now: a gradient that a failed backward leaves in ``grad`` would join a later update.
        known = self._dense.get(i)
        self._dense[i], weight.grad = weight.grad if known is None else _sum(known, weight.grad), None

    def take(self) -> dict[int, Tensor]:
        """Removes and returns the dense gradients, by table index in order."""
        found, self._dense = self._dense, {}
        return {i: found[i] for i in sorted(found)}


def runs(node: Any) -> bool:
    """True if the current backward runs a node, or has run it."""
    try:
        return _will_run(node)
    except RuntimeError:  # torch.autograd.grad with respect to the node's tensor: it does not run
        return False


def _is_compiled_backward() -> bool:
    """True in a backward run by torch's compiled autograd, which drops callbacks queued for its end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and compiled.in_compiled_autograd_region


def _is_functionalized() -> bool:
    """True inside torch.func.functionalize, which torch uses to trace, and inside no other transform."""
    return _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Functionalize


class _GradientHook:
    """Parameter hook with a weak reference: a strong one would keep the collection's rows alive."""

    def __init__(self, owner: weakref.ref[DenseGradients], i: int) -> None:
        self._owner, self._i = owner, i

    def __call__(self, _: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.add_dense(self._i)


def join_dense(lookups: Sequence[Lookup], dense: dict[int, Tensor], features: FeatureMap) -> Lookup:
    """Joins lookups and dense gradients into one batch.

    Args:
        lookups: lookups of the features. dense: gradients [E, D] by index of the stored table, dense or sparse.

    Returns:
        A batch with ``bag_starts`` of the features, followed by one feature per table of ``dense``, in order, with one
        bag per row: the gradient of a row is that of a lookup of the row.
    """
    widest = max(features.widths + [features.stored[i].embedding_dim for i in dense])
    own = [_with_own_rows(lookup, features.features, widest) for lookup in lookups]
    device = next(t.device for t in (*dense.values(), *(lookup.grad for lookup in lookups)))
    joined = join(own, len(features.features)) if own else _no_lookup(len(features.features), widest, device)
    rows = [_rows_of(grad) for grad in dense.values()]
    counts = [0, *itertools.accumulate(len(ids) for ids, _ in rows)]
    ends = torch.arange(1, counts[-1] + 1, device=device) + joined.values.shape[0]
    starts = joined.bag_starts[-1] + torch.tensor(counts[1:], dtype=torch.int64, device=device)
    weights = joined.weights
    return Lookup(
        torch.cat([joined.grad, *(pad(grad.float(), (0, widest - grad.shape[1])) for _, grad in rows)]),
        torch.cat([joined.values.long(), *(ids for ids, _ in rows)]),
        torch.cat([joined.offsets.long(), ends]),
        None if weights is None else torch.cat([weights, weights.new_ones(counts[-1])]),
        joined.status,
        torch.cat([joined.bag_starts, starts]),
        found_inf=joined.found_inf,
    )


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two gradients; torch adds a sparse tensor to a dense one only in this order."""
    return b + a if a.layout == torch.sparse_coo and b.layout != torch.sparse_coo else a + b


def _rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The row ids of a gradient [E, D], and their gradients."""
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    return torch.arange(grad.shape[0], device=grad.device), grad


def _no_lookup(features: int, widest: int, device: torch.device) -> Lookup:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    starts, status = empty.new_zeros(features + 1), empty.new_full((2,), NOTHING_BAD)
    grad = torch.zeros(0, widest, dtype=torch.float32, device=device)
    return Lookup(grad, empty, empty.new_zeros(1), None, status, starts)


def _with_own_rows(lookup: Lookup, features: list[FeatureLookup], widest: int) -> Lookup:
    """The lookup with one row of ``grad``, ``widest`` columns, per bag, and only values in bags. Waits for a GPU."""
    count, offsets = len(features), lookup.offsets.long()
    bags = offsets.shape[0] - 1
    starts = lookup.bag_starts
    if starts is None:
        starts = torch.arange(count + 1, device=offsets.device) * (bags // max(count, 1))
    if lookup.bag_starts is None or lookup.shared is not None:
        groups = None if lookup.shared is None else lookup.shared.groups
        sizes, blocks = starts.diff().tolist(), []
        for f, feature in enumerate(features):
            block = lookup.grad[:, feature.column : feature.column + feature.width]
            if groups is not None and groups[f] >= 0:
                block = _ops.expand_backward(block.contiguous(), lookup.shared.inverse[groups[f]], sizes[f])
            blocks.append(pad(block, (0, widest - feature.width)))
        grad = torch.cat(blocks)
    else:
        grad = pad(lookup.grad, (0, widest - lookup.grad.shape[1]))
    first, last = int(offsets[0]), int(offsets[-1])
    weights = None if lookup.weights is None else lookup.weights[first:last]
    ids = lookup.values[first:last], offsets - first, weights
    return Lookup(grad, *ids, lookup.status, starts, found_inf=lookup.found_inf)
