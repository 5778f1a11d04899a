"""One inference: parse the body into arrays, and encode the model's outputs as the response."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy.typing as npt

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import BYTES, JSON, HttpResponse
from falaj.apps.model_server.inference.feature_lookup import JoinedRows, has_model_input, join_rows
from falaj.apps.model_server.inference.paths import PathTarget, VersionResponder
from falaj.apps.model_server.inference.protocol import (
    OutputSelection,
    encode_parameters,
    read_request,
    read_values,
)
from falaj.apps.model_server.inference.traffic import Fallback, named_version, sticky_key
from falaj.errors import FalajError, Internal, InvalidInput, NotFound, shorten
from falaj.records.serving import ServedModel
from falaj.serving.dependencies import FeatureReader, PredictedBatch, PredictedRequest
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.metering import last_run_ns

Array = npt.NDArray[Any]


class Prediction:
    """A request in the batch queue of its version."""

    __slots__ = (
        *(
            "exchange",
            "_selection",
            "_responders",
            "cancelled",
            "fallback",
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
        responders: Mapping[str, VersionResponder],
        selection: OutputSelection,
        notes: bytes,
    ) -> None:
        self.exchange = exchange
        self._responders = responders
        self._selection = selection
        self.fallback: Fallback | None = None
        self.name = ""
        self.queue = queue
        self.inputs = inputs
        self.notes = notes
        self.request_facts = request_facts
        self.cancelled = exchange.cancelled
        self.response: HttpResponse | None = None

    def for_version(self, queue: BatchQueue) -> Prediction:
        """Return the same request for a version with the same inputs and outputs."""
        facts, selection = self.request_facts, self._selection
        return Prediction(self.exchange, queue, self.inputs, facts, self._responders, selection, self.notes)

    def render(self, outputs: Sequence[Array]) -> None:
        if self.exchange.trace is not None:
            self.exchange.trace.run = last_run_ns()
            self.exchange.trace.version = self.queue.model.version
        encoder, _, next_id = self._responders[self.queue.model.version]
        self.name = ident = next_id()
        body, json_bytes = encoder.encode(
            self.request_facts[1], ident, outputs, self._selection, notes=self.notes
        )
        self.response = HttpResponse(200, body, JSON if json_bytes is None else BYTES, json_bytes, ident)

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
        metrics = self._responders[self.queue.model.version].metrics
        metrics.count(response.status, time.perf_counter() - self.exchange.began, rows=rows)
        if error is not None and self.fallback is not None and self.fallback.takes(self, error):
            metrics.fallbacks[error.code] += 1
            return
        self.exchange.finish(response)


def prepare(exchange: HttpExchange, target: PathTarget, caller: str, features: FeatureReader) -> Prediction:
    """Parse and check a request. Raise InvalidInput with all faults."""
    request = read_request(exchange.body, exchange.json_bytes)
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
    selection = target.responders[version].encoder.selection(request)
    request_facts = (served.endpoint.id or served.endpoint.name, request.id, caller)
    made = Prediction(exchange, queue, inputs, request_facts, target.responders, selection, notes)
    if exchange.trace is not None:
        exchange.trace.version, exchange.trace.prepared = version, time.perf_counter_ns()
    if served.fallback is not None and named is None:
        made.fallback = Fallback(
            served, lambda other: prepare(exchange, replace(target, version=other), caller, features)
        )
    return made


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
