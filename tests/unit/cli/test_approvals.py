"""`falaj models approvals`: who approved, and who made them an approver."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from falaj.apps.cli.commands.models import _show_approvals
from falaj.records.governance.identity import Appointment, Role
from falaj.records.names import ObjectId
from falaj.records.registry import Approval

NOON = datetime(2026, 5, 3, 12, tzinfo=UTC)
APPROVAL = Approval(
    id=ObjectId("approval_1"), version="churn@1", alias="champion", by="noor", comment="", at=NOON
)


def test_an_approval_shows_who_appointed_the_approver_and_how_long_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    appointed = Appointment(
        role=Role.APPROVER,
        workspace="default",
        granted_by=("amal",),
        granted_at=NOON - timedelta(minutes=2),
        group="approvers",
        added_by=("adam",),
        created_by=("root",),
        created_at=NOON,
    )

    _show_approvals((APPROVAL.model_copy(update={"appointment": appointed}), APPROVAL))

    shown = capsys.readouterr().out
    assert "by amal 2m before, in approvers by adam" in shown
    assert "root" in shown
    assert "by a policy, or not recorded" in shown
