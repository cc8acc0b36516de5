"""Batches with bags shared by samples, looked up by sharded collections and by one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import KEYS, ROWS, Case, Model, blocks, coefficients, collection, counted_bytes, sharded
from torch import Tensor

import rec_kernels as rk

#: Features with a common inverse index; "g2" is in no group.
GROUPS = (("f0", "f1"), ("f2",))


@dataclass(frozen=True)
class Distinct:
    """A collection to train with batches whose samples share bags.

    Args:
        case: the collection, and its sharding.
        kinds: of each rank's batches: "inverse", features with different batch sizes and inverse indices; "groups",
            an ``rk.InverseKeyedJaggedTensor``; "torchrec", TorchRec's container; "plain", one bag per sample.
    """

    case: Case = field(default_factory=Case)
    kinds: tuple[str, ...] = ("inverse", "inverse")


def _bags(given: Distinct, step: int, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Lengths, ids and weights of each feature's bags, and the bag of each sample, [F, B]."""
    case, kind = given.case, given.kinds[rank]
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch, lengths, values, weights, inverse = case.sizes[rank], [], [], [], []
    for f, rows in enumerate((*ROWS, ROWS[-1])):
        grouped = kind == "groups"
        bags = min(batch, batch // 2 + (1 if grouped else f))
        places = torch.randint(0, max(bags, 1), (batch,), generator=generator)
        if kind == "plain" or (grouped and f == 3):
            bags, places = batch, torch.arange(batch)
        elif grouped and f == 1:
            places = inverse[0]
        low, high = (-rows // 3, rows + rows // 3) if case.bad_ids else (0, rows)
        lengths.append(torch.randint(0, 9, (bags,), generator=generator))
        values.append(torch.randint(low, high, (int(lengths[-1].sum()),), generator=generator))
        drawn = torch.rand(len(values[-1]), generator=generator)
        weights.append(drawn if rank == len(case.sizes) - 1 else torch.ones_like(drawn))
        inverse.append(places)
    return lengths, values, weights, torch.stack(inverse)


def drawn_weights(given: Distinct, step: int, rank: int) -> Tensor:
    """Weights of a rank's ids, which require a gradient."""
    count = sum(len(own) for own in _bags(given, step, rank)[1])
    return (0.5 + torch.rand(count, generator=torch.Generator().manual_seed(31 * step + rank))).requires_grad_()


def own_batch(given: Distinct, step: int, rank: int, factors: Tensor | None = None) -> Any:
    """The batch of one rank; ``factors``: its weights."""
    kind, (lengths, values, weights, inverse) = given.kinds[rank], _bags(given, step, rank)
    strides = [len(own) for own in lengths]
    if given.case.weighted and rank == len(given.case.sizes) - 1:
        factors = torch.cat(weights)
    ids, sizes = torch.cat(values), torch.cat(lengths)
    if kind == "plain":
        return rk.KeyedJaggedTensor(KEYS, ids, factors, lengths=sizes)
    if kind == "inverse":
        parts = {"lengths": sizes, "stride_per_key": strides, "inverse_indices": (KEYS, inverse)}
        return rk.KeyedJaggedTensor(KEYS, ids, factors, **parts)
    if kind == "torchrec":
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        per_rank = [[size] for size in strides]
        parts = {"lengths": sizes, "stride_per_key_per_rank": per_rank, "inverse_indices": (KEYS, inverse)}
        return KeyedJaggedTensor(KEYS, ids, factors, **parts)
    unique = rk.KeyedJaggedTensor(KEYS, ids, factors, lengths=sizes, stride_per_key=strides)
    return rk.InverseKeyedJaggedTensor(unique, GROUPS, inverse[[0, 2]])


def whole_batch(given: Distinct, step: int) -> rk.KeyedJaggedTensor:
    """The batch of one process: each feature's bags of all ranks, and inverse indices."""
    parts = [_bags(given, step, rank) for rank in range(len(given.case.sizes))]
    features = range(len(KEYS))
    lengths, values, weights = ([torch.cat([part[i][f] for part in parts]) for f in features] for i in range(3))
    before = torch.zeros(len(KEYS), 1, dtype=torch.int64)
    inverse = []
    for own, *_, places in parts:
        inverse.append(places + before)
        before = before + torch.tensor([[len(own[f])] for f in features])
    return rk.KeyedJaggedTensor(
        KEYS,
        torch.cat(values),
        torch.cat(weights) if given.case.weighted else None,
        lengths=torch.cat(lengths),
        stride_per_key=[len(own) for own in lengths],
        inverse_indices=(KEYS, torch.cat(inverse, dim=1)),
    )


def _train(given: Distinct, model: Any, batches: list[Any], ranks: list[int]) -> list[Tensor]:
    outputs = []
    for step, features in enumerate(batches):
        out = model(features)
        outputs.append(out.detach().clone())
        loss = (out.float() * coefficients(given.case, step, ranks)).sum()
        (loss / len(out) if given.case.gradient != "sum" else loss).backward()
    return outputs


def run(given: Distinct) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs of this rank, and blocks of its state."""
    model, rank = sharded(given.case, collection(given.case)), dist.get_rank()
    batches = [own_batch(given, step, rank) for step in range(given.case.steps)]
    return _train(given, model, batches, [rank]), blocks(model.module.ebc.state_dict())


def one_process(given: Distinct) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and state of one process with the samples of all ranks."""
    model = Model(collection(given.case))
    batches = [whole_batch(given, step) for step in range(given.case.steps)]
    outputs = _train(given, model, batches, list(range(len(given.case.sizes))))
    return outputs, dict(model.ebc.state_dict())


def train_by_feature(given: Distinct, tables: Any, ranks: list[int]) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    """Trains some ranks' samples through ``by_feature`` with weights that require gradients.

    Returns:
        For each step the outputs, and the gradients of the weights of each feature.
    """
    found = []
    for step in range(given.case.steps):
        parts = [_bags(given, step, rank) for rank in ranks]
        weights = [
            drawn_weights(given, step, rank).detach().split([len(v) for v in p[1]])
            for rank, p in zip(ranks, parts, strict=True)
        ]
        joined = [
            [torch.cat([own[f] for own in kind]) for f in range(len(KEYS))]
            for kind in ([p[0] for p in parts], [p[1] for p in parts], weights)
        ]
        lengths, values, factors = (torch.cat(own) for own in joined)
        sizes = [len(own) for own in joined[0]]
        factors.requires_grad_()
        features = rk.KeyedJaggedTensor(KEYS, values, factors, lengths=lengths, stride_per_key=sizes)
        out = tables.by_feature(features)
        loss = 0
        for f, key in enumerate(KEYS):
            generators = [torch.Generator().manual_seed(9000 + 100 * step + 10 * rank + f) for rank in ranks]
            drawn = [
                torch.randn(len(p[0][f]), out[key].shape[1], generator=g)
                for p, g in zip(parts, generators, strict=True)
            ]
            loss = loss + (out[key].float() * torch.cat(drawn)).sum()
        loss.backward()
        grads = factors.grad.split([len(own) for own in joined[1]])
        found.append(({key: t.detach().clone() for key, t in out.items()}, [grad.clone() for grad in grads]))
    return found


def by_feature(given: Distinct) -> tuple:
    """Returns this rank's ``train_by_feature``, blocks, and whether other batches give the outputs of ``forward``."""
    model, rank = sharded(given.case, collection(given.case)), dist.get_rank()
    tables = model.module.ebc
    found = train_by_feature(given, tables, [rank])
    state = blocks(tables.state_dict())
    grouped = own_batch(Distinct(given.case, ("groups",) * len(given.kinds)), 0, rank)
    plain = own_batch(Distinct(given.case, ("plain",) * len(given.kinds)), 0, rank)
    same = []
    for one in (grouped, plain):
        expected = tables(one).to_dict()
        # The other ranks call forward().
        got = tables.by_feature(one) if rank == 0 else tables(one).to_dict()
        same.append(list(got) == list(expected) and all(torch.equal(got[key], expected[key]) for key in expected))
    return found, state, same


def train_weighted(given: Distinct, model: Any, step: int, features: Any, ranks: list[int]) -> None:
    out = model(features)
    (out.float() * coefficients(given.case, step, ranks)).sum().backward()


def weighted(given: Distinct) -> tuple[list[Tensor], dict[str, Any]]:
    """Gradients of this rank's weights per step, and blocks; rank 0's weights require none in the second step."""
    model, rank, grads = sharded(given.case, collection(given.case)), dist.get_rank(), []
    for step in range(given.case.steps):
        weights = drawn_weights(given, step, rank)
        weights.requires_grad_(step != 1 or rank != 0)
        train_weighted(given, model, step, own_batch(given, step, rank, weights), [rank])
        grads.append(torch.zeros(0) if weights.grad is None else weights.grad.clone())
    return grads, blocks(model.module.ebc.state_dict())


def weighted_alone(given: Distinct) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Gradients of every rank's weights per step, and the state of one process."""
    model, ranks, found = Model(collection(given.case)), list(range(len(given.case.sizes))), []
    for step in range(given.case.steps):
        weights = [drawn_weights(given, step, rank) for rank in ranks]
        sizes = [[len(own) for own in _bags(given, step, rank)[1]] for rank in ranks]
        parts = [w.split(own) for w, own in zip(weights, sizes, strict=True)]
        whole = whole_batch(given, step)
        factors = torch.cat([part[f] for f in range(len(KEYS)) for part in parts])
        own = {"lengths": whole.lengths(), "stride_per_key": whole.stride_per_key()}
        features = rk.KeyedJaggedTensor(KEYS, whole.values(), factors, **own, inverse_indices=whole.inverse_indices())
        train_weighted(given, model, step, features, ranks)
        found.append([w.grad for w in weights])
    return found, dict(model.ebc.state_dict())


def values_sent(given: Distinct) -> list[int]:
    """Float32 values that this rank sends to others in a step: pooled rows, then gradients and five control values."""
    model, rank = sharded(given.case, collection(given.case)), dist.get_rank()
    with counted_bytes() as sent:
        _train(given, model, [own_batch(given, 0, rank)], [rank])
    return [count // 4 for count in sent]


def without_inverse(given: Distinct) -> str:
    """Returns the error if rank 1 feeds features with different batch sizes without inverse indices."""
    model, rank = sharded(given.case, collection(given.case)), dist.get_rank()
    features = own_batch(given, 0, rank)
    if rank == 1:
        strides = features.stride_per_key()
        parts = {"lengths": features.lengths(), "stride_per_key": strides}
        features = rk.KeyedJaggedTensor(KEYS, features.values(), **parts)
    try:
        model(features)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
