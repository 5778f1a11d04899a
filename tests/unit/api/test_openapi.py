"""The OpenAPI document is valid and complete, and a fuzzer checks that the API conforms to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from falaj.apps.api.openapi import openapi
from falaj.assembly.platform import local_user
from falaj.control.services import all_operations
from falaj.governance.operations.operation import ResponseShape
from falaj.records.governance.identity import Role
from interfaces import ServedPlatform
from polling import PATIENCE_S

OPERATIONS = [op for op in all_operations().values() if not op.internal]
DOCUMENT = openapi(all_operations().values(), version="1.2.3")
FUZZED = {
    found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
}
EXCLUDED = dict.fromkeys(
    ("GET /api/v1/endpoints/load", "POST /api/v1/endpoints/load", "POST /api/v1/endpoints/restart"),
    "503 is right where no model server runs",
)
"""Operations that the fuzzer leaves out, and why. The users and keys that it removes are its own."""
ENDLESS = ("GET /api/v1/events/watch", "POST /api/v1/events/watch")
"""Their answers have no end: only the beginning is read."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ROUNDS = 8
LONGEST_URL = 60_000
"""A longer one is refused by the server's parser, with 400, before it reaches the API."""


# --------------------------------------------------------------------------------------------- the document


@pytest.mark.slow
def test_the_document_is_valid_openapi_3_1() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []


def test_every_operation_is_in_the_document_under_its_name() -> None:
    documented = {
        method["operationId"]: (path, verb)
        for path, methods in DOCUMENT["paths"].items()
        for verb, method in methods.items()
    }

    expected = {op.name: (op.path, "post") for op in OPERATIONS}
    expected |= {f"{op.name}.get": (op.path, "get") for op in OPERATIONS if op.mode.reads}
    assert documented == expected


def test_every_operation_has_a_description_and_its_errors() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method in methods.values():
            assert method["summary"], path
            assert {"200", "401", "403", "404", "409", "413", "422", "503"} <= method["responses"].keys()


def test_every_reference_has_a_target() -> None:
    schemas = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}

    assert set(references(DOCUMENT)) <= schemas


def test_answers_are_described_by_their_shape() -> None:
    for op in OPERATIONS:
        content = DOCUMENT["paths"][op.path]["post"]["responses"]["200"]["content"]
        assert list(content) == [op.shape.value]
        assert bool(content[op.shape.value]) is (op.shape in (ResponseShape.RECORD, ResponseShape.RECORDS))


def test_writes_take_an_idempotency_key_and_reads_do_not() -> None:
    for op in OPERATIONS:
        names = [parameter["name"] for parameter in DOCUMENT["paths"][op.path]["post"].get("parameters", [])]
        assert ("Idempotency-Key" in names) is not op.mode.reads


@pytest.mark.slow
def test_the_document_is_served_to_authenticated_callers(served: ServedPlatform) -> None:
    path = "/api/v1/openapi.json"

    assert served.as_nobody.get(path).status_code == 401
    for token in (served.admin, served.stranger):
        answer = served.http(token).get(path)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["paths"] == DOCUMENT["paths"]


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from [part["$ref"]] if "$ref" in part else []
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


# ------------------------------------------------------------------------------------------------ the fuzzer


@pytest.fixture(scope="module")
def known(served: ServedPlatform) -> dict[str, list[Any]]:
    """Return names of existing objects by parameter, without which a fuzzer only ever gets "not found"."""
    platform = served.platform
    platform.put("data", b"some bytes", workspace="risk")
    platform.put("spare", b"more bytes", workspace="risk")
    platform.policies.publish("rule", text="permit (principal, action, resource);", workspace="risk")
    platform.groups.create("team")
    platform.workspaces.create("doomed")
    issued = platform.tokens.issue(purpose="to be fuzzed", user="sam")
    staged = platform.blobs.upload(iter([b"staged"]), workspace="risk")
    return {
        "workspace": ["risk", "default", "platform"],
        "user": ["dana", "sam", local_user()],
        "subject": ["dana", "team"],
        "group": ["team"],
        "role": list(Role),
        "token": [issued.token.id],
        "policy": ["risk/rule"],
        "blob": ["risk/data"],
        "object": ["risk/blob:data", "workspace:risk", "user:dana"],
        "zone": ["local"],
        "kind": ["blob", "user"],
        "action": ["blobs.read"],
        "text": ["permit (principal, action, resource);"],
        "keys.destroy workspace": ["doomed", "platform"],
        "blobs.commit blob": [staged.id],
        "blobs.delete blob": ["risk/spare"],
        "workspaces.revoke subject": ["dana"],
        "workspaces.revoke role": [Role.DEVELOPER],
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("label", [label for label in FUZZED if label not in EXCLUDED])
def test_the_api_conforms_to_the_document(
    served: ServedPlatform,
    known: dict[str, list[Any]],
    label: str,
    mode: GenerationMode,
) -> None:
    operation = FUZZED[label]

    @settings(
        max_examples=ROUNDS,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode), data=st.data())
    def hold(case: Any, data: Any) -> None:
        for given_values in (case.body, case.query):
            if isinstance(given_values, dict) and mode is GenerationMode.POSITIVE:
                for name in sorted(given_values.keys()):
                    values = known.get(f"{name_of(operation)} {name}", known.get(name))
                    if values and data.draw(st.integers(0, 3)):
                        given_values[name] = data.draw(st.sampled_from(values))
        assume(len(urlencode(case.query or {}, doseq=True)) < LONGEST_URL)
        headers = {"Authorization": f"Bearer {served.admin}"}
        if label in ENDLESS:
            assert status_of(case, served.url, headers) in operation.definition.raw["responses"]
        else:
            case.call_and_validate(base_url=served.url, headers=headers, checks=CHECKS)

    hold()


def status_of(case: Any, url: str, headers: dict[str, str]) -> str:
    """Return the status of the answer to a request, without reading the answer."""
    asked = case.as_transport_kwargs(base_url=url, headers=headers)
    with requests.request(**asked, stream=True, timeout=PATIENCE_S) as answer:
        return str(answer.status_code)


def name_of(operation: Any) -> str:
    """Return the operation's name, for GET and for POST."""
    return str(operation.definition.raw["operationId"]).removesuffix(".get")
