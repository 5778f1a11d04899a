"""The operations of optimization: make and measure variants of a model version, and show the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import Field

from falaj.errors import Fault, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.optimization import store
from falaj.optimization.settings import DEFAULT_RECIPES
from falaj.ports.metadata import Transaction
from falaj.records.config import Prices
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import Column, DatasetRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import ROOT, Name, WorkspaceRef
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

VIEW_COLUMN = "__"
"""In the names of columns that come from views."""

Recipes = Annotated[tuple[Recipe, ...], Field(min_length=1, max_length=10)]
GpuCount = Annotated[int, Field(ge=0, le=1)]
ReadVersion = Callable[[Transaction, StoredObject], ModelVersion]
"""Loads and verifies a model version."""


class DatasetColumns(NamedTuple):
    """The columns of a training set, and those of them that identify a row: its keys and its time."""

    columns: tuple[str, ...]
    identifying: frozenset[str] = frozenset()


ReadColumns = Callable[[Transaction, StoredObject], DatasetColumns]


class Optimizations:
    """Find faster variants of a model version that predict as well."""

    def __init__(
        self,
        gate: Gate,
        intents: WorkflowRequests,
        *,
        version: ReadVersion,
        columns: ReadColumns,
        prices: Prices | None = None,
    ) -> None:
        self.gate = gate
        self._intents = intents
        self._version = version
        self._columns = columns
        self._prices = prices

    @operation(WORKFLOW, resource="model_version")
    def start(
        self,
        model: ModelVersionRef,
        *,
        data: DatasetRef | None = None,
        held_out: DatasetRef | None = None,
        target: Column | None = None,
        features: FeatureColumns = (),
        recipes: Recipes = DEFAULT_RECIPES,
        budget: AcceptanceBudget | None = None,
        gpus: GpuCount = 0,
        queue: Name = "default",
        environment: Name | None = None,
    ) -> WorkflowRun:
        """Make variants of a model version and measure each on the host; accepted ones become new versions.

        `data` is by default the training set of the version. Recipes that learn from rows are given a part of it, and
        quality is measured on the others, or on `held_out`: `target` predicted from `features`, the columns that the
        model takes in order, by default those of its signature. A variant is accepted if it is faster and within the
        budget. With `gpus` it is measured on a GPU, too. The jobs wait in `queue`, and run in the Python `environment`,
        which the recipe litert needs for its converter.
        """
        call = current_call()
        original = call.object("model")
        version = self._version(call.tx, original)
        self.gate.require(call, "models.read", original)
        _require_optimizable(version)
        dataset = self._training_set(call, version) if data is None else call.object("data")
        datasets = [dataset, *([] if held_out is None else [_other_set(call.object("held_out"), dataset)])]
        for each in datasets:
            self.gate.require(call, "features.load", each)
        named = features or tuple(name for tensor in version.inputs[:1] for name in tensor.features)
        known = [self._columns(call.tx, each) for each in datasets]
        chosen = target or _only_target(known[0], named)
        for found in known:
            _require_columns(found.columns, named, chosen)
        given = {
            "model": version.id,
            "workspace": version.workspace,
            "data": dataset.id,
            "held_out": datasets[1].id if len(datasets) > 1 else None,
            "target": chosen,
            "features": named,
            "recipes": recipes,
            "budget": (budget or AcceptanceBudget()).model_dump(mode="json"),
            "gpus": gpus,
            "queue": queue,
            "environment": environment,
        }
        return self._intents.request(call, WORKFLOW, given)

    def _training_set(self, call: Call, version: ModelVersion) -> StoredObject:
        found = None if version.training_set is None else objects.by_id(call.tx, version.training_set)
        if found is None:
            raise InvalidInput.at(
                "data",
                given=f"none, and {version.reference} names no training set",
                allowed="a training set with the features and the target",
                fix="falaj features training-sets lists them",
            )
        return found

    @operation("optimization.show", resource="optimization", mode=Mode.READ)
    def show(self, optimization: OptimizationRef) -> Optimization:
        """Show the variants of an optimization: latency, throughput, size, quality, and the verdict with its reason."""
        call = current_call()
        return store.optimization_record(call.tx, call.object("optimization"), prices=self._prices)

    @operation("optimization.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Optimization]:
        """List the finished optimizations of a workspace, oldest first."""
        call = current_call()
        return list_page(
            self.gate,
            ["optimization"],
            lambda page: [store.optimization_record(call.tx, found, prices=self._prices) for found in page],
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
        held_out: DatasetRef | None = None,
        job: JobRef,
        student: JobRef | None = None,
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
            "held_out": None if held_out is None else call.object("held_out").id,
            "job": made_by.id,
            "student": None if student is None else call.object("student").id,
            "target": target,
            "features": features,
            "budget": budget.model_dump(mode="json"),
            "report": report.model_dump(mode="json"),
        }
        store.add(call, new, facts)
        return store.optimization_record(call.tx, new, prices=self._prices)


def _only_target(known: DatasetColumns, features: tuple[str, ...]) -> str:
    """Return the only column that is neither a feature nor part of a row's identity. Raise if there are others."""
    left = [
        name
        for name in known.columns
        if name not in features and name not in known.identifying and VIEW_COLUMN not in name
    ]
    if len(left) != 1:
        raise InvalidInput.at(
            "target",
            given="none",
            allowed=f"the column that the model predicts, one of {', '.join(left[:50]) or 'the data'}",
        )
    return left[0]


def _other_set(held_out: StoredObject, data: StoredObject) -> StoredObject:
    """Return the held-out set. Raise InvalidInput if it is the data: the rows that teach would judge."""
    if held_out.id == data.id:
        raise InvalidInput.at(
            "held_out",
            given=f"{held_out.name}, which is the data",
            allowed="another training set",
            fix="leave it out: half of the data is then held out",
        )
    return held_out


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
