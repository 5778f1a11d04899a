"""The operations of optimization: make and measure variants of a model version, and show the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from falaj.errors import Fault, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.optimization import store
from falaj.ports.metadata import Transaction
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import Column, DatasetRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import ROOT, WorkspaceRef
from falaj.records.optimization import (
    AcceptanceBudget,
    FeatureColumns,
    Optimization,
    OptimizationRef,
    OptimizationReport,
    Recipe,
)
from falaj.records.registry import FileFormat, ModelVersion, ModelVersionRef
from falaj.records.training.jobs import JobRef

WORKFLOW = "optimization.start"
FORMATS = (FileFormat.ONNX, FileFormat.XGBOOST, FileFormat.TORCH_EXPORT)

Recipes = Annotated[tuple[Recipe, ...], Field(min_length=1, max_length=10)]
ReadVersion = Callable[[Transaction, StoredObject], ModelVersion]
"""Loads and verifies a model version."""
ReadColumns = Callable[[Transaction, StoredObject], tuple[str, ...]]
"""Returns the columns of a training set."""


class Optimizations:
    """Find faster variants of a model version that predict as well."""

    def __init__(
        self, gate: Gate, intents: WorkflowRequests, *, version: ReadVersion, columns: ReadColumns
    ) -> None:
        self.gate = gate
        self._intents = intents
        self._version = version
        self._columns = columns

    @operation(WORKFLOW, resource="model_version")
    def start(
        self,
        model: ModelVersionRef,
        *,
        data: DatasetRef,
        target: Column,
        features: FeatureColumns = (),
        recipes: Recipes = ("onnx", "int8"),
        budget: AcceptanceBudget | None = None,
    ) -> WorkflowRun:
        """Make variants of a model version and measure each on the host; accepted ones become new versions.

        Quality is measured on `data`: `target` predicted from `features`, the columns that the model takes in order,
        by default those of its signature. A variant is accepted if it is faster and within the budget.
        """
        call = current_call()
        original, dataset = call.object("model"), call.object("data")
        version = self._version(call.tx, original)
        for action, found in (("models.read", original), ("features.load", dataset)):
            self.gate.require(call, action, found)
        columns = features or tuple(name for tensor in version.inputs[:1] for name in tensor.features)
        _require_optimizable(version)
        _require_columns(self._columns(call.tx, dataset), columns, target)
        given = {
            "model": version.id,
            "workspace": version.workspace,
            "data": dataset.id,
            "target": target,
            "features": columns,
            "recipes": recipes,
            "budget": (budget or AcceptanceBudget()).model_dump(mode="json"),
        }
        return self._intents.request(call, WORKFLOW, given)

    @operation("optimization.show", resource="optimization", mode=Mode.READ)
    def show(self, optimization: OptimizationRef) -> Optimization:
        """Show the variants of an optimization: latency, throughput, size, quality, and the verdict with its reason."""
        call = current_call()
        return store.optimization_record(call.tx, call.object("optimization"))

    @operation("optimization.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Optimization]:
        """List the finished optimizations of a workspace, oldest first."""
        call = current_call()
        return list_page(
            self.gate,
            ["optimization"],
            lambda page: [store.optimization_record(call.tx, found) for found in page],
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
        )

    @operation(
        "optimization.record", resource="model_version", allow=Role.OPERATOR, internal=True, emits=True
    )
    def record(
        self,
        model: ModelVersionRef,
        *,
        data: DatasetRef,
        job: JobRef,
        target: Column,
        features: FeatureColumns,
        budget: AcceptanceBudget,
        report: OptimizationReport,
    ) -> Optimization:
        """Store the report of an optimization job; the controller does this for the user who started it."""
        call = current_call()
        original, made_by = call.object("model"), call.object("job")
        workspace = objects.resolve(call.tx, original.workspace, kind="workspace", workspace=ROOT)
        new = call.create("optimization", workspace=workspace, owner=made_by.owner)
        facts = {
            "model": original.id,
            "data": call.object("data").id,
            "job": made_by.id,
            "target": target,
            "features": features,
            "budget": budget.model_dump(mode="json"),
            "report": report.model_dump(mode="json"),
        }
        return store.add(call, new, facts)


def _require_optimizable(version: ModelVersion) -> None:
    if version.format not in FORMATS:
        raise InvalidInput.at(
            "model",
            given=f"{version.reference}, which is {version.format}",
            allowed=" or ".join(FORMATS),
            fix="export it with fj.export_onnx, and register that",
        )


def _require_columns(known: tuple[str, ...], features: tuple[str, ...], target: str) -> None:
    """Raise InvalidInput with all faults of the columns."""
    shown = ", ".join(known[:50])
    faults = [
        Fault(where=where, given=name, allowed=f"a column of the data: {shown}")
        for where, name in [("target", target), *(("features", name) for name in features)]
        if name not in known
    ]
    if not features:
        fix = "name the columns that the model takes, in order"
        faults.append(
            Fault(
                where="features",
                given="none, and the signature of the model has none",
                allowed=shown,
                fix=fix,
            )
        )
    if target in features:
        faults.append(Fault(where="target", given=target, allowed="a column that is not one of the features"))
    if len(set(features)) < len(features):
        faults.append(Fault(where="features", given=", ".join(features), allowed="each column once"))
    if faults:
        raise InvalidInput("the columns do not match the data", faults=faults)
