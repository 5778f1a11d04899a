"""The paths of a model server, all in one table that is made anew whenever what is served changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from falaj.apps.model_server import answers
from falaj.apps.model_server.answers import Answer
from falaj.apps.model_server.meters import Meter, Meters
from falaj.apps.model_server.wire import Writer
from falaj.records.serving import ServedModel, Tensor
from falaj.serving.catalogue import Served
from falaj.serving.neighbours import METRICS, Logs
from falaj.version import VERSION


class Kind(Enum):
    LIVE = auto()
    READY = auto()
    FIXED = auto()
    METRICS = auto()
    INFER = auto()
    UNKNOWN = auto()


class Voice(NamedTuple):
    """How a version answers for an endpoint, where its answers are counted, and what the next one is called."""

    writer: Writer
    meter: Meter
    name: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Place:
    """What stands at a path. An inference has its endpoint, and one version if the path names it."""

    kind: Kind
    method: bytes = b"GET"
    endpoint: str | None = None
    served: Served | None = None
    version: str | None = None
    answer: Answer | None = None
    voices: Mapping[str, Voice] = field(default_factory=dict)

    @property
    def asks(self) -> str | None:
        """What a caller needs to be admitted to."""
        return METRICS if self.kind is Kind.METRICS else self.endpoint


UNKNOWN = Place(Kind.UNKNOWN)
SERVER = {"name": "falaj", "version": VERSION, "extensions": ["binary_tensor_data"]}


def all_places(served: Mapping[str, Served], meters: Meters, logs: Logs) -> dict[bytes, Place]:
    places = {
        b"/v2": Place(Kind.FIXED, answer=answers.of(SERVER)),
        b"/v2/health/live": Place(Kind.LIVE),
        b"/v2/health/ready": Place(Kind.READY),
        b"/metrics": Place(Kind.METRICS),
    }
    for name, found in served.items():
        known = found.endpoint.id or name
        voices = {
            version: Voice(
                Writer(name, lane.model), meters.of(name, version), partial(logs.name, known, version)
            )
            for version, lane in found.lanes.items()
        }
        for called in dict.fromkeys((name, known)):
            path = f"/v2/models/{quote(called)}".encode()
            for version in (None, *found.lanes):
                start = path if version is None else path + f"/versions/{quote(version)}".encode()
                places |= _places_of(start, found, version, voices)
    return places


def _places_of(
    start: bytes, served: Served, version: str | None, voices: Mapping[str, Voice]
) -> dict[bytes, Place]:
    name = served.endpoint.name
    model = served.shown(version).model
    versions = list(served.lanes) if version is None else [version]
    about = answers.of(_metadata(name, versions, model))
    ready = answers.of({"name": name, "ready": True})
    return {
        start: Place(Kind.FIXED, endpoint=name, answer=about),
        start + b"/ready": Place(Kind.FIXED, endpoint=name, answer=ready),
        start + b"/infer": Place(Kind.INFER, b"POST", name, served, version, voices=voices),
    }


def _metadata(name: str, versions: list[str], model: ServedModel) -> dict[str, object]:
    return {
        "name": name,
        "versions": versions,
        "platform": model.platform,
        "inputs": [_tensor(tensor) for tensor in model.inputs],
        "outputs": [_tensor(tensor) for tensor in model.outputs],
    }


def _tensor(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
