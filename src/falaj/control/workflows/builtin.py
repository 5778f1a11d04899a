"""The built-in workflows: each step is one operation, performed for whoever asked for the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from falaj.control.pipelines.canary import canary
from falaj.control.pipelines.optimization import optimize
from falaj.control.pipelines.retraining import retrain
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext
from falaj.control.workflows.what_if import replay_what_if
from falaj.ports.workflows import JsonObject

Workflow = Callable[[Services, WorkflowContext, JsonObject], JsonObject]


def copy_blob(services: Services, steps: WorkflowContext, given: JsonObject) -> JsonObject:
    """Copy a blob into another zone, under a name."""

    def upload() -> JsonObject:
        data = services.blobs.read(given["blob"])
        staged = services.blobs.upload(
            data, workspace=given["workspace"], zone=given["zone"], sources=(given["blob"],)
        )
        return {"blob": staged.id}

    def commit() -> JsonObject:
        return _dump(services.blobs.commit(staged["blob"], name=given["name"]))

    staged = steps.run("upload", upload)
    return steps.run("commit", commit)


WORKFLOWS: dict[str, Workflow] = {
    "blobs.copy": copy_blob,
    "optimization.start": optimize,
    "pipelines.retrain": retrain,
    "pipelines.canary": canary,
    "queues.what_if": replay_what_if,
}

SELF_UNDOING = frozenset({"optimization.start", "pipelines.retrain", "pipelines.canary", "queues.what_if"})
"""Those that put back what they have begun when they are cancelled, or end it."""


def _dump(record: Any) -> JsonObject:
    dumped: JsonObject = record.model_dump(mode="json")
    return dumped
