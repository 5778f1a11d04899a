"""The testbed of the launcher tests, over each sandbox."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.processes.attempt_spec import SandboxSpec
from falaj.drivers.sandbox import gaps_of
from falaj.errors import IsolationRefused
from falaj.governance.isolation import decide
from launcher_testbed import LauncherTestbed
from pod_testbed import IN_PROCESS_PODS, pod_testbed
from polling import eventually
from sandbox_testbed import machine

OTHERS = ["landlock", "uid", "same-uid", "pods"]
MECHANISMS = ["bubblewrap", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the uid sandbox where the platform is not root, and from pods what looks at this machine."""
    left_out = [item for item in items if (os.geteuid() != 0 and is_for_root(item)) or is_not_for_pods(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def is_for_root(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    has_uid = not {"uid", "uid-plain"}.isdisjoint(map(str, parameters))
    return item.path.parent == Path(__file__).parent and (has_uid or item.path.stem == "test_sandbox_uid")


def is_not_for_pods(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return parameters.get("testbed") == "pods" and getattr(item, "originalname", "") not in IN_PROCESS_PODS


@pytest.fixture(params=MECHANISMS)
def testbed(request: pytest.FixtureRequest) -> Iterator[LauncherTestbed]:
    if sys.platform != "linux":
        pytest.skip("the sandboxes: this is not Linux")
    if request.param == "pods":
        with (
            tempfile.TemporaryDirectory(prefix="falaj-launcher-") as folder,
            pod_testbed(Path(folder)) as pods,
        ):
            yield pods
        return
    # With another uid, Landlock is tested with the system's Python, which has no torch.
    shared = request.param == "landlock-shared"
    mechanism = "landlock" if shared else request.param
    facts = replace(machine("bubblewrap"), landlock_own_uid=False) if shared else machine(mechanism)
    try:
        mechanism = decide(facts, users=1, gaps=gaps_of, prefer=mechanism).mechanism
    except IsolationRefused as refused:
        pytest.skip(f"the {request.param} sandbox: {refused.faults[0].given}")
    root = Path(tempfile.mkdtemp(prefix="falaj-launcher-"))
    root.chmod(0o755)
    testbed = LauncherTestbed(root, SandboxSpec(mechanism, facts))
    yield testbed
    for attempt in testbed.control.glob("*"):
        testbed.launcher().stop(attempt.name.replace("%2F", "/"), grace_s=0)
    eventually(lambda: not testbed.supervisors())
    shutil.rmtree(root)
