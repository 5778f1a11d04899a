"""Events, and changes that make none, are streamed: to those who may see them, without a gap, by one reader for all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import pytest

from falaj.assembly.services import change_marks
from falaj.errors import InvalidInput, NotFound, Unauthenticated, Unavailable
from falaj.governance.events import feed, store
from falaj.governance.events.feed import EventFeed
from falaj.governance.operations.caller import Caller, acting_as
from falaj.ports.metadata import Transaction
from falaj.records.governance.events import Event, EventNotice
from falaj.records.governance.identity import Role
from platforms import OwnPlatform
from polling import eventually


def next_event(stream: Iterator[EventNotice]) -> Event:
    return next(notice.event for notice in stream if notice.event is not None)


def test_an_event_is_streamed_when_it_is_made(platform: OwnPlatform) -> None:
    platform.secrets.set("earlier", "x")
    stream = platform.events.watch(types=("secrets.*",))
    assert next(stream).event is None

    platform.experiments.create("other")
    platform.secrets.set("pin", "x")

    found = next_event(stream)
    assert (found.type, found.name) == ("falaj.secrets.set", "pin")
    stream.close()


def test_a_stream_continues_behind_its_cursor(platform: OwnPlatform) -> None:
    stream = platform.events.watch()
    cursor = next(stream).cursor
    stream.close()
    names = [f"s{number}" for number in range(5)]
    for name in names:
        platform.secrets.set(name, "x")

    again = platform.events.watch(after=cursor)

    assert [next_event(again).name for _ in names] == names
    again.close()


def test_a_watcher_that_is_far_behind_misses_nothing(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEPT", 3)
    light_platform.events._feed = EventFeed(light_platform.events.gate.database, poll_s=0.01)
    stream = light_platform.events.watch(types=("secrets.*",))
    next(stream)
    other = light_platform.events.watch()
    next(other)
    names = [f"s{number}" for number in range(20)]

    for name in names:
        light_platform.secrets.set(name, "x")

    assert [next_event(stream).name for _ in names] == names
    stream.close()
    other.close()


def test_events_of_hidden_objects_and_of_other_workspaces_are_not_streamed(
    light_platform: OwnPlatform,
) -> None:
    light_platform.workspaces.create("risk")
    dana = light_platform.join("dana", Role.VIEWER)
    hidden = (
        f'forbid (principal == User::"{dana.id}", action, resource) when {{ resource.name == "hidden" }};'
    )
    light_platform.policies.publish("hide", text=hidden)
    with acting_as(dana):
        stream = light_platform.events.watch()
        next(stream)

    light_platform.secrets.set("elsewhere", "x", workspace="risk")
    light_platform.secrets.set("hidden", "x")
    light_platform.secrets.set("open", "x")

    assert next_event(stream).name == "open"
    stream.close()


def test_a_stream_ends_when_its_token_is_revoked(light_platform: OwnPlatform) -> None:
    dana = light_platform.join("dana", Role.VIEWER)
    with acting_as(dana):
        stream = light_platform.events.watch()
    next(stream)

    light_platform.users.disable("dana")

    with pytest.raises(Unauthenticated):
        list(islice(stream, 20))


def test_a_cursor_of_another_caller_is_refused(light_platform: OwnPlatform) -> None:
    stream = light_platform.events.watch()
    cursor = next(stream).cursor
    stream.close()
    dana = light_platform.join("dana", Role.VIEWER)

    with acting_as(dana), pytest.raises(InvalidInput):
        light_platform.events.watch(after=cursor)


def test_many_watchers_cost_one_reader_that_rests_without_them(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    plain, others = store.list_all, {*threading.enumerate()}

    def counted(*args: object, **options: object) -> object:
        looks.append(threading.current_thread().name)
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "list_all", counted)
    streams = [light_platform.events.watch() for _ in range(20)]
    for stream in streams:
        next(stream)
    readers = [each for each in threading.enumerate() if each.name == "event-feed" and each not in others]
    eventually(lambda: len(looks) > 1)
    light_platform.secrets.set("pin", "x")
    assert {next_event(stream).name for stream in streams} == {"pin"}

    for stream in streams:
        stream.close()

    assert len(readers) == 1
    assert {*looks} == {"event-feed"}
    eventually(lambda: not readers[0].is_alive())


@pytest.mark.parametrize("is_missed", [False, True], ids=["told by the reader", "read by the watcher"])
def test_a_database_that_is_away_for_a_moment_ends_no_stream(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch, is_missed: bool
) -> None:
    if is_missed:
        monkeypatch.setattr(feed, "KEPT", 1)
        light_platform.events._feed = EventFeed(light_platform.events.gate.database, poll_s=0.01)
    stream = light_platform.events.watch()
    next(stream)
    eventually(lambda: light_platform.events._feed._newest)  # the reader has begun, before the events
    others = light_platform.events.watch()
    next(others)
    names = ["first", "second", "third"]
    for name in names:
        light_platform.secrets.set(name, "x")
        assert next_event(others).name == name  # the reader has told it
    plain, failures = store.list_all, Counter[bool]()

    def failing(*args: object, **options: object) -> object:
        by_reader = threading.current_thread().name == "event-feed"
        failures[by_reader] += 1
        if failures[by_reader] <= 2:
            raise Unavailable("busy")
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "list_all", failing)
    light_platform.secrets.set("last", "x")

    assert [next_event(stream).name for _ in range(4)] == [*names, "last"]
    assert (failures[False] > 2) == is_missed
    stream.close()
    others.close()


# ---------------------------------------------------------------------------------- followed objects


def next_changes(stream: Iterator[EventNotice]) -> tuple[str, ...]:
    return next(notice.changed for notice in stream if notice.changed)


def log(platform: OwnPlatform, run: str, *, step: int) -> None:
    platform.runs.log_metrics(run, ({"key": "loss", "value": 0.5, "step": step},))


@pytest.fixture
def quick_platform(light_platform: OwnPlatform) -> OwnPlatform:
    light_platform.events._feed = EventFeed(
        light_platform.events.gate.database, marks=change_marks(), poll_s=0.01, changes_s=0.02
    )
    return light_platform


def test_new_points_of_a_followed_run_are_told_and_those_of_others_are_not(platform: OwnPlatform) -> None:
    followed, other = platform.runs.start("e").id, platform.runs.start("e").id
    stream = platform.events.watch(objects=(followed,))
    assert next(stream).changed == (followed,), "what happened before the stream began is to be loaded"

    log(platform, other, step=1)
    log(platform, followed, step=1)

    assert next_changes(stream) == (followed,)
    stream.close()


def test_points_are_told_once_for_all_that_came_meanwhile(quick_platform: OwnPlatform) -> None:
    run = quick_platform.runs.start("e").id
    stream = quick_platform.events.watch(objects=(run,))
    next(stream)
    reads = Counter[str]()
    read_before = quick_platform.events._feed._readers["run"]

    def counted(tx: Transaction, idents: Sequence[str]) -> Iterable[tuple[Any, ...]]:
        reads[threading.current_thread().name] += 1
        return read_before(tx, idents)

    quick_platform.events._feed._readers = {"run": counted}
    for step in range(50):
        log(quick_platform, run, step=step)
    reads.clear()
    eventually(lambda: reads["event-feed"] > 1)  # the second of them has seen all points, and told

    assert next_changes(stream) == (run,)
    notices = list(islice(stream, 1))
    stream.close()
    assert [notice.changed for notice in notices] == [()], "a heartbeat: nothing changed since"


def test_a_run_that_ends_without_an_event_of_its_own_is_told(quick_platform: OwnPlatform) -> None:
    run = quick_platform.runs.start("e").id
    stream = quick_platform.events.watch(objects=(run,), types=("jobs.*",))
    next(stream)

    quick_platform.runs.end(run)

    assert next_changes(stream) == (run,)
    stream.close()


def test_twenty_followers_of_a_run_cost_one_query_and_none_without_them(
    quick_platform: OwnPlatform,
) -> None:
    run = quick_platform.runs.start("e").id
    streams = [quick_platform.events.watch(objects=(run,)) for _ in range(20)]
    for stream in streams:
        next(stream)
    asked: list[Sequence[str]] = []
    read_before = quick_platform.events._feed._readers["run"]

    def counted(tx: Transaction, idents: Sequence[str]) -> Iterable[tuple[Any, ...]]:
        asked.append([*idents])
        return read_before(tx, idents)

    quick_platform.events._feed._readers = {"run": counted}
    eventually(lambda: len(asked) > 2)

    for stream in streams:
        stream.close()

    assert asked == [[run]] * len(asked)
    eventually(lambda: not quick_platform.events._feed._is_reading)
    assert quick_platform.events._feed._marks == {}


def test_a_run_that_the_caller_may_not_see_cannot_be_followed(quick_platform: OwnPlatform) -> None:
    run = quick_platform.runs.start("e").id
    dana = quick_platform.join("dana", Role.VIEWER)
    quick_platform.policies.publish("hide", text=hide_runs(dana))

    with acting_as(dana), pytest.raises(NotFound):
        quick_platform.events.watch(objects=(run,))


def test_who_may_no_longer_see_a_run_is_told_nothing_of_it(quick_platform: OwnPlatform) -> None:
    run = quick_platform.runs.start("e").id
    dana = quick_platform.join("dana", Role.VIEWER)
    with acting_as(dana):
        stream = quick_platform.events.watch(objects=(run,), types=("secrets.*",))
    mine = quick_platform.events.watch(objects=(run,))
    assert (next(stream).changed, next(mine).changed) == ((run,), (run,))
    quick_platform.policies.publish("hide", text=hide_runs(dana))

    log(quick_platform, run, step=1)
    quick_platform.secrets.set("later", "x")

    assert next_changes(mine) == (run,)
    until = list(takewhile(lambda notice: notice.event is None, stream))
    assert [notice.changed for notice in until if notice.changed] == []
    stream.close()
    mine.close()


def hide_runs(caller: Caller) -> str:
    return f'forbid (principal == User::"{caller.id}", action, resource is Run);'


def test_what_makes_an_event_at_each_change_is_not_followed(quick_platform: OwnPlatform) -> None:
    secret = quick_platform.secrets.set("pin", "x")

    with pytest.raises(InvalidInput, match="run"):
        quick_platform.events.watch(objects=(secret.id,))


def test_every_kind_that_can_be_followed_is_read(platform: OwnPlatform) -> None:
    with platform.events.gate.database.read() as tx:
        for read in change_marks().values():
            assert [*read(tx, ["none_such", "nor_this"])] == []
