"""ModelInfer and ModelStreamInfer: parse, admit, queue, and answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

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
from falaj.apps.model_server.inference.dispatch import LARGE_BODY_BYTES, LARGE_LOOKUP_BYTES
from falaj.apps.model_server.inference.paths import PathKind, PathTarget, VersionResponder
from falaj.apps.model_server.inference.prediction import take_inputs
from falaj.apps.model_server.inference.protocol import OutputSelection
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.errors import FalajError, Internal, NotFound
from falaj.serving.dependencies import Admission, FeatureReader
from falaj.serving.runtime.batch_queue import BatchQueue

if TYPE_CHECKING:
    from falaj.apps.model_server.grpc.service import GrpcService

Array = npt.NDArray[Any]

Answer = tuple[VersionResponder, InferWriter, OutputSelection]
"""How the response of a version is counted, written, and which outputs it has."""
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
    answer: Answer
    request: str
    endpoint: str


class GrpcPrediction:
    """A request in the batch queue of its version."""

    __slots__ = (
        *("_call", "_number", "_responder", "_selection", "_writer", "caller", "cancelled", "deadline"),
        *("inputs", "message", "name", "notes", "priority", "queue", "request_facts"),
    )

    def __init__(
        self,
        call: GrpcCall,
        queue: BatchQueue,
        inputs: Sequence[Array],
        request_facts: tuple[str, str, str],
        answer: Answer,
        notes: bytes,
        number: int | None,
    ) -> None:
        self._call = call
        self._number = number
        self._responder, self._writer, self._selection = answer
        self.queue = queue
        self.inputs = inputs
        self.request_facts = request_facts
        self.caller = request_facts[2]
        self.notes = notes
        self.name = ""
        self.priority = 0
        self.deadline = call.deadline
        self.cancelled = call.cancelled
        self.message: bytes | None = None

    def render(self, outputs: Sequence[Array]) -> None:
        self.name = ident = self._responder.next_id()
        self.message = self._writer.write(
            self.request_facts[1], ident, outputs, self._selection, notes=self.notes
        )

    def complete(self, error: FalajError | None) -> None:
        if self.cancelled:
            return
        message = self.message
        if error is None and message is None:
            error = Internal("internal error: the model returned no outputs")
        first = self.inputs[0]
        self._responder.metrics.count(
            200 if error is None else http_status_of(error),
            time.perf_counter() - self._call.began,
            rows=len(first) if first.ndim else 1,
        )
        _answer(self._call, self._number, self.request_facts[1], message, error)


class InferenceCalls:
    """Handles calls for inference. Used on the event loop only."""

    def __init__(
        self, service: GrpcService, admission: Admission, features: FeatureReader, metrics: ServerMetrics
    ) -> None:
        self._service = service
        self._admission = admission
        self._features = features
        self._metrics = metrics
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
        request_facts = (facts.endpoint, facts.request, caller)
        self._submit(
            call, GrpcPrediction(call, facts.queue, (array,), request_facts, facts.answer, b"", None), None
        )

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
        work = partial(self._prediction, call, data, number, message, target, caller)
        done = partial(self._prepared, call, number, message.id, target)
        if len(data) > (LARGE_LOOKUP_BYTES if looks_up else LARGE_BODY_BYTES):
            self._service.run_any_apart(work, done)
            return
        future: Future[GrpcPrediction] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        done(future)

    def _prediction(
        self, call: GrpcCall, data: bytes, number: int | None, message: Any, target: InferTarget, caller: str
    ) -> GrpcPrediction:
        served = target.path.served
        if served is None:
            raise NotFound("unknown endpoint")
        request, version = read_infer(message), target.path.version
        queue, inputs, notes = take_inputs(request, served, version, self._features)
        responder = target.path.responders[queue.model.version]
        answer = (responder, target.writers[queue.model.version], responder.encoder.selection(request))
        endpoint = served.endpoint.id or served.endpoint.name
        is_fixed = not served.joins and (version is not None or len(served.queues) == 1)
        if number is None and is_fixed:
            facts = TemplateFacts(self._generation, target, queue, answer, request.id, endpoint)
            call.head.template = template_of(data, message, facts)
        fields = notes_of(notes) + (b"" if number is None else FINAL)
        return GrpcPrediction(call, queue, inputs, (endpoint, request.id, caller), answer, fields, number)

    def _prepared(
        self, call: GrpcCall, number: int | None, ident: str, target: InferTarget, future: Future[Any]
    ) -> None:
        error = future.exception()
        if error is None:
            self._submit(call, future.result(), number)
            return
        if not isinstance(error, FalajError):
            _log.error("request handling failed", exc_info=error)
            error = Internal("internal error; see the log of the server")
        if not call.cancelled:
            metrics = self._metrics.of_version(target.path.endpoint or "", "")
            metrics.count(http_status_of(error), time.perf_counter() - call.began)
        _answer(call, number, ident, None, error)

    def _submit(self, call: GrpcCall, prediction: GrpcPrediction, number: int | None) -> None:
        if call.cancelled:
            return
        if number is None:
            call.queued = prediction
        elif isinstance(call, StreamingCall):
            call.open_messages[number] = prediction
        try:
            prediction.queue.submit(prediction)
        except FalajError as error:  # a full queue counts as an error of this version
            prediction.complete(error)

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


def _answer(
    call: GrpcCall, number: int | None, ident: str, message: bytes | None, error: FalajError | None
) -> None:
    """Answer a call, or one message of a stream."""
    if number is None or not isinstance(call, StreamingCall):
        if error is not None:
            call.fail(error)
        elif message is not None:
            call.reply(message)
    elif error is not None:
        response = ModelStreamInferResponse(error_message=error.message)
        response.infer_response.id = ident
        call.answer(number, response.SerializeToString())
    elif message is not None:
        call.answer(number, bytes_field(2, message))
