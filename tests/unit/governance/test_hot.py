"""Hot doors: decided from memory, recorded by window, and still felt when the rules change."""

from __future__ import annotations

from datetime import timedelta

import pytest

from falaj.errors import NotFound
from falaj.governance.hot import WINDOW
from falaj.records.identity import Role
from platforms import OwnPlatform

ACTION = "blob.read"


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


def test_a_role_that_is_taken_away_is_felt(platform: OwnPlatform) -> None:
    blob = platform.put("b", b"x").id
    caller = platform.join("sara", Role.VIEWER)
    hot = platform.parts.gate.hot
    hot._epoch._max_age_s = 0
    hot.admit(caller, ACTION, blob)

    platform.workspace.revoke("default", "sara", role=Role.VIEWER)

    with pytest.raises(NotFound):
        hot.admit(caller, ACTION, blob)
    assert platform.entries()[-1]["outcome"] == "denied"


def test_an_unknown_object_is_not_found(platform: OwnPlatform) -> None:
    caller = platform.join("sara", Role.VIEWER)

    with pytest.raises(NotFound):
        platform.parts.gate.hot.admit(caller, ACTION, "blob_" + "0" * 26)


def test_windows_are_written_down_when_the_platform_closes(platform: OwnPlatform) -> None:
    blob = platform.put("b", b"x").id
    caller = platform.join("sara", Role.VIEWER)
    second = platform.again()
    second.parts.gate.hot.admit(caller, ACTION, blob)

    second.parts.close_books()

    assert platform.entries()[-1]["action"] == ACTION
    platform.clock.advance(timedelta(seconds=1))
