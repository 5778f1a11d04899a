"""Commands of models that are written for people."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from falaj.apps.cli.session import Session
from falaj.apps.cli.training import JOB, take_model


def from_job(
    session: Session,
    job: JOB,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Of which model it is the next version.")],
    *,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Where the model belongs.")
    ] = None,
) -> None:
    """Make the model that a job saved by fj.save_model the next version of a model."""
    with session.platform() as platform:
        take_model(session, platform, job, model, workspace=workspace)


ROOM: dict[str, Any] = {"from-job": from_job}
