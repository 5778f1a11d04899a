"""Failed authentications: refused in every form, and in the audit log by reason and source."""

from __future__ import annotations

import socket
from datetime import timedelta
from urllib.parse import urlsplit

import pytest

from falaj.governance.identity.failures import MAX_SOURCES, WINDOW, FailedAuthentications
from interfaces import ServedPlatform
from platforms import OwnPlatform
from polling import PATIENCE_S

WHO = "/api/v1/users/whoami"
HERE = "remote:127.0.0.1"


def status(served: ServedPlatform, *headers: str, body: bytes = b"") -> int:
    """Return the status of a request with exactly these headers."""
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S) as connection:
        lines = [f"POST {WHO} HTTP/1.1", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode() + body)
        return int(connection.recv(65536).split()[1])


@pytest.mark.slow
def test_a_header_that_decides_may_stand_once_only(served: ServedPlatform) -> None:
    own, other = (f"Authorization: Bearer {token}" for token in (served.admin, served.stranger))
    base = ("Host: x", own, "Content-Length: 0")

    assert status(served, *base) == 200
    assert status(served, *base, other) == 400
    assert status(served, *base, own) == 400
    for more in (
        "Host: y",
        "Content-Length: 0",
        "Transfer-Encoding: chunked",
        "authorization: Basic x",
        "Idempotency-Key: a\r\nIdempotency-Key: b",
        "Content-Type: application/json\r\nContent-Type: text/plain",
    ):
        assert status(served, *base, more) == 400, more


def entries(served: ServedPlatform) -> dict[str, dict[str, object]]:
    """Return the entries of failed authentications by their rules, newest last."""
    found = served.platform.audit.list(action="tokens.authenticate", limit=1000).items
    return {entry.rule: entry.model_dump() for entry in reversed(found)}


@pytest.mark.slow
def test_failures_are_in_the_audit_log_by_reason_and_source(served_on_each: ServedPlatform) -> None:
    served, guess = served_on_each, "fj_tok_of_somebody.very-secret"
    served.parts.failures.flush(whole_window=False)
    for _ in range(3):
        served.http(guess).get(WHO)
    served.as_nobody.get(WHO)
    served.as_nobody.post("/signin", json={"code": "no-such-code"})
    status(served, "Host: x", "Authorization: Bearer a", "Authorization: Bearer b")
    served.parts.failures.flush()
    early = entries(served)

    served.clock.advance(WINDOW)
    served.parts.failures.flush()

    found = entries(served)
    assert not any(entry["until"] == served.clock.now for entry in early.values())
    counts = {rule: entry["count"] for rule, entry in found.items()}
    assert counts == {
        "api: refused_token": 3,
        "api: no_token": 1,
        "api: refused_code": 1,
        "api: two_tokens": 1,
    }
    for entry in found.values():
        assert (entry["origin"], entry["outcome"], entry["caller"]) == (HERE, "denied", "unauthenticated")
        assert entry["until"] == served.clock.now
        assert "secret" not in str(entry)
        assert "no-such-code" not in str(entry)


def test_memory_does_not_grow_with_sources(light_platform: OwnPlatform) -> None:
    failures = FailedAuthentications(light_platform.parts.audit, light_platform.clock)
    for number in range(5000):
        failures.add("no_token", f"remote:10.0.{number // 250}.{number % 250}", interface="api")

    failures.flush(whole_window=False)

    found = [each for each in light_platform.entries() if each["action"] == "tokens.authenticate"]
    assert len(found) == MAX_SOURCES + 1
    assert sum(each["count"] for each in found) == 5000
    assert {each["count"] for each in found if each["origin"] == "remote:other"} == {5000 - MAX_SOURCES}


def test_failures_are_written_down_when_the_platform_closes(light_platform: OwnPlatform) -> None:
    other = light_platform.again()
    other.parts.failures.add("refused_token", HERE, interface="api")

    other.parts.close_audit()

    (found,) = [each for each in light_platform.entries() if each["action"] == "tokens.authenticate"]
    assert (found["count"], found["origin"]) == (1, HERE)


def test_failures_outlive_a_log_that_does_not_answer(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = light_platform.parts.audit
    failures = FailedAuthentications(audit, light_platform.clock, window=timedelta(0))
    for reason in ("no_token", "two_tokens"):
        failures.add(reason, HERE, interface="api")  # type: ignore[arg-type]

    def gone(_draft: object) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(audit, "append_grouped", gone)
        with pytest.raises(OSError):  # noqa: PT011 - whatever the log raises
            failures.flush()
    failures.add("no_token", HERE, interface="api")
    failures.flush()

    found = {each["rule"]: each["count"] for each in light_platform.entries() if "count" in each}
    assert found == {"api: no_token": 2, "api: two_tokens": 1}
