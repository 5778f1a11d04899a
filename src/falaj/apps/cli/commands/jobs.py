"""`falaj jobs`: list, show, logs, wait, explain, checkpoints."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.jobs_top import owner_name, top
from falaj.apps.cli.commands.train import report_end, submit_file
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import full_id
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.job_progress import follow_job, print_log
from falaj.apps.cli.output.job_summary import (
    describe_affinity,
    describe_command,
    describe_memory,
    describe_original_request,
    describe_request,
    describe_state,
    progress_line,
)
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.results import show_changes
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Denied, NotFound
from falaj.records.scheduling.snapshot import Explanation
from falaj.records.sizes import format_size
from falaj.records.training.jobs import Checkpoint, Job, JobMove, JobState
from falaj.sdk.platform import Platform
from falaj.training.runs import IMAGE_TAG

PRESENTATION = Presentation(
    columns={Job: ("id", "name", "state", "attempt", "progress", "submitted_at", "ended_at", "reason")},
    help={"offset": "Begin at this byte."},
    lists={"job": "jobs list"},
)


@PRESENTATION.command("list")
def list_jobs(
    session: Session,
    *,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="queued, running, done, failed or cancelled.")
    ] = None,
    workspace: arguments.OF_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the jobs of a workspace, newest first."""
    typed = {"state": state, "workspace": workspace, "after": after, "limit": limit}
    show_page(session, "jobs.list", typed, _show_jobs, everything=everything)


@PRESENTATION.command("show")
def show_job(session: Session, job: arguments.JOB) -> None:
    """Show the state, progress and resources of a job, or how it ended."""
    parsing.check(all_operations()["jobs.show"], {"job": job})
    with session.platform() as platform:
        found = platform.jobs.show(full_id(platform, "job", job))
        owner = found.owner if session.json else owner_name(platform, found.owner)
        image = None if session.json else _image_of(platform, found)
    session.show(found, partial(_show_job, owner=owner, image=image))


@PRESENTATION.command("logs")
def logs(
    session: Session,
    job: arguments.JOB,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    offset: Annotated[str, typer.Option(metavar="OFFSET", help="Begin at this byte.")] = "0",
) -> None:
    """Print the log of the newest attempt of a job."""
    given = parsing.parse(all_operations()["jobs.logs"], {"job": job, "offset": offset})
    parsing.check(all_operations()["jobs.logs"], given)
    with session.platform() as platform:
        found = platform.jobs.show(full_id(platform, "job", job))
        if found.state is JobState.FAILED:
            print(f"job {found.id} failed: {printable(found.reason or '')}", file=sys.stderr)
        print_log(platform, found.id, follow=follow, offset=int(offset), to=sys.stdout)


@PRESENTATION.command("wait")
def wait(
    session: Session,
    job: arguments.JOB,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show its log and progress.")] = False,
) -> int:
    """Print every change until a job ends; exit 1 if it failed or was cancelled."""
    parsing.check(all_operations()["jobs.wait"], {"job": job})
    with session.platform() as platform:
        job = full_id(platform, "job", job)
        if follow:
            ended = follow_job(
                platform, platform.jobs.show(job), to=sys.stderr if session.json else sys.stdout
            )
            return report_end(session, platform, ended)
        last = show_changes(platform.jobs.wait(job), _line, as_json=session.json)
    return 0 if last is None or last.state is JobState.DONE else FAILED


@PRESENTATION.command("explain")
def explain(session: Session, job: arguments.JOB) -> None:
    """Explain why a job waits, what would start it now, and when it is expected to start."""
    parsing.check(all_operations()["jobs.explain"], {"job": job})
    with session.platform() as platform:
        found = platform.jobs.explain(full_id(platform, "job", job))
    session.show(found, _show_explanation)


@PRESENTATION.command("checkpoints")
def checkpoints(session: Session, job: arguments.JOB) -> None:
    """List the checkpoints of a job, newest first, with the blobs that hold them."""
    parsing.check(all_operations()["jobs.checkpoints"], {"job": job})
    with session.platform() as platform:
        job = full_id(platform, "job", job)
        found = platform.jobs.checkpoints(job)
    session.show(found, partial(_show_checkpoints, job=job))


def _show_checkpoints(found: tuple[Checkpoint, ...], *, job: str) -> None:
    if not found:
        print(f"job {job} has no checkpoint yet")
        return
    rows = [
        [str(each.step), format_size(each.size_bytes), str(len(each.parts)), each.manifest.blob, each.save]
        for each in found
    ]
    show_rows(["step", "size", "parts", "manifest", "save"], rows)


def _show_explanation(found: Explanation) -> None:
    place = f", {found.position} of {found.of} in the queue" if found.position else ""
    print(f"job {found.job} is {found.state}{place}: {printable(found.words)}")
    if found.reason is not None:
        print(f"  binding constraint   {found.reason}")
    if found.share is not None:
        print(f"  share of its queue   {found.share:.3g}; the lowest is scheduled first")
    for change in found.would_start:
        print(f"  would start now with {printable(change)}")
    if found.state == "waiting":
        print(
            f"  expected start       {format_value(found.expected_start) if found.expected_start else 'unknown'}"
        )


def _show_jobs(found: tuple[Job, ...]) -> None:
    rows = [
        [
            each.id,
            printable(each.name),
            describe_state(each),
            each.spec.queue,
            str(each.attempt),
            progress_line(each.progress) if each.progress else "-",
            format_value(each.submitted_at),
            format_value(each.ended_at),
            printable(each.reason or "-"),
        ]
        for each in found
    ]
    heads = ["id", "name", "state", "queue", "attempt", "progress", "submitted", "ended", "reason"]
    show_rows(heads, rows)


def _image_of(platform: Platform, job: Job) -> str | None:
    """Return the image that the newest attempt ran in on a cluster, which is a tag of its run."""
    try:
        tags = platform.runs.show(job.run).tags if job.attempt else ()
    except (Denied, NotFound):
        return None
    return next((each.value for each in tags if each.key == IMAGE_TAG), None)


def _show_job(job: Job, *, owner: str, image: str | None = None) -> None:
    spec, fields = job.spec, _status_fields(job)
    fields["runs"] = describe_command(spec)
    fields["requests"] = describe_request(spec)
    fields["queue"] = spec.queue + (f", priority {spec.priority}" if spec.priority else "")
    fields["queue"] += "" if spec.preemptible else ", not preemptible"
    optional = {
        "first requested": describe_original_request(spec.asked) if spec.asked else "",
        "where": describe_affinity(spec.affinity),
        "image": printable(image or ""),
        "inputs": _pairs(spec.inputs),
        "volumes": ", ".join(spec.volumes),
        "secrets": _pairs(spec.secrets),
        "environment": _pairs(spec.env),
        "time limit": format_value(spec.timeout) if spec.timeout else "",
        "hang timeout": format_value(spec.hang_after) if spec.hang_after else "",
        "retries": str(spec.retries or ""),
        "commit": (spec.origin.commit or "") if spec.origin else "",
        "memory": describe_memory(spec.estimate) if spec.estimate else "",
    }
    fields |= {name: value for name, value in optional.items() if value}
    fields |= {"run": job.run, "owner": printable(owner), "label": job.label.describe()}
    show_fields(fields)
    if job.limits:
        print("\nlimits")
        print("\n".join(f"  {printable(line)}" for line in _limit_lines(job)))
    if job.outputs:
        print(f"\n{plural(len(job.outputs), 'output')}")
        show_rows(["path", "blob"], [[printable(each.path), each.blob] for each in job.outputs])


def _limit_lines(job: Job) -> list[str]:
    """Return how each limit of the newest attempt is enforced, and which of them the job did not name."""
    named = {"memory": job.spec.memory_bytes, "disk": job.spec.disk_bytes}
    return [
        f"{line}; the default" if named.get(line.partition(":")[0], 0) is None else line
        for line in job.limits
    ]


def _status_fields(job: Job) -> dict[str, str]:
    fields = {"id": str(job.id), "name": printable(job.name), "state": describe_state(job)}
    optional = {
        "reason": printable(job.reason or ""),
        "attempt": str(job.attempt or ""),
        "preempted": plural(job.preemptions, "time") if job.preemptions else "",
        "progress": progress_line(job.progress) if job.progress else "",
        "node": job.node or "",
        "exit code": "" if job.exit_code is None else str(job.exit_code),
        "submitted": format_value(job.submitted_at),
        "started": format_value(job.started_at) if job.started_at else "",
        "ended": format_value(job.ended_at) if job.ended_at else "",
    }
    return fields | {name: value for name, value in optional.items() if value}


def _pairs(values: Any) -> str:
    return ", ".join(f"{name}={printable(str(value))}" for name, value in values.items())


def _line(job: Job) -> str:
    done = f" {progress_line(job.progress)}" if job.progress else ""
    why = f": {printable(job.reason)}" if job.reason else ""
    attempt = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    return f"{job.name} {describe_state(job)}{attempt}{done}{why}"


@PRESENTATION.message("jobs.submit")
def _submitted(made: Job, given: Given) -> Message:
    return Message(f"job {made.id} ({made.name}) is queued", (("next", f"jobs logs {made.id} --follow"),))


@PRESENTATION.message("jobs.retry")
def _retried(made: Job, given: Given) -> Message:
    words = f"job {made.id} ({made.name}) is queued again, as run {made.run}, and resumes from its last checkpoint"
    return Message(words, (("next", f"jobs logs {made.id} --follow"),))


@PRESENTATION.message("jobs.cancel")
def _job_cancelled(made: Job, given: Given) -> Message:
    words = "is cancelled" if made.state.ended else "is asked to stop, and killed if it does not"
    return Message(f"job {made.id} {words}", (("undo", f"jobs retry {made.id}"),))


@PRESENTATION.message("jobs.move")
def _job_moved(made: JobMove, given: Given) -> Message:
    return Message(f"job {made.job.id} is moved: {made.words}", (("next", f"jobs show {made.job.id}"),))


PRESENTATION.commands |= {"top": top, "submit": submit_file}
