"""Sign-in codes work once, for five minutes, and give no more than the permissions of their creator."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from falaj.errors import Denied, NotFound, Unauthenticated
from falaj.governance.identity.tokens import redeem_link
from falaj.governance.operations.caller import Caller, acting_as
from falaj.governance.tables import sign_in_codes
from platforms import OwnPlatform


def sign_in(platform: OwnPlatform, code: str) -> Caller:
    with platform.database.write() as tx:
        digest = platform.parts.audit.digest
        return redeem_link(tx, code, now=platform.clock(), origin="test", digest=digest)


def test_a_sign_in_code_works_once(platform: OwnPlatform) -> None:
    link = platform.tokens.sign_in_link()

    caller = sign_in(platform, link.code)

    assert caller.name == platform.users.whoami().principal.name
    with pytest.raises(Unauthenticated):
        sign_in(platform, link.code)


def test_a_sign_in_code_works_for_five_minutes(platform: OwnPlatform) -> None:
    early, late = platform.tokens.sign_in_link(), platform.tokens.sign_in_link()

    platform.clock.advance(timedelta(minutes=5))
    in_time = sign_in(platform, early.code)
    platform.clock.advance(timedelta(microseconds=1))

    assert in_time.kind == "user"
    with pytest.raises(Unauthenticated):
        sign_in(platform, late.code)


def test_a_sign_in_code_is_stored_as_a_hash(light_platform: OwnPlatform) -> None:
    link = light_platform.tokens.sign_in_link()

    (row,) = light_platform.rows(sign_in_codes)
    assert link.code not in str(row)
    for code in (link.code[:-1], link.code + "A", "", bytes(row["code_hash"]).hex()):
        with pytest.raises(Unauthenticated):
            sign_in(light_platform, code)


@pytest.mark.parametrize("code", ["AAAA", "A", "é", "A" * 64])
def test_who_can_write_to_the_database_makes_no_code(light_platform: OwnPlatform, code: str) -> None:
    me = light_platform.users.whoami().principal.id
    row = {"code_hash": hashlib.sha256(code.encode()).digest(), "principal": me}
    with light_platform.database.write() as tx:
        tx.execute(
            sign_in_codes.insert(),
            {**row, "expires_at": light_platform.clock() + timedelta(1), "vouched_by": []},
        )

    with pytest.raises(Unauthenticated):
        sign_in(light_platform, code)


@pytest.mark.parametrize("column", ["principal", "expires_at", "vouched_by"])
def test_a_code_that_was_made_over_is_refused(light_platform: OwnPlatform, column: str) -> None:
    """Who may sign in as themselves does not sign in as another, or later, by a change in the database."""
    me = light_platform.users.whoami().principal.id
    light_platform.users.create("dana")
    code = light_platform.tokens.sign_in_link(user="dana").code
    other = {"principal": me, "expires_at": light_platform.clock() + timedelta(1), "vouched_by": []}
    with light_platform.database.write() as tx:
        tx.execute(sign_in_codes.update().values(**{column: other[column]}))

    with pytest.raises(Unauthenticated):
        sign_in(light_platform, code)


def test_a_code_used_concurrently_works_once(platform: OwnPlatform) -> None:
    code = platform.tokens.sign_in_link().code

    def attempt(_: int) -> bool:
        try:
            return bool(sign_in(platform, code))
        except Unauthenticated:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(attempt, range(8))) == [False] * 7 + [True]


def test_a_disabled_user_does_not_sign_in_with_an_earlier_code(light_platform: OwnPlatform) -> None:
    light_platform.users.create("dana")
    code = light_platform.tokens.sign_in_link(user="dana").code
    light_platform.users.disable("dana")

    with pytest.raises(Unauthenticated):
        sign_in(light_platform, code)


@pytest.mark.parametrize("scope", [{"workspace": "default"}, {"actions": ("tokens.*",)}])
def test_a_limited_token_does_not_become_an_unlimited_sign_in(
    light_platform: OwnPlatform, scope: dict[str, Any]
) -> None:
    limited = light_platform.caller_of(light_platform.tokens.issue(purpose="test", **scope).secret)

    with acting_as(limited), suppress(Denied, NotFound):
        caller = sign_in(light_platform, light_platform.tokens.sign_in_link().code)
        assert (caller.workspace, caller.actions) != (None, None)
