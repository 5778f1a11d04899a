"""Lineage under custom policies: each object is hidden or shown by the rules for that object, not for its workspace."""

from __future__ import annotations

import pytest

from falaj.governance.lineage.service import HIDDEN
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

CLOSED = """
@id("closed") forbid (principal, action == Action::"objects.show", resource)
when { principal.name == "dana" && resource.name == "plans" };
"""
OPENED = """
@id("opened") permit (principal, action == Action::"objects.show", resource)
when { principal.name == "dana" && resource.name == "plans" };
"""
IRRELEVANT = """
@id("other") forbid (principal, action == Action::"objects.show", resource)
when { principal.name == "somebody-else" };
"""


@pytest.fixture
def dana(light_platform: OwnPlatform) -> Caller:
    """Make plans and notes → draft (all in the workspace secret) → summary; return Dana, who may see summary."""
    light_platform.workspaces.create("secret")
    for name in ("plans", "notes"):
        light_platform.put(name, b"x", workspace="secret", zone="frankfurt")
    light_platform.put("draft", b"x", workspace="secret", sources=("secret/blob:plans", "secret/blob:notes"))
    light_platform.put("summary", b"x", sources=("secret/blob:draft",))
    return light_platform.join("dana", Role.VIEWER)


def seen(light_platform: OwnPlatform, caller: Caller) -> dict[int, list[tuple[str, str | None]]]:
    """Return names and zones of the objects that `caller` finds above summary, by depth."""
    found: dict[int, list[tuple[str, str | None]]] = {}
    with acting_as(caller):
        for node in light_platform.lineage.graph("blob:summary"):
            if node.kind != "operation":
                found.setdefault(node.depth, []).append((node.name, node.zone))
    return {depth: sorted(rows, key=str) for depth, rows in found.items()}


def test_one_object_of_a_workspace_is_hidden(light_platform: OwnPlatform, dana: Caller) -> None:
    light_platform.workspaces.grant("secret", "dana", role=Role.VIEWER)
    before = seen(light_platform, dana)

    light_platform.policies.publish("closed", text=CLOSED, workspace="secret")

    notes, plans, draft = ("notes", "frankfurt"), ("plans", "frankfurt"), ("draft", "local")
    assert before == {0: [("summary", "local")], -2: [draft], -4: [notes, plans]}
    assert seen(light_platform, dana) == before | {-4: [(HIDDEN, None), notes]}


def test_one_object_of_a_hidden_workspace_is_shown(light_platform: OwnPlatform, dana: Caller) -> None:
    light_platform.policies.publish("opened", text=OPENED, workspace="secret")

    found = seen(light_platform, dana)

    assert found[-4] == [(HIDDEN, None), ("plans", "frankfurt")]
    assert found[-2] == [(HIDDEN, None)]


@pytest.mark.slow
def test_a_policy_about_others_changes_nothing(light_platform: OwnPlatform, dana: Caller) -> None:
    before = seen(light_platform, dana)

    light_platform.policies.publish("other", text=IRRELEVANT, workspace="secret")

    assert seen(light_platform, dana) == before
    assert before[-4] == [(HIDDEN, None), (HIDDEN, None)]


@pytest.mark.slow
@pytest.mark.parametrize("text", [CLOSED, OPENED, IRRELEVANT])
def test_a_deleted_object_is_hidden_as_it_was(light_platform: OwnPlatform, dana: Caller, text: str) -> None:
    light_platform.policies.publish("rule", text=text, workspace="secret")
    before = seen(light_platform, dana)

    light_platform.blobs.delete("secret/plans")

    assert seen(light_platform, dana) == before


@pytest.mark.slow
def test_the_hidden_name_is_nowhere_in_the_graph(light_platform: OwnPlatform, dana: Caller) -> None:
    light_platform.workspaces.grant("secret", "dana", role=Role.VIEWER)
    light_platform.policies.publish("closed", text=CLOSED, workspace="secret")

    with acting_as(dana):
        graph_json = "".join(node.model_dump_json() for node in light_platform.lineage.graph("blob:summary"))

    assert "plans" not in graph_json
    assert "notes" in graph_json
