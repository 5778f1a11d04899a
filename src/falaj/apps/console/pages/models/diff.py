"""The difference of two versions of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import events, ui

from falaj.apps.console.components.sections import Cell, Crumb, heading, panel, small_table
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.models.catalogue import number_of
from falaj.apps.console.times import number
from falaj.records.models.cards import FactChange, VersionDiff

Changes = tuple[tuple[str, str, str], ...]
"""Name, before and after."""
SHOWN_LINES = 1000


@dataclass(frozen=True)
class DiffView:
    before: str
    after: str
    metrics: tuple[tuple[str, str, str, str], ...]
    sections: tuple[tuple[str, Changes], ...]
    """The parts that differ, each with its changes."""
    card: tuple[tuple[str, str], ...]
    """Lines of the card's difference, with their tone."""

    @property
    def is_equal(self) -> bool:
        return not self.sections and not self.card


def diff_view(found: VersionDiff) -> DiffView:
    """Return what the page shows."""
    parts = (
        ("Facts", found.facts),
        ("Inputs and outputs", found.signature),
        ("Parameters of the run", found.params),
        ("Packages", found.packages),
        ("Environment", found.environment),
        ("Files", found.files),
    )
    return DiffView(
        before=found.before,
        after=found.after,
        metrics=tuple(
            (
                each.name,
                number(each.before),
                number(each.after),
                "–" if each.difference is None else f"{each.difference:+.4g}",
            )
            for each in found.metrics
        ),
        sections=tuple((title, _changes(changes)) for title, changes in parts if changes),
        card=tuple((_tone(line), line) for line in found.card[:SHOWN_LINES]),
    )


def _changes(changes: Sequence[FactChange]) -> Changes:
    return tuple(
        (each.name, "–" if each.before is None else each.before, "–" if each.after is None else each.after)
        for each in changes
    )


def _tone(line: str) -> str:
    if line.startswith(("+++", "---", "@@")):
        return "muted"
    return {"+": "good", "-": "bad"}.get(line[:1], "")


# ------------------------------------------------------------------------------------------- drawing


async def load(context: PageContext, before: str, after: str) -> DiffView:
    """Ask the platform, and return what the page shows."""
    model = f"{context.workspace}/{context.params['model']}"
    return diff_view(await context.ask(lambda p: p.models.diff(f"{model}@{before}", f"{model}@{after}")))


def draw_view(context: PageContext, view: DiffView) -> None:
    with ui.element("div").classes("stack"):
        if view.metrics:
            with panel("Metrics"):
                rows = [
                    [Cell(name), *(Cell(each, tone="figure") for each in figures)]
                    for name, *figures in view.metrics
                ]
                small_table(("metric", view.before, view.after, "difference"), rows, title="Metrics")
        for title, changes in view.sections:
            with panel(title):
                small_table(("what", view.before, view.after), changes, title=title)
        if view.card:
            with panel("Card"), ui.element("div").classes("scroll mono"):
                for tone, line in view.card:
                    ui.label(line).classes(f"diff-line {tone}")
        if view.is_equal:
            empty_state(f"{view.before} and {view.after} do not differ.", icon="drag_handle")


async def draw(context: PageContext) -> None:
    """Draw the page; versions never change, so nothing is loaded again."""
    model = context.params["model"]
    above = [Crumb("Models", context.href("models")), Crumb(model, context.href("models", model))]
    heading("Difference of two versions", above=above)
    versions = await context.ask(
        lambda p: p.models.versions(f"{context.workspace}/{model}", limit=1000).items
    )
    numbers = [str(each.number) for each in versions]
    if len(numbers) < 2:
        empty_state(
            f"{model} has one version: there is nothing to compare.",
            command=f"falaj models register {model} --file model.onnx",
        )
        return
    before, after = context.query.get("before", numbers[1]), context.query.get("after", numbers[0])

    def choose(name: str, event: events.ValueChangeEventArguments[Any]) -> None:
        chosen = {"before": before, "after": after, name: number_of(str(event.value))}
        ui.navigate.to(context.href("models", model, "diff", **chosen))

    with ui.element("div").classes("toolbar"):
        for name, value in (("before", before), ("after", after)):
            field = ui.select(numbers, value=value if value in numbers else None, label=f"Version {name}")
            field.on_value_change(lambda event, name=name: choose(name, event))
            field.props("dense outlined").classes("chooser")
        ui.link("Swap", context.href("models", model, "diff", before=after, after=before)).classes("choice")

    async def loaded() -> DiffView:
        return await load(context, before, after)

    await context.region(loaded, lambda view: draw_view(context, view))


PAGE = ConsolePage(
    "/w/{workspace}/models/{model}/diff",
    "Difference of versions",
    draw,
    entry="models",
    reads=("models.versions", "models.diff"),
)
