"""The controller's lease: one controller acts at a time, and each takeover has a greater fencing number.

On PostgreSQL leases go by the clock of the server, since those of the machines may differ; `now` counts where the
database is a file. The name of a holder tells controllers on the same machine whether its process is dead, so that they
need not wait until its lease expires.
"""

from __future__ import annotations

import hashlib
import os
import socket
from datetime import datetime, timedelta
from functools import cache

from sqlalchemy import bindparam, insert, select, update

from falaj.control.tables import leases
from falaj.errors import Conflict
from falaj.ports.machine.boot import boot_identity
from falaj.ports.metadata import Database, Transaction

NAME = "controller"
FAR = 10
LONGEST = timedelta(hours=1)

_lease = select(leases.c.holder, leases.c.fence, leases.c.expires_at).where(leases.c.name == NAME)
_fence = select(leases.c.fence).where(leases.c.name == NAME)
_renew = (
    update(leases)
    .where(leases.c.name == NAME, leases.c.fence == bindparam("held"))
    .values(expires_at=bindparam("until"))
)


def current_fence(tx: Transaction) -> int:
    """Return the fencing number of the acting controller; locked against a takeover until `tx` ends."""
    return int(tx.execute(_fence.with_for_update(read=True)).scalar() or 0)


def acquire(database: Database, holder: str, *, now: datetime, lasts: timedelta) -> int | None:
    """Take the lease if it is free or expired or its holder is dead. Return its fencing number, or None."""
    try:
        with database.write() as tx:
            held = tx.execute(_lease.with_for_update()).first()
            now = tx.server_time() or now
            # A lease that ends later than any lease can was taken under a wrong clock.
            if held is not None and now < held.expires_at <= now + FAR * lasts and not is_dead(held.holder):
                return None
            fence = 1 if held is None else int(held.fence) + 1
            values = {"holder": holder, "fence": fence, "expires_at": now + lasts}
            if held is None:
                tx.execute(insert(leases), {"name": NAME, **values})
            else:
                tx.execute(update(leases).where(leases.c.name == NAME).values(**values))
            return fence
    except Conflict:
        return None


def renew(database: Database, fence: int, *, now: datetime, lasts: timedelta) -> bool:
    """Extend the lease. Return False if it has passed to another controller."""
    with database.write() as tx:
        until = (tx.server_time() or now) + lasts
        return tx.execute(_renew, {"held": fence, "until": until}).rowcount == 1


def release(database: Database, fence: int, *, now: datetime) -> None:
    """Give the lease up, so that a standby takes over at once."""
    with database.write() as tx:
        tx.execute(_renew, {"held": fence, "until": tx.server_time() or now})


def held_by(tx: Transaction, *, now: datetime) -> str | None:
    """Return the holder of a valid lease, or None if there is none or its process is dead."""
    held = tx.execute(_lease).first()
    now = tx.server_time() or now
    if held is None or not now < held.expires_at <= now + LONGEST or is_dead(held.holder):
        return None
    return str(held.holder)


# -------------------------------------------------------------------------------------------- holders


def holder_name() -> str:
    """Return the name of this process: "host:pid:boot", or "host:pid" where the boot is not known."""
    return ":".join(part for part in (socket.gethostname(), str(os.getpid()), _boot()) if part)


def is_dead(holder: str) -> bool:
    """Return whether `holder` has certainly ended; False for processes of other machines and containers."""
    *_, number, boot = ["", "", *holder.split(":")]
    if not boot or boot != _boot() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user, so it exists
        return False
    return False


@cache
def _boot() -> str:
    identity = boot_identity()
    return hashlib.sha256(identity.encode()).hexdigest()[:8] if identity else ""
