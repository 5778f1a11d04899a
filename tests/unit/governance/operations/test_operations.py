"""An operation is declared once: checked, performed and recorded as one, or not at all."""

from __future__ import annotations

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
from falaj.governance.lineage import graph
from falaj.governance.operations import idempotency, outbox
from falaj.governance.operations.call import current_call
from falaj.governance.operations.caller import acting_as, on_terms, start_thread
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, ResponseShape, operation, operations_of
from falaj.governance.tables import activities, lineage_edges, objects
from falaj.governance.tables import idempotency as idempotency_table
from falaj.governance.tables import outbox as outbox_table
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import AnyRef, Name, WorkspaceRef
from platforms import OwnPlatform


class Probes:
    """A service of the test's own."""

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

    @operation("probe.call_neighbour", resource="platform", mode=Mode.READ, allow="anyone")
    def call_neighbour(self) -> int:
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


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"{", b"\xff", b"{}"])
def test_what_is_no_such_object_is_invalid(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        MAKE.check_json(body)


def test_an_unknown_argument_says_which_are_known(light_platform: OwnPlatform) -> None:
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
        probes.call_neighbour()

    assert "called inside probe.call_neighbour" in str(refused.value.__cause__)


def test_the_next_operation_works_after_a_refused_one(probes: Probes) -> None:
    with pytest.raises(Internal):
        probes.call_neighbour()

    assert probes.make("x").name == "x"


def test_a_thread_acts_for_whoever_started_it(light_platform: OwnPlatform) -> None:
    dana = light_platform.join("dana", Role.VIEWER)
    seen: list[str] = []

    def ask() -> None:
        seen.append(light_platform.users.whoami().principal.name)

    with acting_as(dana):
        start_thread(ask, name="carried").join()

    assert seen == ["dana"]


def test_a_plain_thread_acts_for_nobody(light_platform: OwnPlatform) -> None:
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


def test_an_entry_says_who_what_where_and_by_which_rule(platform: OwnPlatform) -> None:
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
    "step", [(graph, "record"), (outbox, "emit"), (idempotency, "remember")], ids=lambda s: s[1]
)
def test_a_fault_of_ours_rolls_everything_back(
    platform: OwnPlatform, probes: Probes, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    source = platform.put("source", b"bytes")
    tables = (objects, lineage_edges, activities, outbox_table, idempotency_table)
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
    """Let `name` do its work, and fail then."""
    real = getattr(module, name)

    def broken(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(module, name, broken)
