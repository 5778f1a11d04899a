"""`falaj work watch`: follow long work until it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from falaj.apps.cli import reading
from falaj.apps.cli.failures import FAILED
from falaj.apps.cli.printing import show_lines
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
        changes = platform.work.watch(work)
        last = _last(_show(change, as_json=session.json) for change in changes)
    return 0 if last is None or last.state is WorkState.DONE else FAILED


def _show(change: Work, *, as_json: bool) -> Work:
    if as_json:
        show_lines([change])
    else:
        print(describe(change), flush=True)
    return change


def describe(work: Work) -> str:
    """One line on how far it is."""
    far = f" {work.step} of {work.steps or '?'}" if work.state is WorkState.RUNNING else ""
    made = work.result or {}
    what = work.error or work.doing or str(made.get("name") or made.get("id") or "")
    return f"{work.workflow} {work.state}{far}" + (f": {printable(what)}" if what else "")


def _last(changes: Iterable[Work]) -> Work | None:
    last = None
    for last in changes:  # noqa: B007 - the last one is wanted
        pass
    return last


ROOM = {"watch": watch}
