"""Webhooks: receivers of events, how far each has come, and what could not be delivered."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import BAD, GOOD, IDLE, empty_state, fact, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, draw_tabs, panel
from falaj.apps.console.pages.governance.tokens import show_secret
from falaj.apps.console.times import Times
from falaj.errors import Denied, NotFound
from falaj.records.governance.events import UndeliveredEvent, Webhook, WebhookState
from falaj.sdk.platform import Platform

TONES = {WebhookState.DELIVERING: GOOD, WebhookState.FAILING: BAD, WebhookState.PAUSED: IDLE}
FOLLOW_S = 2.0
"""Webhooks are loaded again at most this often while events are made and sent."""
COLUMNS = (
    TableColumn("type", "Event", "mono"),
    TableColumn("subject", "Of", "mono"),
    TableColumn("at", "At", "time"),
    TableColumn("attempts", "Attempts", "number"),
    TableColumn("error", "Error"),
)
ACTIONS = (
    "webhooks.create",
    "webhooks.test",
    "webhooks.pause",
    "webhooks.resume",
    "webhooks.rotate_secret",
    "webhooks.redeliver",
    "webhooks.remove",
)


@dataclass(frozen=True)
class WebhookRecords:
    webhook: Webhook
    undelivered: Sequence[UndeliveredEvent] = ()
    may: Collection[str] = ()


@dataclass(frozen=True)
class WebhookLine:
    id: str
    name: str
    state: str
    tone: str
    is_paused: bool
    facts: tuple[tuple[str, str], ...]
    undelivered: tuple[TableRow, ...]
    may: frozenset[str]


@dataclass(frozen=True)
class WebhooksView:
    webhooks: tuple[WebhookLine, ...]


def webhooks_view(records: Sequence[WebhookRecords], times: Times) -> WebhooksView:
    """Return what the page shows."""
    return WebhooksView(tuple(_line(each, times) for each in records))


def _line(records: WebhookRecords, times: Times) -> WebhookLine:
    found = records.webhook
    facts = {
        "URL": found.url,
        "Events": ", ".join(found.types),
        "Written as": str(found.written_as),
        "Delivered": f"{found.delivered:,}, last {times.moment(found.last_delivered_at)}",
        "Waiting": f"{found.waiting:,}",
        "Given up": f"{found.given_up:,}",
        "Error": found.error or "",
        "Next attempt": times.moment(found.next_attempt_at) if found.next_attempt_at else "",
    }
    return WebhookLine(
        found.id,
        found.name,
        str(found.state),
        TONES[found.state],
        found.state is WebhookState.PAUSED,
        tuple((name, value) for name, value in facts.items() if value),
        tuple(_undelivered(each, times) for each in records.undelivered),
        frozenset(records.may),
    )


def _undelivered(event: UndeliveredEvent, times: Times) -> TableRow:
    cells = {
        "type": event.type,
        "subject": event.subject,
        "at": times.moment(event.at),
        "attempts": str(event.attempts),
        "error": event.error,
    }
    return TableRow(event.event, cells)


# ------------------------------------------------------------------------------------------- drawing


def read_webhooks(p: Platform, here: str, actions: tuple[str, ...]) -> list[WebhookRecords]:
    """Ask for the webhooks, what each could not deliver, and what the person may do with it."""
    found = []
    for each in p.webhooks.list(workspace=here, limit=100).items:
        undelivered: Sequence[UndeliveredEvent] = ()
        may: Sequence[str] = ()
        with contextlib.suppress(Denied, NotFound):
            undelivered = p.webhooks.undelivered(each.id, limit=20).items if each.given_up else ()
            may = p.policies.allowed(actions, each.id)
        found.append(WebhookRecords(each, undelivered, may))
    return found


class WebhooksPage:
    """The open page."""

    def __init__(self, context: PageContext, may: Collection[str]) -> None:
        self.context, self.may = context, may

    async def load(self) -> WebhooksView:
        context = self.context
        return await context.ask(
            lambda p: webhooks_view(read_webhooks(p, context.workspace, ACTIONS), context.times)
        )

    async def refresh(self) -> None:
        await self.region.refresh()

    async def draw(self) -> None:
        draw_tabs(self.context, "webhooks")
        self.region = await self.context.region(
            self.load,
            self.show,
            events=("*",),  # each event may wait for a webhook
            objects=lambda view: [each.id for each in view.webhooks],
            gather_s=FOLLOW_S,
        )
        if "webhooks.create" in self.may:
            self._form()

    def show(self, view: WebhooksView) -> None:
        if not view.webhooks:
            empty_state(
                "No webhook receives events of this workspace.",
                command="falaj webhooks create NAME https://hooks.example.com/falaj",
                icon="webhook",
            )
        for line in view.webhooks:
            with panel(line.name):
                state_badge(line.state, tone=line.tone)
                with ui.element("dl").classes("facts"):
                    for name, value in line.facts:
                        fact(name, value)
                if line.undelivered:
                    data_table(COLUMNS, line.undelivered, title="Events that were given up")
                with ui.element("div").classes("toolbar spaced"):
                    self._buttons(line)

    def _buttons(self, line: WebhookLine) -> None:
        def button(label: str, action: str, call: object, done: str, confirm: str | None = None) -> None:
            action_button(
                self.context,
                label,
                action,
                call,  # type: ignore[arg-type]
                may=line.may,
                done=done,
                confirm=confirm,
                after=self.refresh,
            )

        button("Test", "webhooks.test", lambda p: p.webhooks.test(line.id), "A test event is on its way.")
        if line.is_paused:
            button(
                "Resume", "webhooks.resume", lambda p: p.webhooks.resume(line.id), "Events are sent again."
            )
        else:
            button(
                "Pause", "webhooks.pause", lambda p: p.webhooks.pause(line.id), "Events wait, for 30 days."
            )
        if line.undelivered:
            button(
                "Redeliver all",
                "webhooks.redeliver",
                lambda p: p.webhooks.redeliver(line.id),
                "They are sent once more.",
            )
        if "webhooks.rotate_secret" in line.may:
            rotate = ui.button("New secret", on_click=lambda: self._rotate(line))
            rotate.props("outline dense data-action=webhooks.rotate_secret")
        button(
            "Remove",
            "webhooks.remove",
            lambda p: p.webhooks.remove(line.id),
            "The webhook is removed.",
            f"Remove webhook {line.name}? What waits for it is not sent.",
        )

    async def _rotate(self, line: WebhookLine) -> None:
        rotated = await self.context.act(
            lambda p: p.webhooks.rotate_secret(line.id), done="Deliveries are signed with a new secret."
        )
        if rotated is not None and rotated.secret:
            show_secret(self.context, "The secret that signs deliveries", rotated.secret)

    def _form(self) -> None:
        context = self.context

        async def create() -> None:
            given = str(name.value or "").strip(), str(url.value or "").strip()
            wanted = tuple(str(types.value or "*").replace(",", " ").split()) or ("*",)
            made = await context.act(
                lambda p: p.webhooks.create(given[0], given[1], types=wanted, workspace=context.workspace),
                done="The webhook gets events from now on.",
            )
            if made is not None and made.secret:
                show_secret(context, "The secret that signs deliveries", made.secret)
                await self.refresh()

        with panel("New webhook"):
            with ui.element("div").classes("form"):
                name = ui.input("Name")
                url = ui.input("URL", placeholder="https://hooks.example.com/falaj")
                types = ui.input("Events", value="*", placeholder="jobs.*, models.promote")
                for field in (name, url, types):
                    field.props("outlined dense")
            button = ui.button("Create", on_click=create)
            button.props("unelevated dense data-action=webhooks.create").classes("spaced")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await WebhooksPage(context, await context.may()).draw()


PAGE = ConsolePage(
    "/w/{workspace}/governance/webhooks",
    "Webhooks",
    draw,
    entry=ENTRY,
    reads=("webhooks.list", "webhooks.undelivered"),
    actions=ACTIONS,
)
