"""Bytes of unanswered requests in memory, shared among those who sent them."""

from __future__ import annotations


class ByteShares:
    """Counts held bytes by holder. A holder may have at most as many as are left free.

    One holder alone gets half of `limit`, two get a third each: whoever comes later always finds room. Not
    thread-safe: used on one event loop.
    """

    __slots__ = ("_by_holder", "held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._by_holder: dict[str, int] = {}

    def take(self, holder: str, size: int) -> bool:
        """Count `size` more bytes of `holder`; false, and nothing counted, if they exceed its share."""
        own, held = self._by_holder.get(holder, 0) + size, self.held + size
        if own > self.limit - held:
            return False
        self._by_holder[holder] = own
        self.held = held
        return True

    def release(self, holder: str, size: int) -> None:
        """Give back bytes that were taken."""
        left = self._by_holder.get(holder, 0) - size
        self.held -= size
        if left > 0:
            self._by_holder[holder] = left
        else:
            self._by_holder.pop(holder, None)

    def move(self, before: str, after: str, size: int) -> bool:
        """Count bytes of one holder as those of another; false, and released, if they exceed its share."""
        self.release(before, size)
        return self.take(after, size)
