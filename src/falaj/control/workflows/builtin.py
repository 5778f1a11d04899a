"""The built-in workflows by their names. Each step is one operation, performed on behalf of the requester."""

from __future__ import annotations

from falaj.control.pipelines.canary import canary
from falaj.control.pipelines.evaluation import evaluate
from falaj.control.pipelines.optimization import optimize
from falaj.control.pipelines.prediction import predict
from falaj.control.pipelines.retraining import retrain
from falaj.control.services import Services
from falaj.control.tuning.study import tune
from falaj.control.workflows.context import Workflow, WorkflowContext, to_json
from falaj.control.workflows.what_if import replay_what_if
from falaj.ports.workflows import JsonObject


def copy_blob(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Copy a blob into another zone, under a name."""

    def upload() -> JsonObject:
        data = services.blobs.read(given["blob"])
        staged = services.blobs.upload(
            data, workspace=given["workspace"], zone=given["zone"], sources=(given["blob"],)
        )
        return {"blob": staged.id}

    def commit() -> JsonObject:
        return to_json(services.blobs.commit(staged["blob"], name=given["name"]))

    staged = context.run("upload", upload)
    return context.run("commit", commit)


WORKFLOWS: dict[str, Workflow] = {
    "blobs.copy": copy_blob,
    "models.evaluate": evaluate,
    "optimization.start": optimize,
    "pipelines.retrain": retrain,
    "pipelines.canary": canary,
    "predictions.start": predict,
    "queues.what_if": replay_what_if,
    "studies.create": tune,
}

SELF_UNDOING = frozenset(
    {
        "models.evaluate",
        "optimization.start",
        "pipelines.retrain",
        "pipelines.canary",
        "predictions.start",
        "queues.what_if",
        "studies.create",
    }
)
"""Workflows that revert or end what they have begun when they are cancelled."""
