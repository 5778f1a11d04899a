"""`falaj models evaluate`: compute the metrics of a version, and of the champion, on a pinned training set."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_exact
from falaj.apps.cli.output.work_progress import follow_work
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.models.gates import MetricMeasurement

NOBODY = "none"

Version = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="A model version, such as churn@14.",
        autocompletion=completion_of("model_version"),
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        metavar="DATASET", help="The training set to predict.", autocompletion=completion_of("dataset")
    ),
]
Target = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column that the model predicts. (default: if only one is left)"),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="ALIAS", help="The version of this alias, too; none: no other version. (default: champion)"
    ),
]
Cpus = Annotated[str | None, typer.Option(metavar="COUNT", help="CPUs of the job. (default: 1)")]
Queue = Annotated[
    str | None, typer.Option(metavar="QUEUE", help="The queue in which the jobs wait. (default: default)")
]


def evaluate(
    session: Session,
    model: Version,
    *,
    on: Dataset,
    target: Target = None,
    against: Against = None,
    cpus: Cpus = None,
    queue: Queue = None,
) -> None:
    """Compute the metrics of a version on a pinned training set, and those of the champion."""
    operation = all_operations()["models.evaluate"]
    typed = {"model": model, "on": on, "target": target, "cpus": cpus, "queue": queue}
    given: dict[str, Any] = parsing.parse(operation, typed, command="models evaluate")
    if against is not None:
        given["against"] = None if against == NOBODY else against
    parsing.check(operation, given, command="models evaluate", spelling={"model": "VERSION"})
    with session.platform() as platform:
        work = platform.models.evaluate(**given)
        ended = follow_work(session, platform, work, "evaluation", result="workflows show")
    if session.json:
        show(ended, as_json=True)
        return
    found = [MetricMeasurement.model_validate(each) for each in (ended.result or {})["evaluations"]]
    rows = [
        [each.version, name, format_exact(value), str(each.rows), str(each.target), str(each.job)]
        for each in found
        for name, value in sorted(each.metrics.items())
    ]
    show_rows(["version", "metric", "value", "rows", "target", "job"], rows)
