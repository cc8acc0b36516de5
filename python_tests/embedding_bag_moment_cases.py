"""Fused updates with elementwise state, and the reference's results."""

from __future__ import annotations

import functools

import torch
from embedding_bag_cases import EPS, LR, wide_floats
from embedding_bag_format_cases import SEED, STEP, EncodedCase
from layout_calls import OPS
from torch import Tensor

from rec_kernels.reference import embedding_bag as reference
from rec_kernels.reference import row_formats
from rec_kernels.reference.gradient_step import GradientStep

ELEMENTWISE = ("adagrad", "adam", "rowwise_adam", "lamb")
BETAS = (0.9, 0.99)
State = dict[str, Tensor]
_STREAMS = {"exp_avg": 1, "exp_avg_sq": 2, "sum": 2}  # noise streams that round each kind of state


def reference_step(
    optimizer: str,
    weight: Tensor,
    state: State,
    gradients: dict[int, Tensor],
    lr: float,
    betas: tuple[float, float],
    powers: Tensor | None,
    weight_decay: float = 0.0,
) -> None:
    """Updates one table [E, D] and its state; ``powers`` are those of this step; weight decay is decoupled."""
    if optimizer == "adagrad":
        return reference.adagrad_(weight, state["sum"], gradients, lr, EPS, weight_decay)
    step = reference.Adam(lr, EPS, betas, tuple(powers), weight_decay)
    update = step.lamb_ if optimizer == "lamb" else step.update_
    return update(weight, state["exp_avg"], state["exp_avg_sq"], gradients)


class MomentCase:
    """An ``EncodedCase`` with state of tables in another order than the rows, with NaN gaps between them.

    Args:
        encoded: the call; some tables may be fp32.
        optimizer: one of ``ELEMENTWISE``.
        half: whether elementwise state is bfloat16.
    """

    def __init__(self, encoded: EncodedCase, optimizer: str, *, half: bool = False) -> None:
        self.encoded, self.case, self.optimizer, self.half = encoded, encoded.case, optimizer, half
        self.starts, at = {}, 3
        for table in reversed(range(len(self.case.tables))):
            self.starts[table] = at
            rows, columns = self.case.tables[table]
            at += rows * columns + 1
        self.size = at

    def _elements(self, seed: int) -> Tensor:
        flat = torch.full((self.size,), torch.nan)
        for table, view in enumerate(self.split(flat)):
            view.copy_(wide_floats(*view.shape, seed=seed + table))
        return flat.bfloat16() if self.half else flat

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of the tables: [E, D] of elementwise state, [E] of rowwise state."""
        if len(flat) != self.size:
            return [flat[row:][:e] for row, (e, _) in zip(self.case.first_rows, self.case.tables, strict=True)]
        places = ((self.starts[t], *shape) for t, shape in enumerate(self.case.tables))
        return [flat[start : start + e * d].view(e, d) for start, e, d in places]

    @functools.cached_property
    def state(self) -> State:
        """State before the update."""
        seed = self.case.seed + 5000
        if self.optimizer == "adagrad":
            return {"sum": self._elements(seed).abs()}
        rowwise = self.optimizer == "rowwise_adam"
        second = wide_floats(len(self.case.sum), seed=seed + 100) if rowwise else self._elements(seed + 100)
        powers = torch.tensor([beta**3 for beta in BETAS])
        return {"exp_avg": self._elements(seed), "exp_avg_sq": second.abs(), "beta_powers": powers}

    def update(self, rounding: str, ops=OPS, **options) -> tuple[Tensor, State, Tensor]:
        """Bytes, state and step after embedding_bag_backward_fused_ of ``ops``."""
        flat, step = self.encoded.flat.clone(), torch.tensor(STEP)
        state = {name: t.clone() for name, t in self.state.items()}
        moments = {k: t for k, t in state.items() if k != "sum"}
        offsets = torch.tensor([self.starts[t] for t in self.case.parts])
        ops.embedding_bag_backward_fused_(
            flat,
            state.get("sum"),
            step,
            torch.tensor(LR),
            options.pop("grad", self.case.grad),
            *self.case.jagged,
            **(self.encoded.layout | self.encoded.noise | moments | {"moment_offsets": offsets} | options),
            optimizer=self.optimizer,
            eps=EPS,
            beta1=BETAS[0],
            beta2=BETAS[1],
            rounding=rounding,
        )
        return flat, state, step

    def _update_floats(self, weights: Tensor, state: State, scale: float, step: GradientStep) -> None:
        views = {name: self.split(t) for name, t in state.items() if name != "beta_powers"}
        if "beta_powers" in state:
            state["beta_powers"] *= torch.tensor(BETAS)
        for table, view in enumerate(self.case.split(weights)):
            mine = {row: g * scale for (t, row), g in self.case.row_gradients.items() if t == table}
            mine = step.apply(view, mine)
            own = {name: of_tables[table] for name, of_tables in views.items()}
            reference_step(self.optimizer, view, own, mine, LR, BETAS, state.get("beta_powers"), step.decoupled)

    def expected(self, rounding: str, scale: float = 1.0, step: GradientStep | None = None) -> tuple[Tensor, State]:
        """Bytes and state after the update, from gradients multiplied by ``scale``, then transformed by ``step``."""
        weights, state = self.case.weights.clone(), {name: t.float() for name, t in self.state.items()}
        state = {name: t.clone() for name, t in state.items()}
        self._update_floats(weights, state, scale, step or GradientStep())
        updated, flat = self.case.split(weights), self.encoded.flat.clone()
        tables = self.encoded.split(flat)
        for table, row in self.case.row_gradients:
            tables[table][row] = self.encoded.encode_row(table, row, updated[table][row], rounding)
        return flat, self._rounded(state, rounding) if self.half else state

    def _rounded(self, state: State, rounding: str) -> State:
        """State after an update as stored: updated rows are rounded, each kind of state with its noise stream."""
        kept = {name: t.clone() for name, t in self.state.items()}
        for name, t in state.items():
            if kept[name].dtype == torch.float32:
                kept[name].copy_(t)
                continue
            views, places = self.split(t), self.split(kept[name])
            for table, row in self.case.row_gradients:
                number = {"table": self.encoded.table_id(table), "first_row": row, "stream": _STREAMS[name]}
                how = {"rounding": rounding, "seed": SEED, "step": STEP} | number
                encoded = row_formats.quantize_rows(views[table][row][None], "bf16", **how)
                places[table][row] = encoded.view(torch.bfloat16)[0]
        return kept
