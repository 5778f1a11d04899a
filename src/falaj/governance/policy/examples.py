"""Example decisions in a file, so that policies can be tested without a platform.

    policies = ["*.cedar"]              # beside this file; they hold everywhere,
    workspace = "risk"                  # or, as when they are published, in this workspace only

    [[example]]
    who = "sara"
    roles = {risk = ["developer"]}      # by workspace; "platform" stands for every workspace
    groups = ["analysts"]
    action = "blob.upload"
    resource = {kind = "workspace", workspace = "risk", only = ["AE"], classes = ["personal"]}
    expect = "allow"
    rule = "role.developer"             # the rule that must say so; may be left out

A workspace, a user and a group go by their names here, where policies in force know them by id.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from falaj.errors import Fault, InvalidInput, PolicyInvalid, shorten
from falaj.governance.operations import Operation
from falaj.governance.policy.engine import PolicyEngine, PolicyText, PrincipalFacts
from falaj.governance.policy.schema import kinds_of, resource_kinds
from falaj.records.identity import PrincipalKind, Role
from falaj.records.names import ROOT, DataClass, Jurisdiction, ObjectId, PrincipalId
from falaj.records.objects import StoredObject
from falaj.records.policy import Decision, ExampleOutcome
from falaj.records.record import Record
from falaj.records.residency import Label

OF_THE_PLATFORM = {"user", "service", "group", "token"}
"""Kinds that lie in no workspace."""


class Resource(Record):
    """What is acted on; unless said, it is of the kind that the action takes, and lies in the workspace `default`."""

    kind: str | None = None
    workspace: str = "default"
    name: str | None = None
    owner: str = ""
    zone: str | None = None
    only: frozenset[Jurisdiction] | None = None
    classes: frozenset[DataClass] = frozenset()


class Example(Record):
    """Who does what, and what the rules should say."""

    who: str = Field(min_length=1)
    kind: PrincipalKind = "user"
    roles: dict[str, tuple[Role, ...]] = {}
    groups: tuple[str, ...] = ()
    action: str
    resource: Resource = Resource()
    origin: str = "local"
    expect: Literal["allow", "deny"]
    rule: str | None = None


class ExampleFile(Record):
    """A file of examples, and the policies that they are about."""

    policies: tuple[str, ...] = ()
    workspace: str | None = None
    example: tuple[Example, ...] = Field(min_length=1)


def run_examples(path: Path, operations: Iterable[Operation]) -> list[ExampleOutcome]:
    """Decide every example of the file at `path`. InvalidInput, with all its faults, if it cannot be read."""
    known = {operation.name: operation for operation in operations}
    examples, faults = _read(path)
    policies: list[PolicyText] = []
    if examples is not None:
        policies, unread = _policy_texts(path, examples)
        faults += [*unread, *_unfit(policies, known), *_impossible(path, examples.example, known)]
    if faults or examples is None:
        count = f"{len(faults)} fault{'s' * (len(faults) != 1)}"
        raise InvalidInput(f"{path} has {count}", faults=faults)
    engine = PolicyEngine(known.values(), policies)
    return [
        _decide(engine, number, example, known[example.action])
        for number, example in enumerate(examples.example, 1)
    ]


def _read(path: Path) -> tuple[ExampleFile | None, list[Fault]]:
    try:
        return ExampleFile.model_validate(tomllib.loads(path.read_text())), []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return None, [Fault(where=str(path), allowed=f"TOML ({error})")]
    except ValidationError as error:
        return None, [_fault(path, dict(found)) for found in error.errors(include_url=False)]


def _fault(path: Path, found: dict[str, Any]) -> Fault:
    match found["loc"]:
        case ("example", int(index), *inner):
            where = _at(path, index + 1, ".".join(map(str, inner)))
        case location:
            where = f"{path} {'.'.join(map(str, location))}"
    return Fault(
        where=where.rstrip(),
        given=None if found["type"] == "missing" else shorten(found["input"]),
        allowed=found["msg"].removeprefix("Value error, "),
        fix={"missing": "give this field", "extra_forbidden": "remove this field"}.get(found["type"]),
    )


def _at(path: Path, number: int, field: str = "") -> str:
    return f"{path} example {number} {field}".rstrip()


def _policy_texts(path: Path, examples: ExampleFile) -> tuple[list[PolicyText], list[Fault]]:
    """The policies that the file names, and its patterns that find none."""
    texts: list[PolicyText] = []
    faults: list[Fault] = []
    for pattern in examples.policies:
        found = [] if Path(pattern).is_absolute() else sorted(path.parent.glob(pattern))
        if not found:
            faults.append(
                Fault(where=f"{path} policies", given=pattern, allowed="policy files beside this file")
            )
        for file in found:
            try:
                texts.append(PolicyText(file.name, file.read_text(), _workspace_id(examples.workspace)))
            except (OSError, UnicodeDecodeError) as error:
                faults.append(Fault(where=str(file), allowed=f"Cedar text ({error})"))
    return texts, faults


def _unfit(policies: Sequence[PolicyText], known: dict[str, Operation]) -> list[Fault]:
    """What is wrong with the policies themselves."""
    engine = PolicyEngine(known.values())
    faults: list[Fault] = []
    for policy in policies:
        try:
            engine.confined(policy)
        except PolicyInvalid as error:
            faults += error.faults
    return faults


def _impossible(path: Path, examples: Sequence[Example], known: dict[str, Operation]) -> list[Fault]:
    """Examples of actions that there are not, or on things that they are not performed on."""
    faults = []
    for number, example in enumerate(examples, 1):
        operation = known.get(example.action)
        if operation is None:
            allowed = ", ".join(sorted(known))
            faults.append(Fault(where=_at(path, number, "action"), given=example.action, allowed=allowed))
            continue
        kinds = resource_kinds(operation, kinds_of(known.values()))
        if _kind(example, operation) not in kinds:
            given = example.resource.kind or "nothing"
            where = _at(path, number, "resource.kind")
            faults.append(Fault(where=where, given=given, allowed=" or ".join(kinds), fix="say which kind"))
    return faults


def _decide(engine: PolicyEngine, number: int, example: Example, operation: Operation) -> ExampleOutcome:
    principal = PrincipalFacts(
        id=example.who,
        name=example.who,
        kind=example.kind,
        groups=example.groups,
        roles=tuple((place, role) for place, held in example.roles.items() for role in held),
    )
    resource = _resource(example, operation)
    decision = engine.decide(principal, example.action, resource, origin=example.origin)
    got: Literal["allow", "deny"] = "allow" if decision.allowed else "deny"
    return ExampleOutcome(
        number=number,
        what=_words(example, resource),
        expected=example.expect,
        got=got,
        rule=decision.rule,
        passed=got == example.expect and _is_by(decision, example.rule),
    )


def _resource(example: Example, operation: Operation) -> StoredObject:
    given = example.resource
    kind = _kind(example, operation)
    place = ROOT if operation.resource == "platform" or kind in OF_THE_PLATFORM else ObjectId(given.workspace)
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


def _kind(example: Example, operation: Operation) -> str:
    wanted = {"platform": "workspace", "object": ""}.get(operation.resource, operation.resource)
    return example.resource.kind or wanted


def _workspace_id(name: str | None) -> str | None:
    return None if name in (None, ROOT) else name


def _is_by(decision: Decision, rule: str | None) -> bool:
    return rule is None or rule in decision.rule.split(", ")


def _words(example: Example, resource: StoredObject) -> str:
    held = [f"{' and '.join(roles)} in {place}" for place, roles in example.roles.items()]
    who = f"{example.who} ({'; '.join(held)})" if held else example.who
    place = "" if resource.kind == "workspace" else f" in {resource.workspace}"
    by = f", by {example.rule}" if example.rule else ""
    return f"{who}: {example.action} on {resource.address}{place}{by}"
