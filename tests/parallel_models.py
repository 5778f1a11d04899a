"""Small models for runs over several processes; each covers one difficult case."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

FEATURES = 6


class Net(nn.Module):
    """Blocks in a list, a weight that is used twice, and optional dropout and an unused parameter."""

    def __init__(self, *, dropout: float, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
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


class Residual(nn.Module):
    """A block with data-dependent control flow, which no tracer could follow."""

    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            return x
        found: Tensor = x + self.down(self.drop(self.up(self.norm(x)).relu()))
        return found


class Blocks(nn.Module):
    """A list of blocks, with values and numbers that several of them need, and a branch that is never taken."""

    def __init__(self, *, dropout: float, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.shift = nn.Parameter(torch.zeros(16))
        self.dropout = dropout
        self.blocks = nn.ModuleList(Residual(16, dropout=dropout) for _ in range(4))
        self.last = nn.Linear(16, 1)
        self.register_buffer("scale", torch.tensor(0.5))
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, _ = x.shape
        early = self.first(x) + self.shift
        x = early
        for block in self.blocks:
            x = block(x)
            x = nn.functional.dropout(x, self.dropout, self.training)
        if mask is not None:
            x = x * mask
        found: Tensor = self.last((x + early * self.scale).view(rows, -1))
        return found


class Branches(nn.Module):
    """Uses one of two layers, alternating between steps (`a_step` calls each) or depending on the samples."""

    def __init__(self, a_step: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.ways = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 1)
        self.a_step, self.calls = a_step, 0

    def forward(self, x: Tensor) -> Tensor:
        way = self.calls // self.a_step % 2 if self.a_step else int(x.sum() > 0)
        self.calls += 1
        found: Tensor = self.last(self.ways[way](self.first(x)).relu())
        return found


class Tied(nn.Module):
    """The input layer and the output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(FEATURES, 16, bias=False)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.write = nn.Linear(FEATURES, 16, bias=False)
        self.write.weight = self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.middle(self.read(x)) @ self.write.weight
        return found.sum(1, keepdim=True)


class Spare(nn.Module):
    """Returns more than the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.unseen = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.seen(x), self.unseen(x)


class Remembering(nn.Module):
    """Subtracts the mean of past inputs, kept in a buffer that is changed in place, replaced, or grows."""

    def __init__(self, *, persistent: bool = True, replaced: bool = False, grows: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self._replaced, self._grows = replaced, grows
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16), persistent=persistent)
        self.register_buffer("rows", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found: Tensor = self.last((x - self.mean).relu())
        if self.training:
            mean = 0.9 * self.mean + x.detach().mean(0)
            if self._replaced:
                self.mean = mean
            else:
                self.mean.copy_(mean)
            if self._grows:
                self.rows = x.detach()[: 1 + int(x.sum() > 0)]
        return found


class Centred(nn.Module):
    """Subtracts the mean of past inputs, kept in a non-persistent buffer that is replaced each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def centred() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), Centred(), nn.ReLU(), nn.Linear(16, 16), Centred(), nn.Linear(16, 1)
    )


def layers(*, dropout: float) -> nn.Sequential:
    """Layers in sequence, some of them in nested sequences."""
    inner = [
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)) for _ in range(3)
    ]
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Sequential(*inner), nn.LayerNorm(16), nn.Linear(16, 1))


def normed() -> nn.Sequential:
    """Running statistics, which each process computes from other samples."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


REMEMBERING = {
    "replacing": partial(Remembering, replaced=True),
    "fleeting": partial(Remembering, persistent=False),
    "growing": partial(Remembering, grows=True),
}


def make_model(kind: str, *, dropout: float = 0.0, unused: bool = False, a_step: int = 0) -> nn.Module:
    if kind == "blocks":
        return Blocks(dropout=dropout, unused=unused)
    if kind == "layers":
        return layers(dropout=dropout)
    if kind == "branches":
        return Branches(a_step)
    plain = {"tied": Tied, "spare": Spare, "normed": normed, "centred": centred, **REMEMBERING}
    return plain[kind]() if kind in plain else Net(dropout=dropout, unused=unused)
