"""States that fail to load on one rank: functions that test_distributed_state.py runs on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import Case, blocks, collection, same_bits, sharded, train
from torch import Tensor


def forged(state: dict[str, Any], mistake: str) -> dict[str, Any]:
    """A state of one process with a defect."""
    name = "ebc.embedding_bags.t0.weight"
    rows = state[name]
    changed: dict[str, Any] = {
        "missing": {},
        "unexpected": {name: rows, "ebc.embedding_bags.t9.weight": rows},
        "rows": {name: rows[:-1]},
        "columns": {name: rows[:, :-1]},
        "format": {name: rows.to(torch.int32 if rows.dtype == torch.uint8 else torch.bfloat16)},
        "dtype": {name: rows, "ebc.embedding_bags.t0.exp_avg": state["ebc.embedding_bags.t0.exp_avg"].long()},
        "complex": {name: rows, "ebc.step": state["ebc.step"].to(torch.complex64)},
        "meta": {name: rows.to("meta")},
        "none": {name: None},
    }[mistake]
    return {key: tensor for key, tensor in state.items() if key != name} | changed


def load_forged(case: Case, mistakes: list[str], state: dict[str, Tensor]) -> tuple[list[str], bool, dict[str, Any]]:
    """Loads states that are defective on rank 1 alone, then the whole one.

    Args:
        state: of one process.

    Returns:
        Errors on this rank, whether its blocks were then unchanged, and the blocks of the whole state.
    """
    model, errors = sharded(case, collection(case, device="meta")), []
    train(case, model, [dist.get_rank()])
    before = blocks(model.module.ebc.state_dict())
    for mistake in mistakes:
        try:
            model.load_state_dict(forged(state, mistake) if dist.get_rank() == 1 else dict(state))
        except RuntimeError as error:
            errors.append(str(error))
    after = blocks(model.module.ebc.state_dict())
    same = all(same_bits(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))
    model.load_state_dict(dict(state))
    return errors, same, blocks(model.module.ebc.state_dict())
