"""Functions that test_distributed_agreement.py runs on each rank: settings that ranks must share, and global norms."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import KEYS, Case, batch, blocks, collection, sharded, train
from distributed_torchrec_cases import Loss
from torch import Tensor, nn

import rec_kernels as rk


def train_clipped(case: Case, model: nn.Module, ranks: list[int]) -> tuple[list[float], list[Tensor]]:
    """Trains by torch's SGD with clipped gradients; returns the norms and the final dense layer."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(case.steps):
        loss, _ = model(batch(case, step, ranks))
        optimizer.zero_grad()
        (8 * loss).backward()
        for name, parameter in model.named_parameters():
            if "dense" not in name and parameter.grad is not None:
                parameter.grad *= 256  # so that tables have the largest gradients
        norm_type = (2.0, float("inf"), 1.0)[step % 3]
        if dist.is_initialized():
            norm = rk.distributed.clip_grad_norm_(model, 0.5, norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        norms.append(norm.item())
        optimizer.step()
    return norms, [p.detach().clone() for n, p in model.named_parameters() if "dense" in n]


def clipped(case: Case) -> tuple[list[float], list[Tensor]]:
    return train_clipped(case, sharded(case, collection(case), Loss), [dist.get_rank()])


def different_states_and_freezing(case: Case) -> list[str]:
    """Returns this rank's errors after loading different steps, and after freezing a feature on one rank."""
    model, rank, errors = sharded(case, collection(case)), dist.get_rank(), []
    state = {n: t.clone() for n, t in model.state_dict().items()}
    state["ebc.step"] += 5 * rank
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        errors.append(str(error))
    before = blocks(model.module.ebc.state_dict())
    if rank == 0:
        model.module.ebc.freeze("f1")
    try:
        train(case, model, [rank])
    except RuntimeError as error:
        errors.append(str(error))
    model.module.ebc.unfreeze("f1")
    after = blocks(model.module.ebc.state_dict())
    errors += [name for name in before for a, b in zip(before[name], after[name], strict=True) if not a[1].equal(b[1])]
    train(case, model, [rank])
    return errors


def error_of(call: Callable[[], Any]) -> str:
    """Returns the error that a call raises, or "none"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def different_replicas(case: Case) -> tuple[list[str], bool]:
    """Returns errors of replicas that ranks use differently, and whether a replica frozen on both stays unchanged.

    Rank 1 freezes a replica; raises inside a block, which loading a state repairs; uses a replica's weight beside its
    lookups, also inside a block, and without lookups; and fails in the backward.
    """
    model, rank = sharded(case, collection(case)), dist.get_rank()
    ebc = model.module.ebc
    state = {n: t.clone() for n, t in ebc.state_dict().items()}
    weight = ebc.shards.embedding_bags["t0"].weight
    weight.requires_grad_(rank == 1)
    errors = [error_of(lambda: train(replace(case, steps=1), model, [rank]))]
    weight.requires_grad_(False)
    train(case, model, [rank])
    frozen = torch.equal(weight, state["embedding_bags.t0.weight"])
    weight.requires_grad_()

    def block() -> None:
        with ebc.accumulate():
            train(replace(case, steps=1), model, [rank])
            if rank == 1:
                raise KeyError("mine")

    def use_replica() -> None:
        loss = model(batch(case, 0, [rank])).sum()
        (loss + ebc.embedding_bags["t0"].weight.sum() if rank == 1 else loss).backward()

    def use_replica_in_block() -> None:
        with ebc.accumulate():
            use_replica()

    def alone() -> None:
        ebc.embedding_bags["t0"].weight.sum().backward()

    errors += [error_of(block), error_of(lambda: train(replace(case, steps=1), model, [rank]))]
    ebc.load_state_dict(state)
    errors.append(error_of(lambda: train(replace(case, steps=1), model, [rank])))

    def failing() -> None:
        output, layer = ebc(batch(case, 0, [rank])), torch.ones(1, requires_grad=True)
        other = Failing.apply(layer) if rank == 1 else 2 * layer
        (output.values().sum() + other).sum().backward()  # fails between sending and receiving gradients

    errors += [error_of(use_replica), error_of(use_replica_in_block), error_of(alone), error_of(failing)]
    errors.append(error_of(lambda: train(replace(case, steps=1), model, [rank])))
    return errors, frozen


def replicas_of_torch(case: Case) -> list[str]:
    """Returns errors of three steps by torch's SGD; in the second one, rank 1 uses replicas with another factor."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    ebc, errors = model.module.ebc, []
    optimizer = torch.optim.SGD(rk.dense_parameters(ebc), lr=0.1)
    for factor in (1, 1 + rank, 1):
        optimizer.zero_grad()
        used = sum(p.sum() for p in ebc.parameters())
        errors.append(error_of((model(batch(case, 0, [rank])).sum() + factor * used).backward))
        optimizer.step()
    return errors


class Failing(torch.autograd.Function):
    """A layer with a failing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("mine")


class Unreadable:
    """An iterable that fails in ``__iter__`` on rank 0."""

    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 0:
            raise OSError("no such file")
        return iter([1, 2])


def unreadable_data(case: Case) -> str:
    """Returns the error on each rank if one rank's iterable has no iterator."""
    return error_of(lambda: list(rk.distributed.until_all_end(Unreadable(), 0)))


def settings(case: Case) -> tuple[list[str], float, str, float]:
    """Returns errors of settings, copies and a reset, and the learning rate after a group's ``update``.

    Also returns the shards' ``bounds_check`` after changing "none" to "ignore", and the sum of an output of bad ids.
    """
    plain = collection(case)
    plain.bounds_check = "none"
    model = sharded(case, plain)
    ebc, group = model.module.ebc, model.fused_optimizer.param_groups[0]
    errors = [error_of(lambda: setattr(ebc, "bounds_check", "warn")), error_of(lambda: group.update(weight_decay=0.5))]

    def freezes_in_block() -> None:
        with ebc.accumulate():
            ebc.requires_grad_(False)
            train(replace(case, steps=1), model, [dist.get_rank()])

    errors.append(error_of(freezes_in_block))
    errors += [error_of(partial(put, "embedding_bags", nn.ModuleDict())) for put in (ebc.__setattr__, ebc.add_module)]
    errors += [error_of(partial(make, ebc)) for make in (copy.copy, copy.deepcopy, pickle.dumps)]
    errors.append(error_of(ebc.reset_parameters))
    ebc.bounds_check = "none" if dist.get_rank() else "error"
    errors.append(error_of(lambda: train(replace(case, steps=1), model, [dist.get_rank()])))
    group.update(lr=0.75)
    ebc.bounds_check = "ignore"
    ids = torch.full((len(KEYS),), 10**6)
    out = model(rk.KeyedJaggedTensor(KEYS, ids, lengths=torch.ones_like(ids)))
    return errors, ebc.optimizer.param_groups[0]["lr"], ebc.shards.bounds_check, out.abs().sum().item()


def partial_state(case: Case) -> tuple[list[str], bool]:
    """Returns errors of loading one table's state, strictly or not, and whether both modules loaded the table."""
    model, whole = sharded(case, collection(case)), collection(case).state_dict()
    ebc, part = model.module.ebc, {n: t for n, t in whole.items() if n.startswith("embedding_bags.t0.")}
    weight = part["embedding_bags.t0.weight"]
    errors, good = [error_of(lambda: ebc.load_state_dict(part))], True
    for number, load in enumerate((ebc.load_state_dict, model.load_state_dict), 1):
        weight.fill_(number)
        given = {n if number == 1 else f"ebc.{n}": t for n, t in part.items()}
        errors.append(error_of(partial(load, given, strict=False)))
        good &= all(bool((block == number).all()) for _, block in blocks(ebc.state_dict())["embedding_bags.t0.weight"])
    return errors, good


def whole_fsdp(case: Case) -> tuple[str, bool]:
    """Returns FSDP2's error for a whole model, and whether the model's ``requires_grad_(False)`` freezes tables."""
    from distributed_torchrec_cases import WithLayers
    from torch.distributed.fsdp import fully_shard

    model = sharded(case, collection(case), WithLayers, replicates=False).module
    error = error_of(lambda: fully_shard(sharded(case, collection(case), WithLayers, replicates=False).module))
    fully_shard(model, ignored_params={model.ebc.all_tables})
    model.requires_grad_(False)
    before = blocks(model.ebc.state_dict())
    train(case, model, [dist.get_rank()])
    after = blocks(model.ebc.state_dict())
    names = [name for name in before if "embedding_bags" in name]
    return error, all(torch.equal(a[1], b[1]) for n in names for a, b in zip(before[n], after[n], strict=True))


def clipped_with_fsdp(case: Case) -> tuple[float, float]:
    """Returns the global gradient norm with layers sharded by FSDP2, and the layers' norm after clipping."""
    from distributed_torchrec_cases import WithLayers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = sharded(case, collection(case), WithLayers, replicates=False)
    fully_shard(model.module.dense, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(batch(case, 0, [dist.get_rank()])).backward()
    norm = rk.distributed.clip_grad_norm_(model, 0.01)
    left = [p.grad.full_tensor() for p in model.module.dense.parameters()]
    return norm.item(), sum(g.square().sum() for g in left).sqrt().item()


def shared_weight(case: Case) -> list[str]:
    """Returns errors of an output layer that shares a sharded table's weight: with lookups on rank 1, and without."""
    ebc, rank = collection(case), dist.get_rank()
    layer = nn.Linear(16, 100, bias=False)
    layer.weight = ebc.embedding_bags["t0"].weight
    model, errors = sharded(case, ebc), []
    for block in (contextlib.nullcontext, model.module.ebc.accumulate if ebc.optimizer else contextlib.nullcontext):
        with block():
            out = model(batch(case, 0, [rank]))
            loss = out.sum() + layer(out[:, :16]).sum() if rank else out.sum()
            errors.append(error_of(loss.backward))
    return [*errors, error_of(layer(torch.ones(1, 16)).sum().backward)]


def evaluating_rank(case: Case) -> dict[str, Any]:
    """Returns blocks after training in which only rank 1 also looks up without gradients and in eval()."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    for step in range(case.steps):
        model.module.ebc.train(rank == 0 or step % 2 == 0)
        with torch.set_grad_enabled(rank == 0):
            model.module.ebc(batch(case, 100 + step, [rank])).values()
        model.module.ebc.train()
        train(replace(case, steps=1), model, [rank])
    return blocks(model.module.ebc.state_dict())


def planner_and_format_errors(case: Case) -> list[str]:
    """Returns this rank's errors for a topology with too little memory, and for a state in another row format."""
    from torchrec.distributed.planner import Topology

    tables, errors = collection(case, device="meta"), []
    model, sharders = nn.Sequential(tables), [rk.distributed.EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=100)
    planner = rk.distributed.planner(model, sharders, topology)
    whole = collection(replace(case, format="fp32")).state_dict()
    ebc = sharded(case, tables).module.ebc
    for call in (lambda: planner.collective_plan(model, sharders), lambda: ebc.load_state_dict(whole)):
        try:
            call()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def one_checkpoint(case: Case, folder: str) -> tuple[bool, list[bool]]:
    """Saves a model and optimizers in one checkpoint and loads each separately; returns this rank's comparisons."""
    import torch.distributed.checkpoint as dcp

    def made(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        model = sharded(case, collection(case), Loss)
        dense = torch.optim.Adam(rk.dense_parameters(model), lr=0.1)
        model(batch(case, seed, [dist.get_rank()]))[0].backward()
        dense.step()
        rates = model.module.ebc.optimizer
        rates.param_groups[0]["lr"] = 0.25 * (seed + 1)
        return model, {"model": model.state_dict(), "dense": dense.state_dict(), "rates": rates.state_dict()}

    model, saved = made(0)
    before = blocks(model.module.ebc.state_dict())
    dcp.save(saved, checkpoint_id=folder)
    other, state = made(1)
    for parts in (["model"], ["dense", "rates"]):
        dcp.load({name: state[name] for name in parts}, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    after = blocks(other.module.ebc.state_dict())
    same = all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))
    lrs = [group["lr"] == 0.25 for group in state["rates"]["param_groups"]]
    moments = [[own["exp_avg"] for own in o["dense"]["state"].values()] for o in (saved, state)]
    return same, [*lrs, *(a.equal(b) for a, b in zip(*moments, strict=True))]
