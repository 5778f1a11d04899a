"""The digest of bytes on their way."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

BATCH_BYTES = 4 << 20
BATCHES_BEHIND = 2


class RunningDigest:
    """SHA-256 and size of what passes through.

    SHA-256 is slower than encryption and disk together, so it is taken in a thread beside them, a few chunks behind;
    the last ones, often the only ones, are not worth the thread.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def follow(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        batch: list[bytes] = []
        batch_bytes = 0
        behind: deque[Future[None]] = deque()
        with ThreadPoolExecutor(max_workers=1) as beside:
            for chunk in chunks:
                batch.append(chunk)
                batch_bytes += len(chunk)
                if batch_bytes >= BATCH_BYTES:
                    while len(behind) >= BATCHES_BEHIND:
                        behind.popleft().result()
                    behind.append(beside.submit(self._add, batch))
                    batch, batch_bytes = [], 0
                yield chunk
        self._add(batch)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()

    def _add(self, batch: list[bytes]) -> None:
        for chunk in batch:
            self._sha256.update(chunk)
            self.size_bytes += len(chunk)
