"""Governance: audit with proofs, residency, policies, keys, people, groups, tokens and webhooks."""

from __future__ import annotations

from datetime import UTC, timedelta
from pathlib import Path

import pytest

import falaj as fj
from console_records import HOSTILE, NOON, machine
from falaj.apps.console.charts.bars import Bar
from falaj.apps.console.pages.governance.audit import AuditQuery, audit_view, check_view
from falaj.apps.console.pages.governance.groups import groups_view
from falaj.apps.console.pages.governance.keys import keys_view
from falaj.apps.console.pages.governance.people import RoleMark, people_view
from falaj.apps.console.pages.governance.policies import action_names, policies_view, who_view
from falaj.apps.console.pages.governance.proof import entry_view
from falaj.apps.console.pages.governance.residency import ResidencyRecords, residency_view
from falaj.apps.console.pages.governance.tokens import tokens_view
from falaj.apps.console.pages.governance.webhooks import WebhookRecords, webhooks_view
from falaj.apps.console.times import Times
from falaj.records.governance.audit import AuditEntry, LogCheck, PublicKey
from falaj.records.governance.events import UndeliveredEvent, Webhook, WebhookState
from falaj.records.governance.identity import Grant, Group, Principal, Role, Token
from falaj.records.governance.keys import DataKeyInfo
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import AllowedPrincipal, Policy
from falaj.records.governance.residency import Label, Zone

TIMES = Times(UTC)


def entry(seq: int, **fields: object) -> AuditEntry:
    given = {
        "seq": seq,
        "at": NOON,
        "caller": "dana",
        "action": "blobs.read",
        "outcome": "done",
        "objects": ("blob_1",),
        "workspace": "workspace_1",
        "origin": "remote:127.0.0.1",
        "rule": "role.developer",
        "input": "",
    }
    return AuditEntry.model_validate({**given, **fields})


# -------------------------------------------------------------------------------------------- audit


def test_the_search_is_in_the_address() -> None:
    query = AuditQuery("dana", "models.promote", "denied", "all", "120")

    assert AuditQuery.of(query.fields()) == query
    assert AuditQuery.of({"outcome": "?", "scope": "?", "before": "-1"}) == AuditQuery()
    assert AuditQuery.of({"before": "9" * 40}).before == ""


def test_an_entry_leads_to_its_proof_and_says_how_many_calls_it_stands_for() -> None:
    shown = audit_view(
        [entry(7, count=1200, objects=("a", "b", "c", "d"), error="policy.denied")],
        following=None,
        times=TIMES,
        base="/w/default/governance/audit",
    )

    row = shown.rows[0]
    assert row.target == "/w/default/governance/audit/7"
    assert row.cells["action"] == "blobs.read ×1,200"
    assert row.cells["objects"] == "a, b …"
    assert row.cells["rule"] == "role.developer (policy.denied)"


def test_a_verdict_names_what_is_damaged() -> None:
    sound = check_view(LogCheck(finished=True, ok=True, entries=1000, of=1000, heads=3, unsigned_tail=2))
    damaged = check_view(LogCheck(finished=True, entries=1, of=1, problems=("Entry 4 was edited.",)))

    assert (sound.word, sound.tone) == ("sound", "good")
    assert sound.figures == "1,000 entries under 3 signed heads; 2 at the end are not signed yet"
    assert (damaged.word, damaged.tone, damaged.problems) == ("DAMAGED", "bad", ("Entry 4 was edited.",))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> fj.Platform:
    folder: Path = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        opened = fj.open(folder / "home")
        for name in ("one", "two", "three"):
            opened.put(name, name.encode())
        yield opened
        opened.close()


@pytest.mark.parametrize("back", [0, 1, 2, 3, 7])
def test_the_path_of_a_real_entry_is_folded_up_to_the_signed_root(platform: fj.Platform, back: int) -> None:
    seq = platform.audit.list(limit=50).items[back].seq
    proof, growth = platform.audit.inclusion_proof(seq), platform.audit.consistency_proof(seq + 1)

    shown = entry_view(proof, growth, platform.audit.key(), times=TIMES)

    assert shown.problems == shown.growth_problems == ()
    assert (shown.steps[-1].node if shown.steps else shown.leaf) == shown.root == proof.head.root
    assert "is in the log" in shown.inclusion[0]
    assert "only grew" in shown.growth[0]


def test_an_entry_that_was_edited_is_told(platform: fj.Platform) -> None:
    seq = platform.audit.list(action="blobs.commit", limit=1).items[0].seq
    proof, growth = platform.audit.inclusion_proof(seq), platform.audit.consistency_proof(seq + 1)
    edited = proof.model_copy(update={"entry": {**proof.entry, "caller": "somebody else"}})

    shown = entry_view(edited, growth, platform.audit.key(), times=TIMES)

    assert shown.problems
    assert shown.steps[-1].node != shown.root


def test_a_head_of_another_key_is_told(platform: fj.Platform) -> None:
    seq = platform.audit.list(limit=1).items[0].seq
    proof, growth = platform.audit.inclusion_proof(seq), platform.audit.consistency_proof(seq + 1)
    other = platform.audit.key().model_copy(update={"ed25519": "11" * 32})

    shown = entry_view(proof, growth, other, times=TIMES)

    assert shown.problems
    assert shown.growth_problems


# ---------------------------------------------------------------------------------------- residency


def stored(name: str, kind: str, zone: str | None, **fields: object) -> StoredObject:
    given = {
        "id": f"{kind}_{name}",
        "workspace": "workspace_1",
        "kind": kind,
        "name": name,
        "owner": "user_1",
        "zone": zone,
        "created_at": NOON,
    }
    return StoredObject.model_validate({**given, **fields})


def test_objects_are_counted_by_kind_and_zone() -> None:
    zones = (
        Zone(name="abu-dhabi", jurisdiction="AE", default=True),
        Zone(name="frankfurt", jurisdiction="DE"),
    )
    label = Label(only=frozenset({"AE"}), classes=frozenset({"personal"}))
    objects = (
        stored("a", "blob", "abu-dhabi", label=label, own_label=label),
        stored("b", "blob", "frankfurt"),
        stored("c", "model_version", "abu-dhabi", label=label),
        stored("d", "run", None),
    )

    shown = residency_view(
        ResidencyRecords(zones, objects, [machine("dgx")], refused=[entry(4, error="residency.denied")]),
        times=TIMES,
    )

    assert shown.names == ("abu-dhabi (AE)", "frankfurt (DE)")
    assert shown.bars == (Bar("blob", (1, 1)), Bar("model version", (1, 0)))
    assert (shown.zones[0].cells["objects"], shown.zones[0].cells["nodes"]) == ("2", "dgx")
    assert [(row.cells["name"], row.cells["own"]) for row in shown.restricted] == [
        ("a", "its own label"),
        ("c", "its sources, by lineage"),
    ]
    assert shown.restricted[0].cells["label"] == "only AE; personal"
    assert shown.refused is not None
    assert shown.refused[0].cells["caller"] == "dana"


def test_who_may_not_read_the_log_sees_no_refusals() -> None:
    assert residency_view(ResidencyRecords(()), times=TIMES).refused is None


# ----------------------------------------------------------------------------------------- policies


def test_the_explorer_names_everyone_and_the_rule() -> None:
    found = [AllowedPrincipal(principal=HOSTILE, kind="user", rule="role.admin")]

    shown = who_view(found, "models.promote", "model:churn")

    assert shown.sentence == "1 principal may perform models.promote on model:churn."
    assert shown.rows[0].cells == {"principal": HOSTILE, "kind": "user", "rule": "role.admin"}


def test_actions_come_from_the_schema_without_roles(platform: fj.Platform) -> None:
    names = action_names(platform.policies.schema().cedar)

    assert {"jobs.submit", "policies.who_can"} <= {*names}
    assert "viewer" not in names


def test_a_policy_is_shown_with_its_version() -> None:
    policy = Policy(
        id="policy_1", workspace="claims", name="no-export", version=2, text=HOSTILE, published_at=NOON
    )

    line = policies_view([policy], TIMES).policies[0]

    assert (line.where, line.text) == ("in claims, version 2, published 2026-11-17 12:00:00", HOSTILE)


# ------------------------------------------------------------------------ keys, people, groups, tokens


def test_destroyed_keys_name_no_root() -> None:
    living = DataKeyInfo(workspace="a", version=1, root="root-2", created_at=NOON)
    gone = DataKeyInfo(workspace="b", version=1, root="root-1", created_at=NOON, destroyed_at=NOON)

    shown = keys_view([living, gone], PublicKey(log_id="log_1", key="k", ed25519="00"), TIMES)

    assert shown.roots == ("root-2",)
    assert [row.cells["state"] for row in shown.rows] == ["ready", "destroyed"]


def person(name: str, kind: str = "user", *, disabled: bool = False) -> Principal:
    given = {"id": f"{kind}_{name}", "name": name, "kind": kind, "disabled": disabled, "created_at": NOON}
    return Principal.model_validate(given)


def test_people_have_the_roles_of_the_workspace_and_of_the_platform() -> None:
    here = [
        Grant(workspace="claims", subject="dana", role=Role.DEVELOPER),
        Grant(workspace="claims", subject="risk-team", role=Role.VIEWER),
    ]
    everywhere = [Grant(workspace="platform", subject="dana", role=Role.AUDITOR)]

    shown = people_view([person("dana", disabled=True), person("ci", "service")], here, everywhere, TIMES)

    assert shown.users[0].roles == (RoleMark("developer", False), RoleMark("auditor", True))
    assert shown.users[0].is_disabled
    assert [line.name for line in shown.services] == ["ci"]
    assert shown.groups == (("risk-team", "viewer"),)


def test_a_disabled_person_cannot_be_added_to_a_group() -> None:
    shown = groups_view(
        [Group(id="group_1", name="risk", members=("zoe", "dana"))],
        [person("zoe"), person("off", disabled=True)],
    )

    assert shown.groups[0].members == ("dana", "zoe")
    assert shown.people == ("zoe",)


def token(name: str, **fields: object) -> Token:
    given = {
        "id": f"token_{name}",
        "principal": "dana",
        "purpose": name,
        "workspace": None,
        "actions": None,
        "created_at": NOON,
        "expires_at": NOON + timedelta(days=1),
    }
    return Token.model_validate({**given, **fields})


def test_valid_tokens_come_first() -> None:
    tokens = [
        token("revoked", revoked_at=NOON),
        token("expired", expires_at=NOON),
        token("limited", actions=("a.b", "c.d", "e.f", "g.h", "i.j"), workspace="claims"),
    ]

    shown = tokens_view(tokens, TIMES, now=NOON)

    assert [(line.purpose, line.state) for line in shown.lines] == [
        ("limited", "valid"),
        ("revoked", "revoked"),
        ("expired", "expired"),
    ]
    assert shown.lines[0].scope == "claims, a.b, c.d, e.f, g.h and 1 more"
    assert shown.valid == 1


def test_a_failing_webhook_shows_its_error_and_what_was_given_up() -> None:
    hook = Webhook(
        id="webhook_1",
        name=HOSTILE,
        url="https://hooks.example.com/x",
        types=("jobs.*",),
        state=WebhookState.FAILING,
        delivered=5,
        waiting=2,
        given_up=1,
        error="503",
        created_at=NOON,
    )
    lost = UndeliveredEvent(
        event="evt_1",
        type="falaj.jobs.finish",
        subject="job_1",
        at=NOON,
        attempts=8,
        error=HOSTILE,
        given_up_at=NOON,
        redelivering=False,
    )

    line = webhooks_view([WebhookRecords(hook, [lost], ["webhooks.test"])], TIMES).webhooks[0]

    assert (line.name, line.tone, line.may) == (HOSTILE, "bad", frozenset({"webhooks.test"}))
    assert dict(line.facts)["Error"] == "503"
    assert line.undelivered[0].cells["error"] == HOSTILE
