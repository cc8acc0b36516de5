"""Tables of another package's module: their rows, and the state of the optimizer that trains them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rec_kernels.nn.tables.optimizers import LAMB, SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad, RowwiseAdam
from rec_kernels.ops.row_formats import FLOAT_FORMATS

#: Op name -> optimizer of this package; ``rk.AdamW`` shares "adam".
FAMILIES: dict[str, type[Optimizer]] = {
    kind.op_name: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam, LAMB)
}


@dataclass(frozen=True)
class Family:
    """The kind of optimizer that trains a table.

    Args:
        name: a key of ``FAMILIES``. described: the other package's name of the optimizer, for messages.
    """

    name: str
    described: str


@dataclass(frozen=True)
class TableTensors:
    """The rows and optimizer state of one table.

    Args:
        name: the table's name. weight: [E, D] float32, float16 or bfloat16.
        state: this package's name of each state tensor -> [E, D], or [E] for per-row state.
        step: number of updates; None: it is not counted.
        family: the kind of optimizer that has this state; None: only the rows are known.
    """

    name: str
    weight: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    step: int | None = None
    family: Family | None = None


class ExternalTables(ABC):
    """Tables of another package's module.

    Attributes:
        families: the kind of optimizer of each table, in the order of ``names``; empty: only the rows are known.
        has_names: True if tables are matched by name, False if by position.
        is_trained: True if any table is trained.
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
    def read(self) -> list[TableTensors]:
        """Reads rows and state of the tables, as views of the module's memory where the shapes agree.

        Raises:
            ValueError: the state of a table does not fit its family.
        """

    @abstractmethod
    def write(self, tables: Sequence[TableTensors]) -> None:
        """Writes rows into the tables, in their order, and optimizer state if ``families`` are known."""

    @abstractmethod
    def counterparts(self) -> list[Optimizer]:
        """The equivalent optimizer of this package for each table.

        Raises:
            ValueError: none exists; the message has the reason.
        """


class CombinedTables(ExternalTables):
    """Concatenation of several ``ExternalTables``.

    Args:
        parts: at least one; no two have a table of the same name.
    """

    def __init__(self, parts: Sequence[ExternalTables]) -> None:
        self._parts = parts
        self.families = [family for part in parts for family in part.families]
        self.is_trained = any(part.is_trained for part in parts)

    def names(self) -> list[str]:
        return [name for part in self._parts for name in part.names()]

    def weights(self) -> list[Tensor]:
        return [weight for part in self._parts for weight in part.weights()]

    def read(self) -> list[TableTensors]:
        return [table for part in self._parts for table in part.read()]

    def write(self, tables: Sequence[TableTensors]) -> None:
        remaining = list(tables)
        for part in self._parts:
            count = len(part.names())
            part.write(remaining[:count])
            del remaining[:count]

    def counterparts(self) -> list[Optimizer]:
        return [optimizer for part in self._parts for optimizer in part.counterparts()]


def check_weight(name: str, weight: Tensor) -> None:
    """Raises ValueError if this package's tables cannot hold the rows."""
    if type(weight.detach()) is not Tensor:
        raise ValueError(
            f"table {name!r}: weight must be an ordinary tensor, got {type(weight.detach()).__name__}: convert the "
            "model before it is sharded or quantized"
        )
    if weight.dim() != 2 or weight.dtype not in FLOAT_FORMATS:
        raise ValueError(
            f"table {name!r}: weight must be [num_embeddings, embedding_dim] float32, float16 or bfloat16, got "
            f"{list(weight.shape)} {weight.dtype}"
        )


def check_state(name: str, family: str, weight: Tensor, state: dict[str, Tensor]) -> None:
    """Raises ValueError if a table's state does not have the family's shapes or is not floating point."""
    for kind, each in FAMILIES[family].state.items():
        shape = list(weight.shape) if each else [weight.shape[0]]
        given = state.get(kind)
        if given is None or list(given.shape) != shape or not given.is_floating_point():
            found = "nothing" if given is None else f"{list(given.shape)} {given.dtype}"
            raise ValueError(f"table {name!r}: {kind} of {family} must be floats {shape}, got {found}")


def refuse_options(described: str, found: Mapping[str, object], why: str) -> None:
    """Raises ValueError, naming them, if ``found`` has optimizer options that this package does not implement."""
    if found:
        given = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(
            f"{described} with {given} has no counterpart here ({why}): pass the optimizer to continue with as "
            "optimizer="
        )
