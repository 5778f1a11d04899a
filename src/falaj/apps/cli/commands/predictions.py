"""`falaj predict`: predict the rows of files on this machine, or of tables on the platform as a job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.messages import Given, Message, print_message
from falaj.apps.cli.output.progress import Advance, progress
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.output.work_progress import follow_work
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import NotFound
from falaj.records.control.predictions import (
    EVERYTHING,
    PredictionColumns,
    PredictionProgress,
    PredictionSummary,
)
from falaj.records.control.workflows import WorkflowRun
from falaj.records.registry import FileFormat, ModelVersion
from falaj.records.serving.ensembles import DOCUMENT, ComposedEnsemble
from falaj.records.serving.settings import Device
from falaj.sdk.platform import Platform
from falaj.serving.batch_predictions.service import prediction_run, require_batchable

PRESENTATION = Presentation(
    help={
        "data": "The rows: view:NAME, dataset:NAME or blob:NAME.",
        "name": "The name of the blob of the predictions.",
        "columns": "What is kept of the rows, and which outputs are written.",
        "into": "A view that the predictions are added to.",
        "device": "Where the model runs: auto takes a GPU that the job has, gpu asks for one, cpu uses none.",
        "cpus": "Processors of the job.",
        "gpus": "GPUs of the job.",
        "retries": "How often a job that failed is tried again; it goes on where it stopped.",
        "queue": "The queue of the job.",
    },
    examples={"columns": '\'{"keep": ["id"]}\''},
)

STORED = ("view:", "dataset:", "blob:")
"""How a table on the platform is named."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A version: churn@14, or churn@champion.",
        autocompletion=completion_of("model_version"),
    ),
]
Rows = Annotated[
    str,
    typer.Argument(
        metavar="IN",
        help="A Parquet file, a folder of them or a Delta table; on the platform: view:NAME, dataset:NAME, blob:NAME.",
    ),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file NAME.parquet, else the folder of a new Delta table; on the platform: the name of a blob.",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="The columns that the model takes, in order, if it does not name them."),
]
Keep = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Columns of the input to write beside the predictions; '*' is all. By default those that the model does "
        "not take.",
    ),
]
Outputs = Annotated[
    str | None, typer.Option(metavar="A,B", help="Outputs of the model to write; by default all.")
]
Prefix = Annotated[
    str, typer.Option(metavar="TEXT", help="Put before the names of the predictions, like predicted_.")
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Threads, or processors of the job; by default all here."),
]
On = Annotated[
    Device,
    typer.Option(
        "--device",
        metavar="auto|cpu|gpu",
        help="Where the model runs: auto is a GPU if there is one, else all cores; gpu fails without one.",
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Begin anew, and forget what a stopped run has done.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file OUT once the new one is complete.")
]
AsJob = Annotated[bool, typer.Option("--job", help="Upload the file IN, and predict it on the platform.")]
Into = Annotated[
    str | None,
    typer.Option(metavar="VIEW", help="On the platform: a view that the predictions are added to."),
]


def predict(
    session: Session,
    model: Model,
    rows: Rows,
    out: Out,
    *,
    features: Features = None,
    keep: Keep = None,
    outputs: Outputs = None,
    prefix: Prefix = "",
    threads: Threads = None,
    device: On = "auto",
    restart: Restart = False,
    overwrite: Overwrite = False,
    job: AsJob = False,
    into: Into = None,
) -> None:
    """Predict the rows of a table on all cores or the GPU; the same command goes on where it was stopped."""
    columns = PredictionColumns(
        features=_names(features),
        keep=None if keep is None else _names(keep),
        outputs=_names(outputs),
        prefix=prefix,
    )
    if job or (rows.startswith(STORED) and not Path(rows).exists()):
        _predict_on_the_platform(
            session, model, rows, out, columns, into=into, cpus=threads or 1, device=device
        )
        return
    if not Path(rows).exists():
        raise NotFound(
            f"there is no file {rows}; a table on the platform is named like view:{Path(rows).stem}"
        )
    done = _predict_here(
        session,
        model,
        Path(rows),
        Path(out),
        columns,
        options={"threads": threads, "restart": restart, "device": device},
        overwrite=overwrite,
    )
    if session.json:
        show(done, as_json=True)
        return
    resumed = f", {done.resumed} of them before" if done.resumed else ""
    shown = ", ".join(done.columns[:8]) + ("…" if len(done.columns) > 8 else "")
    print_message(
        session, Message(f"{out} has the predictions of {plural(done.rows, 'row')}{resumed}: {shown}", ())
    )


def _predict_here(
    session: Session,
    model: str,
    rows: Path,
    out: Path,
    columns: PredictionColumns,
    *,
    options: Mapping[str, Any],
    overwrite: bool,
) -> PredictionSummary:
    """Fetch the model, and predict in a process without keys. The platform is not needed meanwhile."""
    from falaj.assembly.prediction.local_files import check_paths, predict_files

    check_paths(rows, out, overwrite=overwrite)
    parsing.check(all_operations()["models.version"], {"model": model})
    with session.platform() as platform:
        version = platform.models.version(model)
        run = prediction_run(version, columns, _steps(platform, version), device=options["device"])
        content, *others = (
            b"".join(platform.models.read(version.id, path))
            for path in (run.file, *(each.path for each in run.others))
        )
        steps = {
            step.version: [b"".join(platform.models.read(step.version, step.file))] for step in run.steps
        }
    run = run.model_copy(update={"source": str(rows), **options})
    with ExitStack() as shown:
        report = _reporter(shown, f"{version.reference} predicts {rows.name}")
        try:
            return predict_files(
                run,
                [content],
                out,
                others=[[each] for each in others],
                steps=steps,
                overwrite=overwrite,
                report=report,
            )
        except KeyboardInterrupt:
            print("the prediction is stopped; the same command goes on where it stopped", file=sys.stderr)
            raise


def _steps(platform: Platform, version: ModelVersion) -> list[ModelVersion]:
    """Return the versions that an ensemble consists of; none of any other version."""
    if version.format is not FileFormat.ENSEMBLE:
        return []
    composed = ComposedEnsemble.model_validate_json(b"".join(platform.models.read(version.id, DOCUMENT)))
    require_batchable(version, [step.name for step in composed.steps if step.lookup is not None])
    idents = dict.fromkeys(step.version for step in composed.steps if step.version is not None)
    return [platform.models.version(ident) for ident in idents]


def _reporter(shown: ExitStack, what: str) -> Callable[[PredictionProgress], None]:
    """Return what shows the progress, from the first report on: it says how many rows there are."""
    advance: Advance | None = None
    done = 0

    def report(far: PredictionProgress) -> None:
        nonlocal advance, done
        advance = advance or shown.enter_context(progress(what, total=far.total, unit="rows"))
        advance(far.rows - done)
        done = far.rows

    return report


def _predict_on_the_platform(
    session: Session,
    model: str,
    rows: str,
    out: str,
    columns: PredictionColumns,
    *,
    into: str | None,
    cpus: int,
    device: Device,
) -> None:
    parsing.check_name("OUT", out, command="predict")
    with session.platform() as platform:
        work = platform.predict(model, rows, out, columns=columns, into=into, cpus=cpus, device=device)
        ended = follow_work(session, platform, work, "prediction", result="workflows show")
    if session.json:
        show(ended, as_json=True)
        return
    made = ended.result or {}
    added = f", and added to {into}" if into else ""
    print_message(
        session,
        Message(
            f"the predictions are in blob {out}{added}", (("next", f"blobs get {made.get('name', out)}"),)
        ),
    )


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    return (
        (EVERYTHING,)
        if text.strip() == EVERYTHING
        else tuple(part.strip() for part in text.split(",") if part)
    )


@PRESENTATION.message("predictions.start")
def _predicting(made: WorkflowRun, given: Given) -> Message:
    return Message(
        f"work {made.id} predicts {given['data']} with {given['model']}",
        (("next", f"workflows watch {made.id}"),),
    )


COMMANDS = {"predict": partial(command, "predict", predict)}
