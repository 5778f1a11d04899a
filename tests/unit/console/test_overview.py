"""The overview: what it shows of the records of the platform."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from falaj.apps.console.pages.overview import (
    COUNTS,
    PARTS,
    Box,
    OverviewRecords,
    OverviewView,
    add_events,
    overview,
    read_again,
    read_records,
)
from falaj.apps.console.times import Times
from falaj.records.governance.events import Event
from falaj.records.platform import PlatformFacts
from falaj.records.scheduling.hardware import FreeResources, Machine
from falaj.records.scheduling.snapshot import Node

TIMES = Times(ZoneInfo("Asia/Dubai"))
NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
EMPTY = OverviewRecords(
    platform=None, machines=(), queues=(), running=(), waiting=(), counts={}, alerts=(), today=()
)


def machine(*, cpus: int, free: int, memory: int = 1 << 30) -> Machine:
    node = Node(name="n1", zone="local", jurisdiction="AE", cpus=cpus, memory_bytes=memory)
    return Machine(node=node, free=FreeResources(cpus=free, memory_bytes=memory, gpus=0))


def event(name: str, *, at: datetime = NOON) -> Event:
    return Event(id="evt_1", type="falaj.models.promote", subject="model_1", name=name, at=at, seq=1, data={})


def box(view: OverviewView, title: str) -> Box:
    return next(each for layer in view.layers for each in layer.boxes if each.title == title)


def test_a_platform_that_is_not_reached_is_shown_as_such() -> None:
    view = overview(EMPTY, times=TIMES)

    assert box(view, "REST API and MLflow API").tone == "bad"
    assert box(view, "Controller").state == "none acts"
    assert box(view, "GPUs").state == "none here"


def test_a_controller_that_keeps_failing_is_shown_as_such() -> None:
    facts = PlatformFacts(
        version="1", controller="vm:1", zones=(), users=1, failing={"controller": "it fails"}
    )

    view = overview(replace(EMPTY, platform=facts), times=TIMES)

    assert (box(view, "Controller").tone, box(view, "Controller").state) == ("bad", "keeps failing")


def test_held_resources_are_a_share_of_the_whole() -> None:
    records = replace(EMPTY, machines=(machine(cpus=4, free=1), machine(cpus=4, free=4)))

    view = overview(records, times=TIMES)

    assert box(view, "CPUs").share == 3 / 8
    assert box(view, "CPUs").state == "3 of 8 cores held"
    assert box(view, "Nodes").state == "2 nodes"


def test_counts_say_what_is_there_and_what_is_not_shown() -> None:
    records = replace(EMPTY, counts={"models": 1, "features": 1000, "endpoints": None})

    view = overview(records, times=TIMES)

    assert box(view, "Models").state == "1 model"
    assert box(view, "Features").state == "1,000+ views"
    assert box(view, "Endpoints").state == "not shown to you"


def test_the_newest_change_comes_first_in_the_zone_of_the_person() -> None:
    facts = PlatformFacts(version="1", controller="c", zones=(), users=1)
    records = replace(EMPTY, platform=facts, today=tuple(event(f"m{at}") for at in range(20)))

    view = overview(records, times=TIMES)

    assert view.changed == 20
    assert [line.words for line in view.changes][:2] == ["models promote: m19", "models promote: m18"]
    assert view.changes[0].at == "16:00:00"


class Asked:
    """Notes which operations were called, and answers as a platform where there is nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, group: str) -> Any:
        def call(name: str) -> Any:
            def answer(**_options: object) -> Any:
                self.names.append(f"{group}.{name}")
                return SimpleNamespace(items=())

            return answer

        return type("Group", (), {"__getattr__": lambda _self, name: call(name)})()


@pytest.mark.parametrize(
    ("group", "asked"),
    [
        ("experiments", {"experiments.list"}),
        ("secrets", set()),
        ("monitoring", {"monitoring.list", "monitoring.alerts"}),
        ("jobs", {"jobs.list", "nodes.list", "queues.list", "experiments.list"}),
    ],
)
def test_an_event_asks_again_for_what_it_may_have_changed(group: str, asked: set[str]) -> None:
    platform: Any = Asked()
    counts = {"models": 3}

    found = read_again(platform, "default", replace(EMPTY, counts=counts), {group})

    assert {*platform.names} == asked
    assert found.counts["models"] == 3


def test_all_is_read_at_first() -> None:
    platform: Any = Asked()

    read_records(platform, "default", NOON)

    assert {*platform.names} >= {"platform.status", "events.list", "webhooks.list", "features.list"}
    assert len(platform.names) == len(PARTS) + len(COUNTS) + 1


def test_events_are_added_once_and_those_of_yesterday_are_left_out() -> None:
    old, known, new = (
        event(name, at=at).model_copy(update={"id": name})
        for name, at in (("old", NOON - timedelta(days=1)), ("known", NOON), ("new", NOON))
    )

    found = add_events(replace(EMPTY, today=(old, known)), [known, new], since=NOON - timedelta(hours=12))

    assert [each.name for each in found.today] == ["known", "new"]


def test_the_same_change_several_times_in_a_row_is_one_line() -> None:
    names = ["first", *["often"] * 500, "last"]

    view = overview(replace(EMPTY, today=tuple(event(name) for name in names)), times=TIMES)

    assert [(line.words, line.detail) for line in view.changes] == [
        ("models promote: last", "the platform"),
        ("models promote: often", "the platform, 500 times"),
        ("models promote: first", "the platform"),
    ]
