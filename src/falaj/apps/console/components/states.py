"""States of a page: an error in the platform's words, nothing to show yet, and what state a thing is in."""

from __future__ import annotations

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from falaj.errors import FalajError

GOOD, BUSY, WAITING, BAD, IDLE = "good", "busy", "waiting", "bad", "idle"
"""The tones of states; each has a colour and a sign of its own, so that colour is not needed to tell them apart."""

TONES = {
    "running": BUSY,
    "starting": BUSY,
    "succeeded": GOOD,
    "finished": GOOD,
    "complete": GOOD,
    "done": GOOD,
    "ready": GOOD,
    "ok": GOOD,
    "pending": WAITING,
    "queued": WAITING,
    "waiting": WAITING,
    "scheduled": WAITING,
    "failed": BAD,
    "error": BAD,
    "refused": BAD,
    "lost": BAD,
    "alert": BAD,
    "cancelled": IDLE,
    "killed": IDLE,
    "stopped": IDLE,
}
SIGNS = {
    GOOD: "check_circle",
    BUSY: "autorenew",
    WAITING: "schedule",
    BAD: "error",
    IDLE: "remove_circle_outline",
}


def error_card(error: FalajError) -> None:
    """Show an error: what happened, where, what was given, what is allowed, and the fix."""
    with ui.card().classes("state-card bad-card").props("flat bordered role=alert"):
        ui.label(error.message).classes("state-title")
        for fault in error.faults:
            rows = (
                ("where", fault.where),
                ("given", fault.given),
                ("allowed", fault.allowed),
                ("fix", fault.fix),
            )
            with ui.element("dl").classes("facts"):
                for name, value in rows:
                    if value is not None:
                        fact(name, str(value))
        ui.label(f"error {error.code}").classes("muted mono small")


def empty_state(sentence: str, *, command: str | None = None, icon: str = "inbox") -> ui.card:
    """Say that there is nothing yet, and the command that changes it. Buttons go inside: `with empty_state(…):`."""
    with ui.card().classes("state-card").props("flat bordered") as card:
        ui.icon(icon).classes("state-icon").props("aria-hidden=true")
        ui.label(sentence).classes("state-title")
        if command is not None:
            command_line(command)
    return card


def command_line(command: str) -> None:
    """Show a command to type, with a button that copies it."""
    with ui.row().classes("command"):
        ui.label(command).classes("mono")
        copy = ui.button(icon="content_copy", on_click=lambda: ui.clipboard.write(command))
        copy.props("flat dense round size=sm aria-label='Copy the command'")


def fact(name: str, value: str, *, mono: bool = False) -> None:
    """Show one fact, inside a `dl`."""
    TextTag("dt", name)
    TextTag("dd", value).classes("mono" if mono else "")


class TextTag(TextElement):
    """An element of any tag with a text, which is shown as it is written."""

    def __init__(self, tag: str, words: str) -> None:
        super().__init__(tag=tag, text=words)


def state_badge(state: str, *, tone: str | None = None) -> None:
    """Show a state as a word with a sign and a colour."""
    shown = tone or TONES.get(state, IDLE)
    with ui.element("span").classes(f"badge {shown}"):
        ui.icon(SIGNS[shown]).props("aria-hidden=true")
        ui.label(state)
