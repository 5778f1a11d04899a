"""ModelInfer and ModelStreamInfer: parse, admit, queue, and answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy.typing as npt

from falaj.apps.model_server.grpc.answers import InferWriter, bytes_field, notes_of, parameter
from falaj.apps.model_server.grpc.call import GrpcCall, GrpcFailure, StreamingCall
from falaj.apps.model_server.grpc.messages import ModelStreamInferResponse
from falaj.apps.model_server.grpc.statuses import http_status_of
from falaj.apps.model_server.grpc.tensors import model_path, parse_infer, read_infer, template_of
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.inference.dispatch import LARGE_BODY_BYTES, LARGE_LOOKUP_BYTES
from falaj.apps.model_server.inference.paths import PathKind, PathTarget
from falaj.apps.model_server.inference.prediction import Prediction, prepare_request
from falaj.apps.model_server.inference.protocol import InferRequest, OutputSelection
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.model_server.tracing.spans import RequestTrace, Tracer
from falaj.errors import FalajError, Internal, RateLimited
from falaj.serving.dependencies import Admission, FeatureReader
from falaj.serving.runtime.batch_queue import BatchQueue, QueuedRequest
from falaj.serving.runtime.metering import last_run_ns

if TYPE_CHECKING:
    from falaj.apps.model_server.grpc.service import GrpcService

Array = npt.NDArray[Any]

FINAL = parameter("triton_final_response", True)
"""Tells clients of a stream that no other response to their request follows."""

_log = logging.getLogger(__name__)


class InferTarget(NamedTuple):
    """What a message names: the target of REST's path, and the writers of its versions' responses."""

    path: PathTarget
    name: bytes
    writers: dict[str, InferWriter]
    is_limited: bool
    """Callers may send so many requests a second."""


class TemplateFacts(NamedTuple):
    """What follows from the bytes of a repeated message, as long as the same models are served."""

    generation: int
    target: InferTarget
    queue: BatchQueue
    selection: OutputSelection
    request: str
    endpoint: str


class StreamedMessage:
    """One of the messages of a stream, and its answer: the exchange of its prediction."""

    __slots__ = ("_number", "began", "call", "request_id", "size", "target", "trace")

    is_unary = False

    def __init__(self, call: StreamingCall, size: int) -> None:
        self.call = call
        self._number = call.expect_answer()
        self.target: Any = None
        self.request_id = ""
        self.began = time.perf_counter()
        self.size = size
        self.trace: RequestTrace | None = None

    @property
    def cancelled(self) -> bool:
        return self.call.cancelled

    @property
    def queued(self) -> QueuedRequest | None:
        return self.call.open_messages.get(self._number)

    @queued.setter
    def queued(self, prediction: QueuedRequest | None) -> None:
        if prediction is not None:
            self.call.open_messages[self._number] = prediction
        if self.trace is not None:
            self.call.traces[self._number] = self.trace

    def header(self, name: bytes) -> bytes | None:
        return self.call.header(name)

    def finish(self, response: HttpResponse) -> None:
        if self.trace is not None:
            self.trace.end(response.status)
        if isinstance(response, GrpcFailure):
            self.fail(response.error)
        else:
            self.call.answer(self._number, bytes_field(2, response.body))

    def fail(self, error: FalajError) -> None:
        response = ModelStreamInferResponse(error_message=error.message)
        response.infer_response.id = self.request_id
        self.call.answer(self._number, response.SerializeToString())


MessageExchange = GrpcCall | StreamedMessage
"""A message for inference and its answer."""


class GrpcPrediction(Prediction):
    """A prediction whose response is a message of gRPC."""

    exchange: MessageExchange
    packed: bytes | None = None
    """The frames of an answer of one row."""

    def render(self, outputs: Sequence[Array]) -> None:
        if self.exchange.trace is not None:
            self.exchange.trace.ran(self.queue.model.version, last_run_ns())
        if not self.render_batch((self,), outputs):
            self.name = self._responder.next_id()
            self._write(outputs)

    def answer(self, outputs: Sequence[Array]) -> None:
        self._write(outputs)

    def render_batch(self, batch: Sequence[Any], outputs: Sequence[Array]) -> bool:
        """Pack the answers of a batch at once, if each has one row and nothing of its own but an id."""
        responder, version = self._responder, self.queue.model.version
        packer = self.exchange.target.writers[version].rows
        if packer is None or len(outputs[0]) != len(batch):
            return False
        for request in batch:
            if type(request) is not GrpcPrediction or request._responder is not responder:
                return False
            if not (request._is_plain and request.exchange.is_unary) or request.is_logged_first:
                return False
        rows = packer.rows(outputs)
        if rows is None:
            return False
        next_id, pack = responder.next_id, packer.pack
        for request, row in zip(batch, rows, strict=True):
            request.name = ident = next_id()
            request.packed = pack(request.exchange.id, ident, row)
        if RequestTrace.started:
            for request in batch:
                if request.exchange.trace is not None:
                    request.exchange.trace.ran(version, last_run_ns())
        return True

    def complete(self, error: FalajError | None) -> None:
        if self.packed is None or error is not None:
            super().complete(error)
        elif not self.cancelled:
            call = cast(GrpcCall, self.exchange)
            self._responder.metrics.count(200, time.perf_counter() - call.began, rows=1)
            call.reply_packed(self.packed)

    def _write(self, outputs: Sequence[Array]) -> None:
        exchange = self.exchange
        notes = notes_of(self.notes) if self.notes else b""
        if not exchange.is_unary:
            notes += FINAL
        writer: InferWriter = exchange.target.writers[self.queue.model.version]
        message = writer.write(self.request_facts[1], self.name, outputs, self.selection, notes=notes)
        self.response = HttpResponse(200, message)

    def _failure(self, error: FalajError) -> HttpResponse:
        return failure_of(error)


def failure_of(error: FalajError) -> GrpcFailure:
    failure = GrpcFailure(http_status_of(error), b"")
    failure.error = error
    return failure


class InferenceCalls:
    """Handles calls for inference. Used on the event loop only."""

    def __init__(
        self,
        service: GrpcService,
        admission: Admission,
        features: FeatureReader,
        metrics: ServerMetrics,
        tracer: Tracer | None,
    ) -> None:
        self._service = service
        self._admission = admission
        self._features = features
        self._metrics = metrics
        self._tracer = tracer
        self._targets: dict[tuple[str, str], InferTarget] = {}
        self._generation = 0

    def update(self) -> None:
        """Forget what was known of the models that were served."""
        self._targets = {}
        self._generation += 1

    def infer(self, call: GrpcCall, data: bytes) -> None:
        """Answer ModelInfer."""
        template = call.head.template
        if template is not None and template.facts.generation == self._generation:
            array = template.array_of(data)
            if array is not None:
                self._repeat(call, data, template.facts, array)
                return
        self._infer(call, data)

    def stream_infer(self, call: GrpcCall, data: bytes) -> None:
        """Answer a message of ModelStreamInfer."""
        if isinstance(call, StreamingCall):
            self._infer(StreamedMessage(call, len(data)), data)

    def _repeat(self, call: GrpcCall, data: bytes, facts: TemplateFacts, array: Array) -> None:
        """Queue a request that differs from an earlier one in its values only."""
        target = facts.target
        try:
            caller = self._admission.admit(call.credential, target.path.endpoint, data)
        except FalajError:
            caller = None
        if caller is None:  # to be decided anew
            self._infer(call, data)
            return
        call.target = target
        if self._tracer is not None:
            self._start_trace(call, self._tracer)
        request_facts = (facts.endpoint, facts.request, caller)
        responders, queue = target.path.responders, facts.queue
        made = GrpcPrediction(call, queue, (array,), request_facts, responders, facts.selection, b"")
        made.deadline = call.deadline
        if call.trace is not None:
            call.trace.version, call.trace.prepared = queue.model.version, time.perf_counter_ns()
        self._submit(call, made)

    def _start_trace(self, exchange: MessageExchange, tracer: Tracer) -> None:
        """Trace a request, if its metadata or chance says so."""
        endpoint = exchange.target.path.endpoint or ""
        exchange.trace = tracer.start(endpoint, exchange.began, exchange.header(b"traceparent"))

    # ------------------------------------------------------------------------------------ step by step

    def _infer(self, exchange: MessageExchange, data: bytes) -> None:
        if len(data) > LARGE_BODY_BYTES:
            done = partial(self._parsed_apart, exchange, data)
            self._service.run_any_apart(partial(parse_infer, data), done)
            return
        try:
            message = parse_infer(data)
        except FalajError as error:
            self._refuse(exchange, error)
        else:
            self._admit(exchange, data, message)

    def _parsed_apart(self, exchange: MessageExchange, data: bytes, future: Future[Any]) -> None:
        if exchange.cancelled:
            return
        try:
            message = future.result()
        except FalajError as error:
            self._refuse(exchange, error)
        else:
            self._admit(exchange, data, message)

    def _admit(self, exchange: MessageExchange, data: bytes, message: Any) -> None:
        exchange.target = target = self._target(message.model_name, message.model_version)
        exchange.request_id = message.id
        self._service.admit(
            exchange.call,
            data,
            target.path,
            target.name,
            partial(self._prepare, exchange, data, message),
            refuse=partial(self._refuse, exchange),
        )

    def _prepare(self, exchange: MessageExchange, data: bytes, message: Any, caller: str) -> None:
        """Check the tensors of an admitted request: in a thread if that may take long."""
        served = exchange.target.path.served
        looks_up = served is not None and served.joins
        if self._tracer is not None:
            self._start_trace(exchange, self._tracer)
        work = partial(self._prediction, exchange, data, message, caller)
        if len(data) > (LARGE_LOOKUP_BYTES if looks_up else LARGE_BODY_BYTES):
            self._service.run_any_apart(work, partial(self._prepared, exchange))
            return
        try:
            made = work()
        except Exception as error:
            self._failed(exchange, error)
        else:
            self._submit(exchange, made)

    def _prediction(self, exchange: MessageExchange, data: bytes, message: Any, caller: str) -> Prediction:
        target, call = exchange.target, exchange.call
        request, path = read_infer(message), target.path
        made = prepare_request(request, exchange, path, caller, self._features, make=GrpcPrediction)
        if call.deadline is not None:
            made.deadline = min(call.deadline, made.deadline or call.deadline)
        if made.response is None and exchange.is_unary and _is_repeatable(request, path, made):
            facts = TemplateFacts(
                self._generation, target, made.queue, made.selection, request.id, made.request_facts[0]
            )
            call.head.template = template_of(data, message, facts)
        return made

    def _prepared(self, exchange: MessageExchange, future: Future[Prediction]) -> None:
        try:
            made = future.result()
        except Exception as error:
            self._failed(exchange, error)
        else:
            self._submit(exchange, made)

    def _failed(self, exchange: MessageExchange, error: Exception) -> None:
        if exchange.cancelled:
            return
        if not isinstance(error, FalajError):
            _log.error("request handling failed", exc_info=error)
            error = Internal("internal error; see the log of the server")
        metrics = self._metrics.of_version(exchange.target.path.endpoint or "", "")
        metrics.count(http_status_of(error), time.perf_counter() - exchange.began)
        exchange.finish(failure_of(error))

    def _submit(self, exchange: MessageExchange, made: Prediction) -> None:
        if exchange.cancelled:
            return
        if exchange.target.is_limited:
            try:
                self._service.rates.require(
                    exchange.target.path.served.endpoint, made.caller, time.monotonic()
                )
            except RateLimited as error:  # no other version answers instead
                self._failed(exchange, error)
                return
        exchange.queued = made
        if made.response is not None:
            made.complete(None)
            return
        try:
            made.queue.submit(made)
        except FalajError as error:  # a full queue counts as an error of this version
            made.complete(error)

    def _refuse(self, exchange: MessageExchange, error: FalajError) -> None:
        self._metrics.refused[http_status_of(error)] += 1
        exchange.fail(error)

    def _target(self, model: str, version: str) -> InferTarget:
        known = self._targets.get((model, version))
        if known is not None:
            return known
        path = model_path(model, version, "infer")
        target = self._service.target(path)
        served = target.served
        queues = {} if served is None else served.queues
        writers = {name: InferWriter(target.endpoint or "", queue.model) for name, queue in queues.items()}
        is_limited = served is not None and self._service.rates.is_limited(served.endpoint)
        found = InferTarget(target, path, writers, is_limited)
        if target.kind is PathKind.INFER:
            self._targets[model, version] = found
        return found


def _is_repeatable(request: InferRequest, path: PathTarget, made: Prediction) -> bool:
    """Tell whether a request with other values is answered by the same version in the same way."""
    served = path.served
    is_fixed = served is not None and (path.version is not None or served.router.only is not None)
    return (
        is_fixed and not (served is None or served.joins) and made.fallback is None and not request.parameters
    )
