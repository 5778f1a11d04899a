"""Costs by workspace, user, queue and job."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest

from console_records import HOSTILE, NOON
from falaj.apps.console.pages.costs import BARS, CostQuery, CostsView, costs_view
from falaj.apps.console.times import Times
from falaj.records.scheduling.accounting import By, UsageReport, UsageRow


def view(*lines: UsageRow, by: By = "workspace") -> CostsView:
    total = UsageRow(
        id="total",
        name="total",
        gpu_hours=sum(line.gpu_hours for line in lines),
        costs={"AED": 10.0, "USD": 2.5},
        attempts=7,
    )
    report = UsageReport(
        by=by, since=NOON - timedelta(days=7), until=NOON, lines=lines, total=total, left_out=3
    )
    return costs_view(report, (), times=Times(UTC), base="/w/default/jobs")


def test_the_address_is_what_was_chosen_and_nothing_else() -> None:
    assert CostQuery.of({"by": "job", "span": "30d", "scope": "here"}).fields() == {
        "by": "job",
        "span": "30d",
        "scope": "here",
    }
    assert CostQuery.of({"by": "'; drop", "span": "1000000d", "scope": "?"}) == CostQuery()


@pytest.mark.parametrize(("span", "days"), [("7d", 7), ("90d", 90)])
def test_a_span_begins_so_many_days_ago(span: str, days: int) -> None:
    assert CostQuery(span=span).since(NOON) == NOON - timedelta(days=days)
    assert CostQuery().since(NOON) is None


def test_each_unit_has_a_plot_with_the_largest_first() -> None:
    lines = [
        UsageRow(id=f"w{at}", name=f"team-{at}", gpu_hours=at, costs={"AED": 2.0 * at}) for at in range(20)
    ]

    shown = view(*lines)

    assert [(plot.name, plot.unit) for plot in shown.plots] == [("GPU-hours", "GPU-hours"), ("Money", "AED")]
    hours = shown.plots[0]
    assert len(hours.bars) == BARS
    assert (hours.bars[0].name, hours.bars[0].parts) == ("team-19", (19.0,))
    assert len(shown.rows) == 20


def test_two_currencies_are_not_added() -> None:
    shown = view(UsageRow(id="w", name="team", costs={"USD": 1.0, "AED": 3.67}))

    money = next(plot for plot in shown.plots if plot.name == "Money")
    assert (money.parts, money.bars[0].parts) == (("AED", "USD"), (3.67, 1.0))
    assert ("10 AED", "cost") in shown.totals
    assert ("2.5 USD", "cost") in shown.totals


def test_energy_that_was_not_measured_is_told_beside_it() -> None:
    shown = view(UsageRow(id="w", name="team", gpu_hours=5, energy_kwh=1.5, unmeasured_gpu_hours=2))

    assert shown.rows[0].cells["energy"] == "1.5"
    assert shown.rows[0].cells["unmeasured"] == "2 GPU-hours"
    assert ("not measured", "energy") in shown.totals


def test_jobs_lead_to_their_pages_and_hostile_names_stay_text() -> None:
    shown = view(UsageRow(id="job_1", name=HOSTILE, workspace="claims", cpu_hours=1), by="job")

    assert shown.columns[0].kind == "link"
    assert shown.rows[0].target == "/w/default/jobs/job_1"
    assert shown.rows[0].cells["name"] == f"claims/{HOSTILE}"
    assert view(UsageRow(id="w", name="team")).rows[0].target == ""
