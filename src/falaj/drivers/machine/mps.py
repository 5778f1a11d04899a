"""NVIDIA's MPS daemon, through which several processes share a card."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

CONTROL = "control"
TIMEOUT_S = 2.0


def is_running(directory: Path) -> bool:
    """Return whether a daemon listens in `directory`.

    The daemon uses a SOCK_SEQPACKET socket. We connect with SOCK_STREAM: the kernel reports the wrong type if somebody
    listens, and a refused connection otherwise, without involving the daemon.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(TIMEOUT_S)
        try:
            probe.connect(str(directory / CONTROL))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True
