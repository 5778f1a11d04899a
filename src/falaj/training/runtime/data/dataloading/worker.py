"""A worker process: reads the requested micro-batches until it is told to end or its trainer is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import MutableSequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from falaj.training.runtime.data.dataloading.messages import pack_message
from falaj.training.runtime.data.dataloading.shared_memory import SharedBlockPool
from falaj.training.runtime.data.errors import unreadable_sample
from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.errors import SampleUnreadable, TrainingError
from falaj.training.runtime.step.allocator import retain_heap
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchIndices, MicroBatchReader

PR_SET_PDEATHSIG = 1
IDLE = -1


class WorkerIdentity(NamedTuple):
    """The number of this worker, the number of workers, and the process id of the trainer."""

    number: int
    workers: int
    trainer: int


class ReadRequest(NamedTuple):
    """The requested micro-batches of `step`, and the released blocks. Many indices are a tensor, few a list."""

    number: int
    step: int
    parts: list[tuple[int, list[int] | Tensor, float]]
    free: list[int]


class ReadResult(NamedTuple):
    """The result of a request; `failure` with its traceback in the worker."""

    number: int
    seconds: float
    parts: list[MicroBatch]
    failure: TrainingError | None = None
    trace: str = ""


WorkerPosition: TypeAlias = MutableSequence[int]
"""The current step and sample of the worker, in shared memory that outlives it."""


def run_worker(
    items: DatasetSource,
    seed: int,
    identity: WorkerIdentity,
    position: WorkerPosition,
    requests: Connection,
    results: Connection,
) -> None:
    """Run the main loop of a worker."""
    configure_process(identity.trainer)
    set_worker_info(items, identity)
    blocks = SharedBlockPool()
    items.note, items.collate = lambda sample: position.__setitem__(1, sample), blocks.stack
    if items.worker_init is not None:
        items.worker_init(identity.number)
    reader, waiting = MicroBatchReader(items, seed=seed, count=1), SimpleQueue[ReadRequest | None]()
    threading.Thread(target=receive_requests, args=(requests, waiting), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        while (request := waiting.get()) is not None:
            position[0] = request.step
            blocks.release(request.free)
            message = encode_result(read(reader, request), blocks)
            # before the result is sent: a later crash is not due to this sample
            position[:] = [IDLE, IDLE]
            results.send_bytes(message)


def receive_requests(requests: Connection, waiting: SimpleQueue[ReadRequest | None]) -> None:
    """Receive requests in a thread, so that the sender never blocks on a slow sample."""
    with contextlib.suppress(EOFError, OSError):
        while (request := requests.recv()) is not None:
            waiting.put(request)
    waiting.put(None)


def read(reader: MicroBatchReader, request: ReadRequest) -> ReadResult:
    began = time.perf_counter()
    try:
        parts = [
            reader.read_one(request.step, MicroBatchIndices(place, torch.as_tensor(indices), share))
            for place, indices, share in request.parts
        ]
    except Exception as error:
        failure = error if isinstance(error, TrainingError) else unexpected_failure(error, request)
        shown = "".join(traceback.format_exception(error))
        return ReadResult(request.number, time.perf_counter() - began, [], failure, shown)
    return ReadResult(request.number, time.perf_counter() - began, parts)


def encode_result(result: ReadResult, blocks: SharedBlockPool) -> bytes:
    """Return the result as bytes, with tensors in shared memory. A batch that cannot be pickled is a failure too."""
    if result.failure is not None:
        blocks.discard()
    try:
        message = pack_message(result, blocks)
    except Exception as error:
        blocks.discard()
        failure = SampleUnreadable(
            f"the batch cannot be sent to the trainer: {type(error).__name__}: {error}"
        )
        message = pack_message(
            ReadResult(result.number, result.seconds, [], failure, traceback.format_exc()), blocks
        )
    blocks.mark_sent()
    return message


def unexpected_failure(error: Exception, request: ReadRequest) -> SampleUnreadable:
    """Return the error of a failure outside of a single sample, such as in collate."""
    failure = unreadable_sample(int(request.parts[0][1][0]), error, among=len(request.parts[0][1]))
    failure.step = request.step
    return failure


def configure_process(trainer: int) -> None:
    """End with the trainer only: a SIGTERM to the group must leave it the batches of its last step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    retain_heap()
    # threads of the trainer's pool do not survive a fork, and would be waited for
    torch.set_num_threads(1)


def set_worker_info(items: DatasetSource, identity: WorkerIdentity) -> None:
    """Set torch's worker info, which a dataset may read."""
    from torch.utils.data._utils import worker

    info = worker.WorkerInfo(id=identity.number, num_workers=identity.workers, seed=0, dataset=items.dataset)  # type: ignore[arg-type]
    worker._worker_info = info
