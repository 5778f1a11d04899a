"""The controller's lease: one acts at a time, and each takeover has a greater fencing number."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import bindparam, insert, select, update

from falaj.control.tables import leases
from falaj.errors import Conflict
from falaj.ports.metadata import Database, Transaction

NAME = "controller"
FAR = 10
LONGEST = timedelta(hours=1)

_mine = select(leases).where(leases.c.name == NAME)
_fence = select(leases.c.fence).where(leases.c.name == NAME)
_renew = (
    update(leases)
    .where(leases.c.name == NAME, leases.c.fence == bindparam("held"))
    .values(expires_at=bindparam("until"))
)


def current_fence(tx: Transaction) -> int:
    """The fencing number of whoever acts now; locked against a takeover until `tx` ends."""
    return int(tx.execute(_fence.with_for_update(read=True)).scalar() or 0)


def acquire(database: Database, holder: str, *, now: datetime, lasts: timedelta) -> int | None:
    """Take the lease if it is free or expired, or its holder is dead; its fencing number, or none if another has it."""
    try:
        with database.write() as tx:
            row = tx.execute(_mine.with_for_update()).mappings().first()
            if (
                row is not None
                and now < row["expires_at"] <= now + FAR * lasts
                and not is_dead(row["holder"])
            ):
                return None  # one that ends later than any lease can was taken under a wrong clock
            fence = 1 if row is None else row["fence"] + 1
            values = {"holder": holder, "fence": fence, "expires_at": now + lasts}
            if row is None:
                tx.execute(insert(leases), {"name": NAME, **values})
            else:
                tx.execute(update(leases).where(leases.c.name == NAME).values(**values))
            return int(fence)
    except Conflict:
        return None


def renew(database: Database, fence: int, *, now: datetime, lasts: timedelta) -> bool:
    """Hold the lease longer; false if it has passed to another."""
    with database.write() as tx:
        return tx.execute(_renew, {"held": fence, "until": now + lasts}).rowcount == 1


def release(database: Database, fence: int, *, now: datetime) -> None:
    """Let a standby take over at once."""
    with database.write() as tx:
        tx.execute(_renew, {"held": fence, "until": now})


def held_by(tx: Transaction, *, now: datetime) -> str | None:
    """Who acts now; a holder that is known to be dead does not, though its lease may go on for seconds."""
    row = tx.execute(_mine).mappings().first()
    is_held = row is not None and now < row["expires_at"] <= now + LONGEST
    return row["holder"] if row is not None and is_held and not is_dead(row["holder"]) else None
