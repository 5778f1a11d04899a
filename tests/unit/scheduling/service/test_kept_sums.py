"""The stored sums of budgets and shares equal the sums over all attempts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from falaj.records.scheduling.snapshot import WHOLE_GPU, Budget
from falaj.scheduling.accounting.decayed_usage import HALF_LIVES_KEPT
from falaj.scheduling.tables import usage

if TYPE_CHECKING:
    from conftest import SchedulingServices

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "wait"]),
        st.integers(0, 3),
        st.floats(0.01, 400, allow_nan=False),
    ),
    min_size=5,
    max_size=25,
)
NEVER = datetime.max.replace(tzinfo=UTC)
FORGET_BUDGETS = "UPDATE scheduling_budgets SET counted_from = NULL"
FORGET_HISTORY = "UPDATE scheduling_history SET half_life_s = 1"


def left(services: SchedulingServices) -> Budget:
    with services.platform.database.read() as tx:
        (found,) = services.accounts.budgets(tx, now=services.clock())
    return found


def history(services: SchedulingServices) -> dict[str, float]:
    with services.platform.database.read() as tx:
        return {each.name: each.history for each in services.accounts.queues(tx, now=services.clock())}


def peak_share(services: SchedulingServices) -> float:
    """Return the largest share of GPUs held at once; these jobs use GPUs more than anything else."""
    rows = services.platform.rows(usage)
    held = [
        sum(row["gpus_milli"] for row in rows if row["started_at"] <= at and at < (row["ended_at"] or NEVER))
        for at in {row["started_at"] for row in rows}
    ]
    return max(held, default=0) / WHOLE_GPU / services.accounts.whole().gpus


@pytest.mark.parametrize("period", ["month", "week", "none"])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_kept_sums_equal_recomputed_sums_for_any_history(
    light_services: SchedulingServices, period: str, steps: list[tuple[str, int, float]]
) -> None:
    services = light_services
    services.queues.set_budget("default", gpu_hours=1000, money=5000, period=period)  # type: ignore[arg-type]
    running = []
    for what, which, hours in steps:
        if what == "begin":
            running.append(services.submit(gpus=1 + which, cpus=2))
            services.begin(running[-1])
        elif what == "end" and running:
            services.end(running.pop(which % len(running)), gpu_energy_j=1e6 * which)
        else:
            services.clock.advance(timedelta(hours=hours))
    kept, held = left(services), history(services)

    services.platform.sql(FORGET_BUDGETS)
    services.platform.sql(FORGET_HISTORY)

    added = left(services)
    assert kept.gpu_hours == pytest.approx(added.gpu_hours, abs=1e-6)
    assert kept.money == pytest.approx(added.money, abs=1e-6)
    left_out = peak_share(services) * 0.5**HALF_LIVES_KEPT  # an upper bound: older usage has decayed
    assert held == pytest.approx(history(services), abs=left_out + 1e-9)
    for request in running:
        services.end(request)


def test_a_new_half_life_applies_when_the_next_attempt_ends(services: SchedulingServices) -> None:
    services.ran(gpus=4, hours=100)
    services.ran(gpus=2, hours=10)
    services.accounts._half_life = timedelta(days=1)
    by_rows = history(services)

    services.ran(gpus=1, hours=0)

    assert history(services) == pytest.approx(by_rows, abs=1e-12)
    assert services.platform.rows_of("SELECT half_life_s FROM scheduling_history") == [86400.0]


def test_money_is_counted_in_the_current_currency(services: SchedulingServices) -> None:
    services.queues.set_budget("default", money=100)
    services.ran(gpus=1, hours=1)
    assert left(services).money == 87.0
    services.accounts._prices = services.accounts._prices.model_copy(update={"currency": "USD"})  # type: ignore[union-attr]

    services.ran(gpus=1, hours=2)

    assert left(services).money == 74.0


def test_a_budget_set_later_includes_earlier_usage(services: SchedulingServices) -> None:
    services.ran(gpus=1, hours=3)
    services.begin(services.submit(gpus=2))
    services.clock.advance(timedelta(hours=1))

    services.queues.set_budget("default", gpu_hours=10)

    assert left(services).gpu_hours == 5.0
