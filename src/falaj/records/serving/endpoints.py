"""Endpoints, their weighted routes, and the models that a model server serves for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from falaj.records.governance.residency import Label
from falaj.records.names import Name, ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record
from falaj.records.registry import FileFormat
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.settings import MeasuredVersion, ServingSettings
from falaj.records.serving.tensors import Tensor

EndpointRef = Annotated[Reference, RefersTo("endpoint")]
Sha256 = Annotated[str, TextRule("[0-9a-f]{64}", "a SHA-256 is 64 hexadecimal digits", limit=64)]


class ServedFile(Record):
    """The source of a model version's bytes: a registered version, or a file that must hash to `sha256`.

    `features` are what the columns of its input are called, in their order; none where nobody said. `inputs` and
    `outputs` are the registered signature of a version whose format does not tell their names.
    """

    model: Reference
    version: Name
    registered: ObjectId | None = None
    path: Path | None = None
    sha256: Sha256 | None = None
    format: FileFormat = FileFormat.ONNX
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    features: tuple[str, ...] = ()
    settings: ServingSettings = ServingSettings()


VersionName = Annotated[
    str,
    TextRule(
        r"([a-z0-9][a-z0-9._-]*@)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?",
        "a version is its number, or like churn@14",
        limit=200,
    ),
]
Percent = Annotated[int, Field(ge=0, le=100)]
StickyKey = Annotated[
    str,
    TextRule(
        r"request|header|(parameter|input):[^\s:]{1,200}",
        "the key is request (the id of the request), header (Falaj-Key), parameter:NAME or input:NAME",
        limit=210,
    ),
]
"""Where the key of a request is that decides about its version."""
SHADOW = ".shadow"
"""Ends the version of whatever is counted, logged or watched of a shadow, so that it does not mix with answers."""


class Route(Record):
    """A version's share of an endpoint's requests; with weight 0 it answers only whoever asks for it by version.

    A `shadow` gets copies of so many percent of the requests, and never answers. The `fallback` answers where the
    version that was chosen by weight fails or is overloaded.
    """

    version: VersionName
    weight: Annotated[int, Field(ge=0, le=1000)] = 100
    shadow: Percent = 0
    fallback: bool = False

    @model_validator(mode="after")
    def _shadow_answers_nothing(self) -> Self:
        if self.shadow and (self.weight or self.fallback):
            raise ValueError("a shadow never answers: its weight must be 0, and it cannot be the fallback")
        return self


class Endpoint(Record):
    """A name that callers use, and the versions of `model` that answer for it. `id` is its object, if it has one."""

    name: Reference
    model: Reference
    routes: Annotated[tuple[Route, ...], Field(min_length=1)]
    lookup: Lookup | None = None
    id: ObjectId | None = None
    sticky: StickyKey | None = None
    settings: ServingSettings = ServingSettings()

    @model_validator(mode="after")
    def _routes_hold(self) -> Self:
        _once("a version", (route.version for route in self.routes))
        _once("a fallback", ("fallback" for route in self.routes if route.fallback))
        if not any(route.weight for route in self.routes):
            raise ValueError(f"no route of {self.name} has a weight; at least one is more than 0")
        return self


class Deployment(Record):
    """The models that one model server serves."""

    models: tuple[ServedFile, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()

    @model_validator(mode="after")
    def _routes_lead_somewhere(self) -> Self:
        _once("an endpoint", (endpoint.name for endpoint in self.endpoints))
        known = {(file.model, file.version, file.settings) for file in self.models}
        if len(known) < len(self.models):
            _once("a model version", (f"{file.model}@{file.version}" for file in self.models))
        for endpoint in self.endpoints:
            for route in endpoint.routes:
                if (endpoint.model, route.version, endpoint.settings.of_runs) not in known:
                    raise ValueError(
                        f"{endpoint.name} routes to {endpoint.model}@{route.version}, which has no file"
                    )
        return self


class ScoringRule(StrEnum):
    """The distance of a prediction from the ground truth; less is better in both."""

    LOG_LOSS = "log_loss"
    SQUARED_ERROR = "squared_error"


Routes = Annotated[tuple[Route, ...], Field(min_length=1, max_length=20)]


class ServedRoute(Record):
    """A route as it is: the version's object, and why it is not served, if it is not."""

    version: str
    weight: int
    shadow: int = 0
    fallback: bool = False
    id: ObjectId
    problem: str | None = None


class DeployedEndpoint(Record):
    """An endpoint. `url` is where the model server answers for it; `previous` are the routes before the last change."""

    id: ObjectId
    workspace: ObjectId
    name: str
    model: str
    routes: tuple[ServedRoute, ...]
    previous: tuple[Route, ...] = ()
    lookup: Lookup | None = None
    sticky: StickyKey | None = None
    """Where the key is that decides about the version; none: the id of the request, else nothing."""
    settings: ServingSettings = ServingSettings()
    measured: tuple[MeasuredVersion, ...] = ()
    """How the model server runs each version that it has loaded."""
    scoring: ScoringRule | None = None
    zone: str = ""
    label: Label
    url: str | None = None
    grpc: str | None = None
    """Where the model server speaks gRPC, and the model's name there, like `127.0.0.1:7483 acme/churn`."""
    protected: str | None = None
    """The alias for which every version that it serves must be approved; none if it is not protected."""
    unlogged: int = 0
    """Predictions that were answered, but could not be logged."""
    problem: str | None = None
    """What keeps the model server, and so every version, from being reached."""
    created_at: datetime
    changed_at: datetime


class LoadProblem(Record):
    """Why a version is not served; none if it is."""

    version: Name
    problem: Annotated[str, Field(max_length=4000)] | None = None


def _once(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what} stands once in the list; given twice: {', '.join(twice)}")
