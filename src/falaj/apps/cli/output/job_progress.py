"""Follow a job: its log as it is printed, and below it how far it is."""

from __future__ import annotations

import codecs
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from falaj.apps.cli.output.job_summary import describe_state, progress_line
from falaj.apps.cli.output.values import printable
from falaj.errors import FalajError, Interrupted, Unavailable
from falaj.records.training.jobs import Job, JobState
from falaj.sdk.platform import Platform

LINE_EVERY_S = 10.0
LOOK_EVERY_S = 1.0
PATIENCE_S = 60.0
PUZZLED_S = 3.0
"""After so long in the queue, one wants to know why."""

Tell = Callable[[Job], None]


def follow_job(platform: Platform, job: Job, *, to: TextIO) -> Job:
    """Print the log of `job` until it ends; the job as it is then."""
    over = threading.Event()
    with _progress(job.name) as tell:
        tell(job)
        watcher = threading.Thread(target=_watch, args=(platform, job.id, over, tell), daemon=True)
        watcher.start()
        try:
            print_log(platform, job.id, follow=True, offset=0, to=to)
        except KeyboardInterrupt:
            print(f"job {job.id} was not cancelled; falaj jobs cancel {job.id} does that", file=sys.stderr)
            raise
        finally:
            over.set()
            watcher.join(2 * LOOK_EVERY_S)
    return platform.jobs.show(job.id)


def print_log(platform: Platform, job: str, *, follow: bool, offset: int, to: TextIO) -> None:
    """Print the log from `offset` on. A stream that breaks off is taken up where it stopped."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)  # a bar that is written over becomes lines
    deadline, attempt, ended = time.monotonic() + PATIENCE_S, platform.jobs.show(job).attempt, True
    while True:
        try:
            for piece in platform.jobs.logs(job, follow=follow, offset=offset):
                offset += len(piece)
                deadline = time.monotonic() + PATIENCE_S
                text = decoder.decode(piece)
                ended = text.endswith("\n") if text else ended
                to.write(printable(text))
                to.flush()
            if not ended:
                to.write("\n")  # what is said next stands on a line of its own
                to.flush()
            return
        except (Interrupted, Unavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        newest = platform.jobs.show(job).attempt
        offset, attempt = offset if newest == attempt else 0, newest


def _watch(platform: Platform, job: str, over: threading.Event, tell: Tell) -> None:
    while not over.wait(LOOK_EVERY_S):
        try:
            tell(platform.jobs.show(job))
        except (Interrupted, Unavailable):
            continue
        except FalajError:
            return  # whoever prints the log hears of it too, and says so


@contextmanager
def _progress(name: str) -> Iterator[Tell]:
    """A bar on a terminal, below what is printed; a line now and then elsewhere."""
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[far]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, begun = bar.add_task(f"{name} queued", total=None, far=""), time.monotonic()

        def tell(job: Job) -> None:
            words = f"{job.name} {describe_state(job)}" + (
                f" (attempt {job.attempt})" if job.attempt > 1 else ""
            )
            if job.state is JobState.QUEUED and time.monotonic() - begun >= PUZZLED_S:
                words += f"; why: falaj jobs explain {job.id}"
            now = job.progress if job.state is JobState.RUNNING else None
            done, total, told = (now.step, now.total, progress_line(now)) if now else (0, None, "")
            bar.update(task, description=words, completed=done, total=total, far=told)

        yield tell


def _lines(name: str) -> Tell:
    begun = last = time.monotonic()
    waits = False

    def tell(job: Job) -> None:
        nonlocal last, waits
        if job.state is JobState.QUEUED and not waits and time.monotonic() - begun >= PUZZLED_S:
            waits = True
            print(f"{name} waits in the queue; why: falaj jobs explain {job.id}", file=sys.stderr)
        if job.progress is not None and time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            print(f"{name}: {progress_line(job.progress)}", file=sys.stderr)

    return tell
