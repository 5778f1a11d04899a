"""Distill a model into smaller networks that learn from its predictions and from the target.

A training job trains students of several widths on the same batches; the smallest that is good enough is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from falaj.optimization.progress import VariantProgress
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.recipes.fine_tuning import BATCH, distillation_loss, torch_predict
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable
from falaj.optimization.runtime.recipes.training_rows import MARGIN, TrainingRows, training_rows

WIDTHS = (16, 32, 64)
"""Widths of students; the smallest that is within the budget is kept."""
EPOCHS = 60
MOST_STEPS = 20_000
MOST_NUMBERS = 2_000_000_000
"""Numbers that students are shown altogether: some minutes on one core."""
RATE = 4e-3
LARGEST_TOKEN = 1 << 16


@dataclass(frozen=True)
class KeptStudent:
    """The student that was chosen: its width, how much worse it is on rows to check by, and its ONNX file."""

    width: int
    worse: float
    content: bytes


class Distillation:
    """Students of a model, and what their training needs: the data, the loss, its length, and how they are judged."""

    def __init__(self, given: RecipeInput) -> None:
        self._given = given
        if len(given.rows) == 1:
            raise RecipeNotApplicable("distillation: there is one row to learn from, and none to check by")
        self._rows = training_rows(given)
        self.students = StudentLadder(given, self._rows)
        self._loss = distillation_loss(given.evaluator, self._rows.trained.target)

    @property
    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and for each the target beside what the original predicts."""
        rows, teacher = self._rows.trained, self._rows.teacher
        wanted = np.column_stack([rows.target, teacher.reshape(len(teacher), -1)]).astype(np.float32)
        return torch.from_numpy(rows.features), torch.from_numpy(wanted)

    @property
    def steps(self) -> int:
        """The steps of the training; they depend on the rows alone, so that a resumed training is the same."""
        rows = self._rows.trained.features
        numbers = BATCH * int(np.prod(rows.shape[1:]))
        return max(1, min(EPOCHS * math.ceil(len(rows) / BATCH), MOST_STEPS, MOST_NUMBERS // numbers))

    def loss(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the sum of the students' losses: each learns as if it were alone."""
        target, teacher = wanted[:, 0], wanted[:, 1:]
        if self._rows.teacher.ndim == 1:
            teacher = teacher[:, 0]
        each = [self._loss(part.reshape(teacher.shape), target, teacher) for part in made.unbind(dim=1)]
        return torch.stack(each).sum()

    def evaluate(self, _: nn.Module) -> float:
        """Return by how much the best student is worse than the original on rows to check by, and report it."""
        width, worse = min(self._shortfalls().items(), key=lambda item: item[1])
        words = f"the student of width {width} is {worse:.4g} worse"
        self._given.log(VariantProgress(name="distill", stage="training", reason=words).line())
        return worse

    def choose(self) -> KeptStudent:
        """Return the smallest student well within the budget, or the best. Raise RecipeNotApplicable if none is."""
        self.students.eval()
        found, budget = self._shortfalls(), self._given.budget
        good = [width for width, worse in found.items() if worse <= MARGIN * budget.worse]
        width = good[0] if good else min(found, key=lambda each: found[each])
        if not found[width] <= budget.worse:
            raise RecipeNotApplicable(
                f"distillation: no student reaches the budget; the best one's {self._given.evaluator.metric} is "
                f"{found[width]:.4g} worse than the original's on rows to check by, and the budget is "
                f"{budget.worse:.4g}"
            )
        return KeptStudent(width, found[width], self._given.export(self.students.of_width(width)))

    def _shortfalls(self) -> dict[int, float]:
        """Return by how much each student is worse, by width from the smallest; infinity if it predicts no number."""
        found = {}
        for width in self.students.widths:
            worse = self._rows.shortfall(torch_predict(self.students.of_width(width)), self._given)
            found[width] = worse if math.isfinite(worse) else math.inf
        return found


class StudentLadder(nn.Module):
    """Students from the narrowest to the widest, which share their rows and nothing else."""

    def __init__(self, given: RecipeInput, rows: TrainingRows) -> None:
        super().__init__()
        self.widths = WIDTHS
        self.students = nn.ModuleList()
        for width in WIDTHS:
            torch.manual_seed(given.seed)
            self.students.append(
                make_student(rows.trained.features, rows.teacher, width=width, outputs=_outputs(given))
            )

    def of_width(self, width: int) -> nn.Module:
        return self.students[self.widths.index(width)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([each(rows).reshape(len(rows), -1) for each in self.students], dim=1)


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
