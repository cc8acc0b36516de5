"""Reference of gradient clipping and weight decay, applied between a row's summed gradient and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rec_kernels.reference import numerics


@dataclass
class GradientStep:
    """Options as in ``embedding_bag_backward_fused_``; None: no clipping."""

    weight_decay: float = 0.0
    weight_decay_mode: str = "l2"
    clip_grad_value: float | None = None
    clip_grad_norm: float | None = None

    def apply(self, weight: Tensor, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Clips the gradients of one table's rows and add L2 weight decay."""
        return {row: self._apply_row(weight[row], g) for row, g in gradients.items()}

    def _apply_row(self, weight: Tensor, g: Tensor) -> Tensor:
        if self.clip_grad_value is not None:
            g = g.clamp(-self.clip_grad_value, self.clip_grad_value)
        if self.clip_grad_norm is not None:
            limit = torch.tensor(self.clip_grad_norm)
            norm = numerics.square_root(numerics.row_dot(g[None], g[None])[0])
            g = g * (limit / norm) if norm > limit else g
        if self.weight_decay and self.weight_decay_mode == "l2":
            g = numerics.fused_multiply_add(torch.tensor(self.weight_decay), weight, g)
        return g

    @property
    def decoupled(self) -> float:
        """Decoupled weight decay coefficient, or 0."""
        return self.weight_decay if self.weight_decay_mode == "decoupled" else 0.0

    def decay_(self, weight: Tensor, rows: list[int], lr: float) -> None:
        """Applies decoupled decay, shrinking rows by lr * weight_decay, for optimizers that scale the gradient."""
        if not self.decoupled:
            return
        rate = -(torch.tensor(lr) * torch.tensor(self.decoupled))
        for row in rows:
            weight[row] = numerics.fused_multiply_add(rate, weight[row], weight[row])
