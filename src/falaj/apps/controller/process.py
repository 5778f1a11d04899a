"""The controller process: on standby until it holds the lease; ends with its parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from falaj.apps.logs import log_to
from falaj.apps.process_setup import raise_file_limit, stop_with_parent
from falaj.assembly import drivers
from falaj.assembly.compute import job_reconciler
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.control.controller import Controller, ControllerTiming
from falaj.control.lease import holder_name
from falaj.control.workflows.builtin import WORKFLOWS
from falaj.control.workflows.context import Workflow

OPEN_FILES = 16_384
"""Each attempt may hold hundreds of connections to its agent; the usual limit of 1024 is enough for three."""


def main(
    *,
    timing: ControllerTiming = ControllerTiming(),  # noqa: B008 - frozen
    workflows: Mapping[str, Workflow] = WORKFLOWS,
) -> None:
    """Run a controller on the home in FALAJ_HOME until the parent ends or a signal comes."""
    os.umask(0o077)
    raise_file_limit(OPEN_FILES)
    home = open_home()
    log_to(home.logs / "controller.jsonl")
    platform = assemble(home)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_with_parent(stop.set)
    controller = Controller(
        platform.gate,
        platform.services,
        lambda: drivers.open_workflows(home, platform.config),
        holder=holder_name(),
        timing=timing,
        workflows=workflows,
        jobs=job_reconciler(platform),
        renewed=platform.compute.renew_attempts,
    )
    controller.run(stop)
    platform.close()


if __name__ == "__main__":
    main()
