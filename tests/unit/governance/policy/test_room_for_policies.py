"""The policies of a workspace are bounded together: they are part of every decision of the platform."""

from __future__ import annotations

import pytest

from falaj.errors import InvalidInput
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

RULE = 'forbid (principal, action == Action::"blobs.copy", resource);\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "given"),
    [
        (RULE * 150, "300 rules"),
        (RULE.replace(";", " when { [" + "1," * 6_000 + "1].contains(1) };"), "240"),
        (RULE + f"// {'x' * 60_000}", "120"),
    ],
)
def test_many_policies_do_not_add_up(light_platform: OwnPlatform, text: str, given: str) -> None:
    light_platform.workspaces.create("team-a")
    admin = light_platform.join("adam", Role.ADMIN, workspace="team-a")
    with acting_as(admin):
        light_platform.policies.publish("one", text=text, workspace="team-a")
        light_platform.policies.publish("one", text=text, workspace="team-a")  # replaces it

        with pytest.raises(InvalidInput) as refused:
            light_platform.policies.publish("two", text=text, workspace="team-a")

        (fault,) = refused.value.faults
        assert str(fault.given).startswith(given)
        light_platform.policies.withdraw("team-a/one")
        light_platform.policies.publish("two", text=text, workspace="team-a")
    light_platform.policies.publish("mine", text=text)


@pytest.mark.slow
def test_one_policy_that_is_too_large_is_refused(light_platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput, match="too large"):
        light_platform.policies.publish("many", text=RULE * 201)

    assert light_platform.policies.list().items == ()
