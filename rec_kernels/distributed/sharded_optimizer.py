"""A sharded collection's fused optimizer as torch's, with the groups of the whole collection, and as TorchRec's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchrec.optim.fused import FusedOptimizer as TorchRecFused

from rec_kernels.nn.training.fused_optimizer import OPTIONS, FusedOptimizer, RateGroup


class ShardedFusedOptimizer(FusedOptimizer):
    """The fused optimizer of a rank's shards, with the parameter groups of the whole collection.

    A group has the rank's shards of its tables, possibly none. States are those of one process's collection.

    Args:
        tables: weights of the shards. rate_groups: of the whole collection's stored tables.
        stored: for each shard, the index of its stored table. lr, step: ``FusedOptimizer``'s.
    """

    def __init__(
        self,
        tables: Sequence[Tensor],
        rate_groups: Sequence[RateGroup],
        stored: Sequence[int],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        self._sizes = [len(group.stored) for group in rate_groups]
        own = []
        for group in rate_groups:
            mine = [i for i, number in enumerate(stored) if number in group.stored]
            own.append(group._replace(stored=mine, table_ids=[stored[i] for i in mine]))
        super().__init__(tables, own, lr, step)

    def state_dict(self) -> dict[str, Any]:
        """The learning rates, and what schedulers have added, by tables of the whole collection."""
        state, tables = super().state_dict(), 0
        for group, size in zip(state["param_groups"], self._sizes, strict=True):
            group["params"] = list(range(tables, tables + size))
            tables += size
        return state | {"state": {i: {"step": self._step} for i in range(tables)}}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the learning rates of any plan, or of one process.

        Raises:
            ValueError: the state has other groups of tables; nothing was changed.
        """
        groups, own = self._in_order(state_dict), super().state_dict()
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            raise ValueError(
                f"the state has parameter groups of {sizes} tables, but the collection of {self._sizes}: the "
                "state must come from a collection with the same tables; nothing was changed"
            )
        mine = zip(groups, own["param_groups"], strict=True)
        loaded = [{**group, "params": shards["params"]} for group, shards in mine]
        super().load_state_dict({"state": own["state"], "param_groups": loaded})


class _Group(dict):
    """A parameter group without parameters that forwards ``lr`` and other options to another group."""

    def __init__(self, group: dict) -> None:
        super().__init__(params=[], lr=group["lr"])
        self._group = group

    def __getitem__(self, key: str) -> Any:
        return self._group["lr"] if key == "lr" else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """``self[key]``, or ``default``."""
        return self._group["lr"] if key == "lr" else super().get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" or key in OPTIONS:
            self._group[key] = value
        super().__setitem__(key, value)

    def update(self, *args: object, **kwargs: object) -> None:
        """Sets each item as ``self[key] = value`` does."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class TorchRecFusedOptimizer(TorchRecFused):
    """The learning rates of a sharded collection; the optimizer state is in the collection's ``state_dict()``.

    Args:
        optimizer: of this rank's shards, whose learning rates this one reads and sets.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        super().__init__({}, {}, [_Group(group) for group in optimizer.param_groups])

    def step(self, closure: Any = None) -> None:
        """Does nothing: the backward updates the tables."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: tables have no gradients."""

    def save_param_groups(self, save: bool) -> None:
        """Refuses states with learning rates: TorchRec finds groups by their parameters, and these have none.

        Raises:
            NotImplementedError: ``save`` is True.
        """
        if save:
            raise NotImplementedError(
                "the state of model.fused_optimizer does not have the learning rates of sharded tables: save "
                "and load the state_dict() of each sharded collection's optimizer instead"
            )
