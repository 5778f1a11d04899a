"""docs/reference/rest.md: every operation over HTTP, from the OpenAPI document that the API serves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from falaj.apps.api.app import HELD_BYTES
from falaj.apps.api.errors import problem_details
from falaj.apps.api.openapi import openapi
from falaj.apps.api.requests import BODY_S, MIN_BYTES_PER_S, RATE_WINDOW_S
from falaj.apps.cli.app import GROUPS
from falaj.control.service import KEYS_KEPT
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.governance.operations.operation import Operation, ResponseShape
from falaj.records.config import ServerConfig, ServingConfig
from falaj.version import VERSION
from reference.markdown import block, code, table

EXAMPLES = Path(__file__).with_name("rest_examples.json")
"""For one operation of each group: a request and its answer."""

WIDTH = 110
SHOWN_BOUND = 10**9
"""Larger limits are there to keep numbers within 64 bits; they are not shown."""
SERVER, SERVING = ServerConfig(), ServingConfig()
BASE = f"http://{SERVER.bind}:{SERVER.port}"

HEAD = f"""# REST

Every operation is a path, `/api/v1/GROUP/VERB`, below `{BASE}` or where [`server`](configuration.md) says. The
names, parameters and answers are those of [Python](python.md) and the [command line](cli.md). The OpenAPI 3.1
document of all operations is at `/api/v1/openapi.json`, with a token.

Writes are `POST` with a JSON object. Reads are `POST` as well, or `GET` with the parameters in the query, where a
list is given by repeating its parameter. JSON is strict: no field may be unknown, and types are not converted. A
timestamp is written in ISO 8601 with its time zone (`2026-01-15T08:00:00Z`), a duration as `PT2H` or `P30D`. A
*reference* is an id, a name, or `workspace/name`; where objects of any kind are meant, `kind:name`.

| path | token | answer |
|---|---|---|
| `GET /healthz` | no | 200 while the process lives |
| `GET /readyz` | no | 200 if requests can be served and a controller is active, else 503 |
| `GET /metrics` | yes | metrics for Prometheus |
| `POST /signin` with `{{"code": "…"}}` | no | a token, for the code of a sign-in link |

Predictions are served by the model server, `http://{SERVING.bind}:{SERVING.port}`, by the Open Inference Protocol
V2: `POST /v2/models/ENDPOINT/infer`, with the same tokens.

## Authentication

Send `Authorization: Bearer TOKEN`. `falaj tokens issue` and [`tokens.issue`](#tokensissue) make tokens, which may
expire and may be limited to a workspace and to actions. A revoked token is refused at the next request. Without a
valid token the answer is 401, [`caller.unknown`](errors.md#callerunknown). A request with two of a header that may
stand once, such as `Authorization` or `Host`, is refused with 400.

```sh
curl -H "Authorization: Bearer $FALAJ_TOKEN" '{BASE}/api/v1/models/list?limit=10'
curl -H "Authorization: Bearer $FALAJ_TOKEN" -H 'Content-Type: application/json' \\
  -d '{{"model": "churn@1", "to": "champion"}}' {BASE}/api/v1/models/promote
```

## Idempotency keys

A write takes the header `Idempotency-Key`: 1 to 200 printable ASCII characters without spaces. The same call of
the same caller with the same key takes effect once; a repetition returns the first answer, for {KEYS_KEPT.days}
days. The key with another operation or other input is refused with 409,
[`idempotency.reused`](errors.md#idempotencyreused). The Python client sends a key with every write, and retries.

## Pagination

Lists take `limit` (1 to 1000) and `after`, and answer `{{"items": […], "next": "…"}}`. Pass `next` as `after` to get
the following page, with the same conditions; it is `null` on the last one. A cursor is good for the caller and the
list that it was given for, and does not show what the caller may not see. `audit.list`, `models.versions` and
`models.alias_history` take it as `before`, a number. On the command line `--all` lists every page.

## Errors

Errors are problem documents (RFC 9457, `application/problem+json`). `code` is stable; [errors](errors.md) lists
all codes with causes and fixes. `details` depends on the code.

PROBLEM

Every response has `X-Request-ID`: yours, if the request had one, or a new one. The audit log and the platform's
log have it too.

## Bodies, uploads and streams

A JSON body has at most `server.body_limit_bytes` ({SERVER.body_limit_bytes >> 20} MiB by default) and must arrive
within {BODY_S:g} seconds. An upload ([`blobs.upload`](#blobsupload)) has its bytes as the body,
`application/octet-stream`, and its parameters in the query; it has no limit, but must send at least
{MIN_BYTES_PER_S} bytes a second over {RATE_WINDOW_S:g} seconds of waiting for it. A caller may have a quarter of
`server.threads` uploads at a time, and as many other operations that move or compute rows and bytes; further ones wait
for its own. All bodies in memory together have at most
{HELD_BYTES >> 20} MiB, of which a caller may have as much as is left free.

| content type of the answer | content |
|---|---|
| `application/json` | one document |
| `application/x-ndjson` | a stream: one document in each line |
| `application/octet-stream` | a stream of bytes; where there is an `offset`, it resumes there |
| `application/vnd.apache.arrow.stream` | a stream of record batches, in the Arrow IPC format |

An error before the first byte is a problem document with its status. Later, the last line of an NDJSON stream is
`{{"problem": …}}`; other streams break off.

## Operations

*Allowed* is the least role in the workspace that may perform an operation; `owner` is whoever made the object, `anyone`
every authenticated caller. Custom [policies](../howto/policies.md) can change that. In the answers that are shown as
examples, fields with their default value are left out.
"""


def rest_page() -> str:
    """Return the page."""
    operations = [each for each in all_operations().values() if not each.internal]
    document = openapi(operations, version=VERSION)
    examples = json.loads(EXAMPLES.read_text())
    groups: dict[str, list[Operation]] = {}
    for each in operations:
        groups.setdefault(each.group, []).append(each)
    if odd := groups.keys() ^ {name.partition(".")[0] for name in examples}:
        raise SystemExit(f"{EXAMPLES} and the groups of operations differ in: {', '.join(sorted(odd))}")
    parts = [HEAD.replace("PROBLEM", _problem()).rstrip()]
    parts += [_group(name, found, document, examples) for name, found in groups.items()]
    return "\n\n".join([*parts, _types(document)])


def _problem() -> str:
    """Return the problem document that answers a request with two faults."""
    try:
        all_operations()["models.promote"].check_json(b'{"model": "churn@1", "too": "champion"}')
    except InvalidInput as error:
        return block(_json(problem_details(error, request="req_01m7gtwyzv53apkjskp232cyk5")), "json")
    raise AssertionError("a request with faults was accepted")


def _group(name: str, found: list[Operation], document: dict[str, Any], examples: dict[str, Any]) -> str:
    parts = [f"## {name}"] + ([GROUPS[name]] if name in GROUPS else [])
    for each in found:
        parts.append(_operation(each, document))
        if each.name in examples:
            parts.append(_example(each, examples[each.name]))
    return "\n\n".join(parts)


def _operation(op: Operation, document: dict[str, Any]) -> str:
    methods = document["paths"][op.path]
    way = "`GET` or `POST" if "get" in methods else "`POST"
    rows = [*_parameters(op, methods["post"], document)]
    parts = [f"### {op.name}", f"{way} {op.path}`: {op.summary}"]
    if op.upload is not None:
        parts.append("The body is the bytes; the parameters are in the query.")
    if rows:
        parts.append(table(("parameter", "type", "default"), rows))
    return "\n\n".join([*parts, f"Answer: {_answer(op, methods['post'])} Allowed: {_allowed(op)}."])


def _allowed(op: Operation) -> str:
    return " or ".join(sorted(str(each) for each in op.allow))


def _parameters(
    op: Operation, post: dict[str, Any], document: dict[str, Any]
) -> Iterable[tuple[str, str, str]]:
    """Yield name, type and default of each parameter."""
    if op.upload is None:
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        schema = (
            document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            if "$ref" in schema
            else schema
        )
        fields, required = schema.get("properties", {}), schema.get("required", [])
    else:
        given = [each for each in post["parameters"] if each["in"] == "query"]
        fields = {each["name"]: each["schema"] for each in given}
        required = [each["name"] for each in given if each["required"]]
    for name, field in fields.items():
        kind = op.references[name].kind or "object" if name in op.references else ""
        words = schema_text(field)
        shown = words.replace("string", f"reference ({kind.replace('_', ' ')})") if kind else words
        yield code(name), shown, "required" if name in required else _default(op, name)


def _default(op: Operation, name: str) -> str:
    field = op.input.model_fields[name]
    value = _plain(field.default)
    return code("null" if value is None else json.dumps(value, ensure_ascii=False))


def _plain(value: Any) -> Any:
    """Return a default as JSON has it; a record without its own defaults."""
    return TypeAdapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)


def _answer(op: Operation, post: dict[str, Any]) -> str:
    content = post["responses"]["200"]["content"][op.shape.value]
    words = {
        ResponseShape.BYTES: "a stream of bytes",
        ResponseShape.ARROW: "a table, as an Arrow stream",
    }
    if op.shape in words:
        return f"{words[op.shape]}."
    kind = schema_text(content["schema"])
    return f"a stream of {kind}." if op.shape is ResponseShape.RECORDS else f"{kind}."


def schema_text(schema: dict[str, Any]) -> str:
    """Return a JSON schema in words; named types are links."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema or "oneOf" in schema:
        inner = schema.get("anyOf") or schema["oneOf"]
        return " or ".join(dict.fromkeys(schema_text(each) for each in inner))
    if "enum" in schema:
        return ", ".join(f'`"{each}"`' for each in schema["enum"])
    if "const" in schema:
        return f'`"{schema["const"]}"`'
    if schema.get("type") == "array":
        return _array_text(schema)
    if schema.get("type") == "object":
        values = schema.get("additionalProperties") or [*schema.get("patternProperties", {}).values(), {}][0]
        kind = schema_text(values) if isinstance(values, dict) else "any"
        return "object" if kind == "any" else f"object of {kind} by name"
    formats = {"date-time": "timestamp", "duration": "duration", "binary": "bytes", "path": "path"}
    words = formats.get(schema.get("format", "")) or str(schema.get("type", "any"))
    low, high = schema.get("minimum"), schema.get("maximum")
    return words if low is None or high is None or high > SHOWN_BOUND else f"{words}, {low} to {high}"


def _array_text(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"list of {', '.join(schema_text(each) for each in schema['prefixItems'])}"
    return f"list of {schema_text(schema.get('items', {}))}"


def _link(name: str) -> str:
    if name.startswith("Page_"):
        return f"page of {_link(name.removeprefix('Page_').rstrip('_'))}"
    return f"[{name}](#type-{name.lower()})"


def _example(op: Operation, example: dict[str, Any]) -> str:
    """Return an example, after checking it against the types of the operation."""
    op.check_json(json.dumps(example["request"]).encode())
    is_stream = op.shape is ResponseShape.RECORDS
    answers = example["answer"] if is_stream else [example["answer"]]
    shown = [_without_defaults(each, _dumped(op, each)) for each in answers]
    text = "\n".join(json.dumps(each, ensure_ascii=False) if is_stream else _json(each) for each in shown)
    request = block(f"POST {op.path}\n{_json(example['request'])}", "http")
    return f"Example:\n\n{request}\n\n{block(text, 'json')}"


def _dumped(op: Operation, answer: Any) -> Any:
    """Return an answer after a round trip through its type, without default values."""
    typed = op.output.validate_json(json.dumps(answer))
    return op.output.dump_python(typed, mode="json", exclude_defaults=True)


def _without_defaults(given: Any, dumped: Any) -> Any:
    """Return of `given` what `dumped` has too. The order is that of `given`: sets have none of their own."""
    if isinstance(given, dict) and isinstance(dumped, dict):
        return {name: _without_defaults(given[name], dumped[name]) for name in given if name in dumped}
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        return [_without_defaults(*each) for each in zip(given, dumped, strict=True)]
    return given


def _json(value: Any) -> str:
    """Return JSON on one line if it is short, else indented."""
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= WIDTH else json.dumps(value, ensure_ascii=False, indent=2)


def _types(document: dict[str, Any]) -> str:
    """Return the section of the named types that parameters and answers mention."""
    inputs = {each.input.__name__ for each in all_operations().values()}
    named = sorted(document["components"]["schemas"].items())
    shown = [_type(*each) for each in named if each[0] not in inputs and not each[0].startswith("Page_")]
    return "\n\n".join(["## Types", "A field with * has no default.", *shown])


def _type(name: str, schema: dict[str, Any]) -> str:
    about = " ".join(schema.get("description", "").split())
    required = schema.get("required", [])
    fields = [
        f"`{field}`{'*' if field in required else ''} {schema_text(inner)}"
        for field, inner in schema.get("properties", {}).items()
    ]
    title = f'<a id="type-{name.lower()}"></a>**{name}**' + (f": {about}" if about else "")
    return f"{title}\n\n{' · '.join(fields) if fields else schema_text(schema)}"
