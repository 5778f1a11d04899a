"""Decisions about callers: made in threads, limited in number, and independent of the protocol of a request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from falaj.errors import FalajError, Unavailable
from falaj.serving.dependencies import Admission

ADMISSION_THREADS = 4
MAX_ATTEMPTS = 3
"""Attempts at a decision that expires before it can be used."""
MAX_PENDING_DECISIONS = 64
MAX_PENDING_OF_SOURCE = 16
"""Pending decisions, and tokens of one address that are being checked; more indicate a client that guesses tokens."""

Done = Callable[[str, FalajError | None], None]
"""Called on the event loop with the caller, or with an error."""

_log = logging.getLogger(__name__)


class DecisionQueue:
    """Authenticates and admits callers. Called on the event loop only."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._pending = 0
        self._sources: Counter[str] = Counter()
        self._checking: dict[str, list[Done]] = {}
        """Who waits for the check of a credential: it is checked once, however many connections present it."""
        self._deciding: dict[tuple[str, str | None], list[tuple[Callable[[], None], Done]]] = {}
        """Likewise, who waits for a decision about a credential and an endpoint."""
        self._pool = ThreadPoolExecutor(ADMISSION_THREADS, thread_name_prefix="admission")
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def authenticate(self, credential: str, source: str, done: Done) -> None:
        """Check a credential in a thread; call `done` with the id of its caller, or with an error."""
        if credential in self._checking:
            self._checking[credential].append(done)
            return
        if self._pending >= MAX_PENDING_DECISIONS or self._sources[source] >= MAX_PENDING_OF_SOURCE:
            done("", no_decision())
            return
        self._checking[credential] = [done]
        self._pending += 1
        self._sources[source] += 1
        future = self._pool.submit(self._admission.authenticate, credential)
        future.add_done_callback(partial(self._return, partial(self._authenticated, source, credential)))

    def admit(
        self, credential: str, endpoint: str | None, data: bytes, done: Done, *, tries: int = MAX_ATTEMPTS
    ) -> None:
        """Call `done` with the name of the caller if it may use `endpoint`: at once if the decision is known."""
        try:
            caller = self._admission.admit(credential, endpoint, data)
        except FalajError as error:
            done("", error)
            return
        if caller is not None:
            done(caller, None)
            return
        again = partial(self.admit, credential, endpoint, data, done, tries=tries - 1)
        if tries and (credential, endpoint) in self._deciding:
            self._deciding[credential, endpoint].append((again, done))
        elif not tries or self._pending >= MAX_PENDING_DECISIONS:
            done("", no_decision())
        else:
            self._deciding[credential, endpoint] = [(again, done)]
            self._pending += 1
            future = self._pool.submit(self._admission.decide, credential, endpoint)
            future.add_done_callback(partial(self._return, partial(self._decided, (credential, endpoint))))

    def known(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        """Return the name of the caller, and count its calls, if the decision that allows them is known."""
        try:
            return self._admission.admit(credential, endpoint, data, calls=calls)
        except FalajError:
            return None

    def permitted(
        self, credential: str, endpoints: Sequence[str], done: Callable[[Sequence[str]], None]
    ) -> None:
        """Call `done` with those of `endpoints` that a caller may use; with none where this cannot be decided."""
        if self._pending >= MAX_PENDING_DECISIONS:
            done(())
            return
        self._pending += 1
        future = self._pool.submit(self._admission.permitted, credential, endpoints)
        future.add_done_callback(partial(self._return, partial(self._listed, done)))

    def _listed(self, done: Callable[[Sequence[str]], None], future: Future[Sequence[str]]) -> None:
        self._pending -= 1
        error = future.exception()
        if error is not None:
            _explained(error)
        done(() if error is not None else future.result())

    def _return(self, finish: Callable[[Future[object]], None], future: Future[object]) -> None:
        """Pass the result of a thread to the event loop."""
        if not future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(finish, future)

    def _authenticated(self, source: str, credential: str, future: Future[str]) -> None:
        self._pending -= 1
        self._sources[source] -= 1
        if not self._sources[source]:
            del self._sources[source]
        error = future.exception()
        refused = None if error is None else _explained(error)
        for done in self._checking.pop(credential):
            done(future.result() if refused is None else "", refused)

    def _decided(self, about: tuple[str, str | None], future: Future[None]) -> None:
        self._pending -= 1
        error = future.exception()
        refused = None if error is None else _explained(error)
        for again, done in self._deciding.pop(about):
            if refused is None:
                again()
            else:
                done("", refused)


def no_decision() -> Unavailable:
    return Unavailable("authorization is temporarily unavailable; try again")


def _explained(error: BaseException) -> FalajError:
    if isinstance(error, FalajError):
        return error
    _log.error("admission failed", exc_info=error)
    return no_decision()
