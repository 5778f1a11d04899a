"""The options of `falaj train`: each is a field of the job, spelled for people."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, NamedTuple

import typer

from falaj.sdk.job_request import JobRequest, Location, parse_job_request

OptionKind = Literal["text", "several", "flag"]


class TrainOption(NamedTuple):
    """An option: what stands for its value, what its help says, and whether it may be repeated or is a switch."""

    word: str
    help: str
    kind: OptionKind = "text"
    spelled: str | None = None


OPTIONS: dict[str, TrainOption] = {
    "name": TrainOption("NAME", "Else as the script."),
    "queue": TrainOption("QUEUE", "The queue that it waits in; default."),
    "dataset": TrainOption("NAME=REF", "An input: a training set, view, model version or blob.", "several"),
    "cpus": TrainOption("COUNT", "For all its processes; 1."),
    "memory": TrainOption("SIZE", "For all its processes, like 8GiB."),
    "disk": TrainOption("SIZE", "The most that it may write, like 20GiB."),
    "gpus": TrainOption("COUNT", "For all its processes; 0."),
    "gpu_memory": TrainOption("SIZE", "Of one GPU, like 16GiB."),
    "gpu_share": TrainOption("PART", "A part of one GPU, like 0.25, instead of a whole one."),
    "gpu_profile": TrainOption("PROFILE", "MIG slices, like 1g.18gb, instead of whole GPUs."),
    "gpu_model": TrainOption("MODEL", "A model of GPU that will do.", "several"),
    "priority": TrainOption(
        "CLASS", "low, normal, high, urgent, or a number: higher ones of the same queue go first; normal."
    ),
    "preempt": TrainOption(
        "", "Whether it may be asked to make room, and go on later.", "flag", "--preempt/--no-preempt"
    ),
    "framework": TrainOption(
        "NAME", "plain, torch (torchrun), tensorflow, jax, mpi, horovod, xgboost …; plain."
    ),
    "processes": TrainOption("COUNT", "Copies that work together; 1. Of torch also FEWEST:MOST, like 2:4."),
    "roles": TrainOption("ROLE=COUNT,…", "The processes of each role, like worker=2,ps=1."),
    "environment": TrainOption("NAME", "The environment of packages that it runs in; else the platform's."),
    "pool": TrainOption("POOL", "Only on nodes of this pool.", "several"),
    "label": TrainOption("LABEL", "Only on nodes with this label.", "several"),
    "avoid": TrainOption("LABEL", "Not on nodes with this label.", "several"),
    "group": TrainOption("NAME", "What --near and --apart of other jobs call it."),
    "near": TrainOption("GROUP", "On a node beside a job of this group.", "several"),
    "apart": TrainOption("GROUP", "On no node with a job of this group.", "several"),
    "spread": TrainOption("", "Each replica on a node of its own.", "flag", "--spread"),
    "island": TrainOption("KIND", "Keep it in one NVLink island or RDMA fabric: nvlink, rdma."),
    "retries": TrainOption("COUNT", "More attempts after a failure; 0."),
    "timeout": TrainOption("TIME", "The most for an attempt, like 2h."),
    "hang_after": TrainOption("TIME", "Without a sign of life for so long, it counts as hung, like 10m."),
    "env": TrainOption("K=V", "A variable of its environment.", "several"),
    "secret": TrainOption(
        "VARIABLE=NAME", "A variable whose value is a secret; falaj secrets set.", "several"
    ),
    "experiment": TrainOption("NAME", "Of its run; else as the job."),
    "network": TrainOption("", "Let it reach the network.", "flag", "--network"),
    "nsys": TrainOption("", "Run it under Nsight Systems; the reports are outputs.", "flag", "--nsys"),
    "workspace": TrainOption("WORKSPACE", "Where it belongs."),
}


def option_parameters() -> list[inspect.Parameter]:
    """The options, for typer: text, lists of text and switches; what is not typed is none."""
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
    """What was typed, as the form of a job whose faults name the options."""
    given = {name: value for name, value in typed.items() if value is not None and value != []}
    return parse_job_request(given, place=option_name)


def option_name(at: Location) -> str:
    """The field as it is typed."""
    return {"args": "ARGS", "script": "SCRIPT"}.get(at[0], f"--{at[0].replace('_', '-')}")


def _type(choice: TrainOption) -> Any:
    return {"text": str, "several": list[str], "flag": bool}[choice.kind]


def _typer_option(name: str, choice: TrainOption) -> Any:
    spelled = choice.spelled or f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {} if choice.kind == "flag" else {"metavar": choice.word}
    return typer.Option(spelled, help=choice.help, **settings)
