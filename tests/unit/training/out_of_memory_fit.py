"""A run whose batch does not fit in the memory limit of the process, and one that cannot fit at all."""

from __future__ import annotations

import json
import resource

import torch
from torch import Tensor, nn

from falaj.training.runtime.errors import OutOfMemory
from falaj.training.runtime.fit import fit

WIDTH = 1 << 16
ROWS = 256
"""A row takes 4 * WIDTH bytes a layer: a batch 64 MiB, several times."""


class Wide(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(1))
        self.times = times

    def forward(self, given: Tensor) -> Tensor:
        wide = given.expand(-1, WIDTH * self.times) * self.scale
        return torch.sin(torch.cos(torch.sin(wide * 1.5))).mean(1, keepdim=True)


def train(model: nn.Module, steps: int = 3) -> list[float]:
    inputs = torch.randn(2 * ROWS, 1, generator=torch.Generator().manual_seed(1))
    loss = nn.functional.mse_loss
    data = (inputs, inputs.abs())
    found = fit(model, loss, data, batch_size=ROWS, steps=steps, lr=0.05, tune="off", device="cpu", workers=0)
    return found.losses


def used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    torch.set_num_threads(1)
    plenty = train(Wide())
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + (150 << 20), hard))
    pieces: list[int] = []

    class Counting(Wide):
        def forward(self, given: Tensor) -> Tensor:
            found = super().forward(given)
            pieces.append(ROWS // len(given))
            return found

    short = train(Counting())
    try:
        train(Wide(times=4096), steps=1)
        hopeless = "it went well"
    except OutOfMemory as failure:
        hopeless = f"{type(failure).__name__}: {failure}"
    print(json.dumps({"plenty": plenty, "short": short, "pieces": max(pieces), "hopeless": hopeless}))


if __name__ == "__main__":
    main()
