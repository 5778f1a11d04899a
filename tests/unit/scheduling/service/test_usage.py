"""Usage: exact hours, energy and cost, by dimension, by permission, and as a bill."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from falaj.errors import InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.scheduling.accounting import UsageRow
from falaj.scheduling.accounting import attempts
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.accounting.focus import COLUMNS, guarded
from falaj.scheduling.service import Usage

if TYPE_CHECKING:
    from conftest import SchedulingServices

MANDATORY = {  # of FOCUS 1.2
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
}


def bill(services: SchedulingServices, **span: Any) -> list[dict[str, str]]:
    text = b"".join(services.usage.export(**span)).decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


# --------------------------------------------------------------------------------------------------- usage


def test_hours_energy_and_cost_of_an_attempt(services: SchedulingServices) -> None:
    used = {"cpu_s": 5000.0, "cpu_energy_j": 1_800_000.0, "gpu_energy_j": 7_200_000.0}
    request = services.ran(gpus=2, cpus=4, hours=1.5, name="fitting", used=used)

    report = services.usage.show(by="job")

    (line,) = report.lines
    assert line == UsageRow(
        id=request.job,
        name="fitting",
        workspace="default",
        attempts=1,
        gpu_hours=3.0,
        cpu_hours=6.0,
        energy_kwh=2.5,
        costs={"AED": 1.5 * (2 * 12.5 + 4 * 0.5) + 2.5 * 0.25},
    )
    assert report.total.gpu_hours == 3.0
    assert (report.since, report.until) == (datetime(2026, 3, 1, tzinfo=UTC), services.clock())


def test_gpu_fractions_cost_their_fraction(services: SchedulingServices) -> None:
    services.ran(gpus=1, gpu_milli=250, hours=2)

    total = services.usage.show().total

    assert total.gpu_hours == 0.5
    assert total.costs == {"AED": 0.5 * 12.5 + 2 * 0.5}


def test_mig_slices_count_by_sevenths(services: SchedulingServices) -> None:
    services.ran(gpus=2, gpu_profile="3g.71gb", hours=1)

    total = services.usage.show().total

    assert total.gpu_hours == 0.856  # twice three sevenths, in thousandths as the scheduler counts them
    assert total.costs == {"AED": 0.856 * 12.5 + 0.5}


@pytest.mark.parametrize(("models", "price"), [((), 8.0), (("A100",), 8.0), (("NVIDIA H200", "A100"), 10.25)])
def test_the_price_is_that_of_the_model(
    services: SchedulingServices, models: tuple[str, ...], price: float
) -> None:
    request = services.submit(gpus=2)
    services.begin(request, models=models)
    services.clock.advance(timedelta(hours=1))
    services.end(request)

    assert services.usage.show().total.costs == {"AED": 2 * price + 0.5}


def test_unmeasured_energy_is_not_estimated(services: SchedulingServices) -> None:
    services.ran(gpus=2, cpus=4, hours=1)
    services.ran(gpus=1, cpus=1, hours=1, used={"gpu_energy_j": 3_600_000.0})

    total = services.usage.show().total

    assert total.energy_kwh == 1.0
    assert (total.unmeasured_gpu_hours, total.unmeasured_cpu_hours) == (2.0, 5.0)


def test_energy_is_unknown_when_nothing_was_measured(services: SchedulingServices) -> None:
    services.ran(gpus=1, hours=1)

    assert services.usage.show().total.energy_kwh is None


def test_an_attempt_without_gpus_has_no_energy_measurement(services: SchedulingServices) -> None:
    services.ran(gpus=0, cpus=1, hours=1, used={"gpu_energy_j": 0.0})

    assert services.usage.show().total.energy_kwh is None
    assert [(row["PricingUnit"], row["ChargeDescription"]) for row in bill(services)] == [
        ("CPU-Hours", "1 CPU")
    ]


def test_a_running_attempt_counts_up_to_now(services: SchedulingServices) -> None:
    services.begin(services.submit(gpus=2, cpus=2))
    services.clock.advance(timedelta(minutes=30))

    total = services.usage.show().total

    assert (total.attempts, total.running, total.gpu_hours, total.cpu_hours) == (1, 1, 1.0, 1.0)
    assert (total.unmeasured_gpu_hours, total.costs) == (1.0, {"AED": 12.5 + 0.5})


def test_only_usage_within_the_time_range_is_counted(services: SchedulingServices) -> None:
    begin = services.clock()
    services.ran(gpus=2, hours=10, used={"gpu_energy_j": 36_000_000.0})
    services.clock.advance(timedelta(hours=10))

    found = services.usage.show(since=begin + timedelta(hours=4), until=begin + timedelta(hours=9)).total
    before = services.usage.show(since=begin - timedelta(hours=4), until=begin).total
    whole = services.usage.show(since=begin, until=begin + timedelta(hours=10)).total

    assert (found.gpu_hours, found.energy_kwh) == (10.0, 5.0)
    assert before.attempts == 0
    assert (whole.attempts, whole.gpu_hours) == (1, 20.0)


def test_every_attempt_counts_and_is_ended_once(services: SchedulingServices) -> None:
    request = services.submit(gpus=1)
    for attempt, verdict in ((1, "preempted"), (2, "done")):
        services.begin(request, attempt=attempt)
        services.clock.advance(timedelta(hours=1))
        services.end(request, attempt=attempt, verdict=verdict)
        services.clock.advance(timedelta(hours=1))
        services.end(request, attempt=attempt, verdict="failed")

    (line,) = services.usage.show(by="job").lines

    assert (line.attempts, line.gpu_hours) == (2, 2.0)


def test_ending_an_attempt_that_never_began_is_ignored(services: SchedulingServices) -> None:
    services.end(services.submit(gpus=1))

    assert services.usage.show().total.attempts == 0


@pytest.mark.parametrize("by", ["user", "workspace", "queue"])
def test_usage_is_summed_by_the_chosen_dimension(services: SchedulingServices, by: Any) -> None:
    services.workspace("risk")
    services.queues.set("night")
    dana = services.join("dana", Role.DEVELOPER, workspace="risk")
    for hours in (1, 2):
        request = services.submit("risk", queue="night", gpus=1)
        services.begin(request, user=dana.id)
        services.clock.advance(timedelta(hours=hours))
        services.end(request)
    services.ran(gpus=8, hours=1)

    lines = services.usage.show(by=by).lines

    names = {"user": "dana", "workspace": "risk", "queue": "night"}
    assert [line.gpu_hours for line in lines] == [8.0, 3.0]
    assert lines[1].name == names[by]
    assert lines[1].attempts == 2


def test_lines_beyond_the_limit_are_in_the_total(services: SchedulingServices) -> None:
    for hours in (1, 3, 2):
        services.ran(gpus=1, hours=hours)

    report = services.usage.show(by="job", limit=2)

    assert [line.gpu_hours for line in report.lines] == [3.0, 2.0]
    assert (report.left_out, report.total.gpu_hours) == (1, 6.0)


def test_old_attempts_keep_their_prices_and_currency(services: SchedulingServices) -> None:
    services.ran(gpus=1, hours=1)
    dollars = services.accounts._prices.model_copy(update={"currency": "USD", "gpu_models": {}})  # type: ignore[union-attr]
    services.accounts._prices = dollars
    services.ran(gpus=1, hours=1)

    assert services.usage.show().total.costs == {"AED": 13.0, "USD": 8.5}


def test_without_prices_cost_is_unknown_rather_than_zero(light_services: SchedulingServices) -> None:
    light_services.accounts._prices = None
    light_services.ran(gpus=1, hours=1)

    assert light_services.usage.show().total.costs == {}
    assert {row["BillingCurrency"] for row in bill(light_services)} == {"XXX"}


def test_a_time_range_that_ends_before_it_begins_is_refused(light_services: SchedulingServices) -> None:
    now = light_services.clock()

    with pytest.raises(InvalidInput, match="since"):
        light_services.usage.show(since=now, until=now - timedelta(hours=1))
    with pytest.raises(InvalidInput):
        light_services.usage.show(since=datetime(2026, 3, 1))  # noqa: DTZ001 - that is what is wrong with it


# --------------------------------------------------------------------------------------------- permissions


def test_callers_see_only_workspaces_that_they_may_read(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.ran("risk", gpus=1, hours=1)
    services.ran("default", gpus=1, hours=2)
    dana = services.join("dana", Role.VIEWER, workspace="risk")

    with acting_as(dana):
        report = services.usage.show(by="queue")
        rows = bill(services)
        with pytest.raises(NotFound):
            services.usage.show(workspace="default")
    with services.acting("sam"):
        assert services.usage.show().total.attempts == 0
        assert bill(services) == []

    assert report.total.gpu_hours == 1.0
    assert {row["SubAccountName"] for row in rows} == {"risk"}


@pytest.mark.slow
def test_a_job_that_a_policy_hides_has_no_name_in_the_export(services: SchedulingServices) -> None:
    hidden, shown = (services.ran("default", gpus=1, hours=1, name=name) for name in ("merger", "churn"))
    text = f'forbid (principal, action == Action::"objects.show", resource == Job::"{hidden.job}");'
    services.platform.policies.publish("hides", text=text)
    dana = services.join("dana", Role.VIEWER)

    with acting_as(dana):
        names = {row["ResourceName"] for row in bill(services)}

    assert names == {hidden.job, "churn"}
    assert shown.job not in names


@pytest.mark.parametrize(("role", "attempts_seen"), [(Role.AUDITOR, 1), (Role.OPERATOR, 1), (Role.VIEWER, 0)])
def test_platform_operators_see_removed_workspaces(
    services: SchedulingServices, role: Role, attempts_seen: int
) -> None:
    risk = services.workspace("risk")
    services.ran("risk", gpus=1, hours=1)
    with services.platform.database.write() as tx:
        objects.delete(tx, risk, at=services.clock())

    with services.acting("dana", role, workspace="platform"):
        report = services.usage.show()

    assert report.total.attempts == attempts_seen
    assert [line.name for line in report.lines] == ["risk"][:attempts_seen]


def test_a_token_for_one_workspace_shows_that_one(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.ran("risk", gpus=1, hours=1)
    services.ran("default", gpus=1, hours=1)
    secret = services.platform.tokens.issue(purpose="bill", workspace="risk", actions=("usage.*",)).secret

    with acting_as(services.platform.caller_of(secret)):
        assert [line.name for line in services.usage.show().lines] == ["risk"]


# ------------------------------------------------------------------------------------------------ the bill


def test_the_bill_has_every_mandatory_column(services: SchedulingServices) -> None:
    assert set(COLUMNS) >= MANDATORY
    assert b"".join(services.usage.export()).decode().strip().split(",") == list(COLUMNS)


def test_an_attempt_has_a_bill_line_for_each_resource(services: SchedulingServices) -> None:
    request = services.ran(
        "default", gpus=2, cpus=4, hours=1.5, name="fitting", used={"gpu_energy_j": 7_200_000.0}
    )

    rows = {row["PricingUnit"]: row for row in bill(services)}

    gpu = rows["GPU-Hours"]
    assert (gpu["PricingQuantity"], gpu["ListUnitPrice"], gpu["BilledCost"]) == ("3", "12.5", "37.5")
    assert (gpu["ResourceId"], gpu["ResourceName"], gpu["SkuId"]) == (
        request.job,
        "fitting",
        "gpu:NVIDIA H200",
    )
    assert (gpu["ChargePeriodStart"], gpu["ChargePeriodEnd"]) == (
        "2026-03-11T12:00:00Z",
        "2026-03-11T13:30:00Z",
    )
    assert (gpu["BillingPeriodStart"], gpu["BillingPeriodEnd"]) == (
        "2026-03-01T00:00:00Z",
        "2026-04-01T00:00:00Z",
    )
    cpu, energy = rows["CPU-Hours"], rows["Kilowatt-Hours"]
    assert (cpu["ConsumedQuantity"], cpu["EffectiveCost"], cpu["BillingCurrency"]) == ("6", "3", "AED")
    assert (energy["ConsumedQuantity"], energy["ListCost"]) == ("2", "0.5")


@pytest.mark.slow
def test_the_bill_adds_up_to_the_shown_total(services: SchedulingServices) -> None:
    services.ran(gpus=1, cpus=3, hours=1.7, used={"cpu_energy_j": 123_456.0})
    services.begin(services.submit(gpus=2))
    services.clock.advance(timedelta(minutes=7))

    shown = services.usage.show().total.costs["AED"]

    assert sum(float(row["BilledCost"]) for row in bill(services)) == pytest.approx(shown, abs=1e-9)


def test_a_charge_is_split_where_a_month_begins(services: SchedulingServices) -> None:
    services.clock.now = datetime(2026, 3, 31, 20, tzinfo=UTC)
    services.ran(gpus=1, hours=10)

    rows = [
        row
        for row in bill(services, since=datetime(2026, 3, 1, tzinfo=UTC))
        if row["PricingUnit"] == "GPU-Hours"
    ]

    assert [(row["BillingPeriodStart"][:7], row["PricingQuantity"]) for row in rows] == [
        ("2026-03", "4"),
        ("2026-04", "6"),
    ]


def test_pages_of_the_bill_leave_nothing_out(
    services: SchedulingServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PAGE", 2)
    together = [services.submit(gpus=1) for _ in range(5)]
    for request in together:
        services.begin(request)
    services.clock.advance(timedelta(hours=1))
    for request in together:
        services.end(request)

    rows = [row["ResourceId"] for row in bill(services) if row["PricingUnit"] == "GPU-Hours"]

    assert sorted(rows) == sorted(request.job for request in together)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_starts_a_spreadsheet_formula(light_services: SchedulingServices, sign: str) -> None:
    light_services.ran(gpus=1, hours=1, name=f'{sign}HYPERLINK("http://x")')

    (name,) = {row["ResourceName"] for row in bill(light_services)}

    assert name == f'\'{sign}HYPERLINK("http://x")'
    assert guarded("12.5") == "12.5"


# -------------------------------------------------------------------------------------------------- history


def test_history_returns_past_attempts_with_their_requests(services: SchedulingServices) -> None:
    begin = services.clock()
    first = services.ran(gpus=2, cpus=4, hours=1)
    second = services.submit(queue="default", cpus=2)
    services.begin(second)

    soon = services.clock() + timedelta(seconds=1)
    found = list(services.queues.history(since=begin, until=soon))
    none = list(services.queues.history(since=begin - timedelta(days=1), until=begin))

    assert [each.request for each in found] == [first, second]
    assert found[0].ended_at == begin + timedelta(hours=1)
    assert (found[1].ended_at, found[1].verdict) == (None, None)
    assert none == []


def test_history_as_of_a_time_excludes_later_changes(
    services: SchedulingServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when read page by page."""
    monkeypatch.setattr(attempts, "PAGE", 2)
    begin = services.clock()
    requests = [services.submit(gpus=1) for _ in range(5)]
    for request in requests[:4]:
        services.begin(request)
    services.clock.advance(timedelta(hours=1))
    moment = services.clock()
    before = list(services.queues.history(since=begin, until=moment, as_of=moment))
    services.clock.advance(timedelta(hours=1))
    services.end(requests[0], verdict="preempted")
    services.begin(requests[0], attempt=2)
    services.begin(requests[4])

    after = list(services.queues.history(since=begin, until=moment, as_of=moment))

    assert after == before
    assert {each.job for each in before} == {request.job for request in requests[:4]}
    assert len(list(services.queues.history(since=begin, until=moment))) == 6


def test_a_service_without_nodes_has_no_shares(light_services: SchedulingServices) -> None:
    accounts = QueueAccounts(nodes=lambda: (), prices=None, half_life=timedelta(days=1))
    usage = Usage(light_services.platform.parts.gate, accounts=accounts, jobs=light_services.jobs)
    light_services.ran(gpus=1, hours=1)

    with light_services.platform.database.read() as tx:
        assert [each.history for each in accounts.queues(tx, now=light_services.clock())] == [0.0]
    assert usage.show().total.gpu_hours == 1.0
