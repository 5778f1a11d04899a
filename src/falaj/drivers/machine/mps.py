"""NVIDIA's MPS daemon, by which several processes share a card: whether it answers."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

CONTROL = "control"
TIMEOUT_S = 2.0


def is_running(directory: Path) -> bool:
    """Whether a daemon listens there.

    It listens for packets. The knock is that of a stream, which the kernel turns away as the wrong kind if somebody
    listens, and as refused if nobody does; so the daemon is not bothered.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(TIMEOUT_S)
        try:
            knock.connect(str(directory / CONTROL))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True
