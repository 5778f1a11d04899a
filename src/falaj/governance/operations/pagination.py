"""Pagination of objects: those that the caller may not see are left out before the page is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from falaj.governance import objects
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.authorizer import SEE
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import Page, StoredObject
from falaj.records.record import Record

T = TypeVar("T", bound=Record)


def list_page(
    gate: Gate,
    kinds: Sequence[str],
    render: Callable[[StoredObject], T],
    *,
    after: str,
    limit: int,
    workspace: str | None = None,
    action: str = SEE,
) -> Page[T]:
    """Return the next `limit` objects of `kinds` after the cursor `after` that the caller may see."""
    seen = visible_objects(gate, kinds, after=after, limit=limit + 1, workspace=workspace, action=action)
    shown = seen[:limit]
    following = shown[-1].id if len(seen) > limit else None
    return Page(items=tuple(render(each) for each in shown), next=following)


def list_workspace_page(
    gate: Gate, kind: str, render: Callable[[Transaction, StoredObject], T], *, after: str, limit: int
) -> Page[T]:
    """Return the next objects of `kind` in the workspace that the running operation acts on."""
    call = current_call()
    return list_page(
        gate,
        [kind],
        lambda found: render(call.tx, found),
        after=after,
        limit=limit,
        workspace=call.target.id,
    )


def visible_objects(
    gate: Gate, kinds: Sequence[str], *, after: str, limit: int, workspace: str | None, action: str
) -> list[StoredObject]:
    """Return up to `limit` visible objects, authorizing one batch after another."""
    seen: list[StoredObject] = []
    while len(seen) < limit:
        batch = objects.listed(current_call().tx, kinds=kinds, workspace=workspace, after=after, limit=limit)
        seen += gate.visible(batch, action=action)
        if len(batch) < limit:
            break
        after = batch[-1].id
    return seen[:limit]
