"""`falaj queues`: the tree of queues and their use, quotas and budgets."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.queues_kueue import apply, diff, render
from falaj.apps.cli.commands.queues_what_if import what_if, what_if_result
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.prompts import confirm
from falaj.apps.cli.output.queue_tables import print_budgets, print_queue, print_tree
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_exact, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput, NotFound
from falaj.records import sizes
from falaj.records.scheduling.accounting import (
    BudgetState,
    BudgetTerms,
    QueueChange,
    QueueSettings,
    QueueState,
)
from falaj.records.scheduling.snapshot import Quota
from falaj.sdk.platform import Platform

PRESENTATION = Presentation(lists={"queue": "queues show"})


NAME = Annotated[str, typer.Argument(metavar="QUEUE", help="A queue: its name.")]
AMOUNT = "COUNT|none"
SIZE = "SIZE|none"
MOST = "The limit of what it may use, including what it borrows."
BORROW = Annotated[bool, typer.Option("--borrow/--no-borrow", help="Whether it may use more than its quota.")]
PARENT = Annotated[str | None, typer.Option(metavar="QUEUE|none", help="Its parent queue.")]
WEIGHT = Annotated[str | None, typer.Option(metavar="NUMBER", help="Twice the weight, twice the share.")]
WORKSPACES = Annotated[
    list[str] | None,
    typer.Option(metavar="WORKSPACE|all", help="A workspace that may submit to it. (may be repeated)"),
]
PERIOD = Annotated[str, typer.Option(metavar="PERIOD", help="month, week, or none: a single budget.")]
RESOURCES = {"cpus": "cpu", "gpus": "gpu", "memory_bytes": "memory"}


@PRESENTATION.command("show")
def show_queue(
    session: Session,
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="A queue: its name; all of them unless given.")
    ] = None,
) -> None:
    """Show the quota, use and waiting jobs of a queue; without a name, the tree of all queues."""
    if queue is not None:
        parsing.check(all_operations()["queues.show"], {"queue": queue})
    with session.platform() as platform:
        found: Any = _all(platform) if queue is None else platform.queues.show(queue)
    if session.json:
        show(found, as_json=True)
    elif queue is None:
        print_tree(found)
    else:
        print_queue(found)


@PRESENTATION.command("list")
def list_queues(
    session: Session,
    *,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the queues and their use."""
    show_page(session, "queues.list", {"after": after, "limit": limit}, print_tree, everything=everything)


@PRESENTATION.command("set")
def set_queue(
    session: Session,
    queue: Annotated[
        str, typer.Argument(metavar="QUEUE", help="A queue; it is created if it does not exist.")
    ],
    *,
    gpus: Annotated[str | None, typer.Option(metavar=AMOUNT, help="Its quota of GPUs.")] = None,
    cpus: Annotated[str | None, typer.Option(metavar=AMOUNT, help="Its quota of CPUs.")] = None,
    memory: Annotated[str | None, typer.Option(metavar=SIZE, help="Its quota of memory, like 64GiB.")] = None,
    gpu_limit: Annotated[str | None, typer.Option(metavar=AMOUNT, help=MOST)] = None,
    cpu_limit: Annotated[str | None, typer.Option(metavar=AMOUNT, help=MOST)] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar=SIZE, help=MOST)] = None,
    borrow: BORROW = True,
    parent: PARENT = None,
    weight: WEIGHT = None,
    workspace: WORKSPACES = None,
) -> None:
    """Set the quota, limits, parent, weight and workspaces of a queue.

    Options that are not given keep their values. Without a quota a queue may use everything; with a quota and without
    a limit it never uses more than its quota.
    """
    parsing.check_name("QUEUE", queue, command="queues set")
    asked = {"cpus": cpus, "gpus": gpus, "memory_bytes": memory}
    limits = {"cpus": cpu_limit, "gpus": gpu_limit, "memory_bytes": memory_limit}
    with session.platform() as platform:
        was = _settings(platform, queue)
        quota = _quota(was.quota, asked, suffix="")
        given: dict[str, Any] = {
            "name": queue,
            "quota": quota,
            "limit": _limit(was, quota, limits) if borrow else None,
            "parent": was.parent if parent is None else None if parent == "none" else parent,
            "weight": was.weight if weight is None else weight,
            "workspaces": _workspaces(was, workspace),
            "version": was.version,
        }
        parsing.check(all_operations()["queues.set"], given)
        made = platform.queues.set(**given)
    _tell_set(session, made)


def _tell_set(session: Session, made: QueueChange) -> None:
    if session.json or made.queue is None:
        show(made, as_json=session.json)
        return
    name = made.queue.name
    undo = f"queues remove {name}" if made.before is None else set_command(made.before)
    print_message(
        session, Message(f"queue {name} {_describe(made.queue)}", (("undo", undo), ("next", "queues show")))
    )


@PRESENTATION.command("remove")
def remove_queue(session: Session, queue: NAME, *, yes: arguments.YES = False) -> None:
    """Remove a queue that has neither jobs nor child queues."""
    parsing.check(all_operations()["queues.remove"], {"queue": queue})
    confirm(f"queues remove {shlex.quote(queue)}: its settings are lost. Continue?", yes=yes)
    with session.platform() as platform:
        made = platform.queues.remove(queue)
    if session.json or made.before is None:
        show(made, as_json=session.json)
        return
    print_message(
        session, Message(f"queue {made.before.name} is removed", (("undo", set_command(made.before)),))
    )


@PRESENTATION.command("set-budget")
def set_budget(
    session: Session,
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE", help="A workspace: its name.")],
    *,
    gpu_hours: Annotated[str | None, typer.Option(metavar="HOURS", help="GPU-hours in each period.")] = None,
    money: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="In the currency of the prices.")
    ] = None,
    period: PERIOD = "month",
) -> None:
    """Set the budget of a workspace for each period; without an amount, remove it."""
    operation = all_operations()["queues.set_budget"]
    given = parsing.parse(
        operation, {"workspace": workspace, "gpu_hours": gpu_hours, "money": money, "period": period}
    )
    parsing.check(operation, given)
    with session.platform() as platform:
        made = platform.queues.set_budget(**given)
    if session.json:
        show(made, as_json=True)
        return
    before = made.before or BudgetTerms(workspace=workspace)
    undo = (("undo", _budget_spelled(before)),)
    if made.budget is None:
        print_message(session, Message(f"{workspace} has no budget now", undo if made.before else ()))
    else:
        print_message(session, Message(f"{workspace} may spend {_amounts(made.budget)}", undo))
        print_budgets((made.budget,))


@PRESENTATION.command("budgets")
def list_budgets(
    session: Session,
    *,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace only.")
    ] = None,
) -> None:
    """List the budgets of the workspaces that you may see: used in the period, and left."""
    parsing.check(all_operations()["queues.budgets"], {"workspace": workspace})
    with session.platform() as platform:
        found = platform.queues.budgets(workspace=workspace)
    session.show(found, print_budgets)


def set_command(settings: QueueSettings) -> str:
    """Return the command, without `falaj`, that sets a queue to `settings`."""
    words = ["queues", "set", settings.name]
    limit = settings.limit
    for field, word in RESOURCES.items():
        option = f"--{word}" if field == "memory_bytes" else f"--{field}"
        words += [option, _figure(getattr(settings.quota, field), field)]
        if limit is not None:
            words += [f"--{word}-limit", _figure(getattr(limit, field), field)]
    words += ["--no-borrow"] if limit is None else []
    words += ["--parent", settings.parent or "none", "--weight", format_exact(settings.weight)]
    for name in settings.workspaces or ("all",):
        words += ["--workspace", name]
    return shlex.join(words)


# ------------------------------------------------------------------------------------------- parsing


def _all(platform: Platform) -> tuple[QueueState, ...]:
    found: list[QueueState] = []
    after: str | None = ""
    while after is not None:
        page = platform.queues.list(after=after, limit=1000)
        found += page.items
        after = page.next
    return tuple(found)


def _settings(platform: Platform, name: str) -> QueueSettings:
    """Return the settings of a queue, or the defaults where it does not exist."""
    try:
        return platform.queues.show(name).settings
    except NotFound:
        return QueueSettings(name=name)


def _quota(was: Quota, typed: dict[str, str | None], *, suffix: str) -> Quota:
    changed = {field: _count(text, field, suffix) for field, text in typed.items() if text is not None}
    return Quota.model_validate(was.model_dump() | changed)


def _limit(was: QueueSettings, quota: Quota, typed: dict[str, str | None]) -> Quota | None:
    """Return the new limit: values that were not given stay; where nothing was borrowed, it follows the quota."""
    if was.limit is None and not any(text is not None for text in typed.values()):
        return None
    before = was.limit or was.quota
    follows = {
        field: getattr(quota, field)
        for field in RESOURCES
        if getattr(before, field) == getattr(was.quota, field)
    }
    return _quota(before.model_copy(update=follows), typed, suffix="-limit")


def _count(text: str, field: str, suffix: str) -> int | None:
    if text == "none":
        return None
    name = RESOURCES[field] if suffix or field == "memory_bytes" else field
    if text == "0":
        return 0
    if field == "memory_bytes":
        if (found := sizes.read_size(text)) is not None:
            return found
        raise InvalidInput.at(f"--{name}{suffix}", given=text, allowed=f"none, or {sizes.RULE}")
    if text.isascii() and text.isdecimal() and len(text) <= 15:
        return int(text)
    raise InvalidInput.at(f"--{name}{suffix}", given=text, allowed="a whole number, or none")


def _workspaces(was: QueueSettings, typed: list[str] | None) -> tuple[str, ...]:
    if not typed:
        return was.workspaces
    return () if "all" in typed else tuple(name for part in typed for name in part.split(",") if name)


# ----------------------------------------------------------------------------------------- formatting


def _describe(settings: QueueSettings) -> str:
    quota = _describe_quota(settings.quota)
    most = (
        ""
        if settings.limit is None
        else f", with borrowing {_describe_quota(settings.limit, of=settings.quota)}"
    )
    under = f", child of {settings.parent}" if settings.parent else ""
    return f"may use {quota or 'everything'}{most}{under}; weight {format_exact(settings.weight)}"


def _describe_quota(bounds: Quota, *, of: Quota | None = None) -> str:
    """Return the bounds in words; where `of` has a quota and `bounds` none, the resource is unlimited."""
    words = {"cpus": "CPUs", "gpus": "GPUs", "memory_bytes": "memory"}
    parts = []
    for field, word in words.items():
        figure = getattr(bounds, field)
        if figure is not None:
            parts.append(f"{_figure(figure, field)} {word}")
        elif of is not None and getattr(of, field) is not None:
            parts.append(f"all {word}")
    return ", ".join(parts)


def _figure(figure: int | None, field: str) -> str:
    if figure is None:
        return "none"
    return sizes.spell_size(figure) if figure and field == "memory_bytes" else str(figure)


def _amounts(budget: BudgetState) -> str:
    terms = budget.terms
    parts = [f"{format_exact(terms.gpu_hours)} GPU-hours"] if terms.gpu_hours is not None else []
    parts += [f"{format_exact(terms.money)} {budget.currency}"] if terms.money is not None else []
    each = "in all" if terms.period == "none" else f"a {terms.period}"
    return f"{' and '.join(parts)} {each}"


def _budget_spelled(terms: BudgetTerms) -> str:
    words = ["queues", "set-budget", printable(terms.workspace)]
    words += ["--gpu-hours", format_exact(terms.gpu_hours)] if terms.gpu_hours is not None else []
    words += ["--money", format_exact(terms.money)] if terms.money is not None else []
    return shlex.join([*words, "--period", terms.period])


PRESENTATION.commands |= {
    "what-if": what_if,
    "what-if-result": what_if_result,
    "render": render,
    "diff": diff,
    "apply": apply,
}
