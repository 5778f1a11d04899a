"""The room: have variants of a model version made and measured, and look at what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from falaj.errors import Denied, Fault, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
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
"""A model version, verified."""
ReadColumns = Callable[[Transaction, StoredObject], tuple[str, ...]]
"""The columns of a training set."""


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
        """Make variants of a version, and measure each against it on the host; those accepted become new versions.

        They are judged on `data`, by how `target` is predicted from `features`: the columns that the model takes, in
        order; unless given, those that its signature names. One is accepted if it is faster and within the budget.
        """
        call = current_call()
        version, judged_on = self._version(call.tx, call.target), call.object("data")
        for action, found in (("models.read", call.target), ("features.load", judged_on)):
            self._require(call, action, found)
        columns = features or tuple(name for tensor in version.inputs[:1] for name in tensor.features)
        _require_optimizable(version)
        _require_columns(self._columns(call.tx, judged_on), columns, target)
        given = {
            "model": version.id,
            "workspace": version.workspace,
            "data": judged_on.id,
            "target": target,
            "features": columns,
            "recipes": recipes,
            "budget": (budget or AcceptanceBudget()).model_dump(mode="json"),
        }
        return self._intents.request(call, WORKFLOW, given)

    @operation("optimization.show", resource="optimization", mode=Mode.READ)
    def show(self, optimization: OptimizationRef) -> Optimization:
        """The variants of an optimization: latency, throughput, size, quality, and the verdict with its reason."""
        return store.optimization_record(current_call().tx, current_call().target)

    @operation("optimization.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Optimization]:
        """The optimizations of a workspace that ended, oldest first."""
        return list_workspace_page(
            self.gate, "optimization", store.optimization_record, after=after, limit=limit
        )

    @operation("optimization.record", resource="model_version", allow=Role.OPERATOR, internal=True)
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
        """Keep what the job of an optimization found; the controller does this for whoever started it."""
        call = current_call()
        home = objects.resolve(call.tx, call.target.workspace, kind="workspace", workspace=ROOT)
        new = call.create("optimization", workspace=home, owner=call.object("job").owner)
        facts = {
            "model": call.target.id,
            "data": call.object("data").id,
            "job": call.object("job").id,
            "target": target,
            "features": features,
            "budget": budget.model_dump(mode="json"),
            "report": report.model_dump(mode="json"),
        }
        return store.add(call, new, facts)

    def _require(self, call: Call, action: str, found: StoredObject) -> None:
        decision = self.gate.authorizer.decide(call.tx, call.caller, action, found)
        if not decision.allowed:
            raise Denied(f"{call.caller.name} may not {action} on {found.address}: {decision.reason}")


def _require_optimizable(version: ModelVersion) -> None:
    if version.format not in FORMATS:
        raise InvalidInput.at(
            "model",
            given=f"{version.reference}, which is {version.format}",
            allowed=" or ".join(FORMATS),
            fix="export it with fj.export_onnx, and register that",
        )


def _require_columns(known: tuple[str, ...], features: tuple[str, ...], target: str) -> None:
    """Every fault of the columns at once."""
    shown = ", ".join(known[:50])
    faults = [
        Fault(where=where, given=name, allowed=f"a column of the data: {shown}")
        for where, name in [("target", target), *(("features", name) for name in features)]
        if name not in known
    ]
    if not features:
        fix = "name the columns that the model takes, in its order"
        faults.append(Fault(where="features", given="none, and the model names none", allowed=shown, fix=fix))
    if target in features:
        faults.append(Fault(where="target", given=target, allowed="a column that is not one of the features"))
    if len(set(features)) < len(features):
        faults.append(Fault(where="features", given=", ".join(features), allowed="each column once"))
    if faults:
        raise InvalidInput("the columns do not fit the data", faults=faults)
