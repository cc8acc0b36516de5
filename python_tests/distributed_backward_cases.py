"""Functions that test_distributed_backward.py runs on each rank: backward passes comparable to one process."""

from __future__ import annotations

import warnings
from typing import Any

import distributed_cases
import distributed_sequence_cases as sequences
import torch
import torch.distributed as dist
from distributed_cases import KEYS, OPTIMIZERS, Case, Model, batch, blocks, coefficients, collection, sharded
from torch import Tensor, nn


def ranks_of(case: Case) -> list[int]:
    return list(range(len(case.sizes)))


def train_together(case: Case, model: nn.Module, ranks: list[int]) -> list[Tensor]:
    """Trains with three lookups per backward, the second with another backward before it; returns outputs."""
    outputs = []
    for step in range(case.steps):
        losses = []
        for k in range(3):
            out = model(batch(case, 3 * step + k, ranks))
            outputs.append(out.detach().clone())
            losses.append((out.float() * coefficients(case, 3 * step + k, ranks)).sum())
        (losses[2] + losses[0] + losses[1]).backward()
    return outputs


def together(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    model = sharded(case, collection(case))
    return train_together(case, model, [dist.get_rank()]), blocks(model.module.ebc.state_dict())


def train_scaled(
    case: Case, model: nn.Module, tables: Any, face: Any, ranks: list[int], kind: type = torch.amp.GradScaler
) -> list[float]:
    """Trains with a GradScaler; in two steps the last rank's gradient overflows. Returns the scales.

    The fifth step has two micro-batches; the second one overflows.

    Args:
        face: the fused optimizer, or one of torch. kind: class of the scaler.
    """
    scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
    is_fused = OPTIMIZERS[case.optimizer] is not None
    if is_fused:
        tables.set_grad_scaler(scaler)
    scales = []
    for step in range(case.steps):
        given = coefficients(case, step, ranks)
        with tables.accumulate() if step > 2 and is_fused else torch.enable_grad():
            for overflows in [False, True] if step == 4 else [step == 1]:
                if overflows and len(case.sizes) - 1 in ranks:
                    given[-1, 3] = torch.inf
                loss = (model(batch(case, step, ranks)).float() * given).sum()
                scaler.scale(loss).backward()
        scaler.step(face)
        scaler.update()
        face.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def scaled(case: Case, by_all: bool = False) -> tuple[list[float], dict[str, Any]]:
    """Returns this rank's scales and blocks; ``by_all``: with FSDP's scaler, which reduces over ranks."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = sharded(case, collection(case))
    tables, kind = model.module.ebc, ShardedGradScaler if by_all else torch.amp.GradScaler
    face = tables.optimizer if OPTIMIZERS[case.optimizer] else torch.optim.Adam(model.parameters(), lr=0.01)
    return train_scaled(case, model, tables, face, [dist.get_rank()], kind), blocks(tables.state_dict())


def scaled_alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Scales and state of one process."""
    model = Model(collection(case))
    fused = OPTIMIZERS[case.optimizer] is not None
    face = model.ebc.fused_optimizer if fused else torch.optim.Adam(model.parameters(), lr=0.01)
    scales = train_scaled(case, model, model.ebc, face, ranks_of(case))
    return scales, dict(model.ebc.state_dict())


def different_backwards(case: Case) -> tuple[list[str], bool]:
    """Returns errors of backward passes that differ between ranks, and whether the state is unchanged."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    tables, errors = model.module.ebc, []
    before = blocks(tables.state_dict())

    def losses() -> list[Tensor]:
        return [model(batch(case, step, [rank])).sum() for step in range(2)]

    def record_error(run: Any) -> None:
        try:
            run()
        except RuntimeError as error:
            errors.append(str(error))

    first, second = losses()
    record_error((second if rank else first + second).backward)
    first, second = losses()
    record_error((first if rank else second).backward)
    (loss, _) = losses()
    tables.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0) if rank else None)
    record_error(loss.backward)
    tables.set_grad_scaler(None)
    (loss, _) = losses()
    tables.optimizer.param_groups[0]["lr"] = 0.125 + rank
    record_error(loss.backward)
    after = blocks(tables.state_dict())
    return errors, all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))


def train_weighted(case: Case, model: nn.Module, tables: Any, ranks: list[int]) -> list[Tensor]:
    """Trains with per-sample weights that require gradients, the last two steps in one block; returns the gradients.

    In the second step rank 0's weights require no gradient.
    """
    grads = []
    for step in range(case.steps):
        given = batch(case, step, ranks)
        count = len(batch(case, step, ranks_of(case)).values())
        weights = 0.5 + torch.rand(count, generator=torch.Generator().manual_seed(step))
        if len(ranks) == 1:
            weights = weights[of_rank(case, step, ranks[0])]
        weights.requires_grad_(step != 1 or ranks != [0])
        given = type(given)(given.keys(), given.values(), lengths=given.lengths(), weights=weights)
        with tables.accumulate() if step >= case.steps - 2 else torch.enable_grad():
            out = model(given)
            (out.float() * coefficients(case, step, ranks)).sum().backward()
        grads.append(torch.zeros(0) if weights.grad is None else weights.grad.clone())
    return grads


def of_rank(case: Case, step: int, rank: int) -> Tensor:
    """Returns the positions of a rank's ids in the batch of all ranks."""
    marked = [torch.full_like(batch(case, step, [r]).values(), r) for r in ranks_of(case)]
    parts = [m.split(batch(case, step, [r]).length_per_key()) for r, m in enumerate(marked)]
    return (torch.cat([own[f] for f in range(4) for own in parts]) == rank).nonzero().flatten()


def weighted(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    model = sharded(case, collection(case))
    tables = model.module.ebc
    return train_weighted(case, model, tables, [dist.get_rank()]), blocks(tables.state_dict())


def late_backward(case: Case) -> list[str]:
    """Returns errors of two weighted lookups with separate backward passes: the second backward finds updated rows."""
    model, rank, errors = sharded(case, collection(case)), dist.get_rank(), []
    losses = []
    for step in range(2):
        given = batch(case, step, [rank])
        weights = torch.ones(len(given.values()), requires_grad=rank == 1)
        losses.append(model(type(given)(given.keys(), given.values(), lengths=given.lengths(), weights=weights)).sum())
    losses[0].backward()
    try:
        losses[1].backward()
    except RuntimeError as error:
        errors.append(str(error))
    return errors


def blocks_of_one_rank(case: Case) -> tuple[list[str], bool]:
    """Rank 1 runs a backward in a block after a lookup before it, then a backward after the block of its lookup.

    Returns:
        Errors of this rank, and whether its shards are unchanged.
    """
    model, rank, errors = sharded(case, collection(case)), dist.get_rank(), []
    tables = model.module.ebc
    before = blocks(tables.state_dict())

    def record_error(loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))

    early = model(batch(case, 0, [rank])).sum()
    with tables.accumulate() if rank else torch.enable_grad():
        record_error(early)
    with tables.accumulate() if rank else torch.enable_grad():
        late_backward = model(batch(case, 1, [rank])).sum()
    record_error(late_backward)
    after = blocks(tables.state_dict())
    return errors, all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))


def train_by_torch(case: Case, model: nn.Module, ranks: list[int]) -> list[Tensor]:
    """Trains by torch's Adam, two lookups per step, with table t1 frozen after the first step; returns outputs."""
    named = {name: p for name, p in model.named_parameters() if "embedding_bags" in name}
    optimizers = [torch.optim.Adam(named.values(), lr=0.01)] if named else []
    outputs = []
    for step in range(case.steps):
        losses = []
        for k in range(2):
            out = model(batch(case, 2 * step + k, ranks))
            outputs.append(out.detach().clone())
            loss = (out.float() * coefficients(case, 2 * step + k, ranks)).sum()
            losses.append(loss / max(len(out), 1) if case.gradient != "sum" else loss)
        (losses[0] + losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in named.items():
            p.requires_grad_("t1" not in name)
    return outputs


def by_torch(case: Case) -> tuple[list[Tensor], dict[str, Any], list[str]]:
    model = sharded(case, collection(case))
    outputs = train_by_torch(case, model, [dist.get_rank()])
    names = [name for name, _ in model.named_parameters() if "dense" not in name]
    return outputs, blocks(model.module.ebc.state_dict()), names


def only_weights(case: Case) -> tuple[Tensor, bool, list[str]]:
    """Returns the weights' gradient, whether outputs require one, and warnings of uint8 tables without optimizer."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    given = batch(case, 0, [rank])
    weights = torch.ones(len(given.values()), requires_grad=True)
    given = type(given)(given.keys(), given.values(), lengths=given.lengths(), weights=weights)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model(given).sum().backward()
        requires = model(batch(case, 1, [rank])).requires_grad
    return weights.grad, requires, [str(warning.message) for warning in warned]


def step_by_torch(case: sequences.Sequences, model: nn.Module, ranks: list[int]) -> list:
    """Takes one step of torch's SGD with the gradients of several lookups; returns outputs."""
    outputs = sequences.train(case, model, ranks)
    tables = [p for name, p in model.named_parameters() if "embeddings" in name]
    if tables:
        torch.optim.SGD(tables, lr=0.1).step()
    return outputs


def sequences_by_torch(case: sequences.Sequences) -> dict[str, Any]:
    model = sequences.sharded(case, sequences.collection(case))
    step_by_torch(case, model, [dist.get_rank()])
    return blocks(model.module.sequences.state_dict())


def read_first(case: Case | sequences.Sequences, reader: int | None, mode: str = "enable_grad") -> list[dict[str, Any]]:
    """Trains two collections together; rank ``reader`` reads the second output first. Returns their blocks.

    Args:
        mode: torch's grad mode of that read.
    """
    own: Any = sequences if isinstance(case, sequences.Sequences) else distributed_cases
    rank, tables = dist.get_rank(), []
    for _ in range(2):
        model = own.sharded(case, own.collection(case)).module
        tables.append(model.ebc if own is distributed_cases else model.sequences)
    for step in range(case.steps):
        outputs = [each(own.batch(case, step, [rank])) for each in tables]
        if rank == reader:
            with getattr(torch, mode)():
                _numbers(outputs[1]["f0"]).norm()
        losses = [sum(_numbers(output[key]).sum() for key in KEYS) for output in outputs]
        (losses[0] + 2 * losses[1]).backward()
    return [blocks(each.state_dict()) for each in tables]


class WithLayers(nn.Module):
    """Layers between a lookup and the use of its output, large enough for several DDP buckets."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.layers = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 600), nn.Linear(600, 64))

    def forward(self, features: Any, way: str) -> Tensor:
        """Returns [B, 64]; ``way`` ("log", "by_feature" or "") is how this rank reads the lookup's output."""
        found = self.ebc.by_feature(features) if way == "by_feature" else self.ebc(features)
        if way == "log":
            found.values().norm()
        hidden = self.layers(torch.ones(features.stride(), 4))
        return hidden * torch.cat([found[key] for key in KEYS], dim=1)


def with_dense_layers(case: Case, ways: tuple[str, str]) -> dict[str, Any]:
    """Returns blocks of tables trained with dense layers, which DDP reduces in the same process group."""
    torch.manual_seed(0)
    model, rank = sharded(case, collection(case), WithLayers), dist.get_rank()
    for step in range(case.steps):
        model(batch(case, step, [rank]), ways[rank]).sum().backward()
    return blocks(model.module.ebc.state_dict())


def _numbers(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else values.values()
