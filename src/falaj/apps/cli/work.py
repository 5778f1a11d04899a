"""`falaj work watch`: follow long work until it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from pydantic_core import to_json

from falaj.apps.cli import reading
from falaj.apps.cli.failures import FAILED
from falaj.apps.cli.session import Session
from falaj.apps.cli.values import printable
from falaj.control.platform import all_operations
from falaj.records.work import Work, WorkState


def watch(
    session: Session, work: Annotated[str, typer.Argument(metavar="WORK", help="The id of the work.")]
) -> int:
    """Show every change until it ends; exit 1 if it failed or was cancelled."""
    reading.check(all_operations()["work.watch"], {"work": work})
    with session.platform() as platform:
        last = _show(platform.work.watch(work), as_json=session.json)
    return 0 if last is None or last.state is WorkState.DONE else FAILED


def _show(changes: Iterable[Work], *, as_json: bool) -> Work | None:
    """Each change in a line, and none twice: the platform also says now and then that nothing has changed."""
    last, told = None, ""
    for last in changes:
        line = to_json(last).decode() if as_json else describe(last)
        if line != told:
            print(line, flush=True)
        told = line
    return last


def describe(work: Work) -> str:
    """One line on how far it is."""
    total = f" of {work.steps}" if work.steps else ""
    far = f", step {work.step}{total}" if work.state is WorkState.RUNNING else ""
    made = work.result or {}
    what = work.error or work.doing or str(made.get("name") or made.get("id") or "")
    return f"{work.workflow} {work.state}{far}" + (f": {printable(what)}" if what else "")


ROOM = {"watch": watch}
