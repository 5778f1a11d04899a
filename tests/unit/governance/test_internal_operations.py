"""Internal operations are available to the platform's own services only, whatever roles a caller has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from falaj.assembly.model_server import service_caller
from falaj.assembly.platform import local_caller
from falaj.control.authorization import controller_caller
from falaj.control.services import all_operations
from falaj.errors import Denied, NotFound
from falaj.governance.operations.caller import Caller, acting_as
from falaj.governance.operations.operation import Operation
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

INTERNAL = {name: op for name, op in all_operations().items() if op.internal}
EVERY = pytest.mark.parametrize("name", sorted(INTERNAL))


def perform(platform: OwnPlatform, operation: Operation) -> None:
    """Perform `operation` as far as the gate's first check."""
    given = operation.input.model_construct()
    platform.parts.gate.perform(operation, getattr(platform, operation.group), given)


def test_these_operations_are_internal() -> None:
    assert set(INTERNAL) == {
        "endpoints.announce",
        "endpoints.record",
        "endpoints.report",
        "jobs.begin",
        "jobs.hand_over",
        "jobs.preempt_for",
        "jobs.save_checkpoint",
        "jobs.finish",
        "models.record_evaluation",
        "monitoring.evaluate",
        "monitoring.record",
        "optimization.record",
        "pipelines.conclude",
        "queues.save_what_if",
        "secrets.use",
        "studies.record",
        "webhooks.record",
        "workflows.finish",
    }


@EVERY
def test_the_owner_of_an_embedded_home_may_not_call_it(light_platform: OwnPlatform, name: str) -> None:
    with pytest.raises(Denied, match="is an internal operation: only the platform's own services") as denied:
        perform(light_platform, INTERNAL[name])

    last = light_platform.entries()[-1]
    assert denied.value.details["rule"] == "internal"
    assert (last["action"], last["outcome"], last["rule"]) == (name, "denied", "internal")


def callers(platform: OwnPlatform) -> dict[str, Caller]:
    """Return administrators of all kinds, and a token of the controller's own account."""
    admin = platform.join("adam", Role.ADMIN, Role.OPERATOR, workspace="platform")
    robot = platform.join("robot", Role.ADMIN, Role.OPERATOR, workspace="platform", kind="service")
    issued = platform.tokens.issue(purpose="to call the rest", user="controller")
    remote = replace(local_caller(platform.database), origin="remote:127.0.0.1")
    token = platform.caller_of(issued.secret)
    return {"an administrator": admin, "a service account": robot, "a token": token, "remote": remote}


@pytest.mark.parametrize("who", ["an administrator", "a service account", "a token", "remote"])
def test_no_other_caller_may_call_it(light_platform: OwnPlatform, who: str) -> None:
    caller = callers(light_platform)[who]

    with acting_as(caller), pytest.raises(Denied, match="internal operation"):
        light_platform.monitoring.evaluate()


def test_the_services_of_the_platform_may_call_it(light_platform: OwnPlatform) -> None:
    gate = light_platform.parts.gate

    with acting_as(controller_caller(light_platform.database)):
        assert light_platform.monitoring.evaluate().windows == 0
    with acting_as(service_caller(gate, "model-server", Role.OPERATOR)), pytest.raises(NotFound):
        light_platform.endpoints.report("nowhere", counts=())


@pytest.mark.parametrize("origin", ["controller", "workflow:some", "job:some"])
def test_the_controller_may_call_it_on_behalf_of_a_user(light_platform: OwnPlatform, origin: str) -> None:
    light_platform.secrets.set("database", "4711")
    dana = light_platform.join("dana", Role.DEVELOPER)

    with acting_as(replace(dana, origin=origin)):
        used = light_platform.secrets.use("database")

    assert used.name == "database"
