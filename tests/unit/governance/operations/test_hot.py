"""The hot path: decided from memory, recorded by window, and changed policies take effect."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from falaj.errors import NotFound, Unavailable
from falaj.governance.operations.hot import WINDOW
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

ACTION = "blobs.read"


def test_many_calls_are_one_entry_with_a_count(platform: OwnPlatform) -> None:
    blob = platform.put("b", b"x").id
    caller = platform.join("sara", Role.VIEWER)
    hot = platform.parts.gate.hot

    for number in range(50):
        hot.admit(caller, ACTION, blob, str(number).encode())
    hot.flush()
    before = [entry for entry in platform.entries() if entry["action"] == ACTION]
    platform.clock.advance(WINDOW)
    hot.flush()

    entries = [entry for entry in platform.entries() if entry["action"] == ACTION]
    assert before == []
    assert [(entry["caller"], entry["count"], entry["objects"]) for entry in entries] == [
        ("sara", 50, [blob])
    ]
    assert platform.audit.list(action=ACTION).items[0].count == 50


def test_the_digest_depends_on_what_was_sent(platform: OwnPlatform) -> None:
    blob = platform.put("b", b"x").id
    caller = platform.join("sara", Role.VIEWER)
    hot = platform.parts.gate.hot

    for data in (b"one", b"two", b"one"):
        hot.admit(caller, ACTION, blob, data)
        hot.flush(all_windows=True)

    digests = [entry["input"] for entry in platform.entries() if entry["action"] == ACTION]
    assert digests[0] == digests[2] != digests[1]


def test_a_revoked_role_takes_effect(platform: OwnPlatform) -> None:
    blob = platform.put("b", b"x").id
    caller = platform.join("sara", Role.VIEWER)
    hot = platform.parts.gate.hot
    hot._epoch._max_age_s = 0
    hot.admit(caller, ACTION, blob)

    platform.workspaces.revoke("default", "sara", role=Role.VIEWER)

    with pytest.raises(NotFound):
        hot.admit(caller, ACTION, blob)
    assert platform.entries()[-1]["outcome"] == "denied"


def test_an_unknown_object_is_not_found(platform: OwnPlatform) -> None:
    caller = platform.join("sara", Role.VIEWER)

    with pytest.raises(NotFound):
        platform.parts.gate.hot.admit(caller, ACTION, "blob_" + "0" * 26)


def test_windows_are_flushed_when_the_platform_closes(platform: OwnPlatform) -> None:
    blob = platform.put("b", b"x").id
    caller = platform.join("sara", Role.VIEWER)
    second = platform.again()
    second.parts.gate.hot.admit(caller, ACTION, blob)

    second.parts.close_audit()

    assert platform.entries()[-1]["action"] == ACTION
    platform.clock.advance(timedelta(seconds=1))


# ------------------------------------------------------------------------------------------ exact counts


def counted(platform: OwnPlatform) -> int:
    return sum(entry["count"] for entry in platform.entries() if entry["action"] == ACTION)


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Let threads switch as often as possible, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
@pytest.mark.parametrize("way", ["admit", "count"])
def test_no_call_is_lost_or_counted_twice_while_windows_are_flushed(
    light_platform: OwnPlatform, way: str
) -> None:
    blobs = [light_platform.put(f"b{number}", b"x").id for number in range(2)]
    caller = light_platform.join("sara", Role.VIEWER)
    hot, over = light_platform.parts.gate.hot, threading.Event()
    calls = {"admit": lambda blob: hot.admit(caller, ACTION, blob), "count": decided_first(hot, caller)}
    threads, each = 4, 400

    def call(number: int) -> None:
        for turn in range(each):
            calls[way](blobs[(number + turn) % 2])

    def write_down() -> int:
        rounds = 0
        while not over.is_set():
            hot.flush(all_windows=True)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(threads + 2) as pool:
        writers = [pool.submit(write_down) for _ in range(2)]
        for done in [pool.submit(call, number) for number in range(threads)]:
            done.result()
        over.set()
        rounds = sum(writer.result() for writer in writers)
    hot.flush(all_windows=True)

    assert rounds > 2
    assert counted(light_platform) == threads * each
    assert light_platform.verify_audit().problems == ()


def decided_first(hot: Any, caller: Any) -> Callable[[str], None]:
    """Count as the model server does: without I/O if a decision is in memory, otherwise after deciding."""

    def call(blob: str) -> None:
        while not hot.count(caller, ACTION, blob, b"", epoch=0):
            hot.decide(caller, ACTION, blob)

    return call


def test_a_window_flushed_during_lookup_takes_no_more_calls(
    light_platform: OwnPlatform,
) -> None:
    blob = light_platform.put("b", b"x").id
    caller = light_platform.join("sara", Role.VIEWER)
    hot = light_platform.parts.gate.hot
    hot.admit(caller, ACTION, blob)

    class WrittenWhenFound(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            hot.flush(all_windows=True)
            return found

    hot._windows = WrittenWhenFound(hot._windows)
    too_late = hot.count(caller, ACTION, blob, b"", epoch=0)
    hot._windows = {}
    hot.admit(caller, ACTION, blob)
    hot.flush(all_windows=True)

    assert too_late is False
    assert [e["count"] for e in light_platform.entries() if e["action"] == ACTION] == [1, 1]


@pytest.mark.parametrize("moment", ["flush", "new epoch"])
def test_counts_survive_an_unavailable_database(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    blobs = [light_platform.put(f"b{number}", b"x").id for number in range(3)]
    caller = light_platform.join("sara", Role.VIEWER)
    gate = light_platform.parts.gate
    gate.hot._epoch._max_age_s = 0
    for blob in blobs:
        gate.hot.admit(caller, ACTION, blob)
    if moment == "new epoch":
        light_platform.workspaces.create("w")

    def fail(_: object) -> None:
        raise Unavailable("the metadata database does not answer")

    with monkeypatch.context() as outage:
        outage.setattr(gate.audit, "append_grouped", fail)
        with pytest.raises(Unavailable):
            gate.hot.flush(all_windows=True) if moment == "flush" else gate.hot.admit(
                caller, ACTION, blobs[0]
            )
    gate.hot.flush(all_windows=True)

    assert counted(light_platform) == 3
