"""Dispatch of requests: resolve the path, admit the caller, and produce the response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.access import preflight_response
from falaj.apps.model_server.http.compression import compress, decompress
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.repeated_heads import RepeatedHead
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.inference.body_templates import BodyTemplate
from falaj.apps.model_server.inference.decisions import DecisionQueue, Done
from falaj.apps.model_server.inference.model_reports import (
    describe_index,
    describe_statistics,
    read_index_request,
    require_plain_load,
    unload_refused,
)
from falaj.apps.model_server.inference.paths import UNKNOWN, PathKind, PathTarget, build_path_table
from falaj.apps.model_server.inference.plain_rows.formats import ReadArrow
from falaj.apps.model_server.inference.plain_rows.prediction import prepare_rows
from falaj.apps.model_server.inference.prediction import Prediction, prepare
from falaj.apps.model_server.inference.repeated_rows import RepeatedRows
from falaj.apps.model_server.limits import ServerLimits
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.model_server.tracing.spans import Tracer
from falaj.errors import Denied, FalajError, Internal, NotFound, RateLimited, Unavailable
from falaj.serving.dependencies import LOAD_PATH, Admission, FeatureReader, PredictedBatch, PredictionSink
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.runtime.rate_limits import RateLimits

MODELS, REPOSITORY = b"/v2/models/", b"/v2/repository/models/"
V1_MODELS, PREDICT = b"/v1/models/", b"/predict"
NAMING = (MODELS, REPOSITORY, V1_MODELS, PREDICT + b"/")
"""Beginnings of paths that name an endpoint."""
LAST_WORDS = frozenset((b"infer", b"ready", b"config", b"stats", b"load", b"unload"))
LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are parsed in a thread, to keep the event loop free."""
DIGESTED_APART_BYTES = 1 << 20
"""A larger body enters the digest of the audit window by its SHA-256, which a thread computes."""
LARGE_LOOKUP_BYTES = 4 * 1024
"""So are those whose features are looked up, which takes longer for each value."""
PARSING_THREADS = 2
"""Threads for large bodies. JSON is parsed under the interpreter's lock, so that more would only take memory."""

MAX_DECOMPRESSIONS = 16
"""Compressed bodies of one caller that may wait for a thread: a few bytes can be megabytes of work."""
ROWS = frozenset((PathKind.PREDICT, PathKind.V1_PREDICT))
REPORTS = frozenset(
    (
        *(PathKind.METRICS, PathKind.STATISTICS, PathKind.ALL_STATISTICS),
        *(PathKind.V1_INDEX, PathKind.INDEX, PathKind.LOAD, PathKind.UNLOAD),
    )
)

_log = logging.getLogger(__name__)


class Dispatcher:
    """Dispatches requests. Called on the event loop only."""

    def __init__(
        self,
        admission: Admission,
        features: FeatureReader,
        sink: PredictionSink,
        metrics: ServerMetrics,
        limits: ServerLimits,
        tracer: Tracer | None = None,
        read_arrow: ReadArrow | None = None,
        answered: Callable[[PredictedBatch], None] | None = None,
    ) -> None:
        """`answered` gets the batches that no batch queue has answered, if predictions are logged."""
        self._tracer = tracer
        self._read_arrow = read_arrow
        self._limits = limits
        self.rates = RateLimits(limits.rate)
        self.decisions = DecisionQueue(admission)
        self.repeated_rows = RepeatedRows(self, answered)
        self._features = features
        self._sink = sink
        self._metrics = metrics
        self._parsing_pool = ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="parsing")
        self._loop = asyncio.get_running_loop()
        self._paths: dict[bytes, PathTarget] = {}
        self.served: Mapping[str, ServedEndpoint] = {}
        self._decompressing: Counter[str] = Counter()
        """Compressed bodies of each caller that wait for a thread."""
        self.ready = False

    def update(self, served: Mapping[str, ServedEndpoint]) -> None:
        """Dispatch to `served`."""
        self._paths = build_path_table(served, self._metrics, self._sink)
        self.repeated_rows.update()
        self._metrics.served = self.served = served
        self.ready = True

    def close(self) -> None:
        self.decisions.close()
        self._parsing_pool.shutdown(wait=False, cancel_futures=True)

    def dispatch(self, exchange: HttpExchange) -> None:
        if exchange.repeated is not None and self._repeat(exchange, exchange.repeated):
            return
        if exchange.coding and exchange.size:
            self._decompress(exchange)
        else:
            self._dispatch(exchange)

    def _repeat(self, exchange: HttpExchange, repeated: RepeatedHead) -> bool:
        """Dispatch a request whose head was followed by an inference before; false if it is to be looked at as any."""
        target, kept = self._paths.get(exchange.path), repeated.kept
        if target is None or not isinstance(kept, BodyTemplate) or kept.target is not target:
            return False
        caller = self.decisions.known(exchange.credential or "", target.admission_target, exchange.body)
        if caller is None:
            return False
        self.infer(exchange, target, caller)
        return True

    def known_caller(self, credential: str, target: PathTarget, bodies: Sequence[bytes]) -> str | None:
        """Return the name of the caller, and count its calls, if the decision that allows them is known."""
        data = b"".join(bodies)
        return self.decisions.known(credential, target.admission_target, data, calls=len(bodies))

    def _dispatch(self, exchange: HttpExchange) -> None:
        target = self.target(exchange.path)
        if target.kind is PathKind.LIVE:
            exchange.finish(responses.json_response({"live": True}))
        elif target.kind is PathKind.READY:
            exchange.finish(responses.json_response({"ready": True}) if self.ready else _not_ready())
        else:
            self._admit(exchange, target)

    def target(self, path: bytes) -> PathTarget:
        """Return the target of a path."""
        return self._paths.get(path) or self._normalized_target(path)

    def _normalized_target(self, path: bytes) -> PathTarget:
        """Return the target of a path after normalizing its encoding."""
        path, _, query = path.partition(b"?")
        if path == PREDICT:
            path = PREDICT + b"/" + _queried_endpoint(query)
        plain = quote(unquote_to_bytes(path)).encode().rstrip(b"/")
        return self._paths.get(plain) or _unknown_target(plain)

    # -------------------------------------------------------------------------------------- compression

    def _decompress(self, exchange: HttpExchange) -> None:
        if self._decompressing[exchange.holder] >= MAX_DECOMPRESSIONS:
            self._refuse(exchange, Unavailable("too many of your compressed bodies wait; try again later"))
            return
        self._decompressing[exchange.holder] += 1
        limit = self._limits.body_bytes
        future = self._parsing_pool.submit(decompress, exchange.body, exchange.coding, limit=limit)
        future.add_done_callback(partial(self._return, partial(self._decompressed, exchange)))

    def _decompressed(self, exchange: HttpExchange, future: Future[bytes]) -> None:
        self._decompressing[exchange.holder] -= 1
        if not self._decompressing[exchange.holder]:
            del self._decompressing[exchange.holder]
        if exchange.cancelled:
            return
        try:
            exchange.hold(future.result())
        except FalajError as error:
            self._refuse(exchange, error)
        else:
            self._dispatch(exchange)

    def compress(self, exchange: HttpExchange, response: HttpResponse, coding: bytes) -> None:
        """Compress a response in a thread, and send it."""
        future = self._parsing_pool.submit(compress, response.body, coding)
        future.add_done_callback(partial(self._return, partial(_compressed, exchange, response, coding)))

    def run_apart(self, work: Callable[[], Any], done: Callable[[Future[Any]], None]) -> None:
        """Run `work` in a thread, and `done` with its result on the event loop."""
        self._parsing_pool.submit(work).add_done_callback(partial(self._return, done))

    def _return(self, finish: Callable[[Future[Any]], None], future: Future[Any]) -> None:
        """Pass the result of a thread to the event loop."""
        if not future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(finish, future)

    # ---------------------------------------------------------------------------------------- admission

    def authenticate(self, exchange: HttpExchange, source: str, done: Done) -> None:
        """Check the credential of a request in a thread; call `done` with the caller, or with an error."""
        self.decisions.authenticate(exchange.credential or "", source, done)

    def _admit(self, exchange: HttpExchange, target: PathTarget) -> None:
        if exchange.caller is not None:
            self._respond(exchange, target, exchange.caller)
            return
        if exchange.credential is None:
            self._respond_in_public(exchange, target)
            return
        if exchange.size > DIGESTED_APART_BYTES:
            self.run_apart(
                lambda: sha256(exchange.buffer).digest(), partial(self._digested, exchange, target)
            )
        else:
            self._decide(exchange, target, exchange.body)

    def _digested(self, exchange: HttpExchange, target: PathTarget, future: Future[bytes]) -> None:
        if not exchange.cancelled:
            self._decide(exchange, target, future.result())

    def _decide(self, exchange: HttpExchange, target: PathTarget, data: bytes) -> None:
        """Admit a request; `data`, its body or the digest of a large one, goes into the digest of the audit window."""
        credential, endpoint = exchange.credential or "", target.admission_target
        self.decisions.admit(credential, endpoint, data, partial(self._admitted, exchange, target))

    def _admitted(
        self, exchange: HttpExchange, target: PathTarget, caller: str, error: FalajError | None
    ) -> None:
        if error is None:
            self._respond(exchange, target, caller)
        else:
            self._refuse(exchange, concealed(error, target, exchange.path))

    # ---------------------------------------------------------------------------------------- responses

    def _respond_in_public(self, exchange: HttpExchange, target: PathTarget) -> None:
        """Answer a request that needs no token, which is all that the connection lets pass without one."""
        if exchange.method == b"OPTIONS":
            exchange.finish(preflight_response())
        elif target.kind is PathKind.MODEL_READY and target.response is not None:
            exchange.finish(target.response)
        else:
            exchange.finish(_not_found(exchange.path) if self.ready else _not_ready())

    def _respond(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        is_allowed = exchange.method == target.method or (exchange.method, target.method) == (b"HEAD", b"GET")
        if not is_allowed and target.kind is not PathKind.UNKNOWN:
            exchange.finish(_not_allowed(target.method))
        elif target.kind is PathKind.INFER:
            self.infer(exchange, target, caller)
        elif target.kind in ROWS:
            self._predict(exchange, target, caller)
        elif target.response is not None:
            exchange.finish(target.response)
        elif target.kind in REPORTS:
            self._report(exchange, target)
        elif not self.ready and exchange.path.startswith(NAMING):
            exchange.finish(_not_ready())  # what it names may be served once the models are loaded
        else:
            exchange.finish(_not_found(exchange.path))

    def _report(self, exchange: HttpExchange, target: PathTarget) -> None:
        """Answer what is asked about the server and its models."""
        try:
            if target.kind is PathKind.METRICS:
                exchange.finish(self._metrics_response(exchange.path))
            elif target.kind is PathKind.STATISTICS and target.served is not None:
                found = describe_statistics([target.served], self._metrics, version=target.version)
                exchange.finish(responses.json_response(found))
            elif target.kind is PathKind.LOAD:
                require_plain_load(exchange.body, target.endpoint or "")
                exchange.finish(responses.json_response({}))
            elif target.kind is PathKind.UNLOAD:
                raise unload_refused(target.endpoint or "")
            else:
                self._list(exchange, target)
        except FalajError as error:
            self._refuse(exchange, error)

    def _list(self, exchange: HttpExchange, target: PathTarget) -> None:
        """Answer about all endpoints that the caller may call."""
        if target.kind is PathKind.INDEX:
            read_index_request(exchange.body)
        done = partial(self._listed, exchange, target)
        self.decisions.permitted(exchange.credential or "", tuple(self.served), done)

    def _listed(self, exchange: HttpExchange, target: PathTarget, names: Sequence[str]) -> None:
        served = [self.served[name] for name in names if name in self.served]
        is_index = target.kind is PathKind.INDEX
        if target.kind is PathKind.V1_INDEX:
            exchange.finish(responses.json_response({"models": [each.endpoint.name for each in served]}))
            return
        found = describe_index(served) if is_index else describe_statistics(served, self._metrics)
        exchange.finish(responses.json_response(found))

    def _metrics_response(self, path: bytes) -> HttpResponse:
        if path.partition(b"?")[0].rstrip(b"/").decode("latin-1") == LOAD_PATH:
            return HttpResponse(200, self._metrics.load().model_dump_json().encode())
        return HttpResponse(200, self._metrics.render(), responses.METRICS)

    def infer(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        """Answer a request for inference that was admitted."""
        if self._tracer is not None:
            parent = exchange.header(b"traceparent")
            exchange.trace = self._tracer.start(target.endpoint or "", exchange.began, parent)
        if self._is_limited(exchange, target, caller):
            return
        looks_up = target.served is not None and target.served.joins
        if exchange.size > (LARGE_LOOKUP_BYTES if looks_up else LARGE_BODY_BYTES):
            future = self._parsing_pool.submit(prepare, exchange, target, caller, self._features)
            future.add_done_callback(partial(self._return, partial(self._prepared, exchange, target)))
            return
        try:
            self._queue(exchange, prepare(exchange, target, caller, self._features))
        except Exception as error:
            self._failed(exchange, target, error)
        else:
            self._group(exchange, target)

    def _group(self, exchange: HttpExchange, target: PathTarget) -> None:
        """Let the next requests that differ from this one in their values alone be answered together."""
        head, served = exchange.repeated, target.served
        if (
            head is None
            or served is None
            or self._tracer is not None
            or self.rates.is_limited(served.endpoint)
        ):
            return
        if isinstance(head.kept, BodyTemplate) and head.kept.target is target:
            head.kept.group = self.repeated_rows.group_of(head, head.kept)

    def _predict(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        """Answer a request of plain rows; they are parsed in a thread, because that takes a while for each value."""
        if self._is_limited(exchange, target, caller):
            return
        future = self._parsing_pool.submit(
            prepare_rows, exchange, target, caller, self._features, self._read_arrow
        )
        future.add_done_callback(partial(self._return, partial(self._prepared, exchange, target)))

    def _is_limited(self, exchange: HttpExchange, target: PathTarget, caller: str) -> bool:
        """Count a request of the caller; refuse it, and return true, if the caller has sent too many."""
        if target.served is not None:
            try:
                self.rates.require(target.served.endpoint, caller, time.monotonic())
            except RateLimited as error:
                self._failed(exchange, target, error)
                return True
        return False

    def _prepared(self, exchange: HttpExchange, target: PathTarget, future: Future[Prediction]) -> None:
        try:
            self._queue(exchange, future.result())
        except Exception as error:
            self._failed(exchange, target, error)

    def _queue(self, exchange: HttpExchange, prediction: Prediction) -> None:
        if not exchange.cancelled:
            exchange.queued = prediction
            if prediction.response is not None:
                prediction.complete(None)
                return
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


def _queried_endpoint(query: bytes) -> bytes:
    """Return the endpoint that a query like endpoint=churn names."""
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name == b"endpoint":
            return value.replace(b"+", b" ")
    return b""


def _compressed(exchange: HttpExchange, response: HttpResponse, coding: bytes, future: Future[bytes]) -> None:
    body = future.result()
    if len(body) < len(response.body):
        extra = b"\r\nContent-Encoding: %b\r\nVary: Accept-Encoding" % coding
        response = response._replace(body=body, extra=response.extra + extra)
    exchange.send(response)


def _unknown_target(path: bytes) -> PathTarget:
    """Return the target of a path that is not served. The name of an endpoint is decided about like one that is."""
    return replace(UNKNOWN, endpoint=_endpoint_in(path)) if path.startswith(NAMING) else UNKNOWN


def concealed(error: FalajError, target: PathTarget, path: bytes) -> FalajError:
    """Hide the existence of an endpoint from a caller who may not use it: answer with nothing but what it sent."""
    if isinstance(error, Denied | NotFound) and target.endpoint is not None:
        return unknown(path)
    return error


def unknown(path: bytes) -> NotFound:
    path = path.partition(b"?")[0]
    if not path.startswith(NAMING):
        return NotFound(f"unknown path {_name(path)}")
    words = f"there is no endpoint '{_endpoint_in(path)}' that you may call, or it does not have this version"
    if path.startswith(REPOSITORY):
        words += "; models are served by falaj endpoints deploy, not by loading them"
    return NotFound(words)


def _endpoint_in(path: bytes) -> str:
    """Return what a path names as an endpoint, by its words alone."""
    start = next(prefix for prefix in NAMING if path.startswith(prefix))
    name, _, last = path[len(start) :].rpartition(b"/")
    whole = name if name and last in LAST_WORDS else path[len(start) :]
    whole = whole.removesuffix(b":predict").removesuffix(b"%3Apredict") if start == V1_MODELS else whole
    return _name(whole.partition(b"/versions/")[0])


def _name(text: bytes) -> str:
    return unquote_to_bytes(text[:200]).decode("utf-8", "replace")


def _not_found(path: bytes) -> HttpResponse:
    return responses.error_response(unknown(path))


def _not_allowed(method: bytes) -> HttpResponse:
    allowed = b"GET, HEAD" if method == b"GET" else method
    refused = responses.error_response(NotFound(f"this path allows {allowed.decode()} only"), status=405)
    return refused._replace(allow=allowed)


def _not_ready() -> HttpResponse:
    return responses.error_response(Unavailable("the models are not loaded yet, or the server is stopping"))
