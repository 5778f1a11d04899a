"""Tokens: those that the person may see, with buttons that issue and revoke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import BAD, GOOD, IDLE, command_line, empty_state, state_badge
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, PLATFORM, draw_tabs, panel
from falaj.apps.console.pages.platform_events import follow_platform
from falaj.apps.console.times import Times
from falaj.records.governance.identity import Token
from falaj.records.record import utc_now
from falaj.sdk.platform import Platform

SHOWN = 200
DAYS = {1: "1 day", 7: "7 days", 30: "30 days", 90: "90 days", 365: "1 year"}


@dataclass(frozen=True)
class TokenLine:
    id: str
    principal: str
    purpose: str
    scope: str
    times: str
    state: str
    tone: str
    is_valid: bool


@dataclass(frozen=True)
class TokensView:
    """Valid tokens first, then the newest of those that are not."""

    lines: tuple[TokenLine, ...]
    valid: int
    left_out: int


def tokens_view(tokens: Sequence[Token], times: Times, *, now: datetime) -> TokensView:
    """Return what the page shows."""
    lines = [
        _line(each, times, now) for each in sorted(tokens, key=lambda each: each.created_at, reverse=True)
    ]
    ordered = sorted(lines, key=lambda line: not line.is_valid)
    return TokensView(
        tuple(ordered[:SHOWN]), sum(line.is_valid for line in lines), max(0, len(lines) - SHOWN)
    )


def _line(token: Token, times: Times, now: datetime) -> TokenLine:
    where = token.workspace or "every workspace"
    actions = (
        "all actions"
        if token.actions is None
        else f"{', '.join(token.actions[:4])}"
        + (f" and {len(token.actions) - 4} more" if len(token.actions) > 4 else "")
    )
    state, tone = ("valid", GOOD)
    if token.revoked_at is not None:
        state, tone = "revoked", IDLE
    elif token.expires_at <= now:
        state, tone = "expired", BAD
    return TokenLine(
        token.id,
        token.principal,
        token.purpose,
        f"{where}, {actions}",
        f"issued {times.moment(token.created_at)}, expires {times.moment(token.expires_at)}",
        state,
        tone,
        state == "valid",
    )


# ------------------------------------------------------------------------------------------- drawing


def read_tokens(p: Platform) -> list[Token]:
    """Ask for all tokens that the person may see, as far as they are shown."""
    found: list[Token] = []
    after = ""
    while len(found) < 5000:
        page = p.tokens.list(after=after, limit=1000)
        found += page.items
        if page.next is None:
            break
        after = page.next
    return found


class TokensPage:
    """The open page."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    async def load(self) -> TokensView:
        times = self.context.times
        return await self.context.ask(lambda p: tokens_view(read_tokens(p), times, now=utc_now()))

    async def draw(self) -> None:
        draw_tabs(self.context, "tokens")
        own = await self.context.may(str(self.context.session.identity.principal.id))
        others = await self.context.may(PLATFORM)
        self.may = own | others
        if "tokens.issue" in self.may:
            self._form(for_others="tokens.issue" in others)
        self.region = await self.context.region(self.load, self.show, events=("tokens.*", "users.*"))
        follow_platform(self.context, ("tokens.*", "users.*"), self.region)

    async def refresh(self) -> None:
        await self.region.refresh()

    def show(self, view: TokensView) -> None:
        with panel(f"Tokens ({view.valid} valid)"):
            if not view.lines:
                empty_state("There is no token.", command="falaj tokens issue --purpose NAME", icon="vpn_key")
            for line in view.lines:
                self._line(line)
            if view.left_out:
                ui.label(f"{view.left_out:,} more: falaj tokens list").classes("muted small")

    def _line(self, line: TokenLine) -> None:
        with ui.element("div").classes("line person-line").props("data-part=token"):
            with ui.column().classes("tight grow"):
                with ui.row():
                    ui.label(line.purpose or "(no purpose)").classes("strong wrap")
                    ui.label(line.principal).classes("wrap")
                    state_badge(line.state, tone=line.tone)
                ui.label(line.scope).classes("small wrap")
                ui.label(line.times).classes("muted small")
            if line.is_valid:
                action_button(
                    self.context,
                    "Revoke",
                    "tokens.revoke",
                    lambda p: p.tokens.revoke(line.id),
                    may=("tokens.revoke",),  # the list has those that the person may revoke, and no others
                    done="The token is refused from now on.",
                    confirm=f"Revoke the token {line.purpose!r} of {line.principal}? It is refused at once. "
                    "A limited one takes the tokens that it issued and the work that it started with it.",
                    after=self.refresh,
                )

    def _form(self, *, for_others: bool) -> None:
        context = self.context

        async def issue() -> None:
            said = str(purpose.value or "").strip()
            whom = (str(user.value or "").strip() or None) if user is not None else None
            where, length = scope.value or None, timedelta(days=int(days.value))
            only = tuple(part for part in str(actions.value or "").replace(",", " ").split() if part) or None
            issued = await context.act(
                lambda p: p.tokens.issue(
                    purpose=said, user=whom, workspace=where, actions=only, expires_in=length
                ),
                done="The token is issued.",
            )
            if issued is not None:
                purpose.value = ""
                show_secret(context, "The secret of the token", issued.secret)
                await self.refresh()

        with panel("Issue a token"):
            with ui.element("div").classes("form"):
                purpose = ui.input("Purpose", placeholder="CI of the churn model")
                user = ui.input("User (empty: you)") if for_others else None
                scope = ui.select(
                    {"": "every workspace", **{name: name for name in context.workspaces}}, value=""
                )
                scope.props["aria-label"] = "Workspace"
                actions = ui.input("Actions (empty: all)", placeholder="jobs.submit, runs.*")
                days = ui.select(DAYS, value=30, label="Expires in")
                for field in (purpose, *([user] if user is not None else []), scope, actions, days):
                    field.props("outlined dense")
            button = ui.button("Issue", icon="add", on_click=issue)
            button.props("unelevated dense data-action=tokens.issue").classes("spaced")


def show_secret(context: PageContext, title: str, secret: str) -> None:
    """Show a secret once, with a button that copies it."""
    with context.client.content, ui.dialog(value=True) as dialog, ui.card().classes("wide-card"):
        ui.label(title).classes("state-title")
        ui.label("It is shown this once: keep it where only its user can read it.")
        command_line(secret)
        ui.button("Close", on_click=dialog.close).props("flat")
    dialog.on("hide", dialog.delete)


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await TokensPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/governance/tokens",
    "Tokens",
    draw,
    entry=ENTRY,
    reads=("tokens.list",),
    actions=("tokens.issue", "tokens.revoke"),
)
