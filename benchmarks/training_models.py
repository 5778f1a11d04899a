"""The models of the training benchmarks, in plain PyTorch, at full size and small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """A model, its loss and its data (inputs…, target); a sample counts as `each` of `unit`."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], tuple[Tensor, ...]]
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
    """A decoder with tied embeddings; 124M parameters by default."""

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
    """Return learnable text: each word follows from the one before, most of the time."""
    rng = torch.Generator().manual_seed(1)
    first = torch.randint(0, words, (samples, 1), generator=rng)
    hops = torch.randint(1, 4, (samples, length), generator=rng)
    all_words = (first + torch.cat([torch.zeros(samples, 1, dtype=torch.int64), hops], 1).cumsum(1)) % words
    return all_words[:, :-1].contiguous(), all_words[:, 1:].contiguous()


def pictures(samples: int, *, size: int, classes: int, different: int | None = None) -> Data:
    """Return noise whose brightness gives the class; only `different` of them differ, since noise is slow to make."""
    rng = torch.Generator().manual_seed(1)
    count = different or samples
    target = torch.randint(0, classes, (count,), generator=rng)
    images = torch.randn(count, 3, size, size, generator=rng)
    images += (target.float() / classes - 0.5).view(-1, 1, 1, 1)
    times = samples // count
    return images.repeat(times, 1, 1, 1), target.repeat(times)


def rows(samples: int) -> Data:
    inputs = torch.randn(samples, 64, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :8].sin().sum(1, keepdim=True)


def table_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def small_net() -> nn.Module:
    """Return a small convolutional network like ResNet, for a CPU."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class DLRM(nn.Module):
    """A recommendation model: a table per category, layers over the numbers, and the dot products of all pairs.

    The gradients of the tables are dense, because AdamW updates every row of them; with sparse gradients another
    optimizer would train another model.
    """

    def __init__(self, rows: tuple[int, ...], *, numbers: int = 13, width: int = 64, top: int = 1024) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = layers(numbers, 512, 256, width)
        pairs = len(rows) * (len(rows) + 1) // 2
        self.top = layers(width + pairs, top, top, top // 2, 1)
        self.register_buffer("pairs", torch.tril_indices(len(rows) + 1, len(rows) + 1, -1), persistent=False)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)  # type: ignore[arg-type]

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = torch.relu(self.bottom(numbers))
        found = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        together = torch.stack([dense, *(each.to(dense.dtype) for each in found)], 1)
        products = together @ together.transpose(1, 2)
        chosen = products[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        out: Tensor = self.top(torch.cat([dense, chosen.to(dense.dtype)], 1))
        return out


def layers(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between them."""
    found: list[nn.Module] = []
    for before, after in pairwise(widths):
        found += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*found[:-1])


def clicks(samples: int, *, rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, categories of which few are frequent, and clicks that follow from both."""
    rng = torch.Generator().manual_seed(1)
    numbers = torch.randn(samples, 13, generator=rng)
    sizes = torch.tensor(rows, dtype=torch.float64)
    share = torch.rand(samples, len(rows), generator=rng, dtype=torch.float64)
    categories = (share**3 * sizes).long()
    odds = numbers[:, :4].sum(1) + (categories[:, :4] % 5 - 2).sum(1)
    clicked = (torch.rand(samples, generator=rng) < torch.sigmoid(odds)).float()
    return numbers, categories, clicked.unsqueeze(1)


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

TABLES = (100_000,) * 8 + (10_000,) * 8 + (1_000,) * 10
RECOMMENDER = Work(
    "DLRM",
    lambda: DLRM(TABLES),
    nn.functional.binary_cross_entropy_with_logits,
    lambda: clicks(1_048_576, rows=TABLES),
    4096,
    "rows",
)
SMALL_RECOMMENDER = Work(
    "small DLRM",
    lambda: DLRM((1_000,) * 6, width=16, top=64),
    nn.functional.binary_cross_entropy_with_logits,
    lambda: clicks(16_384, rows=(1_000,) * 6),
    256,
    "rows",
)
