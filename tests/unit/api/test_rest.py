"""The REST API: routes, responses, problems, idempotency, pages and concurrent callers."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from falaj.control.services import all_operations
from falaj.errors import FalajError
from falaj.governance.operations.operation import Operation, ResponseShape
from interfaces import ServedPlatform
from polling import PATIENCE_S

OPERATIONS = list(all_operations().values())
READS = [op for op in OPERATIONS if op.mode.reads]
RECORD_READS = [op for op in READS if op.shape is ResponseShape.RECORD]

ENDLESS = "/events/watch"

MEMBERS = {"type", "title", "status", "detail", "code", "faults", "details", "instance"}
MOMENTS = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)|urn:falaj:request:\w+")


def required(op: Operation) -> set[str]:
    """Return the fields that must be in the body."""
    return {n for n, p in op.parameters.items() if p.default is p.empty and n != op.upload}


def answered(served: ServedPlatform, method: str, path: str) -> httpx.Response:
    """Return the response to a request; of a stream that does not end, its head."""
    if not path.endswith(ENDLESS):
        return served.as_admin.request(method, path)
    headers = {"Authorization": f"Bearer {served.admin}"}
    with httpx.stream(method, served.url + path, headers=headers) as answer:
        return answer


def without_times(text: str) -> str:
    """Return `text` without values that depend on the time."""
    return MOMENTS.sub("…", text)


# ----------------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_every_operation_answers_a_post(served: ServedPlatform, op: Operation) -> None:
    answer = answered(served, "POST", f"/api/v1/{op.group}/{op.verb}")

    if required(op):
        assert answer.status_code == 422
        assert {fault["where"] for fault in answer.json()["faults"]} == required(op)
    elif op.internal:
        assert answer.status_code == 403
        assert answer.json()["details"]["rule"] == "internal"
    elif op.name == "queues.what_if":
        assert answer.status_code == 404  # there is no history to replay
    elif op.name in ("endpoints.restart", "endpoints.load"):
        assert answer.json()["code"] == "service.unavailable"  # no model server runs
    elif op.name in ("queues.render", "queues.diff", "queues.apply", "clusters.render", "clusters.apply"):
        assert answer.json()["code"] == "config.invalid"  # there is no cluster
    else:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(op.shape.value)


@pytest.mark.parametrize("op", READS, ids=lambda op: op.name)
def test_every_read_answers_a_get_like_a_post(served: ServedPlatform, op: Operation) -> None:
    by_get, by_post = answered(served, "GET", op.path), answered(served, "POST", op.path)

    assert by_get.status_code == by_post.status_code
    assert by_get.headers["content-type"] == by_post.headers["content-type"]
    if op.group not in ("audit", "platform") and not op.path.endswith(ENDLESS):  # which show the call itself
        assert without_times(by_get.text) == without_times(by_post.text)


@pytest.mark.parametrize("op", [op for op in OPERATIONS if not op.mode.reads], ids=lambda op: op.name)
def test_a_write_refuses_a_get(served: ServedPlatform, op: Operation) -> None:
    answer = served.as_admin.get(op.path)

    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["status"] == 405


def test_an_administrator_may_not_call_an_internal_operation(served: ServedPlatform) -> None:
    served.platform.secrets.set("password", "hunter2")

    answer = served.as_admin.post("/api/v1/secrets/use", json={"secret": "password"})

    assert answer.status_code == 403
    assert "secrets.use is an internal operation" in answer.json()["detail"]


def test_get_takes_typed_parameters_from_the_query(served: ServedPlatform) -> None:
    query = {"number": "7", "half": "0.5", "sure": "true"}

    by_get = served.as_admin.get("/api/v1/probe/echo", params=query).json()

    assert by_get == {"number": 7, "text": " 0.5 True"}


def test_get_takes_repeated_parameters_in_order(served: ServedPlatform) -> None:
    answer = served.as_admin.get("/api/v1/probe/echo?names=pii&number=1&names=health&names=a")

    assert answer.json() == {"number": 1, "text": "pii,health,a 0.0 False"}


def test_an_upload_takes_repeated_parameters(served: ServedPlatform) -> None:
    answer = served.as_admin.post("/api/v1/blobs/upload?classes=pii&classes=health&only=AE", content=b"bytes")

    assert answer.json()["label"]["only"] == ["AE"]
    assert set(answer.json()["label"]["classes"]) == {"pii", "health"}


def test_a_scalar_parameter_may_not_be_repeated(served: ServedPlatform) -> None:
    answer = served.as_admin.get("/api/v1/probe/echo?number=1&number=2")

    assert answer.status_code == 422
    assert answer.json()["faults"] == [{"where": "query number", "given": "2 times", "allowed": "once"}]


@pytest.mark.parametrize("op", RECORD_READS, ids=lambda op: op.name)
def test_head_is_get_without_the_body(served: ServedPlatform, op: Operation) -> None:
    head, get = served.as_admin.head(op.path), served.as_admin.get(op.path)

    assert head.status_code == get.status_code
    assert head.content == b""


@pytest.mark.parametrize("path", ["/nowhere", "/api/v1/workspaces", "/api/v1/workspaces/fly", "/api/v2/x"])
def test_an_unknown_path_is_a_problem(served: ServedPlatform, path: str) -> None:
    answer = served.as_admin.get(path)

    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json().keys() == MEMBERS
    assert answer.json()["faults"][0]["given"] == f"GET {path}"


# --------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize("code", sorted(FalajError.types))
def test_every_error_is_a_problem_of_rfc_9457(served: ServedPlatform, code: str) -> None:
    answer = served.as_admin.post("/api/v1/probe/fail", json={"code": code})

    found = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert found.keys() == MEMBERS
    assert found["status"] == answer.status_code >= 400
    assert found["type"] == f"urn:falaj:error:{code}"
    assert found["code"] == code
    assert found["detail"] == f"this is {code}"
    assert found["faults"][1] == {"where": "there"}
    assert found["instance"] == f"urn:falaj:request:{answer.headers['x-request-id']}"


def test_an_unauthenticated_response_names_the_authentication_scheme(served: ServedPlatform) -> None:
    assert served.as_nobody.get("/api/v1/users/whoami").headers["www-authenticate"] == "Bearer"


def test_an_unavailable_service_answers_with_retry_after(served: ServedPlatform) -> None:
    answer = served.as_admin.post("/api/v1/probe/fail", json={"code": "service.unavailable"})

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1.2:3_Z", True), ("", False), ("a b", False), ("x" * 101, False), ("é", False)]
)
def test_a_request_id_is_echoed_if_it_is_valid(served: ServedPlatform, given: str, kept: bool) -> None:
    headers = {"X-Request-ID": given.encode("latin-1")}

    answer = served.as_admin.get("/api/v1/zones/list", headers=headers)

    assert (answer.headers["x-request-id"] == given) is kept
    assert re.fullmatch(r"[A-Za-z0-9_.:-]{1,100}", answer.headers["x-request-id"])


def test_the_audit_log_knows_the_request_and_where_it_came_from(served: ServedPlatform) -> None:
    headers = {"X-Request-ID": "req-audited", "X-Forwarded-For": "6.6.6.6"}

    served.as_admin.get("/api/v1/workspaces/show?workspace=risk", headers=headers)

    entry = served.platform.audit.list(workspace="risk", action="workspaces.show", limit=1).items[0]
    assert entry.request == "req-audited"
    assert entry.origin == "remote:127.0.0.1"


# ------------------------------------------------------------------------------------------ idempotency


def create(client: httpx.Client, name: str, key: str) -> httpx.Response:
    return client.post("/api/v1/workspaces/create", json={"name": name}, headers={"Idempotency-Key": key})


def test_a_repeated_key_gets_the_first_answer(served_on_each: ServedPlatform) -> None:
    admin = served_on_each.as_admin
    first = create(admin, "once", "key-1")

    again = create(admin, "once", "key-1")

    assert first.status_code == again.status_code == 200
    assert first.content == again.content
    assert create(admin, "once", "key-2").status_code == 409  # so it was not made a second time


def test_a_key_with_another_body_is_a_conflict(served_on_each: ServedPlatform) -> None:
    create(served_on_each.as_admin, "mine", "key-3")

    answer = create(served_on_each.as_admin, "yours", "key-3")

    assert answer.status_code == 409
    assert answer.json()["code"] == "idempotency.reused"


def test_a_key_with_other_bytes_is_a_conflict(served_on_each: ServedPlatform) -> None:
    for data in (b"some bytes", b"other bytes"):
        answer = served_on_each.as_admin.post(
            "/api/v1/blobs/upload", content=data, headers={"Idempotency-Key": "key-5"}
        )

    assert answer.status_code == 409


def test_a_key_belongs_to_its_caller(served_on_each: ServedPlatform) -> None:
    create(served_on_each.as_admin, "hers", "key-4")

    assert create(served_on_each.http(served_on_each.stranger), "hers", "key-4").status_code == 403


@pytest.mark.parametrize("key", [b"", b"a b", b"x" * 201, b"\xe9", b"a\tb"])
def test_a_malformed_key_is_refused(served: ServedPlatform, key: bytes) -> None:
    answer = served.as_admin.post(
        "/api/v1/workspaces/create", json={"name": "never"}, headers={"Idempotency-Key": key}
    )

    assert answer.status_code == 422
    assert answer.json()["faults"][0]["where"] == "Idempotency-Key"


# ------------------------------------------------------------------------------- pages and concurrency


def all_ids(fetch: Callable[[str], Any]) -> list[str]:
    """Return the ids on all pages, in order."""
    found, after = [], ""
    while after is not None:
        page = fetch(after)
        found += [item.id for item in page.items]
        after = page.next
    return found


def test_pages_hold_everything_exactly_once(served_on_each: ServedPlatform) -> None:
    platform = served_on_each.platform
    made = [platform.workspaces.create(f"paged-{n}").id for n in range(11)]
    tokens = [platform.tokens.issue(purpose=f"paged {n}").token.id for n in range(5)]

    workspaces = all_ids(lambda after: platform.workspaces.list(after=after, limit=3))
    seen = all_ids(lambda after: platform.tokens.list(after=after, limit=2))

    assert len(set(workspaces)) == len(workspaces)
    assert [each for each in workspaces if each in made] == sorted(made)
    assert len(set(seen)) == len(seen)
    assert set(tokens) <= set(seen)


def test_pages_leave_out_what_the_caller_may_not_see(served_on_each: ServedPlatform) -> None:
    developer = served_on_each.connect(served_on_each.developer)
    for n in range(4):
        served_on_each.platform.workspaces.create(f"hidden-{n}")

    seen = developer.workspaces.list(limit=1)

    assert [each.name for each in seen.items] == ["risk"]
    assert seen.next is None


@pytest.mark.slow
def test_sixteen_callers_write_at_once(served_on_each: ServedPlatform) -> None:
    def write(number: int) -> list[str]:
        headers = served_on_each.as_admin.headers
        with httpx.Client(base_url=served_on_each.url, headers=headers, timeout=PATIENCE_S) as client:
            answers = [create(client, f"crowd-{number}-{n}", f"crowd-{number}-{n}") for n in range(5)]
        return [answer.json()["id"] for answer in answers if answer.status_code == 200]

    with ThreadPoolExecutor(16) as crowd:
        made = [ident for made in crowd.map(write, range(16)) for ident in made]

    assert len(set(made)) == 16 * 5
    platform = served_on_each.platform
    assert set(made) <= set(all_ids(lambda after: platform.workspaces.list(after=after, limit=100)))
    assert platform.verify_audit().ok
