"""The testbed of the launcher tests, over each sandbox."""

from __future__ import annotations

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
from polling import eventually
from sandbox_ground import machine

MECHANISMS = ["bubblewrap", "landlock", "uid", "same-uid"]


@pytest.fixture(params=MECHANISMS)
def testbed(request: pytest.FixtureRequest) -> Iterator[LauncherTestbed]:
    if sys.platform != "linux":
        pytest.skip("the sandboxes: this is not Linux")
    # With a uid of its own, Landlock is tried with the system's Python, which has no torch.
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
    eventually(lambda: not testbed.supervisors(), within=10)
    shutil.rmtree(root)
