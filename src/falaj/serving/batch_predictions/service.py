"""The operation of batch prediction: a job predicts the rows of a stored table, and its output becomes a blob."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from falaj.errors import AlreadyExists, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import operation
from falaj.ports.metadata import Transaction
from falaj.records.control.predictions import PredictionColumns, PredictionRun
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import ViewRef
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, AnyRef, Name
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, ModelVersionRef

WORKFLOW = "predictions.start"
FORMATS = frozenset(
    {
        *(FileFormat.ONNX, FileFormat.TORCH_EXPORT, FileFormat.LITERT),
        *(FileFormat.XGBOOST, FileFormat.LIGHTGBM),
    }
)
"""What the process of a batch prediction opens; Python source runs in endpoints and jobs of its own."""
READ_BY = {"dataset": "features.load", "view": "features.scan", "blob": "blobs.read"}
"""The kinds of rows, and the action that the caller must be allowed to perform on each."""

ReadVersion = Callable[[Transaction, StoredObject], ModelVersion]
"""Loads and verifies a model version."""
ProcessorCount = Annotated[int, Field(ge=1, le=1024)]
GpuCount = Annotated[int, Field(ge=0, le=64)]


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
        cpus: ProcessorCount = 1,
        gpus: GpuCount = 0,
        queue: Name = "default",
    ) -> WorkflowRun:
        """Predict the rows of a view, a training set or a Parquet blob with a model version, as a job.

        The version is the one that an alias points at now. The predictions become the Parquet blob `name`, in the order
        of the rows, under the restrictions of the rows and of the model. `into` is a view that they are added to as
        well. `columns` chooses what is kept of the rows, and which outputs of the model are written.
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
        self.gate.require(call, "models.read", found)
        self.gate.require(call, READ_BY[rows.kind], rows)
        if into is not None:
            self.gate.require(call, "features.ingest", call.object("into"))
        home = objects.resolve(call.tx, version.workspace, kind="workspace", workspace=ROOT)
        if objects.by_name(call.tx, workspace=home.id, kind="blob", name=name) is not None:
            raise AlreadyExists(f"there is already a blob {name!r}; choose another name for the predictions")
        given = {
            "run": prediction_run(version, columns).model_dump(mode="json"),
            "model": version.id,
            "workspace": version.workspace,
            "data": rows.id,
            "name": name,
            "into": None if into is None else call.object("into").id,
            "cpus": cpus,
            "gpus": gpus,
            "queue": queue,
        }
        return self._intents.request(call, WORKFLOW, given)


def prediction_run(version: ModelVersion, columns: PredictionColumns) -> PredictionRun:
    """Return the run of a version; InvalidInput if there is no engine for it."""
    file = _model_file(version)
    return PredictionRun(
        model=version.reference,
        file=file.path,
        sha256=file.sha256,
        format=version.format,
        tensors=version.inputs,
        outputs=version.outputs,
        columns=columns,
    )


def _model_file(version: ModelVersion) -> ModelFile:
    models = [file for file in version.files if file.format is version.format]
    if version.format not in FORMATS or len(models) != 1:
        given = f"{len(models)} files" if version.format in FORMATS else str(version.format)
        raise InvalidInput.at(
            version.reference,
            given=given,
            allowed=f"one file of these formats: {', '.join(sorted(FORMATS))}",
            fix=f"optimize or export it first: falaj models optimize {version.reference}, or fj.export_onnx",
        )
    return models[0]
