"""Runs over several processes with faults, and what each process reports."""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import falaj as fj
from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.fit import fit
from gangs import run_gang

WITHIN_S = 60
SOON = timedelta(seconds=4)


class Narrow(torch.autograd.Function):
    """Lets at most `most` rows through, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, most: int) -> Tensor:
        ctx.most = most
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if len(gradients[0]) > ctx.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return gradients[0], None


class Net(nn.Module):
    """At most `most` rows fit at once, forward or only `backward`; with `buffered` it also has a buffer."""

    def __init__(self, most: int, *, dropout: float, buffered: bool, backward: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.most, self.left, self.backward = most, 2, backward
        if buffered:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, given: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0 and self.backward:
            first, *rest = self.net
            given = Narrow.apply(first(given), self.most)
            return nn.Sequential(*rest)(given)
        if self.left < 0 and len(given) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        found: Tensor = self.net(given)
        return found


class Skipping(nn.Module):
    """Leaves out `skips` of its blocks, which other processes may use."""

    def __init__(self, skips: int) -> None:
        super().__init__()
        self.first, self.last, self.skips = nn.Linear(4, 16), nn.Linear(16, 1), skips
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, given: Tensor) -> Tensor:
        given = self.first(given)
        for block in self.blocks[self.skips :]:
            given = block(given).relu()
        found: Tensor = self.last(given)
        return found


def train(options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    options |= options.pop("own", {}).get(str(rank), {})
    samples, bad = options.pop("samples", 40), options.pop("bad", None)
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(2))
    target = inputs.sum(1, keepdim=True)
    if bad is not None:
        target[bad] = float("nan")
    most = options.pop("most", {}).get(str(rank), 99)
    dropout, kinds = (
        options.pop("dropout", 0.0),
        {name: options.pop(name, False) for name in ("buffered", "backward")},
    )
    model: nn.Module = Net(most, dropout=dropout, **kinds)
    if skips := options.pop("skips", {}):
        model = Skipping(skips[str(rank)])
        dist.init_process_group("gloo", timeout=SOON)
    stops = options.pop("stops", {}).get(str(rank), 0)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        result = fit(
            model,
            nn.functional.mse_loss,
            (inputs, target),
            device="cpu",
            tune="off",
            callbacks=[lambda step, _: fj.STOP if step == stops else None],
            **{"batch_size": 8, "steps": 10, "seed": 3, **options},
        )
    return {
        "losses": result.losses,
        "output": output.getvalue(),
        "step": result.step,
        "stopped": result.stopped,
        "ledger": result.ledger,
        "from": result.resumed_from,
    }


def report_of(options: dict[str, Any], rank: int) -> dict[str, Any]:
    try:
        return train(dict(options), rank)
    except TrainingError as error:
        return {"error": type(error).__name__, "words": str(error)}
    except RuntimeError as error:  # torch's message when another process has gone
        return {"error": "RuntimeError", "words": str(error)}


def answer(requests: list[tuple[int, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [
        run_gang(count, partial(report_of, options), folder, within_s=WITHIN_S) for count, options in requests
    ]
