"""Which copy of a home uses a PostgreSQL database: its sessions carry the name of the home and of its folder.

A home that was copied to a second machine has the same id, and would take the first one's stores and attempts for its
own. PostgreSQL itself knows whether the first one is alive, by its own clock.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from falaj.ports.machine.boot import BOOT_ID
from falaj.ports.metadata import Transaction

ALIVE_S = 15
"""A platform that runs asks its database many times a second. Sessions of a machine without power stay for hours."""
LONGEST_NAME = 63
"""PostgreSQL cuts the names of sessions there."""

_OTHERS = """
SELECT DISTINCT application_name FROM pg_stat_activity
WHERE datname = current_database() AND starts_with(application_name, ?) AND NOT starts_with(application_name, ?)
AND coalesce(state_change, backend_start) > clock_timestamp() - make_interval(secs => ?)
"""


class SessionName(NamedTuple):
    """The name of the sessions of a home: its id, which copy of it this is, and the machine."""

    home: str
    copy: str
    host: str

    def __str__(self) -> str:
        return f"{self._start()}{self.copy} {self.host}"[:LONGEST_NAME]

    def hosts_of_copies(self, tx: Transaction) -> list[str]:
        """Return the machines on which another copy of the home uses the database now."""
        found = tx.execute_sql(_OTHERS, (self._start(), f"{self._start()}{self.copy} ", ALIVE_S))
        return sorted(str(name).rpartition(" ")[2] for (name,) in found)

    def _start(self) -> str:
        return f"falaj {self.home} "


def session_name(home: str, folder: Path) -> SessionName:
    """Return the name for the home in `folder`: the folder of a copy is another one, on this machine or elsewhere."""
    facts = os.stat(folder)
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    identity = f"{boot} {facts.st_dev} {facts.st_ino}"
    return SessionName(home, hashlib.sha256(identity.encode()).hexdigest()[:8], socket.gethostname())
