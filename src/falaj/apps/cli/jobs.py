"""The commands of jobs that people read: list, show, logs, wait, explain, checkpoints."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from falaj.apps.cli import arguments, reading
from falaj.apps.cli.failures import FAILED
from falaj.apps.cli.following import follow_job, print_log
from falaj.apps.cli.job_words import asked_first, asks, command_of, far, memory_of, state_of, wishes
from falaj.apps.cli.pages import show_page
from falaj.apps.cli.printing import show_changes
from falaj.apps.cli.session import Session
from falaj.apps.cli.tables import show_fields, show_rows
from falaj.apps.cli.top import name_of, top
from falaj.apps.cli.training import JOB, submit_file, tell_end
from falaj.apps.cli.values import plural, printable, size, text_of
from falaj.control.services import all_operations
from falaj.records.scheduling.snapshot import Explanation
from falaj.records.training.jobs import Checkpoint, Job, JobState


def list_jobs(
    session: Session,
    *,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="queued, running, done, failed or cancelled.")
    ] = None,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace.")] = None,
    after: Annotated[str, typer.Option(metavar="AFTER", help=arguments.HELP["after"])] = "",
    limit: Annotated[str, typer.Option(metavar="LIMIT", help=arguments.HELP["limit"])] = "100",
) -> None:
    """The jobs of a workspace, newest first."""
    typed = {"state": state, "workspace": workspace, "after": after, "limit": limit}
    show_page(session, "jobs.list", typed, _show_jobs)


def show_job(session: Session, job: JOB) -> None:
    """How far a job is, or how it ended, and what it runs on what."""
    reading.check(all_operations()["jobs.show"], {"job": job})
    with session.platform() as platform:
        found = platform.jobs.show(job)
        owner = found.owner if session.json else name_of(platform, found.owner)
    session.show(found, partial(_show_job, owner=owner))


def logs(
    session: Session,
    job: JOB,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
    offset: Annotated[str, typer.Option(metavar="OFFSET", help="Begin at this byte.")] = "0",
) -> None:
    """Print what the newest attempt at a job has printed."""
    given = reading.gather(all_operations()["jobs.logs"], {"job": job, "offset": offset})
    reading.check(all_operations()["jobs.logs"], given)
    with session.platform() as platform:
        found = platform.jobs.show(job)
        if found.state is JobState.FAILED:
            print(f"job {found.id} failed: {printable(found.reason or '')}", file=sys.stderr)
        print_log(platform, job, follow=follow, offset=int(offset), to=sys.stdout)


def wait(
    session: Session,
    job: JOB,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Show its log, and how far it is.")] = False,
) -> int:
    """Show every change until a job ends; exit 1 if it failed or was cancelled."""
    reading.check(all_operations()["jobs.wait"], {"job": job})
    with session.platform() as platform:
        if follow:
            ended = follow_job(
                platform, platform.jobs.show(job), to=sys.stderr if session.json else sys.stdout
            )
            return tell_end(session, ended)
        last = show_changes(platform.jobs.wait(job), _line, as_json=session.json)
    return 0 if last is None or last.state is JobState.DONE else FAILED


def explain(session: Session, job: JOB) -> None:
    """Say why a job waits, what would start it now, and when it will start."""
    reading.check(all_operations()["jobs.explain"], {"job": job})
    with session.platform() as platform:
        found = platform.jobs.explain(job)
    session.show(found, _show_explanation)


def checkpoints(session: Session, job: JOB) -> None:
    """What a job has saved of itself, newest first: where it goes on from. The bytes are those of the blobs."""
    reading.check(all_operations()["jobs.checkpoints"], {"job": job})
    with session.platform() as platform:
        found = platform.jobs.checkpoints(job)
    session.show(found, partial(_show_checkpoints, job=job))


def _show_checkpoints(found: tuple[Checkpoint, ...], *, job: str) -> None:
    if not found:
        print(f"job {job} has saved nothing yet")
        return
    rows = [
        [str(each.step), size(each.size_bytes), str(len(each.parts)), each.manifest.blob, each.save]
        for each in found
    ]
    show_rows(["step", "size", "parts", "manifest", "save"], rows)


def _show_explanation(found: Explanation) -> None:
    place = f", {found.position} of {found.of} in the queue" if found.position else ""
    print(f"job {found.job} is {found.state}{place}: {printable(found.words)}")
    if found.reason is not None:
        print(f"  binding constraint   {found.reason}")
    if found.share is not None:
        print(f"  share of its queue   {found.share:.3g}; the lowest goes first")
    for change in found.would_start:
        print(f"  would start now with {printable(change)}")
    if found.state == "waiting":
        print(
            f"  expected start       {text_of(found.expected_start) if found.expected_start else 'unknown'}"
        )


def _show_jobs(found: tuple[Job, ...]) -> None:
    rows = [
        [
            each.id,
            printable(each.name),
            state_of(each),
            each.spec.queue,
            str(each.attempt),
            far(each.progress) if each.progress else "-",
            text_of(each.submitted_at),
            text_of(each.ended_at),
            printable(each.reason or "-"),
        ]
        for each in found
    ]
    heads = ["id", "name", "state", "queue", "attempt", "progress", "submitted", "ended", "reason"]
    show_rows(heads, rows)


def _show_job(job: Job, *, owner: str) -> None:
    spec, fields = job.spec, _standing(job)
    fields["runs"] = command_of(spec)
    fields["asks for"] = asks(spec)
    fields["queue"] = spec.queue + (f", priority {spec.priority}" if spec.priority else "")
    fields["queue"] += "" if spec.preemptible else ", is not preempted"
    optional = {
        "asked for first": asked_first(spec.asked) if spec.asked else "",
        "where": wishes(spec.affinity),
        "inputs": _pairs(spec.inputs),
        "secrets": _pairs(spec.secrets),
        "environment": _pairs(spec.env),
        "time limit": text_of(spec.timeout) if spec.timeout else "",
        "hangs after": text_of(spec.hang_after) if spec.hang_after else "",
        "retries": str(spec.retries or ""),
        "commit": (spec.origin.commit or "") if spec.origin else "",
        "memory": memory_of(spec.estimate) if spec.estimate else "",
    }
    fields |= {name: value for name, value in optional.items() if value}
    fields |= {"run": job.run, "owner": printable(owner), "label": job.label.describe()}
    show_fields(fields)
    if job.outputs:
        print(f"\n{plural(len(job.outputs), 'output')}")
        show_rows(["path", "blob"], [[printable(each.path), each.blob] for each in job.outputs])


def _standing(job: Job) -> dict[str, str]:
    fields = {"id": str(job.id), "name": printable(job.name), "state": state_of(job)}
    optional = {
        "reason": printable(job.reason or ""),
        "attempt": str(job.attempt or ""),
        "preempted": plural(job.preemptions, "time") if job.preemptions else "",
        "progress": far(job.progress) if job.progress else "",
        "node": job.node or "",
        "exit code": "" if job.exit_code is None else str(job.exit_code),
        "submitted": text_of(job.submitted_at),
        "started": text_of(job.started_at) if job.started_at else "",
        "ended": text_of(job.ended_at) if job.ended_at else "",
    }
    return fields | {name: value for name, value in optional.items() if value}


def _pairs(values: Any) -> str:
    return ", ".join(f"{name}={printable(str(value))}" for name, value in values.items())


def _line(job: Job) -> str:
    done = f" {far(job.progress)}" if job.progress else ""
    why = f": {printable(job.reason)}" if job.reason else ""
    attempt = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    return f"{job.name} {state_of(job)}{attempt}{done}{why}"


ROOM: dict[str, Any] = {
    "list": list_jobs,
    "show": show_job,
    "top": top,
    "logs": logs,
    "wait": wait,
    "explain": explain,
    "checkpoints": checkpoints,
    "submit": submit_file,
}
