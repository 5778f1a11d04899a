"""Writes the output of the user's code to its log, up to a limit, and always the end."""

from __future__ import annotations

import os
from pathlib import Path

from falaj.drivers.processes.supervisor.secret_mask import SecretMask

TAIL_BYTES = 64 * 1024


class AttemptLog:
    """The log of one attempt. Output beyond the limit is dropped, except for its end.

    What `mask` replaces is neither written nor in the tail.
    """

    def __init__(self, path: Path, *, limit_bytes: int, mask: SecretMask | None = None) -> None:
        self._mask = mask or SecretMask([])
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._left = limit_bytes
        self._limit = limit_bytes
        self._dropped = 0
        self._tail = bytearray()

    def add(self, chunk: bytes) -> None:
        self._keep(self._mask.add(chunk))

    def flush(self) -> None:
        """Write what was held back as a possible beginning of a secret: no more output follows."""
        self._keep(self._mask.flush())

    def _keep(self, chunk: bytes) -> None:
        self._tail += chunk
        if len(self._tail) > 4 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        kept, rest = chunk[: self._left], chunk[self._left :]
        if kept:
            self._left -= len(kept)
            self._put(kept)
        if rest:
            if not self._dropped:
                self._put(
                    b"\n[falaj: the log is full at %d bytes; the rest is dropped, except for its end]\n"
                    % self._limit
                )
            self._dropped += len(rest)

    def hide(self, data: bytes) -> bytes:
        return self._mask.hide(data)

    @property
    def tail(self) -> bytes:
        return bytes(self._tail[-TAIL_BYTES:])

    def close(self) -> None:
        self.flush()
        if self._dropped:
            shown = self.tail[-self._dropped :]
            self._put(b"[falaj: %d bytes were dropped here]\n" % (self._dropped - len(shown)) + shown)
        os.close(self._file)

    def _put(self, data: bytes) -> None:
        """Write all of `data`. A full disk ends the log, not the job."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            self._left = 0
