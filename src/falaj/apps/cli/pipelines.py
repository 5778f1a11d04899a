"""Commands of pipelines that are written for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from falaj.apps.cli.printing import show
from falaj.apps.cli.sentences import say, sentence
from falaj.apps.cli.session import Session
from falaj.sdk.pipelines import apply_pipeline, read_pipeline


def apply(
    session: Session,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="TOML: the pipeline, and the script of its job.")
    ],
    *,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Where the pipeline belongs.")
    ] = None,
) -> None:
    """Bring a pipeline to the definition in a file, with the code of its job."""
    given = read_pipeline(Path(file))
    with session.platform() as platform:
        made = apply_pipeline(platform, workspace=workspace, **given)
    said = sentence("pipelines.apply", made, {})
    if session.json or said is None:
        show(made, as_json=session.json)
    else:
        say(session, said)


ROOM: dict[str, Any] = {"apply": apply}
