"""State of a sharded collection by one process's names, for torch.distributed.checkpoint and TorchRec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from rec_kernels.distributed.local_shards import StoredBlock
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.load_state import format_of_state
from rec_kernels.ops.row_formats import FLOAT_DTYPES


class ShardedState:
    """Names, shapes and dtypes of one process's state, and each rank's blocks of it.

    Args:
        features: of the whole collection. blocks: of all ranks. rank: this process's. group: the ranks.
        device: of the blocks. holder: name of the module that has the tables.
    """

    def __init__(
        self,
        features: FeatureMap,
        blocks: Sequence[StoredBlock],
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        holder: str,
    ) -> None:
        self._features, self._rank, self._group, self._device = features, rank, group, device
        self._holder = f"{holder}."
        self._projections = {table.name: [*table.projection] for table in features.tables if table.projection}
        self._blocks_of: list[list[StoredBlock]] = [[] for _ in features.stored]
        for block in blocks:
            self._blocks_of[block.stored].append(block)

    def _kinds(self) -> Iterator[tuple[int, str, list[int], torch.dtype]]:
        """Yields each tensor of the whole state: index of the stored table, kind, shape and dtype."""
        for i, table in enumerate(self._features.stored):
            dtype = FLOAT_DTYPES.get(table.format, torch.uint8)
            width = table.embedding_dim if dtype != torch.uint8 else table.row_bytes
            state = self._features.state_of(i)
            yield i, "weight", [table.num_embeddings, width], dtype
            for kind, each in state.kinds.items():
                shape = [table.num_embeddings, table.embedding_dim] if each else [table.num_embeddings]
                yield i, kind, shape, state.dtype(kind)
            if (shape := self._projections.get(table.name)) is not None:
                yield i, "projection", shape, torch.float32

    def whole(self, local: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the state by one process's names, with this rank's blocks.

        Args:
            local: the state of the rank's own collection, whose memory the result shares.

        Returns:
            ``ShardedTensor`` for tables and their optimizer state, tensors for replicas and scalars.
        """
        out: dict[str, Any] = {}
        for i, kind, shape, dtype in self._kinds():
            name = f"{self._holder}{self._features.stored[i].name}"
            blocks = self._blocks_of[i]
            mine = [p for p in blocks if p.shard.rank == self._rank]
            if blocks[0].shard.replica:
                out[f"{name}.{kind}"] = local[f"{self._holder}{mine[0].name}.{kind}"]
            else:
                local_blocks = [(p, local[f"{self._holder}{p.name}.{kind}"]) for p in mine]
                out[f"{name}.{kind}"] = self._sharded(blocks, local_blocks, shape, dtype)
            if kind == "weight" and dtype == torch.uint8:
                text = self._features.stored[i].format.encode()
                out[f"{name}.format"] = torch.tensor(list(text), dtype=torch.uint8, device=self._device)
        return out | {n: local[n] for n in self._global_names(local)}

    def _global_names(self, local: Mapping[str, Tensor]) -> list[str]:
        """Names that belong to no table and no cache, as the step, which every rank has."""
        return [name for name in local if not name.startswith(self._holder) and not is_of_rank(name)]

    def replicated_names(self, local: Mapping[str, Tensor]) -> list[str]:
        """Names of what every rank has, replicas with their state and scalars, in the same order on all ranks."""
        kinds = [(self._blocks_of[i], kind) for i, kind, _, _ in self._kinds()]
        names = [f"{self._holder}{p[0].name}.{kind}" for p, kind in kinds if p[0].shard.replica]
        return [name for name in [*names, *self._global_names(local)] if name in local]

    def _sharded(
        self,
        blocks: list[StoredBlock],
        local_blocks: list[tuple[StoredBlock, Tensor]],
        shape: list[int],
        dtype: torch.dtype,
    ) -> ShardedTensor:
        metadata = ShardedTensorMetadata(
            shards_metadata=[self._metadata(block, shape) for block in blocks],
            size=torch.Size(shape),
            tensor_properties=TensorProperties(dtype=dtype, requires_grad=False),
        )
        local = [LocalShard(rows, self._metadata(block, shape)) for block, rows in local_blocks]
        return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=self._group)

    def _metadata(self, block: StoredBlock, shape: list[int]) -> ShardMetadata:
        place = self._place(block, shape)
        offsets, sizes = [part.start for part in place], [part.stop - part.start for part in place]
        rank = dist.get_global_rank(self._group, block.shard.rank)  # placements have global ranks
        return ShardMetadata(offsets, sizes, f"rank:{rank}/{self._device}")

    def _place(self, block: StoredBlock, shape: list[int]) -> list[slice]:
        """A block's rows and columns in a whole tensor; all of a projection."""
        table = self._features.stored[block.stored]
        rows, columns = slice(0, shape[0]), slice(0, shape[-1])
        if block.rows != table.num_embeddings:
            rows = slice(block.first_row, block.first_row + block.rows)
        if block.columns != table.embedding_dim:
            columns = slice(block.first_column, block.first_column + block.columns)
        return [rows, columns][: len(shape)]

    @property
    def format_names(self) -> set[str]:
        """The optional names of tables' formats in a state."""
        return {f"{self._holder}{table.name}.format" for table in self._features.stored}

    def names(self, local: Mapping[str, Tensor]) -> list[str]:
        """The names of a state, without ``format_names``."""
        stored = self._features.stored
        names = [f"{self._holder}{stored[i].name}.{kind}" for i, kind, _, _ in self._kinds()]
        return names + self._global_names(local)

    def local(self, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Selects the blocks of this rank's own collection from a state, by its own names.

        Args:
            state: one process's, of whole tensors or of ``ShardedTensor``s of this plan. own: the collection's.

        Raises:
            RuntimeError: a tensor has other rows or columns, or is sharded differently.
        """
        out = {name: state[name] for name in self._global_names(own) if name in state}
        for i, kind, shape, _ in self._kinds():
            name = f"{self._holder}{self._features.stored[i].name}"
            if f"{name}.{kind}" not in state:
                continue
            for block in self._blocks_of[i]:
                if block.shard.rank != self._rank:
                    continue
                found = f"{self._holder}{block.name}"
                rows = self._rows(state[f"{name}.{kind}"], f"{name}.{kind}", block, shape)
                out[f"{found}.{kind}"] = rows
                if kind == "weight":
                    self._check_format(name, rows, named := state.get(f"{name}.format"), i)
                    out |= {} if named is None else {f"{found}.format": named}
        return out

    def _check_format(self, name: str, rows: Tensor, named: object, stored: int) -> None:
        table = self._features.stored[stored]
        found = format_of_state(rows, named, table)
        if found not in (None, table.format):
            raise RuntimeError(
                f"{name}.weight has rows of format {found or 'no name'}, the collection's are {table.format}, "
                "and ranks do not convert rows: load the state with convert=True into a collection in one "
                "process, and load that collection's state here; nothing was changed"
            )

    def _rows(self, given: Any, name: str, block: StoredBlock, shape: list[int]) -> Tensor:
        place = self._place(block, shape)
        if isinstance(given, ShardedTensor):
            at, rows = [part.start for part in place], place[0].stop - place[0].start
            for shard in given.local_shards():
                if list(shard.metadata.shard_offsets) == at and shard.tensor.shape[0] == rows:
                    return shard.tensor
            raise RuntimeError(
                f"{name}: the state has no block for this rank's, which begins at {at}, because it was sharded "
                "differently: load it with torch.distributed.checkpoint into state_dict() first; nothing was "
                "changed"
            )
        found = list(given.shape) if isinstance(given, Tensor) else None
        split = place[-1] != slice(0, shape[-1])  # else the format, which sets the number of columns, is checked later
        if found is None or found[:1] != shape[:1] or len(found) != len(shape) or (split and found != shape):
            got = type(given).__name__ if found is None else found
            raise RuntimeError(
                f"size mismatch for {name}: the state has {got}, this collection has {shape}; none of its tables was "
                "changed"
            )
        return given[(place[0], place[-1]) if split and len(shape) > 1 else place[0]]


def is_of_rank(name: str) -> bool:
    """True for names of cache slots and files, which belong to one rank and repeat rows of tables."""
    return name.startswith("row_cache.") or name in ("file_identity", "file_generation")
