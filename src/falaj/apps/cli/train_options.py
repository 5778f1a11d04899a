"""The options of `falaj train`: each is a field of the job, spelled for people."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, NamedTuple

import typer

from falaj.sdk.job_form import JobForm, Location, form_of

Kind = Literal["text", "several", "flag"]


class Choice(NamedTuple):
    """An option: what stands for its value, what its help says, and whether it may be repeated or is a switch."""

    word: str
    help: str
    kind: Kind = "text"
    spelled: str | None = None


OPTIONS: dict[str, Choice] = {
    "name": Choice("NAME", "Else as the script."),
    "queue": Choice("QUEUE", "The queue that it waits in; default."),
    "dataset": Choice("NAME=REF", "An input: a training set, view, model version or blob.", "several"),
    "cpus": Choice("COUNT", "For all its processes; 1."),
    "memory": Choice("SIZE", "For all its processes, like 8GiB."),
    "disk": Choice("SIZE", "The most that it may write, like 20GiB."),
    "gpus": Choice("COUNT", "For all its processes; 0."),
    "gpu_memory": Choice("SIZE", "Of one GPU, like 16GiB."),
    "gpu_share": Choice("PART", "A part of one GPU, like 0.25, instead of a whole one."),
    "gpu_profile": Choice("PROFILE", "MIG slices, like 1g.18gb, instead of whole GPUs."),
    "gpu_model": Choice("MODEL", "A model of GPU that will do.", "several"),
    "priority": Choice(
        "CLASS", "low, normal, high, urgent, or a number: higher ones of the same queue go first; normal."
    ),
    "preempt": Choice(
        "", "Whether it may be asked to make room, and go on later.", "flag", "--preempt/--no-preempt"
    ),
    "framework": Choice("NAME", "plain, torch (torchrun), tensorflow, jax, mpi, horovod, xgboost …; plain."),
    "processes": Choice("COUNT", "Copies that work together; 1. Of torch also FEWEST:MOST, like 2:4."),
    "roles": Choice("ROLE=COUNT,…", "The processes of each role, like worker=2,ps=1."),
    "environment": Choice("NAME", "The environment of packages that it runs in; else the platform's."),
    "pool": Choice("POOL", "Only on nodes of this pool.", "several"),
    "label": Choice("LABEL", "Only on nodes with this label.", "several"),
    "avoid": Choice("LABEL", "Not on nodes with this label.", "several"),
    "group": Choice("NAME", "What --near and --apart of other jobs call it."),
    "near": Choice("GROUP", "On a node beside a job of this group.", "several"),
    "apart": Choice("GROUP", "On no node with a job of this group.", "several"),
    "spread": Choice("", "Each replica on a node of its own.", "flag", "--spread"),
    "island": Choice("KIND", "Keep it in one NVLink island or RDMA fabric: nvlink, rdma."),
    "retries": Choice("COUNT", "More attempts after a failure; 0."),
    "timeout": Choice("TIME", "The most for an attempt, like 2h."),
    "hang_after": Choice("TIME", "Without a sign of life for so long, it counts as hung, like 10m."),
    "env": Choice("K=V", "A variable of its environment.", "several"),
    "secret": Choice("VARIABLE=NAME", "A variable whose value is a secret; falaj secrets set.", "several"),
    "experiment": Choice("NAME", "Of its run; else as the job."),
    "network": Choice("", "Let it reach the network.", "flag", "--network"),
    "nsys": Choice("", "Run it under Nsight Systems; the reports are outputs.", "flag", "--nsys"),
    "workspace": Choice("WORKSPACE", "Where it belongs."),
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


def form_of_options(typed: dict[str, Any]) -> JobForm:
    """What was typed, as the form of a job whose faults name the options."""
    given = {name: value for name, value in typed.items() if value is not None and value != []}
    return form_of(given, place=spell_option)


def spell_option(at: Location) -> str:
    """The field as it is typed."""
    return {"args": "ARGS", "script": "SCRIPT"}.get(at[0], f"--{at[0].replace('_', '-')}")


def _type(choice: Choice) -> Any:
    return {"text": str, "several": list[str], "flag": bool}[choice.kind]


def _typer_option(name: str, choice: Choice) -> Any:
    spelled = choice.spelled or f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {} if choice.kind == "flag" else {"metavar": choice.word}
    return typer.Option(spelled, help=choice.help, **settings)
