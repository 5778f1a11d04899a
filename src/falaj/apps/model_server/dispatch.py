"""From a request to its answer: the path, the caller, and what the path asks for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from urllib.parse import quote, unquote_to_bytes

from falaj.apps.model_server import answers
from falaj.apps.model_server.answers import Answer
from falaj.apps.model_server.exchange import Exchange
from falaj.apps.model_server.meters import Meters
from falaj.apps.model_server.places import UNKNOWN, Kind, Place, all_places
from falaj.apps.model_server.prediction import Prediction, prepare
from falaj.errors import Denied, FalajError, Internal, NotFound, Unavailable
from falaj.serving.catalogue import Served
from falaj.serving.neighbours import Admits, Features, Logs

LARGE = 256 * 1024
"""Bytes of a body from which on it is read in a thread, so that the event loop stays free."""
ASKING_THREADS = 4
TRIES = 3
"""So often a decision is made again that was outdated before it could be used."""
MOST_ASKING = 64
"""Decisions that may be pending; more would be someone trying tokens."""

_log = logging.getLogger(__name__)


class Dispatcher:
    """Answers requests. It is called on the event loop only."""

    def __init__(
        self, admits: Admits, features: Features, logs: Logs, meters: Meters, pool: ThreadPoolExecutor
    ) -> None:
        self._admits = admits
        self._features = features
        self._logs = logs
        self._meters = meters
        self._pool = pool
        self._asking = 0
        self._askers = ThreadPoolExecutor(ASKING_THREADS, thread_name_prefix="admission")
        self._loop = asyncio.get_running_loop()
        self._places: dict[bytes, Place] = {}
        self.ready = False

    def show(self, served: Mapping[str, Served]) -> None:
        """Answer for `served` from now on."""
        self._places = all_places(served, self._meters, self._logs)
        self._meters.served = served
        self.ready = True

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)

    def dispatch(self, exchange: Exchange) -> None:
        place = self._places.get(exchange.path) or self._place(exchange.path)
        if place.kind is Kind.LIVE:
            exchange.finish(answers.of({"live": True}))
        elif place.kind is Kind.READY:
            exchange.finish(answers.of({"ready": True}) if self.ready else _not_ready())
        else:
            self._enter(exchange, place)

    def _place(self, path: bytes) -> Place:
        """The place of a path that is spelled otherwise than we would."""
        plain = quote(unquote_to_bytes(path.partition(b"?")[0])).encode()
        return self._places.get(plain.rstrip(b"/")) or UNKNOWN

    # ---------------------------------------------------------------------------------------- admission

    def _enter(self, exchange: Exchange, place: Place, *, tries: int = TRIES) -> None:
        if exchange.caller is not None:
            self._answer(exchange, place, exchange.caller)
            return
        try:
            caller = self._admits.admit(exchange.credential or "", place.asks, exchange.body)
        except FalajError as error:
            self._refuse(exchange, _shown(error, place))
            return
        if caller is not None:
            self._answer(exchange, place, caller)
        elif not tries or self._asking >= MOST_ASKING:
            self._refuse(exchange, Unavailable("whether you may do this cannot be decided now; try again"))
        else:
            self._asking += 1
            future = self._askers.submit(self._admits.decide, exchange.credential or "", place.asks)
            future.add_done_callback(partial(self._hand_over, exchange, place, tries - 1))

    def _hand_over(self, exchange: Exchange, place: Place, tries: int, future: Future[None]) -> None:
        if not future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._decided, exchange, place, tries, future)

    def _decided(self, exchange: Exchange, place: Place, tries: int, future: Future[None]) -> None:
        self._asking -= 1
        error = future.exception()
        if error is None:
            self._enter(exchange, place, tries=tries)
        elif isinstance(error, FalajError):
            self._refuse(exchange, _shown(error, place))
        else:
            _log.error("admission failed", exc_info=error)
            self._refuse(exchange, Unavailable("whether you may do this cannot be decided now; try again"))

    # ------------------------------------------------------------------------------------------ answers

    def _answer(self, exchange: Exchange, place: Place, caller: str) -> None:
        if exchange.method != place.method and not (exchange.method == b"HEAD" and place.method == b"GET"):
            exchange.finish(_not_allowed(place.method) if place is not UNKNOWN else _missing(exchange.path))
        elif place.kind is Kind.INFER:
            self._infer(exchange, place, caller)
        elif place.answer is not None:
            exchange.finish(place.answer)
        elif place.kind is Kind.METRICS:
            exchange.finish(Answer(200, self._meters.text(), answers.METRICS))
        else:
            exchange.finish(_missing(exchange.path))

    def _infer(self, exchange: Exchange, place: Place, caller: str) -> None:
        if exchange.size > LARGE:
            future = self._pool.submit(prepare, exchange, place, caller, self._features)
            future.add_done_callback(partial(self._hand_in, exchange, place))
            return
        try:
            self._queue(exchange, prepare(exchange, place, caller, self._features))
        except Exception as error:
            self._failed(exchange, place, error)

    def _hand_in(self, exchange: Exchange, place: Place, future: Future[Prediction]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._prepared, exchange, place, future)

    def _prepared(self, exchange: Exchange, place: Place, future: Future[Prediction]) -> None:
        try:
            self._queue(exchange, future.result())
        except Exception as error:
            self._failed(exchange, place, error)

    def _queue(self, exchange: Exchange, prediction: Prediction) -> None:
        if not exchange.gone:
            exchange.work = prediction
            try:
                prediction.lane.submit(prediction)
            except FalajError as error:  # too much waits for this version: it is that version's failure
                prediction.settle(error)

    def _failed(self, exchange: Exchange, place: Place, error: Exception) -> None:
        if not isinstance(error, FalajError):
            _log.error("a request could not be handled", exc_info=error)
            error = Internal("a fault of ours; the details are in the server's log")
        answer = answers.refusal(error)
        meter = self._meters.of(place.endpoint or "", "")
        meter.count(answer.status, time.perf_counter() - exchange.began)
        exchange.finish(answer)

    def _refuse(self, exchange: Exchange, error: FalajError) -> None:
        answer = answers.refusal(error)
        self._meters.refused[answer.status] += 1
        exchange.finish(answer)


def _shown(error: FalajError, place: Place) -> FalajError:
    """To a caller who may not use it, an endpoint looks as if it were not there."""
    if isinstance(error, Denied | NotFound) and place.endpoint is not None:
        return _unknown(f"/v2/models/{place.endpoint}".encode())
    return error


def _unknown(path: bytes) -> NotFound:
    parts = path.partition(b"?")[0].split(b"/")
    if parts[1:3] == [b"v2", b"models"] and len(parts) > 3:
        return NotFound(
            f"there is no endpoint '{_name(parts[3])}' that you may call, or not this version of it"
        )
    return NotFound(f"there is nothing at {_name(path[:200])}")


def _name(text: bytes) -> str:
    return unquote_to_bytes(text[:200]).decode("utf-8", "replace")


def _missing(path: bytes) -> Answer:
    return answers.refusal(_unknown(path))


def _not_allowed(method: bytes) -> Answer:
    words = f"this path takes {method.decode()} only"
    return answers.refusal(NotFound(words), status=405)


def _not_ready() -> Answer:
    return answers.refusal(Unavailable("the models are not loaded yet, or the server stops"))
