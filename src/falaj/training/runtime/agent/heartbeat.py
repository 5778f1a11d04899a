"""Heartbeats of a job's processes, by which the platform detects hangs. Standard library only.

A rank that has started to beat must continue until it stops, or it counts as hung; `beat_for_job` implies no such
promise. Without a platform that reads heartbeats nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import time

VARIABLE = "FALAJ_HEARTBEAT"
EVERY_S = 1.0
RANKS = ("FALAJ_RANK", "RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of the rank, by launcher: Falaj, torchrun, horovodrun, Open MPI, MPICH."""


class Heartbeat:
    """A heartbeat file whose modification time changes at most once a second."""

    def __init__(self, name: str) -> None:
        self._folder = os.environ.get(VARIABLE)
        self._own = os.path.join(self._folder or "", name)
        self._next_at = 0.0

    def beat(self) -> None:
        """Touch the file if a second has passed. Cheap enough to call at every step."""
        now = time.monotonic()
        if not self._folder or now < self._next_at:
            return
        self._next_at = now + EVERY_S
        with contextlib.suppress(OSError):  # a full disk is another matter
            try:
                os.utime(self._own)
            except FileNotFoundError:
                os.close(os.open(self._own, os.O_WRONLY | os.O_CREAT, 0o600))

    def stop(self) -> None:
        """End the heartbeat: from now on, output shows that the process is alive."""
        self._next_at = 0.0
        if self._folder:
            with contextlib.suppress(OSError):
                os.unlink(self._own)


def rank_heartbeat() -> Heartbeat:
    """Return the heartbeat of this rank."""
    given = (os.environ.get(name) for name in RANKS)
    return Heartbeat(next((rank for rank in given if rank), "0"))


def beat_for_job() -> None:
    """Beat for the job as a whole, for ranks without a heartbeat of their own."""
    global _anybody
    if _anybody is None:
        _anybody = Heartbeat("any")
    _anybody.beat()


_anybody: Heartbeat | None = None
