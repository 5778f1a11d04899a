"""ModelInfer and ModelStreamInfer: parse, admit, queue, and answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy.typing as npt

from falaj.apps.model_server.grpc import headers
from falaj.apps.model_server.grpc.call import GrpcCall, StreamingCall
from falaj.apps.model_server.grpc.messages import ModelStreamInferResponse
from falaj.apps.model_server.grpc.statuses import http_status_of
from falaj.apps.model_server.grpc.tensors import (
    InferWriter,
    bytes_field,
    model_path,
    notes_of,
    parameter,
    parse_infer,
    read_infer,
    template_of,
)
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


class TemplateFacts(NamedTuple):
    """What follows from the bytes of a repeated message, as long as the same models are served."""

    generation: int
    target: InferTarget
    queue: BatchQueue
    selection: OutputSelection
    request: str
    endpoint: str


class GrpcFailure(HttpResponse):
    """An error as the response of a prediction."""

    error: FalajError


class MessageExchange:
    """A message for inference, and its answer: the only one of a call, or one of many in a stream."""

    __slots__ = ("_number", "began", "call", "ident", "size", "target", "trace")

    def __init__(
        self, call: GrpcCall, number: int | None, target: InferTarget, ident: str, size: int
    ) -> None:
        self.call = call
        self._number = number
        self.target = target
        self.ident = ident
        self.began = call.began if number is None else time.perf_counter()
        self.size = size
        self.trace: RequestTrace | None = None

    @property
    def cancelled(self) -> bool:
        return self.call.cancelled

    @property
    def queued(self) -> QueuedRequest | None:
        return self.call.queued

    @queued.setter
    def queued(self, prediction: QueuedRequest | None) -> None:
        if self._number is None or not isinstance(self.call, StreamingCall):
            self.call.queued = prediction
        elif prediction is not None:
            self.call.open_messages[self._number] = prediction

    @property
    def is_streamed(self) -> bool:
        return self._number is not None

    def header(self, name: bytes) -> bytes | None:
        return self.call.head.kept.get(name)

    def start_trace(self, tracer: Tracer) -> None:
        """Trace this request, if the metadata or chance says so."""
        endpoint = self.target.path.endpoint or ""
        self.trace = tracer.start(endpoint, self.began, self.header(b"traceparent"))
        if self.trace is not None:
            self.call.traces = [*self.call.traces, self.trace]

    def finish(self, response: HttpResponse) -> None:
        if self.trace is not None:
            self.trace.end(response.status)
            self.call.traces = [each for each in self.call.traces if each is not self.trace]
        if isinstance(response, GrpcFailure):
            _answer(self.call, self._number, self.ident, None, response.error)
        else:
            extra = headers.literal(b"falaj-logged", b"true") if response.extra else b""
            _answer(self.call, self._number, self.ident, response.body, None, extra)


class GrpcPrediction(Prediction):
    """A prediction whose response is a message of gRPC."""

    __slots__ = ()

    def render(self, outputs: Sequence[Array]) -> None:
        if self.exchange.trace is not None:
            self.exchange.trace.ran(self.queue.model.version, last_run_ns())
        self.name = self._responder.next_id()
        self._write(outputs)

    def answer(self, outputs: Sequence[Array]) -> None:
        self._write(outputs)

    def render_batch(self, batch: Sequence[Any], outputs: Sequence[Array]) -> bool:
        return False

    def _write(self, outputs: Sequence[Array]) -> None:
        exchange = cast(MessageExchange, self.exchange)
        notes = notes_of(self.notes) if self.notes else b""
        if exchange.is_streamed:
            notes += FINAL
        writer = exchange.target.writers[self.queue.model.version]
        message = writer.write(self.request_facts[1], self.name, outputs, self.selection, notes=notes)
        self.response = HttpResponse(200, message)

    def _failure(self, error: FalajError) -> HttpResponse:
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
        self._infer(call, data, None)

    def stream_infer(self, call: GrpcCall, data: bytes) -> None:
        """Answer a message of ModelStreamInfer."""
        if isinstance(call, StreamingCall):
            self._infer(call, data, call.expect_answer())

    def _repeat(self, call: GrpcCall, data: bytes, facts: TemplateFacts, array: Array) -> None:
        """Queue a request that differs from an earlier one in its values only."""
        try:
            caller = self._admission.admit(call.credential, facts.target.path.endpoint, data)
        except FalajError:
            caller = None
        if caller is None:  # to be decided anew
            self._infer(call, data, None)
            return
        exchange = MessageExchange(call, None, facts.target, facts.request, len(data))
        if self._tracer is not None:
            exchange.start_trace(self._tracer)
        request_facts = (facts.endpoint, facts.request, caller)
        responders = facts.target.path.responders
        made = GrpcPrediction(
            exchange, facts.queue, (array,), request_facts, responders, facts.selection, b""
        )
        made.deadline = call.deadline
        if exchange.trace is not None:
            exchange.trace.version, exchange.trace.prepared = (
                facts.queue.model.version,
                time.perf_counter_ns(),
            )
        self._submit(exchange, made)

    # ------------------------------------------------------------------------------------ step by step

    def _infer(self, call: GrpcCall, data: bytes, number: int | None) -> None:
        if len(data) > LARGE_BODY_BYTES:
            done = partial(self._parsed_apart, call, data, number)
            self._service.run_any_apart(partial(parse_infer, data), done)
            return
        try:
            message = parse_infer(data)
        except FalajError as error:
            self._refuse(call, number, "", error)
        else:
            self._admit(call, data, number, message)

    def _parsed_apart(self, call: GrpcCall, data: bytes, number: int | None, future: Future[Any]) -> None:
        if call.cancelled:
            return
        try:
            message = future.result()
        except FalajError as error:
            self._refuse(call, number, "", error)
        else:
            self._admit(call, data, number, message)

    def _admit(self, call: GrpcCall, data: bytes, number: int | None, message: Any) -> None:
        target = self._target(message.model_name, message.model_version)
        self._service.admit(
            call,
            data,
            target.path,
            target.name,
            partial(self._prepare, call, data, number, message, target),
            refuse=partial(self._refuse, call, number, message.id),
        )

    def _prepare(
        self, call: GrpcCall, data: bytes, number: int | None, message: Any, target: InferTarget, caller: str
    ) -> None:
        """Check the tensors of an admitted request: in a thread if that may take long."""
        looks_up = target.path.served is not None and target.path.served.joins
        exchange = MessageExchange(call, number, target, message.id, len(data))
        if self._tracer is not None:
            exchange.start_trace(self._tracer)
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
        if made.response is None and not exchange.is_streamed and _is_repeatable(request, path, made):
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
        failure = GrpcFailure(http_status_of(error), b"")
        failure.error = error
        exchange.finish(failure)

    def _submit(self, exchange: MessageExchange, made: Prediction) -> None:
        if exchange.cancelled:
            return
        served = exchange.target.path.served
        if served is not None:
            try:
                self._service.rates.require(served.endpoint, made.caller, time.monotonic())
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

    def _refuse(self, call: GrpcCall, number: int | None, ident: str, error: FalajError) -> None:
        self._metrics.refused[http_status_of(error)] += 1
        _answer(call, number, ident, None, error)

    def _target(self, model: str, version: str) -> InferTarget:
        known = self._targets.get((model, version))
        if known is not None:
            return known
        path = model_path(model, version, "infer")
        target = self._service.target(path)
        served = target.served
        queues = {} if served is None else served.queues
        writers = {name: InferWriter(target.endpoint or "", queue.model) for name, queue in queues.items()}
        found = InferTarget(target, path, writers)
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


def _answer(
    call: GrpcCall,
    number: int | None,
    ident: str,
    message: bytes | None,
    error: FalajError | None,
    extra: bytes = b"",
) -> None:
    """Answer a call, or one message of a stream."""
    if number is None or not isinstance(call, StreamingCall):
        if error is not None:
            call.fail(error)
        elif message is not None:
            call.reply(message, extra=extra)
    elif error is not None:
        response = ModelStreamInferResponse(error_message=error.message)
        response.infer_response.id = ident
        call.answer(number, response.SerializeToString())
    elif message is not None:
        call.answer(number, bytes_field(2, message))
