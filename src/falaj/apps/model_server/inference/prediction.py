"""One inference: parse the body into arrays, and encode the model's outputs as the response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy.typing as npt

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import BYTES, JSON, HttpResponse
from falaj.apps.model_server.inference.body_templates import BodyTemplate, kept_body
from falaj.apps.model_server.inference.feature_lookup import JoinedRows, has_model_input, join_rows
from falaj.apps.model_server.inference.paths import PathTarget, VersionResponder
from falaj.apps.model_server.inference.protocol import (
    InferRequest,
    OutputSelection,
    encode_parameters,
    read_request,
    read_values,
)
from falaj.apps.model_server.inference.row_encoding import ALL
from falaj.errors import FalajError, Internal, InvalidInput, NotFound, shorten
from falaj.records.serving import ServedModel
from falaj.serving.dependencies import FeatureReader, PredictedBatch, PredictedRequest
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.runtime.batch_queue import BatchQueue, RowSlice

Array = npt.NDArray[Any]


class Prediction:
    """A request in the batch queue of its version."""

    __slots__ = (
        *(
            "_exchange",
            "_selection",
            "_responder",
            "caller",
            "cancelled",
            "deadline",
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
        exchange: HttpExchange,
        queue: BatchQueue,
        inputs: Sequence[Array],
        request_facts: tuple[str, str, str],
        responder: VersionResponder,
        selection: OutputSelection,
        notes: bytes,
    ) -> None:
        self._exchange = exchange
        self._responder = responder
        self._selection = selection
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

    def render(self, outputs: Sequence[Array]) -> None:
        responder = self._responder
        self.name = ident = responder.next_id()
        if self._is_plain and isinstance(outputs, RowSlice) and outputs.end - outputs.start == 1:
            texts = _row_texts(outputs, responder)
            if texts is not None and responder.rows is not None:
                body = responder.rows.body(ident, texts[outputs.start])
                self.response = HttpResponse(200, body, JSON, None, ident)
                return
        body, json_bytes = responder.encoder.encode(
            self.request_facts[1], ident, outputs, self._selection, notes=self.notes
        )
        self.response = HttpResponse(200, body, JSON if json_bytes is None else BYTES, json_bytes, ident)

    @property
    def _is_plain(self) -> bool:
        """Tell whether the response has nothing of its own but its id and numbers."""
        return self._selection == ALL and not self.notes and not self.request_facts[1]

    def complete(self, error: FalajError | None) -> None:
        if self.cancelled:
            return
        response = self.response
        if error is not None or response is None:
            response = responses.error_response(
                error or Internal("internal error: the model returned no outputs")
            )
        first = self.inputs[0]
        rows = len(first) if first.ndim else 1
        self._responder.metrics.count(response.status, time.perf_counter() - self._exchange.began, rows=rows)
        self._exchange.finish(response)


def _row_texts(outputs: RowSlice, responder: VersionResponder) -> list[bytes] | None:
    """Return the numbers of all rows of the batch as text, made by the first request that needs them."""
    if responder.rows is None:
        return None
    shared = outputs.shared
    if responder.rows not in shared:
        shared[responder.rows] = responder.rows.texts(outputs.arrays)
    found: list[bytes] | None = shared[responder.rows]
    return found


def prepare(exchange: HttpExchange, target: PathTarget, caller: str, features: FeatureReader) -> Prediction:
    """Parse and check a request. Raise InvalidInput with all faults."""
    served = target.served
    if served is None:
        raise NotFound("unknown endpoint")
    endpoint = served.endpoint.id or served.endpoint.name
    repeated, body, json_bytes = exchange.repeated, exchange.body, exchange.json_bytes
    if repeated is not None and repeated.bodies:
        kept: BodyTemplate = repeated.bodies[0]
        array = kept.array_of(body, json_bytes) if kept.target is target else None
        if array is not None:
            facts = (endpoint, "", caller)
            return Prediction(exchange, kept.queue, (array,), facts, kept.responder, kept.selection, b"")
    request = read_request(body, json_bytes)
    queue, inputs, notes = take_inputs(request, served, target.version, features)
    responder = target.responders[queue.model.version]
    selection = responder.encoder.selection(request)
    if repeated is not None and queue.model.version not in served.joins:
        found = kept_body(body, json_bytes, request, target, queue, responder, selection)
        repeated.bodies[:] = [] if found is None else [found]
    return Prediction(exchange, queue, inputs, (endpoint, request.id, caller), responder, selection, notes)


def take_inputs(
    request: InferRequest, served: ServedEndpoint, version: str | None, features: FeatureReader
) -> tuple[BatchQueue, Sequence[Array], bytes]:
    """Return the queue of a request, the model's inputs, and parameters of the response. Raise InvalidInput."""
    queue = served.queue(version, request.id)
    join = served.joins.get(queue.model.version)
    if join is None or has_model_input(request.inputs, queue.model):
        inputs, notes = queue.signature.take(request.inputs, read_values), b""
    else:
        joined = join_rows(request.inputs, join, queue.model.inputs[0], features)
        inputs, notes = [joined.block], _missing(joined) if joined.gaps else b""
    if len(inputs) > 1 and queue.engine.cost.rows > 1:
        _rows_agree(inputs, queue.model)
    return queue, inputs, notes


def _missing(joined: JoinedRows) -> bytes:
    """Return the response parameters that tell which features were missing; the protocol allows no nested values."""
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
    words = msgspec.json.encode(listed).decode()
    return encode_parameters({"missing_features": words, "missing_rows": joined.missing_rows})


def predicted_batch(
    queue: BatchQueue, requests: Sequence[Prediction], inputs: Sequence[Array], outputs: Sequence[Array]
) -> PredictedBatch:
    """Return an answered batch for the prediction sink."""
    answered, at = [], 0
    for queued in requests:
        end = at + (len(queued.inputs[0]) if queued.inputs[0].ndim else 1)
        endpoint, request, caller = queued.request_facts
        answered.append(PredictedRequest(endpoint, queued.name, request, caller, slice(at, end)))
        at = end
    return PredictedBatch(queue.model, datetime.now(UTC), answered, inputs, outputs)


def _rows_agree(inputs: Sequence[Array], model: ServedModel) -> None:
    if len({len(array) for array in inputs}) > 1:
        shapes = ", ".join(
            f"{tensor.name} {list(array.shape)}" for tensor, array in zip(model.inputs, inputs, strict=True)
        )
        raise InvalidInput(
            f"the inputs have different numbers of rows: given {shapes}, allowed the same in all"
        )
