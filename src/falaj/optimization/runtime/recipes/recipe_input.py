"""What a recipe is given, and the way in which it says that it cannot be applied."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from falaj.errors import FalajError
from falaj.optimization.runtime.candidates import Candidate
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.evaluation_data import EvaluationRows
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.runtime.quality import QualityEvaluator
from falaj.optimization.runtime.sessions import open_session
from falaj.records.optimization import AcceptanceBudget, Device, InstructionSet

SAMPLE_ROWS = 512
"""Rows on which an export is verified."""


class RecipeNotApplicable(Exception):
    """The recipe cannot be applied to this model; the message is the reason."""


@dataclass(frozen=True)
class VariantFile:
    """The file of a variant, and the device that it is for."""

    content: bytes
    suffix: str = ".onnx"
    device: Device = "cpu"


@dataclass(frozen=True)
class RecipeInput:
    """The original and the rows that recipes may learn from; the rows that judge them are not among these."""

    original: Candidate
    sample: Array
    fitting: EvaluationRows | None
    evaluator: QualityEvaluator
    columns: tuple[str, ...]
    budget: AcceptanceBudget
    extensions: InstructionSet
    seed: int = 0
    training_s: float = 60.0
    """Seconds for which a recipe may train, altogether."""
    student: bytes | None = None
    """The ONNX file of a student that a training job has made, or `no_student`, the reason why there is none."""
    no_student: str = ""
    log: Callable[[str], None] = print

    @cached_property
    def onnx(self) -> bytes:
        """The ONNX file of the original, exported if need be."""
        return self.original.content or self.export(self.original.source)

    @property
    def is_torch_export(self) -> bool:
        """Whether the original is a network in torch's own format, which can be trained further."""
        return self.original.path is not None and self.original.path.suffix == ".pt2"

    @property
    def rows(self) -> EvaluationRows:
        """The rows to learn from."""
        if self.fitting is None or len(self.fitting) == 0:
            raise RecipeNotApplicable("it learns from rows of the data, and there are none")
        return self.fitting

    def export(self, model: Any) -> bytes:
        """Return a model as ONNX that predicts the same on the sample."""
        named = self.columns if self.sample.ndim == 2 and len(self.columns) == self.sample.shape[1] else None
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                return export_onnx(model, path, sample=self.sample, names=named).path.read_bytes()
        except FalajError as error:
            raise RecipeNotApplicable(
                f"the export to ONNX failed: {'; '.join(str(error).splitlines())}"
            ) from error


def optimize_graph(content: bytes, *, level: str) -> bytes:
    """Return the graph after the hardware-independent optimizations of ONNX Runtime, up to `level`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fused.onnx"
        open_session(content, optimized_path=str(path), level=level)
        return path.read_bytes()
