"""The face of a fused optimizer that TorchRec's optimizers and learning-rate wrappers expect."""

from __future__ import annotations

from typing import Any

from torchrec.optim.fused import FusedOptimizer as TorchRecFused

from rec_kernels.nn.training.optimizers import FusedOptimizer


class _Group(dict):
    """A parameter group without parameters, whose ``lr`` is that of another group."""

    def __init__(self, group: dict) -> None:
        super().__init__(params=[], lr=group["lr"])
        self._group = group

    def __getitem__(self, key: str) -> Any:
        return self._group["lr"] if key == "lr" else super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            self._group["lr"] = value
        super().__setitem__(key, value)


class TorchRecFace(TorchRecFused):
    """The learning rate of a sharded collection; its state is in the collection's ``state_dict()``.

    Args:
        face: the optimizer of this rank's shards, whose learning rate this one shows and sets.
    """

    def __init__(self, face: FusedOptimizer) -> None:
        super().__init__({}, {}, [_Group(face.param_groups[0])])

    def step(self, closure: Any = None) -> None:
        """Nothing to do: updates are made in the backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing to do: tables keep no gradient."""
