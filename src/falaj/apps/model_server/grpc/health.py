"""The health checking protocol of gRPC: of the server, and of the models that it serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from falaj.apps.model_server.grpc.call import GrpcCall
from falaj.apps.model_server.grpc.messages import HealthCheckResponse
from falaj.apps.model_server.grpc.statuses import StatusCode

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
MAX_WATCHERS = 1000

Known = tuple[GrpcCall, str, int]
"""A call that watches, what it watches, and what it was told last."""


class HealthWatchers:
    """Answers checks, and tells those who watch when the health changes."""

    def __init__(self, is_ready: Callable[[], bool], is_served: Callable[[str], bool]) -> None:
        self._is_ready = is_ready
        self._is_served = is_served
        self._watchers: dict[int, Known] = {}

    def check(self, call: GrpcCall, service: str) -> None:
        call.reply(_answer(self._status(service)))

    def watch(self, call: GrpcCall, service: str) -> None:
        """Tell the health of a service now, and whenever it changes."""
        status = self._status(service)
        while len(self._watchers) >= MAX_WATCHERS:
            oldest, _, _ = next(iter(self._watchers.values()))
            oldest.end_with(StatusCode.UNAVAILABLE, "too many calls watch the health of this server")
        self._watchers[id(call)] = (call, service, status)
        call.on_stop = partial(self._forget, call)
        call.send(_answer(status))

    def _forget(self, call: GrpcCall) -> None:
        self._watchers.pop(id(call), None)

    def notify(self) -> None:
        """Tell watchers what has changed."""
        for key, (call, service, known) in list(self._watchers.items()):
            status = self._status(service)
            if status != known:
                self._watchers[key] = (call, service, status)
                call.send(_answer(status))

    def _status(self, service: str) -> int:
        if not self._is_ready():
            return NOT_SERVING
        return SERVING if self._is_served(service) else SERVICE_UNKNOWN


def _answer(status: int) -> bytes:
    found: bytes = HealthCheckResponse(status=status).SerializeToString()
    return found
