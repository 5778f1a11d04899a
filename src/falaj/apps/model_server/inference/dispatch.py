"""Dispatch of requests: resolve the path, admit the caller, and produce the response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from urllib.parse import quote, unquote_to_bytes

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.inference.paths import UNKNOWN, PathKind, PathTarget, build_path_table
from falaj.apps.model_server.inference.prediction import Prediction, prepare
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.model_server.tracing.spans import Tracer
from falaj.errors import Denied, FalajError, Internal, NotFound, Unavailable
from falaj.serving.dependencies import LOAD_PATH, Admission, FeatureReader, PredictionSink
from falaj.serving.deployment_state import ServedEndpoint

MODELS = b"/v2/models/"
LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are parsed in a thread, to keep the event loop free."""
LARGE_LOOKUP_BYTES = 4 * 1024
"""So are those whose features are looked up, which takes longer for each value."""
ADMISSION_THREADS = 4
MAX_ATTEMPTS = 3
"""Attempts at a decision that expires before it can be used."""
MAX_PENDING_DECISIONS = 64
MAX_PENDING_OF_SOURCE = 16
"""Pending decisions, and tokens of one address that are being checked; more indicate a client that guesses tokens."""
PARSING_THREADS = 2
"""Threads for large bodies. JSON is parsed under the interpreter's lock, so that more would only take memory."""

_log = logging.getLogger(__name__)


class Dispatcher:
    """Dispatches requests. Called on the event loop only."""

    def __init__(
        self,
        admission: Admission,
        features: FeatureReader,
        sink: PredictionSink,
        metrics: ServerMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._admission = admission
        self._features = features
        self._sink = sink
        self._metrics = metrics
        self._pending_decisions = 0
        self._pending_sources: Counter[str] = Counter()
        self._parsing_pool = ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="parsing")
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
        self._parsing_pool.shutdown(wait=False, cancel_futures=True)

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
        plain = quote(unquote_to_bytes(path.partition(b"?")[0])).encode().rstrip(b"/")
        return self._paths.get(plain) or _unknown_target(plain)

    # ---------------------------------------------------------------------------------------- admission

    def authenticate(
        self, exchange: HttpExchange, source: str, done: Callable[[str, FalajError | None], None]
    ) -> None:
        """Check the credential of a request in a thread; call `done` with the caller, or with an error."""
        if (
            self._pending_decisions >= MAX_PENDING_DECISIONS
            or self._pending_sources[source] >= MAX_PENDING_OF_SOURCE
        ):
            done("", _no_decision())
            return
        self._pending_decisions += 1
        self._pending_sources[source] += 1
        future = self._admission_pool.submit(self._admission.authenticate, exchange.credential or "")
        future.add_done_callback(partial(self._on_authenticated, source, done))

    def _on_authenticated(
        self, source: str, done: Callable[[str, FalajError | None], None], future: Future[str]
    ) -> None:
        if not future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._authenticated, source, done, future)

    def _authenticated(
        self, source: str, done: Callable[[str, FalajError | None], None], future: Future[str]
    ) -> None:
        self._pending_decisions -= 1
        self._pending_sources[source] -= 1
        if not self._pending_sources[source]:
            del self._pending_sources[source]
        error = future.exception()
        if error is None:
            done(future.result(), None)
        elif isinstance(error, FalajError):
            done("", error)
        else:
            _log.error("authentication failed", exc_info=error)
            done("", _no_decision())

    def _admit(self, exchange: HttpExchange, target: PathTarget, *, tries: int = MAX_ATTEMPTS) -> None:
        if exchange.caller is not None:
            self._respond(exchange, target, exchange.caller)
            return
        try:
            caller = self._admission.admit(exchange.credential or "", target.admission_target, exchange.body)
        except FalajError as error:
            self._refuse(exchange, _concealed(error, target, exchange.path))
            return
        if caller is not None:
            self._respond(exchange, target, caller)
        elif not tries or self._pending_decisions >= MAX_PENDING_DECISIONS:
            self._refuse(exchange, _no_decision())
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
            self._refuse(exchange, _concealed(error, target, exchange.path))
        else:
            _log.error("admission failed", exc_info=error)
            self._refuse(exchange, _no_decision())

    # ---------------------------------------------------------------------------------------- responses

    def _respond(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        is_allowed = exchange.method == target.method or (exchange.method, target.method) == (b"HEAD", b"GET")
        if not is_allowed and target.kind is not PathKind.UNKNOWN:
            exchange.finish(_not_allowed(target.method))
        elif target.kind is PathKind.INFER:
            self._infer(exchange, target, caller)
        elif target.response is not None:
            exchange.finish(target.response)
        elif target.kind is PathKind.METRICS:
            exchange.finish(self._metrics_response(exchange.path))
        elif not self.ready and exchange.path.startswith(MODELS):
            exchange.finish(_not_ready())  # what it names may be served once the models are loaded
        else:
            exchange.finish(_not_found(exchange.path))

    def _metrics_response(self, path: bytes) -> HttpResponse:
        if path.partition(b"?")[0].rstrip(b"/").decode("latin-1") == LOAD_PATH:
            return HttpResponse(200, self._metrics.load().model_dump_json().encode())
        return HttpResponse(200, self._metrics.render(), responses.METRICS)

    def _infer(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        if self._tracer is not None:
            parent = exchange.header(b"traceparent")
            exchange.trace = self._tracer.start(target.endpoint or "", exchange.began, parent)
        looks_up = target.served is not None and target.served.joins
        if exchange.size > (LARGE_LOOKUP_BYTES if looks_up else LARGE_BODY_BYTES):
            future = self._parsing_pool.submit(prepare, exchange, target, caller, self._features)
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


def _unknown_target(path: bytes) -> PathTarget:
    """Return the target of a path that is not served. The name of an endpoint is decided about like one that is."""
    return replace(UNKNOWN, endpoint=_endpoint_in(path)) if path.startswith(MODELS) else UNKNOWN


def _concealed(error: FalajError, target: PathTarget, path: bytes) -> FalajError:
    """Hide the existence of an endpoint from a caller who may not use it: answer with nothing but what it sent."""
    if isinstance(error, Denied | NotFound) and target.endpoint is not None:
        return _unknown(path)
    return error


def _unknown(path: bytes) -> NotFound:
    path = path.partition(b"?")[0]
    if not path.startswith(MODELS):
        return NotFound(f"unknown path {_name(path)}")
    return NotFound(
        f"there is no endpoint '{_endpoint_in(path)}' that you may call, or it does not have this version"
    )


def _endpoint_in(path: bytes) -> str:
    """Return what a path names as an endpoint, by its words alone."""
    name = path[len(MODELS) :].removesuffix(b"/infer").removesuffix(b"/ready")
    return _name(name.partition(b"/versions/")[0])


def _name(text: bytes) -> str:
    return unquote_to_bytes(text[:200]).decode("utf-8", "replace")


def _not_found(path: bytes) -> HttpResponse:
    return responses.error_response(_unknown(path))


def _not_allowed(method: bytes) -> HttpResponse:
    allowed = b"GET, HEAD" if method == b"GET" else method
    refused = responses.error_response(NotFound(f"this path allows {allowed.decode()} only"), status=405)
    return refused._replace(allow=allowed)


def _no_decision() -> Unavailable:
    return Unavailable("authorization is temporarily unavailable; try again")


def _not_ready() -> HttpResponse:
    return responses.error_response(Unavailable("the models are not loaded yet, or the server is stopping"))
