"""Sessions of the console: they expire, and can be ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from falaj.apps.console.sessions import FAILURES, ConsoleSession, SessionStore, SignInLimit, read_zone
from falaj.errors import RateLimited
from falaj.records.governance.identity import Identity, Principal


class ManualClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class ClosablePlatform:
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> SessionStore:
    return SessionStore(lasts=timedelta(hours=12), idle=timedelta(hours=2), clock=clock, most=3)


def opened(store: SessionStore, name: str = "dana") -> tuple[str, ConsoleSession]:
    person = Principal(id=f"user_{name}", name=name, kind="user", created_at=datetime.now(UTC))
    platform: Any = ClosablePlatform()
    return store.open(
        platform, Identity(principal=person, grants=()), zone="UTC", address="", browser="x" * 999, token=None
    )


def test_a_session_is_found_by_its_cookie_alone(store: SessionStore) -> None:
    cookie, session = opened(store)

    assert store.find(cookie) is session
    assert store.find(session.ident) is None
    assert store.find(cookie[:-1]) is None
    assert store.find(None) is None
    assert len(cookie) >= 43
    assert len(session.browser) == 200


def test_a_session_that_is_not_used_ends(store: SessionStore, clock: ManualClock) -> None:
    cookie, session = opened(store)
    clock.now += 7199
    store.touch(session)
    clock.now += 7199
    assert store.find(cookie) is session

    clock.now += 1

    assert store.find(cookie) is None
    assert session.ended


def test_a_session_ends_in_any_case(store: SessionStore, clock: ManualClock) -> None:
    cookie, session = opened(store)

    for _ in range(12):
        clock.now += 3600
        store.touch(session)

    assert store.find(cookie) is None


def test_the_end_closes_pages_and_the_connection_once(store: SessionStore) -> None:
    _, session = opened(store)
    closed: list[int] = []
    session.on_end.append(lambda: closed.append(1))

    store.end(session)
    store.end(session)

    assert closed == [1]
    assert session.platform.closed == 1  # type: ignore[attr-defined]


def test_the_least_used_session_makes_room_for_a_new_one(store: SessionStore, clock: ManualClock) -> None:
    cookies = []
    for number in range(4):
        clock.now += 1
        cookies.append(opened(store, f"user{number}")[0])

    assert [store.find(each) is not None for each in cookies] == [False, True, True, True]


def test_a_person_sees_their_own_sessions(store: SessionStore) -> None:
    first, _, third = opened(store)[1], opened(store, "sam")[1], opened(store)[1]

    assert {*store.of_person(first)} == {first, third}


def test_an_address_that_fails_too_often_waits(clock: ManualClock) -> None:
    limit = SignInLimit(clock=clock)
    for _ in range(FAILURES):
        limit.require("10.0.0.1")
        limit.add_failure("10.0.0.1")

    with pytest.raises(RateLimited):
        limit.require("10.0.0.1")
    limit.require("10.0.0.2")
    clock.now += 61
    limit.require("10.0.0.1")


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../../etc/passwd", "/etc/localtime", "a" * 5000, "\0"])
def test_an_unknown_zone_is_utc(name: str) -> None:
    assert read_zone(name) is UTC
    assert read_zone("Asia/Dubai") == ZoneInfo("Asia/Dubai")
