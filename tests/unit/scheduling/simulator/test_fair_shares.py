"""The fair share of a queue, and how far its usage was from it."""

from __future__ import annotations

import pytest

from falaj.records.scheduling.snapshot import Queue
from falaj.scheduling.simulator import simulate
from falaj.scheduling.simulator.fair_shares import entitlements, jain, water_filling
from simulator_fixtures import machine, minutes, past, team, world_of


def test_jain_is_one_where_all_are_equal_and_one_nth_where_one_has_all() -> None:
    assert jain([0.3, 0.3, 0.3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([1, 0.5]) == pytest.approx(0.9)
    assert jain([]) == 1


def test_small_demands_are_met_and_the_rest_is_divided_by_weight() -> None:
    assert water_filling([(0.1, 1), (0.9, 1), (0.9, 2)], 1.0) == pytest.approx([0.1, 0.3, 0.6])
    assert water_filling([(0.2, 1), (0.3, 1)], 1.0) == pytest.approx([0.2, 0.3])
    assert water_filling([(0.0, 1), (1.0, 1)], 0.5) == pytest.approx([0, 0.5])


def test_the_whole_is_divided_down_the_tree() -> None:
    bank, lab = Queue(name="bank"), Queue(name="lab")
    below = {
        None: [bank, lab],
        "bank": [Queue(name="risk", parent="bank"), Queue(name="fraud", parent="bank")],
    }

    found = entitlements({"risk": 1.0, "fraud": 0.1, "lab": 1.0}, below)

    assert (found["risk"], found["fraud"], found["lab"]) == pytest.approx((0.4, 0.1, 0.5))


def test_a_queue_kept_out_for_an_hour_by_another_is_half_the_whole_short() -> None:
    """Two of equal weight on one GPU: the first holds it for an hour while the second waits."""
    jobs = [past("a", 0, 60, queue="risk"), past("b", 0, 60, queue="research")]

    found = simulate(jobs, world_of(machine(gpus=1), queues=[team("risk"), team("research")]))

    (due,) = found.fairness.queues
    assert (due.backlogged, due.entitled, due.held) == (minutes(60), pytest.approx(0.5), 0)
    assert found.fairness.largest_deviation == pytest.approx(0.5)


def test_equal_holdings_of_equal_queues_are_even() -> None:
    jobs = [past(f"{queue}-{i}", 0, 60, queue=queue) for queue in ("risk", "research") for i in range(3)]

    found = simulate(jobs, world_of(machine(gpus=2), queues=[team("risk", 1), team("research", 1)]))

    assert found.fairness.jain == pytest.approx(1)
    assert found.fairness.largest_deviation == pytest.approx(0)
    assert {due.queue: due.backlogged for due in found.fairness.queues} == {
        "risk": minutes(120),
        "research": minutes(120),
    }
