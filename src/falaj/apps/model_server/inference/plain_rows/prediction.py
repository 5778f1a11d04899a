"""Predictions for plain rows: by the V1 protocol, and as JSON records, CSV or Arrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt

from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import JSON, HttpResponse
from falaj.apps.model_server.inference.paths import PathKind, PathTarget
from falaj.apps.model_server.inference.plain_rows import formats
from falaj.apps.model_server.inference.plain_rows.formats import ReadArrow, RowFormat
from falaj.apps.model_server.inference.plain_rows.rows import Rows, RowSchema, build_request
from falaj.apps.model_server.inference.prediction import Prediction, prepare_request
from falaj.apps.model_server.inference.protocol import require_small_json
from falaj.errors import NotFound, Unavailable
from falaj.serving.dependencies import FeatureReader
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.runtime.batch_queue import BatchQueue

Array = npt.NDArray[Any]
Write = Callable[["RowPrediction", Mapping[str, Array], str], bytes]
"""Encodes the outputs of a prediction, given its id."""


class RowPrediction(Prediction):
    """A request of plain rows; its response has a row for each of them."""

    __slots__ = ("_kind", "_rows", "_write")

    def __init__(self, kind: str, write: Write, rows: int, *facts: Any) -> None:
        super().__init__(*facts)
        self._kind = kind
        self._write = write
        self._rows = rows

    def for_version(self, queue: BatchQueue) -> Prediction:
        facts = (self.request_facts, self._responders, self.selection, self.notes)
        made = RowPrediction(self._kind, self._write, self._rows, self.exchange, queue, self.inputs, *facts)
        made.priority, made.deadline = self.priority, self.deadline
        return made

    def render(self, outputs: Sequence[Array]) -> None:
        self.name = self._responder.next_id()
        self._encode(outputs, self.name)

    def answer(self, outputs: Sequence[Array]) -> None:
        self._encode(outputs, "")

    def _encode(self, outputs: Sequence[Array], ident: str) -> None:
        model = self.queue.model
        named = {tensor.name: array for tensor, array in zip(model.outputs, outputs, strict=True)}
        formats.require_row_outputs(named, self._rows)
        for array in named.values():
            require_small_json(array)
        self.response = HttpResponse(200, self._write(self, named, ident), self._kind, prediction=ident)


def prepare_rows(
    exchange: HttpExchange,
    target: PathTarget,
    caller: str,
    features: FeatureReader,
    read_arrow: ReadArrow | None,
) -> Prediction:
    """Parse and check a request of plain rows. Raise InvalidInput with all faults."""
    served = target.served
    if served is None:
        raise NotFound("unknown endpoint")
    kind: str
    write: Write
    if target.kind is PathKind.V1_PREDICT:
        rows, ident = formats.read_json(exchange.body, key="instances")
        kind, write = JSON, _write_v1
    else:
        given, has_header = formats.format_of(exchange.header(b"content-type"))
        wanted = formats.accepted_format(exchange.header(b"accept"), given)
        rows, ident = _read(exchange.body, given, caller, read_arrow, has_header=has_header)
        kind, write = wanted.value, _WRITERS[wanted]
    request = build_request(rows, _schema(served, target.version), request=ident)
    make = partial(RowPrediction, kind, write, rows.count)

    def again(other: str) -> Prediction:
        return prepare_rows(exchange, replace(target, version=other), caller, features, read_arrow)

    return prepare_request(request, exchange, target, caller, features, make=make, again=again)


def _read(
    body: bytes, given: RowFormat, caller: str, read_arrow: ReadArrow | None, *, has_header: bool
) -> tuple[Rows, str]:
    if given is RowFormat.JSON:
        return formats.read_json(body, key="records")
    if given is RowFormat.CSV:
        return formats.read_csv(body, has_header=has_header), ""
    if read_arrow is None:
        raise Unavailable("this server has no process that parses Arrow; send JSON or CSV")
    return formats.read_arrow(read_arrow(body, caller)), ""


def _schema(served: ServedEndpoint, version: str | None) -> RowSchema:
    model = served.representative(version).model
    return RowSchema(model, served.joins.get(model.version), served.features.get(model.version, ()))


def _write_v1(prediction: RowPrediction, outputs: Mapping[str, Array], ident: str) -> bytes:
    return formats.write_v1(outputs)


def _write_json(prediction: RowPrediction, outputs: Mapping[str, Array], ident: str) -> bytes:
    facts = {"model_name": prediction.queue.model.name, "model_version": prediction.queue.model.version}
    own = prediction.request_facts[1]
    named = {"id": own, "prediction": ident} if own and ident else {"id": own or ident}
    return formats.write_json(outputs, facts=facts | named, notes=prediction.notes)


_WRITERS: dict[RowFormat, Write] = {
    RowFormat.JSON: _write_json,
    RowFormat.CSV: lambda prediction, outputs, ident: formats.write_csv(outputs),
    RowFormat.ARROW: lambda prediction, outputs, ident: formats.write_arrow(outputs),
}
