"""Threads in which operations run: a few for short ones, so that they do not fight over the interpreter lock."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
Task = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class WorkerThreads:
    """Runs functions for one event loop in up to `count` threads; results that come together wake it once.

    The thread that was busy last gets the next function, as its caches are warm; no other one is woken.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._waiting: deque[Task] = deque()
        self._results = Results()

    async def run(self, work: Callable[[], R]) -> R:
        """Return the result of `work`, which runs in a thread."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._hand_over((work, future))
        return await future

    def _hand_over(self, task: Task) -> None:
        with self._lock:
            if self._idle:
                worker = self._idle.pop()
            elif self._started < self._count:
                worker = _Worker()
                threading.Thread(target=self._serve, args=[worker], name="operations", daemon=True).start()
                self._started += 1
            else:
                self._waiting.append(task)
                return
        worker.task = task
        worker.is_called.release()

    def _serve(self, worker: _Worker) -> None:
        while True:
            worker.is_called.acquire()
            task, worker.task = worker.task, None
            while task is not None:
                self._perform(*task)
                task = None  # nothing of a request is kept until the next one
                with self._lock:
                    if self._waiting:
                        task = self._waiting.popleft()
                    else:
                        self._idle.append(worker)

    def _perform(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = work()
        except BaseException as error:
            self._results.deliver(future, None, error)
        else:
            self._results.deliver(future, result, None)


class _Worker:
    """A thread, and the task that it is called for."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.is_called = threading.Lock()
        """Released when there is a task."""
        self.is_called.acquire()


class Results:
    """Results of threads on their way to futures of an event loop, which is woken once for all that are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False

    def deliver(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Complete `future` from a thread."""
        with self._lock:
            self._ready.append((future, result, error))
            if self._woken:
                return
            self._woken = True
        try:
            future.get_loop().call_soon_threadsafe(self._complete)
        except RuntimeError:  # the server has stopped
            self._woken = False

    def _complete(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, deque()
            self._woken = False
        for future, result, error in ready:
            if future.done():  # nobody waits any more
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
