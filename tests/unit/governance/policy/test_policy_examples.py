"""Example decisions from a file: their format, and the faults of a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.governance.policy.examples import run_examples
from falaj.records.governance.policy import ExampleOutcome

FORBID = '@id("stays")\nforbid (principal, action == Action::"blobs.read", resource)\n'
FORBID += 'when { resource has jurisdictions && !resource.jurisdictions.contains("SA") };\n'


def run(folder: Path, text: str, **policies: str) -> list[ExampleOutcome]:
    for name, policy in policies.items():
        (folder / f"{name}.cedar").write_text(policy)
    (folder / "examples.toml").write_text(text)
    return run_examples(folder / "examples.toml", all_operations().values())


def decided(folder: Path, text: str, **policies: str) -> ExampleOutcome:
    (outcome,) = run(folder, text, **policies)
    return outcome


@pytest.mark.parametrize(
    ("roles", "action", "resource", "got", "rule"),
    [
        ('{risk = ["developer"]}', "blobs.upload", '{workspace = "risk"}', "allow", "role.developer"),
        ('{risk = ["developer"]}', "blobs.upload", '{workspace = "other"}', "deny", "default"),
        ('{platform = ["operator"]}', "blobs.read", '{workspace = "any"}', "allow", "role.operator"),
        ('{risk = ["viewer"]}', "blobs.upload", '{workspace = "risk"}', "deny", "default"),
        ('{platform = ["admin"]}', "workspaces.create", "{}", "allow", "role.admin"),
        ('{risk = ["admin"]}', "workspaces.create", "{}", "deny", "default"),
        ("{}", "users.whoami", '{name = "sara", owner = "sara"}', "allow", "owner"),
        ("{}", "users.whoami", '{name = "omar", owner = "omar"}', "deny", "default"),
        ("{}", "tokens.revoke", '{owner = "sara"}', "allow", "owner"),
        ("{}", "zones.list", "{}", "allow", "anyone"),
        (
            '{risk = ["viewer"]}',
            "objects.show",
            '{kind = "blob", workspace = "risk"}',
            "allow",
            "role.viewer",
        ),
    ],
)
def test_built_in_rules_decide(
    tmp_path: Path, roles: str, action: str, resource: str, got: str, rule: str
) -> None:
    text = f"""
        [[example]]
        who = "sara"
        roles = {roles}
        action = "{action}"
        resource = {resource}
        expect = "{got}"
        rule = "{rule}"
    """

    outcome = decided(tmp_path, text)

    assert (outcome.got, outcome.rule, outcome.passed) == (got, rule, True)


@pytest.mark.parametrize(("only", "got"), [('["AE"]', "deny"), ('["AE", "SA"]', "allow")])
def test_policies_beside_the_file_decide(tmp_path: Path, only: str, got: str) -> None:
    text = f"""
        policies = ["*.cedar"]
        [[example]]
        who = "sara"
        roles = {{risk = ["viewer"]}}
        action = "blobs.read"
        resource = {{workspace = "risk", only = {only}}}
        expect = "{got}"
    """

    assert decided(tmp_path, text, residency=FORBID).passed


def test_policies_may_hold_in_one_workspace(tmp_path: Path) -> None:
    text = """
        policies = ["residency.cedar"]
        workspace = "risk"
        [[example]]
        who = "sara"
        roles = {other = ["viewer"]}
        action = "blobs.read"
        resource = {workspace = "other", only = ["AE"]}
        expect = "allow"
    """

    assert decided(tmp_path, text, residency=FORBID).passed


def test_groups_and_kinds_of_callers(tmp_path: Path) -> None:
    policy = 'permit (principal in Group::"robots", action == Action::"blobs.read", resource)'
    policy += ' when { principal is Service && context.origin == "api" };'
    text = """
        policies = ["p.cedar"]
        [[example]]
        who = "loader"
        kind = "service"
        groups = ["robots"]
        origin = "api"
        action = "blobs.read"
        expect = "allow"
        [[example]]
        who = "sara"
        groups = ["robots"]
        origin = "api"
        action = "blobs.read"
        expect = "deny"
    """

    assert [outcome.passed for outcome in run(tmp_path, text, p=policy)] == [True, True]


def test_the_right_answer_by_the_wrong_rule_fails(tmp_path: Path) -> None:
    text = """
        [[example]]
        who = "sara"
        roles = {risk = ["admin"]}
        action = "blobs.upload"
        resource = {workspace = "risk"}
        expect = "allow"
        rule = "role.developer"
    """

    outcome = decided(tmp_path, text)

    assert (outcome.got, outcome.rule, outcome.passed) == ("allow", "role.admin", False)
    assert outcome.what == "sara (admin in risk): blobs.upload on workspace:risk, by role.developer"


def test_every_fault_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    text = """
        policies = ["nowhere*.cedar", "bad.cedar"]
        strange = 1
        [[example]]
        who = ""
        action = "blobs.read"
        expect = "maybe"
        [[example]]
        who = "sara"
        action = "blob.reed"
        expect = "deny"
        [[example]]
        who = "sara"
        action = "objects.show"
        expect = "deny"
        [[example]]
        who = "sara"
        roles = {risk = ["boss"]}
        action = "blobs.read"
        resource = {only = ["uae"]}
        expect = "deny"
    """

    with pytest.raises(InvalidInput) as raised:
        run(tmp_path, text, bad="permit (")

    where = [fault.where.removeprefix(f"{tmp_path}/examples.toml ") for fault in raised.value.faults]
    assert where == [
        "strange",
        "example 1 who",
        "example 1 expect",
        "example 4 roles.risk.0",
        "example 4 resource.only.0",
        "example 2 action",
        "example 3 resource.kind",
    ]


def test_faults_of_the_policies_are_named(tmp_path: Path) -> None:
    text = 'policies = ["nowhere*.cedar", "bad.cedar"]\n[[example]]\nwho = "a"\naction = "blob.reed"\nexpect = "deny"'

    with pytest.raises(InvalidInput) as raised:
        run(tmp_path, text, bad="permit (")

    faults = raised.value.faults
    assert [fault.where for fault in faults] == [
        f"{tmp_path}/examples.toml policies",
        "bad.cedar",
        f"{tmp_path}/examples.toml example 1 action",
    ]
    assert faults[0].given == "nowhere*.cedar"
    assert faults[2].fix == 'action = "blobs.read"'


@pytest.mark.parametrize(
    "text", ["", "x = [", "example = 3", "\x00", 'policies = ["/etc/*.cedar"]\n[[example]]\nwho="a"']
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput):
        run(tmp_path, text)
