"""Shows the platform that a job's process is alive, so that one that hangs is noticed. Standard library only.

A rank that beats promises to go on until it rests, and is taken for hung if it does not; `show_life` promises nothing.
Without a platform, or where nobody waits for a sign of life, all of it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import time

VARIABLE = "FALAJ_HEARTBEAT"
EVERY_S = 1.0
RANKS = ("FALAJ_RANK", "RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Where a process finds its number, by who started it: Falaj, torchrun, horovodrun, Open MPI, MPICH."""


class Heartbeat:
    """A sign of life: a file whose time changes, at most once a second."""

    def __init__(self, name: str) -> None:
        self._folder = os.environ.get(VARIABLE)
        self._own = os.path.join(self._folder or "", name)
        self._next_at = 0.0

    def beat(self) -> None:
        """Call it at every step: it costs next to nothing, but once a second."""
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
        """No more steps: from now on, what is printed shows life."""
        self._next_at = 0.0
        if self._folder:
            with contextlib.suppress(OSError):
                os.unlink(self._own)


def rank_heartbeat() -> Heartbeat:
    """That of this rank."""
    told = (os.environ.get(name) for name in RANKS)
    return Heartbeat(next((rank for rank in told if rank), "0"))


def beat_for_job() -> None:
    """Say that the job is alive, on behalf of every rank that makes no promise of its own."""
    global _anybody
    if _anybody is None:
        _anybody = Heartbeat("any")
    _anybody.beat()


_anybody: Heartbeat | None = None
