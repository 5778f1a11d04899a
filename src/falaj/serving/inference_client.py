"""How the other processes of the platform reach the model server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic_core import from_json, to_json

from falaj.records.serving import InferenceResult, InferInput, InferOutput


class ModelServerClient(Protocol):
    """The model server, seen from another process of the same home."""

    def url(self) -> str | None:
        """Where it answers; none if that is not known."""
        ...

    def wake(self) -> None:
        """See to it that one runs."""
        ...

    def require_engine(self) -> None:
        """Unavailable if models cannot be run in this installation."""
        ...

    def infer(self, path: str, caller: str, body: bytes) -> bytes:
        """The answer to an inference request of a caller who was admitted already; the typed error if it is refused."""
        ...


def request_inference(
    server: ModelServerClient,
    endpoint: str,
    caller: str,
    *,
    inputs: Sequence[InferInput],
    request: str,
    version: str | None,
) -> InferenceResult:
    """What an endpoint answers, through the model server's inner door."""
    place = endpoint if version is None else f"{endpoint}/versions/{version}"
    body = to_json({"id": request, "inputs": [each.model_dump(mode="json") for each in inputs]})
    told = from_json(server.infer(f"/v2/models/{place}/infer", caller, body))
    return InferenceResult(
        model_name=told["model_name"],
        model_version=told["model_version"],
        id=told.get("id", ""),
        prediction=told.get("parameters", {}).get("prediction") or told.get("id"),
        outputs=tuple(InferOutput.model_validate(each) for each in told["outputs"]),
    )
