"""Example decisions in a file, so that policies can be tested without a platform.

    policies = ["*.cedar"]              # beside this file; they hold everywhere,
    workspace = "risk"                  # or, as when they are published, in this workspace only

    [[example]]
    who = "sara"
    roles = {risk = ["developer"]}      # by workspace; "platform" stands for every workspace
    groups = ["analysts"]
    action = "blobs.upload"
    resource = {kind = "workspace", workspace = "risk", only = ["AE"], classes = ["personal"]}
    expect = "allow"
    rule = "role.developer"             # the rule that must say so; may be left out

An action that operations imply, such as `endpoints.serve`, takes `context = {approved = true}`; the rest has defaults.
A workspace, a user and a group go by their names here, where policies in force know them by id.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from falaj.errors import Fault, InvalidInput, PolicyInvalid, shorten
from falaj.governance.operations.operation import Operation
from falaj.governance.policy.engine import PolicyEngine, PolicyText, PrincipalFacts
from falaj.governance.policy.implied_actions import IMPLIED, ContextValue, ImpliedAction
from falaj.governance.policy.schema import kinds_of, resource_kinds
from falaj.records.governance.identity import PrincipalKind, Role
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision, ExampleOutcome
from falaj.records.governance.residency import Label
from falaj.records.names import DEFAULT_WORKSPACE, ROOT, DataClass, Jurisdiction, ObjectId, PrincipalId
from falaj.records.record import Record

AnyAction = Operation | ImpliedAction
_KINDS = {bool: "true or false", str: "a text", tuple: "a list of texts"}
PLATFORM_SCOPED_KINDS = {"user", "service", "group", "token"}
"""Kinds that lie in no workspace."""


class ExampleResource(Record):
    """The resource of an example; by default of the kind that the action takes."""

    kind: str | None = None
    workspace: str = DEFAULT_WORKSPACE
    name: str | None = None
    owner: str = ""
    zone: str | None = None
    only: frozenset[Jurisdiction] | None = None
    classes: frozenset[DataClass] = frozenset()


class PolicyExample(Record):
    """A principal, an action, a resource and the expected decision."""

    who: str = Field(min_length=1)
    kind: PrincipalKind = "user"
    roles: dict[str, tuple[Role, ...]] = {}
    groups: tuple[str, ...] = ()
    action: str
    resource: ExampleResource = ExampleResource()
    origin: str = "local"
    context: dict[str, ContextValue] = {}
    expect: Literal["allow", "deny"]
    rule: str | None = None


class ExampleFile(Record):
    """The settings of a file of examples: the policies that it tests."""

    policies: tuple[str, ...] = ()
    workspace: str | None = None


def run_examples(path: Path, operations: Iterable[Operation]) -> list[ExampleOutcome]:
    """Decide every example of the file at `path`. InvalidInput, with all its faults, if it cannot be read."""
    operations = list(operations)
    known: dict[str, AnyAction] = {operation.name: operation for operation in operations} | dict(IMPLIED)
    faults: list[Fault] = []
    setting, examples = _read(path, faults)
    policies = _policy_texts(path, setting, faults)
    _check_policies(policies, operations, faults)
    for number, example in examples.items():
        _check_example(f"{path} example {number}", example, known, faults)
    if faults:
        raise InvalidInput(f"{path} has {len(faults)} fault{'s' * (len(faults) != 1)}", faults=faults)
    engine = PolicyEngine(operations, policies)
    return [_decide(engine, number, each, known[each.action]) for number, each in examples.items()]


def _read(path: Path, faults: list[Fault]) -> tuple[ExampleFile, dict[int, PolicyExample]]:
    """Return what can be parsed of the file; append a fault for the rest."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        faults.append(Fault(where=str(path), allowed=f"TOML ({error})"))
        return ExampleFile(), {}
    tables = document.pop("example", [])
    if not isinstance(tables, list) or not tables:
        faults.append(Fault(where=str(path), given="no example", allowed="one [[example]] or more"))
        tables = []
    setting = _validated(ExampleFile, document, str(path), faults) or ExampleFile()
    read = {
        number: _validated(PolicyExample, table, f"{path} example {number}", faults)
        for number, table in enumerate(tables, 1)
    }
    return setting, {number: example for number, example in read.items() if example is not None}


M = TypeVar("M", bound=BaseModel)


def _validated(kind: type[M], value: Any, where: str, faults: list[Fault]) -> M | None:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults += [_fault(where, dict(found)) for found in error.errors(include_url=False)]
        return None


def _fault(where: str, found: Mapping[str, Any]) -> Fault:
    return Fault(
        where=f"{where} {'.'.join(map(str, found['loc']))}",
        given=None if found["type"] == "missing" else shorten(found["input"]),
        allowed=found["msg"].removeprefix("Value error, "),
        fix={"missing": "give this field", "extra_forbidden": "remove this field"}.get(found["type"]),
    )


def _policy_texts(path: Path, setting: ExampleFile, faults: list[Fault]) -> list[PolicyText]:
    """The policies that the file names."""
    confined_to = None if setting.workspace == ROOT else setting.workspace
    texts: list[PolicyText] = []
    for pattern in setting.policies:
        found = [] if Path(pattern).is_absolute() else sorted(path.parent.glob(pattern))
        if not found:
            allowed = "the policy files, relative to this file"
            faults.append(Fault(where=f"{path} policies", given=pattern, allowed=allowed))
        for file in found:
            try:
                texts.append(PolicyText(file.name, file.read_text(), confined_to))
            except (OSError, UnicodeDecodeError) as error:
                faults.append(Fault(where=str(file), allowed=f"Cedar ({error})"))
    return texts


def _check_policies(
    policies: Sequence[PolicyText], operations: Iterable[Operation], faults: list[Fault]
) -> None:
    engine = PolicyEngine(operations)
    for policy in policies:
        try:
            engine.confined(policy)
        except PolicyInvalid as error:
            faults += error.faults


def _check_example(
    where: str, example: PolicyExample, known: Mapping[str, AnyAction], faults: list[Fault]
) -> None:
    """An action that there is, on something that it is performed on, with attributes that it has."""
    operation = known.get(example.action)
    if operation is None:
        near = get_close_matches(example.action, known, n=1)
        fix = f'action = "{near[0]}"' if near else None
        allowed = "an action; falaj policies schema lists them"
        faults.append(Fault(where=f"{where} action", given=example.action, allowed=allowed, fix=fix))
        return
    kinds = resource_kinds(operation, kinds_of(known.values()))
    if _kind(example, operation) not in kinds:
        given = example.resource.kind or "nothing"
        faults.append(Fault(where=f"{where} resource.kind", given=given, allowed=", ".join(kinds)))
    has = operation.context if isinstance(operation, ImpliedAction) else {}
    for name, value in example.context.items():
        if type(value) is not type(has.get(name)):
            allowed = ", ".join(f"{each} ({_KINDS[type(default)]})" for each, default in has.items())
            given = f"{name} = {value}"
            faults.append(Fault(where=f"{where} context", given=given, allowed=allowed or "no attributes"))


def _decide(
    engine: PolicyEngine, number: int, example: PolicyExample, operation: AnyAction
) -> ExampleOutcome:
    principal = PrincipalFacts(
        id=example.who,
        name=example.who,
        kind=example.kind,
        groups=example.groups,
        roles=tuple((place, role) for place, held in example.roles.items() for role in held),
    )
    resource = _resource(example, operation)
    decision = engine.decide(
        principal, example.action, resource, origin=example.origin, context=example.context
    )
    got: Literal["allow", "deny"] = "allow" if decision.allowed else "deny"
    return ExampleOutcome(
        number=number,
        what=_words(example, resource),
        expected=example.expect,
        got=got,
        rule=decision.rule,
        passed=got == example.expect and _is_by(decision, example.rule),
    )


def _resource(example: PolicyExample, operation: AnyAction) -> StoredObject:
    given = example.resource
    kind = _kind(example, operation)
    place = (
        ROOT
        if operation.resource == "platform" or kind in PLATFORM_SCOPED_KINDS
        else ObjectId(given.workspace)
    )
    name = place if kind == "workspace" else given.name or kind
    return StoredObject(
        id=ObjectId(name),
        workspace=ROOT if kind == "workspace" else place,
        kind=kind,
        name=name,
        owner=PrincipalId(given.owner),
        zone=given.zone,
        label=Label(only=given.only, classes=given.classes),
        created_at=datetime(1970, 1, 1, tzinfo=UTC),
    )


def _kind(example: PolicyExample, operation: AnyAction) -> str:
    of_action = {"platform": "workspace", "object": ""}.get(operation.resource, operation.resource)
    return example.resource.kind or of_action


def _is_by(decision: Decision, rule: str | None) -> bool:
    return rule is None or rule in decision.rule.split(", ")


def _words(example: PolicyExample, resource: StoredObject) -> str:
    held = [f"{' and '.join(roles)} in {place}" for place, roles in example.roles.items()]
    who = f"{example.who} ({'; '.join(held)})" if held else example.who
    place = "" if resource.kind == "workspace" else f" in {resource.workspace}"
    by = f", by {example.rule}" if example.rule else ""
    return f"{who}: {example.action} on {resource.address}{place}{by}"
