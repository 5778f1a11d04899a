"""A worker process: reads the micro-batches that it is asked for, until it is told to end or its trainer is gone."""

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

from falaj.training.runtime.data import Items
from falaj.training.runtime.data_faults import unreadable
from falaj.training.runtime.errors import TrainingError, Unreadable
from falaj.training.runtime.feeding.blocks import Blocks
from falaj.training.runtime.feeding.parcels import packed
from falaj.training.runtime.kept_memory import keep_freed_memory
from falaj.training.runtime.micro_batches import Cut, MicroBatch, Reader

PR_SET_PDEATHSIG = 1
IDLE = -1


class Post(NamedTuple):
    """Which one of how many workers this is, and the process that they work for."""

    number: int
    workers: int
    trainer: int


class Order(NamedTuple):
    """The micro-batches of `step` that are wanted, and the blocks that are free again.

    Indices are a list, or a tensor where there are many.
    """

    number: int
    step: int
    parts: list[tuple[int, list[int] | Tensor, float]]
    free: list[int]


class Answer(NamedTuple):
    """What came of an order; `failure` with its traceback, as the worker saw it."""

    number: int
    seconds: float
    parts: list[MicroBatch]
    failure: TrainingError | None = None
    trace: str = ""


Cell: TypeAlias = MutableSequence[int]
"""The step and the sample that the worker is at, which outlive it."""


def work(items: Items, seed: int, post: Post, cell: Cell, orders: Connection, answers: Connection) -> None:
    """All that a worker does."""
    settle_in(post.trainer)
    set_worker_info(items, post)
    blocks = Blocks()
    items.note, items.collate = lambda sample: cell.__setitem__(1, sample), blocks.stack
    reader, waiting = Reader(items, seed=seed, count=1), SimpleQueue[Order | None]()
    threading.Thread(target=listen, args=(orders, waiting), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        while (order := waiting.get()) is not None:
            cell[0] = order.step
            blocks.returned(order.free)
            parcel = parcel_of(read(reader, order), blocks)
            # before anybody has the answer: what comes then is not this sample's fault
            cell[:] = [IDLE, IDLE]
            answers.send_bytes(parcel)


def listen(orders: Connection, waiting: SimpleQueue[Order | None]) -> None:
    """Take orders as they come: whoever sends them is never kept waiting, however long a sample takes."""
    with contextlib.suppress(EOFError, OSError):
        while (order := orders.recv()) is not None:
            waiting.put(order)
    waiting.put(None)


def read(reader: Reader, order: Order) -> Answer:
    began = time.perf_counter()
    try:
        parts = [
            reader.part(order.step, Cut(place, torch.as_tensor(indices), share))
            for place, indices, share in order.parts
        ]
    except Exception as error:
        failure = error if isinstance(error, TrainingError) else unforeseen(error, order)
        shown = "".join(traceback.format_exception(error))
        return Answer(order.number, time.perf_counter() - began, [], failure, shown)
    return Answer(order.number, time.perf_counter() - began, parts)


def parcel_of(answer: Answer, blocks: Blocks) -> bytes:
    """`answer` as bytes; its tensors lie in shared memory. What cannot travel is a failure too."""
    if answer.failure is not None:
        blocks.dropped()
    try:
        parcel = packed(answer, blocks)
    except Exception as error:
        blocks.dropped()
        failure = Unreadable(f"the batch cannot be handed over: {type(error).__name__}: {error}")
        parcel = packed(Answer(answer.number, answer.seconds, [], failure, traceback.format_exc()), blocks)
    blocks.sent()
    return parcel


def unforeseen(error: Exception, order: Order) -> Unreadable:
    """What went wrong around a sample, when a batch was made of it."""
    failure = unreadable(int(order.parts[0][1][0]), error, among=len(order.parts[0][1]))
    failure.step = order.step
    return failure


def settle_in(trainer: int) -> None:
    """End with the trainer, and only with it: a SIGTERM to all leaves it the batches for its last step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    # after a fork the threads of the trainer's pool are not here, and would be waited for
    torch.set_num_threads(1)


def set_worker_info(items: Items, post: Post) -> None:
    """As in torch's own loader: a dataset may ask where it is."""
    from torch.utils.data._utils import worker

    info = worker.WorkerInfo(id=post.number, num_workers=post.workers, seed=0, dataset=items.dataset)  # type: ignore[arg-type]
    worker._worker_info = info
