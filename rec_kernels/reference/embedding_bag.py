"""Reference of embedding_bag: one id at a time, in the order of docs/numerics.md. Bit-exact, not fast.

Tables are a list of [E, D] float32 tensors. A feature is a table index (features may share a table) or ``Parts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rec_kernels.reference import numerics


@dataclass
class Parts:
    """A feature composed of several tables: part p of an id is row (id // divisor) % modulus of its table.

    ``combine``: "concat", "add" or "mult". Ids are in [0, num_ids); None: every integer is valid, even if negative.
    """

    tables: list[int]
    partitions: list[tuple[int, int]]  # (divisor, modulus)
    num_ids: int | None
    combine: str

    def width(self, tables: list[Tensor]) -> int:
        """Columns of a combined row."""
        dims = [tables[t].shape[1] for t in self.tables]
        return sum(dims) if self.combine == "concat" else dims[0]

    def rows(self, id: int) -> list[int]:
        """Row index of an id in each table."""
        return [id // divisor % modulus for divisor, modulus in self.partitions]

    def parts(self, tables: list[Tensor], id: int) -> list[Tensor]:
        """Each table's row of an id."""
        return [tables[t][row] for t, row in zip(self.tables, self.rows(id), strict=True)]

    def row(self, tables: list[Tensor], id: int) -> Tensor:
        """Combined row of an id."""
        first, *others = self.parts(tables, id)
        if self.combine == "concat":
            return torch.cat([first, *others])
        for other in others:
            first = first * other if self.combine == "mult" else first + other
        return first

    def gradients(self, tables: list[Tensor], id: int, g: Tensor) -> list[Tensor]:
        """Gradient term of each part of an id, before its coefficient; g is the gradient of the bag."""
        parts = self.parts(tables, id)
        if self.combine == "concat":
            return list(g.split([len(part) for part in parts]))
        terms = [g] * len(parts)
        for p in range(len(parts)):
            for q in range(len(parts)) if self.combine == "mult" else ():
                terms[p] = terms[p] if p == q else terms[p] * parts[q]
        return terms


@dataclass
class Bags:
    """Key-major jagged input: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    ``padding_idx`` is the id that all features skip (-1: none), or a list of one id per feature (None: none).
    """

    values: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None = None
    padding_idx: int | list[int | None] = -1

    def positions(self, feature: int, sample: int, batch: int, num_ids: int | None) -> list[int]:
        """Positions of the valid ids of bag (feature, sample): in range and not padding."""
        i = feature * batch + sample
        positions = range(int(self.offsets[i]), int(self.offsets[i + 1]))
        ids, given = self.values.tolist(), self.padding_idx
        padding = (None if given == -1 else given) if isinstance(given, int) else given[feature]
        return [p for p in positions if (num_ids is None or 0 <= ids[p] < num_ids) and ids[p] != padding]


Features = list[int | Parts]


def _parts(feature: int | Parts, tables: list[Tensor]) -> Parts:
    if isinstance(feature, Parts):
        return feature
    rows = len(tables[feature])
    return Parts([feature], [(1, max(rows, 1))], rows, "concat")


def _bags(tables: list[Tensor], features: Features, bags: Bags, batch: int) -> Iterator[tuple]:
    """Yields (feature index, parts, output columns, sample, valid positions) in ascending order."""
    column = 0
    for f, feature in enumerate(features):
        parts = _parts(feature, tables)
        width = parts.width(tables)
        for b in range(batch):
            yield f, parts, slice(column, column + width), b, bags.positions(f, b, batch, parts.num_ids)
        column += width


def embedding_bag(tables: list[Tensor], features: Features, mean: list[bool], bags: Bags) -> Tensor:
    """Pools the bags of every feature, [B, columns]."""
    batch = (len(bags.offsets) - 1) // len(features)
    output = torch.zeros(batch, sum(_parts(f, tables).width(tables) for f in features))
    for f, parts, columns, b, positions in _bags(tables, features, bags, batch):
        pooled = output[b, columns]
        for p in positions:
            row = parts.row(tables, int(bags.values[p]))
            if bags.per_sample_weights is None:
                pooled = pooled + row
            else:
                pooled = numerics.fused_multiply_add(bags.per_sample_weights[p], row, pooled)
        output[b, columns] = pooled / len(positions) if mean[f] and positions else pooled
    return output


def _occurrences(
    grad: Tensor, tables: list[Tensor], features: Features, mean: list[bool], bags: Bags
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yields (table, row, gradient term, coefficient) in the order (feature, bag, position)."""
    for f, parts, columns, b, positions in _bags(tables, features, bags, len(grad)):
        for p in positions:
            coefficient = torch.tensor(1.0) / len(positions) if mean[f] else torch.tensor(1.0)
            if bags.per_sample_weights is not None:
                coefficient = bags.per_sample_weights[p] * coefficient
            id = int(bags.values[p])
            terms = parts.gradients(tables, id, grad[b, columns])
            for table, row, term in zip(parts.tables, parts.rows(id), terms, strict=True):
                yield table, row, term, coefficient


def row_gradients(
    grad: Tensor, tables: list[Tensor], features: Features, mean: list[bool], bags: Bags
) -> dict[tuple[int, int], Tensor]:
    """Summed gradient [D] of every touched row, by (table, row)."""
    terms: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for table, row, g, coefficient in _occurrences(grad, tables, features, mean, bags):
        terms.setdefault((table, row), []).append((g, coefficient))
    return {
        key: numerics.chunked_sum(torch.stack([g for g, _ in t]), torch.stack([c for _, c in t]))
        for key, t in terms.items()
    }


def per_sample_weights_gradient(
    grad: Tensor, tables: list[Tensor], features: Features, mean: list[bool], bags: Bags
) -> Tensor:
    """[N]: dot product of the bag's gradient and the row, divided by the bag's valid id count for mean pooling.

    For concatenated parts, it is the sum over the parts.
    """
    out = torch.zeros(len(bags.values))
    for f, parts, columns, b, positions in _bags(tables, features, bags, len(grad)):
        for p in positions:
            id, g = int(bags.values[p]), grad[b, columns]
            if parts.combine == "concat":
                rows = parts.parts(tables, id)
                pairs = list(zip(g.split([len(row) for row in rows]), rows, strict=True))
            else:
                pairs = [(g, parts.row(tables, id))]
            dot, *others = [numerics.row_dot(x[None], row[None])[0] for x, row in pairs]
            for other in others:
                dot = dot + other
            out[p] = dot * (torch.tensor(1.0) / len(positions)) if mean[f] else dot
    return out


def sgd_(weight: Tensor, gradients: dict[int, Tensor], lr: float) -> None:
    """Updates the rows of one table: w = fmaf(-lr, g, w)."""
    for row, g in gradients.items():
        weight[row] = numerics.fused_multiply_add(torch.tensor(-lr), g, weight[row])


def rowwise_adagrad_(weight: Tensor, state: Tensor, gradients: dict[int, Tensor], lr: float, eps: float) -> None:
    """Updates the rows of one table and their state [E]: v += mean(g^2); w = fmaf(-(lr / (sqrt(v) + eps)), g, w)."""
    lr32, eps32 = torch.tensor(lr), torch.tensor(eps)
    for row, g in gradients.items():
        state[row] = state[row] + numerics.row_dot(g[None], g[None])[0] / len(g)
        factor = -(lr32 / (numerics.square_root(state[row]) + eps32))
        weight[row] = numerics.fused_multiply_add(factor, g, weight[row])


def _decayed(direction: Tensor, weight: Tensor, weight_decay: float) -> Tensor:
    """Adds decoupled weight decay to an update direction."""
    if not weight_decay:
        return direction
    return numerics.fused_multiply_add(torch.tensor(weight_decay), weight, direction)


def adagrad_(
    weight: Tensor,
    state: Tensor,
    gradients: dict[int, Tensor],
    lr: float,
    eps: float,
    weight_decay: float = 0.0,
) -> None:
    """Updates one table and its state [E, D]: v = fmaf(g, g, v); w = fmaf(-lr, g / (sqrt(v) + eps), w).

    ``weight_decay`` is decoupled.
    """
    for row, g in gradients.items():
        state[row] = numerics.fused_multiply_add(g, g, state[row])
        direction = g / (numerics.square_root(state[row]) + torch.tensor(eps))
        direction = _decayed(direction, weight[row], weight_decay)
        weight[row] = numerics.fused_multiply_add(torch.tensor(-lr), direction, weight[row])


@dataclass
class Adam:
    """One step of the Adam family on the rows of one table.

    ``powers`` are beta1^t and beta2^t of this step; ``weight_decay`` is decoupled. ``exp_avg`` is [E, D];
    ``exp_avg_sq`` [E, D], or [E] (row-wise).
    """

    lr: float
    eps: float
    betas: tuple[float, float]
    powers: tuple[Tensor, Tensor]
    weight_decay: float = 0.0

    def _first(self, exp_avg: Tensor, row: int, g: Tensor) -> Tensor:
        beta = torch.tensor(self.betas[0])
        exp_avg[row] = numerics.fused_multiply_add(beta, exp_avg[row], (1 - beta) * g)
        return exp_avg[row] / (1 - self.powers[0])

    def _divisor(self, exp_avg_sq: Tensor) -> Tensor:
        return numerics.square_root(exp_avg_sq / (1 - self.powers[1])) + torch.tensor(self.eps)

    def direction(self, exp_avg: Tensor, exp_avg_sq: Tensor, row: int, g: Tensor) -> Tensor:
        """Updates a row's moments with its gradient and returns the update direction."""
        beta = torch.tensor(self.betas[1])
        if exp_avg_sq.dim() == 1:
            mean_square = numerics.row_dot(g[None], g[None])[0] / len(g)
            exp_avg_sq[row] = numerics.fused_multiply_add(beta, exp_avg_sq[row], (1 - beta) * mean_square)
        else:
            exp_avg_sq[row] = numerics.fused_multiply_add(beta, exp_avg_sq[row], ((1 - beta) * g) * g)
        return self._first(exp_avg, row, g) / self._divisor(exp_avg_sq[row])

    def update_(self, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradients: dict[int, Tensor]) -> None:
        """Adam and row-wise Adam: w = fmaf(-lr, direction, w)."""
        for row, g in gradients.items():
            direction = _decayed(self.direction(exp_avg, exp_avg_sq, row, g), weight[row], self.weight_decay)
            weight[row] = numerics.fused_multiply_add(torch.tensor(-self.lr), direction, weight[row])

    def lamb_(self, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradients: dict[int, Tensor]) -> None:
        """LAMB: the factor of a row is -(lr * |w| / |direction|), or -lr if either norm is 0."""
        for row, g in gradients.items():
            direction = _decayed(self.direction(exp_avg, exp_avg_sq, row, g), weight[row], self.weight_decay)
            norms = [numerics.square_root(numerics.row_dot(x[None], x[None])[0]) for x in (weight[row], direction)]
            trust = torch.tensor(1.0) if any(norm == 0 for norm in norms) else norms[0] / norms[1]
            weight[row] = numerics.fused_multiply_add(-(torch.tensor(self.lr) * trust), direction, weight[row])
