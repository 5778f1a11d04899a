"""Policies: those in force with their texts, and an explorer of who can do what."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import empty_state, error_card
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.components.texts import plain_text
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, draw_tabs, panel
from falaj.apps.console.times import Times
from falaj.errors import Denied, FalajError, NotFound
from falaj.records.governance.policy import AllowedPrincipal, Policy
from falaj.sdk.platform import Platform

WHO_COLUMNS = (
    TableColumn("principal", "Who"),
    TableColumn("kind", "Kind"),
    TableColumn("rule", "By which rule"),
)
EXAMPLE = """forbid (principal, action == Action::"blobs.read", resource)
when { resource.classes.contains("personal") }
unless { principal in resource.workspace.operator };"""


@dataclass(frozen=True)
class PolicyLine:
    """A policy in force."""

    id: str
    name: str
    where: str
    text: str


@dataclass(frozen=True)
class PoliciesView:
    policies: tuple[PolicyLine, ...]


@dataclass(frozen=True)
class WhoView:
    """Everyone who may perform an action on an object."""

    sentence: str
    rows: tuple[TableRow, ...]


def policies_view(policies: Sequence[Policy], times: Times) -> PoliciesView:
    """Return what is shown of policies."""
    return PoliciesView(
        tuple(
            PolicyLine(
                each.id,
                each.name,
                f"in {each.workspace}, version {each.version}, published {times.moment(each.published_at)}",
                each.text,
            )
            for each in policies
        )
    )


def who_view(found: Sequence[AllowedPrincipal], action: str, target: str) -> WhoView:
    """Return the answer of the explorer."""
    count = len(found)
    sentence = f"{count:,} {'principal' if count == 1 else 'principals'} may perform {action} on {target}."
    rows = (
        TableRow(each.principal, {"principal": each.principal, "kind": each.kind, "rule": each.rule})
        for each in found
    )
    return WhoView(sentence, tuple(rows))


def action_names(schema: dict[str, object]) -> list[str]:
    """Return all actions of the Cedar schema, by name."""
    names: set[str] = set()
    for namespace in schema.values():
        if isinstance(namespace, dict) and isinstance(namespace.get("actions"), dict):
            names |= {name for name in namespace["actions"] if "." in name}
    return sorted(names)


# ------------------------------------------------------------------------------------------- drawing


def read_policies(p: Platform, here: str) -> list[Policy]:
    """Ask for the policies of the workspace, and of the platform where the person may see them."""
    found = [*p.policies.list(workspace=here, limit=1000).items]
    with contextlib.suppress(Denied, NotFound):
        found += p.policies.list(workspace="platform", limit=1000).items
    return found


class WhoCan:
    """The explorer: an action, an object, and everyone who may."""

    def __init__(self, context: PageContext, actions: Sequence[str]) -> None:
        self.context, self.actions = context, actions

    async def draw(self) -> None:
        query = self.context.query
        given = query.get("action", "")
        with panel("Who can do what?").props("data-part=who-can"):
            with ui.element("div").classes("toolbar"):
                self.action = ui.select(
                    [*self.actions],
                    value=given if given in self.actions else None,
                    label="Action",
                    with_input=True,
                )
                self.action.props("dense outlined").classes("chooser")
                target = query.get("object", "") or f"workspace:{self.context.workspace}"
                self.target = ui.input(
                    "Object", value=target, placeholder="model:churn, job_01h… or workspace:NAME"
                )
                self.target.props("dense outlined").classes("grow filter")
                self.target.on("keydown.enter", self.ask)
                ui.button("Ask", on_click=self.ask).props("unelevated dense data-action=policies.who_can")
            self.answer = ui.element("div")
        if given in self.actions:
            await self.ask()

    async def ask(self) -> None:
        """Ask, put the question into the address, and show the answer."""
        action, target = self.action.value, str(self.target.value or "").strip()
        if not action or not target:
            ui.notify("Choose an action, and name an object.", type="warning")
            return
        if (action, target) != (self.context.query.get("action"), self.context.query.get("object")):
            ui.navigate.history.push(self.context.href(ENTRY, "policies", action=action, object=target))
        self.answer.clear()
        try:
            found = await self.context.ask(lambda p: p.policies.who_can(action, target))
        except FalajError as error:
            with self.answer:
                error_card(error)
            return
        view = who_view(found, action, target)
        with self.answer:
            ui.label(view.sentence).classes("strong wrap")
            if view.rows:
                data_table(WHO_COLUMNS, view.rows, title=view.sentence)


def draw_policies(context: PageContext, view: PoliciesView, may: Collection[str]) -> None:
    with panel(f"Policies in force ({len(view.policies)})"):
        if not view.policies:
            empty_state(
                "No policy was published: the built-in roles decide.",
                command="falaj policies publish NAME FILE.cedar",
                icon="policy",
            )
        for each in view.policies:
            with ui.element("div").classes("line"), ui.column().classes("tight grow"):
                with ui.row().classes("full"):
                    ui.label(each.name).classes("strong wrap")
                    ui.label(each.where).classes("muted small")
                    ui.element("div").classes("grow")
                    action_button(
                        context,
                        "Withdraw",
                        "policies.withdraw",
                        partial(_withdraw, each.id),
                        may=may,
                        done="The policy is out of force.",
                        confirm=f"Withdraw policy {each.name}? It is out of force at once; publish it again to undo.",
                    )
                plain_text(each.text, height_px=240)


def _withdraw(policy: str, p: Platform) -> Policy:
    return p.policies.withdraw(policy)


def draw_publish(context: PageContext, may: Collection[str]) -> None:
    """Draw the form that publishes a policy, for those who may."""
    if "policies.publish" not in may:
        return

    async def publish() -> None:
        given = str(name.value or "").strip(), str(text.value or "")
        await context.act(
            lambda p: p.policies.publish(given[0], text=given[1], workspace=context.workspace),
            done=lambda policy: f"{policy.name} is in force, version {policy.version}.",
        )

    async def check() -> None:
        given = str(text.value or "")
        await context.act(
            lambda p: p.policies.check(text=given),
            done=lambda found: f"It could be published: {found.rules} rules.",
        )

    with panel("Publish a policy"):
        ui.label("It holds in this workspace at once, and is checked against the schema first.").classes(
            "muted"
        )
        name = ui.input("Name").props("dense outlined").classes("chooser")
        text = (
            ui.textarea("Cedar", placeholder=EXAMPLE).props("outlined autogrow").classes("full mono spaced")
        )
        with ui.element("div").classes("toolbar spaced"):
            ui.button("Check", on_click=check).props("outline dense")
            ui.button("Publish", on_click=publish).props("unelevated dense data-action=policies.publish")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    draw_tabs(context, "policies")
    may = await context.may()
    if "policies.who_can" in may:
        schema = await context.ask(lambda p: p.policies.schema())
        await WhoCan(context, action_names(schema.cedar)).draw()

    async def load() -> PoliciesView:
        return policies_view(await context.ask(lambda p: read_policies(p, context.workspace)), context.times)

    await context.region(load, lambda view: draw_policies(context, view, may), events=("policies.*",))
    draw_publish(context, may)


PAGE = ConsolePage(
    "/w/{workspace}/governance/policies",
    "Policies",
    draw,
    entry=ENTRY,
    reads=("policies.list", "policies.schema"),
    actions=("policies.who_can", "policies.publish", "policies.withdraw"),
)
