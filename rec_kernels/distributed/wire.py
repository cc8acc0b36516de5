"""Wire: the row formats of what ranks send one another."""

from __future__ import annotations

from dataclasses import dataclass

from rec_kernels.nn.arguments import check_choice
from rec_kernels.ops.row_formats import ROW_FORMATS


@dataclass(frozen=True)
class Wire:
    """Row formats in which pooled columns, or rows of ids, and their gradients are sent, as TorchRec's qcomms.

    One row is encoded per bag, or per id, and shard. A rank also rounds the rows for its own samples, so that values do
    not depend on the rank of a sample. Rows that the format would not make smaller are sent as float32.

    Args:
        forward: of pooled columns or rows; None: float32, not rounded.
        backward: of gradients; None: float32.
        rounding: "nearest", or "stochastic", whose expected value is the input.

    Raises:
        ValueError: an unknown format or rounding.
    """

    forward: str | None = None
    backward: str | None = None
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) is not None:
                check_choice(f"wire.{name}", getattr(self, name), ROW_FORMATS)
        check_choice("wire.rounding", self.rounding, ("nearest", "stochastic"))
