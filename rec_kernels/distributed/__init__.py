"""Tables sharded over processes by TorchRec, with this package's kernels. An optional extra, imported when it is used.

Raises:
    ImportError: TorchRec, or something that it needs, is not installed.
"""

try:
    import torchrec.distributed  # noqa: F401 -- everything below needs it
except ImportError as error:
    raise ImportError(
        f"rk.distributed needs torchrec 1.8.0, fbgemm-gpu of the same version (fbgemm-gpu-cpu==1.8.0 on a machine "
        f"without a GPU) and mypy_extensions, and importing TorchRec failed: {error}"
    ) from error

from rec_kernels.distributed.agreement import until_all_end
from rec_kernels.distributed.clip import clip_grad_norm_
from rec_kernels.distributed.planning import planner
from rec_kernels.distributed.sharded_embedding_bag_collection import ShardedEmbeddingBagCollection
from rec_kernels.distributed.sharded_embedding_collection import ShardedEmbeddingCollection
from rec_kernels.distributed.sharder import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from rec_kernels.distributed.torchrec_state import TorchRecState, torchrec_state
from rec_kernels.distributed.wire import Wire

__all__ = [
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "TorchRecState",
    "Wire",
    "clip_grad_norm_",
    "planner",
    "torchrec_state",
    "until_all_end",
]
