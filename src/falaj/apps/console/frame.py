"""What surrounds every page: header, navigation, the search for pages and objects, and the person's menu."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from nicegui import ui

from falaj.apps.console.components.search import search_dialog
from falaj.apps.console.navigation import ENTRIES, Entry
from falaj.apps.console.page import PageContext
from falaj.apps.console.sessions import ConsoleSession, SessionStore

THEMES = (
    ("auto", "brightness_auto", "As the system"),
    ("light", "light_mode", "Light"),
    ("dark", "dark_mode", "Dark"),
)
COLOURS = {
    False: {
        "primary": "#2d7f8f",
        "secondary": "#12343b",
        "accent": "#8a5a00",
        "dark": "#182b2a",
        "dark_page": "#10201f",
        "positive": "#1f6f4a",
        "negative": "#a3331f",
        "warning": "#8a5a00",
        "info": "#1d5fa8",
    },
    True: {
        "primary": "#6fc3d0",
        "secondary": "#e8efe9",
        "accent": "#f0c06a",
        "dark": "#182b2a",
        "dark_page": "#10201f",
        "positive": "#2f7d57",
        "negative": "#b5452f",
        "warning": "#8a5a00",
        "info": "#1d5fa8",
    },
}
ui.button.default_props("no-caps")


def draw_frame(
    context: PageContext,
    *,
    entries: Collection[str],
    segments: Collection[str],
    sessions: SessionStore,
    theme: str,
) -> ui.element:
    """Draw the frame; return the element that the page is drawn in.

    `entries` of the navigation have a page; addresses of pages begin with one of `segments`, below the workspace.
    """
    ui.on("visibility", lambda event: context.set_visible(event.args == "visible"))
    ui.dark_mode(context.is_dark)
    ui.colors(**COLOURS[context.is_dark])
    with ui.header(elevated=False).classes("top"):
        ui.link("Skip to content", "#content").classes("skip")
        drawer_button = (
            ui.button(icon="menu").props("flat dense round aria-label='Navigation'").classes("drawer-button")
        )
        with ui.link(target="/").classes("brand").props("aria-label='Falaj, overview'"):
            ui.label("Falaj")
        _workspace_picker(context)
        ui.element("div").classes("grow")
        dialog = search_dialog(context, entries=entries, segments=segments)
        with ui.button(icon="search", on_click=dialog.open).props(
            "flat dense id=search-button aria-label='Search (Ctrl-K)'"
        ):
            ui.label("Search").classes("wide-only")
            ui.label("Ctrl K").classes("key wide-only")
        _theme_menu(theme)
        _person_menu(context, sessions)
    drawer = ui.left_drawer(value=None, bordered=True).props("width=208 breakpoint=1023").classes("side")
    with drawer, ui.element("nav").props("aria-label='Pages'"):
        for entry in ENTRIES:
            if entry.key in entries:
                _navigation_link(context, entry)
    drawer_button.on_click(drawer.toggle)
    content = ui.element("main").props("id=content tabindex=-1").classes("page")
    ui.label().props("id=live-words role=status aria-live=polite").classes("unseen")
    return content


def _navigation_link(context: PageContext, entry: Entry) -> None:
    is_here = context.page.entry == entry.key
    target = context.href() if entry.key == "overview" else context.href(entry.key)
    with ui.link(target=target).classes("nav-link" + (" here" if is_here else "")) as link:
        ui.icon(entry.icon).props("aria-hidden=true")
        ui.label(entry.label)
    if is_here:
        link.props("aria-current=page")


def _workspace_picker(context: PageContext) -> None:
    if not context.workspaces:
        return
    with (
        ui.button(context.workspace, icon="workspaces")
        .props("flat dense no-caps aria-haspopup=menu")
        .classes("picker"),
        ui.menu(),
    ):
        for name in context.workspaces:
            target = (
                context.href(workspace=name)
                if context.page.entry == "overview"
                else context.href(context.page.entry, workspace=name)
            )
            ui.menu_item(name, on_click=partial(ui.navigate.to, target))


def _theme_menu(theme: str) -> None:
    icon = next((icon for name, icon, _ in THEMES if name == theme), THEMES[0][1])
    with (
        ui.button(icon=icon).props("flat dense round aria-label='Light or dark' aria-haspopup=menu"),
        ui.menu(),
    ):
        for name, _, label in THEMES:
            ui.menu_item(label, on_click=partial(ui.run_javascript, f"falajTheme('{name}')"))


def _person_menu(context: PageContext, sessions: SessionStore) -> None:
    session = context.session
    with (
        ui.button(icon="account_circle").props("flat dense round aria-label='You' aria-haspopup=menu"),
        ui.menu(),
    ):
        with ui.column().classes("person"):
            ui.label(session.person).classes("strong")
            roles = ", ".join(f"{grant.role} in {grant.workspace}" for grant in session.identity.grants)
            ui.label(roles or "no roles").classes("muted small")
            ui.label(f"Times in {context.times.name}").classes("muted small")
        ui.separator()
        ui.menu_item("Sessions", on_click=partial(_show_sessions, context, sessions))
        ui.menu_item("Sign out", on_click=lambda: ui.run_javascript("falajSignOut()"))


def _show_sessions(context: PageContext, sessions: SessionStore) -> None:
    """Show the sessions of this person; each can be ended."""
    with context.client.content, ui.dialog(value=True) as dialog, ui.card().classes("wide-card"):
        ui.label("Your sessions").classes("state-title").props("role=heading aria-level=2")
        for each in sessions.of_person(context.session):
            with ui.row().classes("session-row") as row:
                with ui.column().classes("grow tight"):
                    here = " (this one)" if each is context.session else ""
                    ui.label(f"{context.times.moment(each.began_at)}{here}").classes("strong")
                    ui.label(f"{each.address} · {each.browser}").classes("muted small clip")
                if each is not context.session:
                    ui.button("End", on_click=partial(_end, sessions, each, row)).props("flat dense")
        ui.button("Close", on_click=dialog.close).props("flat autofocus")


def _end(sessions: SessionStore, session: ConsoleSession, row: ui.row) -> None:
    sessions.end(session)
    row.delete()
