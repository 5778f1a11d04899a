"""The process of a batch prediction, which holds no key and no token.

    python -I -m falaj.assembly.prediction SETTINGS…

SETTINGS is a PredictionRun as JSON, which may be cut into several arguments. Started by `falaj predict` it works in its
own folder and reports on standard output, a line of JSON each. As a job it reads FALAJ_INPUTS and writes FALAJ_OUTPUTS.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from falaj.errors import FalajError, Internal, InvalidInput
from falaj.records.control.predictions import PredictionProgress, PredictionRun, PredictionSummary
from falaj.records.no_telemetry import NO_TELEMETRY
from falaj.records.registry import FileFormat

DATA, MODEL, TABLE, TABLE_FILE = "data", "model", "table", "part-00000.parquet"
"""Names in the folder of a run: the rows, the file of the model, and the Delta table with its only file."""
OUTPUT = "predictions.parquet"
"""The output of a job."""
INPUT_SUFFIXES = (".parquet", "")

Send = Callable[[str, Mapping[str, Any]], None]


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 on success, 1 with the error as the last line."""
    os.environ.update(NO_TELEMETRY)
    is_job = "FALAJ_OUTPUTS" in os.environ
    send = _log_line if is_job else _send_line
    try:
        run = PredictionRun.model_validate_json("".join(arguments))
        done = _run_job(run) if is_job else _run_here(run, send)
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
    faults = [fault.model_dump(mode="json") for fault in failed.faults]
    send("error", {"code": failed.code, "message": failed.message, "faults": faults})
    return 1


def _run_here(run: PredictionRun, send: Send) -> PredictionSummary:
    folder = Path.cwd()
    send("ready", {})
    done = _predict(run, folder / MODEL, folder, lambda far: send("progress", far.model_dump(mode="json")))
    if run.to_delta:
        _create_table(folder)
    return done


def _run_job(run: PredictionRun) -> PredictionSummary:
    from falaj.training.runtime.agent.job import job

    inputs, outputs = Path(os.environ["FALAJ_INPUTS"]), Path(os.environ["FALAJ_OUTPUTS"])
    found = [inputs / f"data{suffix}" for suffix in INPUT_SUFFIXES if (inputs / f"data{suffix}").exists()]
    if not found:
        given = ", ".join(sorted(path.name for path in inputs.iterdir()))
        raise InvalidInput.at(
            "data", given=given, allowed="rows as Parquet: a view, a training set or a blob"
        )
    folder = outputs.parent / "prediction"
    folder.mkdir(exist_ok=True)
    run = run.model_copy(update={"source": str(found[0])})
    done = _predict(run, inputs / MODEL / run.file, folder, lambda far: job.progress(far.rows, far.total))
    (folder / DATA).rename(outputs / OUTPUT)
    return done


def _predict(
    run: PredictionRun, model: Path, folder: Path, report: Callable[[PredictionProgress], None]
) -> PredictionSummary:
    from falaj.drivers.deltalake.table_folders import DeltaFolders
    from falaj.records.serving.endpoints import ServedFile
    from falaj.records.serving.settings import ServingSettings
    from falaj.serving.runtime.batch_prediction.run import RUN_ROWS, predict
    from falaj.serving.runtime.formats import declared_tensors
    from falaj.serving.runtime.loading import load_here

    name, _, number = run.model.rpartition("@")
    settings = ServingSettings(max_batch_rows=RUN_ROWS, instances=run.threads)
    is_native = run.format is not FileFormat.ONNX
    file = ServedFile(
        model=name,
        version=number,
        path=model,
        sha256=run.sha256,
        format=run.format,
        inputs=declared_tensors(run.tensors) if is_native else (),
        outputs=declared_tensors(run.outputs) if is_native else (),
        settings=settings,
    )
    engine = load_here(file)
    try:
        return predict(run, engine, folder=folder, folders=DeltaFolders(), report=report)
    finally:
        engine.close()


def _create_table(folder: Path) -> None:
    """Make the Delta table of a finished run, in the folder `table`; a killed run makes it again."""
    import shutil

    from falaj.drivers.deltalake.table_folders import DeltaFolders

    draft = folder / TABLE
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    os.link(folder / DATA, draft / TABLE_FILE)
    DeltaFolders().create(draft, TABLE_FILE)


def _send_line(kind: str, content: Mapping[str, Any]) -> None:
    print(json.dumps({kind: content}), flush=True)


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
    if "FALAJ_OUTPUTS" in os.environ:
        sys.exit(status)  # the agent sends what is left
    os._exit(status)  # all is on disk and reported: nothing is left to tidy up
