"""Checks for several processes (torch.distributed) that train a collection with a fused optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def refuse_data_parallel(tables: Any) -> None:
    """Raises RuntimeError inside (Distributed)DataParallel; warns once if other processes exist.

    Args:
        tables: a collection with a fused optimizer. ``process_local`` True: each process has its own tables, no
            warning.
    """
    # DDP does not notify modules at construction, but sets this attribute while it runs a forward.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            "a collection with a fused optimizer cannot be trained inside DistributedDataParallel: each "
            "process would update its tables with the gradients of its own rows only, DDP does not synchronize "
            "updates made in the backward, and the replicas would silently diverge; build the collection with "
            "optimizer=None, or let TorchRec shard it (rk.distributed)"
        )
    if tables._is_replica:
        raise RuntimeError(
            "a collection with a fused optimizer cannot be trained inside torch.nn.DataParallel: each replica "
            "would update its own copy of the tables, which is dropped after the step; build the collection "
            "with optimizer=None, or let TorchRec shard it (rk.distributed)"
        )
    if tables.process_local or tables._warned_of_processes:
        return
    # FSDP, and DDP of other parts of the model, leave no trace here.
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    if torch.compiler.is_compiling():
        from rec_kernels.ops.graph_breaks import warn_while_traced

        warn_while_traced(warn_unsynchronized)
    else:
        tables._warned_of_processes = True
        warn_unsynchronized()


def warn_unsynchronized() -> None:
    """Emits the UserWarning that the tables are not synchronized with other processes."""
    warnings.warn(
        f"torch.distributed has {distributed.get_world_size()} processes, and this one trains a collection with "
        "a fused optimizer, which updates only this process's tables: neither FSDP (fully_shard) nor "
        "DistributedDataParallel of other parts of the model synchronizes them, and replicas diverge at the "
        "first update. If each process should have its own tables, set the collection's process_local = True; "
        "for replicas, build it with optimizer=None and reduce its gradients, as DDP does",
        stacklevel=2,
    )
