"""The search for pages and objects (Ctrl-K)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import events, ui

from falaj.apps.console.navigation import ENTRIES
from falaj.apps.console.page import PageContext
from falaj.errors import FalajError
from falaj.records.governance.objects import StoredObject
from falaj.records.tracking import ListedRun
from falaj.sdk.platform import Platform

SHOWN = 20
FEWEST_CHARACTERS = 2
"""Objects are searched from so many characters on."""

Href = Callable[..., str]


@dataclass(frozen=True)
class Hit:
    """Something that was found, and its address."""

    label: str
    kind: str
    target: str


def page_hits(words: str, href: Href, entries: Collection[str]) -> list[Hit]:
    """Return the pages whose name has `words`."""
    found = [each for each in ENTRIES if each.key in entries and words.lower() in each.label.lower()]
    return [Hit(each.label, "page", href() if each.key == "overview" else href(each.key)) for each in found]


def object_hits(
    found: Sequence[StoredObject], runs: Sequence[ListedRun], href: Href, segments: Collection[str]
) -> list[Hit]:
    """Return the objects that have a page; `segments` are the words that addresses of pages begin with."""
    hits = [Hit(run.name, "run", href("runs", run.id)) for run in runs if "runs" in segments]
    named = {run.id for run in runs}
    for each in found:
        place = _place(each)
        if place is not None and place[0] in segments and each.id not in named:
            query = {"experiment": str(each.id)} if each.kind == "experiment" else {}
            hits.append(Hit(each.name, each.kind.replace("_", " "), href(*place, **query)))
    return hits


def _place(found: StoredObject) -> tuple[str, ...] | None:
    """Return where the page of an object is, below its workspace; that of its lineage if it has no other."""
    name, _, version = found.name.partition("@")
    places: dict[str, tuple[str, ...]] = {
        "run": ("runs", found.id),
        "experiment": ("runs",),
        "job": ("jobs", found.id),
        "study": ("studies", found.id),
        "view": ("features", found.name),
        "dataset": ("training-sets", found.name),
        "model": ("models", found.name),
        "model_version": ("models", name, "versions", version),
        "endpoint": ("endpoints", found.name),
        "pipeline": ("pipelines", found.name),
    }
    return places.get(found.kind, ("lineage", found.id))


def search_objects(
    platform: Platform, words: str, workspace: str
) -> tuple[list[StoredObject], list[ListedRun]]:
    """Ask for the objects, and for the runs, which have names of their own."""
    found = platform.objects.search(words, workspace=workspace, limit=SHOWN)
    quoted = words.replace("\\", "").replace("'", "").replace("%", "")
    where = f"attributes.run_name ILIKE '%{quoted}%'"
    runs = platform.runs.list(where=where, workspace=workspace, limit=5).items if quoted else ()
    return [*found], [*runs]


def search_dialog(context: PageContext, *, entries: Collection[str], segments: Collection[str]) -> ui.dialog:
    """Return the dialog that searches; Enter opens the first hit, and Tab goes through the others."""
    hits: list[Hit] = []

    async def search(event: events.ValueChangeEventArguments[Any]) -> None:
        words = str(event.value or "").strip()
        found = page_hits(words, context.href, entries)
        if len(words) >= FEWEST_CHARACTERS:
            try:
                objects, runs = await context.ask(lambda p: search_objects(p, words, context.workspace))
                found += object_hits(objects, runs, context.href, segments)
            except FalajError:  # pages are found all the same
                pass
        if words == str(field.value or "").strip():  # nothing was typed meanwhile
            hits[:] = found[:SHOWN]
            show()

    def show() -> None:
        results.clear()
        with results:
            if not hits:
                ui.label("Nothing was found.").classes("muted")
            for hit in hits:
                with ui.link(target=hit.target).classes("hit"):
                    ui.label(hit.label).classes("grow clip")
                    ui.label(hit.kind).classes("muted small")

    def open_first() -> None:
        if hits:
            ui.navigate.to(hits[0].target)

    with ui.dialog().props("position=top") as dialog, ui.card().classes("search-card"):
        field = ui.input(placeholder="Search pages and objects by name or id", on_change=search)
        field.props("autofocus outlined dense debounce=200 aria-label='Search'").classes("full")
        field.on("keydown.enter", open_first)
        results = ui.element("div").classes("hits").props("aria-live=polite")
    hits[:] = page_hits("", context.href, entries)
    show()
    return dialog
