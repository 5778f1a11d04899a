"""The agent beside an attempt of a pretended machine, served on a real socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from falaj.control.agents import SOCKET, AgentDoor, PlatformAgent
from falaj.control.behalf import asker
from falaj.governance.operations.caller import Caller
from falaj.records.training.jobs import Job
from falaj.training.tables import jobs
from job_ground import JobGround, lost


def row_of(ground: JobGround, job: Job) -> dict[str, Any]:
    return next(each for each in ground.platform.rows(jobs) if each["id"] == job.id)


@contextmanager
def agent_of(ground: JobGround, job: Job, folder: Path, **options: Any) -> Iterator[Path]:
    """The socket of the agent of a job's newest attempt, while it is served."""
    row = row_of(ground, job)
    service = ground.keeper()._office.service

    def owner() -> Caller:
        with ground.platform.database.read() as tx:
            return asker(tx, row, origin=f"job:{job.id}")

    agent = PlatformAgent(
        ground.rooms,
        row,
        workspace=job.workspace,
        owner=owner,
        service=service,
        fence=ground.fence,
        wanted=lambda: True,
        progress=lambda _step, _total: None,
        **options,
    )
    folder.mkdir(exist_ok=True)
    place = folder / f"{os.urandom(4).hex()}.agent"
    door = AgentDoor(place, agent, home=folder, on_fenced=lost)
    try:
        yield place / SOCKET
    finally:
        door.close()
