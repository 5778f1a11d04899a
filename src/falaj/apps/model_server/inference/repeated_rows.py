"""Requests of one row that differ from earlier ones in values alone: read, run and answered together once per turn.

A client that sends the same head, and the same JSON around its values, with every request needs none of what an
exchange has. Such requests of one caller to one version are collected until the end of the turn of the event loop.
Then they are admitted by one decision, which counts each of them and takes the bytes of all into the digest of the
audit window; their values are parsed into one array, the model runs, and each gets its response. Whatever is unusual,
from an expired decision to a value that is no number, is left to the dispatcher, request by request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.repeated_heads import RepeatedHead, RepeatedRequest
from falaj.apps.model_server.http.responses import BYTES, JSON, response_head
from falaj.apps.model_server.inference.body_templates import FAULTS, BodyTemplate, rows_reader
from falaj.apps.model_server.inference.paths import PathTarget
from falaj.apps.model_server.inference.row_encoding import ALL, ALL_BINARY, RowEncoder
from falaj.records.serving.tensors import Datatype
from falaj.serving.dependencies import PredictedBatch

Array = npt.NDArray[Any]

MAX_TURN_REQUESTS = 1024
"""Requests of one turn that wait for its end. This, and the size of their bodies, limits what they hold in memory."""
MAX_GROUPS = 1000
DATATYPES = frozenset((Datatype.FP32, Datatype.FP64, Datatype.INT32, Datatype.INT64))


class GroupKey(NamedTuple):
    """What requests have in common that are answered together."""

    path: bytes
    credential: str
    version: str
    is_binary: bool
    is_json: bool
    datatype: Datatype
    shape: tuple[int, ...]


class InferenceDispatcher(Protocol):
    """What the dispatcher does for requests of a group."""

    def known_caller(self, credential: str, target: PathTarget, bodies: Sequence[bytes]) -> str | None:
        """Return the name of the caller, and count its calls, if the decision that allows them is known."""

    def dispatch(self, exchange: HttpExchange) -> None:
        """Answer a request like any other."""

    def infer(self, exchange: HttpExchange, target: PathTarget, caller: str) -> None:
        """Answer a request that was admitted."""


class RepeatedGroup:
    """Requests of one row each that a caller sends to a version, and that differ in their values alone."""

    __slots__ = (
        *("_turn", "began", "credential", "is_stale", "pending", "queue", "read", "responses", "target"),
    )

    def __init__(self, turn: RepeatedRows, key: GroupKey, template: BodyTemplate, rows: RowEncoder) -> None:
        self._turn = turn
        self.target = template.target
        self.queue = template.queue
        self.credential = key.credential
        self.responses = RowResponses(rows, is_binary=key.is_binary)
        self.read = rows_reader(key.datatype, key.shape, is_json=key.is_json)
        self.pending: list[RepeatedRequest] = []
        self.began = 0.0
        self.is_stale = False
        """The deployment has changed."""

    @property
    def has_place(self) -> bool:
        return self._turn.requests < MAX_TURN_REQUESTS and not self.is_stale

    def add(self, request: RepeatedRequest) -> None:
        self._turn.add(self, request)


class RowResponses:
    """Makes HTTP responses with one row: all but the id of the prediction and the values is encoded once."""

    def __init__(self, rows: RowEncoder, *, is_binary: bool) -> None:
        self._rows = rows
        self._is_binary = is_binary
        self._head = response_head(200, BYTES if is_binary else JSON)
        self._named = rows.binary_text(is_named=True) if is_binary else rows.named
        self._nameless = rows.binary_text(is_named=False) if is_binary else rows.nameless

    def values(self, outputs: Sequence[Array]) -> list[bytes] | None:
        """Return the values of each row as they are sent; None if they need more than that."""
        if not self._is_binary:
            return self._rows.texts(outputs)
        (array,) = outputs
        data = array.tobytes()
        size = len(data) // len(array)
        return [data[at : at + size] for at in range(0, len(data), size)]

    def encode(self, ident: str, values: bytes) -> bytes:
        """Return a response, as `HttpResponse.to_bytes` would."""
        name = ident.encode()
        start, middle, end = self._named if name else self._nameless
        text_bytes = len(start) + len(name) + len(middle)
        fields = b"\r\nFalaj-Prediction: %b" % name if name else b""
        if self._is_binary:
            fields = b"%b\r\nInference-Header-Content-Length: %d" % (fields, text_bytes)
        size = text_bytes + len(values) + len(end)
        return b"%b%d%b\r\n\r\n%b%b%b%b%b" % (self._head, size, fields, start, name, middle, values, end)


class RepeatedRows:
    """Collects the requests of a turn by group, and answers them at its end. Used on the event loop."""

    def __init__(
        self, dispatcher: InferenceDispatcher, answered: Callable[[PredictedBatch], None] | None
    ) -> None:
        """`answered` gets every answered batch, for the prediction log."""
        self._dispatcher = dispatcher
        self._answered = answered
        self._loop = asyncio.get_running_loop()
        self._groups: dict[GroupKey, RepeatedGroup] = {}
        self._turn: list[RepeatedGroup] = []
        self.requests = 0

    def update(self) -> None:
        """Forget the groups: the deployment has changed."""
        for group in self._groups.values():
            group.is_stale = True
        self._groups = {}

    def group_of(self, head: RepeatedHead, template: BodyTemplate) -> RepeatedGroup | None:
        """Return the group of requests with this head and body; None if they need more."""
        target, version = template.target, template.queue.model.version
        rows, served = target.responders[version].rows, target.served
        is_binary = template.selection == ALL_BINARY
        if (
            rows is None
            or served is None
            or template.shape[0] != 1
            or len(template.shape) < 2
            or not (is_binary or template.selection == ALL)
            or not {template.datatype, template.queue.model.outputs[0].datatype} <= DATATYPES
            or b"origin" in head.headers
            or any(route.shadow for route in served.endpoint.routes)
        ):
            return None
        facts = (is_binary, template.is_json, template.datatype, template.shape)
        key = GroupKey(head.path, head.credential, version, *facts)
        group = self._groups.get(key)
        if group is None and len(self._groups) < MAX_GROUPS:
            group = self._groups[key] = RepeatedGroup(self, key, template, rows)
        return group

    def add(self, group: RepeatedGroup, request: RepeatedRequest) -> None:
        """Answer a request at the end of the turn."""
        if not self.requests:
            self._loop.call_soon(self._end_turn)
        self.requests += 1
        if not group.pending:
            group.began = time.perf_counter()
            self._turn.append(group)
        group.pending.append(request)

    def _end_turn(self) -> None:
        groups, self._turn, self.requests = self._turn, [], 0
        for group in groups:
            pending, group.pending = group.pending, []
            requests = [request for request in pending if not request.cancelled]
            bodies = [request.body for request in requests]
            target = group.target
            caller = None
            if requests and not group.is_stale and group.queue.is_idle:
                caller = self._dispatcher.known_caller(group.credential, target, bodies)
            if caller is None:
                self._leave(requests, self._dispatcher.dispatch)
                continue
            most = group.queue.engine.cost.rows
            for at in range(0, len(requests), most):
                part = requests[at : at + most]
                if not self._answer(group, part, caller):
                    self._leave(part, partial(self._dispatcher.infer, target=target, caller=caller))

    def _leave(self, requests: Sequence[RepeatedRequest], answer: Callable[[HttpExchange], None]) -> None:
        """Let requests be answered one by one."""
        for request in requests:
            exchange = request.writer.as_exchange(request)
            if exchange is not None:
                answer(exchange)

    def _answer(self, group: RepeatedGroup, requests: Sequence[RepeatedRequest], caller: str) -> bool:
        """Run the model and write the responses; false if each request needs a closer look."""
        queue, responses, size = group.queue, group.responses, len(requests)
        try:
            inputs = [group.read([request.values for request in requests])]
            outputs = queue.run_now(inputs)
        except FAULTS:
            return False
        values = None if outputs is None else responses.values(outputs)
        if outputs is None or values is None or len(values) != size:
            return False
        responder = group.target.responders[queue.model.version]
        next_id, encode = responder.next_id, responses.encode
        idents = [next_id() for _ in requests]
        for request, ident, row in zip(requests, idents, values, strict=True):
            request.writer.answer(request, encode(ident, row))
        responder.metrics.count(200, time.perf_counter() - group.began, rows=size, requests=size)
        if self._answered is not None:
            served = group.target.served
            endpoint = "" if served is None else served.endpoint.id or served.endpoint.name
            facts = (idents, [1] * size, [caller] * size, [""] * size)
            self._answered(PredictedBatch(queue.model, datetime.now(UTC), endpoint, *facts, inputs, outputs))
        return True
