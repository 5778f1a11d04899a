"""Feedback: join labels with logged predictions, score them, and store them by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from falaj.errors import InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.records.governance.objects import StoredObject
from falaj.records.serving import FeedbackResult, GroundTruth, ScoringRule
from falaj.serving import store
from falaj.serving.prediction_batches import DecodedBatch, split_id
from falaj.serving.prediction_log import PredictionLog
from falaj.serving.scores import fits_log_loss, score


@dataclass(frozen=True, slots=True)
class LabelledPrediction:
    """A label and its prediction."""

    name: str
    outcome: GroundTruth
    version: str
    at: datetime
    predicted: Sequence[float]


def score_labels(
    gate: Gate,
    call: Call,
    prediction_log: PredictionLog,
    endpoint: StoredObject,
    outcomes: Sequence[GroundTruth],
) -> FeedbackResult:
    """Find the predictions of `outcomes`, score them and store the labels; a later label replaces an earlier one."""
    by_id = {outcome.id: outcome for outcome in outcomes}
    known, unknown = _find_predictions(gate, endpoint, prediction_log, by_id)
    with gate.database.read() as tx:
        scoring = store.endpoint_record(tx, endpoint).scoring
    decided = scoring or _scoring(known)
    found = {each.name: _row(endpoint, each, decided) for each in known} if decided is not None else {}
    rows = [*found.values()]

    def publish() -> FeedbackResult:
        if decided is not None and scoring is None:
            store.set_scoring(call.tx, endpoint.id, decided)
        replaced = store.put_labels(call.tx, rows)
        return FeedbackResult(stored=len(rows), replaced=replaced, unknown=tuple(unknown))

    return gate.commit(call, publish)


def _find_predictions(
    gate: Gate, endpoint: StoredObject, prediction_log: PredictionLog, outcomes: Mapping[str, GroundTruth]
) -> tuple[list[LabelledPrediction], list[str]]:
    """Return the logged predictions, and the ids of those that are not logged (yet)."""
    known: list[LabelledPrediction] = []
    unknown: list[str] = []
    by_batch: dict[str, list[str]] = {}
    for ident in outcomes:
        try:
            by_batch.setdefault(split_id(ident)[0], []).append(ident)
        except NotFound:
            unknown.append(ident)
    for batch, idents in by_batch.items():
        with gate.database.read() as tx:
            found = objects.by_id(tx, batch)
            row = None if found is None else store.batch_row(tx, batch)
        if found is None or row is None or row["endpoint"] != endpoint.id:
            unknown += idents
            continue
        decoded = prediction_log.open(found)
        for ident in idents:
            prediction = _in_batch(decoded, row["version"], outcomes[ident])
            if prediction is None:
                unknown.append(ident)
            else:
                known.append(prediction)
    return known, unknown


def _in_batch(decoded: DecodedBatch, version: str, outcome: GroundTruth) -> LabelledPrediction | None:
    _, number, row = split_id(outcome.id)
    place = decoded.place(number, row)
    if place is None:
        return None
    predicted = decoded.predicted(place)
    if not predicted:
        raise InvalidInput(f"{outcome.id}: the outputs of the model are not numeric and cannot be scored")
    return LabelledPrediction(decoded.named(outcome.id), outcome, version, decoded.at(place), predicted)


def _scoring(known: Sequence[LabelledPrediction]) -> ScoringRule | None:
    """Choose the scoring from the first labels: log loss if all could be classes, else squared error."""
    if not known:
        return None
    fits = all(fits_log_loss(each.predicted, each.outcome.value) for each in known)
    return ScoringRule.LOG_LOSS if fits else ScoringRule.SQUARED_ERROR


def _row(endpoint: StoredObject, found: LabelledPrediction, scoring: ScoringRule) -> dict[str, Any]:
    return {
        "prediction": found.name,
        "endpoint": endpoint.id,
        "version": found.version,
        "predicted_at": found.at,
        "value": found.outcome.value,
        "score": score(scoring, found.predicted, found.outcome.value),
    }
