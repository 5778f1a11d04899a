"""Wrong, broken or oversized input is refused with the field's name, and is never an internal error."""

from __future__ import annotations

import json
import resource
from typing import Any

import httpx
import pytest

from falaj.control.services import all_operations
from interfaces import ServedPlatform

CREATE = "/api/v1/workspaces/create"
LIST = "/api/v1/workspaces/list"
LIMIT = 2**20

WRONG = {
    # wrong input: (path, body, the field of the fault)
    "no JSON": (CREATE, b"name=risk", "body"),
    "half a JSON": (CREATE, b'{"name": "ri', "body"),
    "two JSONs": (CREATE, b'{"name": "a"} {"name": "b"}', "body"),
    "a list": (CREATE, b"[]", "body"),
    "null": (CREATE, b"null", "body"),
    "a number": (CREATE, b"5", "body"),
    "nothing": (CREATE, b"", "name"),
    "invalid UTF-8": (CREATE, b'{"name": "\xff\xfe"}', "body"),
    "UTF-16": (CREATE, '{"name": "a"}'.encode("utf-16"), "body"),
    "a byte order mark": (CREATE, b'\xef\xbb\xbf{"name": "a"}', "body"),
    "deep lists": (CREATE, b'{"name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    "deep objects": (CREATE, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "body"),
    "a lone surrogate": (CREATE, rb'{"name": "\ud800"}', "body"),
    "a reversed pair": (LIST, rb'{"after": "\udc00\ud800"}', "body"),
    "NUL in a name": (CREATE, rb'{"name": "a\u0000b"}', "name"),
    "dots": (CREATE, b'{"name": ".."}', "name"),
    "dots inside": (CREATE, b'{"name": "a..b"}', "name"),
    "a slash": (CREATE, b'{"name": "a/b"}', "name"),
    "a newline": (CREATE, rb'{"name": "a\n"}', "name"),
    "upper case": (CREATE, b'{"name": "Risk"}', "name"),
    "another script": (CREATE, '{"name": "مخاطر"}'.encode(), "name"),
    "a long name": (CREATE, b'{"name": "%s"}' % (b"a" * 129), "name"),
    "a megabyte of name": (CREATE, b'{"name": "%s"}' % (b"a" * 1_000_000), "name"),
    "a number for text": (CREATE, b'{"name": 5}', "name"),
    "text for a number": (LIST, b'{"limit": "5"}', "limit"),
    "true for a number": (LIST, b'{"limit": true}', "limit"),
    "half a number": (LIST, b'{"limit": 5.5}', "limit"),
    "NaN": (LIST, b'{"limit": NaN}', "limit"),
    "infinity": (LIST, b'{"limit": 1e400}', "limit"),
    "a huge number": (LIST, b'{"limit": %s}' % (b"9" * 4000), "limit"),
    "a number below": (LIST, b'{"limit": 0}', "limit"),
    "an unknown field": (LIST, b'{"limit": 5, "offset": 3}', "offset"),
    "a field twice": (CREATE, b'{"name": "../x", "name": "../y"}', "name"),
    "an upload's body as a field": ("/api/v1/blobs/upload?data=x", b"", "query data"),
    "a strange role": ("/api/v1/workspaces/grant", b'{"workspace":"a","subject":"b","role":"god"}', "role"),
    "a strange zone": ("/api/v1/blobs/upload?zone=../x", b"bytes", "zone"),
    "a zone that is not there": ("/api/v1/blobs/upload?zone=moon", b"bytes", "zone"),
    "a strange jurisdiction": ("/api/v1/blobs/upload?only=AE&only=ae", b"bytes", "only.1"),
    "NaN seconds": ("/api/v1/tokens/issue", b'{"purpose": "x", "expires_in": NaN}', "expires_in"),
    "no time at all": ("/api/v1/tokens/issue", b'{"purpose": "x", "expires_in": "PT0S"}', "expires_in"),
    "a control character": ("/api/v1/tokens/issue", rb'{"purpose": "a\u001b[31m"}', "purpose"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_refused_by_its_field(served: ServedPlatform, what: str) -> None:
    path, body, field = WRONG[what]

    answer = served.as_admin.post(path, content=body)

    assert answer.status_code == 422, answer.text
    assert field in [fault["where"] for fault in answer.json()["faults"]]
    assert len(answer.content) < 2000


def test_all_faults_are_reported_at_once(served: ServedPlatform) -> None:
    body = {"workspace": "../a", "subject": 7, "role": "god", "more": True}

    faults = served.as_admin.post("/api/v1/workspaces/grant", json=body).json()["faults"]

    assert {fault["where"] for fault in faults} == {"workspace", "subject", "role", "more"}
    assert all(fault["allowed"] and fault["given"] for fault in faults)
    assert next(fault["fix"] for fault in faults if fault["where"] == "more") == "remove this field"


def test_thousands_of_faults_are_not_all_listed(served: ServedPlatform) -> None:
    body = {f"field_{n}": n for n in range(5000)}

    answer = served.as_admin.post(LIST, json=body)

    assert answer.status_code == 422
    assert len(answer.json()["faults"]) == 50


def test_a_megabyte_of_faults_takes_little_memory(served: ServedPlatform) -> None:
    before = peak_bytes()

    for path, field, item in [("features/read", "keys", b"1,"), ("features/apply", "views", b"{},")]:
        body = b'{"%s": [%s 1]}' % (field.encode(), item * (LIMIT // len(item) - 20))
        answer = served.http(served.stranger).post(f"/api/v1/{path}", content=body)

        assert answer.status_code == 422
        assert len(answer.json()["faults"]) < 10
    assert peak_bytes() - before < 64 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ";"]
)
def test_another_content_type_is_refused(served: ServedPlatform, kind: str) -> None:
    answer = served.as_admin.post(CREATE, content=b'{"name": "x"}', headers={"Content-Type": kind})

    assert answer.status_code == 422
    assert answer.json()["faults"][0]["where"] == "Content-Type"


def test_a_content_type_may_have_parameters_and_capitals(served: ServedPlatform) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}

    assert served.as_admin.post(LIST, content=b'{"limit": 1}', headers=headers).status_code == 200


def test_a_fault_shows_only_the_beginning_of_what_was_given(served: ServedPlatform) -> None:
    answer = served.as_admin.post(CREATE, json={"name": "A" * 500_000})

    assert len(answer.json()["faults"][0]["given"]) < 200


# -------------------------------------------------------------------------------- text that databases refuse


TEXTS = ["\x00", "a\x00b", "😀", "'; DROP TABLE objects; --", "%", "\\", "\u2028", "\ufeff", "٣", "x" * 200]
FREE_TEXT = [
    (LIST, "after"),
    ("/api/v1/tokens/list", "after"),
    ("/api/v1/audit/list", "caller"),
    ("/api/v1/audit/list", "action"),
    ("/api/v1/policies/check", "text"),
]


DEEP = {
    "brackets": "(" * 5_000 + "true" + ")" * 5_000,
    "sets": "[" * 5_000 + "1" + "]" * 5_000,
    "records": "{a:" * 5_000 + "1" + "}" * 5_000,
    "nots": "!(" * 5_000 + "true" + ")" * 5_000,
    "conditions": "if true then true else " * 5_000 + "true",
    "a chain": "true" + " && true" * 20_000,
}


@pytest.mark.parametrize("what", DEEP)
def test_a_deep_policy_of_any_caller_is_refused_and_the_server_lives(
    served: ServedPlatform, what: str
) -> None:
    text = f"permit (principal, action, resource) when {{ {DEEP[what]} }};"

    answer = served.http(served.stranger).post("/api/v1/policies/check", json={"text": text})

    assert (answer.status_code, answer.json()["code"]) == (422, "policy.invalid")
    assert served.as_admin.post(LIST, json={}).status_code == 200


@pytest.mark.parametrize(("path", "field"), FREE_TEXT)
def test_free_text_is_accepted_or_refused_but_breaks_nothing(
    served_on_each: ServedPlatform, path: str, field: str
) -> None:
    for text in TEXTS:
        by_post = served_on_each.as_admin.post(path, json={field: text})
        by_get = served_on_each.as_admin.get(path, params={field: text})

        assert by_post.status_code in (200, 422), (text, by_post.text)
        assert by_get.status_code == by_post.status_code, text


@pytest.mark.parametrize("age", ["P3000000D", "P999999999D"])
def test_a_huge_duration_is_accepted_or_refused(served: ServedPlatform, age: str) -> None:
    answer = served.as_admin.post("/api/v1/blobs/cleanup", json={"older_than": age})

    assert answer.status_code in (200, 422)


@pytest.mark.parametrize(
    "query", ["after=%ff%fe", "after=%00", "after=%ed%a0%80", "limit=%35", "&&=&", "after"]
)
def test_an_odd_query_is_accepted_or_refused(served: ServedPlatform, query: str) -> None:
    assert served.as_admin.get(f"{LIST}?{query}").status_code in (200, 422)


# ------------------------------------------------------------------------------------------------- sizes


def test_a_body_declared_too_large_is_refused_unread(served: ServedPlatform) -> None:
    answer = served.as_admin.post(CREATE, content=b'{"name": "%s"}' % (b"a" * 10_000_000))

    assert answer.status_code == 413
    assert answer.json()["code"] == "input.too_large"
    assert answer.json()["faults"][0]["fix"] == "use blobs.upload"


def test_a_body_in_chunks_is_refused_when_it_gets_too_large(served: ServedPlatform) -> None:
    answer = served.as_admin.post(CREATE, content=(b" " * 65536 for _ in range(64)))

    assert answer.status_code == 413


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 422), (LIMIT + 1, 413)])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_the_limit_is_exact(served: ServedPlatform, size: int, status: int, in_chunks: bool) -> None:
    body = b'{"name": "%s"}' % (b"a" * (size - 12))
    assert len(body) == size

    answer = served.as_admin.post(CREATE, content=iter([body]) if in_chunks else body)

    assert answer.status_code == status


def test_the_configured_limit_also_holds_for_unauthenticated_callers(served: ServedPlatform) -> None:
    answer = served.as_nobody.post("/signin", json={"code": "a" * LIMIT})

    assert answer.status_code == 413


def test_the_connection_continues_after_a_body_that_was_too_large(served: ServedPlatform) -> None:
    client = served.http(served.admin)
    client.post(CREATE, content=bytes(5_000_000))

    assert client.get(LIST).status_code == 200


def test_endless_headers_are_refused(served: ServedPlatform) -> None:
    with pytest.raises(httpx.HTTPError):
        served.as_nobody.get("/healthz", headers={"X-Endless": "x" * 5_000_000}).raise_for_status()


def test_an_upload_may_be_larger_than_the_limit(served: ServedPlatform) -> None:
    answer = served.as_admin.post("/api/v1/blobs/upload", content=(bytes(65536) for _ in range(80)))

    assert answer.json()["size_bytes"] == 80 * 65536


# ------------------------------------------------------------------------------------------ every operation


JUNK: list[Any] = [[], "x", 5, {"": {}}, {"a": [None]}, {"\x00": 1}]


@pytest.mark.parametrize(
    "op", [op for op in all_operations().values() if not op.upload], ids=lambda op: op.name
)
def test_junk_is_never_an_internal_error(served: ServedPlatform, op: Any) -> None:
    fields = {name: {"deep": ["junk"]} for name in op.parameters}

    for junk in [*JUNK, *([fields] if fields else [])]:
        answer = served.as_admin.post(op.path, content=json.dumps(junk))

        assert answer.status_code == 422, answer.text
