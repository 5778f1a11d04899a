"""Users and service accounts, and the roles that they hold in this workspace."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import BAD, empty_state, state_badge
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, PLATFORM, draw_tabs, panel
from falaj.apps.console.pages.platform_events import follow_platform
from falaj.apps.console.times import Times
from falaj.errors import Denied, NotFound
from falaj.records.governance.identity import Grant, Principal, Role
from falaj.sdk.platform import Platform

SHOWN = 300


@dataclass(frozen=True)
class RoleMark:
    """A role in this workspace; `platform` ones hold everywhere, and are revoked there."""

    role: str
    is_platform: bool


@dataclass(frozen=True)
class PersonLine:
    id: str
    name: str
    kind: str
    since: str
    is_disabled: bool
    roles: tuple[RoleMark, ...]


@dataclass(frozen=True)
class PeopleView:
    users: tuple[PersonLine, ...]
    services: tuple[PersonLine, ...]
    groups: tuple[tuple[str, str], ...]
    """Groups that hold a role here, and which."""


def people_view(
    people: Sequence[Principal], grants: Sequence[Grant], platform: Sequence[Grant], times: Times
) -> PeopleView:
    """Return what the page shows; `grants` are those of the workspace."""
    roles: dict[str, list[RoleMark]] = {}
    for each in grants:
        roles.setdefault(each.subject, []).append(RoleMark(str(each.role), is_platform=False))
    for each in platform:
        roles.setdefault(each.subject, []).append(RoleMark(str(each.role), is_platform=True))
    lines = [_line(each, roles, times) for each in people]
    names = {each.name for each in people}
    return PeopleView(
        users=tuple(line for line in lines if line.kind == "user"),
        services=tuple(line for line in lines if line.kind == "service"),
        groups=tuple((each.subject, str(each.role)) for each in grants if each.subject not in names),
    )


def _line(person: Principal, roles: Mapping[str, Sequence[RoleMark]], times: Times) -> PersonLine:
    return PersonLine(
        person.id,
        person.name,
        person.kind,
        f"since {times.day(person.created_at)}",
        person.disabled,
        tuple(roles.get(person.name, ())),
    )


# ------------------------------------------------------------------------------------------- drawing


def read_people(p: Platform, here: str, times: Times) -> PeopleView:
    """Ask for everyone, and for the roles that the person may see."""
    grants: dict[str, Sequence[Grant]] = {}
    for workspace in (here, "platform"):
        with contextlib.suppress(Denied, NotFound):
            grants[workspace] = p.workspaces.roles(workspace)
    people = p.users.list(limit=1000).items
    return people_view(people, grants.get(here, ()), grants.get("platform", ()), times)


class PeoplePage:
    """The open page, and what its buttons may do."""

    def __init__(self, context: PageContext, may: Collection[str], may_here: Collection[str]) -> None:
        self.context, self.may, self.may_here = context, may, may_here

    async def load(self) -> PeopleView:
        context = self.context
        return await context.ask(lambda p: read_people(p, context.workspace, context.times))

    async def draw(self) -> None:
        draw_tabs(self.context, "people")
        self.region = await self.context.region(
            self.load, self.show, events=("users.*", "workspaces.*", "groups.*")
        )
        follow_platform(self.context, ("users.*", "workspaces.*", "groups.*"), self.region)
        if "users.create" in self.may:
            self._create_form()

    async def refresh(self) -> None:
        await self.region.refresh()

    def show(self, view: PeopleView) -> None:
        for title, lines, command in (
            ("Users", view.users, "falaj users create NAME"),
            ("Service accounts", view.services, "falaj users create NAME --kind service"),
        ):
            with panel(f"{title} ({len(lines)})"):
                if not lines:
                    empty_state("There is none.", command=command, icon="group")
                for line in lines[:SHOWN]:
                    self._line(line)
                if len(lines) > SHOWN:
                    ui.label(f"{len(lines) - SHOWN:,} more: falaj users list").classes("muted small")
        if view.groups:
            with panel("Groups with a role here"):
                for name, role in view.groups:
                    with ui.element("div").classes("line"):
                        ui.label(name).classes("grow wrap")
                        ui.label(role).classes("muted")

    def _line(self, line: PersonLine) -> None:
        context, here = self.context, self.context.workspace
        with ui.element("div").classes("line person-line"):
            with ui.column().classes("tight grow"):
                ui.label(line.name).classes("strong wrap")
                ui.label(line.since).classes("muted small")
            for mark in line.roles:
                with ui.element("span").classes("chip"):
                    ui.label(mark.role + (" (platform)" if mark.is_platform else "")).classes("small")
                    if not mark.is_platform and "workspaces.revoke" in self.may_here:
                        button = ui.button(icon="close").props("flat dense round size=xs")
                        button.props["aria-label"] = f"Revoke {mark.role} of {line.name}"
                        button.props["data-action"] = "workspaces.revoke"
                        button.on_click(lambda mark=mark: self._revoke(line.name, mark.role))
            if "workspaces.grant" in self.may_here:
                with (
                    ui.button("Grant", icon="add").props(
                        "flat dense aria-haspopup=menu data-action=workspaces.grant"
                    ),
                    ui.menu(),
                ):
                    for role in Role:
                        ui.menu_item(str(role), on_click=lambda role=role: self._grant(line.name, role))
            if line.is_disabled:
                state_badge("disabled", tone=BAD)
            action_button(
                context,
                "Enable" if line.is_disabled else "Disable",
                "users.enable" if line.is_disabled else "users.disable",
                (lambda p: p.users.enable(line.id))
                if line.is_disabled
                else (lambda p: p.users.disable(line.id)),
                may=self.may,
                done=f"{line.name} is {'enabled' if line.is_disabled else 'disabled'}.",
                confirm=None
                if line.is_disabled
                else f"Disable {line.name}? All its tokens are refused at once, also in {here}; enable it to undo.",
                after=self.refresh,
            )

    async def _grant(self, name: str, role: Role) -> None:
        here = self.context.workspace
        await self.context.act(
            lambda p: p.workspaces.grant(here, name, role=role), done=f"{name} is {role} in {here}."
        )
        await self.refresh()

    async def _revoke(self, name: str, role: str) -> None:
        here = self.context.workspace
        await self.context.act(
            lambda p: p.workspaces.revoke(here, name, role=Role(role)),
            done=f"{name} is no {role} in {here} any more.",
        )
        await self.refresh()

    def _create_form(self) -> None:
        async def create() -> None:
            given = str(name.value or "").strip(), kind.value
            if await self.context.act(
                lambda p: p.users.create(given[0], kind=given[1]),
                done=f"{given[0]} can do nothing until granted a role.",
            ):
                name.value = ""
                await self.refresh()

        with panel("New user or service account"), ui.element("div").classes("toolbar"):
            name = ui.input("Name").props("dense outlined").classes("chooser")
            kind = ui.select({"user": "User", "service": "Service account"}, value="user", label="Kind")
            kind.props("dense outlined").classes("chooser")
            ui.button("Create", on_click=create).props("unelevated dense data-action=users.create")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await PeoplePage(context, await context.may(PLATFORM), await context.may()).draw()


PAGE = ConsolePage(
    "/w/{workspace}/governance/people",
    "Users and services",
    draw,
    entry=ENTRY,
    reads=("users.list", "workspaces.roles"),
    actions=("users.create", "users.disable", "users.enable", "workspaces.grant", "workspaces.revoke"),
)
