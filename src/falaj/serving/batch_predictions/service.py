"""The operation of batch prediction: a job predicts the rows of a stored table, and its output becomes a blob."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from falaj.errors import AlreadyExists, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import operation
from falaj.ports.metadata import Transaction
from falaj.records.control.predictions import (
    AccompanyingFile,
    PredictionColumns,
    PredictionRun,
    PredictionStep,
)
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import ViewRef
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, AnyRef, Name
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, ModelVersionRef
from falaj.records.serving.settings import Device
from falaj.serving.runtime.formats import READS_OTHERS
from falaj.serving.validation import ensemble_parts

WORKFLOW = "predictions.start"
FORMATS = frozenset(
    {
        *(FileFormat.ONNX, FileFormat.TORCH_EXPORT, FileFormat.LITERT),
        *(FileFormat.XGBOOST, FileFormat.LIGHTGBM, FileFormat.PYTHON, FileFormat.ENSEMBLE),
    }
)
"""What the process of a batch prediction opens."""
STEP_FORMATS = FORMATS - {FileFormat.PYTHON, FileFormat.ENSEMBLE}
"""What it opens as a step of an ensemble: all steps share the process, which user code must not."""
ON_GPUS = frozenset({FileFormat.ONNX, FileFormat.TORCH_EXPORT, FileFormat.PYTHON})
"""The formats whose engines can use a GPU, or let the code of the model do so."""
EVALUATED = "predicted."
"""Before the names of the outputs of a model that is evaluated; columns of training sets have no dots."""
READ_BY = {"dataset": "features.load", "view": "features.scan", "blob": "blobs.read"}
"""The kinds of rows, and the action that the caller must be allowed to perform on each."""

ReadVersion = Callable[[Transaction, StoredObject], ModelVersion]
"""Loads and verifies a model version."""
ProcessorCount = Annotated[int, Field(ge=1, le=1024)]
GpuCount = Annotated[int, Field(ge=0, le=64)]
RetryCount = Annotated[int, Field(ge=0, le=100)]


class Predictions:
    """Predict the rows of stored tables in batches."""

    def __init__(self, gate: Gate, intents: WorkflowRequests, *, version: ReadVersion) -> None:
        self.gate = gate
        self._intents = intents
        self._version = version

    @operation(WORKFLOW, resource="model_version")
    def start(
        self,
        model: ModelVersionRef,
        *,
        data: AnyRef,
        name: Name,
        columns: PredictionColumns = PredictionColumns(),  # noqa: B008 - frozen
        into: ViewRef | None = None,
        device: Device = "auto",
        cpus: ProcessorCount = 1,
        gpus: GpuCount = 0,
        retries: RetryCount = 2,
        queue: Name = "default",
    ) -> WorkflowRun:
        """Predict the rows of a view, a training set or a Parquet blob with a model version, as a job.

        The version is the one that an alias points at now. The predictions become the Parquet blob `name`, in the order
        of the rows, under the restrictions of the rows and of the model. `into` is a view that they are added to as
        well. `columns` chooses what is kept of the rows, and which outputs of the model are written. With the device
        `gpu` the job asks for a GPU, with `cpu` it uses none. A job that fails is tried again `retries` times; like one
        that is preempted or moved, it goes on behind the last rows that it has saved.
        """
        call = current_call()
        found, rows = call.object("model"), call.object("data")
        if rows.kind not in READ_BY:
            raise InvalidInput.at(
                "data",
                given=f"{rows.name}, a {rows.kind}",
                allowed="a view, a training set or a Parquet blob",
            )
        version = self._version(call.tx, found)
        parts = ensemble_parts(call.tx, version)
        for each in [found, *(part for part in parts if part.kind == "model_version")]:
            self.gate.require(call, "models.read", each)
        require_batchable(version, [part.name for part in parts if part.kind != "model_version"])
        steps = [self._version(call.tx, part) for part in parts]
        self.gate.require(call, READ_BY[rows.kind], rows)
        if into is not None:
            self.gate.require(call, "features.ingest", call.object("into"))
        home = objects.resolve(call.tx, version.workspace, kind="workspace", workspace=ROOT)
        if objects.by_name(call.tx, workspace=home.id, kind="blob", name=name) is not None:
            raise AlreadyExists(f"there is already a blob {name!r}; choose another name for the predictions")
        if device == "cpu" and gpus:
            raise InvalidInput.at("gpus", given=gpus, allowed="0 where the device is cpu")
        given = {
            "run": prediction_run(version, columns, steps, device=device).model_dump(mode="json"),
            "model": version.id,
            "workspace": version.workspace,
            "data": rows.id,
            "name": name,
            "into": None if into is None else call.object("into").id,
            "cpus": cpus,
            "gpus": gpus or int(device == "gpu"),
            "retries": retries,
            "queue": queue,
        }
        return self._intents.request(call, WORKFLOW, given)


def prediction_run(
    version: ModelVersion,
    columns: PredictionColumns,
    steps: Sequence[ModelVersion] = (),
    *,
    device: Device = "auto",
) -> PredictionRun:
    """Return the run of a version, and of the `steps` of an ensemble; InvalidInput if no engine can do it."""
    file = _model_file(version)
    files = [(step.id, _model_file(step, STEP_FORMATS)) for step in steps]
    if device == "gpu" and version.format not in ON_GPUS:
        raise InvalidInput.at(
            "device",
            given=f"gpu, for a model of the format {version.format}",
            allowed=f"cpu or auto; a GPU runs these formats: {', '.join(sorted(ON_GPUS))}",
        )
    beside = [each for each in version.files if each is not file and version.format in READS_OTHERS]
    return PredictionRun(
        model=version.reference,
        file=file.path,
        sha256=file.sha256,
        format=version.format,
        tensors=version.inputs,
        outputs=version.outputs,
        steps=tuple(PredictionStep(version=of, file=each.path, sha256=each.sha256) for of, each in files),
        others=tuple(AccompanyingFile(path=each.path, sha256=each.sha256) for each in beside),
        columns=columns,
        device=device,
    )


def evaluation_run(version: ModelVersion, target: str, steps: Sequence[ModelVersion] = ()) -> PredictionRun:
    """Return a run that predicts the rows of a set beside their `target`; InvalidInput if it cannot be trusted.

    Code of the model would run in the process that reads the target.
    """
    if version.format is FileFormat.PYTHON:
        raise InvalidInput.at(
            version.reference,
            given="Python code, which could read the column that it is to predict",
            allowed="a model whose file runs no code of its author",
            fix="export it as ONNX, or report its metrics: falaj models record-metrics",
        )
    columns = PredictionColumns(keep=(target,), prefix=EVALUATED)
    return prediction_run(version, columns, steps, device="cpu").model_copy(update={"target": target})


def require_batchable(version: ModelVersion, lookups: Sequence[str]) -> None:
    """Raise InvalidInput if a version has steps that look features up: they are those of now, not of the rows."""
    if lookups:
        raise InvalidInput.at(
            version.reference,
            given=f"an ensemble with a lookup: {', '.join(lookups)}",
            allowed="an ensemble of models alone: a batch has its features in its rows",
            fix="join them first (falaj features training-set), and predict with an ensemble without the lookup",
        )


def _model_file(version: ModelVersion, formats: frozenset[FileFormat] = FORMATS) -> ModelFile:
    models = [file for file in version.files if file.format is version.format]
    if version.format not in formats or len(models) != 1:
        given = f"{len(models)} files" if version.format in formats else str(version.format)
        raise InvalidInput.at(
            version.reference,
            given=given,
            allowed=f"one file of these formats: {', '.join(sorted(formats))}",
            fix=f"optimize or export it first: falaj models optimize {version.reference}, or fj.export_onnx",
        )
    return models[0]
