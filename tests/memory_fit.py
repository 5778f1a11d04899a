"""Script that trains in several processes as its argument states, and prints the peak memory of each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.fit import fit
from falaj.training.runtime.memory.allocations import tensors_in
from gangs import run_gang

BATCH_SIZE, WIDTH = 64, 128


class PeakMemoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the most bytes of all living tensors, looked up after each operation since storages may grow."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for tensor in tensors_in((args, found)):
            held = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, the local shard
            if type(held) in (Tensor, nn.Parameter) and held.device.type != "meta":
                self._seen.add(held.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._seen))
        return found


def network() -> nn.Module:
    """Blocks in a list, so that shards are gathered block by block."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)
    ]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1))


class Scale(nn.Module):
    """A scalar parameter, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def normed() -> nn.Module:
    """Layers that can be split into stages but not sharded."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(12)]
    return nn.Sequential(*layers, Scale(), nn.Linear(WIDTH, 1))


MODELS = {"network": network, "normed": normed}


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(2 * BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True)


def train(options: dict[str, Any]) -> dict[str, Any]:
    make = MODELS[options.pop("model", "network")]
    torch.manual_seed(0)
    data = rows()
    with PeakMemoryMode() as tracker:
        model = make()
        result = fit(
            model, nn.functional.mse_loss, data, batch_size=BATCH_SIZE, steps=3, tune="off", **options
        )
    return {"peak": tracker.peak, "losses": result.losses}


def report_of(options: dict[str, Any]) -> dict[str, Any]:
    try:
        return train(options)
    except TrainingError as refusal:
        return {"refused": str(refusal)}


def trained(folder: Path, *options: dict[str, Any]) -> list[Any]:
    """Return the report of each process of each training, and what was printed."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(options), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [*json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr]


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    requests = [(each.pop("processes", 2), each) for each in json.loads(sys.argv[1])]
    print(
        json.dumps(
            [run_gang(count, lambda _, each=each: report_of(each), folder) for count, each in requests]
        )
    )
