"""A run whose dataset is read by workers and draws random numbers: RUN_FOLDER WORKERS PID_FOLDER SECONDS_PER_SAMPLE."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from falaj.training.runtime.fit import FitResult, fit

SAMPLES, BATCH_SIZE, STEPS = 96, 8, 40


class Noisy:
    def __init__(self, pids: Path, pause_s: float) -> None:
        self._rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self._pids, self._pause_s = pids, pause_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            (self._pids / str(os.getpid())).touch()
        time.sleep(self._pause_s)
        row = self._rows[index] + 0.1 * torch.randn(6) + random.random() + float(numpy.random.rand())
        return row, row.sum().reshape(1)


def train(run: str, workers: int, pids: Path, pause_s: float, *, accumulate: int = 1) -> FitResult:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    return fit(
        model,
        nn.functional.mse_loss,
        Noisy(pids, pause_s),
        steps=STEPS,
        batch_size=BATCH_SIZE,
        accumulate=accumulate,
        workers=workers,
        seed=3,
        device="cpu",
        run=run or None,
    )


def main(run: str, workers: str, pids: str, pause_s: str) -> None:
    result = train(run, int(workers), Path(pids), float(pause_s))
    print(result.resumed_from, result.stopped, result.plan.workers, result.losses[-1].hex(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
