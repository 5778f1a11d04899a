"""A revoked token, a disabled user, a removed grant and a new policy hold at the next request, in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from falaj.assembly.platform import LocalPlatform, assemble
from falaj.records.governance.identity import Role
from interfaces import ServedPlatform

FORBID = 'forbid (principal == User::"{user}", action == Action::"runs.show", resource);'


@pytest.fixture(scope="module")
def other(served_on_each: ServedPlatform) -> Iterator[LocalPlatform]:
    """Another process on the same home: what changes is changed here."""
    platform = assemble(served_on_each.parts.home, config=served_on_each.parts.config, as_owner=True)
    yield platform
    platform.close()


class User:
    """A user of the API with a token that the server knows already."""

    def __init__(self, served: ServedPlatform, other: LocalPlatform, name: str) -> None:
        services = other.services
        self.name = name
        self.id = services.users.create(name).id
        services.workspaces.grant("default", name, role=Role.DEVELOPER)
        self.run = services.runs.start("revoked").id
        issued = services.tokens.issue(user=name, purpose="test")
        self.token = issued.token.id
        self.url = served.url
        self.headers = {"Authorization": f"Bearer {issued.secret}"}
        self.requests: list[Callable[[], int]] = [
            lambda: self.post("runs/show", run=self.run),
            lambda: self.post("runs/set_tags", run=self.run, tags={"a": "b"}),
            lambda: self.post(
                "runs/log_metrics", run=self.run, points=[{"key": "x", "value": 1.0, "step": 1}]
            ),
            lambda: httpx.get(f"{self.url}/api/v1/openapi.json", headers=self.headers).status_code,
        ]

    def post(self, path: str, **given: object) -> int:
        return self.ask(path, given).status_code

    def ask(self, path: str, given: dict[str, object]) -> httpx.Response:
        return httpx.post(f"{self.url}/api/v1/{path}", json=given, headers=self.headers)


@pytest.mark.slow
def test_a_revoked_token_is_refused_at_the_next_request(
    served_on_each: ServedPlatform, other: LocalPlatform
) -> None:
    for number in range(4):
        user = User(served_on_each, other, f"revoked-{number}")
        assert [ask() for ask in user.requests] == [200] * 4

        other.services.tokens.revoke(user.token)

        assert user.requests[number]() == 401


def test_a_disabled_user_is_refused_at_the_next_request(
    served_on_each: ServedPlatform, other: LocalPlatform
) -> None:
    user = User(served_on_each, other, "disabled")
    assert [ask() for ask in user.requests] == [200] * 4

    other.services.users.disable(user.name)

    assert [ask() for ask in user.requests] == [401] * 4


def test_a_removed_grant_holds_at_the_next_request(
    served_on_each: ServedPlatform, other: LocalPlatform
) -> None:
    for number in range(3):
        user = User(served_on_each, other, f"dismissed-{number}")
        assert [ask() for ask in user.requests] == [200] * 4

        other.services.workspaces.revoke("default", user.name, role=Role.DEVELOPER)

        assert user.requests[number]() == 404


@pytest.mark.slow
def test_a_new_policy_holds_at_the_next_request(served_on_each: ServedPlatform, other: LocalPlatform) -> None:
    user = User(served_on_each, other, "forbidden")
    assert user.requests[0]() == 200

    other.services.policies.publish("forbidden", text=FORBID.format(user=user.id))

    assert user.requests[0]() == 403
    other.services.policies.withdraw("forbidden")
    assert user.requests[0]() == 200


def test_a_read_that_cannot_be_recorded_is_not_answered(
    served_on_each: ServedPlatform, other: LocalPlatform
) -> None:
    user = User(served_on_each, other, "unrecorded")
    assert user.requests[0]() == 200
    row = "seq, at, caller, action, outcome, leaf, entry, mac"
    with other.database.write() as tx:
        (size,) = tx.execute_sql("SELECT size FROM governance_audit_state")[0]
        forged = f"INSERT INTO governance_audit_entries ({row}) VALUES (?, 0, '', '', '', ?, '', ?)"
        tx.execute_sql(forged, (size, b"", b""))

    refused = user.ask("runs/show", {"run": user.run})

    with other.database.write() as tx:
        tx.execute_sql("DELETE FROM governance_audit_entries WHERE seq = ?", (size,))
    assert refused.status_code >= 400
    assert user.run not in refused.text
    assert user.requests[0]() == 200
