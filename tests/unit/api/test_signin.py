"""Signing in by link: the code works once, for five minutes, and the page leaks nothing."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest

from falaj.errors import Unauthenticated
from falaj.governance.tables import sign_in_codes
from falaj.sdk.remote import redeem
from interfaces import ServedPlatform


def test_a_code_signs_its_user_in(served_on_each: ServedPlatform) -> None:
    code = served_on_each.platform.tokens.sign_in_link(user="dana").code

    answer = served_on_each.as_nobody.post("/signin", json={"code": code})

    issued = answer.json()
    assert answer.status_code == 200
    assert issued["token"]["principal"] == "dana"
    assert served_on_each.connect(issued["secret"]).users.whoami().principal.name == "dana"


def test_a_code_works_once(served_on_each: ServedPlatform) -> None:
    code = served_on_each.platform.tokens.sign_in_link().code
    redeem(served_on_each.url, code)

    with pytest.raises(Unauthenticated, match="was used or has expired"):
        redeem(served_on_each.url, code)


def test_a_code_expires(served_on_each: ServedPlatform) -> None:
    code = served_on_each.platform.tokens.sign_in_link().code
    served_on_each.clock.advance(timedelta(minutes=5, seconds=1))

    with pytest.raises(Unauthenticated, match="was used or has expired"):
        redeem(served_on_each.url, code)


def test_a_token_from_a_link_lasts_for_half_a_day(served: ServedPlatform) -> None:
    token = redeem(served.url, served.platform.tokens.sign_in_link(user="sam").code)
    assert served.http(token).get("/api/v1/users/whoami").status_code == 200

    served.clock.advance(timedelta(hours=12, seconds=1))

    assert served.http(token).get("/api/v1/users/whoami").status_code == 401


def test_a_code_is_kept_as_a_hash(served: ServedPlatform) -> None:
    code = served.platform.tokens.sign_in_link().code

    with served.parts.database.read() as tx:
        rows = tx.execute(sign_in_codes.select()).all()

    assert code not in str(rows)
    assert all(len(row.code_hash) == 32 for row in rows)


def test_signing_in_is_audited(served: ServedPlatform) -> None:
    code = served.connect(served.developer).tokens.sign_in_link().code
    headers = {"X-Request-ID": "req-signin"}

    served.as_nobody.post("/signin", json={"code": code}, headers=headers)

    newest = served.platform.audit.list(workspace="platform", action="tokens.issue", limit=1).items[0]
    assert (newest.caller, newest.outcome, newest.request) == ("dana", "done", "req-signin")


JUNK = [
    *(b"", b"{}", b"[]", b"null", b'"code"', b"5", b'{"code": null}', b'{"code": 5}', b'{"code": ["x"]}'),
    *(b"\xff\xfe", rb'{"code": "\ud800"}', b'{"code":' + b"[" * 4000, b'{"code": NaN}', b"code=x"),
]


@pytest.mark.parametrize("body", JUNK, ids=lambda body: repr(body[:20]))
def test_junk_is_refused(served: ServedPlatform, body: bytes) -> None:
    answer = served.as_nobody.post("/signin", content=body)

    assert answer.status_code == 422
    assert answer.json()["faults"][0]["where"] == "body"


@pytest.mark.parametrize("code", ["", "x", "\x00", "é😀", "'; --", "x" * 4000, "fj_x.y"])
def test_an_invalid_code_is_refused(served_on_each: ServedPlatform, code: str) -> None:
    answer = served_on_each.as_nobody.post("/signin", content=json.dumps({"code": code}))

    assert answer.status_code == 401
    assert "x" * 100 not in answer.text


def test_tokens_and_codes_are_not_interchangeable(served: ServedPlatform) -> None:
    code = served.platform.tokens.sign_in_link().code

    assert served.as_nobody.post("/signin", json={"code": served.admin}).status_code == 401
    assert served.http(code).get("/api/v1/users/whoami").status_code == 401


def test_only_a_post_signs_in(served: ServedPlatform) -> None:
    code = served.platform.tokens.sign_in_link().code

    assert served.as_nobody.get("/signin", params={"code": code}).status_code == 405
    assert redeem(served.url, code)


def test_the_page_loads_nothing_from_elsewhere(served: ServedPlatform) -> None:
    page, script = served.as_nobody.get("/"), served.as_nobody.get("/signin.js")

    assert page.headers["content-type"].startswith("text/html")
    assert "javascript" in script.headers["content-type"]
    assert re.findall(r'(?:src|href|action)="([^"]*)"', page.text) == ["/signin.js"]
    assert "<script>" not in page.text  # the content security policy forbids inline scripts
    assert "http" not in script.text
    assert "innerHTML" not in script.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "no-referrer"
