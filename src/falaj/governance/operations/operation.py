"""`@operation`: a capability declared once. Gate, route, client method, CLI command and policy action come from it."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic_core import SchemaValidator

from falaj.errors import FalajError, Fault, InvalidInput, shorten
from falaj.records.governance.identity import Role
from falaj.records.names import PlacedIn, RefersTo, Withheld
from falaj.records.record import Digested

P = ParamSpec("P")
R = TypeVar("R")

Grantee = Role | Literal["anyone", "owner"]

MANY_ITEMS = 5_000
"""Of a JSON document with more items no list is checked beyond its first fault: each fault takes 1.5 KB, and 2 µs."""
MOST_FAULTS = 10_000
"""Of more faults only the number is told."""


class Mode(Enum):
    """When the operation's transaction is open."""

    READ = "read"
    WRITE = "write"
    LATE = "late"
    """A write that first moves bytes, and opens its transaction itself, at the commit point."""
    FREE = "free"
    """A read that takes long: it opens short transactions of its own."""
    HOT = "hot"
    """A read without a transaction, decided from memory, with one audit entry per caller, object and window."""

    @property
    def reads(self) -> bool:
        return self in (Mode.READ, Mode.FREE, Mode.HOT)


class ResponseShape(Enum):
    """The content type of an operation's answer."""

    RECORD = "application/json"
    RECORDS = "application/x-ndjson"
    BYTES = "application/octet-stream"
    ARROW = "application/vnd.apache.arrow.stream"


ByteStream = Iterator[bytes]
"""As a parameter: the request's body. As a result: bytes, streamed."""


class ArrowStream(Protocol):
    """A table as record batches, streamed; a pyarrow RecordBatchReader is one."""

    @property
    def schema(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def read_all(self) -> Any: ...


class OperationPerformer(Protocol):
    """Performs a call: the gate in this process, or a REST client."""

    def perform(self, operation: Operation, service: Any, given: BaseModel) -> Any: ...

    def reject(self, operation: Operation, error: FalajError) -> None: ...


class Service(Protocol):
    """A service: a class whose methods are operations."""

    gate: OperationPerformer


class OperationInput(BaseModel):
    """The typed input of an operation; each has a subclass made from its signature."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


@dataclass(frozen=True)
class Operation:
    """The declaration of an operation; `name` is `group.verb`. `internal`: only the platform's services may call it."""

    name: str
    resource: str
    mode: Mode
    allow: frozenset[Grantee]
    body: Callable[..., Any]
    confirm: bool = False
    internal: bool = False
    exports: bool = False
    emits: bool = True

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def verb(self) -> str:
        return self.name.partition(".")[2]

    @property
    def path(self) -> str:
        return f"/api/v1/{self.group}/{self.verb}"

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.body) or "").partition("\n")[0]

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.body, eval_str=True)

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(list(self.signature.parameters.items())[1:])

    @functools.cached_property
    def upload(self) -> str | None:
        """The parameter that is the request's body, if there is one."""
        return next((n for n, p in self.parameters.items() if p.annotation == ByteStream), None)

    @functools.cached_property
    def input(self) -> type[BaseModel]:
        fields: dict[str, Any] = {
            name: (
                Any if name == self.upload else parameter.annotation,
                ... if parameter.default is parameter.empty else parameter.default,
            )
            for name, parameter in self.parameters.items()
        }
        title = "".join(part.title() for part in self.name.replace("_", ".").split(".")) + "Input"
        return create_model(title, __base__=OperationInput, **fields)

    @functools.cached_property
    def repeated(self) -> frozenset[str]:
        """The parameters that take several values."""
        return frozenset(n for n, p in self.parameters.items() if _is_tuple(p.annotation))

    @functools.cached_property
    def shape(self) -> ResponseShape:
        result = self.signature.return_annotation
        if result == ByteStream:
            return ResponseShape.BYTES
        if result is ArrowStream:
            return ResponseShape.ARROW
        return (
            ResponseShape.RECORDS
            if typing.get_origin(result) is typing.get_origin(Iterator[Any])
            else ResponseShape.RECORD
        )

    @functools.cached_property
    def output(self) -> TypeAdapter[Any]:
        """The type of the answer, or of each record in a stream of them."""
        result = self.signature.return_annotation
        return TypeAdapter(typing.get_args(result)[0] if self.shape is ResponseShape.RECORDS else result)

    @functools.cached_property
    def hands_out(self) -> bool:
        """Whether its answer has data of the objects that it refers to."""
        return self.exports or (self.mode.reads and self.shape in (ResponseShape.BYTES, ResponseShape.ARROW))

    @functools.cached_property
    def references(self) -> dict[str, RefersTo]:
        """The parameters that name stored objects."""
        return {n: m for n, p in self.parameters.items() if (m := _marker(p.annotation, RefersTo))}

    @functools.cached_property
    def placements(self) -> tuple[str, ...]:
        """The parameters that name a zone in which bytes will lie."""
        return tuple(n for n, p in self.parameters.items() if _marker(p.annotation, PlacedIn))

    @functools.cached_property
    def withheld(self) -> frozenset[str]:
        """The parameters whose values are recorded nowhere, not even as a digest."""
        return frozenset(n for n, p in self.parameters.items() if _marker(p.annotation, Withheld))

    @functools.cached_property
    def subject(self) -> str | None:
        """The parameter that names the resource; none where that is the platform itself."""
        return next((n for n, ref in self.references.items() if ref.kind in (self.resource, None)), None)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BaseModel:
        """Return the typed input of a call in Python; raise InvalidInput with all faults."""
        try:
            bound = self.signature.bind(None, *args, **kwargs).arguments
        except TypeError as error:
            allowed = ", ".join(self.parameters) or "no arguments"
            raise InvalidInput(
                f"{self.name}: {error}", faults=[Fault(where=self.name, allowed=allowed)]
            ) from None
        bound.pop(next(iter(self.signature.parameters)))
        return self.check(bound)

    def check(self, given: Mapping[str, Any], *, strict: bool | None = None) -> BaseModel:
        """Return `given` as the typed input; raise InvalidInput with all faults."""
        try:
            return self.input.model_validate(given, strict=strict)
        except ValidationError as error:
            raise self._refused(error) from None

    def check_json(self, body: bytes) -> BaseModel:
        """Return a JSON document as the typed input, without coercion between JSON types."""
        try:
            if body.count(b",") >= MANY_ITEMS:
                found: BaseModel = self._quick_to_refuse.validate_json(body, strict=True)
                return found
            return self.input.model_validate_json(body or b"{}", strict=True)
        except ValidationError as error:
            raise self._refused(error) from None

    def recorded_input(self, given: BaseModel) -> bytes:
        """Return what the audit log keeps a digest of: the input as JSON, without bytes and what is withheld."""
        exclude = {*self.withheld, *([self.upload] if self.upload else ())}
        digests = {
            name: value.digest()
            for name, value in vars(given).items()
            if isinstance(value, Digested) and name not in exclude
        }
        text = given.model_dump_json(exclude=exclude.union(digests) or None)
        return "\0".join([text, *digests.values()]).encode()

    @functools.cached_property
    def _quick_to_refuse(self) -> SchemaValidator:
        """The input, validated as always, except that lists and mappings end at their first fault."""
        schema = _failing_fast(self.input.__pydantic_core_schema__)
        return SchemaValidator(schema, _use_prebuilt=False)  # those of the records inside do not fail fast

    def _refused(self, error: ValidationError) -> InvalidInput:
        """Return the error. Where a value is withheld none is shown: it may be under a misspelled name."""
        found = invalid(self.name, error)
        if not self.withheld:
            return found
        faults = [fault.model_copy(update={"given": None}) for fault in found.faults]
        return InvalidInput(found.message, faults=faults)


def operation(
    name: str,
    *,
    resource: str,
    mode: Mode = Mode.WRITE,
    allow: Grantee | set[Grantee] | None = None,
    confirm: bool = False,
    internal: bool = False,
    exports: bool = False,
    emits: bool | None = None,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Declare a method as the operation `name` on a resource of kind `resource`.

    `allow` names who may perform it: a role brings the roles that include it. By default viewers may read and
    developers may write. `confirm`: the CLI asks for confirmation. `internal`: only the platform's own services may
    call it, whatever roles a user has, and no help text shows it. `exports`: its answer has data of its resource, so
    that residency is asked whether it may go to where the caller is; streams of bytes and tables always are. `emits`:
    a write stores an event that it was performed; internal ones do only if they say so.
    """
    emitting = not internal if emits is None else emits
    wanted = allow if isinstance(allow, set) else {allow or (Role.VIEWER if mode.reads else Role.DEVELOPER)}

    def declare(body: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        declared = Operation(
            name, resource, mode, frozenset(wanted), body, confirm, internal, exports, emitting
        )

        @functools.wraps(body)
        def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = declared.bind(args, kwargs)
            except InvalidInput as error:
                self.gate.reject(declared, error)
                raise
            return cast(R, self.gate.perform(declared, self, given))

        call.operation = declared  # type: ignore[attr-defined]
        return cast(Callable[Concatenate[Any, P], R], call)

    return declare


def operations_of(service: type) -> dict[str, Operation]:
    """Return the operations that a service class declares, by verb."""
    found = (getattr(member, "operation", None) for member in vars(service).values())
    return {op.verb: op for op in found if isinstance(op, Operation)}


def _failing_fast(schema: Any) -> Any:
    """Return a copy of a pydantic schema in which lists and mappings end at their first fault."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    found = {key: _failing_fast(value) for key, value in schema.items()}
    return found | {"fail_fast": True} if found.get("type") in COLLECTIONS else found


COLLECTIONS = ("list", "tuple", "set", "frozenset", "dict")


def invalid(where: str, error: ValidationError) -> InvalidInput:
    """Return the error with the faults that pydantic found, the first 50."""
    if (count := error.error_count()) > MOST_FAULTS:
        fault = Fault(where="body", given=f"{count} faults", allowed="the fields of the operation")
        return InvalidInput(f"{where}: {count} faults in the input", faults=[fault])
    faults = [
        Fault(
            where=".".join(shorten(str(part), limit=300) for part in fault["loc"]) or "body",
            given=None if fault["type"] == "missing" else shorten(fault["input"]),
            allowed=allowed_values(fault["msg"]),
            fix=_remedy(fault["type"]),
        )
        for fault in _primary_faults(error.errors(include_url=False, include_context=False))[:50]
    ]
    return InvalidInput(f"{where}: {len(faults)} fault{'s' * (len(faults) != 1)} in the input", faults=faults)


_RULES = (
    (r"Extra inputs are not permitted", "no such field"),
    (r"Field required", "a value"),
    (r"Input should be a valid (?:integer|int).*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be a valid boolean.*", "true or false"),
    (r"Input should be a valid string", "a text"),
    (r"Input should be a valid (?:tuple|list)", "a list"),
    (r"Input should be a valid (?:datetime|date).*", "a moment, like 2024-06-01T08:00:00Z"),
    (r"Input should have timezone info", "a moment with its zone, like 2024-06-01T08:00:00Z"),
    (r"Input should be less than or equal to (.*)", r"at most \1"),
    (r"Input should be greater than or equal to (.*)", r"at least \1"),
    (r"(?:Tuple|List) should have (at (?:least|most) \d+ items?) after validation.*", r"\1"),
    (r"(?:Value error, |Input should be )(.*)", r"\1"),
)


def allowed_values(words: str) -> str:
    """Return the allowed values for the message `words` of pydantic; the message itself if no rule matches."""
    for pattern, better in _RULES:
        if found := re.fullmatch(pattern, words, re.DOTALL):
            return found.expand(better)
    return words


def _primary_faults(faults: list[Any]) -> list[Any]:
    """Leave out faults that follow from others: a tuple is too short when its items are wrong."""
    inner = {fault["loc"][:-1] for fault in faults}
    return [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inner]


def _remedy(kind: str) -> str | None:
    return {"extra_forbidden": "remove this field", "missing": "give this field"}.get(kind)


def _is_tuple(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _is_tuple(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return any(_is_tuple(option) for option in typing.get_args(annotation))
    return typing.get_origin(annotation) is tuple


M = TypeVar("M")


def _marker(annotation: Any, kind: type[M]) -> M | None:
    """Return the first marker of type `kind` anywhere inside `annotation`."""
    if isinstance(annotation, kind):
        return annotation
    inner = [*getattr(annotation, "__metadata__", ()), *typing.get_args(annotation)]
    return next((m for part in inner if (m := _marker(part, kind)) is not None), None)
