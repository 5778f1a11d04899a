"""One inference: parse the body into arrays, and encode the model's outputs as the response."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import numpy.typing as npt

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.exchange import HttpExchange, InferenceExchange
from falaj.apps.model_server.http.responses import BYTES, JSON, HttpResponse
from falaj.apps.model_server.inference.body_templates import BodyTemplate, kept_body
from falaj.apps.model_server.inference.feature_lookup import JoinedRows, has_model_input, join_rows
from falaj.apps.model_server.inference.paths import PathTarget, VersionResponder
from falaj.apps.model_server.inference.protocol import (
    InferRequest,
    OutputSelection,
    encode_parameters,
    read_request,
    read_schedule,
    read_values,
)
from falaj.apps.model_server.inference.row_encoding import ALL
from falaj.apps.model_server.inference.traffic import Fallback, named_version, sticky_key
from falaj.apps.model_server.tracing.spans import RequestTrace
from falaj.errors import DeadlineExceeded, FalajError, Fault, Internal, InvalidInput, NotFound, shorten
from falaj.records.serving.tensors import ServedModel
from falaj.serving.dependencies import FeatureReader, PredictedBatch
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.metering import last_run_ns
from falaj.serving.signatures import answer_to_no_rows, invalid_request

Array = npt.NDArray[Any]

WAITS = "falaj_logged"
"""The parameter of a request whose response waits until the prediction is on disk."""
LOGGED = b"\r\nFalaj-Logged: true"


class Prediction:
    """A request in the batch queue of its version."""

    __slots__ = (
        *(
            "exchange",
            "_is_plain",
            "is_logged_first",
            "_responder",
            "selection",
            "_responders",
            "caller",
            "cancelled",
            "deadline",
            "fallback",
            "priority",
            "response",
            "request_facts",
            "inputs",
            "notes",
            "queue",
            "name",
        ),
    )

    def __init__(
        self,
        exchange: InferenceExchange,
        queue: BatchQueue,
        inputs: Sequence[Array],
        request_facts: tuple[str, str, str],
        responders: Mapping[str, VersionResponder],
        selection: OutputSelection,
        notes: bytes,
    ) -> None:
        self.exchange = exchange
        self._responders = responders
        self.selection = selection
        self._responder = responders[queue.model.version]
        self._is_plain = selection == ALL and not notes and not request_facts[1]
        """The response has nothing of its own but its id and numbers."""
        self.is_logged_first = False
        """The response waits until the prediction is on disk."""
        self.fallback: Fallback | None = None
        self.name = ""
        self.queue = queue
        self.inputs = inputs
        self.notes = notes
        self.request_facts = request_facts
        self.caller = request_facts[2]
        self.priority = 0
        self.deadline: float | None = None
        self.cancelled = exchange.cancelled
        self.response: HttpResponse | None = None

    def for_version(self, queue: BatchQueue) -> Prediction:
        """Return the same request for a version with the same inputs and outputs."""
        facts, selection = self.request_facts, self.selection
        made = type(self)(self.exchange, queue, self.inputs, facts, self._responders, selection, self.notes)
        made.priority, made.deadline = self.priority, self.deadline
        made.is_logged_first = self.is_logged_first
        return made

    def add_notes(self, notes: bytes) -> None:
        """Add response parameters from `encode_parameters`."""
        self.notes = self.notes + b"," + notes if self.notes else notes
        self._is_plain = False

    def render(self, outputs: Sequence[Array]) -> None:
        if self.exchange.trace is not None:
            self.exchange.trace.ran(self.queue.model.version, last_run_ns())
        responder = self._responder
        self.name = ident = responder.next_id()
        body, json_bytes = responder.encoder.encode(
            self.request_facts[1], ident, outputs, self.selection, notes=self.notes
        )
        self.response = HttpResponse(200, body, JSON if json_bytes is None else BYTES, json_bytes, ident)

    def answer(self, outputs: Sequence[Array]) -> None:
        """Encode a response that no model ran for; it has no id, because it is not logged."""
        body, json_bytes = self._responder.encoder.encode(
            self.request_facts[1], "", outputs, self.selection, notes=self.notes
        )
        self.response = HttpResponse(200, body, JSON if json_bytes is None else BYTES, json_bytes)

    def render_batch(self, batch: Sequence[Any], outputs: Sequence[Array]) -> bool:
        """Encode the responses of a batch at once, if each has one row and nothing of its own but an id."""
        responder = self._responder
        rows = responder.rows
        if rows is None or len(outputs[0]) != len(batch):
            return False
        for request in batch:
            if (
                type(request) is not Prediction
                or request._responder is not responder
                or not request._is_plain
            ):
                return False
        texts = rows.texts(outputs)
        if texts is None:
            return False
        next_id, body = responder.next_id, rows.body
        for request, text in zip(batch, texts, strict=True):
            request.name = ident = next_id()
            request.response = HttpResponse(200, body(ident, text), JSON, None, ident)
        if RequestTrace.started:
            for request in batch:
                if request.exchange.trace is not None:
                    request.exchange.trace.ran(request.queue.model.version, last_run_ns())
        return True

    def complete(self, error: FalajError | None) -> None:
        if self.cancelled:
            return
        response = self.response
        if error is not None or response is None:
            response = self._failure(error or Internal("internal error: the model returned no outputs"))
        first = self.inputs[0]
        rows, metrics = len(first) if first.ndim else 1, self._responder.metrics
        metrics.count(response.status, time.perf_counter() - self.exchange.began, rows=rows)
        when_stored = self._responder.when_stored
        if error is not None and self.fallback is not None and self.fallback.takes(self, error):
            metrics.fallbacks[error.code] += 1
        elif self.is_logged_first and error is None and when_stored is not None:
            when_stored(self.name, partial(self._logged, response))
        else:
            self.exchange.finish(response)

    def _failure(self, error: FalajError) -> HttpResponse:
        return responses.error_response(error)

    def _logged(self, response: HttpResponse, is_stored: bool) -> None:
        """Send a response that has waited for the log; it says so if the prediction is on disk."""
        self.exchange.finish(response._replace(extra=response.extra + LOGGED) if is_stored else response)


def prepare(exchange: HttpExchange, target: PathTarget, caller: str, features: FeatureReader) -> Prediction:
    """Parse and check a request. Raise InvalidInput with all faults."""
    served = target.served
    if served is None:
        raise NotFound("unknown endpoint")
    endpoint = served.endpoint.id or served.endpoint.name
    repeated = exchange.repeated
    kept = None if repeated is None else repeated.kept
    if isinstance(kept, BodyTemplate):  # with the same head, and so the same length of its JSON
        array = kept.array_of(exchange.body) if kept.target is target else None
        if array is not None:
            facts = (endpoint, "", caller)
            return Prediction(exchange, kept.queue, (array,), facts, target.responders, kept.selection, b"")
    json_bytes = exchange.json_bytes
    request = read_request(exchange.buffer, json_bytes)
    made = prepare_request(request, exchange, target, caller, features)
    if repeated is not None and served.joins.get(made.queue.model.version) is None:
        repeated.kept = kept_body(exchange.body, json_bytes, request, target, made.queue, made.selection)
    return made


def prepare_request(
    request: InferRequest,
    exchange: InferenceExchange,
    target: PathTarget,
    caller: str,
    features: FeatureReader,
    *,
    make: Callable[..., Prediction] = Prediction,
    again: Callable[[str], Prediction] | None = None,
) -> Prediction:
    """Check a request, whatever protocol it came by, and decide which version answers it. Raise InvalidInput.

    `again` prepares it for another version; by default as it is.
    """
    served = target.served
    if served is None:
        raise NotFound("unknown endpoint")
    named = named_version(served, target.version, exchange)
    version = named or served.router.only or served.router.choose(sticky_key(served, request, exchange))
    queue = served.queues[version]
    join = served.joins.get(queue.model.version)
    if join is None or has_model_input(request.inputs, queue.model):
        inputs, notes = queue.signature.take(request.inputs, read_values), b""
    else:
        began = time.perf_counter_ns()
        joined = join_rows(request.inputs, join, queue.model.inputs[0], features, served.lookups)
        if exchange.trace is not None:
            exchange.trace.lookup = began, time.perf_counter_ns()
        inputs, notes = [joined.block], _lookup_notes(joined)
    if len(inputs) > 1 and queue.engine.cost.rows > 1:
        _rows_agree(inputs, queue.model)
    responder = target.responders[version]
    selection = responder.encoder.selection(request)
    facts = (served.endpoint.id or served.endpoint.name, request.id, caller)
    made = make(exchange, queue, inputs, facts, target.responders, selection, notes)
    made.is_logged_first = _is_logged_first(request)
    if exchange.trace is not None:
        exchange.trace.version, exchange.trace.prepared = version, time.perf_counter_ns()
    if served.fallback is not None and named is None:
        made.fallback = Fallback(
            served,
            again
            or (
                lambda other: prepare_request(
                    request, exchange, replace(target, version=other), caller, features, make=make
                )
            ),
        )
    if request.parameters:
        made.priority, timeout_s = read_schedule(request)
        made.deadline = None if timeout_s is None else _deadline(exchange.began + timeout_s)
    empty = answer_to_no_rows(queue.model, inputs)
    if empty is not None:
        made.answer(empty)
    return made


def _deadline(at: float) -> float:
    """Return the time of a deadline. Raise DeadlineExceeded if it has passed while the request was parsed."""
    if at <= time.perf_counter():
        raise DeadlineExceeded("the deadline of the request passed before it was queued; it was not run")
    return at


def _is_logged_first(request: InferRequest) -> bool:
    """Tell whether the response is to wait until the prediction is on disk."""
    wanted = (request.parameters or {}).get(WAITS, False)
    if not isinstance(wanted, bool):
        given = shorten(str(wanted))
        raise invalid_request([Fault(where=f"parameter '{WAITS}'", given=given, allowed="true or false")])
    return wanted


def _lookup_notes(joined: JoinedRows) -> bytes:
    """Return the response parameters of a lookup: how old the oldest feature is, and which were missing."""
    age_s = joined.age_s
    found: dict[str, str | int | float] = {} if age_s is None else {"feature_age_s": round(age_s, 3)}
    if joined.gaps:
        found |= {"missing_features": _missing(joined), "missing_rows": joined.missing_rows}
    return encode_parameters(found) if found else b""


def _missing(joined: JoinedRows) -> str:
    """Return the features that were missing as JSON; the protocol allows no nested values."""
    listed = [
        {
            "row": gap.row,
            "view": gap.part.name,
            "key": shorten(gap.key),
            "reason": gap.reason,
            "features": [joined.join.columns[column] for column in gap.columns],
        }
        for gap in joined.gaps
    ]
    return msgspec.json.encode(listed).decode()


def predicted_batch(
    queue: BatchQueue, requests: Sequence[Prediction], inputs: Sequence[Array], outputs: Sequence[Array]
) -> PredictedBatch:
    """Return an answered batch for the prediction sink."""
    endpoints, given, callers = zip(*(queued.request_facts for queued in requests), strict=True)
    return PredictedBatch(
        queue.model,
        datetime.now(UTC),
        endpoints[0],
        [queued.name for queued in requests],
        [len(queued.inputs[0]) if queued.inputs[0].ndim else 1 for queued in requests],
        callers,
        given,
        inputs,
        outputs,
    )


def _rows_agree(inputs: Sequence[Array], model: ServedModel) -> None:
    if len({len(array) for array in inputs}) > 1:
        shapes = ", ".join(
            f"{tensor.name} {list(array.shape)}" for tensor, array in zip(model.inputs, inputs, strict=True)
        )
        raise InvalidInput(
            f"the inputs have different numbers of rows: given {shapes}, allowed the same in all"
        )
