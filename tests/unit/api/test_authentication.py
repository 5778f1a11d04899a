"""Every path but health and the sign-in page needs a token, and a revoked token stops working."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import httpx
import pytest

from falaj.assembly.platform import assemble, local_user
from falaj.errors import Denied, Interrupted, NotFound, Unauthenticated
from falaj.records.governance.identity import Role
from interfaces import ServedPlatform
from polling import eventually

OPEN_TO_ALL = {"/healthz", "/readyz", "/", "/signin.js", "/signin"}


@pytest.fixture(scope="module")
def invalid_tokens(served: ServedPlatform) -> dict[str, str]:
    """Return invalid credentials, by what is wrong with them."""
    tokens = served.platform.tokens
    expired = tokens.issue(purpose="expires", expires_in=timedelta(seconds=1))
    served.clock.advance(timedelta(seconds=2))
    revoked = tokens.issue(purpose="revoked")
    tokens.revoke(revoked.token.id)
    served.platform.users.create("gone")
    gone = tokens.issue(purpose="of a disabled user", user="gone")
    served.platform.users.disable("gone")
    ident, _, secret = served.admin.rpartition(".")
    return {
        "expired": f"Bearer {expired.secret}",
        "revoked": f"Bearer {revoked.secret}",
        "disabled": f"Bearer {gone.secret}",
        "unknown id": f"Bearer fj_token_00000000000000000000000000.{secret}",
        "forged secret": f"Bearer {ident}.{secret[::-1]}",
        "no secret": f"Bearer {ident}.",
        "no prefix": f"Bearer {served.admin.removeprefix('fj_')}",
        "another scheme": f"Basic {served.admin}",
        "no scheme": served.admin,
        "nothing": "Bearer",
        "latin-1": "Bearer fj_é.ü",
        "long": "Bearer fj_" + "x" * 20_000,
    }


def methods_and_paths(served: ServedPlatform) -> Iterator[tuple[str, str]]:
    for route in served.app.routes:
        for method in sorted(route.methods):
            if route.path not in OPEN_TO_ALL:
                yield method, route.path


def stated(answer: httpx.Response) -> str:
    """Return what an error says; MLflow's clients read it from another field."""
    document = answer.json()
    return str(document["detail"] if "detail" in document else document["message"])


@pytest.mark.slow
def test_every_path_takes_a_token(served: ServedPlatform, invalid_tokens: dict[str, str]) -> None:
    for method, path in methods_and_paths(served):
        bare = served.as_nobody.request(method, path)
        forged = served.as_nobody.request(
            method, path, headers={"Authorization": invalid_tokens["forged secret"]}
        )

        for answer in (bare, forged):
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json().keys() & {"code", "error_code"}, (method, path)
                assert answer.json().get("code", "caller.unknown") == "caller.unknown"
                assert answer.json().get("error_code", "UNAUTHENTICATED") == "UNAUTHENTICATED"


@pytest.mark.parametrize("what", ["expired", "revoked", "disabled", "unknown id", "no secret", "no prefix"])
def test_an_invalid_token_is_refused_everywhere_with_the_same_message(
    served: ServedPlatform, invalid_tokens: dict[str, str], what: str
) -> None:
    answers = [
        served.as_nobody.request(method, path, headers={"Authorization": invalid_tokens[what]})
        for method, path in methods_and_paths(served)
        if method != "HEAD"
    ]

    assert {answer.status_code for answer in answers} == {401}
    assert {stated(answer).partition(";")[0] for answer in answers} == {
        "the token is unknown, expired or revoked"
    }


@pytest.mark.parametrize("what", ["another scheme", "no scheme", "nothing", "latin-1", "long"])
def test_a_malformed_token_is_refused(
    served: ServedPlatform, invalid_tokens: dict[str, str], what: str
) -> None:
    headers = {"Authorization": invalid_tokens[what].encode("latin-1")}

    answer = served.as_nobody.get("/api/v1/users/whoami", headers=headers)

    assert answer.status_code == 401


def test_unauthenticated_callers_see_health_only(served: ServedPlatform) -> None:
    nobody = served.as_nobody

    assert nobody.get("/healthz").json() == {"alive": True}
    assert nobody.get("/readyz").json() == {"ready": False}  # no controller runs here
    assert nobody.get("/readyz").status_code == 503


def test_input_is_not_validated_before_authentication(served: ServedPlatform) -> None:
    answer = served.as_nobody.post("/api/v1/workspaces/create", content=b"not json" * 1_000_000)

    assert answer.status_code == 401


def test_a_scoped_token_reaches_no_further_than_its_scope(served: ServedPlatform) -> None:
    narrow = served.http(served.issue(workspace="risk", actions=("blobs.*", "users.whoami")))

    assert narrow.get("/api/v1/users/whoami").json()["workspace"] == "risk"
    assert narrow.get("/api/v1/blobs/list").status_code == 200
    assert narrow.get("/api/v1/blobs/list?workspace=default").status_code == 404
    assert narrow.post("/api/v1/workspaces/create", json={"name": "further"}).status_code == 403


def test_a_scoped_token_cannot_sign_in_to_more_than_its_scope(served: ServedPlatform) -> None:
    narrow = served.connect(served.issue(workspace="risk", actions=("tokens.sign_in_link", "users.whoami")))

    with pytest.raises(Denied, match="this token is limited"):
        narrow.tokens.sign_in_link()


# ------------------------------------------------------------------------------------------- revocation


def refused(client: httpx.Client) -> bool:
    return client.get("/api/v1/users/whoami").status_code == 401


@pytest.mark.slow
def test_a_revoked_token_is_refused(served_on_each: ServedPlatform) -> None:
    tokens = served_on_each.platform.tokens
    issued = tokens.issue(purpose="to be revoked")
    client = served_on_each.http(issued.secret)
    assert client.get("/api/v1/users/whoami").status_code == 200  # so that it is cached

    tokens.revoke(issued.token.id)

    eventually(lambda: refused(client))


@pytest.mark.slow
def test_a_token_revoked_by_another_process_is_refused(
    served_on_each: ServedPlatform,
) -> None:
    issued = served_on_each.platform.tokens.issue(purpose="to be revoked elsewhere")
    client = served_on_each.http(issued.secret)
    assert client.get("/api/v1/users/whoami").status_code == 200
    parts = served_on_each.parts
    elsewhere = assemble(parts.home, config=parts.config, as_owner=True)

    elsewhere.services.tokens.revoke(issued.token.id)

    eventually(lambda: refused(client))
    elsewhere.close()


def test_a_disabled_user_is_refused_until_enabled_again(
    served_on_each: ServedPlatform,
) -> None:
    users = served_on_each.platform.users
    client = served_on_each.http(served_on_each.developer)
    assert client.get("/api/v1/users/whoami").status_code == 200

    users.disable("dana")
    eventually(lambda: refused(client))
    users.enable("dana")

    eventually(lambda: not refused(client))


def test_a_revoked_role_takes_effect_at_once(served_on_each: ServedPlatform) -> None:
    platform = served_on_each.platform
    platform.users.create("vera")
    platform.workspaces.grant("risk", "vera", role=Role.VIEWER)
    vera = served_on_each.connect(served_on_each.issue(user="vera"))
    assert vera.workspaces.show("risk").name == "risk"

    platform.workspaces.revoke("risk", "vera", role=Role.VIEWER)

    with pytest.raises(NotFound):
        vera.workspaces.show("risk")


def test_a_stream_ends_when_its_token_is_revoked(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.parts.gate, "_recheck_s", 0.0)
    served.platform.put("long", bytes(30_000_000))
    issued = served.platform.tokens.issue(purpose="reads")
    stream = served.connect(issued.secret).blobs.read("long")
    next(stream)
    served.platform.tokens.revoke(issued.token.id)
    client = served.http(issued.secret)
    eventually(lambda: refused(client))

    with pytest.raises((Unauthenticated, Interrupted)):
        list(stream)


# -------------------------------------------------------------------------- several callers on one connection


@pytest.mark.parametrize("pipelined", [True, False])
def test_each_request_on_a_connection_runs_as_its_own_caller(served: ServedPlatform, pipelined: bool) -> None:
    """Also after an upload, whose body is read while its operation runs as another caller."""
    requests = [
        request("POST", "/api/v1/blobs/upload?workspace=risk", served.developer, bytes(2_000_000)),
        request("GET", "/api/v1/users/whoami", served.stranger),
        request("GET", "/api/v1/users/whoami", None),
        request("GET", "/api/v1/users/whoami", served.admin),
        request("GET", "/api/v1/users/whoami", served.developer),
    ]

    with socket.create_connection((urlsplit(served.url).hostname, urlsplit(served.url).port)) as connection:
        if pipelined:
            connection.sendall(b"".join(requests))
            answers = [answer(connection) for _ in requests]
        else:
            answers = [(connection.sendall(each), answer(connection))[1] for each in requests]

    assert [status for status, _ in answers] == [200, 200, 401, 200, 200]
    assert '"name":"sam"' in answers[1][1]
    assert f'"name":"{local_user()}"' in answers[3][1]
    assert '"name":"dana"' in answers[4][1]


def request(method: str, path: str, token: str | None, body: bytes = b"") -> bytes:
    """Return a request as bytes; a body is sent in chunks."""
    lines = [f"{method} {path} HTTP/1.1", "Host: falaj"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += ["Transfer-Encoding: chunked"] if body else []
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b""
    return "\r\n".join([*lines, "", ""]).encode() + chunks


def answer(connection: socket.socket) -> tuple[int, str]:
    """Return the status and body of the next response."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    size = int(re.search(rb"content-length: (\d+)", head)[1])
    body = b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return int(head.split()[1]), body.decode()
