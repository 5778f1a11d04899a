"""Groups, and who is in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, PLATFORM, draw_tabs, panel
from falaj.apps.console.pages.platform_events import follow_platform
from falaj.records.governance.identity import Group, Principal


@dataclass(frozen=True)
class GroupLine:
    id: str
    name: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class GroupsView:
    groups: tuple[GroupLine, ...]
    people: tuple[str, ...]


def groups_view(groups: Sequence[Group], people: Sequence[Principal]) -> GroupsView:
    """Return what the page shows."""
    return GroupsView(
        tuple(GroupLine(each.id, each.name, tuple(sorted(each.members))) for each in groups),
        tuple(sorted(each.name for each in people if not each.disabled)),
    )


# ------------------------------------------------------------------------------------------- drawing


class GroupsPage:
    """The open page, and what its buttons may do."""

    def __init__(self, context: PageContext, may: Collection[str]) -> None:
        self.context, self.may = context, may

    async def load(self) -> GroupsView:
        return await self.context.ask(
            lambda p: groups_view(p.groups.list(limit=1000).items, p.users.list(limit=1000).items)
        )

    async def draw(self) -> None:
        draw_tabs(self.context, "groups")
        self.region = await self.context.region(self.load, self.show, events=("groups.*", "users.*"))
        follow_platform(self.context, ("groups.*", "users.*"), self.region)
        if "groups.create" in self.may:
            with panel("New group"), ui.element("div").classes("toolbar"):
                self.name = ui.input("Name").props("dense outlined").classes("chooser")
                button = ui.button("Create", on_click=self._create)
                button.props("unelevated dense data-action=groups.create")

    def show(self, view: GroupsView) -> None:
        if not view.groups:
            empty_state("There is no group.", command="falaj groups create NAME", icon="groups")
        for group in view.groups:
            with panel(group.name):
                if not group.members:
                    ui.label("Nobody is in it.").classes("muted")
                for member in group.members:
                    with ui.element("div").classes("line"):
                        ui.label(member).classes("grow wrap")
                        if "groups.remove" in self.may:
                            button = ui.button(icon="close").props("flat dense round")
                            button.props["aria-label"] = f"Remove {member} from {group.name}"
                            button.props["data-action"] = "groups.remove"
                            button.on_click(lambda group=group, member=member: self._remove(group, member))
                if "groups.add" in self.may:
                    others = [name for name in view.people if name not in group.members]
                    chooser = ui.select(others, label="Add", with_input=True)
                    chooser.props("dense outlined data-action=groups.add").classes("chooser spaced")
                    chooser.on_value_change(lambda event, group=group: self._add(group, event.value))

    async def _create(self) -> None:
        name = str(self.name.value or "").strip()
        if await self.context.act(lambda p: p.groups.create(name), done=f"Group {name} is made."):
            self.name.value = ""
            await self.region.refresh()

    async def _add(self, group: GroupLine, member: str | None) -> None:
        if member:
            await self.context.act(
                lambda p: p.groups.add(group.id, member), done=f"{member} is in {group.name}."
            )
            await self.region.refresh()

    async def _remove(self, group: GroupLine, member: str) -> None:
        await self.context.act(
            lambda p: p.groups.remove(group.id, member), done=f"{member} is no longer in {group.name}."
        )
        await self.region.refresh()


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await GroupsPage(context, await context.may(PLATFORM)).draw()


PAGE = ConsolePage(
    "/w/{workspace}/governance/groups",
    "Groups",
    draw,
    entry=ENTRY,
    reads=("groups.list", "users.list"),
    actions=("groups.create", "groups.add", "groups.remove"),
)
