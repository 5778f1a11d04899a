"""The audit log: search, and verification of the log as it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nicegui import ui

from falaj.apps.console.components.states import BAD, GOOD, empty_state, error_card, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, PLATFORM, draw_tabs, panel
from falaj.apps.console.times import Times
from falaj.errors import FalajError
from falaj.records.governance.audit import AuditEntry, LogCheck
from falaj.sdk.platform import Platform

ROWS = 100
OUTCOMES = {"": "Any outcome", "done": "done", "denied": "denied", "failed": "failed"}
SCOPES = {"here": "This workspace", "all": "The whole platform"}
COLUMNS = (
    TableColumn("seq", "Entry", "link"),
    TableColumn("at", "At", "time"),
    TableColumn("caller", "Caller"),
    TableColumn("action", "Action", "mono"),
    TableColumn("outcome", "Outcome", "state"),
    TableColumn("objects", "Objects", "mono"),
    TableColumn("rule", "Rule"),
)


@dataclass(frozen=True)
class AuditQuery:
    """What the address asks for."""

    caller: str = ""
    action: str = ""
    outcome: str = ""
    scope: str = "here"
    before: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> AuditQuery:
        outcome, scope, before = query.get("outcome", ""), query.get("scope", ""), query.get("before", "")
        return cls(
            query.get("caller", ""),
            query.get("action", ""),
            outcome if outcome in OUTCOMES else "",
            scope if scope in SCOPES else "here",
            before if before.isdecimal() and len(before) < 18 else "",
        )

    def fields(self) -> dict[str, str]:
        """Return the same as parts of an address."""
        return {
            "caller": self.caller,
            "action": self.action,
            "outcome": self.outcome,
            "scope": self.scope,
            "before": self.before,
        }


@dataclass(frozen=True)
class AuditView:
    rows: tuple[TableRow, ...]
    following: str | None


def audit_view(entries: Sequence[AuditEntry], *, following: str | None, times: Times, base: str) -> AuditView:
    """Return what the table shows; `base` is the address of the page of an entry, without its number."""
    return AuditView(tuple(_row(entry, times, base) for entry in entries), following)


def _row(entry: AuditEntry, times: Times, base: str) -> TableRow:
    counted = f" ×{entry.count:,}" if entry.count > 1 else ""
    cells = {
        "seq": str(entry.seq),
        "at": times.moment(entry.at),
        "caller": entry.caller,
        "action": entry.action + counted,
        "outcome": entry.outcome,
        "objects": ", ".join(entry.objects[:2]) + (" …" if len(entry.objects) > 2 else ""),
        "rule": entry.rule + (f" ({entry.error})" if entry.error else ""),
    }
    return TableRow(str(entry.seq), cells, f"{base}/{entry.seq}")


@dataclass(frozen=True)
class CheckView:
    """The verdict on the log."""

    tone: str
    word: str
    figures: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check_view(check: LogCheck) -> CheckView:
    """Return what is shown of a verification."""
    tail = f"; {check.unsigned_tail:,} at the end are not signed yet" if check.unsigned_tail else ""
    figures = f"{check.entries:,} entries under {check.heads:,} signed heads{tail}"
    word = "sound" if check.ok else "DAMAGED"
    return CheckView(GOOD if check.ok else BAD, word, figures, check.problems, check.notes)


# ------------------------------------------------------------------------------------------- drawing


class AuditPage:
    """The open page: the search, and the button that verifies."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.query = AuditQuery.of(context.query)

    async def load(self) -> AuditView:
        query, context = self.query, self.context

        def ask(p: Platform) -> AuditView:
            found = p.audit.list(
                workspace="platform" if query.scope == "all" else context.workspace,
                caller=query.caller or None,
                action=query.action or None,
                outcome=query.outcome or None,  # type: ignore[arg-type]
                before=int(query.before) if query.before else None,
                limit=ROWS,
            )
            base = context.href(ENTRY, "audit")
            return audit_view(found.items, following=found.next, times=context.times, base=base)

        return await context.ask(ask)

    async def change(self, **changes: str) -> None:
        """Show other entries, and put them into the address."""
        self.query = replace(self.query, **{"before": "", **changes})
        ui.navigate.history.push(self.context.href(ENTRY, "audit", **self.query.fields()))
        await self.region.refresh()

    async def draw(self) -> None:
        draw_tabs(self.context, "audit")
        with ui.element("div").classes("toolbar"):
            for field, label, example in (
                ("caller", "Caller", "owner"),
                ("action", "Action", "models.promote"),
            ):
                box = ui.input(label, value=getattr(self.query, field), placeholder=example)
                box.props("dense outlined clearable debounce=400").classes("chooser")
                box.on_value_change(
                    lambda event, field=field: self.change(**{field: str(event.value or "").strip()})
                )
            for field, options in (("outcome", OUTCOMES), ("scope", SCOPES)):
                chooser = ui.select(
                    options,
                    value=getattr(self.query, field),
                    on_change=lambda event, field=field: self.change(**{field: str(event.value)}),
                )
                chooser.props("dense outlined").classes("chooser").props["aria-label"] = field
        may = await self.context.may(PLATFORM)
        if "audit.verify" in may:
            with ui.element("div").classes("toolbar"):
                self.button = ui.button("Verify the log", icon="verified_user", on_click=self.verify)
                self.button.props("unelevated dense data-action=audit.verify")
                ui.label("Every entry is held against the signed heads and the witness.").classes(
                    "muted small"
                )
            self.verdict = ui.element("div")
        self.region = await self.context.region(self.load, self.show)

    def show(self, view: AuditView) -> None:
        if not view.rows:
            empty_state("No entry matches.", command="falaj audit list", icon="fact_check")
        else:
            data_table(COLUMNS, view.rows, title="Audit entries")
        with ui.element("div").classes("toolbar pager"):
            if self.query.before:
                ui.button("Newest entries", on_click=lambda: self.change()).props("flat dense")
            if view.following is not None:
                following = view.following
                ui.button("Older entries", on_click=lambda: self.change(before=following)).props("flat dense")

    async def verify(self) -> None:
        """Verify the log, and show the verdict."""
        self.button.disable()
        self.verdict.clear()
        with self.verdict:
            ui.label("Verifying …").classes("muted").props("role=status")
        try:
            found = check_view(await self.context.ask(lambda p: p.verify_audit()))
        except FalajError as error:
            self.verdict.clear()
            with self.verdict:
                error_card(error)
            return
        finally:
            self.button.enable()
        self.verdict.clear()
        with self.verdict, panel("Verdict").props("data-part=verdict role=status"):
            state_badge(found.word, tone=found.tone)
            ui.label(found.figures)
            for sentence in (*found.problems, *found.notes):
                ui.label(f"• {sentence}").classes("wrap")
            ui.label("Open an entry to see its inclusion proof, and that the log only grew since.").classes(
                "muted small"
            )


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await AuditPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/governance/audit",
    "Audit",
    draw,
    entry=ENTRY,
    reads=("audit.list",),
    actions=("audit.verify",),
)
