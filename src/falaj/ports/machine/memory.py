"""The memory that one process spends on rows: a budget that all calls share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from falaj.errors import TooLarge, Unavailable

WAIT_S = 60.0
"""How long a call waits for memory that other calls hold."""


class MemoryBudget:
    """`total_bytes` for all calls of a process. A call holds a lease, which grows as it learns what it needs."""

    def __init__(self, total_bytes: int, *, wait_s: float = WAIT_S) -> None:
        self.total_bytes = total_bytes
        self._wait_s = wait_s
        self.free_bytes = total_bytes
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[MemoryLease]:
        """An empty lease, given back at the end."""
        lease = MemoryLease(self)
        try:
            yield lease
        finally:
            lease.release()

    def take(self, size_bytes: int, *, held_bytes: int) -> None:
        """Take memory for a call that holds `held_bytes`: TooLarge if it can never have it, Unavailable if not now."""
        if held_bytes + size_bytes > self.total_bytes:
            raise TooLarge(
                f"the call needs more than {self.total_bytes} bytes of memory for rows; use fewer rows or columns"
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self.free_bytes >= size_bytes, timeout=self._wait_s):
                raise Unavailable("other calls hold the memory for rows; try again later")
            self.free_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self.free_bytes += size_bytes
            self._changed.notify_all()


class MemoryLease:
    """What one call holds of a budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """Hold `size_bytes` more until the lease ends."""
        self._budget.take(size_bytes, held_bytes=self._held_bytes)
        self._held_bytes += size_bytes

    @property
    def total_bytes(self) -> int:
        """The budget that all leases share."""
        return self._budget.total_bytes

    @property
    def spare_bytes(self) -> int:
        """What the lease could take at once."""
        return self._budget.free_bytes

    @contextmanager
    def borrowed(self, size_bytes: int) -> Iterator[None]:
        """Hold `size_bytes` more for a while."""
        self.grow(size_bytes)
        try:
            yield
        finally:
            self._held_bytes -= size_bytes
            self._budget.give_back(size_bytes)

    def release(self) -> None:
        self._budget.give_back(self._held_bytes)
        self._held_bytes = 0
