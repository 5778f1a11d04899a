"""Parts of pages about one object: the heading, panels, tabs, lists of facts, and small tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import TextTag, fact
from falaj.apps.console.page import PageContext

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Crumb:
    """A page above this one, and its address."""

    label: str
    target: str


def heading(title: str, *, above: Sequence[Crumb] = (), words: str = "") -> None:
    """Draw the heading of a page, with the way back to the pages above it."""
    if above:
        with ui.element("nav").classes("crumbs").props("aria-label='Above this page'"):
            for crumb in above:
                ui.link(crumb.label, crumb.target)
                ui.label("/").props("aria-hidden=true")
    ui.label(title).classes("title wrap").props("role=heading aria-level=1")
    if words:
        ui.label(words).classes("muted under-title wrap")


@contextmanager
def panel(title: str, *, note: str = "") -> Iterator[ui.element]:
    """Draw a panel with a title."""
    with ui.element("section").classes("panel") as section:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
        if note:
            ui.label(note).classes("muted small")
        yield section


def tabs(context: PageContext, names: Sequence[tuple[str, str]], chosen: str) -> None:
    """Draw the tabs of a page; each is an address of its own, by the query `tab`."""
    kept = {name: value for name, value in context.query.items() if name != "tab"}
    path = context.request.url.path.removeprefix("/w/").split("/")[1:]
    with ui.element("nav").classes("tabs").props("aria-label='Parts of this page'"):
        for key, label in names:
            first = "" if key == names[0][0] else key
            link = ui.link(label, context.href(*path, **kept, tab=first)).classes("tab")
            if key == chosen:
                link.classes("here").props("aria-current=page")


def chosen_tab(context: PageContext, names: Sequence[tuple[str, str]]) -> str:
    """Return the tab that the address names; the first one otherwise."""
    asked = context.query.get("tab", "")
    return asked if any(asked == key for key, _ in names) else names[0][0]


def facts(pairs: Pairs, *, mono: Sequence[str] = ()) -> None:
    """Draw facts as names and values; those named in `mono` are ids or digests."""
    with ui.element("dl").classes("facts"):
        for name, value in pairs:
            fact(name, value, mono=name in mono)


@dataclass(frozen=True)
class Cell:
    """What a small table has in a cell: words, perhaps a link."""

    words: str
    target: str = ""
    tone: str = ""


def small_table(heads: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, title: str) -> None:
    """Draw a small table; its cells may be links. On a phone each row becomes a list of names and values."""
    with ui.element("div").classes("scroll"), ui.element("table").classes("small-table") as table:
        table.props["aria-label"] = title
        with ui.element("thead"), ui.element("tr"):
            for head in heads:
                TextTag("th", head).props("scope=col")
        with ui.element("tbody"):
            for row in rows:
                with ui.element("tr"):
                    for head, each in zip(heads, row, strict=True):
                        _cell(head, each if isinstance(each, Cell) else Cell(each))


def _cell(head: str, cell: Cell) -> None:
    if not cell.target:
        made: ui.element = TextTag("td", cell.words).classes(cell.tone)
    else:
        with ui.element("td").classes(cell.tone) as made:
            ui.link(cell.words, cell.target)
    made.props["data-head"] = head
