"""Feedback: join labels with logged predictions, score them, and store them by version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any

from falaj.errors import Fault, InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.records.governance.objects import StoredObject
from falaj.records.serving.endpoints import SHADOW, ScoringRule
from falaj.records.serving.predictions import FeedbackResult, GroundTruth
from falaj.serving import store
from falaj.serving.prediction_batches import DecodedBatch, split_id
from falaj.serving.prediction_log import PredictionLog
from falaj.serving.scores import UNSCORED_LOSS, fits_log_loss, score

LISTED_FAULTS = 50


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
    rows = _scored(endpoint, {each.name: each for each in known}.values(), decided)

    def publish() -> FeedbackResult:
        if decided is not None and scoring is None:
            store.set_scoring(call.tx, endpoint.id, decided)
        since = store.divided_since(call.tx, endpoint.id)
        replaced = store.put_labels(call.tx, rows)
        if since is not None:
            new = [row for row in rows if row["prediction"] not in replaced and row["predicted_at"] >= since]
            if new:
                store.observe(call.tx, endpoint.id, now=call.now, scores=_by_request(new))
        unscored = tuple(row["prediction"] for row in rows if row["score"] is None)
        return FeedbackResult(
            stored=len(rows), replaced=len(replaced), unknown=tuple(unknown), unscored=unscored
        )

    return gate.commit(call, publish)


def _by_request(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the mean score of each request by version: rows of one request are not independent."""
    requests: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        batch, number, _ = split_id(row["prediction"])
        loss = UNSCORED_LOSS if row["score"] is None else row["score"]
        requests.setdefault((row["version"], batch, number), []).append(loss)
    scores: dict[str, list[float]] = {}
    for (version, _, _), found in requests.items():
        scores.setdefault(version, []).append(sum(found) / len(found))
    return scores


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
        version = row["version"] + SHADOW if decoded.is_shadow else row["version"]
        for ident in idents:
            prediction = _in_batch(decoded, version, outcomes[ident])
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
    """Choose the scoring from the first labels: log loss if all could be classes, else squared error.

    Predictions that are not finite decide nothing.
    """
    numbers = [each for each in known if all(map(isfinite, each.predicted))]
    if not numbers:
        return None
    fits = all(fits_log_loss(each.predicted, each.outcome.value) for each in numbers)
    return ScoringRule.LOG_LOSS if fits else ScoringRule.SQUARED_ERROR


def _scored(
    endpoint: StoredObject, found: Iterable[LabelledPrediction], scoring: ScoringRule | None
) -> list[dict[str, Any]]:
    """Return the rows of labels. Raise InvalidInput with every label that cannot be a class of its prediction."""
    rows: list[dict[str, Any]] = []
    faults: list[Fault] = []
    for each in found:
        try:
            rows.append(_row(endpoint, each, scoring))
        except InvalidInput as error:
            faults += [fault.model_copy(update={"where": each.outcome.id}) for fault in error.faults]
    if faults:
        more = f", of which the first {LISTED_FAULTS} are listed" if len(faults) > LISTED_FAULTS else ""
        raise InvalidInput(
            f"{len(faults)} labels do not fit their predictions{more}; nothing is stored",
            faults=faults[:LISTED_FAULTS],
        )
    return rows


def _row(endpoint: StoredObject, found: LabelledPrediction, scoring: ScoringRule | None) -> dict[str, Any]:
    return {
        "prediction": found.name,
        "endpoint": endpoint.id,
        "version": found.version,
        "predicted_at": found.at,
        "value": found.outcome.value,
        "score": None if scoring is None else score(scoring, found.predicted, found.outcome.value),
    }
