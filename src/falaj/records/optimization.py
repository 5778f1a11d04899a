"""Optimizations: variants of a model version, what was measured of each, and why it was accepted or refused."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.features import Column
from falaj.records.names import ObjectId, Reference, RefersTo
from falaj.records.record import Record
from falaj.records.registry import FilePath, TensorSpec

OptimizationRef = Annotated[Reference, RefersTo("optimization")]

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Words = Annotated[str, Field(max_length=4000)]
FeatureColumns = Annotated[tuple[Column, ...], Field(max_length=900)]
"""Each is an argument of the job, which takes 1000."""

InstructionSet = Annotated[
    tuple[Annotated[str, Field(max_length=32, pattern=r"^[a-z0-9_]+$")], ...], Field(max_length=64)
]
"""Extensions of a CPU as Linux names them, sorted."""

Recipe = Literal[
    "onnx",
    "int8",
    "int8-static",
    "fp16",
    "bf16",
    "prune-structured",
    "prune-unstructured",
    "distill",
    "litert",
]
"""The way to make a variant: ONNX with a fused graph; int8 weights with activations quantized at each call (`int8`) or
by calibration (`int8-static`); half precision; fewer channels or trees; fewer weights; a smaller student; LiteRT."""

VariantChoice = Literal["original", "auto"] | Recipe
"""What to serve of a version: itself, its fastest accepted variant for this CPU, or the variant of a recipe."""

QualityMetric = Literal["auc", "accuracy", "log_loss", "rmse"]
HIGHER_IS_BETTER: frozenset[QualityMetric] = frozenset({"auc", "accuracy"})

Device = Literal["cpu", "gpu"]


class OptimizationVerdict(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"


class AcceptanceBudget(Record):
    """A variant must be `speedup` times as fast, and its `metric` at most so much `worse`.

    `worse` is a share of the original's value, or with `relative` false a difference. The metric is log loss or RMSE by
    default, whichever fits the model.
    """

    speedup: Annotated[float, Field(ge=1, le=1000)] = 1.1
    worse: Annotated[float, Field(ge=0, le=10)] = 0.01
    metric: QualityMetric | None = None
    relative: bool = True


class Interval(Record):
    """A measured value, and the ends of its 99% bootstrap interval."""

    low: Number
    middle: Number
    high: Number


class Measurement(Record):
    """A model on one core of this host, or on its GPU: `rows_per_s` is at `best_batch`, the size that gives the most.

    `memory_bytes` is what it takes beyond its runtime library. `loss` is log loss or RMSE, whichever fits the model.
    """

    latency_p50_us: Positive
    latency_p99_us: Positive
    rows_per_s_32: Positive
    rows_per_s: Positive
    best_batch: Annotated[int, Field(ge=1)]
    cpu_us_per_row: Positive
    size_bytes: Annotated[int, Field(ge=0)]
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    loss: Positive | None = None
    auc: Positive | None = None
    accuracy: Positive | None = None


Speedups = Annotated[dict[Annotated[str, Field(max_length=64)], Interval], Field(max_length=16)]


class Variant(Record):
    """One try. `speedup` is by size of batch; `worse` is by how much the metric is worse than the original's.

    The speedup is against the original, or against its ONNX export if that was accepted. It was measured on `device`.
    `version` is what it was registered as, once it was accepted.
    """

    recipe: Recipe
    device: Device = "cpu"
    compared_with: Literal["original", "onnx"] = "original"
    verdict: OptimizationVerdict
    reason: Words
    measured: Measurement | None = None
    speedup: Speedups = {}
    worse: Interval | None = None
    file: FilePath | None = None
    inputs: Annotated[tuple[TensorSpec, ...], Field(max_length=100)] = ()
    outputs: Annotated[tuple[TensorSpec, ...], Field(max_length=100)] = ()
    version: Reference | None = None


class HeldOutRows(Record):
    """The rows that quality was measured on: all of a held-out set, or the part of the data that nothing learned from.

    They are `rows` of the `total` with a target, drawn by `seed` where they are not all. `digest` is the SHA-256 of
    their numbers, features and target, as the model was given them: the same pinned set gives the same digest.
    """

    part: Literal["held-out set", "part of the data", "data"]
    rows: Annotated[int, Field(ge=1)]
    total: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)] = 0
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StudentReport(Record):
    """What came of the training of students: the `width` of the one that was kept and how much worse it is on rows to
    check by, or `refused`, the reason why there is none."""

    width: Annotated[int, Field(ge=1)] | None = None
    worse: Number | None = None
    steps: Annotated[int, Field(ge=0)] = 0
    refused: Words = ""


class OptimizationReport(Record):
    """The report of the job: the original and its variants, measured side by side on `host`.

    `instruction_set` are the CPU's extensions that inference uses, and `gpu` the name of the GPU, on which the original
    was measured too (`on_gpu`). `noise` is how much two copies of the original differ, by size of batch. Recipes that
    learn from rows had `fitted_rows`; quality was measured on `rows` others, which `held_out` identifies.
    """

    metric: QualityMetric
    rows: Annotated[int, Field(ge=1)]
    fitted_rows: Annotated[int, Field(ge=0)] = 0
    skipped_rows: Annotated[int, Field(ge=0)] = 0
    held_out: HeldOutRows | None = None
    host: Words = ""
    instruction_set: InstructionSet = ()
    gpu: Words = ""
    noise: Speedups = {}
    original: Measurement
    on_gpu: Measurement | None = None
    variants: Annotated[tuple[Variant, ...], Field(max_length=100)] = ()


class ParetoRow(Record):
    """One line of the Pareto table: the original or a variant, and whether no other is at least as good in everything.

    `quality` is the metric of the budget. `cost_per_million` predictions is None where no prices are configured.
    """

    name: Annotated[str, Field(max_length=64)]
    device: Device
    verdict: OptimizationVerdict | None = None
    latency_p50_us: Positive
    rows_per_s: Positive
    best_batch: int
    size_bytes: int
    memory_bytes: int | None = None
    quality: Number | None = None
    cost_per_million: Positive | None = None
    on_front: bool = False
    version: str | None = None


class Recommendation(Record):
    """What to serve, on which device, and the numbers behind it."""

    name: Annotated[str, Field(max_length=64)]
    device: Device
    version: str | None
    words: Words


class Optimization(Record):
    """An optimization that ended: of which version, judged on which data, within which budget, and what came of it.

    `held_out` is the set that quality was measured on, where it is another than `data`; `report.held_out` says which of
    its rows. `student` is the job that trained a student. `table` and `recommendation` are computed from the report
    with the prices of now, in `currency`.
    """

    id: ObjectId
    workspace: ObjectId
    model: str
    data: str
    held_out: str | None = None
    target: str
    features: tuple[str, ...]
    budget: AcceptanceBudget
    job: ObjectId
    student: ObjectId | None = None
    report: OptimizationReport
    created_at: datetime
    table: tuple[ParetoRow, ...] = ()
    recommendation: Recommendation | None = None
    currency: str | None = None
