"""The records of scheduling refuse impossible values, and round-trip through JSON."""

from __future__ import annotations

from datetime import datetime

import pytest
from pydantic import TypeAdapter, ValidationError

from falaj.records.scheduling.snapshot import Decision, Request, Snapshot
from falaj.scheduling import decide
from workloads import NOON, for_any, job, node, started, with_pending, world, worlds


@for_any(worlds(most=4))
def test_a_snapshot_and_its_decisions_round_trip_through_json(snapshot: Snapshot) -> None:
    decisions = TypeAdapter(tuple[Decision, ...])

    assert Snapshot.model_validate_json(snapshot.model_dump_json()) == snapshot
    assert decisions.validate_json(decisions.dump_json(decide(snapshot))) == decide(snapshot)


@pytest.mark.parametrize(
    ("field", "value"),
    [("replicas", 0), ("each", {"cpus": 0}), ("each", {"gpus": -1}), ("priority", 10**7), ("gpus", 1)],
)
def test_an_impossible_request_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Request.model_validate({"job": "j", "submitted_at": NOON, field: value})


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        Request.model_validate({"job": "j", "submitted_at": datetime(2026, 3, 1)})  # noqa: DTZ001


def test_duplicates_in_a_snapshot_are_refused() -> None:
    with pytest.raises(ValidationError, match="node n1 stands twice"):
        world(node("n1"), node("n1"))
    busy = started(world(node("n1"), pending=[job("j")]))
    with pytest.raises(ValidationError, match="job j stands twice"):
        Snapshot.model_validate(with_pending(busy, job("j")).model_dump())
