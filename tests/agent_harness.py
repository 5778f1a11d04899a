"""The agent of an attempt on a fake machine, served on a real socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from falaj.control.authorization import requester
from falaj.control.jobs.agent import PlatformAgent
from falaj.control.jobs.agent_server import SOCKET, AgentServer
from falaj.governance.operations.caller import Caller
from falaj.records.training.jobs import Job
from falaj.training.store import JobRow, job_row
from job_harness import JobHarness, lease_lost


def row_of(harness: JobHarness, job: Job) -> JobRow:
    with harness.platform.database.read() as tx:
        return job_row(tx, job.id)


@contextmanager
def agent_of(harness: JobHarness, job: Job, folder: Path, **options: Any) -> Iterator[Path]:
    """Return the socket of the agent of a job's newest attempt, while it is served."""
    row = row_of(harness, job)
    service = harness.reconciler()._context.service

    def owner() -> Caller:
        with harness.platform.database.read() as tx:
            return requester(tx, row, origin=f"job:{job.id}")

    agent = PlatformAgent(
        harness.services,
        row,
        workspace=job.workspace,
        owner=owner,
        service=service,
        fence=harness.fence,
        may_continue=lambda: True,
        on_progress=lambda _step, _total: None,
        **options,
    )
    folder.mkdir(exist_ok=True)
    place = folder / f"{os.urandom(4).hex()}.agent"
    server = AgentServer(place, agent, home=folder, on_fenced=lease_lost)
    try:
        yield place / SOCKET
    finally:
        server.close()
