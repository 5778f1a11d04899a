"""Follows a job: prints its log, and below it the progress."""

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
POLL_S = 1.0
PATIENCE_S = 60.0
CANCEL_S = 20.0
EXPLAIN_AFTER_S = 3.0
"""After so long in the queue, point to `falaj jobs explain`."""

Report = Callable[[Job], None]


def follow_job(platform: Platform, job: Job, *, to: TextIO) -> Job:
    """Print the log of `job` until it ends; return the job."""
    ended = threading.Event()
    with _progress(job.name) as report:
        report(job)
        watcher = threading.Thread(target=_watch, args=(platform, job.id, ended, report), daemon=True)
        watcher.start()
        try:
            print_log(platform, job.id, follow=True, offset=0, to=to)
        except KeyboardInterrupt:
            print(f"job {job.id} was not cancelled; falaj jobs cancel {job.id} cancels it", file=sys.stderr)
            raise
        finally:
            ended.set()
            watcher.join(2 * POLL_S)
    return platform.jobs.show(job.id)


def cancel_local_job(platform: Platform, job: str) -> None:
    """Cancel a job that this process runs, and wait until it has ended; one of a platform that runs goes on."""
    if platform.where.startswith("http"):
        return
    print(f"terminated: job {job} is cancelled; falaj jobs retry {job} runs it again", file=sys.stderr)
    platform.jobs.cancel(job)
    deadline = time.monotonic() + CANCEL_S
    while not platform.jobs.show(job).state.ended and time.monotonic() < deadline:
        time.sleep(0.05)


def print_log(platform: Platform, job: str, *, follow: bool, offset: int, to: TextIO) -> None:
    """Print the log from `offset` on. An interrupted stream is resumed where it stopped."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder = io.IncrementalNewlineDecoder(
        utf8, translate=True
    )  # a progress bar that is overwritten becomes lines
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
                to.write("\n")  # the next message starts on a line of its own
                to.flush()
            return
        except (Interrupted, Unavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        newest = platform.jobs.show(job).attempt
        offset, attempt = offset if newest == attempt else 0, newest


def _watch(platform: Platform, job: str, ended: threading.Event, report: Report) -> None:
    while not ended.wait(POLL_S):
        try:
            report(platform.jobs.show(job))
        except (Interrupted, Unavailable):
            continue
        except FalajError:
            return  # printing the log fails with the same error


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    """Show a bar on a terminal, below the log; a line every ten seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, begun = bar.add_task(f"{name} queued", total=None, line=""), time.monotonic()

        def report(job: Job) -> None:
            words = f"{job.name} {describe_state(job)}" + (
                f" (attempt {job.attempt})" if job.attempt > 1 else ""
            )
            if job.state is JobState.QUEUED and time.monotonic() - begun >= EXPLAIN_AFTER_S:
                words += f"; falaj jobs explain {job.id} shows why"
            now = job.progress if job.state is JobState.RUNNING else None
            done, total, line = (now.step, now.total, progress_line(now)) if now else (0, None, "")
            bar.update(task, description=words, completed=done, total=total, line=line)

        yield report


def _lines(name: str) -> Report:
    begun = last = time.monotonic()
    waits = False

    def report(job: Job) -> None:
        nonlocal last, waits
        if job.state is JobState.QUEUED and not waits and time.monotonic() - begun >= EXPLAIN_AFTER_S:
            waits = True
            print(f"{name} waits in the queue; falaj jobs explain {job.id} shows why", file=sys.stderr)
        if job.progress is not None and time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            print(f"{name}: {progress_line(job.progress)}", file=sys.stderr)

    return report
