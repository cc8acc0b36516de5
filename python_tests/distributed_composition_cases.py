"""Sharded tables with compositions of pooled parts or with narrow rows, on ranks and in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_backward_cases import of_rank, train_together, train_weighted
from distributed_cases import (
    Case,
    Model,
    batch,
    blocks,
    coefficients,
    collection,
    differences,
    restore,
    same_bits,
    sharded,
)
from torch import Tensor, nn

import rec_kernels as rk

#: Compressions, by name.
COMPRESSIONS = {
    "narrow": rk.MixedDimension(6),
    "mult": rk.QuotientRemainder(10, compose="pooled"),
    "add": rk.QuotientRemainder(10, combine="add", compose="pooled"),
    "concat": rk.QuotientRemainder(10, combine="concat", compose="pooled"),
}


def train(case: Case, model: nn.Module, tables: Any, ranks: list[int]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Trains tables, with torch's SGD for parameters without a fused optimizer; returns outputs and these gradients.

    Then trains with several lookups per step, looks up in eval(), and trains with weights that require gradients.
    """
    fused = case.optimizer != "torch"
    named = {n: p for n, p in tables.named_parameters() if not fused or n.endswith("projection")}
    optimizer = torch.optim.SGD(named.values(), lr=0.1) if named else None
    outputs: list[Tensor] = []
    grads: dict[str, list[Tensor]] = {name: [] for name in named}
    for step in range(case.steps):
        out = model(batch(case, step, ranks))
        outputs.append(out.detach().clone())
        (out.float() * coefficients(case, step, ranks)).sum().backward()
        for name, matrix in named.items():
            grads[name].append(matrix.grad.clone())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    outputs += train_together(replace(case, steps=1), model, ranks)
    with torch.no_grad():
        outputs.append(model.eval()(batch(case, 7, ranks)))
    model.train()
    if fused:
        outputs += train_weighted(replace(case, steps=3), model, tables, ranks)
    return outputs, grads


def check_trained(found: list[dict[str, Any]], case: Case, outputs: list[Tensor], state: dict) -> None:
    """Asserts that two ranks' ``run`` has the outputs and state of one process, and that loading restores them."""
    for i, want in enumerate(outputs[:7]):
        assert same_bits(torch.cat([own["outputs"][i] for own in found]), want)
    for step, want in enumerate(outputs[7:]):  # gradients of weights; in step 1 rank 0's require none
        for rank in [1] if step == 1 else [0, 1]:
            assert same_bits(found[rank]["outputs"][7 + step], want[of_rank(case, step, rank)])
    for name in ("state", "loaded"):
        assert differences(state, [own[name] for own in found]) == []
    assert differences(state, [own["begun"] for own in found]) != []


def run(case: Case, other: str, folder: str) -> dict[str, Any]:
    """Trains, saves, and loads into another plan with different initial rows.

    Returns:
        "outputs" and "grads" of ``train`` on this rank, "state", the "loaded" state, and the "names" of parameters and
        of those under DistributedDataParallel.
    """
    model = sharded(case, collection(case))
    outputs, grads = train(case, model, model.module.ebc, [dist.get_rank()])
    found: dict[str, Any] = {"outputs": outputs, "grads": grads, "state": blocks(model.module.ebc.state_dict())}
    found["names"] = [name for name, _ in model.module.ebc.named_parameters() if name != "all_tables"]
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = sharded(replace(case, plan=other), collection(case, device="meta"))
    found["begun"] = blocks(loaded.module.ebc.state_dict())
    restore(loaded, folder)
    found["loaded"] = blocks(loaded.module.ebc.state_dict())
    return found


def one_process(case: Case) -> tuple[list[Tensor], dict[str, list[Tensor]], dict[str, Tensor]]:
    """Outputs, gradients of projections, and state of one process with the samples of all ranks."""
    model = Model(collection(case))
    outputs, grads = train(case, model, model.ebc, [0, 1])
    return outputs, grads, dict(model.ebc.state_dict())


def averaged(case: Case) -> list[Tensor]:
    """Returns gradients of this rank's projections, with losses that are means over each rank's samples."""
    model = sharded(case, collection(case))
    out, step = model(batch(case, 0, [dist.get_rank()])), 0
    ((out * coefficients(case, step, [dist.get_rank()])).sum() / len(out)).backward()
    return [p.grad.clone() for n, p in model.module.ebc.named_parameters() if n.endswith("projection")]
