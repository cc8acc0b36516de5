"""How good predictions are."""

from __future__ import annotations

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score


def auc(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Area under the ROC curve; None where only one class is present."""
    # Of whole numbers scikit-learn finds the classes faster than of floats.
    return float(roc_auc_score(labels.astype(np.int8), logits)) if 0 < labels.mean() < 1 else None


def score(labels: np.ndarray, logits: np.ndarray) -> dict:
    """Scores of logits [N] against labels [N], 0 or 1.

    Returns:
        auc; log_loss in nats; normalized_entropy, the log loss divided by the entropy of the base rate of
        ``labels`` (1 is a constant prediction); calibration, the mean prediction over the base rate (1 is
        unbiased); accuracy at probability 0.5; base_rate; examples. With labels of one class only, auc and
        normalized_entropy are None, and so is calibration without a positive label.
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    base_rate = float(labels.mean())
    loss = float(log_loss(labels, probabilities, labels=[0, 1]))
    both = 0 < base_rate < 1
    entropy = log_loss([0, 1], [base_rate, base_rate], sample_weight=[1 - base_rate, base_rate]) if both else None
    return {
        "auc": auc(labels, logits),
        "log_loss": loss,
        "normalized_entropy": loss / entropy if both else None,
        "calibration": float(probabilities.mean()) / base_rate if base_rate else None,
        "accuracy": float(((logits > 0) == (labels > 0)).mean()),
        "base_rate": base_rate,
        "examples": len(labels),
    }
