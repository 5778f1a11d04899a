"""Budgets of workspaces: what counts against them, from when, and who may set them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from falaj.control.workflows.service import IntentQueue
from falaj.errors import Denied, InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.scheduling.accounting import BudgetTerms
from falaj.records.scheduling.snapshot import Budget
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.accounting.periods import period_at
from falaj.scheduling.service import Queues

if TYPE_CHECKING:
    from conftest import SchedulingServices

SINCE = datetime(2026, 1, 1, tzinfo=UTC)


def left(services: SchedulingServices) -> tuple[Budget, ...]:
    with services.platform.database.read() as tx:
        return services.accounts.budgets(tx, now=services.clock())


def test_used_and_remaining_amounts_are_exact(services: SchedulingServices) -> None:
    risk = services.workspace("risk")
    services.queues.set_budget("risk", gpu_hours=100, money=1000)
    services.ran("risk", gpus=2, cpus=4, hours=3, used={"gpu_energy_j": 7_200_000.0})
    services.ran("default", gpus=8, hours=1)

    (state,) = services.queues.budgets()

    # 2 GPUs at 12.5 and 4 CPUs at 0.5 for 3 hours, and 2 kWh at 0.25
    assert state.terms == BudgetTerms(workspace="risk", gpu_hours=100.0, money=1000.0, period="month")
    assert (state.used_gpu_hours, state.used_money) == (6.0, 81.5)
    assert (state.left_gpu_hours, state.left_money) == (94.0, 918.5)
    assert (state.since, state.until) == (
        datetime(2026, 3, 1, tzinfo=UTC),
        datetime(2026, 4, 1, tzinfo=UTC),
    )
    assert state.currency == "AED"
    assert left(services) == (Budget(workspace=risk, gpu_hours=94.0, money=918.5),)


def test_running_attempts_count_up_to_now(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.queues.set_budget("risk", gpu_hours=10)
    services.begin(services.submit("risk", gpus=4))
    services.clock.advance(timedelta(hours=3))

    (state,) = services.queues.budgets(workspace="risk")

    assert (state.used_gpu_hours, state.left_gpu_hours) == (12.0, -2.0)
    assert state.left_money is None


@pytest.mark.parametrize(
    ("period", "begins"),
    [("month", datetime(2026, 4, 1, tzinfo=UTC)), ("week", datetime(2026, 3, 16, tzinfo=UTC))],
)
def test_a_new_period_starts_at_zero_and_includes_its_share_of_running_attempts(
    services: SchedulingServices, period: Any, begins: datetime
) -> None:
    services.workspace("risk")
    services.queues.set_budget("risk", gpu_hours=100, period=period)
    services.ran("risk", gpus=1, hours=5)
    services.clock.now = begins - timedelta(hours=2)
    request = services.submit("risk", gpus=3)
    services.begin(request)
    services.clock.now = begins + timedelta(hours=4)

    (running,) = services.queues.budgets()
    services.end(request)
    (ended,) = services.queues.budgets()

    assert running.since == ended.since == begins
    assert running.used_gpu_hours == ended.used_gpu_hours == 12.0


def test_a_budget_without_period_counts_from_its_creation(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.ran("risk", gpus=1, hours=5)
    services.queues.set_budget("risk", gpu_hours=10, period="none")
    services.ran("risk", gpus=1, hours=40 * 24)

    (state,) = services.queues.budgets()
    raised = services.queues.set_budget("risk", gpu_hours=2000, period="none").budget

    assert state.until is None
    assert state.used_gpu_hours == 960.0
    assert raised is not None
    assert raised.left_gpu_hours == 1040.0


def test_setting_no_bound_removes_the_budget(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.queues.set_budget("risk", gpu_hours=10, period="week")

    gone = services.queues.set_budget("risk")

    assert gone.budget is None
    assert gone.before == BudgetTerms(workspace="risk", gpu_hours=10.0, period="week")
    assert services.queues.budgets() == ()
    assert left(services) == ()


def test_a_removed_workspace_has_no_budget(services: SchedulingServices) -> None:
    risk = services.workspace("risk")
    services.queues.set_budget("risk", gpu_hours=10)
    with services.platform.database.write() as tx:
        objects.delete(tx, risk, at=services.clock())

    assert services.queues.budgets() == ()
    assert left(services) == ()
    with pytest.raises(NotFound):
        services.queues.set_budget("risk", gpu_hours=20)


def test_money_needs_prices(light_services: SchedulingServices) -> None:
    gate = light_services.platform.parts.gate
    accounts = QueueAccounts(nodes=lambda: (), prices=None, half_life=timedelta(days=7))
    sealed = light_services.platform.parts.services.queues._sealed
    queues = Queues(
        gate, IntentQueue(), accounts=accounts, jobs=light_services.jobs, sealed=sealed, wanted=lambda: None
    )

    with pytest.raises(InvalidInput, match="money"):
        queues.set_budget("default", money=5)


@pytest.mark.parametrize(
    "wrong", [{"gpu_hours": -1}, {"money": float("inf")}, {"gpu_hours": 1, "period": "day"}]
)
def test_invalid_budgets_are_refused(light_services: SchedulingServices, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        light_services.queues.set_budget("default", **wrong)


def test_the_platform_itself_has_no_budget(light_services: SchedulingServices) -> None:
    with pytest.raises(InvalidInput, match="workspace"):
        light_services.queues.set_budget("platform", gpu_hours=1)


def test_a_workspace_does_not_set_its_own_budget_but_sees_it(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.workspace("cards")
    services.queues.set_budget("risk", gpu_hours=10)
    services.queues.set_budget("cards", gpu_hours=10)
    chief = services.join("dana", Role.ADMIN, workspace="risk")

    with acting_as(chief):
        with pytest.raises(Denied):
            services.queues.set_budget("risk", gpu_hours=1000)
        seen = services.queues.budgets()
        with pytest.raises(NotFound):
            services.queues.budgets(workspace="cards")

    assert [each.terms.workspace for each in seen] == ["risk"]


def test_periods_begin_in_utc() -> None:
    gulf = datetime.fromisoformat("2026-03-01T02:00:00+04:00")  # still February in UTC

    assert period_at("month", gulf, since=SINCE)[0] == datetime(2026, 2, 1, tzinfo=UTC)
    assert period_at("week", gulf, since=SINCE)[0] == datetime(2026, 2, 23, tzinfo=UTC)
    assert period_at("none", gulf, since=SINCE) == (SINCE, None)
    december = datetime(2026, 12, 31, 23, tzinfo=UTC)
    assert period_at("month", december, since=SINCE)[1] == datetime(2027, 1, 1, tzinfo=UTC)
