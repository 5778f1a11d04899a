"""Cordoned nodes: those that operators have taken out of service."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, insert, select

from falaj.ports.metadata import Transaction
from falaj.records.scheduling.hardware import Cordon
from falaj.records.scheduling.snapshot import Node
from falaj.scheduling.tables import cordons


def all_cordons(tx: Transaction) -> dict[str, Cordon]:
    """Return the cordons by the names of their nodes, also of nodes that are not there now."""
    rows = tx.execute(select(cordons))
    return {
        row.node: Cordon(since=row.since, by=row.by, reason=row.reason, drained=row.drained) for row in rows
    }


def put_cordon(tx: Transaction, node: str, cordon: Cordon) -> None:
    """Cordon a node, or replace its cordon."""
    remove_cordon(tx, node)
    tx.execute(insert(cordons), {"node": node, **cordon.model_dump()})


def remove_cordon(tx: Transaction, node: str) -> None:
    tx.execute(delete(cordons).where(cordons.c.node == node))


def with_cordons(tx: Transaction, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes, with those marked that are cordoned; what a cluster has cordoned by itself stays so."""
    known = all_cordons(tx)
    if not known:
        return tuple(nodes)
    return tuple(node.model_copy(update={"cordoned": True}) if node.name in known else node for node in nodes)
