"""Builds HTTP responses from the results of operations."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
from starlette.responses import Response, StreamingResponse

from falaj.apps.api.caller_limits import CallerLimits
from falaj.apps.api.errors import problem_details
from falaj.errors import FalajError
from falaj.governance.operations.operation import Operation, ResponseShape

STREAMS, STREAMS_OF_CALLER = 256, 64
"""Concurrent streams, in all and of one caller; each may occupy a thread of their own pool while it waits."""

BATCH_BYTES = 32 * 1024
BATCH_S = 0.05


class ResponseBuilder:
    """Builds responses, and streams those that are streams."""

    def __init__(self) -> None:
        self._limiter: anyio.CapacityLimiter | None = None
        self._callers = CallerLimits(STREAMS_OF_CALLER)

    def build(self, operation: Operation, result: Any, *, caller: str) -> Response:
        """Return the response to a request. Called in a worker thread: the first chunk of a stream is fetched here, so
        that an error at its start is a problem with a status, not a broken stream."""
        if operation.shape is ResponseShape.RECORD:
            return Response(operation.output.dump_json(result), media_type=ResponseShape.RECORD.value)
        pieces = PIECES[operation.shape](operation, result)
        first = list(itertools.islice(pieces, 1))
        stream = self._pulled(itertools.chain(first, pieces), caller)
        return StreamingResponse(stream, media_type=operation.shape.value)

    async def _pulled(self, pieces: Iterator[bytes], caller: str) -> AsyncIterator[bytes]:
        """Yield the pieces, each made in a thread of the streams' pool."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(STREAMS)
        while True:
            async with self._callers.slot(caller):
                piece = await anyio.to_thread.run_sync(next, pieces, None, limiter=self._limiter)
            if piece is None:
                return
            yield piece


def _records(operation: Operation, result: Iterator[Any]) -> Iterator[bytes]:
    """Yield one JSON document per line, the first at once, later ones in batches; after an error the last line is the
    problem document."""
    lines, sent_at = bytearray(), 0.0
    try:
        for record in result:
            lines += operation.output.dump_json(record) + b"\n"
            if len(lines) >= BATCH_BYTES or time.monotonic() - sent_at >= BATCH_S:
                yield bytes(lines)
                lines, sent_at = bytearray(), time.monotonic()
    except FalajError as error:
        if not sent_at:
            raise
        lines += json.dumps({"problem": problem_details(error)}, default=str).encode() + b"\n"
    if lines:
        yield bytes(lines)


def _bytes(_operation: Operation, result: Iterator[bytes]) -> Iterator[bytes]:
    return iter(result)


def _arrow(_operation: Operation, result: Any) -> Iterator[bytes]:
    import pyarrow as pa

    sink = _Pieces()
    with pa.ipc.new_stream(sink, result.schema) as writer:
        yield sink.take()
        for batch in result:
            writer.write_batch(batch)
            yield sink.take()
    yield sink.take()


PIECES: dict[ResponseShape, Callable[[Operation, Any], Iterator[bytes]]] = {
    ResponseShape.RECORDS: _records,
    ResponseShape.BYTES: _bytes,
    ResponseShape.ARROW: _arrow,
}


class _Pieces:
    """A file to write to; `take` removes and returns what was written."""

    closed = False

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: Any) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken, self._written = bytes(self._written), bytearray()
        return taken

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
