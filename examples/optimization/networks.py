"""Small networks to optimize, one of each type, and synthetic rows that they learn within seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

COLUMNS, CLASSES, TOKENS, LENGTH = 32, 4, 64, 32


class Mlp(nn.Module):
    """Fully connected layers: 32 columns to a probability."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(COLUMNS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
            nn.Sigmoid(),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(rows)
        return made


class SqueezeExcite(nn.Module):
    """Weighs channels by what is in all of the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 4)
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.SiLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image * self.weigh(image)


class InvertedResidual(nn.Module):
    """Expands the channels, convolves each by itself, and projects them: the block of MobileNet and EfficientNet."""

    def __init__(
        self, taken: int, given: int, *, stride: int, activation: type[nn.Module], excite: bool
    ) -> None:
        super().__init__()
        inner = taken * 4
        parts: list[nn.Module] = [
            nn.Conv2d(taken, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            activation(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            activation(),
        ]
        if excite:
            parts.append(SqueezeExcite(inner))
        parts += [nn.Conv2d(inner, given, 1, bias=False), nn.BatchNorm2d(given)]
        self.block = nn.Sequential(*parts)
        self.adds = stride == 1 and taken == given

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.block(image)
        return image + made if self.adds else made


class ImageClassifier(nn.Module):
    """A stem, inverted residuals, and a linear layer: images of 3 × 32 × 32 to a score for each class."""

    def __init__(self, widths: tuple[int, ...], *, activation: type[nn.Module], excite: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), activation()
        )
        blocks = []
        for taken, given in itertools.pairwise(widths):
            stride = 2 if given > taken else 1
            blocks.append(InvertedResidual(taken, given, stride=stride, activation=activation, excite=excite))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.Conv2d(widths[-1], 128, 1, bias=False),
            nn.BatchNorm2d(128),
            activation(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classes = nn.Linear(128, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.classes(self.head(self.blocks(self.stem(image))).flatten(1))
        return made


def mobilenet() -> nn.Module:
    return ImageClassifier((16, 24, 24, 40, 40, 64), activation=nn.ReLU6, excite=False)


def efficientnet() -> nn.Module:
    return ImageClassifier((16, 24, 24, 40, 40), activation=nn.SiLU, excite=True)


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each after a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        rows, length, width = words.shape
        seen = self.before_attention(words)
        query, key, value = (
            part(seen).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        shares = torch.softmax(query @ key.transpose(-2, -1) / math.sqrt(width // self.heads), dim=-1)
        words = words + self.out((shares @ value).transpose(1, 2).reshape(rows, length, width))
        return words + self.feed(self.before_forward(words))


class TransformerEncoder(nn.Module):
    """An encoder of token sequences: 32 tokens to a probability."""

    def __init__(self, width: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(width, 4) for _ in range(blocks)))
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.blocks(self.tokens(tokens) + self.places)
        return torch.sigmoid(self.head(words.mean(dim=1)))


# ------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class SyntheticRows:
    """Inputs of one network, and the target that depends on them with some noise."""

    features: Any
    target: Any


def tabular_rows(count: int, *, seed: int = 0) -> SyntheticRows:
    """Return columns, and 0 or 1 by a sum of curves and a product."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, COLUMNS)).astype(np.float32)
    score = (
        features[:, 0]
        + np.sin(2 * features[:, 1])
        + features[:, 2] * features[:, 3]
        - 0.5 * features[:, 4] ** 2
    )
    target = (score + 0.5 * random.normal(size=count) > -0.4).astype(np.int64)
    return SyntheticRows(features, target)


def image_rows(count: int, *, seed: int = 0) -> SyntheticRows:
    """Return images of stripes in noise, and the direction of the stripes as the class."""
    random = np.random.default_rng(seed)
    target = random.integers(0, CLASSES, count)
    down, across = np.mgrid[0:32, 0:32] / 32.0
    angle = (target * np.pi / CLASSES)[:, None, None]
    waves = 2 * np.pi * random.uniform(2, 5, (count, 1, 1))
    phase = random.uniform(0, 2 * np.pi, (count, 1, 1))
    stripes = np.sin(waves * (np.cos(angle) * across + np.sin(angle) * down) + phase)
    colours = random.uniform(0.3, 1.0, (count, 3, 1, 1))
    images = stripes[:, None] * colours + random.normal(size=(count, 3, 32, 32)) * 1.2
    return SyntheticRows(images.astype(np.float32), target.astype(np.int64))


def token_rows(count: int, *, seed: int = 0) -> SyntheticRows:
    """Return sequences of tokens, and whether the low tokens weigh more than the high ones."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, TOKENS, (count, LENGTH))
    weights = np.random.default_rng(1).normal(size=TOKENS)
    score = weights[tokens].sum(axis=1)
    target = (score + random.normal(size=count) > np.median(score)).astype(np.int64)
    return SyntheticRows(tokens.astype(np.int64), target)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., SyntheticRows]]] = {
    "mlp": (Mlp, tabular_rows),
    "mobilenet": (mobilenet, image_rows),
    "efficientnet": (efficientnet, image_rows),
    "transformer": (TransformerEncoder, token_rows),
}


def train(
    network: nn.Module, rows: SyntheticRows, *, epochs: int, batch: int = 64, seed: int = 0
) -> nn.Module:
    """Train a network on rows: cross-entropy of class scores, or binary cross-entropy of a probability."""
    torch.manual_seed(seed)
    inputs, target = torch.from_numpy(rows.features), torch.from_numpy(rows.target)
    steps = epochs * math.ceil(len(inputs) / batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for part in torch.randperm(len(inputs)).split(batch):
            optimizer.zero_grad()
            made = network(inputs[part])
            if made.shape[1] == 1:
                loss = nn.functional.binary_cross_entropy(made[:, 0], target[part].float())
            else:
                loss = nn.functional.cross_entropy(made, target[part])
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def save_export(network: nn.Module, rows: SyntheticRows, path: Any) -> None:
    """Save a network as a torch export (.pt2) for any number of rows."""
    sample = torch.from_numpy(rows.features[:8])
    program = torch.export.export(network.eval(), (sample,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    program._example_inputs = None  # otherwise they are pickled, and the registry refuses the file
    torch.export.save(program, path)
