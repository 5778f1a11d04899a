"""The running system: its identity, which tells process ids of an earlier boot or container apart, and its clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def boot_identity() -> str:
    """Return a text that differs between boots and between pid namespaces; empty where that cannot be known."""
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PID_NAMESPACE)}"
    except OSError:
        return ""


def boot_seconds() -> float:
    """Return the seconds since boot, the time of suspension included: nobody can set this clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
