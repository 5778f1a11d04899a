"""A repeated key gets the first result, and a controller that lost its lease is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from falaj.control import lease
from falaj.errors import AlreadyExists, Fenced, KeyReused, NotFound
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.governance.operations.idempotency import forget
from falaj.governance.tables import blobs, events, idempotency, objects, tokens
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

LEASE = timedelta(seconds=5)


def test_a_repeated_key_takes_effect_once_and_gives_the_same_answer(platform: OwnPlatform) -> None:
    answers = [keyed("k", lambda: platform.tokens.issue(purpose="ci")) for _ in range(3)]

    assert answers[0] == answers[1] == answers[2]
    assert platform.count(tokens) == 1
    assert platform.caller_of(answers[2].secret).token == answers[0].token.id


def test_a_kept_answer_is_sealed(platform: OwnPlatform) -> None:
    issued = keyed("k", lambda: platform.tokens.issue(purpose="ci"))

    (row,) = platform.rows(idempotency)
    assert issued.secret.encode() not in bytes(row["result"])
    assert issued.token.id.encode() not in bytes(row["result"])


def test_a_repeated_call_is_recorded_as_such(platform: OwnPlatform) -> None:
    for _ in range(2):
        keyed("k", lambda: platform.workspaces.create("team-a"))

    assert [entry["rule"] for entry in platform.entries()[-2:]] == ["role.admin", "replayed"]
    assert platform.count(events) == 1


def test_a_repeated_upload_stores_one_blob_and_is_recorded(platform: OwnPlatform) -> None:
    answers = [keyed("k", lambda: platform.blobs.upload(iter([b"bytes"]))) for _ in range(2)]

    assert answers[0] == answers[1]
    assert platform.count(blobs) == 1
    assert [entry["rule"] for entry in platform.entries()[-2:]] == ["role.admin", "replayed"]


def test_a_repeated_call_survives_a_new_process(platform: OwnPlatform) -> None:
    first = keyed("k", lambda: platform.tokens.issue(purpose="ci"))

    second = keyed("k", lambda: platform.again().tokens.issue(purpose="ci"))

    assert second == first


def test_one_key_for_two_inputs_is_refused(platform: OwnPlatform) -> None:
    keyed("k", lambda: platform.workspaces.create("team-a"))

    with pytest.raises(KeyReused):
        keyed("k", lambda: platform.workspaces.create("team-b"))
    with pytest.raises(KeyReused):
        keyed("k", lambda: platform.groups.create("team-a"))

    assert "team-b" not in [row["name"] for row in platform.rows(objects)]


def test_keys_of_different_callers_are_apart(platform: OwnPlatform) -> None:
    dana = platform.join("dana", Role.DEVELOPER)
    mine = keyed("k", lambda: platform.tokens.issue(purpose="ci"))

    with acting_as(dana):
        theirs = keyed("k", lambda: platform.tokens.issue(purpose="ci"))

    assert theirs.token.principal == "dana"
    assert theirs.secret != mine.secret


def test_a_failed_call_leaves_its_key_free(platform: OwnPlatform) -> None:
    platform.workspaces.create("team-a")
    with pytest.raises(AlreadyExists):
        keyed("k", lambda: platform.workspaces.create("team-a"))

    assert keyed("k", lambda: platform.workspaces.create("team-b")).name == "team-b"


def test_calls_with_one_key_at_the_same_time_all_get_one_answer(platform: OwnPlatform) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(keyed, "k", lambda: platform.tokens.issue(purpose="ci")) for _ in range(8)]
        secrets = {call.result().secret for call in calls}

    assert len(secrets) == 1
    assert platform.count(tokens) == 1


def test_a_narrower_token_does_not_get_the_answer_of_a_wider_one(platform: OwnPlatform) -> None:
    narrow = platform.caller_of(platform.tokens.issue(purpose="reader", actions=("blobs.read",)).secret)
    wide = keyed("k", lambda: platform.tokens.issue(purpose="ci"))

    with acting_as(narrow), pytest.raises((NotFound, KeyReused)) as refused:
        keyed("k", lambda: platform.tokens.issue(purpose="ci"))

    assert wide.secret not in str(refused.value)


def test_old_keys_are_forgotten(platform: OwnPlatform) -> None:
    keyed("old", lambda: platform.workspaces.create("team-a"))
    platform.clock.advance(timedelta(days=2))
    keyed("new", lambda: platform.workspaces.create("team-b"))

    with platform.database.write() as tx:
        dropped = forget(tx, before=platform.clock() - timedelta(days=1))

    assert dropped == 1
    assert [row["key"] for row in platform.rows(idempotency)] == ["new"]


# --------------------------------------------------------------------------------------------- fencing


def test_a_controller_that_lost_its_lease_changes_nothing(platform: OwnPlatform) -> None:
    old = lease.acquire(platform.database, "first", now=platform.clock(), lasts=LEASE)
    lease.release(platform.database, old or 0, now=platform.clock())
    platform.clock.advance(2 * LEASE)
    new = lease.acquire(platform.database, "second", now=platform.clock(), lasts=LEASE)
    before = platform.count(objects)

    with pytest.raises(Fenced), on_terms(key="k", fence=old):
        platform.workspaces.create("team-a")

    assert (old, new) == (1, 2)
    assert (platform.count(objects), platform.count(idempotency)) == (before, 0)
    assert platform.entries()[-1]["error"] == "lease.lost"


def test_the_holder_of_the_lease_acts(platform: OwnPlatform) -> None:
    fence = lease.acquire(platform.database, "first", now=platform.clock(), lasts=LEASE)

    with on_terms(fence=fence):
        made = platform.workspaces.create("team-a")

    assert made.name == "team-a"


def test_a_held_lease_is_not_taken(platform: OwnPlatform) -> None:
    lease.acquire(platform.database, "first", now=platform.clock(), lasts=LEASE)

    assert lease.acquire(platform.database, "second", now=platform.clock(), lasts=LEASE) is None


def test_one_of_many_gets_a_free_lease(platform: OwnPlatform) -> None:
    def take(number: int) -> int | None:
        return lease.acquire(platform.database, f"c{number}", now=platform.clock(), lasts=LEASE)

    with ThreadPoolExecutor(8) as pool:
        fences = list(pool.map(take, range(8)))

    assert sorted(fence for fence in fences if fence is not None) == [1]


def keyed(key: str, act: Callable[[], Any]) -> Any:
    with on_terms(key=key):
        return act()
