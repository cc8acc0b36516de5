"""Sharders, by which TorchRec shards collections of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingEnv2D

from rec_kernels.distributed.agreement import run_on_all_ranks
from rec_kernels.distributed.parameter_sharding import SHARDING_TYPES, Shard, possible_types, shards_from_plan
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.distributed.sharded_embedding_bag_collection import ShardedEmbeddingBagCollection
from rec_kernels.distributed.sharded_embedding_collection import ShardedEmbeddingCollection
from rec_kernels.distributed.wire import Wire
from rec_kernels.nn.arguments import check_choice, is_list
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.tables.file_store import FileStore
from rec_kernels.nn.training.dense_parameters import in_backward
from rec_kernels.ops.row_formats import FLOAT_DTYPES


class CollectionSharder(ModuleSharder):
    """The ``ModuleSharder`` of collections of one kind.

    Args:
        gradient, wire, sharding_types: ``EmbeddingBagCollectionSharder``'s.

    Attributes:
        wire: as given; ``Wire()`` if None. row_wise: ``EmbeddingBagCollectionSharder``'s.
    """

    row_wise = "ordered"
    _kind: type[TableCollection]
    _sharded_kind: type[ShardedCollection]

    def __init__(
        self,
        *,
        gradient: str = "global_mean",
        wire: Wire | None = None,
        sharding_types: Sequence[str] = ("table_wise", "row_wise"),
    ) -> None:
        super().__init__()
        check_choice("gradient", gradient, ("global_mean", "sum", "torchrec"))
        if not isinstance(wire, (Wire, type(None))):
            raise ValueError(f"wire must be an rk.distributed.Wire or None, got {wire!r}")
        self.wire = wire or Wire()
        if not is_list(sharding_types) or not sharding_types:
            raise ValueError(
                f"sharding_types must be a list of one or more of {SHARDING_TYPES}, got {sharding_types!r}"
            )
        for i, kind in enumerate(sharding_types):
            check_choice(f"sharding_types[{i}]", kind, SHARDING_TYPES)
        self._options: dict[str, Any] = {"gradient": gradient, "wire": self.wire}
        self._types = list(sharding_types)

    def shard(
        self,
        module: TableCollection,
        params: Mapping[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """Creates the sharded module of this rank; ``DistributedModelParallel`` calls it on all ranks.

        Args:
            module: the unsharded collection. params: table name -> TorchRec's ``ParameterSharding``.
            env: has the ranks' process group. device: of the shards; None: the CPU. module_fqn: the module's name.

        Raises:
            TypeError: ``module`` is of another kind. ValueError: the plan or the collection cannot be sharded; the
            message names the table, the reason and the possible types. RuntimeError: another rank raised an error here.
        """
        if env.process_group is None:
            raise ValueError("env must have a process group: call torch.distributed.init_process_group() first")
        if isinstance(env, ShardingEnv2D):
            raise ValueError("env must not be a ShardingEnv2D: two-dimensional parallelism is not supported")

        def planned() -> list[Shard]:
            _check(module, self._kind)
            return shards_from_plan(module.tables, module.optimizer, params, env.world_size)

        shards = run_on_all_ranks(planned, env.process_group, "cannot shard by its plan, and no rank has")
        device = torch.device("cpu") if device is None else device
        return self._sharded_kind(module, shards, env.process_group, device, **self._options, name=module_fqn or "")

    @property
    def module_type(self) -> type[TableCollection]:
        """The type that is sharded."""
        return self._kind

    def shardable_parameters(self, module: TableCollection) -> dict[str, nn.Parameter]:
        """A meta parameter [E, D] for each table, for planners; its dtype has the size of the format's values."""
        dtypes = {table.name: FLOAT_DTYPES.get(table.format, torch.uint8) for table in module.tables}
        return {
            t.name: nn.Parameter(
                torch.empty(t.planned_rows, t.embedding_dim, dtype=dtypes[t.name], device="meta"), requires_grad=False
            )
            for t in module.tables
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types that a planner may choose."""
        return self._types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's name of the kernel that its planner assumes; lookups use this package's kernels."""
        return ["dense" if sharding_type == "data_parallel" else "fused"]

    def constraints(self, module: TableCollection) -> dict[str, ParameterConstraints]:
        """Sharding types of each table, for ``EmbeddingShardingPlanner(constraints=...)``.

        Raises:
            TypeError: ``module`` is of another kind. ValueError: the collection cannot be sharded, or a table supports
            none of the types that a planner may choose.
        """
        _check(module, self._kind)
        found = {}
        for table in module.tables:
            possible = possible_types(table, module.optimizer)
            types = [kind for kind in self._types if kind in possible]
            if not types:
                raise ValueError(
                    f"table {table.name!r} can be sharded {', '.join(possible)}, but sharding_types = "
                    f"{self._types} has none of these"
                )
            found[table.name] = ParameterConstraints(sharding_types=types)
        return found


def _check(module: TableCollection, kind: type[TableCollection]) -> None:
    if not isinstance(module, kind):
        raise TypeError(f"module must be an rk.{kind.__name__}, got {type(module).__name__}")
    if found := in_backward(module._tables.weights()):
        raise ValueError(
            f"{type(found[0]).__name__} was applied in the backward to the tables of a collection, but cannot "
            "train their shards: give the collection an optimizer of this package, such as "
            "optimizer=rk.SGD(lr=0.1)"
        )
    if isinstance(module._store, FileStore):
        raise ValueError(
            f"a collection whose tables are in {module._store.file.path} cannot be sharded, because each rank "
            "needs its own file: create it with device='meta', which opens no file"
        )


class EmbeddingBagCollectionSharder(CollectionSharder):
    """Shards every ``rk.EmbeddingBagCollection`` of a model in TorchRec's ``DistributedModelParallel``.

    ``DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder()], plan=...)`` replaces each by a
    ``ShardedEmbeddingBagCollection``. Plans are TorchRec's: of its planner, or of ``construct_module_sharding_plan``.
    If the collection is on the meta device, each rank draws the first rows of its shards. They are the same for every
    plan, and depend on the collection's ``seed``, its name in the model, table and row.

    Args:
        gradient: the meaning of each rank's loss. "global_mean": the mean over the rank's samples; tables are trained
            by the mean over the samples of all ranks, however uneven. "sum": a sum over samples; tables are trained by
            the sum over all ranks. "torchrec": gradients are summed and divided by the number of ranks, TorchRec's
            default. DistributedDataParallel averages gradients of the other parameters over ranks, which is "torchrec",
            and "global_mean" if batches are even.
        row_wise: how the partial sums of a bag in several row shards are added. "ordered": the sample's rank receives
            all of them and adds them in the order of the rows. "reduce_scatter": a collective of the process group adds
            them in its own order, as in TorchRec; a rank receives one row for each of its samples. These two send the
            same number of bytes. "exact": the sample's rank receives the row of each of its ids, and sums them as one
            process does, so that outputs and updates have its bits; ranks send a row, and a gradient, per id. Products
            of a compressed table's parts are always computed on the sample's rank, from rows that it receives once, or
            with "exact" per id.
        wire: the row formats in which pooled columns and gradients are sent; None: float32.
        sharding_types: those that a planner may choose; a plan by hand may have any that its tables support.

    Raises:
        ValueError: an unknown ``gradient``, ``row_wise`` or sharding type; or a forward format with "reduce_scatter".
    """

    _kind = EmbeddingBagCollection
    _sharded_kind = ShardedEmbeddingBagCollection

    def __init__(
        self,
        *,
        gradient: str = "global_mean",
        row_wise: str = "ordered",
        wire: Wire | None = None,
        sharding_types: Sequence[str] = ("table_wise", "row_wise"),
    ) -> None:
        super().__init__(gradient=gradient, wire=wire, sharding_types=sharding_types)
        check_choice("row_wise", row_wise, ("ordered", "reduce_scatter", "exact"))
        if row_wise == "reduce_scatter" and self.wire.forward is not None:
            raise ValueError(
                f'wire.forward = "{self.wire.forward}" cannot be combined with row_wise="reduce_scatter", whose '
                'collective adds float32: use row_wise="ordered", which adds decoded rows, or wire.forward = '
                "None"
            )
        self._options["row_wise"] = self.row_wise = row_wise


class EmbeddingCollectionSharder(CollectionSharder):
    """Shards every ``rk.EmbeddingCollection`` of a model in TorchRec's ``DistributedModelParallel``.

    As ``EmbeddingBagCollectionSharder``, for a row per id without pooling; it replaces each collection by a
    ``ShardedEmbeddingCollection``.

    Args:
        gradient: the meaning of each rank's loss, as for ``EmbeddingBagCollectionSharder``. A sample has one row per
            id, and counts once: "global_mean" is the mean over the samples of all ranks. If features have batch sizes
            of their own, ``stride()`` is the number of samples.
        wire: the row formats in which rows of ids and gradients are sent; None: float32.
        sharding_types: those that a planner may choose; a plan by hand may have any that its tables support.

    Raises:
        ValueError: an unknown ``gradient`` or sharding type.
    """

    _kind = EmbeddingCollection
    _sharded_kind = ShardedEmbeddingCollection
