"""State of a sharded collection under one process's names, for torch.distributed.checkpoint and TorchRec."""

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

from rec_kernels.distributed.local_shards import Piece
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.load_state import format_of_state
from rec_kernels.ops.row_formats import FLOAT_DTYPES


class ShardedState:
    """The names, shapes and dtypes of one process's state, and the blocks of it that ranks have.

    Args:
        features: of the whole collection. pieces: of all ranks. rank: this process's. group: the ranks.
        device: of the blocks. holder: the module that has the tables, in names of the state.
    """

    def __init__(
        self,
        features: FeatureMap,
        pieces: Sequence[Piece],
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        holder: str,
    ) -> None:
        self._features, self._rank, self._group, self._device = features, rank, group, device
        self._holder = f"{holder}."
        self._projections = {table.name: [*table.projection] for table in features.tables if table.projection}
        self._pieces: list[list[Piece]] = [[] for _ in features.stored]
        for piece in pieces:
            self._pieces[piece.stored].append(piece)

    def _kinds(self) -> Iterator[tuple[int, str, list[int], torch.dtype]]:
        """Number of the stored table, name of a kind of numbers, and their whole shape and dtype."""
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
        """One process's names, with what this rank has of each.

        Args:
            local: the state of the rank's own collection, whose memory the result shares.

        Returns:
            ``ShardedTensor`` for tables and their state, ordinary tensors for replicas and numbers.
        """
        out: dict[str, Any] = {}
        for i, kind, shape, dtype in self._kinds():
            name = f"{self._holder}{self._features.stored[i].name}"
            pieces = self._pieces[i]
            mine = [p for p in pieces if p.shard.rank == self._rank]
            if pieces[0].shard.replica:
                out[f"{name}.{kind}"] = local[f"{self._holder}{mine[0].name}.{kind}"]
            else:
                blocks = [(p, local[f"{self._holder}{p.name}.{kind}"]) for p in mine]
                out[f"{name}.{kind}"] = self._sharded(pieces, blocks, shape, dtype)
            if kind == "weight" and dtype == torch.uint8:
                text = self._features.stored[i].format.encode()
                out[f"{name}.format"] = torch.tensor(list(text), dtype=torch.uint8, device=self._device)
        return out | {n: local[n] for n in self._numbers(local)}

    def _numbers(self, local: Mapping[str, Tensor]) -> list[str]:
        """Names of a state that are of no table and no cache: numbers that every rank has."""
        return [name for name in local if not name.startswith(self._holder) and not is_of_rank(name)]

    def replicated_names(self, local: Mapping[str, Tensor]) -> list[str]:
        """Names of what every rank has: replicas with their state, and numbers, in an order that all ranks have."""
        kinds = [(self._pieces[i], kind) for i, kind, _, _ in self._kinds()]
        names = [f"{self._holder}{p[0].name}.{kind}" for p, kind in kinds if p[0].shard.replica]
        return [name for name in [*names, *self._numbers(local)] if name in local]

    def _sharded(
        self, pieces: list[Piece], blocks: list[tuple[Piece, Tensor]], shape: list[int], dtype: torch.dtype
    ) -> ShardedTensor:
        metadata = ShardedTensorMetadata(
            shards_metadata=[self._metadata(piece, shape) for piece in pieces],
            size=torch.Size(shape),
            tensor_properties=TensorProperties(dtype=dtype, requires_grad=False),
        )
        local = [LocalShard(rows, self._metadata(piece, shape)) for piece, rows in blocks]
        return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=self._group)

    def _metadata(self, piece: Piece, shape: list[int]) -> ShardMetadata:
        place = self._place(piece, shape)
        offsets, sizes = [part.start for part in place], [part.stop - part.start for part in place]
        rank = dist.get_global_rank(self._group, piece.shard.rank)  # ranks of the group are others than all there are
        return ShardMetadata(offsets, sizes, f"rank:{rank}/{self._device}")

    def _place(self, piece: Piece, shape: list[int]) -> list[slice]:
        """A piece's rows of a whole tensor and, if it has any, columns; all of a matrix that is no rows."""
        table = self._features.stored[piece.stored]
        rows, columns = slice(0, shape[0]), slice(0, shape[-1])
        if piece.rows != table.num_embeddings:
            rows = slice(piece.first_row, piece.first_row + piece.rows)
        if piece.columns != table.embedding_dim:
            columns = slice(piece.first_column, piece.first_column + piece.columns)
        return [rows, columns][: len(shape)]

    @property
    def format_names(self) -> set[str]:
        """The names of the formats of tables, which a state may have."""
        return {f"{self._holder}{table.name}.format" for table in self._features.stored}

    def names(self, local: Mapping[str, Tensor]) -> list[str]:
        """The names of a state, without those of formats."""
        stored = self._features.stored
        names = [f"{self._holder}{stored[i].name}.{kind}" for i, kind, _, _ in self._kinds()]
        return names + self._numbers(local)

    def local(self, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Picks out of a state what the rank's own collection has, by the names there.

        Args:
            state: one process's, of whole tensors or of ``ShardedTensor``s of this plan. own: the collection's.

        Raises:
            RuntimeError: a tensor has other rows or columns, or is sharded in another way.
        """
        out = {name: state[name] for name in self._numbers(own) if name in state}
        for i, kind, shape, _ in self._kinds():
            name = f"{self._holder}{self._features.stored[i].name}"
            if f"{name}.{kind}" not in state:
                continue
            for piece in self._pieces[i]:
                if piece.shard.rank != self._rank:
                    continue
                found = f"{self._holder}{piece.name}"
                block = self._block(state[f"{name}.{kind}"], f"{name}.{kind}", piece, shape)
                out[f"{found}.{kind}"] = block
                if kind == "weight":
                    self._check_format(name, block, named := state.get(f"{name}.format"), i)
                    out |= {} if named is None else {f"{found}.format": named}
        return out

    def _check_format(self, name: str, rows: Tensor, named: object, stored: int) -> None:
        table = self._features.stored[stored]
        found = format_of_state(rows, named, table)
        if found not in (None, table.format):
            raise RuntimeError(
                f"{name}.weight has rows of format {found or 'no name'}, the "
                f"collection's are {table.format}, and ranks convert none: load the state with convert=True into a "
                "collection of one process, and its state here; nothing was changed"
            )

    def _block(self, given: Any, name: str, piece: Piece, shape: list[int]) -> Tensor:
        place = self._place(piece, shape)
        if isinstance(given, ShardedTensor):
            at, rows = [part.start for part in place], place[0].stop - place[0].start
            for shard in given.local_shards():
                if list(shard.metadata.shard_offsets) == at and shard.tensor.shape[0] == rows:
                    return shard.tensor
            raise RuntimeError(
                f"{name}: this rank has no block of it that begins at {at} in the state, which was sharded in another "
                "way: load it with torch.distributed.checkpoint into state_dict() first; nothing was changed"
            )
        found = list(given.shape) if isinstance(given, Tensor) else None
        split = place[-1] != slice(0, shape[-1])  # other columns of a row may be those of another format
        if found is None or found[:1] != shape[:1] or len(found) != len(shape) or (split and found != shape):
            told = type(given).__name__ if found is None else found
            raise RuntimeError(
                f"size mismatch for {name}: the state has {told}, this collection has {shape}; none of its tables was "
                "changed"
            )
        return given[(place[0], place[-1]) if split and len(shape) > 1 else place[0]]


def is_of_rank(name: str) -> bool:
    """True for what a collection's state has of slots and files: of rows that the tables have, too, and of one rank."""
    return name.startswith("row_cache.") or name in ("file_identity", "file_generation")
