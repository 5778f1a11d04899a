"""`falaj train`, and the commands of jobs that people read: logs, wait, explain."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_json

from falaj.apps.cli import reading
from falaj.apps.cli.commands import command
from falaj.apps.cli.failures import FAILED
from falaj.apps.cli.following import follow_job, print_log
from falaj.apps.cli.printing import show
from falaj.apps.cli.sentences import Said, say, sentence
from falaj.apps.cli.session import Session
from falaj.apps.cli.values import plural, printable, span, text_of
from falaj.control.platform import all_operations
from falaj.errors import InvalidInput
from falaj.records.training import Job, JobState
from falaj.sdk.platform import Platform
from falaj.sdk.training import spec_for, submit
from falaj.training.packing import pack_code

JOB = Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.")]


Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python script; its folder's code goes along.")
]
Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS...", help="Its arguments; behind -- if they begin with '-'."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=REF", help="An input: a training set, view, model version or blob."),
]
Cpus = Annotated[str | None, typer.Option(metavar="COUNT", help="For all its processes; 1.")]
Gpus = Annotated[str | None, typer.Option(metavar="COUNT", help="For all its processes; 0.")]
Processes = Annotated[str | None, typer.Option(metavar="COUNT", help="Copies that work together; 1.")]
Retries = Annotated[str | None, typer.Option(metavar="COUNT", help="More attempts after a failure; 0.")]
Timeout = Annotated[str | None, typer.Option(metavar="TIME", help="The most for an attempt, like 2h.")]
Variables = Annotated[list[str] | None, typer.Option(metavar="K=V", help="A variable of its environment.")]
Experiment = Annotated[str | None, typer.Option(metavar="NAME", help="Of its run; else as the job.")]

Register = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Make what it saved by fj.save_model the next version of this model."),
]


SPELLING = {"inputs": "--dataset", "args": "ARGS", "script": "SCRIPT"}


def train(
    session: Session,
    script: Script,
    args: Args = None,
    *,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Else as the script.")] = None,
    dataset: Inputs = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    processes: Processes = None,
    framework: Annotated[str | None, typer.Option(metavar="NAME", help="plain or torch (torchrun).")] = None,
    retries: Retries = None,
    timeout: Timeout = None,
    env: Variables = None,
    experiment: Experiment = None,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where it belongs.")] = None,
    register: Register = None,
    follow: Annotated[bool, typer.Option("--follow/--detach", help="Wait and show its log, or not.")] = True,
) -> int:
    """Run a script as a job, with the code around it, and follow it; exit 1 if it does not end well."""
    inputs = dict(_input(each) for each in dataset or ())
    variables = dict(_pair(each, where="--env", form="K=V") for each in env or ())
    typed = {"cpus": cpus, "gpus": gpus, "processes": processes, "retries": retries, "framework": framework}
    options: dict[str, Any] = {key: value for key, value in typed.items() if value is not None}
    if timeout is not None:
        options["timeout"] = reading.length_of_time(timeout, "--timeout")
    if register is not None:
        reading.check_name("--register", register, command="train")
    packed = pack_code(Path(script))
    options |= {"args": args or (), "inputs": inputs, "env": variables, "experiment": experiment}
    try:
        spec = spec_for(packed, name=name, **options)
    except InvalidInput as error:
        raise reading.as_options(error, command="train", spelling=SPELLING) from None
    with session.platform() as platform:
        job = submit(platform, spec, packed, workspace=workspace)
        _say(session, f"job {job.id} ({job.name}) is queued with {plural(packed.files, 'file')} of code")
        if not follow:
            return _leave(session, job, register, far=platform.where.startswith("http"))
        job = follow_job(platform, job, to=sys.stderr if session.json else sys.stdout)
        status = _tell_end(session, job)
        if register is not None and status == 0:
            take_model(session, platform, job.id, register, workspace=workspace)
    return status


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
        print_log(platform, job, follow=follow, offset=int(offset), to=sys.stdout)


def wait(session: Session, job: JOB) -> int:
    """Show every change until a job ends; exit 1 if it failed or was cancelled."""
    reading.check(all_operations()["jobs.wait"], {"job": job})
    with session.platform() as platform:
        last = _show_changes(platform.jobs.wait(job), as_json=session.json)
    return 0 if last is None or last.state is JobState.DONE else FAILED


def explain(session: Session, job: JOB) -> None:
    """Say why a job waits, what would start it now, and when it will start."""
    reading.check(all_operations()["jobs.explain"], {"job": job})
    with session.platform() as platform:
        found = platform.jobs.explain(job)
    if session.json:
        show(found, as_json=True)
        return
    place = f", {found.position} of {found.of} in the queue" if found.position else ""
    print(f"job {found.job} is {found.state}{place}: {printable(found.words)}")
    for change in found.would_start:
        print(f"  would start now with {printable(change)}")
    if found.state == "waiting":
        print(f"  expected start {text_of(found.expected_start) if found.expected_start else 'unknown'}")


def take_model(session: Session, platform: Platform, job: str, model: str, *, workspace: str | None) -> None:
    """Register the model that a job left behind, and say so."""
    made = platform.register(job, model, workspace=workspace)
    said = sentence("models.register", made, {})
    if session.json or said is None:
        show(made, as_json=True)
    else:
        say(session, said)


def _input(text: str) -> tuple[str, str]:
    """NAME=REFERENCE; a reference alone is also the input's name."""
    name, equals, _ = text.partition("=")
    if equals:
        return _pair(text, where="--dataset", form="NAME=REF")
    return name.rpartition("/")[2].rpartition(":")[2].partition("@")[0], name


def _pair(text: str, *, where: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or (where == "--dataset" and not value):
        raise InvalidInput.at(where, given=text, allowed=form)
    return name, value


def _leave(session: Session, job: Job, register: str | None, *, far: bool) -> int:
    if session.json:
        show(job, as_json=True)
        return 0
    take = (("then", f"models from-job {job.id} {register}"),) if register else ()
    then = (("next", f"jobs logs {job.id} --follow"), *take, ("undo", f"jobs cancel {job.id}"))
    if far:
        say(session, Said(f"job {job.id} goes on by itself", then))
    else:
        waits = f"no platform runs on this home: job {job.id} waits until one does, or until it is followed"
        say(session, Said(waits, (("next", "up"), *then)))
    return 0


def _tell_end(session: Session, job: Job) -> int:
    if session.json:
        show(job, as_json=True)
    else:
        say(session, _ending(job))
    return 0 if job.state is JobState.DONE else FAILED


def _ending(job: Job) -> Said:
    took = span(job.started_at, job.ended_at)
    if job.state is JobState.DONE:
        words = f"job {job.id} is done after {took}: {plural(len(job.outputs), 'output')}"
        return Said(words, (("next", f"runs show {job.run}"),))
    ended = "failed" if job.state is JobState.FAILED else "is cancelled"
    words = f"job {job.id} {ended} after {took}: {printable(job.reason or '')}"
    return Said(words, (("next", f"jobs logs {job.id}"), ("next", f"jobs retry {job.id}")))


def _show_changes(changes: Iterable[Job], *, as_json: bool) -> Job | None:
    """Each change in a line, and none twice: the platform also says now and then that nothing has changed."""
    last, told = None, ""
    for last in changes:
        line = to_json(last).decode() if as_json else _line(last)
        if line != told:
            print(line, flush=True)
        told = line
    return last


def _line(job: Job) -> str:
    far = f" {job.progress.step} of {job.progress.total}" if job.progress else ""
    why = f": {printable(job.reason)}" if job.reason else ""
    attempt = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    return f"{job.name} {job.state}{attempt}{far}{why}"


def _say(session: Session, words: str) -> None:
    print(words, file=sys.stderr if session.json else sys.stdout, flush=True)


COMMANDS: dict[str, Any] = {"train": partial(command, "train", train)}
ROOM: dict[str, Any] = {"logs": logs, "wait": wait, "explain": explain}
