"""Policies that name actions as they were called before: the error names them as they are called now."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from falaj.control.services import all_operations
from falaj.errors import PolicyInvalid
from falaj.governance.policy import renamed_actions
from falaj.governance.policy.engine import PolicyEngine, PolicyText
from falaj.governance.policy.renamed_actions import new_name
from platforms import make_platform

OLD = 'permit(principal, action in [Action::"blob.upload", Action::"jobs.settle"], resource);'


def test_the_old_and_the_new_name_of_each_action_are_told() -> None:
    with pytest.raises(PolicyInvalid) as refused:
        PolicyEngine(all_operations().values()).confined(PolicyText("file:old.cedar", OLD))

    renamed = {fault.given: fault.fix for fault in refused.value.faults if fault.fix}
    assert renamed == {
        'Action::"blob.upload"': 'write Action::"blobs.upload" for Action::"blob.upload"',
        'Action::"jobs.settle"': 'write Action::"jobs.finish" for Action::"jobs.settle"',
    }
    assert refused.value.faults[0].fix is not None


def test_an_action_that_never_was_has_no_new_name() -> None:
    text = 'permit(principal, action == Action::"blob.fly", resource);'

    with pytest.raises(PolicyInvalid, match="unrecognized action") as refused:
        PolicyEngine(all_operations().values()).confined(PolicyText("file:odd.cedar", text))

    assert {fault.fix for fault in refused.value.faults} == {None}


def test_a_policy_file_of_the_home_is_refused_with_the_new_names(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "old.cedar").write_text(OLD)

    with pytest.raises(PolicyInvalid, match=r'write Action::"blobs.upload" for Action::"blob.upload"'):
        make_platform(tmp_path, toml='policies = ["old.cedar"]')


def test_names_are_those_of_the_migration_that_renamed_what_the_database_holds() -> None:
    migration = import_module("falaj.drivers.sql.migrations.versions.0014_operation_names")

    assert renamed_actions.GROUPS == migration.GROUPS
    assert renamed_actions.OPERATIONS == migration.OPERATIONS
    for name in ("blob.sweep", "token.issue", "work.*", "jobs.submit", "features.scan"):
        assert (new_name(name) or name) == migration.renamed(name)
