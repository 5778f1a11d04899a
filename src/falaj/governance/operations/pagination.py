"""Pages of lists: what the caller may not see is left out before the page is cut.

A page begins behind the position of the last object of the page before, so objects that come or go in the meantime
neither move others from page to page nor are listed twice. Nothing of what is hidden shows: not in the number of items,
which is less than was asked for on the last page only, and not in the cursor, which is behind a visible object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement

from falaj.governance import objects
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.authorizer import SEE
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import Page, StoredObject
from falaj.records.record import Record

T = TypeVar("T", bound=Record)
R = TypeVar("R")

Conditions = Sequence[ColumnElement[bool]]
"""Conditions on the table of objects: hidden ones are left out by the query, as far as that is possible."""

LARGEST_BATCH = 4000
"""Objects that are read at a time where many of them are hidden."""


class VisiblePage(NamedTuple):
    """The objects of a page, with what was read along with each, and its cursor."""

    items: list[tuple[StoredObject, Any]]
    next: str | None


def list_page(
    gate: Gate,
    kinds: Sequence[str],
    render: Callable[[list[StoredObject]], Iterable[T]],
    *,
    after: str,
    limit: int,
    workspace: str | None = None,
    action: str = SEE,
) -> Page[T]:
    """Return the next `limit` objects of `kinds` after the cursor `after` that the caller may see, oldest first."""
    tx = current_call().tx

    def fetch(conditions: Conditions, position: str, count: int) -> list[tuple[StoredObject, None]]:
        found = objects.listed(
            tx, kinds=kinds, workspace=workspace, after=position, limit=count, conditions=conditions
        )
        return [(each, None) for each in found]

    page = visible_page(
        gate, fetch, after=after, limit=limit, kinds=kinds, workspace=workspace, action=action
    )
    return Page(items=tuple(render([found for found, _ in page.items])), next=page.next)


def list_workspace_page(
    gate: Gate,
    kind: str,
    render: Callable[[Transaction, list[StoredObject]], Iterable[T]],
    *,
    after: str,
    limit: int,
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


def visible_page(
    gate: Gate,
    fetch: Callable[[Conditions, str, int], Sequence[tuple[StoredObject, Any]]],
    *,
    after: str,
    limit: int,
    kinds: Sequence[str],
    workspace: str | None,
    action: str = SEE,
) -> VisiblePage:
    """Return the next `limit` visible objects behind the cursor `after`, in the order of `fetch`.

    `fetch` returns up to so many objects behind the one with this id ("": from the beginning) that meet the conditions.
    """
    call = current_call()
    seen = visible_after(
        gate,
        fetch,
        lambda found, _: found.id,
        after=gate.cursors.read(call, after),
        limit=limit + 1,
        kinds=kinds,
        workspace=workspace,
        action=action,
    )
    items = seen[:limit]
    following = gate.cursors.write(call, items[-1][0].id) if len(seen) > limit else None
    return VisiblePage(items, following)


def visible_after(
    gate: Gate,
    fetch: Callable[[Conditions, R, int], Sequence[tuple[StoredObject, Any]]],
    position: Callable[[StoredObject, Any], R],
    *,
    after: R,
    limit: int,
    kinds: Sequence[str],
    workspace: str | None,
    action: str = SEE,
) -> list[tuple[StoredObject, Any]]:
    """Return up to `limit` visible objects behind the position `after`, reading one batch after another."""
    visibility = gate.visibility(action)
    seen: list[tuple[StoredObject, Any]] = []
    count = limit
    while len(seen) < limit:
        batch = fetch(visibility.conditions(tuple(kinds), workspace), after, count)
        seen += [each for each in batch if visibility.allows(each[0])]
        if len(batch) < count:
            break
        after = position(*batch[-1])
        count = min(2 * count, LARGEST_BATCH)
    return seen[:limit]
