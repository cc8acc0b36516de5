"""Batches whose samples share bags, looked up by sharded collections and by one process: what their tests compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import KEYS, ROWS, Case, Model, blocks, coefficients, collection, counted_rows, sharded
from torch import Tensor

import rec_kernels as rk

#: Features whose samples share bags together; "g2" is in no group.
GROUPS = (("f0", "f1"), ("f2",))


@dataclass(frozen=True)
class Distinct:
    """A collection that is trained with batches whose samples share bags.

    Args:
        case: the collection, and how it is shared out.
        kinds: of each rank's batches: "inverse", features with batch sizes of their own and inverse indices; "groups",
            an ``rk.InverseKeyedJaggedTensor``; "torchrec", TorchRec's container; "plain", a bag for each sample.
    """

    case: Case = field(default_factory=Case)
    kinds: tuple[str, ...] = ("inverse", "inverse")


def _bags(given: Distinct, step: int, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Lengths, ids and weights of each feature's bags, and which of them each sample has, [F, B]."""
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


def own_batch(given: Distinct, step: int, rank: int) -> Any:
    """The batch of one rank."""
    kind, (lengths, values, weights, inverse) = given.kinds[rank], _bags(given, step, rank)
    strides = [len(own) for own in lengths]
    has_weights = given.case.weighted and rank == len(given.case.sizes) - 1
    factors = torch.cat(weights) if has_weights else None
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
    """The batch of one process: for each feature, the bags of all ranks, and which of them each sample has."""
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
        (out.float() * coefficients(given.case, step, ranks)).sum().backward()
    return outputs


def run(given: Distinct) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs and blocks of the state of this rank."""
    model, rank = sharded(given.case, collection(given.case)), dist.get_rank()
    batches = [own_batch(given, step, rank) for step in range(given.case.steps)]
    return _train(given, model, batches, [rank]), blocks(model.module.ebc.state_dict())


def one_process(given: Distinct) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and state of one process with the samples of all ranks."""
    model = Model(collection(given.case))
    batches = [whole_batch(given, step) for step in range(given.case.steps)]
    outputs = _train(given, model, batches, list(range(len(given.case.sizes))))
    return outputs, dict(model.ebc.state_dict())


def numbers_sent(given: Distinct) -> list[int]:
    """Numbers of float32 that this rank sends to others in a step: pooled rows, then gradients behind four facts."""
    model, rank = sharded(given.case, collection(given.case)), dist.get_rank()
    with counted_rows() as sent:
        _train(given, model, [own_batch(given, 0, rank)], [rank])
    return sent


def without_inverse(given: Distinct) -> str:
    """Rank 1 feeds features with batch sizes of their own and nothing that says what its batch is; the error."""
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
