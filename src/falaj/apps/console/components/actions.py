"""Buttons that perform operations: absent for those who may not, confirmed where it matters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from nicegui import ui

from falaj.apps.console.page import PageContext
from falaj.sdk.platform import Platform

T = TypeVar("T")


def action_button(
    context: PageContext,
    label: str,
    action: str,
    call: Callable[[Platform], T],
    *,
    may: Collection[str],
    done: str | Callable[[T], str],
    confirm: str | None = None,
    icon: str | None = None,
    after: Callable[[], Awaitable[None]] | None = None,
) -> ui.button | None:
    """Draw a button that performs `action`, if it is among those that the person `may`; none otherwise.

    `confirm` is a question that is asked first. `after` is called when it is done, like the `refresh` of a region.
    """
    if action not in may:
        return None

    async def press() -> None:
        if confirm is not None and not await ask_first(context, confirm, label):
            return
        button.disable()
        try:
            if await context.act(call, done=done) is not None and after is not None:
                await after()
        finally:
            button.enable()

    button = ui.button(label, icon=icon, on_click=press).props("outline dense")
    button.props["data-action"] = action
    return button


async def ask_first(context: PageContext, question: str, label: str) -> bool:
    """Ask whether to go on; the button that does is named `label`."""
    with context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
        ui.label(question).classes("state-title")
        with ui.row():
            ui.button(label, on_click=lambda: dialog.submit(True)).props("unelevated")
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat autofocus")
    answer = await dialog
    dialog.delete()
    return bool(answer)
