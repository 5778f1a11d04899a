"""`falaj runs`: runs of experiments; list, compare, tag and import them, and find the best."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.runs_compare import compare_runs
from falaj.apps.cli.commands.runs_import import import_runs
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import call, pages
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of, full_id
from falaj.apps.cli.output.messages import Message, show_or_tell
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_elapsed, format_number, format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput, NotFound
from falaj.records.governance.objects import Page
from falaj.records.sizes import format_size
from falaj.records.tracking import ListedRun, Run, RunDetails

PRESENTATION = Presentation(
    help={
        "sources": "What it was made from: an id, or kind:name.",
        "where": "A condition in MLflow's filter language.",
    },
    examples={"sources": "blob:NAME"},
    options={"set-tags": "tag", "delete-tags": "tag --delete"},
)
PRESENTATION.command("compare")(compare_runs)
PRESENTATION.command("import")(import_runs)

RUN = Annotated[
    str,
    typer.Argument(metavar="RUN", help=f"A run: {arguments.SHORT}", autocompletion=completion_of("run")),
]
EXPERIMENT = typer.Argument(
    metavar="EXPERIMENT",
    help="An experiment: its name or id. That of a job has the name of the job.",
    autocompletion=completion_of("experiment"),
)
FILTER = Annotated[
    str,
    typer.Option(
        "--filter", metavar="FILTER", help="A condition, such as \"metrics.auc > 0.9 and params.lr = '0.1'\"."
    ),
]
ATTRIBUTES = {
    "name": "name",
    "status": "status",
    "started": "start_time",
    "ended": "end_time",
    "user": "user",
}
"""What a list can be sorted by beside metrics, parameters and tags."""


@PRESENTATION.command("show")
def show_run(session: Session, run: RUN) -> None:
    """Show a run with its parameters, tags, datasets, artifacts and summaries of its metrics."""
    parsing.check(all_operations()["runs.show"], {"run": run})
    with session.platform() as platform:
        found = platform.runs.show(full_id(platform, "run", run))
    session.show(found, _show_details)


@PRESENTATION.command("list")
def list_runs(
    session: Session,
    experiment: Annotated[list[str] | None, EXPERIMENT] = None,
    *,
    where: FILTER = "",
    metrics: Annotated[
        str, typer.Option(metavar="METRICS", help="Show these metrics as columns, such as auc,loss.")
    ] = "",
    sort: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Sort by a metric, params.KEY, tags.KEY, name, status, started, ended or user; -KEY: descending. "
            "(may be repeated)",
        ),
    ] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="List those that were deleted.")] = False,
    workspace: arguments.OF_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the runs of experiments, or of the whole workspace, newest first."""
    keys = _keys(metrics)
    given: dict[str, Any] = {
        "experiments": experiment or (),
        "where": where,
        "metrics": keys,
        "order_by": [_order(key) for key in sort or ()],
        "view": "deleted" if deleted else "active",
        "after": after,
        "limit": _number(limit),
    } | ({"workspace": workspace} if workspace else {})
    operation = all_operations()["runs.list"]
    parsing.check(operation, given, spelling=SPELLING)
    with session.platform() as platform:
        if everything:
            items = tuple(item for page in pages(platform, operation, given) for item in page.items)
            found: Page[ListedRun] = Page(items=items)
        else:
            found = call(platform, operation, given)
    if session.json or not found.items:
        show(found, as_json=session.json)
        return
    _show_runs(found.items, keys)
    if found.next:
        print(f"there are more: --all lists them, or --after {found.next} goes on", file=sys.stderr)


SPELLING = {
    "experiments": "EXPERIMENT",
    "where": "--filter",
    "metrics": "--metrics",
    "order_by": "--sort",
    "limit": "--limit",
    "after": "--after",
    "workspace": "--workspace",
}


@PRESENTATION.command("best")
def best_run(
    session: Session,
    experiment: Annotated[str, EXPERIMENT],
    *,
    metric: Annotated[str, typer.Option(metavar="METRIC", help="The metric that decides, such as auc.")],
    lowest: Annotated[
        bool, typer.Option("--min/--max", help="The lowest or the highest value. (default: --max)")
    ] = False,
    where: FILTER = "",
) -> None:
    """Show the run of an experiment with the best last value of a metric."""
    (key,) = _keys(metric) or ("",)
    given: dict[str, Any] = {
        "experiments": (experiment,),
        "where": where,
        "metrics": (key,),
        "order_by": (f"metrics.`{key}` {'ASC' if lowest else 'DESC'}",),
        "limit": 1,
    }
    parsing.check(all_operations()["runs.list"], given, spelling=SPELLING | {"metrics": "--metric"})
    with session.platform() as platform:
        found = platform.runs.list(**given).items
        if not found or not found[0].metrics:
            raise NotFound(f"no run of {experiment} has the metric {key!r} with a number")
        details = platform.runs.show(found[0].id)
    session.show(details, _show_details)


@PRESENTATION.command("tag")
def tag_run(
    session: Session,
    run: RUN,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Tags to set.")] = None,
    *,
    delete: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Delete this tag. (may be repeated)")
    ] = None,
) -> None:
    """Set tags of a run, or delete some."""
    new = _pairs(tags or ())
    if not new and not delete:
        raise InvalidInput.at("KEY=VALUE", given="nothing", allowed="tags to set, or --delete KEY")
    with session.platform() as platform:
        ident = full_id(platform, "run", run)
        if delete:
            platform.runs.delete_tags(ident, tuple(delete))
        if new:
            platform.runs.set_tags(ident, new)
        found = platform.runs.show(ident)
    done = [f"set {plural(len(new), 'tag')}"] * bool(new) + [
        f"deleted {plural(len(delete or ()), 'tag')}"
    ] * bool(delete)
    message = Message(f"{found.run.name}: {' and '.join(done)}", (("see", f"runs show {ident}"),))
    show_or_tell(session, found, message)


@PRESENTATION.message("runs.delete")
def _deleted(result: Run, given: Any) -> Message:
    return Message(
        f"{result.name} is deleted; it can still be restored", (("undo", f"runs restore {result.id}"),)
    )


@PRESENTATION.message("runs.restore")
def _restored(result: Run, given: Any) -> Message:
    return Message(f"{result.name} is restored", (("see", f"runs show {result.id}"),))


def _keys(text: str) -> tuple[str, ...]:
    return tuple(part.strip().removeprefix("metrics.") for part in text.split(",") if part.strip())


def _order(text: str) -> str:
    """Return a sort key as the filter language has it: `-auc` is metrics.`auc` DESC."""
    key, direction = (text[1:], "DESC") if text.startswith("-") else (text, "ASC")
    entity, dot, rest = key.partition(".")
    if dot and entity in ("metrics", "params", "tags"):
        return f"{entity}.`{rest}` {direction}"
    return f"{ATTRIBUTES[key]} {direction}" if key in ATTRIBUTES else f"metrics.`{key}` {direction}"


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidInput.at("KEY=VALUE", given=text, allowed="a key, '=' and a value", fix="team=risk")
        found[key] = value
    return found


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _show_runs(found: Sequence[ListedRun], keys: Sequence[str]) -> None:
    values = [{metric.key: metric.last for metric in each.metrics} for each in found]
    rows = [
        [
            each.id,
            printable(each.name),
            each.status.value,
            *(format_number(known.get(key)) for key in keys),
            format_value(each.started_at),
            format_elapsed(each.started_at, each.ended_at),
        ]
        for each, known in zip(found, values, strict=True)
    ]
    show_rows(["id", "name", "status", *keys, "started", "took"], rows)


def _show_details(found: RunDetails) -> None:
    run = found.run
    show_fields(
        {
            "name": printable(run.name),
            "id": run.id,
            "status": run.status.value,
            "started": format_value(run.started_at),
            "took": format_elapsed(run.started_at, run.ended_at),
            "label": format_value(run.label),
        }
        | ({"parent": run.parent} if run.parent else {})
        | ({"deleted": format_value(run.deleted_at)} if run.deleted_at else {})
        | {f"tag {each.key}": printable(each.value) for each in found.tags}
    )
    _table(["parameter", "value"], [[each.key, printable(each.value)] for each in found.params])
    _table(
        ["metric", "last", "at step", "lowest", "highest", "points"],
        [
            [
                each.key,
                format_number(each.last),
                str(each.last_step),
                format_number(each.low),
                format_number(each.high),
                str(each.points),
            ]
            for each in found.metrics
        ],
    )
    _table(
        ["dataset", "digest", "source"],
        [[printable(each.name), each.digest, printable(each.source[:80])] for each in found.datasets],
    )
    _table(
        ["artifact", "size", "blob"],
        [[each.path, format_size(each.size_bytes), each.blob] for each in found.artifacts],
    )


def _table(headings: list[str], rows: list[list[str]]) -> None:
    if rows:
        print()
        show_rows(headings, rows)
