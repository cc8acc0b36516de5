"""Embedding kernels for recommendation models: ``torch.ops.rec_kernels.*`` ops and thin modules on top of them."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from rec_kernels import ops
from rec_kernels._library import build_info
from rec_kernels._library import use_triton as _use_triton
from rec_kernels._version import __version__
from rec_kernels.convert.fuse import FusedEmbeddingBags, fuse_embedding_bags
from rec_kernels.convert.modules import convert_embeddings
from rec_kernels.convert.replace import FoundEmbedding, ReplacedEmbeddings, replace_embeddings
from rec_kernels.convert.tables import export_tables, import_tables
from rec_kernels.models.low_rank_cross import LowRankCrossNet
from rec_kernels.models.path import PathEmbeddingBag
from rec_kernels.models.popularity import MixedDimensionEmbeddingBag, popularity_blocks
from rec_kernels.models.wukong import Wukong, WukongLayer
from rec_kernels.nn.deduplicated import Deduplicated, deduplicated
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.embedding_layers import Embedding, EmbeddingBag
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows
from rec_kernels.nn.tables.compression import Hash, MixedDimension, Partitions, QuotientRemainder
from rec_kernels.nn.tables.config import BAG_FORMATS, EmbeddingBagConfig, EmbeddingConfig
from rec_kernels.nn.tables.mixed_dimensions import mixed_dimensions
from rec_kernels.nn.tables.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, RowwiseAdagrad, RowwiseAdam
from rec_kernels.nn.tables.placement import Placement, place_tables
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.nn.training.dense_parameters import dense_parameters
from rec_kernels.nn.training.fused_optimizer import FusedOptimizer
from rec_kernels.ops.dot_interaction import dot_interaction
from rec_kernels.ops.embedding_bag import embedding_bag
from rec_kernels.ops.expand import expand
from rec_kernels.ops.factorization_machine import factorization_machine
from rec_kernels.ops.fake_quantize import fake_quantize
from rec_kernels.ops.grouped_projection import grouped_projection
from rec_kernels.ops.jagged_bucketize import jagged_bucketize
from rec_kernels.ops.jagged_dedup import jagged_dedup
from rec_kernels.ops.jagged_index_select import jagged_index_select
from rec_kernels.ops.jagged_overlaps import jagged_overlaps
from rec_kernels.ops.jagged_permute import jagged_permute
from rec_kernels.ops.jagged_windows import jagged_windows
from rec_kernels.ops.row_formats import ROW_FORMATS, dequantize_rows, quantize_rows, row_bytes
from rec_kernels.ops.row_formats_fbgemm import rows_from_fbgemm, rows_to_fbgemm
from rec_kernels.ops.scale_rows import scale_rows
from rec_kernels.ops.table_layout import CachePlaces, IdPartitions, Shards, TableLayout, set_frozen, table_layout

if _TYPE_CHECKING:  # for editors only: dir(rk) omits it because help(rk) imports everything in dir()
    from rec_kernels import distributed as distributed

_use_triton()


def __getattr__(name: str) -> _Any:
    """Imports ``rk.distributed`` on first access: importing TorchRec takes seconds, and it may not be installed."""
    if name == "distributed":
        return _import_module("rec_kernels.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BAG_FORMATS",
    "LAMB",
    "ROW_FORMATS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CachePlaces",
    "Deduplicated",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FoundEmbedding",
    "FusedEmbeddingBags",
    "FusedOptimizer",
    "Hash",
    "IdPartitions",
    "InverseKeyedJaggedTensor",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedJaggedWindows",
    "KeyedTensor",
    "LowRankCrossNet",
    "MixedDimension",
    "MixedDimensionEmbeddingBag",
    "Partitions",
    "PathEmbeddingBag",
    "Placement",
    "QuotientRemainder",
    "ReplacedEmbeddings",
    "RowCache",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "Shards",
    "TableLayout",
    "Wukong",
    "WukongLayer",
    "__version__",
    "build_info",
    "convert_embeddings",
    "deduplicated",
    "dense_parameters",
    "dequantize_rows",
    "dot_interaction",
    "embedding_bag",
    "expand",
    "export_tables",
    "factorization_machine",
    "fake_quantize",
    "fuse_embedding_bags",
    "grouped_projection",
    "import_tables",
    "jagged_bucketize",
    "jagged_dedup",
    "jagged_index_select",
    "jagged_overlaps",
    "jagged_permute",
    "jagged_windows",
    "mixed_dimensions",
    "ops",
    "place_tables",
    "popularity_blocks",
    "quantize_rows",
    "replace_embeddings",
    "row_bytes",
    "rows_from_fbgemm",
    "rows_to_fbgemm",
    "scale_rows",
    "set_frozen",
    "table_layout",
]
