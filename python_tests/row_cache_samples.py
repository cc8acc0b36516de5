"""Arguments of the row cache's ops, and of the embedding_bag ops with a row cache, for torch.library.opcheck."""

from __future__ import annotations

import torch
from row_cache_cases import Action, Batch, CacheCase, CacheSample, Update, argument_names, call, expected_of
from torch import Tensor

from rec_kernels.ops.table_layout import Size

Call = tuple[tuple, dict[str, object]]

FEATURES = [(0, "sum"), (1, "mean"), (2, "sum"), (0, "mean"), (3, "sum")]
#: Two bags of each feature, and two of the previous batch.
BATCH, EARLIER = (Batch([[2, 1]] * len(FEATURES), seed=seed) for seed in (9, 8))


def arguments(policy: str) -> dict[str, object]:
    """Every argument by name: four tables, the last without a cache, and rows in slots, some of them dirty."""
    tables = [(21, 5, "int8"), (17, 5, "int4"), (13, 16, "bf16"), (6, 5, "int8")]
    decay_every = 2 if policy == "lfu" else 0
    case = CacheCase(CacheSample(tables, FEATURES, {5: 2, 16: 1}, 2, (3,), policy, "stochastic", decay_every))
    model = case.model()
    expected_of(case, [Action("insert", EARLIER), Action("update", Update(1))], model)
    given, batch = case.arguments | case.state(model), case.batch(BATCH)
    given |= {"values": batch.values, "offsets": batch.offsets}
    return given | {"cache_slots": call("row_cache_lookup", given)}


def cached_calls() -> dict[str, list[Call]]:
    """Op -> its calls."""
    torch.manual_seed(2)
    lru, lfu = arguments("lru"), arguments("lfu")
    sizes = lru["layout_sizes"]
    factors, grad = torch.rand(len(lru["values"])), torch.randn(2, sizes[Size.output_dim])
    state = {
        "sum": torch.zeros(sizes[Size.num_rows]),
        "step": torch.tensor(3),
        "lr": torch.tensor(0.1),
        "token": torch.empty(0, requires_grad=True),
    }
    weighted = {"per_sample_weights": factors.requires_grad_()}
    calls = {
        "row_cache_lookup": [lru],
        "row_cache_insert_": [lru, lfu, _without_options(lru)],
        "row_cache_flush_": [lru, _without_options(lru), lru | {"first_slot": 1, "num_slots": 2}],
        "row_cache_plan": [a | {"inserts": i} for a in (lru, lfu) for i in (True, False)],
        "row_cache_stats": [lru],
        "embedding_bag": [lru, lru | weighted, _without_tags(lru) | weighted],
        "embedding_bag_fused": [lru | state | more for more in ({}, weighted)],
        "embedding_bag_backward_fused_": [
            lru | state | {"grad": grad, "per_sample_weights": w} for w in (None, factors.detach())
        ],
        "embedding_bag_backward_per_sample_weights": [lru | {"grad": grad}],
    }
    return {f"{op}.layout": [_call(op, given) for given in samples] for op, samples in calls.items()}


def _without_options(given: dict[str, object]) -> dict[str, object]:
    return {name: a for name, a in given.items() if name not in ("seed", "cache_stats")}


def _without_tags(given: dict[str, object]) -> dict[str, object]:
    """The forward alone: no backward finds rows again."""
    return {name: a for name, a in given.items() if name not in ("cache_tags", "cache_marks")}


def _call(op: str, given: dict[str, object]) -> Call:
    """Builds a call by name with cloned tensors, because ops change them."""
    return (), {name: _own(given[name]) for name in argument_names(op) if name in given}


def _own(argument: object) -> object:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)
