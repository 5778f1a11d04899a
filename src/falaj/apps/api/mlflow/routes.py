"""All routes of MLflow's API, and what is left out of it."""

from __future__ import annotations

from falaj.apps.api.mlflow import (
    artifacts,
    experiments,
    histories,
    logged_models,
    model_versions,
    registered_models,
    runs,
    uploads,
)
from falaj.apps.api.mlflow.route import API, MlflowRoute

ROUTES: tuple[MlflowRoute, ...] = (
    *experiments.ROUTES,
    *runs.ROUTES,
    *histories.ROUTES,
    *logged_models.ROUTES,
    *artifacts.ROUTES,
    *uploads.ROUTES,
    *registered_models.ROUTES,
    *model_versions.ROUTES,
)
LISTINGS = artifacts.LISTINGS | {"versions": model_versions.LISTING}
"""The routes that list files, by the first part of the folder in the query: like `runs/ID/artifacts/FOLDER`."""

LEFT_OUT = {
    "traces": "tracing",
    "unified-traces": "tracing",
    "gateway": "the AI gateway",
    "prompt-optimization": "the registry of prompts",
    "scorers": "the evaluation of generative models",
    "datasets": "the store of evaluation datasets",
    "label-schemas": "labelling",
    "review-queues": "labelling",
    "issues": "tracing",
    "workspaces": "the administration of workspaces",
    "webhooks": "the administration of webhooks (use `falaj webhooks`)",
    "presigned": "downloading by addresses of the object store (bytes pass the server, which verifies them)",
}
"""Parts of MLflow's API that answer 501, by the part of the path behind /mlflow/ or /mlflow-artifacts/."""
REFUSED = {
    f"{API}/model-versions/delete": "a version is never deleted: lineage and the audit log refer to it. Take its "
    "aliases away (delete_registered_model_alias), and tag it as no longer in use (set_model_version_tag)",
}
"""Routes of what is never done here, and what to do instead."""
MOUNTS = ("/api/2.0/mlflow", "/api/2.0/mlflow-artifacts", "/api/3.0/mlflow", "/ajax-api/2.0/mlflow")
SERVER_INFO, SERVER_FACTS = (
    "/api/3.0/mlflow/server-info",
    {
        "workspaces_enabled": True,
        "multipart_uploads_enabled": False,
        "multipart_downloads_enabled": False,
    },
)
"""What clients of MLflow 3 ask before they send the name of a workspace."""
