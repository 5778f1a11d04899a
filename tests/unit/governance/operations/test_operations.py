"""An operation is declared once, and checked, performed and recorded atomically."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import pytest
from pydantic import Field

from falaj.assembly.platform import local_user
from falaj.errors import (
    AlreadyExists,
    Denied,
    FalajError,
    Internal,
    InvalidInput,
    NotFound,
    Unauthenticated,
)
from falaj.governance import objects as objects_store
from falaj.governance.lineage import graph
from falaj.governance.operations import events, idempotency
from falaj.governance.operations.call import current_call
from falaj.governance.operations.caller import acting_as, on_terms, start_thread
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, ResponseShape, operation, operations_of
from falaj.governance.tables import activities, lineage_edges, objects
from falaj.governance.tables import events as events_table
from falaj.governance.tables import idempotency as idempotency_table
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import AnyRef, Name, WorkspaceRef
from platforms import OwnPlatform


class Probes:
    """A service of this test."""

    def __init__(self, gate: Gate, dependency: Any = None) -> None:
        self.gate = gate
        self.dependency = dependency

    @operation("probe.make", resource="workspace")
    def make(
        self,
        name: Name,
        *,
        workspace: WorkspaceRef | None = None,
        size: Annotated[int, Field(ge=1)] = 7,
        sources: tuple[AnyRef, ...] = (),
    ) -> StoredObject:
        """Make a probe. The rest of this text is no summary."""
        return current_call().create("probe", name, workspace=current_call().target)

    @operation("probe.mislead", resource="platform")
    def mislead(self) -> int:
        """Add to the audit entry what the gate says itself."""
        current_call().details.update(outcome="denied", caller="nobody", colour="red")
        return 1

    @operation("probe.call_other", resource="platform", mode=Mode.READ, allow="anyone")
    def call_other(self) -> int:
        """Call an operation inside an operation."""
        return len(self.dependency.list().items)


MAKE = operations_of(Probes)["make"]


@pytest.fixture
def probes(platform: OwnPlatform) -> Probes:
    return Probes(platform.gate_with(Probes), dependency=platform.users)


# ---------------------------------------------------------------------------------------- declaration


def test_a_declaration_gives_route_model_and_references() -> None:
    assert (MAKE.group, MAKE.verb, MAKE.path) == ("probe", "make", "/api/v1/probe/make")
    assert MAKE.summary == "Make a probe. The rest of this text is no summary."
    assert list(MAKE.input.model_fields) == ["name", "workspace", "size", "sources"]
    assert MAKE.shape is ResponseShape.RECORD
    assert MAKE.subject == "workspace"
    assert set(MAKE.references) == {"workspace", "sources"}
    assert MAKE.allow == {Role.DEVELOPER}


def test_defaults_come_from_the_signature() -> None:
    given = MAKE.check({"name": "x"})

    assert given.model_dump() == {"name": "x", "workspace": None, "size": 7, "sources": ()}


def test_all_faults_of_an_input_are_named_at_once() -> None:
    wrong = {"name": "Not A Name", "size": 0, "workspace": 5, "colour": "red"}

    with pytest.raises(InvalidInput) as refused:
        MAKE.check(wrong)

    assert sorted(fault.where for fault in refused.value.faults) == ["colour", "name", "size", "workspace"]
    assert "4 faults" in refused.value.message
    assert next(f.fix for f in refused.value.faults if f.where == "colour") == "remove this field"


def test_json_is_not_coerced() -> None:
    with pytest.raises(InvalidInput) as refused:
        MAKE.check_json(b'{"name": "x", "size": "7"}')

    assert [fault.where for fault in refused.value.faults] == ["size"]


def test_of_a_long_list_the_first_fault_is_named() -> None:
    """Each fault takes 1.5 KB: a list of a megabyte could have half a million."""
    with pytest.raises(InvalidInput) as refused:
        MAKE.check_json(b'{"size": 0, "sources": [%s 1]}' % (b"1," * 100_000))

    assert sorted(fault.where for fault in refused.value.faults) == ["name", "size", "sources.0"]


def test_a_long_list_that_is_valid_is_accepted() -> None:
    sources = [f"blob-{number}" for number in range(10_000)]

    given = MAKE.check_json(json.dumps({"name": "x", "sources": sources}).encode())

    assert given == MAKE.check({"name": "x", "sources": tuple(sources)})


def test_of_very_many_faults_the_number_is_told() -> None:
    fields = b",".join(b'"field_%d": 1' % number for number in range(20_000))

    with pytest.raises(InvalidInput, match="20001 faults") as refused:
        MAKE.check_json(b"{" + fields + b"}")

    assert len(refused.value.faults) == 1


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"{", b"\xff", b"{}"])
def test_malformed_json_input_is_invalid(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        MAKE.check_json(body)


def test_an_unknown_argument_is_refused_with_the_known_ones(light_platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput, match="colour") as refused:
        light_platform.workspaces.create("x", colour="red")  # type: ignore[call-arg]

    assert refused.value.faults[0].allowed == "name"


def test_a_text_that_a_database_cannot_hold_is_invalid_or_finds_nothing(platform: OwnPlatform) -> None:
    acts = [
        lambda: platform.objects.list("blob", after="\x00"),
        lambda: platform.audit.list(workspace="platform", caller="\x00"),
        lambda: platform.users.list(after="a\x00b"),
    ]

    assert {error_of(act) for act in acts} <= {None, InvalidInput}


# ------------------------------------------------------------------------------------- caller, nesting


def test_without_a_caller_nothing_happens(platform: OwnPlatform) -> None:
    nobody = platform.again(as_owner=False)

    with pytest.raises(Unauthenticated):
        nobody.workspaces.create("x")

    assert "x" not in [row["name"] for row in platform.rows(objects)]


def test_an_operation_inside_an_operation_is_refused(probes: Probes) -> None:
    with pytest.raises(Internal) as refused:
        probes.call_other()

    assert "called inside probe.call_other" in str(refused.value.__cause__)


def test_the_next_operation_works_after_a_refused_one(probes: Probes) -> None:
    with pytest.raises(Internal):
        probes.call_other()

    assert probes.make("x").name == "x"


def test_a_thread_acts_for_the_caller_who_started_it(light_platform: OwnPlatform) -> None:
    dana = light_platform.join("dana", Role.VIEWER)
    seen: list[str] = []

    def ask() -> None:
        seen.append(light_platform.users.whoami().principal.name)

    with acting_as(dana):
        start_thread(ask, name="carried").join()

    assert seen == ["dana"]


def test_a_plain_thread_has_no_caller(light_platform: OwnPlatform) -> None:
    dana = light_platform.join("dana", Role.VIEWER)
    nobody = light_platform.again(as_owner=False)
    seen: list[type[FalajError] | None] = []

    def ask() -> None:
        seen.append(error_of(nobody.users.whoami))

    with acting_as(dana):
        plain = threading.Thread(target=ask)
        plain.start()
        plain.join()

    assert seen == [Unauthenticated]


# ----------------------------------------------------------------------------------------------- audit

Act = Callable[[OwnPlatform], Any]
CASES: dict[str, tuple[str, Act, type[FalajError] | None, str, str | None]] = {
    "done": ("owner", lambda p: p.workspaces.create("fresh"), None, "done", None),
    "read": ("owner", lambda p: p.workspaces.show("default"), None, "done", None),
    "denied": ("viewer", lambda p: p.workspaces.create("y"), Denied, "denied", "policy.denied"),
    "hidden": ("viewer", lambda p: p.workspaces.show("taken"), NotFound, "denied", "object.not_found"),
    "unknown": ("owner", lambda p: p.workspaces.show("nowhere"), NotFound, "failed", "object.not_found"),
    "failed": ("owner", lambda p: p.workspaces.create("taken"), AlreadyExists, "failed", "object.exists"),
    "invalid": (
        "owner",
        lambda p: p.workspaces.create("Not A Name"),
        InvalidInput,
        "failed",
        "input.invalid",
    ),
    "misuse": ("owner", lambda p: p.workspaces.create(), InvalidInput, "failed", "input.invalid"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_call_is_recorded_once_with_its_outcome(platform: OwnPlatform, case: str) -> None:
    who, act, expected, outcome, code = CASES[case]
    platform.workspaces.create("taken")
    vera = platform.join("vera", Role.VIEWER)
    before = len(platform.entries())

    with acting_as(vera) if who == "viewer" else nullcontext():
        raised = error_of(lambda: act(platform))

    (entry,) = platform.entries()[before:]
    assert raised is expected
    assert (entry["outcome"], entry.get("error"), entry["seq"]) == (outcome, code, before)
    assert (entry["caller"] == "vera") == (who == "viewer")


def test_an_operation_adds_to_its_entry_and_replaces_nothing_of_it(
    platform: OwnPlatform, probes: Probes
) -> None:
    probes.mislead()

    entry = platform.entries()[-1]
    whole = {"outcome": "done", "caller": local_user(), "action": "probe.mislead", "colour": "red"}
    assert entry | whole == entry


def test_an_entry_names_caller_action_object_and_rule(platform: OwnPlatform) -> None:
    with on_terms(request="req-1"):
        made = platform.workspaces.create("team-a")

    entry = platform.entries()[-1]
    whole = {"caller": local_user(), "action": "workspaces.create", "origin": "local", "rule": "role.admin"}
    assert entry | whole | {"request": "req-1", "objects": ["platform"], "created": [made.id]} == entry
    assert entry["at"] == platform.clock().isoformat()


def error_of(act: Callable[[], Any]) -> type[FalajError] | None:
    try:
        act()
    except FalajError as error:
        return type(error)
    return None


# -------------------------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize(
    "step", [(graph, "record"), (events, "emit"), (idempotency, "remember")], ids=lambda s: s[1]
)
def test_an_internal_error_rolls_everything_back(
    platform: OwnPlatform, probes: Probes, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    source = platform.put("source", b"bytes")
    tables = (objects, lineage_edges, activities, events_table, idempotency_table)
    before, logged = [platform.count(table) for table in tables], len(platform.entries())
    break_after(monkeypatch, *step)

    with pytest.raises(Internal) as refused, on_terms(key="once"):
        probes.make("probe", sources=(source.id,))

    assert "secret detail" not in str(refused.value)
    assert [platform.count(table) for table in tables] == before
    (entry,) = platform.entries()[logged:]
    assert (entry["action"], entry["outcome"], entry["error"]) == ("probe.make", "failed", "internal")
    assert "created" not in entry


def break_after(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Let `name` do its work, and then fail."""
    real = getattr(module, name)

    def broken(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(module, name, broken)


def test_what_does_not_exist_is_judged_like_what_is_hidden(
    platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of the answer tells them apart."""
    hidden = platform.put("hidden", b"x")
    sam = platform.join("sam", Role.DEVELOPER, workspace=platform.workspaces.create("own").name)
    authorizer, decided = platform.parts.gate.authorizer, list[str]()
    decide = authorizer.decide

    def noted(tx: Any, caller: Any, action: str, resource: Any) -> Any:
        decided.append(f"{action} on {resource.kind}")
        return decide(tx, caller, action, resource)

    monkeypatch.setattr(authorizer, "decide", noted)

    def judged(call: Callable[[], object]) -> list[str]:
        decided.clear()
        with acting_as(sam), pytest.raises(NotFound):
            call()
        return list(decided)

    def show(name: str) -> list[str]:
        return judged(lambda: platform.blobs.show(name))

    def refer_to(name: str) -> list[str]:
        return judged(lambda: platform.runs.start("tries", workspace="own", sources=(f"blob:{name}",)))

    for ask in (show, refer_to):
        expected = ask("hidden")
        assert expected[-1].endswith(" on blob")
        assert ask("nothing") == expected
    assert show(hidden.id) == show("blob_" + "0" * 26) == show("hidden")


def test_a_reference_that_is_given_many_times_is_resolved_once(
    probes: Probes, platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.put("source", b"x")
    resolved: list[str] = []
    resolve = objects_store.resolve

    def noted(tx: Any, reference: str, **more: Any) -> Any:
        resolved.append(reference)
        return resolve(tx, reference, **more)

    monkeypatch.setattr(objects_store, "resolve", noted)

    probes.make("p", sources=("blob:source",) * 4000)

    assert resolved.count("blob:source") == 1


def test_references_are_limited(probes: Probes) -> None:
    with pytest.raises(InvalidInput) as refused:
        probes.make("p", sources=("blob:a",) * 4097)

    assert refused.value.faults[0].where == "sources"
