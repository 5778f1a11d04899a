"""The methods of the gRPC services: admitted by the gate as those of REST, and answered from the same tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from google.protobuf import json_format

from falaj.apps.model_server.grpc.call import GrpcCall, StreamingCall, WorkDone
from falaj.apps.model_server.grpc.health import HealthWatchers
from falaj.apps.model_server.grpc.inference import InferenceCalls
from falaj.apps.model_server.grpc.messages import message_class
from falaj.apps.model_server.grpc.reflection import SERVICES, reflect
from falaj.apps.model_server.grpc.statuses import StatusCode, http_status_of
from falaj.apps.model_server.grpc.tensors import model_path, parse_message
from falaj.apps.model_server.inference.dispatch import Dispatcher, concealed, unknown
from falaj.apps.model_server.inference.model_reports import (
    describe_index,
    describe_statistics,
    require_plain_load,
    unload_refused,
)
from falaj.apps.model_server.inference.paths import EXTENSIONS, PathKind, PathTarget
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.model_server.tracing.spans import Tracer
from falaj.errors import FalajError, Internal, Unavailable
from falaj.serving.dependencies import Admission, FeatureReader
from falaj.version import VERSION

INFERENCE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
SERVER_NAMES = ("", INFERENCE, HEALTH)
"""Names of services whose health is that of the server."""

Handler = Callable[[GrpcCall, bytes], None]
Refuse = Callable[[FalajError], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service. `call` makes the stream of a call, `handle` answers a message of it."""

    handle: Handler
    call: type[GrpcCall] = GrpcCall
    is_public: bool = False
    """Callers need no token."""


class GrpcService:
    """Answers calls. Used on the event loop only."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: Admission,
        features: FeatureReader,
        metrics: ServerMetrics,
        *,
        tracer: Tracer | None = None,
        is_readiness_public: bool = False,
    ) -> None:
        """`is_readiness_public`: whether a model is ready may be asked without a token."""
        self.decisions = dispatcher.decisions
        self.rates = dispatcher.rates
        self._dispatcher = dispatcher
        self._is_readiness_public = is_readiness_public
        self._metrics = metrics
        self.health = HealthWatchers(lambda: dispatcher.ready, self._is_served)
        self._inference = InferenceCalls(self, admission, features, metrics, tracer)
        self._methods = self._all_methods()
        self._unknown = Method(self._unimplemented)

    def method(self, path: bytes) -> Method:
        return self._methods.get(path, self._unknown)

    def update(self) -> None:
        """Take note that other models are served, or none any more."""
        self._inference.update()
        self.health.notify()

    def end_idle_calls(self, calls: Iterable[Any]) -> None:
        """End the calls of a connection that is to be closed which only wait for the client."""
        for call in list(calls):
            if call.is_idle:
                call.end_with(StatusCode.UNAVAILABLE, "the server is stopping, or closes an idle connection")

    def run_apart(self, work: Callable[[], bytes], done: WorkDone) -> None:
        """Run `work` in a thread, and `done` with its result or error."""
        self._dispatcher.run_apart(work, lambda future: done(*_result(future)))

    def run_any_apart(self, work: Callable[[], Any], done: Callable[[Future[Any]], None]) -> None:
        self._dispatcher.run_apart(work, done)

    def target(self, path: bytes) -> PathTarget:
        """Return what REST answers at a path."""
        return self._dispatcher.target(path)

    # ---------------------------------------------------------------------------------------- admission

    def admit(
        self,
        call: GrpcCall,
        message: bytes,
        target: PathTarget | None,
        path: bytes,
        then: Callable[[str], None],
        *,
        refuse: Refuse | None = None,
    ) -> None:
        """Continue with the caller's name if it may call what `target` names; else refuse the call."""
        endpoint = None if target is None else target.admission_target
        if call.method.is_public and not call.credential:
            self._admitted(call, target, path, then, refuse or partial(self.refuse, call), "", None)
            return
        done = partial(self._admitted, call, target, path, then, refuse or partial(self.refuse, call))
        self.decisions.admit(call.credential, endpoint, message, done)

    def _admitted(
        self,
        call: GrpcCall,
        target: PathTarget | None,
        path: bytes,
        then: Callable[[str], None],
        refuse: Refuse,
        caller: str,
        error: FalajError | None,
    ) -> None:
        if call.cancelled:
            return
        if error is None and target is not None and target.kind is PathKind.UNKNOWN:
            error = unknown(path) if self._dispatcher.ready else not_ready()
        if error is not None:
            refuse(error if target is None else concealed(error, target, path))
            return
        try:
            then(caller)
        except Exception as failure:
            refuse(_explained(failure))

    def refuse(self, call: GrpcCall, error: FalajError) -> None:
        self._metrics.refused[http_status_of(error)] += 1
        call.fail(error)

    # ------------------------------------------------------------------------------------------ methods

    def _all_methods(self) -> dict[bytes, Method]:
        inference = {
            "ServerLive": Method(self._live, is_public=True),
            "ServerReady": Method(self._ready, is_public=True),
            "ServerMetadata": Method(self._server_metadata),
            "ModelReady": Method(
                partial(self._about, "ModelReady", "ready"), is_public=self._is_readiness_public
            ),
            "ModelMetadata": Method(partial(self._about, "ModelMetadata", "")),
            "ModelConfig": Method(partial(self._about, "ModelConfig", "config")),
            "ModelStatistics": Method(self._statistics),
            "ModelInfer": Method(self._inference.infer),
            "ModelStreamInfer": Method(self._inference.stream_infer, StreamingCall),
            "RepositoryIndex": Method(self._index),
            "RepositoryModelLoad": Method(self._load),
            "RepositoryModelUnload": Method(self._unload),
        }
        health = {
            "Check": Method(self._check, is_public=True),
            "Watch": Method(self._watch, is_public=True),
        }
        methods = {f"/{INFERENCE}/{name}": method for name, method in inference.items()}
        methods |= {f"/{HEALTH}/{name}": method for name, method in health.items()}
        methods |= {
            f"/{name}/ServerReflectionInfo": Method(partial(self._reflect, package), StreamingCall)
            for name, package in SERVICES.items()
        }
        return {path.encode(): method for path, method in methods.items()}

    def _unimplemented(self, call: GrpcCall, _message: bytes) -> None:
        words = f"there is no method {call.head.path[:200].decode('utf-8', 'replace')}"
        call.end_with(StatusCode.UNIMPLEMENTED, words)

    def _live(self, call: GrpcCall, _message: bytes) -> None:
        call.reply(_message_of("ServerLiveResponse", live=True))

    def _ready(self, call: GrpcCall, _message: bytes) -> None:
        call.reply(_message_of("ServerReadyResponse", ready=self._dispatcher.ready))

    def _server_metadata(self, call: GrpcCall, message: bytes) -> None:
        answer = _message_of("ServerMetadataResponse", name="falaj", version=VERSION, extensions=EXTENSIONS)
        self.admit(call, message, None, b"", lambda _: call.reply(answer))

    def _about(self, name: str, last: str, call: GrpcCall, data: bytes) -> None:
        """Answer what REST answers at a path of the model, as a message."""
        asked = self._parsed(call, f"inference.{name}Request", data)
        if asked is None:
            return
        path = model_path(asked.name, asked.version, last)
        target = self.target(path)

        def answer(_caller: str) -> None:
            response = message_class(f"inference.{name}Response")()
            body = b"{}" if target.response is None else target.response.body
            into = response.config if name == "ModelConfig" else response
            json_format.Parse(body, into, ignore_unknown_fields=True)
            call.reply(response.SerializeToString())

        self.admit(call, data, target, path, answer)

    def _statistics(self, call: GrpcCall, data: bytes) -> None:
        asked = self._parsed(call, "inference.ModelStatisticsRequest", data)
        if asked is None:
            return
        if not asked.name:
            self._list(call, data, self._send_statistics)
            return
        path = model_path(asked.name, asked.version, "stats")
        target = self._dispatcher.target(path)
        self.admit(
            call, data, target, path, lambda _: self._send_statistics(call, [target.served], target.version)
        )

    def _send_statistics(self, call: GrpcCall, served: list[Any], version: str | None = None) -> None:
        found = describe_statistics(served, self._metrics, version=version)
        call.reply(_message_of_json("ModelStatisticsResponse", found))

    def _index(self, call: GrpcCall, data: bytes) -> None:
        if self._parsed(call, "inference.RepositoryIndexRequest", data) is not None:
            self._list(call, data, self._send_index)

    def _send_index(self, call: GrpcCall, served: list[Any]) -> None:
        call.reply(_message_of_json("RepositoryIndexResponse", {"models": describe_index(served)}))

    def _list(self, call: GrpcCall, data: bytes, send: Callable[[GrpcCall, list[Any]], None]) -> None:
        """Answer about all endpoints that the caller may call."""

        def listed(names: Iterable[str]) -> None:
            served = self._dispatcher.served
            send(call, [served[name] for name in names if name in served])

        def admitted(_caller: str) -> None:
            self.decisions.permitted(call.credential, tuple(self._dispatcher.served), listed)

        self.admit(call, data, None, b"", admitted)

    def _load(self, call: GrpcCall, data: bytes) -> None:
        asked = self._parsed(call, "inference.RepositoryModelLoadRequest", data)
        if asked is None:
            return
        target, path = self._repository_target(asked.model_name, "load")

        def answer(_caller: str) -> None:
            if asked.parameters:
                require_plain_load(b'{"parameters":{"config":""}}', target.endpoint or "")
            call.reply(b"")

        self.admit(call, data, target, path, answer)

    def _unload(self, call: GrpcCall, data: bytes) -> None:
        asked = self._parsed(call, "inference.RepositoryModelUnloadRequest", data)
        if asked is None:
            return
        target, path = self._repository_target(asked.model_name, "unload")

        def answer(_caller: str) -> None:
            raise unload_refused(target.endpoint or "")

        self.admit(call, data, target, path, answer)

    def _repository_target(self, name: str, last: str) -> tuple[PathTarget, bytes]:
        path = f"/v2/repository/models/{quote(name[:200])}/{last}".encode()
        return self._dispatcher.target(path), path

    def _parsed(self, call: GrpcCall, name: str, data: bytes) -> Any | None:
        """Return a message of a call; None, and refused, if it is not one."""
        try:
            return parse_message(message_class(name), data)
        except FalajError as error:
            self.refuse(call, error)
            return None

    # ---------------------------------------------------------------------------- health and reflection

    def _check(self, call: GrpcCall, data: bytes) -> None:
        asked = self._parsed(call, "grpc.health.v1.HealthCheckRequest", data)
        if asked is not None:
            self._with_service(call, data, asked.service, lambda _: self.health.check(call, asked.service))

    def _watch(self, call: GrpcCall, data: bytes) -> None:
        asked = self._parsed(call, "grpc.health.v1.HealthCheckRequest", data)
        if asked is not None:
            self._with_service(call, data, asked.service, lambda _: self.health.watch(call, asked.service))

    def _with_service(self, call: GrpcCall, data: bytes, name: str, then: Callable[[str], None]) -> None:
        """Continue about the health of the server for everybody, and of a model for those who may call it."""
        if name in SERVER_NAMES:
            then("")
        elif not call.credential and not self._is_readiness_public:
            call.end_with(
                StatusCode.UNAUTHENTICATED,
                "the health of a model needs the metadata 'authorization: Bearer …'",
            )
        else:
            path = model_path(name, "", "ready")
            self.admit(call, data, self._dispatcher.target(path), path, then)

    def _is_served(self, name: str) -> bool:
        return name in SERVER_NAMES or self.target(model_path(name, "", "ready")).kind is not PathKind.UNKNOWN

    def _reflect(self, package: str, call: GrpcCall, data: bytes) -> None:
        if not isinstance(call, StreamingCall):
            return
        number = call.expect_answer()
        try:
            answer = reflect(package, data)
        except FalajError as error:
            self.refuse(call, error)
            return
        self.admit(call, data, None, b"", lambda _: call.answer(number, answer))


def not_ready() -> Unavailable:
    return Unavailable("the models are not loaded yet, or the server is stopping")


def _message_of(kind: str, /, **fields: Any) -> bytes:
    found: bytes = message_class(f"inference.{kind}")(**fields).SerializeToString()
    return found


def _message_of_json(name: str, content: dict[str, Any]) -> bytes:
    message = message_class(f"inference.{name}")()
    found: bytes = json_format.ParseDict(content, message, ignore_unknown_fields=True).SerializeToString()
    return found


def _result(future: Future[bytes]) -> tuple[bytes | None, FalajError | None]:
    error = future.exception()
    return (future.result(), None) if error is None else (None, _explained(error))


def _explained(error: BaseException) -> FalajError:
    if isinstance(error, FalajError):
        return error
    _log.error("a call failed", exc_info=error)
    return Internal("internal error; see the log of the server")
