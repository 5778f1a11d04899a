"""Threads in which operations run: a few for short ones, so that they do not fight over the interpreter lock."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")


class WorkerThreads:
    """Runs functions for one event loop in up to `count` threads; results that come together wake it once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._waiting: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = SimpleQueue()
        self._results = Results()

    async def run(self, work: Callable[[], R]) -> R:
        """Return the result of `work`, which runs in a thread."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._serve, name="operations", daemon=True).start()
        self._waiting.put((work, future))
        return await future

    def _serve(self) -> None:
        while True:
            work, future = self._waiting.get()
            try:
                result = work()
            except BaseException as error:
                self._results.deliver(future, None, error)
            else:
                self._results.deliver(future, result, None)
            del work, future  # nothing of a request is kept until the next one


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
