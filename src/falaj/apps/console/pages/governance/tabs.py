"""The parts of governance, as tabs with an address each, and the page that lists them."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.page import ConsolePage, PageContext

PLATFORM = "workspace:platform"
"""The platform itself, as an object that actions are allowed on."""
ENTRY = "governance"


@dataclass(frozen=True)
class GovernancePart:
    key: str
    label: str
    icon: str
    sentence: str


PARTS = (
    GovernancePart("audit", "Audit", "fact_check", "Who did what, when and by which rule, with proofs."),
    GovernancePart("residency", "Residency", "public", "Zones, where data lies, and refused attempts."),
    GovernancePart("policies", "Policies", "policy", "Rules in force, and who can do what."),
    GovernancePart("keys", "Keys", "key", "Data keys of workspaces, and the root key that wraps them."),
    GovernancePart("people", "Users and services", "group", "Users, service accounts and their roles."),
    GovernancePart("groups", "Groups", "groups", "Groups, and who is in them."),
    GovernancePart("tokens", "Tokens", "vpn_key", "Tokens that are valid, and new ones."),
    GovernancePart("webhooks", "Webhooks", "webhook", "Receivers of events."),
)


def draw_tabs(context: PageContext, here: str) -> None:
    """Draw the title and the tabs; `here` is the one that is shown."""
    ui.label("Governance").classes("title").props("role=heading aria-level=1")
    with ui.element("nav").classes("tabs").props("aria-label='Parts of governance'"):
        for part in PARTS:
            link = ui.link(part.label, context.href(ENTRY, part.key)).classes("tab")
            if part.key == here:
                link.classes("here").props("aria-current=page")


def panel(title: str) -> ui.element:
    """Return a panel with its heading."""
    found = ui.element("section").classes("panel spaced")
    with found:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return found


async def draw(context: PageContext) -> None:
    """Draw the list of parts."""
    draw_tabs(context, "")
    with ui.element("div").classes("columns"):
        for part in PARTS:
            with ui.link(target=context.href(ENTRY, part.key)).classes("box"):
                with ui.row():
                    ui.icon(part.icon).props("aria-hidden=true").classes("state-icon")
                    ui.label(part.label).classes("box-title")
                ui.label(part.sentence).classes("muted")


PAGE = ConsolePage("/w/{workspace}/governance", "Governance", draw, entry=ENTRY)
