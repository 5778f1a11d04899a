"""Follows a workflow on stderr: a progress bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from falaj.apps.cli.output.values import printable
from falaj.apps.cli.session import Session
from falaj.errors import Conflict, Interrupted, ProcessFailed, Unavailable
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.sdk.platform import Platform

CONTROLLER = "controller"
LINE_EVERY_S = 10.0
PATIENCE_S = 60.0

Report = Callable[[WorkflowRun], None]


def follow_work(
    session: Session, platform: Platform, work: WorkflowRun, what: str, *, result: str
) -> WorkflowRun:
    """Show the progress of `work` until it is done; Conflict if it fails. `result` is the command that shows it."""
    try:
        with _progress(what) as report:
            ended = _watch(platform, work, report)
    except KeyboardInterrupt:
        watch, cancel = (session.full_command(f"workflows {verb} {work.id}") for verb in ("watch", "cancel"))
        print(f"{what} {work.id} was not cancelled: {cancel} cancels it, {watch} follows it", file=sys.stderr)
        print(f"when it is done: {session.full_command(f'{result} {work.id}')}", file=sys.stderr)
        raise
    if ended.state is not WorkflowState.DONE:
        raise Conflict(f"{what} {work.id} {ended.state}: {ended.error}")
    return ended


def require_controller(platform: Platform) -> None:
    """Raise ProcessFailed if the controller keeps failing; streams of changes do so by themselves."""
    if (sentence := platform.platform.status().failing.get(CONTROLLER)) is not None:
        raise ProcessFailed(sentence)


def _watch(platform: Platform, work: WorkflowRun, report: Report) -> WorkflowRun:
    """Report each change until it ends; an interrupted stream is started again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            for now in platform.workflows.watch(work.id):
                deadline, work = time.monotonic() + PATIENCE_S, now
                report(now)
            return work
        except (Interrupted, Unavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@contextmanager
def _progress(what: str) -> Iterator[Report]:
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda work: bar.update(
            task, description=_doing(what, work), completed=work.step, total=work.steps
        )


def _lines(what: str) -> Report:
    last = time.monotonic()

    def report(work: WorkflowRun) -> None:
        nonlocal last
        if not work.state.ended and time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            far = f", {work.step / work.steps:.0%}" if work.steps else ""
            print(f"{_doing(what, work)}{far}", file=sys.stderr)

    return report


def _doing(what: str, work: WorkflowRun) -> str:
    return printable(work.doing or f"{what} {work.state}")
