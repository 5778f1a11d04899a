"""Budgets of workspaces: what is used of them, and the form that sets one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import Times, number
from falaj.records.scheduling.accounting import BudgetState

PERIODS = {"month": "each month", "week": "each week", "none": "once, from now on"}


@dataclass(frozen=True)
class BudgetLine:
    """One amount of a budget: what is used of what, as words and as a share."""

    workspace: str
    words: str
    period: str
    share: float
    is_spent: bool


def budget_lines(budgets: Sequence[BudgetState], times: Times) -> tuple[BudgetLine, ...]:
    """Return a line for each amount that is bounded."""
    lines: list[BudgetLine] = []
    for each in budgets:
        terms = each.terms
        until = f" to {times.day(each.until)}" if each.until else ""
        period = f"{times.day(each.since)}{until}"
        amounts = (
            (each.used_gpu_hours, terms.gpu_hours, "GPU-hours"),
            (each.used_money, terms.money, each.currency or "money"),
        )
        for used, most, unit in amounts:
            if most is not None:
                share = used / most if most else 1.0
                words = f"{number(used)} of {number(most)} {unit}"
                lines.append(BudgetLine(terms.workspace, words, period, share, used >= most))
    return tuple(lines)


def draw_budgets(lines: Sequence[BudgetLine]) -> None:
    """Draw each amount as a bar."""
    if not lines:
        empty_state(
            "No workspace has a budget.",
            command="falaj queues set-budget WORKSPACE --gpu-hours 500",
            icon="savings",
        )
        return
    for line in lines:
        with ui.element("div").classes("line"), ui.column().classes("tight grow"):
            with ui.row().classes("full"):
                ui.label(line.workspace).classes("strong clip")
                ui.label(line.words).classes("mono small")
                if line.is_spent:
                    ui.label("spent: no job starts").classes("badge bad")
                ui.element("div").classes("grow")
                ui.label(line.period).classes("muted small")
            percent = round(100 * min(1.0, line.share))
            bar = ui.element("div").classes("gauge full")
            bar.props(
                f"role=progressbar aria-valuemin=0 aria-valuemax=100 aria-valuenow={percent} aria-label='used'"
            )
            with bar:
                ui.element("div").classes("gauge-fill").style(f"width: {percent}%")


def draw_budget_form(
    context: PageContext, may: Collection[str], after: Callable[[], Awaitable[None]]
) -> None:
    """Draw the button that sets a budget, for those who may."""
    if "queues.set_budget" not in may:
        return

    async def ask() -> None:
        with context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
            ui.label("Set a budget").classes("state-title")
            ui.label(
                "When it is spent no more jobs of the workspace start; running ones go on. No amount: no budget."
            )
            workspace = ui.select([*context.workspaces], value=context.workspace, label="Workspace")
            hours = ui.number("GPU-hours", min=0)
            money = ui.number("Money", min=0)
            period = ui.select(PERIODS, value="month", label="Period")
            for field in (workspace, hours, money, period):
                field.props("outlined dense").classes("full")
            with ui.row():
                ui.button("Set", on_click=lambda: dialog.submit(True)).props("unelevated")
                ui.button("Close", on_click=lambda: dialog.submit(False)).props("flat autofocus")
        agreed = await dialog
        given = str(workspace.value), hours.value, money.value, period.value
        dialog.delete()
        if agreed:
            await context.act(
                lambda p: p.queues.set_budget(given[0], gpu_hours=given[1], money=given[2], period=given[3]),
                done=f"The budget of {given[0]} is set.",
            )
            await after()

    ui.button("Set a budget", icon="savings", on_click=ask).props(
        "outline dense data-action=queues.set_budget"
    )
