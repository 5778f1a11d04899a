"""What the machine that this process is on reports, for runs that sample it."""

from __future__ import annotations

import socket
from pathlib import Path

from falaj.drivers.machine.telemetry import read_telemetry
from falaj.ports.machine.hardware import NodeTelemetry


def read_here() -> NodeTelemetry:
    """Return what this machine reports now, with the volume of the working directory."""
    return read_telemetry(socket.gethostname(), volumes=[Path.cwd()])
