"""Metrics that the platform computes: which versions are evaluated on which column, and what their jobs found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from falaj.errors import Conflict, InvalidInput
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.records.control.predictions import PredictionRun
from falaj.records.governance.objects import StoredObject
from falaj.records.models.gates import EvaluationReport, MetricMeasurement
from falaj.records.names import ObjectId
from falaj.records.registry import ModelVersion
from falaj.registry import store as registry_store
from falaj.registry.dependencies import EvaluationSource
from falaj.registry.gates import store


class PlannedEvaluation(NamedTuple):
    """The runs of the versions that are not evaluated yet, by the ids of the versions."""

    target: str
    runs: dict[ObjectId, PredictionRun]


def plan_evaluation(
    gate: Gate,
    call: Call,
    source: EvaluationSource,
    versions: Sequence[ModelVersion],
    data: StoredObject,
    *,
    target: str | None,
) -> PlannedEvaluation:
    """Return what is left to evaluate. Raise Conflict if nothing is, and Denied unless the caller may read it all."""
    gate.require(call, "features.load", data)
    column = choose_target(call, source, data, versions[0], target=target)
    runs: dict[ObjectId, PredictionRun] = {}
    for version in versions:
        if any((each.on, each.target) == (data.id, column) for each in _evaluated(call, version)):
            continue
        run = runs[version.id] = source.plan(call.tx, version, column)
        for ident in (version.id, *(step.version for step in run.steps)):
            if (found := objects.by_id(call.tx, ident)) is None:
                raise objects.unknown(ident, "model_version")
            gate.require(call, "models.read", found)
    if not runs:
        done = " and ".join(each.reference for each in versions)
        raise Conflict(
            f"the metrics of {done} on {data.name} are computed already, and a measurement is never changed; "
            f"falaj models card {versions[0].reference} shows them"
        )
    return PlannedEvaluation(column, runs)


def choose_target(
    call: Call,
    source: EvaluationSource,
    data: StoredObject,
    version: ModelVersion | None,
    *,
    target: str | None,
) -> str:
    """Return the column to predict: `target`, or the only one that is neither a key, nor a time, nor of a view."""
    columns, others = source.columns(call.tx, data)
    tensors = () if version is None else version.inputs
    features = {name for tensor in tensors for name in tensor.features or (tensor.name,)}
    if target is None:
        left = [name for name in columns if name not in others and name not in features]
        if len(left) == 1:
            return left[0]
        allowed = f"the column that the model predicts, one of {', '.join(left[:50]) or 'the set'}"
        raise InvalidInput.at(
            "target", given="none", allowed=allowed, fix=f"--target {(left or ['COLUMN'])[0]}"
        )
    if target not in columns:
        raise InvalidInput.at(
            "target", given=target, allowed=f"a column of {data.name}: {', '.join(columns[:50])}"
        )
    if version is not None and target in features:
        given = f"{target}, which {version.reference} takes as an input"
        raise InvalidInput.at("target", given=given, allowed="a column that the model does not get to see")
    return target


def record_evaluation(
    call: Call, version: ModelVersion, data: StoredObject, job: StoredObject, report: EvaluationReport
) -> MetricMeasurement:
    """Store what a job computed. If another job was first, its figures stay."""
    registry_store.lock_version(call.tx, version.id)
    known = {(each.on, each.target): each for each in _evaluated(call, version)}
    if (data.id, report.target) not in known:
        store.add_evaluation(call.tx, version.id, data.id, report, job=job.id, by=job.owner, at=call.now)
        known = {(each.on, each.target): each for each in _evaluated(call, version)}
    return known[data.id, report.target].model_copy(update={"on": data.name})


def _evaluated(call: Call, version: ModelVersion) -> list[MetricMeasurement]:
    return store.evaluations_of(call.tx, version.id)
