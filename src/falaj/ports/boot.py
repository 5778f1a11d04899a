"""The identity of the running system: it tells process ids of an earlier boot or of another container apart."""

from __future__ import annotations

import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def boot_identity() -> str:
    """Return a text that differs between boots and between pid namespaces; empty where that cannot be known."""
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PID_NAMESPACE)}"
    except OSError:
        return ""
