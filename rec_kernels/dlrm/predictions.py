"""What a model predicts for a split, beside its labels."""

from __future__ import annotations

import numpy as np
import torch

from rec_kernels.dlrm import devices
from rec_kernels.dlrm.data import DataError, DataSet, Sized, ahead
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.stopping import NotFiniteError

TEST_BATCH_SIZE = 8192


def predict(model: DLRM, data: Sized, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits of a split in its order, float32 [rows] each.

    Raises:
        DataError: there are no rows. NotFiniteError: a logit is not finite. IndexError: an id
        is out of range.
    """
    size = TEST_BATCH_SIZE if split == "test" else data.batch_size
    try:
        labels, logits = _predict(model, data, split, size)
    except MemoryError:  # of tables on disk; in batches as those of the training they fit
        labels, logits = _predict(model, data, split, data.batch_size)
    model.check()
    if not labels:
        raise DataError(f"data set {data.name!r} gives no batches of split {split!r}")
    label, logit = torch.cat(labels).cpu(), torch.cat(logits).cpu()
    if not logit.isfinite().all():
        row = int((~logit.isfinite()).nonzero()[0])
        raise NotFiniteError(f"the prediction of row {row} of split {split!r} is {logit[row]}, must be finite")
    return label.numpy(), logit.numpy()


def _predict(model: DLRM, data: DataSet, split: str, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    labels, logits = [], []
    with torch.no_grad():
        for batch in ahead(devices.moved(data.batches(split, size), model.device)):
            labels.append(batch.label)
            logits.append(model(batch))
    return labels, logits
