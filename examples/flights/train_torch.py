"""Train a small network on the flights: the probability that a flight arrives 15 minutes late or later."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from definitions import FEATURES
from rows import Rows, quality, training_rows
from torch import Tensor, nn

import falaj as fj

SAMPLE = 500
"""Rows on which the exported file must agree with the network."""


class Network(nn.Module):
    """Scales the features and marks missing values itself, so that it takes raw rows; returns log odds."""

    def __init__(self, rows: Rows, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(np.nanmean(rows.features, axis=0)))
        self.register_buffer("spread", torch.from_numpy(np.nanstd(rows.features, axis=0) + 1e-6))
        inputs = 2 * rows.features.shape[1]
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(width, width // 2), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(width // 2, 1),
        )

    def forward(self, features: Tensor) -> Tensor:
        missing = torch.isnan(features)
        scaled = ((features - self.mean) / self.spread).clamp(-5, 5)
        return self.layers(torch.cat([torch.where(missing, 0.0, scaled), missing.float()], dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="the same losses on any number of processes")
    given = parser.parse_args()
    fj.job.params(**vars(given))
    torch.set_num_threads(1)  # such small layers gain nothing from a second thread
    torch.manual_seed(given.seed)
    earlier, latest = training_rows().split()
    network = Network(earlier, given.width)

    result = fj.fit(
        network,
        nn.BCEWithLogitsLoss(),
        tensors(earlier),
        batch_size=512,
        epochs=given.epochs,
        lr=given.lr,
        schedule="cosine",
        warmup=50,
        evaluate=tensors(latest),
        seed=given.seed,
        exact=given.exact,
    )

    model = nn.Sequential(network, nn.Sigmoid()).eval()
    with torch.no_grad():
        metrics = quality(latest.labels, model(tensors(latest)[0]).numpy()[:, 0])
    fj.job.log(step=result.step, **metrics)
    card = f"A network of {len(earlier)} flights, judged by the {len(latest)} that followed."
    fj.save_model(model, sample=latest.features[-SAMPLE:], names=FEATURES, metrics=metrics, card=card)


def tensors(rows: Rows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.features), torch.from_numpy(rows.labels)[:, None]


if __name__ == "__main__":
    main()
