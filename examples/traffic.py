"""Live traffic: sends flights to an endpoint over several connections, and labels the predictions."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple
from urllib.parse import urlsplit

import falaj as fj

CALLERS = 4
CHUNK = 200
MOST_LABELS = 1000
MOST_WAITING = 1000
"""Labels are sent after this many answers, as real labels come later."""
PATIENCE_S = 30.0


class Flight(NamedTuple):
    """The inputs of a request, and the later outcome."""

    name: str
    late: float


class Traffic:
    """Sends flights to an endpoint until `enough`, and labels them later."""

    def __init__(self, platform: fj.Platform, endpoint: str, *, token: str) -> None:
        self._platform = platform
        self._endpoint = endpoint
        self._url = urlsplit(str(platform.endpoints.show(endpoint).url))
        self._token = token
        self._waiting: list[tuple[str, float]] = []
        self.sent = 0
        self.failed = 0
        self.seconds = 0.0
        self.last = ""
        """The prediction that was answered last."""

    def replay(self, flights: Iterator[Flight], *, enough: Callable[[], bool], most: int) -> int:
        """Send flights, and their outcomes after them, until it is `enough`; return how many were sent."""
        before = self.sent
        with ThreadPoolExecutor(CALLERS) as pool:
            while self.sent - before < most and not enough():
                chunk = list(islice(flights, CHUNK))
                if not chunk:
                    break
                began = time.perf_counter()
                for answers in pool.map(self._send, [chunk[place::CALLERS] for place in range(CALLERS)]):
                    self._waiting += answers
                    self.last = answers[-1][0] if answers else self.last
                self.seconds += time.perf_counter() - began
                self._label()
                while len(self._waiting) > MOST_WAITING and not enough():
                    time.sleep(0.1)
                    self._label()
        return self.sent - before

    def settle(self) -> None:
        """Wait until every prediction is logged and labelled."""
        until = time.monotonic() + PATIENCE_S
        while self._waiting and time.monotonic() < until:
            self._label()
            time.sleep(0.2)

    def _send(self, flights: Sequence[Flight]) -> list[tuple[str, float]]:
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port or 80)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        answered = []
        for flight in flights:
            tensor = {"name": "flight", "shape": [1], "datatype": "BYTES", "data": [flight.name]}
            connection.request("POST", f"{self._url.path}/infer", json.dumps({"inputs": [tensor]}), headers)
            answer = connection.getresponse()
            body = answer.read()
            self.sent += 1
            if answer.status == 200:
                answered.append((json.loads(body)["id"], flight.late))
            else:
                self.failed += 1
        connection.close()
        return answered

    def _label(self) -> None:
        """Send outcomes; predictions that are not logged yet are labelled next time."""
        left = []
        for place in range(0, len(self._waiting), MOST_LABELS):
            part = self._waiting[place : place + MOST_LABELS]
            labels = [{"id": name, "value": late} for name, late in part]
            unknown = set(self._platform.endpoints.feedback(self._endpoint, predictions=labels).unknown)
            left += [each for each in part if each[0] in unknown]
        self._waiting = left
