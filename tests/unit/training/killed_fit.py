"""A run with many random numbers in consecutive processes that are killed at given steps: FOLDER [STEP DELAY]…"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # imported by the first optimizer
from torch import Tensor, nn

from falaj.training.runtime.fit import fit

SAMPLES, BATCH_SIZE, STEPS = 92, 8, 60


class Noisy:
    """Samples with augmentation by torch and by Python; kills the process after enough of them."""

    def __init__(self, deadly_read: int, delay_s: float) -> None:
        self._rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self._left, self._delay_s = deadly_read, delay_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._left -= 1
        if self._left == 0:
            threading.Thread(target=self._die, daemon=True).start()
        row = self._rows[index] + 0.1 * torch.randn(6) + random.random()
        return row, row.sum().reshape(1)

    def _die(self) -> None:
        time.sleep(self._delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def one_process(folder: str, deadly_step: int, delay_s: float) -> None:
    torch.set_num_threads(1)
    resumes = any(Path(folder).glob("checkpoints/step-*"))
    torch.manual_seed(int(resumes))  # a resumed process starts from another model, and must not use it
    model = nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 1), nn.Dropout(0.1)
    )
    result = fit(
        model,
        nn.functional.mse_loss,
        Noisy(deadly_step * BATCH_SIZE, delay_s),
        steps=STEPS,
        batch_size=BATCH_SIZE,
        accumulate=2,
        schedule="cosine",
        clip=1.0,
        evaluate=lambda model: float(next(model.parameters()).detach().norm() + torch.rand(1)),
        evaluate_every=10,
        checkpoint_every=4,
        seed=3,
        device="cpu",
        run=folder,
    )
    print(result.step, result.ledger, flush=True)


def main(folder: str, *moments: str) -> None:
    """Fork for each process: they share the import of torch, which takes longer than the run."""
    for step, delay_s in zip(moments[::2], moments[1::2], strict=True):
        if (pid := os.fork()) == 0:
            one_process(folder, int(step), float(delay_s))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != (-signal.SIGKILL if int(step) else 0):
            sys.exit(f"the process ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
