"""The yard where the launcher tests run attempts, over each mechanism."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from falaj.drivers.processes.attempt_spec import SandboxSpec
from falaj.errors import IsolationRefused
from falaj.governance.isolation import decide
from launcher_testbed import LauncherTestbed
from polling import eventually
from sandbox_ground import machine

MECHANISMS = ["bubblewrap", "uid", "same-uid"]


@pytest.fixture(params=MECHANISMS)
def testbed(request: pytest.FixtureRequest) -> Iterator[LauncherTestbed]:
    if sys.platform != "linux":
        pytest.skip("the sandboxes: this is not Linux")
    facts = machine(request.param)
    try:
        mechanism = decide(facts, users=1, prefer=request.param).mechanism
    except IsolationRefused as refused:
        pytest.skip(f"the {request.param} sandbox: {refused.faults[0].given}")
    root = Path(tempfile.mkdtemp(prefix="falaj-launcher-"))
    root.chmod(0o755)
    testbed = LauncherTestbed(root, SandboxSpec(mechanism, facts))
    yield testbed
    for attempt in testbed.control.glob("*"):
        testbed.launcher().stop(attempt.name.replace("%2F", "/"), grace_s=0)
    eventually(lambda: not testbed.supervisors(), within=10)
    shutil.rmtree(root)
