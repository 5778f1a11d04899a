"""From an operation's result to an HTTP answer."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from falaj.apps.api.problems import problem
from falaj.errors import FalajError, Internal
from falaj.governance.operations import Operation, Shape

log = logging.getLogger("falaj.api")


def answer(operation: Operation, result: Any) -> Response:
    """The answer to a request. Called in a worker thread: the first part of a stream is fetched here, so that
    what goes wrong at its beginning is a problem with a status, not a broken stream."""
    if operation.shape is Shape.RECORD:
        return Response(operation.output.dump_json(result), media_type=Shape.RECORD.value)
    pieces = PIECES[operation.shape](operation, result)
    first = list(itertools.islice(pieces, 1))
    stream = itertools.chain(first, pieces)
    return StreamingResponse(iterate_in_threadpool(stream), media_type=operation.shape.value)


def _records(operation: Operation, result: Iterator[Any]) -> Iterator[bytes]:
    """One JSON per line; if it breaks, the last line is the problem."""
    sent = False
    try:
        for record in result:
            yield operation.output.dump_json(record) + b"\n"
            sent = True
    except FalajError as error:
        if not sent:
            raise
        yield json.dumps({"problem": problem(error)}, default=str).encode() + b"\n"
    except Exception:
        if not sent:
            raise
        log.exception("a stream broke", extra={"action": operation.name})
        yield (
            json.dumps({"problem": problem(Internal("the stream broke; the log says why"))}).encode() + b"\n"
        )


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


PIECES: dict[Shape, Callable[[Operation, Any], Iterator[bytes]]] = {
    Shape.RECORDS: _records,
    Shape.BYTES: _bytes,
    Shape.ARROW: _arrow,
}


class _Pieces:
    """A file to write to, from which what was written is taken away."""

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
