"""Generates the OpenAPI document from the operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from falaj.apps.api.errors import CONTENT_TYPE
from falaj.errors import Fault
from falaj.governance.operations.operation import Operation, ResponseShape

REF = "#/components/schemas/{model}"
PROBLEMS = {
    "401": "No token, or an invalid one",
    "403": "Denied by policy or residency",
    "404": "Unknown, or not visible to you",
    "409": "Conflict with the state of the object",
    "413": "The body is too large",
    "422": "The input is not valid",
    "503": "A backing service is unavailable",
}


class Problem(BaseModel):
    """RFC 9457 problem details; `code` is stable, `faults` have location, given and allowed value, and fix."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    faults: tuple[Fault, ...]
    details: dict[str, Any]
    instance: str | None = None


def openapi(operations: Iterable[Operation], *, version: str) -> dict[str, Any]:
    """Return the OpenAPI document of all operations that are not internal."""
    operations = [op for op in operations if not op.internal]
    schemas, definitions = _schemas(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Falaj", "version": version, "license": {"name": "Apache-2.0"}},
        "security": [{"token": []}],
        "paths": {op.path: _methods(op, schemas) for op in operations},
        "components": {
            "schemas": definitions,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(operations: list[Operation]) -> tuple[dict[Any, Any], dict[str, Any]]:
    inputs = [(op.name, "validation", TypeAdapter(_documented(op))) for op in operations]
    outputs = [
        (f"{op.name} out", "serialization", op.output)
        for op in operations
        if op.shape in (ResponseShape.RECORD, ResponseShape.RECORDS)
    ]
    problem = ("problem", "serialization", TypeAdapter(Problem))
    found, document = TypeAdapter.json_schemas([*inputs, *outputs, problem], ref_template=REF)  # type: ignore[list-item]
    return dict(found), document.get("$defs", {})


def _documented(op: Operation) -> type[BaseModel]:
    """Return the type of the JSON input, without the upload."""
    if op.upload is None:
        return op.input
    fields: dict[str, Any] = {
        name: (p.annotation, ... if p.default is p.empty else p.default)
        for name, p in op.parameters.items()
        if name != op.upload
    }
    return create_model(op.input.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _methods(op: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    post: dict[str, Any] = _described(op, schemas)
    if op.upload is not None:
        body: dict[str, Any] = {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
        }
        post["parameters"] = _query(op)
    else:
        body = {"application/json": {"schema": schemas[op.name, "validation"]}}
    post["requestBody"] = {"content": body, "required": True}
    if op.mode.reads:
        get = _described(op, schemas) | {"operationId": f"{op.name}.get", "parameters": _query(op)}
        return {"get": get, "post": post}
    header = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
    key = {"name": "Idempotency-Key", "in": "header", "required": False, "schema": header}
    post["parameters"] = [*post.get("parameters", []), key]
    return {"post": post}


def _described(op: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if op.shape in (ResponseShape.RECORD, ResponseShape.RECORDS):
        content = {"schema": schemas[f"{op.name} out", "serialization"]}
    problem = {CONTENT_TYPE: {"schema": schemas["problem", "serialization"]}}
    failures = {code: {"description": text, "content": problem} for code, text in PROBLEMS.items()}
    return {
        "operationId": op.name,
        "tags": [op.group],
        "summary": op.summary,
        "responses": {"200": {"description": op.summary, "content": {op.shape.value: content}}, **failures},
    }


def _query(op: Operation) -> list[dict[str, Any]]:
    schema = TypeAdapter(_documented(op)).json_schema(ref_template=REF)
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(field)}
        for name, field in schema.get("properties", {}).items()
    ]


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without null, which a query cannot express."""
    options = [option for option in field.get("anyOf", []) if option != {"type": "null"}]
    rest = {key: value for key, value in field.items() if key not in ("anyOf", "default", "title")}
    return rest | options[0] if options else {k: v for k, v in field.items() if k not in ("default", "title")}
