"""The path table of the model server, rebuilt whenever the deployment changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from urllib.parse import quote

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.inference.model_reports import describe_config
from falaj.apps.model_server.inference.protocol import ResponseEncoder
from falaj.apps.model_server.inference.row_encoding import RowEncoder, row_encoder
from falaj.apps.model_server.metrics import ServerMetrics, VersionMetrics
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.dependencies import LOAD_PATH, METRICS, DurableSink, PredictionSink
from falaj.serving.deployment_state import ServedEndpoint
from falaj.version import VERSION


class PathKind(Enum):
    LIVE = auto()
    READY = auto()
    FIXED = auto()
    MODEL_READY = auto()
    METRICS = auto()
    INFER = auto()
    STATISTICS = auto()
    ALL_STATISTICS = auto()
    PREDICT = auto()
    V1_PREDICT = auto()
    V1_INDEX = auto()
    INDEX = auto()
    LOAD = auto()
    UNLOAD = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class VersionResponder:
    """Encodes the responses of a version of an endpoint, counts them, and assigns prediction ids."""

    encoder: ResponseEncoder
    metrics: VersionMetrics
    next_id: Callable[[], str]
    rows: RowEncoder | None = None
    """Encodes responses of one row for whole batches, if the model allows."""
    when_stored: Callable[[str, Callable[[bool], None]], None] | None = None
    """Tells when a prediction is on disk, if predictions are logged."""


@dataclass(frozen=True, slots=True)
class PathTarget:
    """The target of a path. Inference has an endpoint, and a version if the path names one."""

    kind: PathKind
    method: bytes = b"GET"
    endpoint: str | None = None
    served: ServedEndpoint | None = None
    version: str | None = None
    response: HttpResponse | None = None
    responders: Mapping[str, VersionResponder] = field(default_factory=dict)

    @property
    def admission_target(self) -> str | None:
        """Return the endpoint, METRICS or None that the caller must be admitted to."""
        return METRICS if self.kind is PathKind.METRICS else self.endpoint


UNKNOWN = PathTarget(PathKind.UNKNOWN)
EXTENSIONS = [
    *("binary_tensor_data", "classification", "model_configuration", "model_repository"),
    *("schedule_policy", "statistics"),
]
SERVER = {"name": "falaj", "version": VERSION, "extensions": EXTENSIONS}


def build_path_table(
    served: Mapping[str, ServedEndpoint], metrics: ServerMetrics, sink: PredictionSink
) -> dict[bytes, PathTarget]:
    """Return the targets of all paths by path."""
    paths = {
        b"/v2": PathTarget(PathKind.FIXED, response=responses.json_response(SERVER)),
        b"/v2/health/live": PathTarget(PathKind.LIVE),
        b"/v2/health/ready": PathTarget(PathKind.READY),
        b"/metrics": PathTarget(PathKind.METRICS),
        b"/v2/models/stats": PathTarget(PathKind.ALL_STATISTICS),
        b"/v2/repository/index": PathTarget(PathKind.INDEX, b"POST"),
        b"/v1/models": PathTarget(PathKind.V1_INDEX),
        LOAD_PATH.encode(): PathTarget(PathKind.METRICS),
    }
    for name, found in served.items():
        known = found.endpoint.id or name
        responders = {
            version: _responder(found, queue.model, metrics, sink) for version, queue in found.queues.items()
        }
        for called in dict.fromkeys((name, known)):
            path = f"/v2/models/{quote(called)}".encode()
            for version in (None, *found.answering):
                start = path if version is None else path + f"/versions/{quote(version)}".encode()
                paths |= _endpoint_paths(start, found, version, responders)
                paths |= _row_paths(called, found, version, responders)
            start = f"/v2/repository/models/{quote(called)}".encode()
            paths[start + b"/load"] = PathTarget(PathKind.LOAD, b"POST", name)
            paths[start + b"/unload"] = PathTarget(PathKind.UNLOAD, b"POST", name)
    return paths


def _responder(
    served: ServedEndpoint, model: ServedModel, metrics: ServerMetrics, sink: PredictionSink
) -> VersionResponder:
    name, version = served.endpoint.name, model.version
    encoder = ResponseEncoder(name, model)
    return VersionResponder(
        encoder,
        metrics.of_version(name, version),
        partial(sink.next_id, served.endpoint.id or name, version),
        row_encoder(encoder, model),
        sink.when_stored if isinstance(sink, DurableSink) else None,
    )


def _endpoint_paths(
    start: bytes, served: ServedEndpoint, version: str | None, responders: Mapping[str, VersionResponder]
) -> dict[bytes, PathTarget]:
    name = served.endpoint.name
    queue = served.representative(version)
    model, inputs = queue.model, _request_inputs(served, queue.model)
    versions = list(served.answering) if version is None else [version]
    about = responses.json_response(_metadata(name, versions, model, inputs))
    config = responses.json_response(describe_config(name, queue, inputs, version=version))
    ready = responses.json_response({"name": name, "ready": True})
    return {
        start: PathTarget(PathKind.FIXED, endpoint=name, response=about),
        start + b"/ready": PathTarget(PathKind.MODEL_READY, endpoint=name, response=ready),
        start + b"/config": PathTarget(PathKind.FIXED, endpoint=name, response=config),
        start + b"/stats": PathTarget(PathKind.STATISTICS, endpoint=name, served=served, version=version),
        start + b"/infer": PathTarget(PathKind.INFER, b"POST", name, served, version, responders=responders),
    }


def _row_paths(
    called: str, served: ServedEndpoint, version: str | None, responders: Mapping[str, VersionResponder]
) -> dict[bytes, PathTarget]:
    """Return the paths for plain rows: those of the V1 protocol, and /predict."""
    name = served.endpoint.name
    start = quote(called) if version is None else f"{quote(called)}/versions/{quote(version)}"
    v1, path = f"/v1/models/{start}", f"/predict/{start}"
    ready = responses.json_response({"name": name, "ready": True})
    predict = PathTarget(PathKind.V1_PREDICT, b"POST", name, served, version, responders=responders)
    rows = PathTarget(PathKind.PREDICT, b"POST", name, served, version, responders=responders)
    return {
        v1.encode(): PathTarget(PathKind.FIXED, endpoint=name, response=ready),
        f"{v1}:predict".encode(): predict,
        f"{v1}{quote(':')}predict".encode(): predict,
        path.encode(): rows,
    }


def _metadata(
    name: str, versions: list[str], model: ServedModel, request: tuple[Tensor, ...]
) -> dict[str, object]:
    """Return the metadata; `inputs` are what a request has, `model_inputs` what the lookup makes of them."""
    own = [_tensor(tensor) for tensor in model.inputs]
    return {
        "name": name,
        "versions": versions,
        "platform": model.platform,
        "inputs": [_tensor(tensor) for tensor in request] or own,
        "outputs": [_tensor(tensor) for tensor in model.outputs],
        **({"model_inputs": own} if request else {}),
    }


def _request_inputs(served: ServedEndpoint, model: ServedModel) -> tuple[Tensor, ...]:
    """Return the inputs of a request whose features are looked up: one value per row; none without a lookup."""
    join, lookup = served.joins.get(model.version), served.endpoint.lookup
    if join is None or lookup is None:
        return ()
    types = {key: kind for view in lookup.views for key, kind in zip(view.keys, view.key_types, strict=False)}
    keys = {key for part in join.views for key in part.keys}
    return tuple(
        Tensor(
            name=name,
            datatype=types.get(name, Datatype.BYTES) if name in keys else join.datatype_of(name),
            shape=(DYNAMIC,),
        )
        for name in join.inputs
    )


def _tensor(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
