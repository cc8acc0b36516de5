"""The tables of a module of another package: their rows, and the state of the optimizer that trains them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rec_kernels.nn.tables.optimizers import LAMB, SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad, RowwiseAdam
from rec_kernels.ops.row_formats import FLOAT_DTYPES

#: The optimizers of this package by the names that their ops have; ``rk.AdamW`` is an "adam", too.
FAMILIES: dict[str, type[Optimizer]] = {
    kind.op_name: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam, LAMB)
}


@dataclass(frozen=True)
class Family:
    """The kind of optimizer that trains a table.

    Args:
        name: as of ``FAMILIES``. described: what the other package calls the optimizer, for messages.
    """

    name: str
    described: str


@dataclass(frozen=True)
class TableNumbers:
    """The numbers that one table has learned.

    Args:
        name: the table's. weight: [E, D] float32, float16 or bfloat16.
        state: kind of state, as of this package's optimizers -> [E, D], or [E] of a row-wise one.
        step: updates so far; None: nobody counts them.
        family: of the optimizer whose state it is; None: only the rows are known.
    """

    name: str
    weight: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    step: int | None = None
    family: Family | None = None


class Peer(ABC):
    """Tables of another package's module.

    Attributes:
        families: of what trains each table, in the order of ``names``; none: only the rows are known.
        has_names: whether tables have names, and not only an order.
        is_trained: whether something trains a table.
    """

    families: Sequence[Family] = ()
    has_names = True
    is_trained = True

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the tables, in their order."""

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The rows of each table, [E, D], in the module's own memory."""

    @abstractmethod
    def read(self) -> list[TableNumbers]:
        """The tables' numbers, in the module's own memory where it has them in this shape.

        Raises:
            ValueError: the state of a table is not what its family has.
        """

    @abstractmethod
    def write(self, tables: Sequence[TableNumbers]) -> None:
        """Writes numbers of these shapes into the tables, in their order; state only where ``families`` are known."""

    @abstractmethod
    def counterparts(self) -> list[Optimizer]:
        """This package's optimizer with the formulas and numbers of each table's.

        Raises:
            ValueError: there is none; the message says why.
        """


class Together(Peer):
    """Tables of several peers, one peer's behind the other's.

    Args:
        peers: at least one, of other names.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self.families = [family for peer in peers for family in peer.families]
        self.is_trained = any(peer.is_trained for peer in peers)

    def names(self) -> list[str]:
        """The names of the tables, in their order."""
        return [name for peer in self._peers for name in peer.names()]

    def weights(self) -> list[Tensor]:
        """The rows of each table, in the modules' own memory."""
        return [weight for peer in self._peers for weight in peer.weights()]

    def read(self) -> list[TableNumbers]:
        """The tables' numbers."""
        return [table for peer in self._peers for table in peer.read()]

    def write(self, tables: Sequence[TableNumbers]) -> None:
        """Hands each peer its tables."""
        rest = list(tables)
        for peer in self._peers:
            own = len(peer.names())
            peer.write(rest[:own])
            del rest[:own]

    def counterparts(self) -> list[Optimizer]:
        """The counterparts of all tables' optimizers."""
        return [optimizer for peer in self._peers for optimizer in peer.counterparts()]


def check_weight(name: str, weight: Tensor) -> None:
    """Raises ValueError if the rows of a table are none that this package's tables can have."""
    if type(weight.detach()) is not Tensor:
        raise ValueError(
            f"table {name!r}: weight must be an ordinary tensor, got {type(weight.detach()).__name__}: convert the "
            "model before it is sharded or quantized"
        )
    if weight.dim() != 2 or weight.dtype not in FLOAT_DTYPES.values():
        raise ValueError(
            f"table {name!r}: weight must be [num_embeddings, embedding_dim] float32, float16 or bfloat16, got "
            f"{list(weight.shape)} {weight.dtype}"
        )


def check_state(name: str, family: str, weight: Tensor, state: dict[str, Tensor]) -> None:
    """Raises ValueError if a table's state is not of the shapes that the family has, or no floats."""
    for kind, each in FAMILIES[family].state.items():
        shape = list(weight.shape) if each else [weight.shape[0]]
        given = state.get(kind)
        if given is None or list(given.shape) != shape or not given.is_floating_point():
            found = "nothing" if given is None else f"{list(given.shape)} {given.dtype}"
            raise ValueError(f"table {name!r}: {kind} of {family} must be floats {shape}, got {found}")


def refuse_options(described: str, found: Mapping[str, object], why: str) -> None:
    """Raises ValueError that names the options of an optimizer for which this package has no formula."""
    if found:
        given = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(
            f"{described} with {given} has no counterpart here ({why}): give optimizer= the one that is to go on"
        )
