"""Lists that are searched by words: the field, whose words stand in the address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from nicegui import events, ui

from falaj.apps.console.page import PageContext
from falaj.records.governance.objects import Page
from falaj.records.record import Record
from falaj.sdk.platform import Platform

T = TypeVar("T", bound=Record)
LISTED = 1000
"""Objects that a page of the API has at most."""
MOST = 5000
"""Objects that a list reads; what is beyond is found with the command line."""


def fits(words: str, *texts: str) -> bool:
    """Tell whether every word occurs in one of the texts."""
    whole = "\n".join(texts).casefold()
    return all(word in whole for word in words.casefold().split())


def read_all(platform: Platform, read: Callable[[Platform, str], Page[T]]) -> list[T]:
    """Return the objects of all pages of a list, up to `MOST`; `read` gets the cursor."""
    found: list[T] = []
    cursor = ""
    while len(found) < MOST:
        page = read(platform, cursor)
        found += page.items
        if page.next is None:
            break
        cursor = page.next
    return found


def search_field(
    context: PageContext, *, label: str, keep: Iterable[str] = (), on_search: Callable[[str], Awaitable[None]]
) -> None:
    """Draw the field; what is typed is searched for, and stands in the address as `q`, beside what is kept of it."""
    kept = {name: context.query[name] for name in keep if name in context.query}
    path = context.request.url.path.removeprefix("/w/").split("/")[1:]

    async def search(event: events.ValueChangeEventArguments[Any]) -> None:
        words = str(event.value or "")
        ui.navigate.history.replace(context.href(*path, **kept, q=words))
        await on_search(words)

    field = ui.input(label=label, value=context.query.get("q", ""), on_change=search)
    field.props("outlined dense clearable debounce=250 type=search maxlength=200").classes(
        "filter search-field"
    )
