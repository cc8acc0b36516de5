"""Losses that a ``torch.amp.GradScaler`` multiplies, and the updates of a fused optimizer that divide again."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.amp import GradScaler

from rec_kernels.nn.copies import CopiedTables
from rec_kernels.nn.optimizers import FusedOptimizer
from rec_kernels.ops.embedding_bag_autograd import overflow_of


class ScaledLosses(CopiedTables):
    """Tables whose updates may know the ``GradScaler`` of the loss.

    ``_token`` is what autograd calls a fused update for. With a scaler it has an element, whose gradient says whether
    an update was skipped, and the fused optimizer shows it to the scaler; without one it costs nothing.
    """

    _scaler: GradScaler | None = None
    _lost_scaler = False  # whether this is a copy of a collection that had one
    _token: Tensor
    _one: Tensor
    _fused_optimizer: FusedOptimizer | None

    @property
    @abstractmethod
    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer's ``torch.optim.Optimizer`` face."""

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """From now on, losses are scaled by a ``torch.amp.GradScaler``, as training in float16 needs it.

        Without this call, a scaled loss trains the tables with gradients as many times too large. With it, an update
        divides by the scale, and is skipped where the gradient of the lookup's output has an infinite or NaN element:
        tables, state and ``step`` stay as they are. ``scaler.step(collection.fused_optimizer)``, beside the steps of
        other optimizers and before ``scaler.update()``, tells the scaler of it. Where only others have overflowed, the
        update was made: it came with the backward, and no step takes it back.

        The scale is that of the lookup, inside ``accumulate()`` that of the block's beginning: no ``scaler.update()``
        may come between it and ``scaler.scale(loss)``. Call ``set_grad_scaler`` before the lookups it is for, and
        before a CUDA graph is captured. Not part of ``state_dict()``. Copies and pickles have no scaler: they raise at
        the first lookup of training, unless they have been told theirs, or None.

        Args:
            scaler: whose ``scale()`` the loss goes through. One that is not enabled is as None: losses are as they are.

        Raises:
            TypeError: ``scaler`` has no ``scale()``. ValueError: the collection has no fused optimizer. RuntimeError:
            inside ``accumulate()``.
        """
        if scaler is not None and (isinstance(scaler, type) or not callable(getattr(scaler, "scale", None))):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        if self.optimizer is None:
            raise ValueError(
                "set_grad_scaler() is for a fused optimizer, and this collection was built with optimizer=None: its "
                "gradients are torch's, which scaler.step(optimizer) divides as any"
            )
        if self._pending is not None:
            raise RuntimeError("set_grad_scaler() inside accumulate(): call it before the block or after it")
        enabled = getattr(scaler, "is_enabled", None)
        self._scaler = scaler if enabled is None or enabled() else None
        self._lost_scaler = False
        self._renew_token()
        self._tie_optimizer()

    def _renew_token(self) -> None:
        size, device = 0 if self._scaler is None else 1, self._device
        self._token = torch.zeros(size, dtype=torch.float32, device=device, requires_grad=True)
        self._one = torch.ones(1, dtype=torch.float32, device=device)

    def _shown_token(self) -> Tensor | None:
        return None if self._scaler is None else self._token

    def _scaling(self) -> dict[str, Tensor]:
        """The arguments of the ops that say what the loss is multiplied by: numbers of now, not the scaler's tensor.

        Raises:
            RuntimeError: this is a copy of a collection with a scaler, and has none.
        """
        if self._scaler is not None:
            if torch.compiler.is_compiling():
                from rec_kernels.nn.graph_breaks import scale_while_traced

                return {"grad_scale": scale_while_traced(self._scaler, self._one)}
            if self._token.is_cuda and torch.cuda.is_current_stream_capturing():
                self.fused_optimizer.is_captured = True
            return {"grad_scale": self._scaler.scale(self._one)}
        if self._lost_scaler:
            raise RuntimeError(
                "this is a copy of a collection with a GradScaler, which copies do not take along: call "
                "set_grad_scaler() with the one that scales the copy's losses, or with None if they are not scaled"
            )
        return {}

    def _found_by(self, scaling: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
        """``scaling``, and whether ``grad``, of the pooled output, has overflowed; notes it for the scaler, too."""
        if not scaling:
            return {}
        overflow, token = overflow_of(grad), self._token
        if token.grad is None:
            token.grad = torch.zeros_like(token)
        token.grad += overflow
        return scaling | {"found_inf": overflow}

    def __getstate__(self) -> dict:
        # Its copy would scale nobody's loss; and a scaler may not be pickled between a backward and its update().
        state = super().__getstate__()
        if state.pop("_scaler", None) is not None:
            empty = torch.empty(0, dtype=torch.float32, device=self._device, requires_grad=True)
            state |= {"_lost_scaler": True, "_token": empty}
        return state
