"""What deepcopy, pickle, torch.save and ``requires_grad_`` make of a collection of tables."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, SupportsIndex

from rec_kernels.nn import bounds
from rec_kernels.nn.cached_tables import CachedTables
from rec_kernels.nn.optimizers import Optimizer
from rec_kernels.nn.tables import Tables
from rec_kernels.nn.tied import Tied, refuse_replaced

if TYPE_CHECKING:
    from typing_extensions import Self


class CopiedTables(CachedTables):
    """Tables that are views of flat tensors: a copy has the flat tensors once, and makes views of them again."""

    embedding_bags: Tables
    optimizer: Optimizer | None
    _tied: Tied

    @abstractmethod
    def _tie_tables(self) -> None: ...

    @abstractmethod
    def _tie_optimizer(self) -> None: ...

    @property
    def _trained_by_torch(self) -> bool:
        """Whether the tables have gradients of torch, and hence an optimizer of torch has their parameters."""
        return self.optimizer is None and not self._storage.is_bytes

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        self._wait()
        if self._file is not None:
            return self._file.__reduce__()
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *others = reduced
        # pickle writes a whole storage for every view of it, so views stay out. They may stay in where the storage is
        # written once, in torch.save, whose protocol is 2, unless it is seen as several dtypes. And they have to where
        # an optimizer of torch may be pickled together with the collection: it is to find the same parameters again.
        if self._storage.is_bytes or (not self._trained_by_torch and int(protocol) > 2):
            state["_modules"] = {**self._modules, "embedding_bags": self.embedding_bags.without_rows()}
        return make, arguments, state, *others

    def __getstate__(self) -> dict:
        refuse_replaced(self._tied)
        return {name: value for name, value in self.__dict__.items() if name != "_tied"}

    def __setstate__(self, state: dict) -> None:
        # Copying and unpickling give every parameter storage of its own.
        super().__setstate__(state)
        self._pending = None
        self._weights = self._in_place(self._weights, self._device)
        self._bad_position.fill_(bounds.NOTHING_BAD)  # as for _reports: what the original has found is the original's
        self._tie_tables()
        self._tie_optimizer()

    def __deepcopy__(self, memo: dict) -> Self:
        self._wait()
        if self._file is not None:
            self._file.__reduce__()
        state = self.__getstate__()
        # Copies of views would double the memory. Whoever else holds a parameter, as an optimizer, gets the copy's.
        for table in self.embedding_bags:
            memo.update({at: t for at, t in self.embedding_bags[table].empty_views().items() if at not in memo})
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(state, memo))
        return other

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As ``torch.nn.Module``'s, of the parameters that can have gradients.

        Tables with a fused optimizer, and those of a collection with a format other than fp32, are left as they are:
        they have none. ``freeze`` is for fused ones.
        """
        for name in self.embedding_bags:
            for kind, parameter in self.embedding_bags[name].named_parameters(recurse=False):
                if kind != "weight" or self._trained_by_torch:
                    parameter.requires_grad_(requires_grad)
        return self
