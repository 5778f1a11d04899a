"""Streams the log of a job: from its node while it runs, from its blob afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from falaj.governance.operations.gate import Gate
from falaj.governance.record_stream import CONTROLLER, HEARTBEAT_S
from falaj.records.names import ObjectId
from falaj.records.training.jobs import JobState
from falaj.training import store
from falaj.training.dependencies import BlobSource, ExecutionBackend

CHUNK_BYTES = 1 << 18
POLL_S = 0.1


def attempt_name(job: str, number: int) -> str:
    """Return the launcher's name of an attempt."""
    return f"{job}/{number}"


class LogReader:
    """Reads the log of one job, attempt after attempt. Each read of the database is a transaction of its own."""

    def __init__(self, gate: Gate, backend: ExecutionBackend, blobs: BlobSource, job: ObjectId) -> None:
        self._gate = gate
        self._backend = backend
        self._blobs = blobs
        self._job = job

    def stream(self, *, follow: bool, offset: int) -> Iterator[bytes]:
        """Yield the log of the newest attempt from `offset`; with `follow`, until the job ends.

        Empty pieces serve as heartbeats. ProcessFailed where the controller, which would end the job, keeps failing.
        """
        number, sent_at = self._state()[1], -math.inf  # the first piece comes at once
        while True:
            pieces = self._stored(number, offset) or self._live(number, offset)
            for piece in pieces:
                offset, sent_at = offset + len(piece), time.monotonic()
                yield piece
            state, newest, is_over = self._state(number)
            if is_over and newest > number:
                yield from self._stored(number, offset) or ()
                number, offset = newest, 0
            elif not follow or (is_over and state.ended):
                yield from self._stored(number, offset) or ()
                return
            elif time.monotonic() - sent_at >= HEARTBEAT_S:
                self._gate.require_running(CONTROLLER)
                sent_at = time.monotonic()
                yield b""
            else:
                time.sleep(POLL_S)

    def _state(self, number: int = 0) -> tuple[JobState, int, bool]:
        """Return the job's state, its newest attempt, and whether attempt `number` has ended."""
        with self._gate.database.read() as tx:
            row = store.job_row(tx, self._job)
        return row.state, row.attempt, row.state is not JobState.RUNNING or row.attempt > number

    def _stored(self, number: int, offset: int) -> Iterator[bytes] | None:
        with self._gate.database.read() as tx:
            ident = store.attempt_log(tx, self._job, number)
            blob = None if ident is None else self._blobs.facts(tx, ident)
        if blob is None:
            return None
        return iter(()) if offset >= blob.size_bytes else self._blobs.read(blob, offset=offset)

    def _live(self, number: int, offset: int) -> Iterator[bytes]:
        name = attempt_name(self._job, number)
        while piece := self._backend.log(name, offset=offset, limit=CHUNK_BYTES):
            offset += len(piece)
            yield piece
