"""Parses OpenLineage events into the classes of openlineage-python."""

from __future__ import annotations

import json
from typing import Any

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.generated.base import DatasetFacet, RunFacet
from openlineage.client.generated.column_lineage_dataset import (
    ColumnLineageDatasetFacet,
    Fields,
    InputField,
    Transformation,
)
from openlineage.client.generated.nominal_time_run import NominalTimeRunFacet
from openlineage.client.generated.output_statistics_output_dataset import OutputStatisticsOutputDatasetFacet
from openlineage.client.generated.schema_dataset import SchemaDatasetFacet, SchemaDatasetFacetFields
from openlineage.client.serde import Serde

from falaj.control.events.openlineage import lineage_event
from falaj.governance.events import store
from falaj.records.governance.events import EventPosition
from falaj.sdk.platform import Platform


def all_events(platform: Platform, workspace: str) -> list[RunEvent]:
    """Return every event of a workspace that OpenLineage has words for, parsed."""
    gate = platform.jobs.gate
    with gate.database.read() as tx:
        found = store.list_events(tx, workspace=workspace, after=EventPosition(seq=-1, part=0), limit=10_000)
        bodies = [lineage_event(tx, each, platform=gate.audit.log_id) for each in found]
    return [parse(body) for body in bodies if body is not None]


def parse(body: bytes) -> RunEvent:
    """Return a body as the classes of the client; they accept no further fields, and check ids and times."""
    given = json.loads(body)
    assert given.pop("schemaURL") == RunEvent._get_schema()
    given |= {
        "eventType": RunState(given["eventType"]),
        "run": Run(**given["run"] | {"facets": _run_facets(given["run"]["facets"])}),
        "job": Job(**given["job"]),
        "inputs": [InputDataset(**_with_facets(each)) for each in given["inputs"]],
        "outputs": [OutputDataset(**_with_statistics(_with_facets(each))) for each in given["outputs"]],
    }
    found = RunEvent(**given)
    assert json.loads(Serde.to_json(found))["schemaURL"] == RunEvent._get_schema()
    return found


def _with_facets(given: dict[str, Any]) -> dict[str, Any]:
    facets: dict[str, DatasetFacet] = {}
    for name, facet in given["facets"].items():
        producer, url = facet["_producer"], facet["_schemaURL"]
        if name == "schema":
            fields = [SchemaDatasetFacetFields(**each) for each in facet["fields"]]
            facets[name] = SchemaDatasetFacet(fields=fields, producer=producer)
        else:
            origins = {
                column: Fields(
                    inputFields=[
                        InputField(
                            **each
                            | {"transformations": [Transformation(**t) for t in each["transformations"]]}
                        )
                        for each in origin["inputFields"]
                    ]
                )
                for column, origin in facet["fields"].items()
            }
            facets[name] = ColumnLineageDatasetFacet(fields=origins, producer=producer)
        assert facets[name]._get_schema() == url
    return given | {"facets": facets}


def _run_facets(given: dict[str, Any]) -> dict[str, RunFacet]:
    facets: dict[str, RunFacet] = {}
    for name, facet in given.items():
        assert name == "nominalTime"
        times = {key: value for key, value in facet.items() if not key.startswith("_")}
        facets[name] = NominalTimeRunFacet(**times, producer=facet["_producer"])
        assert facets[name]._get_schema() == facet["_schemaURL"]
    return facets


def _with_statistics(given: dict[str, Any]) -> dict[str, Any]:
    facets = {}
    for name, facet in given.get("outputFacets", {}).items():
        assert name == "outputStatistics"
        counts = {key: value for key, value in facet.items() if not key.startswith("_")}
        facets[name] = OutputStatisticsOutputDatasetFacet(**counts, producer=facet["_producer"])
        assert facets[name]._get_schema() == facet["_schemaURL"]
    return given | {"outputFacets": facets}


def names(found: list[Any] | None) -> list[str]:
    return sorted(each.name.partition("/")[2] for each in found or [])
