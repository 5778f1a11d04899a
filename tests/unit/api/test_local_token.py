"""The token of the local CLI is replaced at every start; jobs submitted with the old one continue."""

from __future__ import annotations

import pytest

from falaj.apps.api.server import issue_owner_credentials
from falaj.control.authorization import requester
from falaj.errors import Unauthenticated
from falaj.governance.identity.directory import Authenticator, BuiltInDirectory
from falaj.governance.operations.caller import acting_as
from falaj.records.training.jobs import JobSpec
from falaj.training.store import job_row
from falaj.training.tables import jobs
from platforms import OwnPlatform


@pytest.mark.slow
def test_a_job_that_was_submitted_before_a_restart_may_still_act(light_platform: OwnPlatform) -> None:
    parts = light_platform.parts
    authenticator = Authenticator([BuiltInDirectory(parts.database, parts.gate.clock)], parts.database)
    first = issue_owner_credentials(parts)["token"]
    caller, _ = authenticator.authenticate(first, origin="test")
    with acting_as(caller):
        job = light_platform.jobs.submit(JobSpec(name="fit", module="falaj.optimization.runs"))

    second = issue_owner_credentials(parts)["token"]

    (row,) = (each for each in light_platform.rows(jobs) if each["id"] == job.id)
    assert row["token"] == caller.token
    with parts.database.read() as tx:
        assert requester(tx, job_row(tx, job.id), origin="test").id == caller.id
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(first, origin="test")
    assert authenticator.authenticate(second, origin="test")[0].id == caller.id


def test_a_revoked_token_stays_revoked(light_platform: OwnPlatform) -> None:
    issue_owner_credentials(light_platform.parts)
    (before,) = light_platform.tokens.list().items
    light_platform.tokens.revoke(before.id)

    issue_owner_credentials(light_platform.parts)

    found = {each.id: each for each in light_platform.tokens.list().items}
    assert found[before.id].revoked_at is not None
    assert found[before.id].expires_at == before.expires_at
