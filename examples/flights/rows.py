"""The training rows of both models, and the quality of their predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from definitions import FEATURES, LABEL

import falaj as fj

HELD_OUT = 0.1
"""The share of the rows, the latest ones, for evaluation."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """Features and labels (0 or 1), in the order of time."""

    features: Floats
    labels: Floats

    def __len__(self) -> int:
        return len(self.labels)

    def split(self) -> tuple[Rows, Rows]:
        """Return the earlier rows, and the latest ones."""
        cut = math.ceil(len(self) * (1 - HELD_OUT))
        return (
            Rows(self.features[:cut], self.labels[:cut]),
            Rows(self.features[cut:], self.labels[cut:]),
        )


def training_rows(*, latest: int | None = None) -> Rows:
    """Return the rows of the training set, which the job finds among its inputs; all, or the `latest` ones."""
    table = pd.read_parquet(fj.job.inputs["training"], columns=["event_time", *FEATURES, LABEL])
    table = table.sort_values("event_time", kind="stable").tail(latest or len(table))
    return Rows(
        table[[*FEATURES]].to_numpy(np.float32, copy=True), table[LABEL].to_numpy(np.float32, copy=True)
    )


def quality(labels: Floats, probabilities: Floats) -> dict[str, float]:
    """Return the area under the ROC curve, and the log loss."""
    late = labels > 0.5
    ranks = pd.Series(probabilities).rank().to_numpy()
    pairs = max(1, int(late.sum()) * int((~late).sum()))
    auc = (ranks[late].sum() - late.sum() * (late.sum() + 1) / 2) / pairs
    chance = np.clip(np.where(late, probabilities, 1 - probabilities).astype(np.float64), 1e-7, 1)
    return {"auc": float(auc), "log_loss": float(-np.log(chance).mean())}
