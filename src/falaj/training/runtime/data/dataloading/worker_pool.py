"""Worker processes that read ahead of the step that is computed."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import cast

import torch.multiprocessing as processes
from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.messages import MessageReceiver
from falaj.training.runtime.data.dataloading.start_method import StartMethod, start_process
from falaj.training.runtime.data.dataloading.worker import (
    IDLE,
    ReadRequest,
    ReadResult,
    WorkerIdentity,
    run_worker,
)
from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.errors import TrainingFault, WorkerLost
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchReader

MAX_LISTED_INDICES = 1024
"""More indices than this are sent in shared memory."""
SHUTDOWN_TIMEOUT_S = 1.0
"""Seconds that a worker may take to end before it is killed; it has nothing to save."""


class WorkerTraceback(Exception):
    """The traceback of a failure in a worker, as text."""


class WorkerHandle:
    """The trainer's side of one worker process."""

    def __init__(
        self, items: DatasetSource, seed: int, identity: WorkerIdentity, start_method: StartMethod
    ) -> None:
        context = processes.get_context(start_method.method)
        theirs, self.requests = context.Pipe(duplex=False)
        self.results, their_results = context.Pipe(duplex=False)
        self.position = context.RawArray("q", [IDLE, IDLE])
        self.receiver = MessageReceiver()
        given = (items, seed, identity, self.position, theirs, their_results)
        self.process = context.Process(
            target=run_worker, args=given, daemon=True, name=f"falaj-data-worker-{identity.number}"
        )
        start_process(self.process, start_method)
        theirs.close()
        their_results.close()

    def result(self, step: int) -> ReadResult:
        """Wait for the next result; raise WorkerLost if the worker died. `step` is the awaited step."""
        if not self.results.poll():
            wait([self.results, self.process.sentinel])
        try:
            if not self.results.poll():
                raise EOFError
            return cast(ReadResult, self.receiver.decode(self.results.recv_bytes()))
        except (EOFError, OSError) as end:  # also where its shared memory is gone
            self.process.join(SHUTDOWN_TIMEOUT_S)
            raise self.lost(step) from end

    def lost(self, waited_for: int) -> WorkerLost:
        code = self.process.exitcode or 0
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        step, sample = self.position
        where = f"before step {waited_for}" if sample == IDLE else f"at sample {sample} of step {step}"
        fault = TrainingFault(
            "workers", self.process.name, fix=FIXES.get(-code, "use workers=0 to see the error")
        )
        return WorkerLost(f"a data worker {how} {where}", faults=[fault])


FIXES: dict[int, str] = {
    signal.SIGKILL: "if memory ran out: fewer workers, a smaller prefetch, or a smaller batch_size",
    signal.SIGBUS: "shared memory (/dev/shm) may be full: fewer workers, a smaller prefetch, or more of it",
}


class WorkerPoolLoader:
    """A loader with `count` processes that read whole steps in turn, each `prefetch` steps ahead."""

    def __init__(
        self,
        reader: MicroBatchReader,
        items: DatasetSource,
        batches: BatchPlan,
        *,
        last: int,
        count: int,
        prefetch: int,
        start_method: StartMethod,
    ) -> None:
        self._reader, self._batches, self._last = reader, batches, last
        self._ahead = count * prefetch
        self._pending: deque[tuple[ReadRequest, WorkerHandle]] = deque()
        self._number = self._cut = 0
        self.waited_s = self.reading_s = 0.0
        self._workers: list[WorkerHandle] = []
        self._at_exit = util.Finalize(self, _end, args=(self._workers,), exitpriority=100)
        for number in range(count):
            self._workers.append(
                WorkerHandle(items, reader.seed, WorkerIdentity(number, count, os.getpid()), start_method)
            )

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        began = time.perf_counter()
        if not self._pending or self._pending[0][0].step != step or self._cut != self._reader.count:
            self._pending.clear()  # results of these requests are ignored
            self._cut = self._reader.count
            self._request(step, indices)
        self._request_ahead(step)
        result = self._next_result()
        self.waited_s += time.perf_counter() - began
        self.reading_s += result.seconds
        return result.parts

    def prefetch_next(self, step: int) -> None:
        return

    def close(self) -> None:
        self._at_exit()

    def _next_result(self) -> ReadResult:
        request, worker = self._pending.popleft()
        while (result := worker.result(request.step)).number != request.number:
            pass
        if result.failure is not None:
            raise result.failure from WorkerTraceback(f"\n\n{result.trace}")
        return result

    def _request_ahead(self, step: int) -> None:
        following = step + len(self._pending)  # the first is `step` itself
        for after in range(following, min(step + self._ahead, self._last) + 1):
            self._request(after, self._batches.indices(after))

    def _request(self, step: int, indices: Tensor) -> None:
        self._number += 1
        worker = self._workers[self._number % len(self._workers)]
        request = ReadRequest(
            self._number, step, list(_listed(self._reader, indices)), worker.receiver.take_released()
        )
        with suppress(BrokenPipeError):  # it has died, which is noticed when its result is awaited
            worker.requests.send(request)
        self._pending.append((request, worker))


def _listed(reader: MicroBatchReader, indices: Tensor) -> Iterator[tuple[int, list[int] | Tensor, float]]:
    for place, wanted, share in reader.split(indices):
        yield place, (wanted.tolist() if len(wanted) <= MAX_LISTED_INDICES else wanted.clone()), share


def _end(workers: list[WorkerHandle]) -> None:
    """Ask all workers to end, and kill those that do not."""
    for worker in workers:
        with suppress(OSError):
            worker.requests.send(None)
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        _close(worker.requests)
        _close(worker.results)
    workers.clear()


def _close(connection: Connection) -> None:
    with suppress(OSError):
        connection.close()
