"""Sharded collections whose rows are communicated in row formats, and the order of communication, on each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import (
    DIM,
    KEYS,
    Case,
    Model,
    batch,
    blocks,
    coefficients,
    collection,
    counted_bytes,
    sharded,
    train,
)
from distributed_sequence_cases import Sequences
from distributed_sequence_cases import collection as sequence_collection
from distributed_sequence_cases import sharded as sharded_sequences
from distributed_sequence_cases import train as train_sequences
from torch import Tensor, nn

import rec_kernels as rk


def train_in_bf16(case: Case, model: nn.Module, ranks: list[int]) -> list[Tensor]:
    """Trains with gradients that bfloat16 represents exactly; returns outputs."""
    outputs = []
    for step in range(case.steps):
        out = model(batch(case, step, ranks))
        outputs.append(out.detach().clone())
        (out * coefficients(case, step, ranks).bfloat16().float()).sum().backward()
    return outputs


def in_bf16(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    model = sharded(case, collection(case))
    return train_in_bf16(case, model, [dist.get_rank()]), blocks(model.module.ebc.state_dict())


def bytes_sent(case: Case | Sequences) -> list[int]:
    """Bytes of rows that this rank sends to others in a step: forward, then backward."""
    rank = dist.get_rank()
    with counted_bytes() as sent:
        if isinstance(case, Case):
            train(replace(case, steps=1), sharded(case, collection(case)), [rank])
        else:
            train_sequences(replace(case, steps=1), sharded_sequences(case, sequence_collection(case)), [rank])
    return sent


def collectives(case: Case) -> list[str]:
    """Names of a step's collectives, in the order of their start."""
    model, events = sharded(case, collection(case)), []
    names = ("all_to_all_single", "all_gather", "all_reduce", "reduce_scatter", "broadcast", "all_gather_object")
    own = {name: getattr(dist, name) for name in names}

    def recording(name: str) -> Any:
        return lambda *args, **options: (events.append(name), own[name](*args, **options))[1]

    try:
        for name in names:
            setattr(dist, name, recording(name))
        train(replace(case, steps=1), model, [dist.get_rank()])
    finally:
        for name, function in own.items():
            setattr(dist, name, function)
    return events


def losses(case: Case, steps: int) -> list[float]:
    """Losses of a regression trained on this rank's part of 64 samples per step."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for step in range(steps):
        features = batch(case, step % 4, [rank])
        target = torch.linspace(-1, 1, case.sizes[rank])
        pooled = model.module.ebc(features)
        out = model.module.dense(torch.stack([pooled[key].mean(1) for key in KEYS[:2]], dim=1)).squeeze(1)
        loss = (out - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def resumed(case: Case) -> tuple[list[Tensor], list[Tensor], bool]:
    """Outputs of steps 0 to 3, outputs of steps 2 and 3 after loading the state elsewhere, and whether two lookups
    without an update between them use different rounding noise.
    """
    rank = dist.get_rank()

    def outputs(model: nn.Module, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            out = model(batch(case, step, [rank]))
            found.append(out.detach().clone())
            (out * coefficients(case, step, [rank])).sum().backward()
        return found

    first, other = sharded(case, collection(case)), sharded(case, collection(case, device="meta"))
    found = outputs(first, range(2))
    state = {name: whole_of(value) for name, value in first.module.ebc.state_dict().items()}
    other.module.ebc.load_state_dict(state)
    found += outputs(first, range(2, 4))
    later = outputs(other, range(2, 4))
    again = [first(batch(case, 0, [rank])) for _ in range(2)]
    return found, later, torch.equal(*again)


def whole_of(value: Any) -> Tensor:
    """Gathers a tensor of a state from all ranks."""
    if not hasattr(value, "local_shards"):
        return value
    out = torch.zeros(value.size(), dtype=value.local_shards()[0].tensor.dtype if value.local_shards() else None)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, blocks({"it": value})["it"])
    for offsets, block in (pair for own in found for pair in own):
        out = out.to(block.dtype)
        out[tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))] = block
    return out


def too_large(case: Case) -> tuple[float, bool]:
    """The last rank's scaled gradient is 102,400; returns the scale after the step, and whether blocks are equal."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    tables, scaler = model.module.ebc, torch.amp.GradScaler("cpu", init_scale=1024.0)
    tables.set_grad_scaler(scaler)
    before = blocks(tables.state_dict())
    given = torch.ones(case.sizes[rank], len(KEYS) * DIM)
    given[-1, 3] = 100.0 if rank == len(case.sizes) - 1 else 1.0
    scaler.scale((model(batch(case, 0, [rank])) * given).sum()).backward()
    scaler.step(tables.optimizer)
    scaler.update()
    after = blocks(tables.state_dict())
    same = all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))
    return scaler.get_scale(), same


def infinite(case: Case) -> list[bool]:
    """The row of rank 0's first id is infinite; returns the samples with NaN in f0's columns, and those with the id."""
    whole, number = collection(case), int(batch(case, 0, [0])["f0"].values()[0])
    with torch.no_grad():
        whole.embedding_bags["t0"].weight[number] = torch.inf
    given = batch(case, 0, [dist.get_rank()])
    has = [bool((row == number).any()) for row in given["f0"].to_dense()]
    out = sharded(case, whole)(given)[:, :16]
    return [bool(row.isnan().all()) for row in out], has


def different_wires() -> str:
    """Returns the error if ranks choose different formats."""
    formats = ("int8", "bf16")
    try:
        sharded(Case(wire=rk.distributed.Wire(formats[dist.get_rank()])), collection(Case()))
    except ValueError as error:
        return str(error)
    return ""


class Between(nn.Module):
    """A layer between a lookup and the reading of its output."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc, self.events = ebc, []
        self.dense = nn.Linear(4, 64)

    def forward(self, features: Any) -> Tensor:
        pooled = self.ebc(features)
        self.events.append("looked up")
        hidden = self.dense(torch.ones(features.stride(), 4))
        hidden.register_hook(lambda _: self.events.append("layer's backward"))
        return hidden * pooled.values()


def order(case: Case) -> tuple[list[str], bool]:
    """The order of events in a step, and whether a lookup trains that was read under no_grad()."""
    from rec_kernels.distributed import messages

    recorded, all_to_all = [], messages.all_to_all

    def watched(*arguments: Any) -> Any:
        recorded.append("sent")
        under_way = all_to_all(*arguments)
        wait = under_way.wait
        under_way.wait = lambda: (recorded.append("waited"), wait())[1]
        return under_way

    messages.all_to_all = watched
    try:
        model = sharded(case, collection(case), Between)
        model.module.events = recorded
        given = batch(case, 0, [dist.get_rank()])
        model(given).sum().backward()
        late, step = model.module.ebc(given), int(model.module.ebc.shards.step)
        with torch.no_grad():
            values = late.values()
        values.sum().backward()
        return recorded[: recorded.index("waited", 5) + 1], int(model.module.ebc.shards.step) == step + 1
    finally:
        messages.all_to_all = all_to_all


def alone(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and state of one process after ``train_in_bf16``."""
    model = Model(collection(case))
    return train_in_bf16(case, model, list(range(len(case.sizes)))), dict(model.ebc.state_dict())
