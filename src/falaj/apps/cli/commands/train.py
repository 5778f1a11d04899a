"""`falaj train`: run a script, or what a file of YAML says, as a job, and follow it."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.train_options import option_name, option_parameters
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.job_progress import follow_job
from falaj.apps.cli.output.job_summary import describe_memory
from falaj.apps.cli.output.messages import Message, print_message, result_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_elapsed, plural, printable
from falaj.apps.cli.session import Session
from falaj.errors import FalajError, Fault
from falaj.records.training.jobs import Job, JobSpec, JobState
from falaj.sdk.job_fields import SYNONYMS
from falaj.sdk.platform import Platform
from falaj.sdk.training import PreparedJob, add_estimate, prepare, submit

JOB = Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.")]
Script = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="A Python script; its folder's code goes along.")
]
Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS...", help="Its arguments; behind -- if they begin with '-'."),
]
File = Annotated[
    str | None, typer.Option(metavar="FILE", help="The job in YAML; what is typed here wins over it.")
]
Register = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Make what it saved by fj.save_model the next version of this model."),
]
Follow = Annotated[bool, typer.Option("--follow/--detach", help="Wait and show its log, or not.")]
Estimated = Annotated[
    bool,
    typer.Option(
        "--estimate", help="Run it here up to fj.fit for an estimate of its memory; refuse what cannot fit."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job as YAML, and submit nothing.")]

SECRET_WORDS = re.compile(r"(?:^|_)[A-Z0-9]*(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY)S?(?=_|$)")
"""What a variable is called that holds a secret; TOKENIZERS_PARALLELISM is none."""

TYPED = {plain: spelled for spelled, plain in SYNONYMS.items()} | {"inputs": "dataset", "secrets": "secret"}
"""The option that gives a field of JobSpec, where it has another name."""


def train_command() -> Any:
    """`falaj train`, with an option for every field of a job."""
    *own, _ = inspect.signature(train, eval_str=True).parameters.values()  # the last are the fields of a job

    def run(session: Session, **typed: Any) -> int:
        return train(session, **typed)

    run.__signature__ = inspect.Signature([*own, *option_parameters()])  # type: ignore[attr-defined]
    run.__doc__ = train.__doc__
    return command("train", run)


def train(
    session: Session,
    script: Script = None,
    args: Args = None,
    *,
    file: File = None,
    register: Register = None,
    follow: Follow = True,
    estimate: Estimated = False,
    dry_run: DryRun = False,
    **options: Any,
) -> int:
    """Run a script as a job, with the code around it, and follow it; exit 1 if it does not end well."""
    if register is not None:
        parsing.check_name("--register", register, command="train")
    ready = prepare(request_from_options({**options, "args": args or None}), script=script, file=file)
    warn_about_secrets(ready.spec)
    if estimate:
        ready = add_estimate(ready)
        _say_estimate(ready.spec)
    if dry_run:
        return _print_job(session, ready)
    with session.platform() as platform:
        job = _submit(platform, ready)
        files = plural(ready.packed.files, "file")
        _say(session, f"job {job.id} ({job.name}) is queued with {files} of code")
        if not follow:
            return report_detached(session, job, register, far=platform.where.startswith("http"))
        job = follow_job(platform, job, to=sys.stderr if session.json else sys.stdout)
        status = report_end(session, job)
        if register is not None and status == 0:
            register_model(session, platform, job.id, register, workspace=ready.workspace)
    return status


def submit_file(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The job in YAML; its script lies beside it.")],
    *,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where it belongs.")] = None,
) -> int:
    """Queue the job in a file of YAML, with the code around its script; falaj train follows it, too."""
    ready = prepare(request_from_options({"workspace": workspace}), file=file)
    warn_about_secrets(ready.spec)
    with session.platform() as platform:
        job = _submit(platform, ready)
        _say(
            session, f"job {job.id} ({job.name}) is queued with {plural(ready.packed.files, 'file')} of code"
        )
        return report_detached(session, job, None, far=platform.where.startswith("http"))


def warn_about_secrets(spec: JobSpec) -> None:
    """Variables stand in the job's record for all who may see it: those that look like secrets should be secrets."""
    for variable in spec.env:
        if SECRET_WORDS.search(variable.upper()):
            name = re.sub(r"[^a-z0-9]+", "-", variable.lower()).strip("-")
            print(
                f"warning: {variable} looks like a secret, and all who see the job see its value\n"
                f"  fix    falaj secrets set {name}, and --secret {variable}={name} instead of --env",
                file=sys.stderr,
            )


def register_model(
    session: Session, platform: Platform, job: str, model: str, *, workspace: str | None
) -> None:
    """Register the model that a job left behind, and say so."""
    made = platform.register(job, model, workspace=workspace)
    said = result_message("models.register", made, {})
    if session.json or said is None:
        show(made, as_json=True)
    else:
        print_message(session, said)


def report_detached(session: Session, job: Job, register: str | None, *, far: bool) -> int:
    """Say how to go on with a job that is not followed."""
    if session.json:
        show(job, as_json=True)
        return 0
    take = (("then", f"models from-job {job.id} {register}"),) if register else ()
    then = (("next", f"jobs logs {job.id} --follow"), *take, ("undo", f"jobs cancel {job.id}"))
    if far:
        print_message(session, Message(f"job {job.id} goes on by itself", then))
    else:
        waits = f"no platform runs on this home: job {job.id} waits until one does, or until it is followed"
        print_message(session, Message(waits, (("next", "up"), *then)))
    return 0


def report_end(session: Session, job: Job) -> int:
    """Say how a job ended; the exit status."""
    if session.json:
        show(job, as_json=True)
    else:
        print_message(session, _ending(job))
    return 0 if job.state is JobState.DONE else FAILED


def _submit(platform: Platform, ready: PreparedJob) -> Job:
    """Submit; what the platform refuses of the job's fields is named as it is typed."""
    try:
        return submit(platform, ready.spec, ready.packed, workspace=ready.workspace)
    except FalajError as error:
        if not any(fault.where.startswith("spec.") for fault in error.faults):
            raise
        faults = [_as_option(fault) for fault in error.faults]
        raise type(error)(error.message, faults=faults, details=error.details) from None


def _as_option(fault: Fault) -> Fault:
    field, _, inside = fault.where.removeprefix("spec.").partition(".")
    named = inside if field == "affinity" and inside else TYPED.get(field, field)
    return fault.model_copy(update={"where": option_name((named,))})


def _say_estimate(spec: JobSpec) -> None:
    if spec.estimate is not None:
        print(f"memory: {describe_memory(spec.estimate)}", file=sys.stderr, flush=True)


def _print_job(session: Session, ready: PreparedJob) -> int:
    if session.json:
        show(ready.spec, as_json=True)
        return 0
    from falaj.sdk.definition_files.job_yaml import spell_job

    print(printable(spell_job(ready.spec, script=ready.script)), end="")
    return 0


def _ending(job: Job) -> Message:
    took = format_elapsed(job.started_at, job.ended_at)
    if job.state is JobState.DONE:
        words = f"job {job.id} is done after {took}: {plural(len(job.outputs), 'output')}"
        return Message(words, (("next", f"runs show {job.run}"),))
    ended = "failed" if job.state is JobState.FAILED else "is cancelled"
    words = f"job {job.id} {ended} after {took}: {printable(job.reason or '')}"
    return Message(words, (("next", f"jobs logs {job.id}"), ("next", f"jobs retry {job.id}")))


def _say(session: Session, words: str) -> None:
    print(words, file=sys.stderr if session.json else sys.stdout, flush=True)


COMMANDS: dict[str, Any] = {"train": train_command}
