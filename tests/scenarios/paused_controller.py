"""A controller process with a workflow that a test can hold at any step; run by test_durable.py, never imported."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

from falaj.apps.controller.process import main
from falaj.control.controller import ControllerTiming
from falaj.control.services import Services
from falaj.ports.workflows import JsonObject, WorkflowSteps

SIGNS = Path(os.environ["FALAJ_TEST_SIGNS"])


def make_workspaces(services: Services, steps: WorkflowSteps, given: JsonObject) -> JsonObject:
    made = [steps.run(name, lambda name=name: make_one(services, name)) for name in given["names"]]  # type: ignore[misc]
    return {"made": [each["name"] for each in made]}


def make_one(services: Services, name: str) -> JsonObject:
    """Create a workspace, signal it by a file, and wait while the file hold-NAME exists.

    Killed at that moment, the operation has taken effect, and the engine does not know it.
    """
    made = services.workspaces.create(name)
    (SIGNS / f"did-{name}-{os.getpid()}").touch()
    while (SIGNS / f"hold-{name}").exists():
        time.sleep(0.005)
    return {"name": made.name}


if __name__ == "__main__":
    lease = timedelta(seconds=float(os.environ.get("FALAJ_TEST_LEASE", "1")))
    main(timing=ControllerTiming(lease=lease, every_s=0.03), workflows={"make": make_workspaces})
