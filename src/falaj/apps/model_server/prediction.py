"""One inference: from the request's body to arrays, and from the model's outputs to the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy.typing as npt

from falaj.apps.model_server import answers
from falaj.apps.model_server.answers import BYTES, JSON, Answer
from falaj.apps.model_server.exchange import Exchange
from falaj.apps.model_server.joining import has_whole, join_rows
from falaj.apps.model_server.places import Place, Voice
from falaj.apps.model_server.wire import Form, read_request, read_values
from falaj.errors import FalajError, Internal, InvalidInput, NotFound
from falaj.records.serving import ServedModel
from falaj.serving.neighbours import Asked, Features, Predicted
from falaj.serving.runtime.lanes import Lane

Array = npt.NDArray[Any]


class Prediction:
    """A request in the lane of the version that answers it."""

    __slots__ = (*("_exchange", "_form", "_voice", "abandoned", "answer", "asked", "inputs", "lane", "name"),)

    def __init__(
        self,
        exchange: Exchange,
        lane: Lane,
        inputs: Sequence[Array],
        asked: tuple[str, str, str],
        voice: Voice,
        form: Form,
    ) -> None:
        self._exchange = exchange
        self._voice = voice
        self._form = form
        self.name = ""
        self.lane = lane
        self.inputs = inputs
        self.asked = asked
        self.abandoned = exchange.gone
        self.answer: Answer | None = None

    def render(self, outputs: Sequence[Array]) -> None:
        writer, _, name = self._voice
        self.name = called = name()
        body, json_bytes = writer.write(self.asked[1], called, outputs, self._form)
        self.answer = Answer(200, body, JSON if json_bytes is None else BYTES, json_bytes, called)

    def settle(self, error: FalajError | None) -> None:
        if self.abandoned:
            return
        answer = self.answer
        if error is not None or answer is None:
            answer = answers.refusal(error or Internal("a fault of ours: the model gave no answer"))
        first = self.inputs[0]
        rows = len(first) if first.ndim else 1
        self._voice.meter.count(answer.status, time.perf_counter() - self._exchange.began, rows=rows)
        self._exchange.finish(answer)


def prepare(exchange: Exchange, place: Place, caller: str, features: Features) -> Prediction:
    """Read and check a request. InvalidInput says all that is wrong with it."""
    request = read_request(exchange.body, exchange.json_bytes)
    served = place.served
    if served is None:
        raise NotFound("there is no such endpoint")
    lane = served.lane(place.version, request.id)
    join = served.joins.get(lane.model.version)
    if join is None or has_whole(request.inputs, lane.model):
        inputs = lane.signature.take(request.inputs, read_values)
    else:
        inputs = [join_rows(request.inputs, join, lane.model.inputs[0], features)]
    if len(inputs) > 1 and lane.engine.cost.rows > 1:
        _rows_agree(inputs, lane.model)
    voice = place.voices[lane.model.version]
    form = voice.writer.form(request)
    asked = (served.endpoint.id or served.endpoint.name, request.id, caller)
    return Prediction(exchange, lane, inputs, asked, voice, form)


def logged(
    lane: Lane, works: Sequence[Prediction], inputs: Sequence[Array], outputs: Sequence[Array]
) -> Predicted:
    """A batch as the prediction log takes it."""
    asked, at = [], 0
    for work in works:
        end = at + (len(work.inputs[0]) if work.inputs[0].ndim else 1)
        endpoint, request, caller = work.asked
        asked.append(Asked(endpoint, work.name, request, caller, slice(at, end)))
        at = end
    return Predicted(lane.model, datetime.now(UTC), asked, inputs, outputs)


def _rows_agree(inputs: Sequence[Array], model: ServedModel) -> None:
    if len({len(array) for array in inputs}) > 1:
        shapes = ", ".join(
            f"{tensor.name} {list(array.shape)}" for tensor, array in zip(model.inputs, inputs, strict=True)
        )
        raise InvalidInput(
            f"the inputs have different numbers of rows: given {shapes}, allowed the same in all"
        )
