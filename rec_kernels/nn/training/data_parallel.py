"""Several processes that train one model (torch.distributed): what a fused optimizer says to that."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def refuse_data_parallel(tables: Any) -> None:
    """Raises RuntimeError inside (Distributed)DataParallel; warns, once, where there are other processes.

    Args:
        tables: a collection with a fused optimizer. Its ``process_local`` says whether each process is to have its own.
    """
    # DDP has no hook for a module at its construction. While it runs a forward, it says so here.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            "a collection with a fused optimizer cannot be trained inside DistributedDataParallel: each "
            "process would update its tables with the gradients of its own rows only, DDP synchronises no update made "
            "in the backward, and the replicas would differ silently; build the collection with optimizer=None, or "
            "have TorchRec shard it (rk.distributed)"
        )
    if tables._is_replica:
        raise RuntimeError(
            "a collection with a fused optimizer cannot be trained inside torch.nn.DataParallel: each replica would "
            "update tables of its own, which are dropped after the step; build the collection with optimizer=None, or "
            "have TorchRec shard it (rk.distributed)"
        )
    if tables.process_local or tables._told_of_processes:
        return
    # FSDP, and DDP of other parts of the model, leave no trace here.
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    if torch.compiler.is_compiling():
        from rec_kernels.nn.graph_breaks import warn_while_traced

        warn_while_traced(warn_of_processes)
    else:
        tables._told_of_processes = True
        warn_of_processes()


def warn_of_processes() -> None:
    """UserWarning: the tables are not replicas of the other processes'."""
    warnings.warn(
        f"torch.distributed has {distributed.get_world_size()} processes, and this one trains a collection with a "
        "fused optimizer, whose updates change this process's tables only: nothing synchronises them, neither FSDP "
        "(fully_shard) nor DistributedDataParallel of other parts of the model, and replicas differ from the first "
        "update on. If each process is to have tables of its own, set process_local = True of the collection; for "
        "replicas, build it with optimizer=None and have its gradients reduced, as DDP does",
        stacklevel=2,
    )
