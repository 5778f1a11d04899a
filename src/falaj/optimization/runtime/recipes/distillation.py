"""Distill a model into a smaller network that learns from its predictions and from the target."""

from __future__ import annotations

import torch
from torch import nn

from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.recipes.fine_tuning import MARGIN, fine_tune, torch_predict, training_rows
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile

WIDTHS = (16, 32, 64)
"""Widths of students, tried from the smallest."""
EPOCHS = 60
RATE = 4e-3
LARGEST_TOKEN = 1 << 16


def distill(given: RecipeInput) -> VariantFile:
    """Return the smallest student that is within the budget on rows that training does not see."""
    rows = training_rows(given)
    students: list[tuple[float, nn.Module]] = []
    for width in WIDTHS:
        torch.manual_seed(given.seed)
        student = make_student(rows.trained.features, rows.teacher, width=width, outputs=_outputs(given))
        seconds = given.training_s / len(WIDTHS)
        fine_tune(student, rows, seconds=seconds, epochs=EPOCHS, rate=RATE, seed=given.seed)
        student.eval()
        worse = rows.shortfall(torch_predict(student), given)
        given.log(f"distill: a student of width {width} is {worse:.4g} worse")
        students.append((worse, student))
        if worse <= MARGIN * given.budget.worse:
            return VariantFile(given.export(student))
    least, best = min(students, key=lambda each: each[0])
    if least <= given.budget.worse:
        return VariantFile(given.export(best))
    raise RecipeNotApplicable(
        f"distillation: no student reaches the budget; the best one's {rows.evaluator.metric} is {least:.4g} "
        f"worse than the original's on rows to check by, and the budget is {given.budget.worse:.4g}"
    )


def _outputs(given: RecipeInput) -> str:
    """Return what the original's outputs are: a probability, probabilities of classes, or plain scores."""
    judge = given.evaluator
    if judge.kind == "number" or judge.logits or not judge.probabilities:
        return "scores"
    return "probabilities"


def make_student(features: Array, teacher: Array, *, width: int, outputs: str) -> nn.Module:
    """Return a network for rows like `features` with outputs like `teacher`, by the kind of input."""
    columns = 1 if teacher.ndim == 1 else teacher.shape[1]
    if (
        features.dtype.kind == "i"
        and features.ndim == 2
        and 0 <= features.min() <= features.max() < LARGEST_TOKEN
    ):
        body: nn.Module = TokenStudent(int(features.max()) + 1, width, columns)
    elif features.dtype == "float32" and features.ndim == 2:
        body = ColumnStudent(features, width, columns)
    elif features.dtype == "float32" and features.ndim == 4 and min(features.shape[2:]) >= 8:
        body = ImageStudent(features.shape[1], width, columns)
    else:
        raise RecipeNotApplicable(
            f"distillation: there is no student for inputs of {features.dtype} {list(features.shape[1:])}"
        )
    return Student(body, outputs, columns, flat=teacher.ndim == 1)


class Student(nn.Module):
    """A body, and outputs as the original has them."""

    def __init__(self, body: nn.Module, outputs: str, columns: int, *, flat: bool) -> None:
        super().__init__()
        self.body = body
        self.outputs, self.columns, self.flat = outputs, columns, flat

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(rows)
        if self.outputs == "probabilities":
            made = torch.sigmoid(made) if self.columns == 1 else torch.softmax(made, dim=1)
        return made.squeeze(1) if self.flat else made


class ColumnStudent(nn.Module):
    """Two hidden layers over standardized columns; missing values count as the mean."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, features: Array, width: int, columns: int) -> None:
        super().__init__()
        known = torch.from_numpy(features).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        self.register_buffer("mean", known.mean(dim=0))
        self.register_buffer("scale", 1 / known.std(dim=0).clamp_min(1e-6))
        self.layers = nn.Sequential(
            nn.Linear(features.shape[1], width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, columns),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        known = torch.where(torch.isnan(rows), self.mean, rows)
        made: torch.Tensor = self.layers((known - self.mean) * self.scale)
        return made


class ImageStudent(nn.Module):
    """Three strided convolutions, of which the later are depthwise separable, and a linear layer."""

    def __init__(self, channels: int, width: int, columns: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width // 2, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width // 2, width // 2, 3, 2, 1, groups=width // 2),
            nn.Conv2d(width // 2, width, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1, groups=width),
            nn.Conv2d(width, 2 * width, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(2 * width, columns)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.layers(images).flatten(1))
        return made


class TokenStudent(nn.Module):
    """The mean of the tokens' embeddings, and two layers."""

    def __init__(self, tokens: int, width: int, columns: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, columns))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(self.tokens(tokens).mean(dim=1))
        return made
