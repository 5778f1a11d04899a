"""Events are streamed as they are made: to those who may see them, without a gap, with one reader for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice

import pytest

from falaj.errors import FalajError, InvalidInput, Unauthenticated
from falaj.governance.events import feed, store
from falaj.governance.events.feed import EventFeed
from falaj.governance.operations.caller import acting_as
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


def test_a_database_that_is_away_for_a_moment_ends_no_stream(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = light_platform.events.watch()
    next(stream)
    plain, failures = store.list_all, iter([1, 1])

    def failing(*args: object, **options: object) -> object:
        if next(failures, None):
            raise FalajError("busy")
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "list_all", failing)
    light_platform.secrets.set("pin", "x")

    assert next_event(stream).name == "pin"
    stream.close()
