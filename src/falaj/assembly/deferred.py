"""Lazy drivers: created at their first use, closed if they were created."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Deferred:
    """A proxy that calls `make` at the first use of an attribute."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
        return getattr(self._made, name)

    def close(self) -> None:
        with self._lock:
            if self._made is not None:
                self._made.close()


def deferred(make: Callable[[], T]) -> T:
    """Return a stand-in for the result of `make`, created at its first use; `close` closes it if it was created."""
    return cast(T, Deferred(make))
