"""Operations run in a few threads: each once, no more at a time than there are, one after another in the same one."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from falaj.apps.api.worker_threads import WorkerThreads
from polling import PATIENCE_S, eventually_async


def test_all_are_performed_once_and_no_more_at_a_time_than_threads() -> None:
    running, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(3, timeout=PATIENCE_S)

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return number

    async def many() -> list[int]:
        threads = WorkerThreads(3)
        return await asyncio.gather(*(threads.run(partial(work, number)) for number in range(300)))

    assert asyncio.run(many()) == list(range(300))
    assert most == 3


def test_one_after_another_is_done_by_the_same_thread() -> None:
    async def several() -> set[int]:
        threads = WorkerThreads(4)
        together = threading.Barrier(4, timeout=PATIENCE_S)
        await asyncio.gather(*(threads.run(together.wait) for _ in range(4)))
        found = set()
        for _ in range(20):
            await eventually_async(lambda: len(threads._idle) == threads._started)
            found.add(await threads.run(threading.get_ident))
        return found

    assert len(asyncio.run(several())) == 1


def test_what_fails_raises_in_its_caller_alone() -> None:
    async def both() -> str:
        threads = WorkerThreads(1)
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        return await threads.run(lambda: "goes on")

    assert asyncio.run(both()) == "goes on"


def test_nothing_of_a_request_is_kept_by_an_idle_thread() -> None:
    class Body:
        pass

    async def once() -> weakref.ref[Body]:
        threads, body = WorkerThreads(1), Body()
        kept = weakref.ref(body)
        await threads.run(partial(id, body))
        del body
        await eventually_async(lambda: threads._idle)
        gc.collect()
        return kept

    assert asyncio.run(once())() is None
