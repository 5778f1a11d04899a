"""`falaj train`: run a script, or the job in a YAML file, and follow it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import typer

from falaj.apps.cli import Terminated
from falaj.apps.cli.commands.models import register_model
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.job_progress import cancel_local_job, follow_job
from falaj.apps.cli.output.job_summary import describe_memory
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_elapsed, format_metrics, plural, printable
from falaj.apps.cli.session import Session
from falaj.errors import FalajError, Fault
from falaj.extras import extra_of, how_to_install
from falaj.records.training.jobs import Job, JobSpec, JobState
from falaj.sdk.job_fields import SYNONYMS
from falaj.sdk.job_request import JobRequest, Location, parse_job_request
from falaj.sdk.platform import Platform
from falaj.sdk.training import PreparedJob, add_estimate, prepare, submit

Script = Annotated[
    str | None,
    typer.Argument(metavar="SCRIPT", help="A Python script; the code in its folder is uploaded, too."),
]
Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS...", help="Its arguments; after -- if they begin with '-'."),
]
File = Annotated[
    str | None, typer.Option(metavar="FILE", help="The job in YAML; options that are typed take precedence.")
]
Register = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Register the model that it saved with fj.save_model as the next version of this model.",
    ),
]
Follow = Annotated[
    bool, typer.Option("--follow/--detach", "-f/-d", help="Wait and show its log, or return at once.")
]
Estimated = Annotated[
    bool,
    typer.Option(
        "--estimate", help="Run it here up to fj.fit to estimate its memory; refuse a job that cannot fit."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job as YAML without submitting it.")]

MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
CODE_ERROR = re.compile(r"\b(?:SyntaxError|IndentationError|TabError|ImportError|NameError)\b")
"""Errors that the same code has again: a retry does not help."""

SECRET_WORDS = re.compile(r"(?:^|_)[A-Z0-9]*(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY)S?(?=_|$)")
"""Matches the names of variables that hold a secret, but not TOKENIZERS_PARALLELISM."""

TYPED = {plain: spelled for spelled, plain in SYNONYMS.items()} | {
    "inputs": "dataset",
    "secrets": "secret",
    "volumes": "volume",
}
"""The option that sets a field of JobSpec, where it has another name."""


def train_command() -> Any:
    """Return `falaj train`, with an option for every field of a job."""
    *own, _ = inspect.signature(
        train, eval_str=True
    ).parameters.values()  # the last one stands for the fields of a job

    def run(session: Session, **typed: Any) -> int:
        return train(session, **typed)

    run.__signature__ = inspect.Signature([*own, *option_parameters()])  # type: ignore[attr-defined]
    run.__doc__ = train.__doc__
    return command("train", run, creates_home=True)


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
    """Run a script as a job, with the code in its folder, and follow it; exit 1 if it fails or is cancelled."""
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
            return report_detached(session, job, register, is_remote=platform.where.startswith("http"))
        try:
            job = follow_job(platform, job, to=sys.stderr if session.json else sys.stdout)
        except Terminated:
            cancel_local_job(platform, job.id)
            raise
        status = report_end(session, platform, job)
        if register is not None and status == 0:
            register_model(session, platform, job.id, register, workspace=ready.workspace)
    return status


def submit_file(
    session: Session,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The job in YAML; its script is in the same folder.")
    ],
    *,
    workspace: arguments.IN_WORKSPACE = None,
) -> int:
    """Submit the job in a YAML file with the code of its script; falaj train --file also follows it."""
    ready = prepare(request_from_options({"workspace": workspace}), file=file)
    warn_about_secrets(ready.spec)
    with session.platform() as platform:
        job = _submit(platform, ready)
        _say(
            session, f"job {job.id} ({job.name}) is queued with {plural(ready.packed.files, 'file')} of code"
        )
        return report_detached(session, job, None, is_remote=platform.where.startswith("http"))


def warn_about_secrets(spec: JobSpec) -> None:
    """Warn about variables that look like secrets: everyone who may see the job sees its variables."""
    for variable in spec.env:
        if SECRET_WORDS.search(variable.upper()):
            name = re.sub(r"[^a-z0-9]+", "-", variable.lower()).strip("-")
            print(
                f"warning: {variable} looks like a secret, and everyone who sees the job sees its value\n"
                f"  fix    falaj secrets set {name}, and --secret {variable}={name} instead of --env",
                file=sys.stderr,
            )


def report_detached(session: Session, job: Job, register: str | None, *, is_remote: bool) -> int:
    """Print the next commands for a job that is not followed."""
    if session.json:
        show(job, as_json=True)
        return 0
    register_next = (("then", f"models from-job {job.id} {register}"),) if register else ()
    then = (("next", f"jobs logs {job.id} --follow"), *register_next, ("undo", f"jobs cancel {job.id}"))
    if is_remote:
        print_message(session, Message(f"job {job.id} runs in the background", then))
    else:
        text = f"no platform runs on this home: job {job.id} waits until one does, or until it is followed"
        print_message(session, Message(text, (("next", "up"), *then)))
    return 0


def report_end(session: Session, platform: Platform, job: Job) -> int:
    """Print how a job ended, with the last values of its metrics; return the exit status."""
    if session.json:
        show(job, as_json=True)
    else:
        print_message(session, _ending(job, _last_metrics(platform, job)))
    return 0 if job.state is JobState.DONE else FAILED


def _last_metrics(platform: Platform, job: Job) -> dict[str, float]:
    """Return the last value of each metric that the job has logged; none where the caller may not see its run."""
    try:
        logged = platform.runs.show(job.run).metrics
    except FalajError:
        return {}
    return {each.key: each.last for each in logged if each.last is not None}


def _submit(platform: Platform, ready: PreparedJob) -> Job:
    """Submit the job; faults in its fields are reported under the names of the options."""
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


def _ending(job: Job, metrics: Mapping[str, float]) -> Message:
    took = format_elapsed(job.started_at, job.ended_at)
    if job.state is JobState.DONE:
        logged = f"\n  logged {format_metrics(metrics)}" if metrics else ""
        words = f"job {job.id} is done after {took}: {plural(len(job.outputs), 'output')}{logged}"
        return Message(words, (("next", f"runs show {job.run}"),))
    ended = "failed" if job.state is JobState.FAILED else "is cancelled"
    words = f"job {job.id} {ended} after {took}: {printable(job.reason or '')}"
    logs = ("next", f"jobs logs {job.id}")
    if (fix := _fix_of_code(job)) is not None:
        return Message(f"{words}\n  fix    {fix}", (logs,))
    return Message(words, (logs, ("next", f"jobs retry {job.id}")))


def _fix_of_code(job: Job) -> str | None:
    """Return the fix of a failure that the same code would have again; none where a retry may help."""
    reason = job.reason or ""
    if (module := MISSING_MODULE.search(reason)) is not None:
        own = job.spec.environment is None
        where = "the platform's Python" if own else f"the environment {job.spec.environment}"
        command = f"{how_to_install(module[1])}, or " if own and extra_of(module[1]) else ""
        return (
            f"{printable(module[1])} is not installed in {where}: {command}install it in a virtualenv, name "
            "that in falaj.toml under [jobs.environments], and give its name to falaj train with --environment"
        )
    if CODE_ERROR.search(reason):
        return "correct the code, and submit it again with falaj train; a retry runs the code as it was"
    return None


def _say(session: Session, words: str) -> None:
    print(words, file=sys.stderr if session.json else sys.stdout, flush=True)


OptionKind = Literal["text", "several", "flag"]


class TrainOption(NamedTuple):
    """An option: the placeholder of its value, its help, and whether it may be repeated or is a flag."""

    word: str
    help: str
    kind: OptionKind = "text"
    spelled: str | None = None


OPTIONS: dict[str, TrainOption] = {
    "name": TrainOption("NAME", "Its name. (default: the name of the script)"),
    "queue": TrainOption("QUEUE", "The queue that it waits in. (default: default)"),
    "dataset": TrainOption("NAME=REF", "An input: a training set, view, model version or blob.", "several"),
    "volume": TrainOption("NAME", "A volume that an administrator lets its workspace use.", "several"),
    "cpus": TrainOption("COUNT", "Of each node, for all its processes. (default 1)"),
    "memory": TrainOption("SIZE", "Of each node, for all its processes, like 8GiB."),
    "disk": TrainOption("SIZE", "At most so much disk space on each node, like 20GiB."),
    "gpus": TrainOption("COUNT", "Of each node, for all its processes. (default 0)"),
    "gpu_memory": TrainOption("SIZE", "Of one GPU, like 16GiB."),
    "gpu_share": TrainOption("PART", "A part of one GPU, like 0.25, instead of a whole one."),
    "gpu_profile": TrainOption("PROFILE", "MIG slices, like 1g.18gb, instead of whole GPUs."),
    "gpu_model": TrainOption("MODEL", "A model of GPU that it may run on.", "several"),
    "priority": TrainOption(
        "CLASS",
        "low, normal, high, urgent, or a number: higher ones of the same queue start first. (default: normal)",
    ),
    "preempt": TrainOption(
        "", "Whether it may be preempted and resumed later.", "flag", "--preempt/--no-preempt"
    ),
    "framework": TrainOption(
        "NAME", "plain, torch (torchrun), tensorflow, jax, mpi, horovod, xgboost … (default: plain)"
    ),
    "nodes": TrainOption(
        "COUNT", "Nodes that work together; they share a machine that holds them all. (default 1)"
    ),
    "processes": TrainOption(
        "COUNT",
        "Processes on each node, which work together; for torch also FEWEST:MOST, like 2:4. (default 1)",
    ),
    "roles": TrainOption("ROLE=COUNT,…", "The processes of each role on all nodes, like worker=2,ps=1."),
    "environment": TrainOption(
        "NAME", "The virtualenv, or on a cluster the image, that it runs in. (default: the platform's)"
    ),
    "pool": TrainOption("POOL", "Only on nodes of this pool.", "several"),
    "label": TrainOption("LABEL", "Only on nodes with this label.", "several"),
    "avoid": TrainOption("LABEL", "Not on nodes with this label.", "several"),
    "group": TrainOption("NAME", "The group that --near and --apart of other jobs refer to."),
    "near": TrainOption("GROUP", "On the same node as a job of this group.", "several"),
    "apart": TrainOption("GROUP", "On no node with a job of this group.", "several"),
    "spread": TrainOption("", "Each of its nodes on a machine of its own.", "flag", "--spread"),
    "island": TrainOption("KIND", "Keep it in one NVLink island or RDMA fabric: nvlink, rdma."),
    "retries": TrainOption("COUNT", "More attempts after a failure. (default 0)"),
    "timeout": TrainOption("TIME", "The time limit of an attempt, like 2h."),
    "hang_after": TrainOption("TIME", "Consider it hung after so long without progress or output, like 10m."),
    "env": TrainOption("K=V", "An environment variable.", "several"),
    "secret": TrainOption(
        "VARIABLE=NAME", "An environment variable whose value is a secret; see falaj secrets set.", "several"
    ),
    "experiment": TrainOption("NAME", "The experiment of its run. (default: the name of the job)"),
    "network": TrainOption("", "Let it reach the network.", "flag", "--network"),
    "nsys": TrainOption("", "Profile it with Nsight Systems; the reports are outputs.", "flag", "--nsys"),
    "workspace": TrainOption("WORKSPACE", "The workspace that it belongs to."),
}


def option_parameters() -> list[inspect.Parameter]:
    """Return the options for typer: text, lists of text and flags; none where they are not typed."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_type(choice) | None, _typer_option(name, choice)],
        )
        for name, choice in OPTIONS.items()
    ]


def request_from_options(typed: dict[str, Any]) -> JobRequest:
    """Return what was typed as the request for a job, whose faults name the options."""
    given = {name: value for name, value in typed.items() if value is not None and value != []}
    return parse_job_request(given, place=option_name)


def option_name(at: Location) -> str:
    """Return the option that sets a field."""
    return {"args": "ARGS", "script": "SCRIPT"}.get(at[0], f"--{at[0].replace('_', '-')}")


def _type(choice: TrainOption) -> Any:
    return {"text": str, "several": list[str], "flag": bool}[choice.kind]


def _typer_option(name: str, choice: TrainOption) -> Any:
    spelled = choice.spelled or f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {} if choice.kind == "flag" else {"metavar": choice.word}
    return typer.Option(spelled, help=choice.help, **settings)


COMMANDS: dict[str, Any] = {"train": train_command}
