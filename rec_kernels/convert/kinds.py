"""Kinds of other packages' modules with tables. TorchRec and FBGEMM are not imported: a module's class is loaded."""

from __future__ import annotations

import sys
from enum import Enum, auto
from typing import Any

from torch import nn

from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.torchrec_configs import from_torchrec


class Kind(Enum):
    """A kind of modules, by how they are converted."""

    SHARDED = auto()  # by TorchRec, also this package's
    FBGEMM = auto()  # training tables
    FUSED = auto()  # TorchRec's collection of FBGEMM's training tables
    LAYER = auto()  # torch.nn's
    TORCHREC = auto()
    FBGEMM_QUANTIZED = auto()
    TORCHREC_QUANTIZED = auto()
    OTHER = auto()  # unsupported tables of TorchRec or FBGEMM, such as those with managed collisions


QUANTIZED = (Kind.FBGEMM_QUANTIZED, Kind.TORCHREC_QUANTIZED)
_COLLECTIONS = "EmbeddingBagCollection", "EmbeddingCollection"
_TORCHREC = "torchrec.modules.embedding_modules"
_FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops"
#: The module and names of the classes of each kind; of those of several kinds, the first counts.
_CLASSES: dict[Kind, tuple[str, tuple[str, ...]]] = {
    Kind.SHARDED: ("torchrec.distributed.types", ("ShardedModule",)),
    Kind.FBGEMM: (f"{_FBGEMM}_training", ("SplitTableBatchedEmbeddingBagsCodegen",)),
    Kind.FUSED: ("torchrec.modules.fused_embedding_modules", ("FusedEmbeddingBagCollection",)),
    Kind.LAYER: ("torch.nn", ("Embedding", "EmbeddingBag")),
    Kind.TORCHREC: (_TORCHREC, _COLLECTIONS),
    Kind.FBGEMM_QUANTIZED: (f"{_FBGEMM}_inference", ("IntNBitTableBatchedEmbeddingBagsCodegen",)),
    Kind.TORCHREC_QUANTIZED: ("torchrec.quant.embedding_modules", _COLLECTIONS),
}


def classes_of(kind: Kind) -> tuple[type, ...]:
    """The classes of a kind, as far as they are loaded."""
    module, names = _CLASSES[kind]
    return _loaded(module, *names)


def _loaded(module: str, *names: str) -> tuple[type, ...]:
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def kind_of(module: Any) -> Kind | None:
    """The kind of a module; None: it has no tables of another package itself."""
    for kind in _CLASSES:
        classes = classes_of(kind)
        if type(module) in classes or (kind not in QUANTIZED and isinstance(module, classes)):
            return kind
    faces = _loaded(_TORCHREC, "EmbeddingBagCollectionInterface", "EmbeddingCollectionInterface")
    bases = [base for base in type(module).__mro__ if issubclass(base, faces) and base not in faces]
    if any(base.__module__.startswith("torchrec.") for base in bases):  # a user's own may have a collection inside
        return Kind.OTHER
    is_fbgemm = type(module).__module__.startswith("fbgemm_gpu.") and hasattr(module, "embedding_specs")
    return Kind.OTHER if is_fbgemm else None


def layers_of(module: Any) -> dict[str, Any]:
    """Table name -> torch.nn layer of a ``LAYER``, ``TORCHREC`` or ``FUSED`` module; empty for other kinds."""
    kind = kind_of(module)
    if kind is Kind.LAYER:
        return {"weight": module}
    if kind not in (Kind.TORCHREC, Kind.FUSED):
        return {}
    tables: nn.ModuleDict = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
    return dict(tables.items())


def torchrec_configs(module: Any) -> list[EmbeddingConfig]:
    """The table configurations of a TorchRec collection, as this package's."""
    is_pooled = hasattr(module, "embedding_bag_configs")
    return [from_torchrec(c) for c in (module.embedding_bag_configs() if is_pooled else module.embedding_configs())]
