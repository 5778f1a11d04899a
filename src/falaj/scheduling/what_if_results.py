"""What came of a what-if, kept for those who may see every team's waits: encrypted, one for each piece of work."""

from __future__ import annotations

from sqlalchemy import insert, select

from falaj.errors import NotFound
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.encryption.values import SealedValues
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.scheduling.simulation import WhatIfComparison
from falaj.scheduling.tables import comparisons


def seal(sealed: SealedValues, work: StoredObject, comparison: WhatIfComparison) -> bytes:
    """Not in a transaction: the keys are read in one of their own."""
    return sealed.seal(work.workspace, comparison.model_dump_json().encode(), context=work.id.encode())


def keep(tx: Transaction, work: StoredObject, sealed: bytes) -> None:
    """The first that is kept stays: a replay that was broken off and made again finds the same."""
    if _row(tx, work) is None:
        require_living_key(tx, work.workspace)
        tx.execute(insert(comparisons), {"work": work.id, "sealed": sealed})


def read(database: Database, sealed: SealedValues, work: StoredObject) -> WhatIfComparison:
    with database.read() as tx:
        row = _row(tx, work)
    if row is None:
        raise NotFound(
            f"there is no comparison for work {work.id}: it has not ended well, or was no what-if; "
            f"falaj workflows show {work.id}"
        )
    value = sealed.unseal(work.workspace, row, context=work.id.encode())
    return WhatIfComparison.model_validate_json(value)


def _row(tx: Transaction, work: StoredObject) -> bytes | None:
    found = tx.execute(select(comparisons.c.sealed).where(comparisons.c.work == work.id)).scalar()
    return None if found is None else bytes(found)
