"""Tokens have 256 random bits that are not stored, a limited scope and lifetime, and end when they are revoked."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from contextlib import suppress
from datetime import timedelta

import pytest

from falaj.errors import Conflict, Denied, InvalidInput, NotFound, Unauthenticated
from falaj.governance.operations.caller import Caller, acting_as, on_terms
from falaj.ports.metadata import METADATA
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

HOUR = timedelta(hours=1)


def scoped(platform: OwnPlatform, **scope) -> Caller:
    """Return the owner, with a token of this scope."""
    return platform.caller_of(platform.tokens.issue(purpose="test", **scope).secret)


# ------------------------------------------------------------------------------------------------ secrets


def test_a_token_has_256_random_bits(platform: OwnPlatform) -> None:
    secrets = [platform.tokens.issue(purpose="ci").secret for _ in range(3)]

    parts = [secret.removeprefix("fj_").split(".") for secret in secrets]
    assert {len(urlsafe_b64decode(text + "=")) for _, text in parts} == {32}
    assert len({text for _, text in parts}) == 3


def test_the_secret_is_nowhere_in_the_database(platform: OwnPlatform) -> None:
    with on_terms(key="once"):
        secret = platform.tokens.issue(purpose="ci").secret
    code = platform.tokens.sign_in_link().code
    texts = [secret.rpartition(".")[2], code]
    words = [text.encode() for text in texts] + [urlsafe_b64decode(text + "=") for text in texts]

    values = [v for table in METADATA.sorted_tables for row in platform.rows(table) for v in row.values()]
    contents = [v if isinstance(v, bytes) else str(v).encode() for v in values]
    files = [path.read_bytes() for path in platform.home.path.rglob("*") if path.is_file()]

    assert not [word for word in words for content in (*contents, *files) if word in content]


def test_a_token_is_recognized_as_its_user(platform: OwnPlatform) -> None:
    dana = platform.join("dana", Role.DEVELOPER)
    issued = platform.tokens.issue(purpose="ci", user="dana", workspace="default", actions=("blobs.*",))

    caller = platform.caller_of(issued.secret)

    workspace = platform.workspaces.show("default").id
    assert caller == Caller(dana.id, "dana", "user", "test", workspace, ("blobs.*",), issued.token.id)


def test_forged_tokens_are_all_refused_with_the_same_message(platform: OwnPlatform) -> None:
    secret = platform.tokens.issue(purpose="ci").secret
    other = platform.tokens.issue(purpose="ci").secret
    revoked = platform.tokens.issue(purpose="ci")
    platform.tokens.revoke(revoked.token.id)
    (ident, text), (_, foreign) = (each.rsplit(".", 1) for each in (secret, other))
    forged = [
        f"{ident}.{foreign}",
        f"{ident[:-1]}{'0' if ident[-1] != '0' else '1'}.{text}",
        secret[:-1],
        secret + "A",
        f"{ident}.",
        ident,
        text,
        secret.removeprefix("fj_"),
        secret.upper(),
        "",
        "fj_",
        "fj_.",
        "fj_\N{SNOWMAN}.\N{SNOWMAN}",
        revoked.secret,
    ]

    words = set()
    for credential in forged:
        with pytest.raises(Unauthenticated) as refused:
            platform.caller_of(credential)
        words.add(str(refused.value))

    assert len(words) == 1


# ---------------------------------------------------------------------------------------- time, revocation


def test_a_token_expires_by_the_clock(platform: OwnPlatform) -> None:
    secret = platform.tokens.issue(purpose="ci", expires_in=HOUR).secret

    platform.clock.advance(HOUR - timedelta(microseconds=1))
    before = platform.caller_of(secret)
    platform.clock.advance(timedelta(microseconds=1))

    assert before.token
    with pytest.raises(Unauthenticated):
        platform.caller_of(secret)


@pytest.mark.parametrize("lifetime", [timedelta(0), -HOUR, timedelta(days=367)])
def test_no_token_lives_forever_or_not_at_all(light_platform: OwnPlatform, lifetime: timedelta) -> None:
    with pytest.raises(InvalidInput):
        light_platform.tokens.issue(purpose="ci", expires_in=lifetime)


def test_a_revoked_token_is_refused_at_once_in_every_process(platform: OwnPlatform) -> None:
    issued = platform.tokens.issue(purpose="ci")
    other = platform.again()
    before = other.caller_of(issued.secret)

    platform.tokens.revoke(issued.token.id)

    assert before.token == issued.token.id
    with pytest.raises(Unauthenticated):
        other.caller_of(issued.secret)
    with pytest.raises(Conflict):
        platform.tokens.revoke(issued.token.id)


def test_a_stream_ends_when_its_token_is_revoked(light_platform: OwnPlatform) -> None:
    light_platform.parts.gate._recheck_s = 0.0
    light_platform.put("large", bytes(5 << 20))
    issued = light_platform.tokens.issue(purpose="ci")
    with acting_as(light_platform.caller_of(issued.secret)):
        stream = light_platform.blobs.read("large")
        next(stream)

    light_platform.tokens.revoke(issued.token.id)

    with pytest.raises((Denied, Unauthenticated)):
        list(stream)


def test_tokens_are_revoked_by_their_owner_or_an_administrator_only(light_platform: OwnPlatform) -> None:
    dana, eve = light_platform.join("dana", Role.ADMIN), light_platform.join("eve", Role.ADMIN)
    with acting_as(dana):
        first, second = (light_platform.tokens.issue(purpose="ci").token for _ in range(2))
        light_platform.tokens.revoke(first.id)

    with acting_as(eve):
        with pytest.raises(NotFound):
            light_platform.tokens.revoke(second.id)
        assert light_platform.tokens.list().items == ()
        with pytest.raises(Denied):
            light_platform.tokens.issue(purpose="ci", user="dana")
    assert light_platform.tokens.revoke(second.id).revoked_at == light_platform.clock()


# ------------------------------------------------------------------------------------------------- scope


def test_a_token_reaches_its_workspace_only(platform: OwnPlatform) -> None:
    platform.workspaces.create("other")
    platform.put("data", b"ours")
    platform.put("data", b"theirs", workspace="other")

    with acting_as(scoped(platform, workspace="other")):
        assert platform.get("data") == b"theirs"
        with pytest.raises(NotFound):
            platform.get("default/data")


def test_a_token_reaches_its_actions_only(light_platform: OwnPlatform) -> None:
    light_platform.put("data", b"bytes")

    with acting_as(scoped(light_platform, actions=("blobs.read", "zones.*"))):
        assert light_platform.get("data") == b"bytes"
        assert light_platform.zones.list()
        with pytest.raises((Denied, NotFound)):
            light_platform.blobs.delete("data")
        with pytest.raises((Denied, NotFound)):
            light_platform.users.whoami()


def test_a_token_for_blobs_can_list_and_derive_them(light_platform: OwnPlatform) -> None:
    light_platform.put("data", b"bytes")

    with acting_as(scoped(light_platform, actions=("blobs.*",))):
        seen = [blob.name for blob in light_platform.blobs.list().items]
        derived = light_platform.blobs.upload(iter([b"x"]), sources=("blob:data",))

    assert (seen, derived.committed) == (["data"], False)


@pytest.mark.slow
def test_a_token_of_a_workspace_changes_nothing_at_the_platform(light_platform: OwnPlatform) -> None:
    light_platform.users.create("eve")
    attempts = {
        "workspace": lambda: light_platform.workspaces.create("mine"),
        "user": lambda: light_platform.users.create("mallory"),
        "grant": lambda: light_platform.workspaces.grant("platform", "eve", role=Role.ADMIN),
        "policy": lambda: light_platform.policies.publish(
            "open", text="permit (principal, action, resource);", workspace="platform"
        ),
        "rotate": lambda: light_platform.keys.rotate(),
        "export": lambda: light_platform.audit.export(),
    }

    done = []
    with acting_as(scoped(light_platform, workspace="default")):
        for name, attempt in attempts.items():
            with suppress(Denied, NotFound):
                attempt()
                done.append(name)

    assert done == []


@pytest.mark.parametrize("actions", [("*",), ("blobs.*",), ("blobs.delete",), ("tokens.*",)])
def test_a_token_does_not_issue_one_of_more_actions(
    light_platform: OwnPlatform, actions: tuple[str, ...]
) -> None:
    with acting_as(scoped(light_platform, actions=("tokens.issue", "blobs.read"))), pytest.raises(Denied):
        light_platform.tokens.issue(purpose="more", actions=actions)


def test_a_token_does_not_issue_one_for_another_workspace(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("other")

    with acting_as(scoped(light_platform, workspace="other")), pytest.raises((Denied, NotFound)):
        light_platform.tokens.issue(purpose="more", workspace="default")


def test_a_token_issued_by_a_token_inherits_its_scope(light_platform: OwnPlatform) -> None:
    parent = scoped(light_platform, workspace="default", actions=("tokens.issue", "blobs.read"))

    with acting_as(parent):
        child = light_platform.caller_of(light_platform.tokens.issue(purpose="child").secret)
        narrower = light_platform.caller_of(
            light_platform.tokens.issue(purpose="c", actions=("blobs.read",)).secret
        )

    assert (child.workspace, child.actions) == (parent.workspace, parent.actions)
    assert (narrower.workspace, narrower.actions) == (parent.workspace, ("blobs.read",))


def test_a_limited_token_does_not_issue_one_that_outlives_it(light_platform: OwnPlatform) -> None:
    limited = scoped(light_platform, actions=("tokens.issue", "blobs.read"), expires_in=HOUR)

    with acting_as(limited), suppress(Denied):
        light_platform.tokens.issue(purpose="more", expires_in=timedelta(days=300))

    assert (
        max(token.expires_at for token in light_platform.tokens.list().items) <= light_platform.clock() + HOUR
    )
