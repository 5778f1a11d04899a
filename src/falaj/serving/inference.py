"""Requests of predictions that go to the model server through its internal socket."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from pydantic_core import from_json, to_json

from falaj.records.serving.predictions import InferenceResult, InferInput, InferOutput
from falaj.serving.dependencies import ModelServerClient


def request_inference(
    server: ModelServerClient,
    endpoint: str,
    caller: str,
    *,
    inputs: Sequence[InferInput],
    request: str,
    version: str | None,
) -> InferenceResult:
    """Send an inference request to the model server through its internal socket."""
    path = endpoint if version is None else f"{endpoint}/versions/{version}"
    body = to_json({"id": request, "inputs": [each.model_dump(mode="json") for each in inputs]})
    response = from_json(server.infer(f"/v2/models/{path}/infer", caller, body))
    parameters = response.get("parameters", {})
    return InferenceResult(
        model_name=response["model_name"],
        model_version=response["model_version"],
        id=response.get("id", ""),
        prediction=parameters.get("prediction") or response.get("id"),
        outputs=tuple(_output(**each) for each in response["outputs"]),
        missing=from_json(parameters.get("missing_features", "[]")),
        missing_rows=parameters.get("missing_rows", 0),
        feature_age_s=parameters.get("feature_age_s"),
        fallback_from=parameters.get("fallback_from"),
        fallback_reason=parameters.get("fallback_reason"),
    )


def _output(*, data: list[Any], parameters: object = None, **fields: Any) -> InferOutput:
    """Return an output tensor; what is not finite becomes null, which is all that strict JSON has for it."""
    shown = [None if isinstance(value, float) and not isfinite(value) else value for value in data]
    return InferOutput(**fields, data=shown, not_finite=shown.count(None))
