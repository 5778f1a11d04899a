"""Every operation is declared once, and available in the gate, REST, OpenAPI, the client, policies and the CLI."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette

from falaj.apps.api.app import make_app
from falaj.apps.api.mlflow.routes import LISTINGS, MOUNTS, ROUTES, SERVER_INFO
from falaj.apps.api.openapi import _documented, openapi
from falaj.apps.cli.app import GROUPS, load_command
from falaj.apps.cli.generation.groups import group_commands
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.control.services import all_operations, service_types
from falaj.errors import Conflict, FalajError
from falaj.governance.operations.operation import Operation, ResponseShape, operations_of
from falaj.governance.policy.schema import cedar_schema, groups_of
from falaj.records.governance.identity import Role
from falaj.sdk.platform import Platform
from falaj.sdk.remote import RemoteGate, remote_service

OPERATIONS = all_operations()
DOCUMENT = openapi(OPERATIONS.values(), version="1")
CEDAR = cedar_schema(OPERATIONS.values())[""]
EVERY = pytest.mark.parametrize("op", OPERATIONS.values(), ids=lambda op: op.name)

BESIDE = {
    # routes beside those of the operations, with the operation that each maps to, or ""
    "/healthz": None,
    "/readyz": None,
    "/": None,
    "/signin.js": None,
    "/api/v1/openapi.json": None,
    "/metrics": "platform.metrics",
    "/signin": "tokens.issue",
    **{route.path: route.operation for route in (*ROUTES, *LISTINGS.values())},
    SERVER_INFO: None,
    **{f"{mount}/{{rest:path}}": None for mount in MOUNTS},  # what is not part of it: an error of MLflow's
}

VALUES: list[Any] = [
    "sample",
    "AE",
    "blobs.read",
    ("blobs.read",),
    1,
    Role.VIEWER,
    ("sample",),
    {"a": "b"},
    ({"key": "a", "value": 1.0},),
    ({"model": "sample"},),
    {"name": "sample", "script": "train.py"},
    ({"replica": 0, "node": "sample"},),
    "done",
    "edge",
    ({"version": "1"},),
    ({"id": "sample", "value": 1.0},),
    ({"number": 1, "sha256": "0" * 64},),
    ({"name": "x", "shape": (1,), "datatype": "FP32", "data": [1.0]},),
    "predictions_01arz3ndektsv4rrffq69g5fav",
    {"steps": ({"name": "a", "model": "sample"},), "outputs": {"y": "a.y"}},
    "0" * 32,
    "0" * 64,
    {"scanned": {"seq": 0, "part": 0}},
    {"outcome": "undecided", "promote": False, "words": "sample"},
    "backup_01arz3ndektsv4rrffq69g5fav",
    {},
    {"state": "done"},
    {"target": "y", "output": "p", "metrics": {"auc": 0.9}, "rows": 1},
    {
        "metric": "rmse",
        "rows": 1,
        "original": {
            **dict.fromkeys(("latency_p50_us", "latency_p99_us", "rows_per_s_32", "rows_per_s"), 1.0),
            "best_batch": 1,
            "cpu_us_per_row": 1.0,
            "size_bytes": 1,
        },
    },
    ({"model": "m", "since": "2026-01-01T00:00Z", "until": "2026-01-02T00:00Z", "rows": 0, "features": ()},),
    {
        "space": {"lr": {"type": "float", "low": 0.1, "high": 1.0}},
        "objectives": [{"metric": "auc", "direction": "maximize"}],
    },
    {
        "name": "sample",
        "endpoint": "sample",
        "model": "sample",
        "spine": "sample",
        "window": "P1D",
        "views": ["sample"],
        "job": {"name": "sample", "script": "train.py"},
    },
    {
        **dict.fromkeys(("since", "until"), "2026-01-01T00:00Z"),
        **dict.fromkeys(("changes", "teams"), ()),
        "jobs": 1,
        "before": {"jobs": 1, "ended": 1},
        "after": {"jobs": 1, "ended": 1},
        "fairness_before": {},
        "fairness_after": {},
    },
]
"""A sample for every type of parameter; an operation with a new type adds its own."""


class Recorder:
    """A gate that records each call and performs none."""

    def __init__(self) -> None:
        self.seen: list[tuple[Operation, Any, BaseModel]] = []

    def perform(self, operation: Operation, service: Any, given: BaseModel) -> Any:
        self.seen.append((operation, service, given))
        return "what the gate answers"

    def reject(self, operation: Operation, error: FalajError) -> None:
        raise AssertionError(f"{operation.name} does not take its sample: {error}")


def sample(op: Operation) -> dict[str, Any]:
    """Return valid arguments for the parameters of `op` that have no default."""
    needed = {n: p.annotation for n, p in op.parameters.items() if p.default is p.empty}
    return {n: iter(()) if n == op.upload else valid(annotation) for n, annotation in needed.items()}


def valid(annotation: Any) -> Any:
    for value in VALUES:
        try:
            TypeAdapter(annotation).validate_python(value)
        except ValidationError:
            continue
        return value
    raise AssertionError(f"VALUES has nothing for {annotation}")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starlette]:
    folder: Path = tmp_path_factory.mktemp("app")
    platform = assemble(open_home(folder / "home", folder / "config"))
    yield make_app(platform)
    platform.close()


# -------------------------------------------------------------------------------------------- declared once


def test_there_are_operations() -> None:
    assert len(OPERATIONS) >= 57


@pytest.mark.parametrize(("name", "service"), service_types().items(), ids=service_types().keys())
def test_operations_are_named_after_their_group_and_method(name: str, service: type) -> None:
    for verb, op in operations_of(service).items():
        assert op.name == f"{name}.{verb}"
        assert getattr(service, verb).operation is op


@pytest.mark.parametrize("service", service_types().values(), ids=service_types().keys())
def test_a_service_has_no_public_method_that_is_not_an_operation(service: type) -> None:
    public = {name for name, _ in inspect.getmembers(service) if not name.startswith("_")}

    assert public == operations_of(service).keys()


def test_the_client_is_typed_with_every_service() -> None:
    hints = get_type_hints(Platform)

    assert {name: hints.get(name) for name in service_types()} == service_types()


@EVERY
def test_it_has_a_description(op: Operation) -> None:
    assert op.summary
    assert op.summary.endswith((".", "`"))
    assert op.summary[0].isupper()


@EVERY
def test_options_are_keyword_only(op: Operation) -> None:
    optional = [p for p in op.parameters.values() if p.default is not p.empty]

    assert [p.name for p in optional if p.kind is not p.KEYWORD_ONLY] == []


@EVERY
def test_its_types_have_a_json_schema(op: Operation) -> None:
    assert TypeAdapter(_documented(op)).json_schema()["additionalProperties"] is False
    if op.shape in (ResponseShape.RECORD, ResponseShape.RECORDS):
        assert op.output.json_schema(mode="serialization")


# ------------------------------------------------------------------------------------------- every surface


@EVERY
def test_it_passes_the_gate(op: Operation) -> None:
    service = object.__new__(service_types()[op.group])
    service.gate = gate = Recorder()

    answer = getattr(service, op.verb)(**sample(op))

    assert answer == "what the gate answers"  # the probe's answer shows that the body did not run
    assert [(seen, where) for seen, where, _ in gate.seen] == [(op, service)]


@EVERY
def test_it_has_a_route(op: Operation, app: Starlette) -> None:
    (route,) = [route for route in app.routes if route.path == f"/api/v1/{op.group}/{op.verb}"]

    assert "POST" in route.methods
    assert ("GET" in route.methods) is op.mode.reads


def test_every_other_route_is_listed_with_its_operation(app: Starlette) -> None:
    paths = {op.path for op in OPERATIONS.values()}

    assert {route.path for route in app.routes} - paths == BESIDE.keys()
    assert {name for name in BESIDE.values() if name} <= OPERATIONS.keys()
    assert len({(route.path, *route.methods) for route in app.routes}) == len(app.routes)


def test_every_route_of_mlflow_gives_its_operation_what_it_takes() -> None:
    samples = {"number": 1, "source": "runs:/sample/model", "stage": "Production"}
    for route in (*ROUTES, *LISTINGS.values()):
        operation, fields = OPERATIONS[route.operation], msgspec.structs.fields(route.request)
        required = {each.name: samples.get(each.name, "sample") for each in fields if each.required}
        several = {each.name: ["sample"] for each in fields if each.name in route.repeated - {"order_by"}}

        given = route.given(msgspec.convert(required | several, route.request))

        assert given.keys() <= operation.parameters.keys(), route.path
        needed = {n for n, p in operation.parameters.items() if p.default is p.empty} - {operation.upload}
        assert needed <= given.keys(), route.path


@EVERY
def test_it_is_in_the_openapi_document_unless_it_is_internal(op: Operation) -> None:
    methods = DOCUMENT["paths"].get(op.path)

    assert (methods is None) is op.internal
    if methods is None:
        return
    assert methods["post"]["operationId"] == op.name
    assert ("get" in methods) is op.mode.reads


@EVERY
def test_the_client_sends_it(op: Operation) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(409, json={"code": "object.conflict", "detail": "no"})

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://falaj") as client:
        service = remote_service(service_types()[op.group], RemoteGate(client))
        with pytest.raises(Conflict):
            getattr(service, op.verb)(**sample(op))

    assert [(request.method, request.url.path) for request in sent] == [("POST", op.path)]
    assert ("idempotency-key" in sent[0].headers) is not op.mode.reads


@EVERY
def test_policies_can_name_it_and_a_role_permits_it(op: Operation) -> None:
    action = CEDAR["actions"][op.name]

    assert action["memberOf"] == [{"id": group} for group in groups_of(op)] != []
    assert set(action["appliesTo"]["resourceTypes"]) <= CEDAR["entityTypes"].keys()
    assert action["appliesTo"]["resourceTypes"]


@EVERY
def test_it_has_a_command_unless_it_is_internal(op: Operation) -> None:
    verb, commands = op.verb.replace("_", "-"), group_commands(op.group)
    command, _, option = presentation_of(op.group).options.get(verb, verb).partition(" ")

    assert (command in commands) is not op.internal
    assert option == "" or (verb not in commands and option in options_of(op.group, command))
    assert op.group in GROUPS


def options_of(group: str, command: str) -> set[str]:
    return {option for parameter in load_command(group).commands[command].params for option in parameter.opts}
