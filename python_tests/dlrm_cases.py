"""Options and data sets of the trainer's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rec_kernels.dlrm.config import TrainConfig
    from rec_kernels.dlrm.reader import Reader

#: A run on the fixture ``data`` of conftest.py with a small model.
PLAIN: dict[str, Any] = {"data": "synthetic", "rows": 3000, "table_rows": 300, "batch_size": 500, "threads": 1}
OPTIONS: dict[str, Any] = PLAIN | {"embedding_dim": 4, "bottom": (5,), "top": (6,)}


def flags_of(options: dict[str, Any]) -> list[str]:
    """Formats the options as command-line flags."""
    return [item for name, value in options.items() for item in (f"--{name.replace('_', '-')}", str(value))]


def plain_config(runs_dir: Path, **options: Any) -> TrainConfig:
    """The config of a run of ``PLAIN``."""
    from rec_kernels.dlrm.config import TrainConfig

    return TrainConfig(**PLAIN | {"runs_dir": str(runs_dir), "run": "run"} | options)


class Changed:
    """A data set whose batches are transformed by ``change``."""

    def __init__(self, data, change):
        self.data, self.change = data, change
        self.name, self.num_dense, self.features, self.num_rows = (
            data.name,
            data.num_dense,
            data.features,
            data.num_rows,
        )

    def batches(self, split, batch_size, start=0):
        return self.change(self.data.batches(split, batch_size, start))


def reader(data: Any, batch_size: int, valid_fraction: float = 0.0, dedup: str = "auto") -> Reader:
    """The reader of a run with these options."""
    from rec_kernels.dlrm.config import TrainConfig
    from rec_kernels.dlrm.reader import Reader

    return Reader(TrainConfig(batch_size=batch_size, valid_fraction=valid_fraction, dedup=dedup), data)
