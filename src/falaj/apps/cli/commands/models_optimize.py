"""`falaj models optimize`: make and measure variants of a model version, and show the Pareto table."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.optimization import print_table
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.job_progress import print_log
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import printable
from falaj.apps.cli.output.work_progress import require_controller
from falaj.apps.cli.session import Session
from falaj.control.pipelines.students import words_of_job
from falaj.control.services import all_operations
from falaj.errors import Conflict, InvalidInput
from falaj.optimization.budgets import parse_budget
from falaj.optimization.progress import VariantProgress, parse_progress
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.sizes import format_size
from falaj.sdk.platform import Platform

HEADINGS = ("variant", "stage", "µs, 1 row", "rows/s", "batch", "size", "quality", "why")
JOB = re.compile(words_of_job(r"(job_[0-9a-z]+)", ""))
POLL_S = 0.2

Report = Callable[[VariantProgress], None]


Version = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="A model version, such as churn@14 or churn@champion.",
        autocompletion=completion_of("model_version"),
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="BUDGET",
        help='How much worse it may be: "auc -0.002", "accuracy -0.5%", "log_loss +1%", "rmse +1%".'
        " (default: log loss or RMSE +1%)",
    ),
]
Speedup = Annotated[
    float | None, typer.Option(metavar="TIMES", help="How much faster it must be. (default: 1.1)")
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATASET",
        help="The training set to calibrate, train and measure with. (default: that of the version)",
        autocompletion=completion_of("dataset"),
    ),
]
HeldOut = Annotated[
    str | None,
    typer.Option(metavar="DATASET", help="Another one to measure quality on. (default: a part of the data)"),
]
Target = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column that the model predicts. (default: if only one is left)"),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="The columns that the model takes, in order. (default: its signature)"
    ),
]
RecipeNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RECIPE",
        help="onnx, int8, int8-static, fp16, bf16, prune-structured, prune-unstructured, distill, litert. "
        "(default: the first five; may be repeated)",
    ),
]
Queue = Annotated[
    str | None, typer.Option(metavar="QUEUE", help="The queue in which the jobs wait. (default: default)")
]
Environment = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The Python environment of the jobs, such as one with litert-torch."),
]
Gpus = Annotated[
    int, typer.Option(metavar="COUNT", help="1: measure on a GPU, too, and compare it with the CPU.")
]


def optimize(
    session: Session,
    model: Version,
    *,
    budget: Budget = None,
    speedup: Speedup = None,
    data: Data = None,
    held_out: HeldOut = None,
    target: Target = None,
    feature: Columns = None,
    recipe: RecipeNames = None,
    gpus: Gpus = 0,
    queue: Queue = None,
    environment: Environment = None,
) -> None:
    """Make faster variants of a version, measure them on this hardware, and register those within the budget."""
    given: dict[str, Any] = {"model": model, "gpus": gpus}
    given |= {
        name: value
        for name, value in (
            ("data", data),
            ("held_out", held_out),
            ("target", target),
            ("features", tuple(feature or ())),
            ("recipes", tuple(recipe or ())),
            ("budget", _budget(budget, speedup)),
            ("queue", queue),
            ("environment", environment),
        )
        if value
    }
    spelling = {"model": "VERSION", "features": "--feature", "recipes": "--recipe"}
    parsing.check(all_operations()["optimization.start"], given, command="models optimize", spelling=spelling)
    with session.platform() as platform:
        work = platform.optimization.start(**given)
        ended = _follow(session, platform, work)
        found = platform.optimization.show(str((ended.result or {})["id"]))
    if session.json:
        show(found, as_json=True)
        return
    print_table(found)
    best = found.recommendation
    if best is not None and best.version is not None and best.version != found.model:
        print(f"\nnext  {session.full_command(f'deploy {best.version}')}")


def _budget(text: str | None, speedup: float | None) -> Any:
    """Return the budget as the operation takes it."""
    faster = {} if speedup is None else {"speedup": speedup}
    if text is None:
        return faster
    try:
        return {**parse_budget(text).model_dump(), **faster}
    except InvalidInput as error:
        faults = [fault.model_copy(update={"where": "--budget"}) for fault in error.faults]
        raise InvalidInput("--budget is not valid", faults=faults) from None


def _follow(session: Session, platform: Platform, work: WorkflowRun) -> WorkflowRun:
    """Show the variants while the job runs; Conflict if the work fails."""
    try:
        with _live_table() as report:
            for job in _jobs_of(platform, work):
                print_log(platform, job, follow=True, offset=0, to=VariantLines(report))
            *_, ended = platform.workflows.watch(work.id)
    except KeyboardInterrupt:
        cancel, watch = (session.full_command(f"workflows {verb} {work.id}") for verb in ("cancel", "watch"))
        print(f"work {work.id} was not cancelled: {cancel} cancels it, {watch} follows it", file=sys.stderr)
        raise
    if ended.state is not WorkflowState.DONE:
        raise Conflict(f"the optimization {work.id} {ended.state}: {ended.error}")
    return ended


def _jobs_of(platform: Platform, work: WorkflowRun) -> Iterator[str]:
    """Yield the jobs of the work as it gets to them, until it ends."""
    seen: set[str] = set()
    while not work.state.ended:
        if (found := JOB.search(work.doing or "")) is not None and found[1] not in seen:
            seen.add(found[1])
            yield found[1]
        time.sleep(POLL_S)
        require_controller(platform)
        work = platform.workflows.show(work.id)


class VariantLines(io.StringIO):
    """A stream that reports the lines of a log that are progress."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if (found := parse_progress(line)) is not None:
                self._report(found)
        return len(text)


@contextmanager
def _live_table() -> Iterator[Report]:
    """Show the newest progress of each variant on stderr: as a table on a terminal, as lines elsewhere."""
    rows: dict[str, VariantProgress] = {}
    if not sys.stderr.isatty():
        yield lambda found: print(_line(_merged(rows, found)), file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True, highlight=False), transient=True, auto_refresh=False) as live:

        def report(found: VariantProgress) -> None:
            _merged(rows, found)
            live.update(_painted([_cells(each) for each in rows.values()]), refresh=True)

        yield report


def _merged(rows: dict[str, VariantProgress], found: VariantProgress) -> VariantProgress:
    """Keep what was measured before; return the newest."""
    known = rows.get(found.name)
    if known is not None:
        found = known.model_copy(update=found.model_dump(exclude_none=True, exclude_defaults=True))
    rows[found.name] = found
    return found


def _painted(rows: list[list[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEADINGS:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _cells(found: VariantProgress) -> list[str]:
    return [
        printable(found.name),
        found.stage,
        "-" if found.latency_p50_us is None else f"{found.latency_p50_us:.1f}",
        "-" if found.rows_per_s is None else f"{found.rows_per_s:,.0f}",
        "-" if found.best_batch is None else str(found.best_batch),
        "-" if found.size_bytes is None else format_size(found.size_bytes),
        "-" if found.quality is None else f"{found.quality:.5f}",
        printable(found.reason),
    ]


def _line(found: VariantProgress) -> str:
    name, stage, latency, rate, _, size, _, why = _cells(found)
    figures = f", {latency} µs for one row, {rate} rows/s" if found.latency_p50_us is not None else ""
    return f"{name} {stage}: {size}{figures}{f'; {why}' if why else ''}".replace(": -", "")
