"""The three models that training is measured on, as plain PyTorch has them, at full size and small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """A model, its loss and its data. `unit` is what a sample is counted in, `each` how many a sample has."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], Data]
    batch: int
    unit: str
    each: int = 1
    lr: float = 1e-3
    images: bool = False


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.mix(self.before(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))
        return found


class GPT(nn.Module):
    """A decoder with tied embeddings; 124M parameters as given."""

    def __init__(
        self, words: int = 50_257, length: int = 1024, width: int = 768, heads: int = 12, layers: int = 12
    ) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.word.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x))
        return found


def next_word(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def texts(samples: int, *, words: int, length: int) -> Data:
    """Text with something to learn: each word follows from the one before, most of the time."""
    dice = torch.Generator().manual_seed(1)
    first = torch.randint(0, words, (samples, 1), generator=dice)
    hops = torch.randint(1, 4, (samples, length), generator=dice)
    all_words = (first + torch.cat([torch.zeros(samples, 1, dtype=torch.int64), hops], 1).cumsum(1)) % words
    return all_words[:, :-1].contiguous(), all_words[:, 1:].contiguous()


def pictures(samples: int, *, size: int, classes: int, different: int | None = None) -> Data:
    """Noise whose brightness tells the class; only so many of them `different`, since noise takes long to make."""
    dice = torch.Generator().manual_seed(1)
    count = different or samples
    target = torch.randint(0, classes, (count,), generator=dice)
    images = torch.randn(count, 3, size, size, generator=dice)
    images += (target.float() / classes - 0.5).view(-1, 1, 1, 1)
    times = samples // count
    return images.repeat(times, 1, 1, 1), target.repeat(times)


def rows(samples: int) -> Data:
    inputs = torch.randn(samples, 64, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :8].sin().sum(1, keepdim=True)


def table_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def small_net() -> nn.Module:
    """Convolutions in the manner of ResNet, small enough for a CPU."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as make

    found: nn.Module = make()
    return found


FULL = (
    Work("GPT-124M", GPT, next_word, lambda: texts(8192, words=50_257, length=1024), 8, "tokens", 1024, 3e-4),
    Work(
        "ResNet-50",
        resnet50,
        nn.functional.cross_entropy,
        lambda: pictures(16_384, size=224, classes=1000, different=2048),
        64,
        "images",
        images=True,
    ),
    Work("MLP 64-256-256-1", table_net, nn.functional.mse_loss, lambda: rows(1_048_576), 1024, "rows"),
)
SMALL = (
    Work(
        "small GPT",
        lambda: GPT(words=512, length=64, width=128, heads=4, layers=2),
        next_word,
        lambda: texts(2048, words=512, length=64),
        16,
        "tokens",
        64,
    ),
    Work(
        "small convolutions",
        small_net,
        nn.functional.cross_entropy,
        lambda: pictures(1024, size=32, classes=10),
        32,
        "images",
        images=True,
    ),
    Work("MLP 64-256-256-1", table_net, nn.functional.mse_loss, lambda: rows(65_536), 256, "rows"),
)
