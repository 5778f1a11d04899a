"""Writes events as OpenLineage: which operation, job or run read what and made what, to the column for training sets.

An object is named by its id where it belongs to another workspace than the receiver: its name is not theirs to know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import select

from falaj.control.workflows.store import WorkRow, work_row
from falaj.features import store as feature_store
from falaj.features.training_sets import column_origins
from falaj.governance import objects
from falaj.governance.events.store import TEST, StoredEvent
from falaj.governance.lineage import graph
from falaj.governance.operations.events import PREFIX
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.serving.prediction_log import PREDICTED
from falaj.tracking.tables import runs
from falaj.training.tables import jobs
from falaj.version import VERSION

PRODUCER = f"urn:falaj:{VERSION}"
SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACETS = "https://openlineage.io/spec/facets"
NAMESPACE = UUID("6e3c0b4e-6d5c-5b41-9f7e-3f9c9d0a5a57")
"""Ids of runs are made from ids of objects, so that each event of a run has the same."""

ENDED = {
    "done": "COMPLETE",
    "finished": "COMPLETE",
    "failed": "FAIL",
    "cancelled": "ABORT",
    "killed": "ABORT",
}
BATCH_PREDICTION = "predictions.start"
STARTING = {"jobs.begin": "job", "runs.start": "run", BATCH_PREDICTION: "work"}
ENDING = {"jobs.finish": "job", "runs.end": "run", "workflows.finish": "work"}
SILENT_KINDS = objects.PLATFORM_KINDS | {
    *("webhook", "policy", "secret", "alert", "monitor", "experiment", "work"),
}
"""Kinds that are no data, and do not hold any."""

JsonObject = dict[str, Any]


def lineage_event(tx: Transaction, found: StoredEvent, *, platform: str) -> bytes | None:
    """Return the run event of OpenLineage for an event; None if it says nothing of data."""
    operation = found.event.type.removeprefix(PREFIX)
    subject = objects.ever(tx, found.event.subject)
    if subject is None:
        return None
    writer = _Writer(tx, platform, found.workspace)
    if found.event.type == TEST:
        described: JsonObject | None = writer.test(found)
    elif operation == PREDICTED:
        described = writer.of_predictions(subject, found)
    elif operation in STARTING or operation in ENDING:
        kind = {**STARTING, **ENDING}[operation]
        described = writer.of_run(subject, operation) if subject.kind == kind else None
    else:
        described = writer.of_operation(found, operation)
    if described is None:
        return None
    event = {
        "eventTime": found.event.at.isoformat(),
        "producer": PRODUCER,
        "schemaURL": SCHEMA,
        **described,
    }
    return json.dumps(event, separators=(",", ":")).encode()


class _Writer:
    """Describes runs and datasets for receivers of one workspace."""

    def __init__(self, tx: Transaction, platform: str, workspace: str) -> None:
        self._tx = tx
        self._namespace = f"falaj://{platform}"
        self._workspace = workspace

    def test(self, found: StoredEvent) -> JsonObject:
        """Return a run without data, by which a receiver is tried."""
        return self._event("OTHER", found.event.id, found.event.type.removeprefix(PREFIX))

    def of_run(self, subject: StoredObject, operation: str) -> JsonObject | None:
        """Return a job, a tracked run or a batch prediction as it starts or ends, with what it read and made."""
        work = work_row(self._tx, subject.id) if subject.kind == "work" else None
        if work is not None and work.workflow != BATCH_PREDICTION:  # its jobs tell of themselves
            return None
        state = "START" if operation in STARTING else ENDED.get(self._state(subject))
        if state is None:  # an attempt ended, and another follows
            return None
        name = operation if work is None else BATCH_PREDICTION
        if subject.name != subject.id:
            name = f"{subject.kind}.{self._name(subject)}"
        described = self._event(state, subject.id, name)
        described["inputs"] = [self._dataset(each) for each in self._near(subject.id, up=True)]
        if state != "START":
            made = self._near(subject.id, up=False) if work is None else self._predicted(work)
            described["outputs"] = [self._dataset(each) for each in made]
        return described

    def of_predictions(self, endpoint: StoredObject, found: StoredEvent) -> JsonObject:
        """Return the predictions of a version at an endpoint in a period, as a run that is complete."""
        told = found.event.data
        described = self._event("COMPLETE", found.event.id, f"endpoint.{self._name(endpoint)}")
        described["run"]["facets"]["nominalTime"] = _facet(
            "1-0-1/NominalTimeRunFacet", nominalStartTime=told["since"], nominalEndTime=told["until"]
        )
        described["inputs"] = [self._dataset(each) for each in self._near(told["newest"], up=True)]
        rows = _facet("1-0-2/OutputStatisticsOutputDatasetFacet", rowCount=told["rows"])
        name = f"{endpoint.workspace}/predictions/{self._name(endpoint)}"
        described["outputs"] = [
            {
                "namespace": self._namespace,
                "name": name,
                "facets": {},
                "outputFacets": {"outputStatistics": rows},
            }
        ]
        return described

    def of_operation(self, found: StoredEvent, operation: str) -> JsonObject | None:
        """Return an operation that made something, as a run of its own that is complete."""
        made = self._data(found.event.data.get("created", ()))
        if not made:
            return None
        idents = {each.id for each in made}
        read = [each for each in self._data(found.event.data.get("objects", ())) if each.id not in idents]
        described = self._event("COMPLETE", found.event.id, operation)
        described["inputs"] = [self._dataset(each) for each in read]
        described["outputs"] = [self._dataset(each) for each in made]
        return described

    def _event(self, state: str, ident: str, name: str) -> JsonObject:
        return {
            "eventType": state,
            "run": {"runId": str(uuid5(NAMESPACE, ident)), "facets": {}},
            "job": {"namespace": self._namespace, "name": name, "facets": {}},
            "inputs": [],
            "outputs": [],
        }

    def _state(self, subject: StoredObject) -> str:
        if subject.kind == "work":
            return work_row(self._tx, subject.id).state
        column = jobs.c.state if subject.kind == "job" else runs.c.status
        query = select(column).where(column.table.c.id == subject.id)
        return str(self._tx.execute(query).scalar())

    def _predicted(self, work: WorkRow) -> list[StoredObject]:
        """Return the blob of a batch prediction, and the view that it was added to."""
        made = {} if work.result is None else work.result
        return self._data(made[name] for name in ("blob", "view") if made.get(name))

    def _near(self, ident: ObjectId, *, up: bool) -> list[StoredObject]:
        """Return the objects that flowed into one, or that were made from it, by one operation."""
        reached = graph.walk(self._tx, ident, up=up, depth=2)
        return self._data(node for node, (distance, _) in reached.items() if distance == 2)

    def _data(self, idents: Iterable[str]) -> list[StoredObject]:
        found = (objects.ever(self._tx, ident) for ident in dict.fromkeys(idents))
        return [each for each in found if each is not None and each.kind not in SILENT_KINDS]

    def _name(self, found: StoredObject) -> str:
        return found.name if found.workspace == self._workspace else found.id

    def _qualified(self, found: StoredObject) -> JsonObject:
        return {"namespace": self._namespace, "name": f"{found.workspace}/{found.kind}/{self._name(found)}"}

    def _dataset(self, found: StoredObject) -> JsonObject:
        facets = (
            self._columns(found) if found.kind == "dataset" and found.workspace == self._workspace else {}
        )
        return {**self._qualified(found), "facets": facets}

    def _columns(self, found: StoredObject) -> JsonObject:
        """Return the columns of a training set, and the columns of views that they come from."""
        made = feature_store.load_training_set(self._tx, found)
        origins = {
            each.column: {
                "inputFields": [
                    {
                        **self._qualified(view),
                        "field": each.field,
                        "transformations": [{"type": "DIRECT", "subtype": "IDENTITY"}],
                    }
                ]
            }
            for each in column_origins(self._tx, made)
            if each.view_id is not None and (view := objects.ever(self._tx, each.view_id)) is not None
        }
        return {
            "schema": _facet("1-2-0/SchemaDatasetFacet", fields=[{"name": each} for each in made.columns]),
            "columnLineage": _facet("1-2-0/ColumnLineageDatasetFacet", fields=origins),
        }


def _facet(name: str, **fields: Any) -> JsonObject:
    kind = name.rpartition("/")[2]
    return {"_producer": PRODUCER, "_schemaURL": f"{FACETS}/{name}.json#/$defs/{kind}", **fields}
