"""The process of a batch prediction, which holds no key and no token.

    python -I -m falaj.assembly.prediction SETTINGS…

SETTINGS is a PredictionRun as JSON, which may be cut into several arguments. Started by `falaj predict` it works in its
own folder and reports on standard output, a line of JSON each. As a job it reads FALAJ_INPUTS and writes FALAJ_OUTPUTS.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from falaj.errors import Damaged, FalajError, Internal, InvalidInput
from falaj.records.control.predictions import PredictionProgress, PredictionRun, PredictionSummary
from falaj.records.no_telemetry import NO_TELEMETRY
from falaj.records.registry import FileFormat

if TYPE_CHECKING:
    from falaj.records.names import ObjectId
    from falaj.records.serving.endpoints import ServedFile
    from falaj.serving.runtime.batch_prediction.partial_output import OutputKeeper
    from falaj.serving.runtime.batch_prediction.watched_engine import WatchedEngine
    from falaj.serving.runtime.engine import ModelEngine

DATA, MODEL, TABLE, TABLE_FILE = "data", "model", "table", "part-00000.parquet"
"""Names in the folder of a run: the rows, the file of the model, and the Delta table with its only file."""
OTHERS = "others"
"""The folder of the files beside the model, each by its place in the list of the run."""
STOPPED_STATUS = 143
"""Exit status of a job that was asked to stop, as if SIGTERM had ended it."""
OUTPUT = "predictions.parquet"
"""The output of a job."""
INPUT_SUFFIXES = (".parquet", "")

Send = Callable[[str, Mapping[str, Any]], None]


class ModelFiles(NamedTuple):
    """The file of the model, those beside it by path, and those of the steps of an ensemble by their versions."""

    model: Path
    others: Mapping[str, Path]
    steps: Mapping[ObjectId, Path]


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 on success, 1 with the error as the last line."""
    os.environ.update(NO_TELEMETRY)
    is_job = "FALAJ_OUTPUTS" in os.environ
    send = _log_line if is_job else _reporter()
    try:
        run = PredictionRun.model_validate_json("".join(arguments))
        done = run_job(run, send) if is_job else _run_here(run, send)
        if done is None:
            return STOPPED_STATUS
        send("done", done.model_dump(mode="json"))
        return 0
    except FalajError as error:
        failed = error
    except MemoryError:
        failed = InvalidInput("a part of the rows takes more memory than there is; write smaller row groups")
    except BrokenPipeError:  # whoever started this has gone; the journal holds what is done
        return 1
    except Exception as error:
        failed = Internal(f"the prediction failed: {type(error).__name__}: {str(error)[:300]}")
    _send_error(send, failed)
    return 1


def _run_here(run: PredictionRun, send: Send) -> PredictionSummary:
    from falaj.serving.runtime.batch_prediction.partial_output import KeptHere

    folder = Path.cwd()
    send("ready", {})
    beside = folder / OTHERS
    files = ModelFiles(
        folder / MODEL,
        {each.path: beside / str(place) for place, each in enumerate(run.others)},
        {step.version: beside / step.version for step in run.steps},
    )
    engine = _engine(run, files, send)
    done = _predict(
        run, engine, folder, lambda far: send("progress", far.model_dump(mode="json")), KeptHere()
    )
    if run.to_delta:
        _create_table(folder)
    return done


def run_job(run: PredictionRun, send: Send) -> PredictionSummary | None:
    """Predict the input of a job, from where the attempt before stopped; None if this one is to stop, too."""
    from falaj.assembly.prediction.job_checkpoints import JobCheckpoints
    from falaj.serving.runtime.batch_prediction.partial_output import KeptHere
    from falaj.serving.runtime.batch_prediction.run import RunStopped
    from falaj.training.runtime.agent.job import job
    from falaj.training.runtime.agent.protocol import platform_agent

    inputs, outputs = Path(os.environ["FALAJ_INPUTS"]), Path(os.environ["FALAJ_OUTPUTS"])
    found = [inputs / f"data{suffix}" for suffix in INPUT_SUFFIXES if (inputs / f"data{suffix}").exists()]
    if not found:
        given = ", ".join(sorted(path.name for path in inputs.iterdir()))
        raise InvalidInput.at(
            "data", given=given, allowed="rows as Parquet: a view, a training set or a blob"
        )
    folder = outputs.parent / "prediction"
    folder.mkdir(exist_ok=True)
    run = run.model_copy(update={"source": str(found[0]), "is_staged": True})
    agent = platform_agent()
    checkpoints = None if agent is None else JobCheckpoints(agent.checkpoints(), folder)
    rows = 0 if checkpoints is None else checkpoints.restore()
    if rows:
        print(f"resuming after row {rows}", flush=True)
    files = ModelFiles(
        inputs / MODEL / run.file,
        {each.path: inputs / MODEL / each.path for each in run.others},
        {step.version: inputs / step.version / step.file for step in run.steps},
    )
    engine = _engine(run, files, send)
    if checkpoints is not None:
        checkpoints.stop_at_sigterm()
    try:
        done = _predict(
            run, engine, folder, lambda far: job.progress(far.rows, far.total), checkpoints or KeptHere()
        )
    except RunStopped as stopped:
        print(f"stopped after row {stopped.rows}: the next attempt goes on there", flush=True)
        return None
    (folder / DATA).rename(outputs / OUTPUT)
    if checkpoints is not None:
        checkpoints.finish()
    return done


def _predict(
    run: PredictionRun,
    engine: WatchedEngine,
    folder: Path,
    report: Callable[[PredictionProgress], None],
    keeper: OutputKeeper,
) -> PredictionSummary:
    from falaj.drivers.deltalake.table_folders import DeltaFolders
    from falaj.serving.runtime.batch_prediction.run import predict

    try:
        return predict(run, engine, folder=folder, folders=DeltaFolders(), report=report, keeper=keeper)
    finally:
        engine.close()


def _engine(run: PredictionRun, files: ModelFiles, send: Send) -> WatchedEngine:
    """Open the model here. If that, or later a run of it, hangs, the process ends with a sentence."""
    from falaj.records.serving.endpoints import ServedFile
    from falaj.records.serving.settings import ServingSettings
    from falaj.serving.runtime.batch_prediction.run import RUN_ROWS
    from falaj.serving.runtime.batch_prediction.watched_engine import LOAD_S, HangWatch, WatchedEngine
    from falaj.serving.runtime.formats import declared_tensors
    from falaj.serving.runtime.loading import load_here

    def end(hung: FalajError) -> None:
        _send_error(send, hung)
        os._exit(1)

    name, _, number = run.model.rpartition("@")
    settings = ServingSettings(max_batch_rows=RUN_ROWS, instances=run.threads, device=run.device)
    is_native = run.format is not FileFormat.ONNX
    file = ServedFile(
        model=name,
        version=number,
        path=files.model,
        sha256=run.sha256,
        format=run.format,
        inputs=declared_tensors(run.tensors) if is_native else (),
        outputs=declared_tensors(run.outputs) if is_native else (),
        settings=settings,
    )
    watch = HangWatch(end)
    hangs = f"{run.model} hangs: it was not loaded within {LOAD_S:g} s; mend the model"
    mark = watch.begin(hangs, limit_s=LOAD_S)
    others = {each.path: _verified(run, files.others[each.path], each.sha256) for each in run.others}
    is_ensemble = run.format is FileFormat.ENSEMBLE
    engine = _load_ensemble(run, file, files) if is_ensemble else load_here(file, others)
    watch.end(mark)
    return WatchedEngine(engine, watch)


def _verified(run: PredictionRun, path: Path, sha256: str) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Damaged(f"a file of {run.model} differs from the registered one: wrong hash")
    return content


def _load_ensemble(run: PredictionRun, file: ServedFile, files: ModelFiles) -> ModelEngine:
    """Open an ensemble of models, all in this process."""
    from falaj.records.serving.ensembles import ComposedEnsemble
    from falaj.serving.runtime.ensembles.engine import EnsembleEngine, step_file
    from falaj.serving.runtime.loading import load_here, verified_bytes

    composed = ComposedEnsemble.model_validate_json(verified_bytes(file))
    hashes = {step.version: step.sha256 for step in run.steps}
    engines = {}
    for step in composed.steps:
        if step.version is None or step.version not in hashes:
            raise InvalidInput(f"{step.title} of {run.model} has no file here")
        own = {"path": files.steps[step.version], "sha256": hashes[step.version]}
        try:
            engines[step.name] = load_here(step_file(file, step).model_copy(update=own))
        except FalajError as error:
            raise error.within(step.title) from None
    return EnsembleEngine(file, composed, engines)


def _create_table(folder: Path) -> None:
    """Make the Delta table of a finished run, in the folder `table`; a killed run makes it again."""
    import shutil

    from falaj.drivers.deltalake.table_folders import DeltaFolders

    draft = folder / TABLE
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    os.link(folder / DATA, draft / TABLE_FILE)
    DeltaFolders().create(draft, TABLE_FILE)


def _reporter() -> Send:
    """Return what writes reports to standard output; what models print goes nowhere."""
    reports = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)

    def send(kind: str, content: Mapping[str, Any]) -> None:
        reports.write(json.dumps({kind: content}) + "\n")
        reports.flush()

    return send


def _send_error(send: Send, failed: FalajError) -> None:
    faults = [fault.model_dump(mode="json") for fault in failed.faults]
    send("error", {"code": failed.code, "message": failed.message, "faults": faults})


def _log_line(kind: str, content: Mapping[str, Any]) -> None:
    """Write to the log of the job: its end alone, since the agent reports how far it is."""
    if kind == "error":
        print(f"error[{content['code']}] {content['message']}", file=sys.stderr)
        for fault in content["faults"]:
            print("  ".join(f"{name} {value}" for name, value in fault.items() if value), file=sys.stderr)
    else:
        print(f"predicted {content['rows']} rows: {', '.join(content['columns'])}", flush=True)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # all is on disk and reported: nothing is left to tidy up
