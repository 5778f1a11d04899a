"""Dispatch of requests: resolve the path, admit the caller, and produce the response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from urllib.parse import quote, unquote_to_bytes

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.inference.paths import UNKNOWN, PathKind, PathTarget, build_path_table
from falaj.apps.model_server.inference.prediction import Prediction, prepare
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.errors import Denied, FalajError, Internal, NotFound, Unavailable
from falaj.serving.dependencies import Admission, FeatureReader, PredictionSink
from falaj.serving.deployment_state import ServedEndpoint

LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are parsed in a thread, to keep the event loop free."""
ADMISSION_THREADS = 4
MAX_ATTEMPTS = 3
"""Attempts at a decision that expires before it can be used."""
MAX_PENDING_DECISIONS = 64
"""More pending decisions indicate a client that guesses tokens."""

_log = logging.getLogger(__name__)


class Dispatcher:
    """Dispatches requests. Called on the event loop only."""

    def __init__(
        self,
        admission: Admission,
        features: FeatureReader,
        sink: PredictionSink,
        metrics: ServerMetrics,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._admission = admission
        self._features = features
        self._sink = sink
        self._metrics = metrics
        self._pool = pool
        self._pending_decisions = 0
        self._admission_pool = ThreadPoolExecutor(ADMISSION_THREADS, thread_name_prefix="admission")
        self._loop = asyncio.get_running_loop()
        self._paths: dict[bytes, PathTarget] = {}
        self.ready = False

    def update(self, served: Mapping[str, ServedEndpoint]) -> None:
        """Dispatch to `served`."""
        self._paths = build_path_table(served, self._metrics, self._sink)
        self._metrics.served = served
        self.ready = True

    def close(self) -> None:
        self._admission_pool.shutdown(wait=False, cancel_futures=True)

    def dispatch(self, exchange: HttpExchange) -> None:
        target = self._paths.get(exchange.path) or self._normalized_target(exchange.path)
        if target.kind is PathKind.LIVE:
            exchange.finish(responses.json_response({"live": True}))
        elif target.kind is PathKind.READY:
            exchange.finish(responses.json_response({"ready": True}) if self.ready else _not_ready())
        else:
            self._admit(exchange, target)

    def _normalized_target(self, path: bytes) -> PathTarget:
        """Return the target of a path after normalizing its encoding."""
        plain = quote(unquote_to_bytes(path.partition(b"?")[0])).encode()
        return self._paths.get(plain.rstrip(b"/")) or UNKNOWN

    # ---------------------------------------------------------------------------------------- admission

    def _admit(self, exchange: HttpExchange, target: PathTarget, *, tries: int = MAX_ATTEMPTS) -> None:
        if exchange.caller is not None:
            self._respond(exchange, target, exchange.caller)
            return
        try:
            caller = self._admission.admit(exchange.credential or "", target.admission_target, exchange.body)
        except FalajError as error:
            self._refuse(exchange, _concealed(error, target))
            return
        if caller is not None:
            self._respond(exchange, target, caller)
        elif not tries or self._pending_decisions >= MAX_PENDING_DECISIONS:
            self._refuse(exchange, Unavailable("authorization is temporarily unavailable; try again"))
        else:
            self._pending_decisions += 1
            future = self._admission_pool.submit(
                self._admission.decide, exchange.credential or "", target.admission_target
            )
            future.add_done_callback(partial(self._on_decision, exchange, target, tries - 1))

    def _on_decision(
        self, exchange: HttpExchange, target: PathTarget, tries: int, future: Future[None]
    ) -> None:
        if not future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._decided, exchange, target, tries, future)

    def _decided(self, exchange: HttpExchange, target: PathTarget, tries: int, future: Future[None]) -> None:
        self._pending_decisions -= 1
        error = future.exception()
        if error is None:
            self._admit(exchange, target, tries=tries)
        elif isinstance(error, FalajError):
            self._refuse(exchange, _concealed(error, target))
        else:
            _log.error("admission failed", exc_info=error)
            self._refuse(exchange, Unavailable("authorization is temporarily unavailable; try again"))

    # ---------------------------------------------------------------------------------------- responses

    def _respond(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        if exchange.method != target.method and not (exchange.method == b"HEAD" and target.method == b"GET"):
            exchange.finish(
                _not_allowed(target.method) if target is not UNKNOWN else _not_found(exchange.path)
            )
        elif target.kind is PathKind.INFER:
            self._infer(exchange, target, caller)
        elif target.response is not None:
            exchange.finish(target.response)
        elif target.kind is PathKind.METRICS:
            exchange.finish(HttpResponse(200, self._metrics.render(), responses.METRICS))
        else:
            exchange.finish(_not_found(exchange.path))

    def _infer(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        if exchange.size > LARGE_BODY_BYTES:
            future = self._pool.submit(prepare, exchange, target, caller, self._features)
            future.add_done_callback(partial(self._on_prepared, exchange, target))
            return
        try:
            self._queue(exchange, prepare(exchange, target, caller, self._features))
        except Exception as error:
            self._failed(exchange, target, error)

    def _on_prepared(self, exchange: HttpExchange, target: PathTarget, future: Future[Prediction]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._prepared, exchange, target, future)

    def _prepared(self, exchange: HttpExchange, target: PathTarget, future: Future[Prediction]) -> None:
        try:
            self._queue(exchange, future.result())
        except Exception as error:
            self._failed(exchange, target, error)

    def _queue(self, exchange: HttpExchange, prediction: Prediction) -> None:
        if not exchange.cancelled:
            exchange.queued = prediction
            try:
                prediction.queue.submit(prediction)
            except FalajError as error:  # a full queue counts as an error of this version
                prediction.complete(error)

    def _failed(self, exchange: HttpExchange, target: PathTarget, error: Exception) -> None:
        if not isinstance(error, FalajError):
            _log.error("request handling failed", exc_info=error)
            error = Internal("internal error; see the log of the server")
        response = responses.error_response(error)
        metrics = self._metrics.of_version(target.endpoint or "", "")
        metrics.count(response.status, time.perf_counter() - exchange.began)
        exchange.finish(response)

    def _refuse(self, exchange: HttpExchange, error: FalajError) -> None:
        response = responses.error_response(error)
        self._metrics.refused[response.status] += 1
        exchange.finish(response)


def _concealed(error: FalajError, target: PathTarget) -> FalajError:
    """Hide the existence of an endpoint from a caller who may not use it."""
    if isinstance(error, Denied | NotFound) and target.endpoint is not None:
        return _unknown(f"/v2/models/{target.endpoint}".encode())
    return error


def _unknown(path: bytes) -> NotFound:
    parts = path.partition(b"?")[0].split(b"/")
    if parts[1:3] == [b"v2", b"models"] and len(parts) > 3:
        return NotFound(
            f"there is no endpoint '{_name(parts[3])}' that you may call, or it does not have this version"
        )
    return NotFound(f"unknown path {_name(path[:200])}")


def _name(text: bytes) -> str:
    return unquote_to_bytes(text[:200]).decode("utf-8", "replace")


def _not_found(path: bytes) -> HttpResponse:
    return responses.error_response(_unknown(path))


def _not_allowed(method: bytes) -> HttpResponse:
    return responses.error_response(NotFound(f"this path allows {method.decode()} only"), status=405)


def _not_ready() -> HttpResponse:
    return responses.error_response(Unavailable("the models are not loaded yet, or the server is stopping"))
