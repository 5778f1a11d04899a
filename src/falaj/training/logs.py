"""The log of a job: live from where it runs, from its blob afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator

from falaj.ports.metadata import Database
from falaj.records.names import ObjectId
from falaj.records.training.jobs import JobState
from falaj.training import store
from falaj.training.dependencies import BlobSource, ExecutionBackend

CHUNK_BYTES = 1 << 18
LOOK_EVERY_S = 0.1
ALIVE_EVERY_S = 2.0


def attempt_name(job: str, number: int) -> str:
    """What the launcher calls an attempt."""
    return f"{job}/{number}"


class LogReader:
    """Reads the log of one job, attempt after attempt. Every look at the database is a transaction of its own."""

    def __init__(
        self, database: Database, backend: ExecutionBackend, blobs: BlobSource, job: ObjectId
    ) -> None:
        self._database = database
        self._backend = backend
        self._blobs = blobs
        self._job = job

    def stream(self, *, follow: bool, offset: int) -> Iterator[bytes]:
        """The log of the newest attempt from `offset` on; with `follow` also what comes, until the job ends.

        An empty piece now and then shows that the stream is alive.
        """
        number, said_at = self._look()[1], time.monotonic()
        while True:
            pieces = self._kept(number, offset) or self._living(number, offset)
            for piece in pieces:
                offset, said_at = offset + len(piece), time.monotonic()
                yield piece
            state, newest, is_over = self._look(number)
            if is_over and newest > number:
                yield from self._kept(number, offset) or ()
                number, offset = newest, 0
            elif not follow or (is_over and state.ended):
                yield from self._kept(number, offset) or ()
                return
            elif time.monotonic() - said_at >= ALIVE_EVERY_S:
                said_at = time.monotonic()
                yield b""
            else:
                time.sleep(LOOK_EVERY_S)

    def _look(self, number: int = 0) -> tuple[JobState, int, bool]:
        """The job's state, its newest attempt, and whether attempt `number` is over."""
        with self._database.read() as tx:
            row = store.job_row(tx, self._job)
        state = JobState(row["state"])
        return state, row["attempt"], state is not JobState.RUNNING or row["attempt"] > number

    def _kept(self, number: int, offset: int) -> Iterator[bytes] | None:
        with self._database.read() as tx:
            ident = store.attempt_log(tx, self._job, number)
            blob = None if ident is None else self._blobs.facts(tx, ident)
        if blob is None:
            return None
        return iter(()) if offset >= blob.size_bytes else self._blobs.read(blob, offset=offset)

    def _living(self, number: int, offset: int) -> Iterator[bytes]:
        name = attempt_name(self._job, number)
        while piece := self._backend.log(name, offset=offset, limit=CHUNK_BYTES):
            offset += len(piece)
            yield piece
