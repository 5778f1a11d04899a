"""Drivers that are costly to load: made when they are first used, closed if they were made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Deferred:
    """Stands in for what `make` gives, and makes it at the first use of any of its attributes."""

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
    """What `make` gives, made at its first use; `close` closes it if it was made."""
    return cast(T, Deferred(make))
