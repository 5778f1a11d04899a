"""Queues against their quotas, budgets, history, and what-if questions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from console_records import NOON, job, machine
from falaj.apps.console.charts.bars import Bar
from falaj.apps.console.pages.queues.budgets import budget_lines
from falaj.apps.console.pages.queues.queues import QueueRecords, QueuesView, queues_view, tree_order
from falaj.apps.console.pages.queues.what_if import ChangeLine, change_words, read_changes, what_if_view
from falaj.apps.console.times import Times
from falaj.errors import InvalidInput
from falaj.records.scheduling.accounting import (
    Amounts,
    BudgetState,
    BudgetTerms,
    PastAttempt,
    QueueSettings,
    QueueState,
)
from falaj.records.scheduling.simulation import (
    Fairness,
    SimulationFigures,
    TeamComparison,
    WaitTimes,
    WhatIfComparison,
)
from falaj.records.scheduling.snapshot import Quota, Request, Resources

TIMES = Times(UTC)


def queue(
    name: str, *, parent: str | None = None, children: tuple[str, ...] = (), **fields: object
) -> QueueState:
    settings = QueueSettings(name=name, parent=parent, quota=Quota(gpus=4, memory_bytes=8 << 30))
    return QueueState.model_validate({"settings": settings, "children": children, **fields})


def view(records: QueueRecords, *, times: Times = TIMES) -> QueuesView:
    return queues_view(records, times=times, base="/w/default/jobs", now=NOON)


def test_a_queue_that_borrows_is_two_parts_against_its_quota() -> None:
    risk = queue("risk", held=Amounts(gpus=6.5, cpus=8), borrowed=Amounts(gpus=2.5))

    found = view(QueueRecords([risk]))

    gpus = next(each for each in found.resources if each.name == "GPUs")
    assert gpus.bars == (Bar("risk", (4.0, 2.5), 4),)
    memory = next(each for each in found.resources if each.name == "Memory")
    assert (memory.unit, memory.bars[0].limit) == ("GiB", 8)
    assert (found.rows[0].cells["held"], found.rows[0].cells["borrowed"]) == ("6.5 GPUs, 8 CPUs", "2.5 GPUs")


def test_shares_are_percent_of_the_whole() -> None:
    found = view(QueueRecords([queue("risk", share=0.255, history=0.1)]))

    assert found.shares == (Bar("risk", (25.5, 10.0)),)


def test_queues_stand_behind_their_parents() -> None:
    queues = [queue("a", parent="z"), queue("b"), queue("z", children=("a",))]

    assert [(each.name, depth) for each, depth in tree_order(queues)] == [("b", 0), ("z", 0), ("a", 1)]


def test_a_child_whose_parent_is_not_seen_is_shown_all_the_same() -> None:
    assert [each.name for each, _ in tree_order([queue("a", parent="hidden")])] == ["a"]


def test_jobs_wait_in_the_order_of_their_turn() -> None:
    early = job("early", "queued", submitted_at=NOON - timedelta(hours=2))
    late = job("late", "queued", submitted_at=NOON)
    urgent = job("urgent", "queued", spec={"priority": 100_000})

    found = view(QueueRecords([queue("default")], waiting=[late, early, urgent]))

    assert [row.cells["name"] for row in found.waiting] == ["urgent", "early", "late"]
    assert found.waiting[0].cells["queue"] == "default, urgent"
    assert found.waiting[0].target == "/w/default/jobs/job_urgent"


def attempt(name: str, begin: datetime, end: datetime | None, *, gpus: int = 0) -> PastAttempt:
    resources = Resources(cpus=2, gpus=gpus)
    request = Request(job="job_1", queue=name, each=resources, replicas=2, submitted_at=begin)
    return PastAttempt(
        job="job_1", attempt=1, request=request, submitted_at=begin, started_at=begin, ended_at=end
    )


def test_history_divides_hours_at_midnight_of_the_person() -> None:
    dubai = Times(timezone(timedelta(hours=4)))
    past = [
        attempt(
            "risk", NOON - timedelta(hours=20), NOON - timedelta(hours=14), gpus=1
        ),  # 20:00 to 02:00 there
        attempt("research", NOON - timedelta(hours=1), None, gpus=2),
    ]

    history = view(QueueRecords([queue("risk")], past=past), times=dubai).history

    assert history is not None
    assert (history.unit, history.queues) == ("GPU-hours", ("research", "risk"))
    days = {bar.name: bar.parts for bar in history.bars}
    assert len(days) == 8
    assert days["2026-11-16"] == (0.0, 8.0)
    assert days["2026-11-17"] == (4.0, 4.0)


def test_history_without_gpus_counts_cpus() -> None:
    past = [attempt("risk", NOON - timedelta(hours=2), NOON)]

    history = view(QueueRecords([queue("risk")], past=past, machines=[machine("dgx")])).history

    assert history is not None
    assert (history.unit, history.bars[-1].parts) == ("CPU-hours", (8.0,))


def test_who_may_not_see_the_history_is_shown_none() -> None:
    assert view(QueueRecords([queue("risk")])).history is None


def test_a_budget_that_is_spent_says_so() -> None:
    terms = BudgetTerms(workspace="claims", gpu_hours=100, money=50)
    state = BudgetState(
        terms=terms, currency="AED", since=NOON - timedelta(days=16), used_gpu_hours=120, used_money=10
    )

    hours, money = budget_lines([state], TIMES)

    assert (hours.words, hours.is_spent) == ("120 of 100 GPU-hours", True)
    assert (money.words, money.share, money.is_spent) == ("10 of 50 AED", 0.2, False)


def test_a_budget_of_nothing_is_spent() -> None:
    state = BudgetState(terms=BudgetTerms(workspace="claims", gpu_hours=0), since=NOON)

    assert budget_lines([state], TIMES)[0].is_spent


def test_the_form_becomes_changes() -> None:
    changes = read_changes(
        [
            ChangeLine("quota", "risk", "gpus", 8),
            ChangeLine("limit", "risk", "memory_bytes", 1.5),
            ChangeLine("quota", "risk", "cpus", None),
            ChangeLine("weight", "research", amount=2.5),
            ChangeLine("add", "dgx-01", amount=3),
            ChangeLine("remove", "dgx-02"),
        ]
    )

    assert [(each.resource, each.amount) for each in changes.quotas] == [("gpus", 8), ("cpus", None)]
    assert changes.limits[0].amount == 3 << 29
    assert (changes.weights[0].weight, changes.add_nodes[0].count) == (2.5, 3)
    assert changes.remove_nodes == ("dgx-02",)


@pytest.mark.parametrize("line", [ChangeLine("weight", "risk"), ChangeLine("add", "dgx", amount=0)])
def test_a_change_without_its_figure_is_refused(line: ChangeLine) -> None:
    with pytest.raises(InvalidInput):
        read_changes([line])


def test_changes_as_words() -> None:
    assert change_words(ChangeLine("quota", "risk", "cpus")) == "quota of risk: no bound"
    assert change_words(ChangeLine("limit", "risk", "memory_bytes", 64)) == "limit of risk: 64 GiB of memory"


def figures(wait: timedelta, *, ended: int = 10) -> SimulationFigures:
    return SimulationFigures(jobs=10, ended=ended, wait=WaitTimes(mean=wait, p95=wait), gpu_use=0.5)


def test_a_comparison_shows_what_changed_and_what_did_not() -> None:
    before, after = figures(timedelta(minutes=30)), figures(timedelta(minutes=6), ended=9)
    found = WhatIfComparison(
        since=NOON - timedelta(days=7),
        until=NOON,
        jobs=10,
        changes=("quota of risk: 8 GPUs",),
        teams=(TeamComparison(queue="risk", before=before, after=after),),
        before=before,
        after=after,
        fairness_before=Fairness(jain=0.5),
        fairness_after=Fairness(jain=0.75),
    )

    shown = what_if_view(found, TIMES)

    risk = shown.rows[0].cells
    assert (risk["mean"], risk["gpu_use"]) == ("30m → 6m", "50.0%")
    assert risk["jobs"] == "10 of 10 ended → 9 of 10 ended"
    assert [bar.parts for bar in shown.waits] == [(30.0,), (6.0,)]
    assert shown.fairness == "0.500 → 0.750"
    assert shown.rows[-1].cells["queue"] == "all"
