"""Runs over several processes, one run after the other, as the argument says; prints what came of each as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.fit import fit

SAMPLES = 92


class Rows:
    """Samples with augmentation; reading the `deadly` one kills the process."""

    def __init__(self, *, deadly: int) -> None:
        self._rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self._left = deadly

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        row = self._rows[index] + 0.1 * torch.randn(6)
        return row, row.sum().reshape(1)


class Net(nn.Module):
    """Blocks in a list, a weight that is used twice, and, if asked for, dropout and a parameter without use."""

    def __init__(self, *, dropout: float, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.twice = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.last(self.twice(x))
        return found


def train(options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # each begins with another model: the first one's counts
    model = Net(dropout=options.pop("dropout", 0.0), unused=options.pop("unused", False))
    deadly = options.pop("deadly", {}).get(str(rank), 0)
    result = fit(
        model, nn.functional.mse_loss, Rows(deadly=deadly), device="cpu", clip=1.0, seed=3, **options
    )
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.state_dict().values()]
    total = sum(float(w.double().sum()) for w in weights)
    losses = [each.hex() for each in result.losses]
    return {
        "losses": losses,
        "weights": total.hex(),
        "ledger": result.ledger,
        "step": result.step,
        "from": result.resumed_from,
    }


def gang(processes: int, options: dict[str, Any], folder: Path) -> list[dict[str, Any] | None]:
    """What each process says; none if one of them died. Forks share the import of torch, which takes the longest."""
    place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {fork(rank, place if processes > 1 else {}, options, folder): rank for rank in range(processes)}
    died = False
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status and not died:  # the others go too, as under torchrun
            died = True
            for each in ranks:
                os.kill(each, signal.SIGKILL)
    said = [folder / f"{rank}.json" for rank in range(processes)]
    return [None] * processes if died else [json.loads(each.read_text()) for each in said]


def fork(rank: int, place: dict[str, str], options: dict[str, Any], folder: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        os.environ |= place | ({"RANK": str(rank)} if place else {})
        folder.joinpath(f"{rank}.json").write_text(json.dumps(train(dict(options), rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


if __name__ == "__main__":
    print(json.dumps([gang(count, options, Path(sys.argv[2])) for count, options in json.loads(sys.argv[1])]))
