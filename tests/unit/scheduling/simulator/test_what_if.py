"""The same jobs under two configurations: effects of a change, and refused changes."""

from __future__ import annotations

import pytest

from falaj.errors import InvalidInput
from falaj.records.scheduling.simulation import Changes, MoreNodes, NewWeight, ResourceBound
from falaj.records.scheduling.snapshot import Price, Quota
from falaj.scheduling.simulator import apply_changes, what_if
from simulator_fixtures import machine, many, minutes, past, team, world_of

FOUR = world_of(machine(gpus=4), queues=[team("risk", 1), team("research", 1)])
RISK = [past(f"risk-{i}", 0, 60, queue="risk", waited=60 * i) for i in range(4)]


def gpus(queue: str, amount: int | None) -> ResourceBound:
    return ResourceBound(queue=queue, resource="gpus", amount=amount)


def test_a_doubled_quota_halves_the_wait_of_that_team_and_leaves_the_other_alone() -> None:
    jobs = [*RISK, past("other-0", 0, 60, queue="research"), past("other-1", 0, 60, queue="research")]

    found = what_if(jobs, FOUR, Changes(quotas=(gpus("risk", 2),)))

    teams = {team.queue: team for team in found.teams}
    assert teams["risk"].before.wait.mean == minutes((0 + 60 + 120 + 180) / 4)
    assert teams["risk"].after.wait.mean == minutes((0 + 0 + 60 + 60) / 4)
    assert teams["research"].before.wait == teams["research"].after.wait
    assert found.after.gpu_use > found.before.gpu_use
    assert found.changes == ("quota of risk: 1 GPU → 2 GPUs",)


def test_no_change_gives_no_difference() -> None:
    found = what_if(many(2, 50), world_of(machine(gpus=2)), Changes())

    assert found.before == found.after
    assert found.fairness_before == found.fairness_after
    assert all(team.before == team.after for team in found.teams)


def test_the_replay_is_compared_with_recorded_history() -> None:
    found = what_if(RISK, FOUR, Changes())

    assert found.observed is not None
    assert found.observed.wait == found.observed.simulated_wait
    assert any("validation:" in words for words in found.words)
    assert what_if([past("a", 0, 1)], world_of(), Changes()).observed is None


def test_more_nodes_shorten_waits_and_other_gpus_have_their_own_price() -> None:
    world = world_of(machine(gpus=1, model="T4")).model_copy(
        update={"price": Price(gpus={"T4": 1, "H200": 8})}
    )
    jobs = [past("a", 0, 60), past("b", 0, 60)]

    same = what_if(jobs, world, Changes(add_nodes=(MoreNodes(like="n1"),)))
    other = what_if(
        jobs, world, Changes(add_nodes=(MoreNodes(like="n1", gpu_model="H200"),), remove_nodes=("n1",))
    )

    assert (same.before.wait.mean, same.after.wait.mean) == (minutes(30), minutes(0))
    assert (same.before.cost, same.after.cost) == pytest.approx((2, 2))
    assert (other.after.wait.mean, other.after.cost) == (minutes(30), pytest.approx(16))
    assert other.changes == ("1 node more like n1, with GPUs of model H200", "without node n1")


def test_fewer_nodes_can_leave_jobs_that_never_start_and_the_summary_names_them() -> None:
    world = world_of(machine("n1", gpus=1), machine("n2", gpus=4))

    found = what_if([past("big", 0, 60, gpus=4)], world, Changes(remove_nodes=("n2",)))

    assert (found.before.never_started, found.after.never_started) == (0, 1)
    assert any("with the changes 1 job never started" in words for words in found.words)


def test_a_limit_that_was_the_quota_keeps_its_other_figures() -> None:
    world = world_of(queues=[team("risk").model_copy(update={"quota": Quota(cpus=8, gpus=2)})])

    (queue,) = apply_changes(
        world, Changes(limits=(gpus("risk", 6),), weights=(NewWeight(queue="risk", weight=3),))
    ).queues

    assert (queue.quota, queue.limit, queue.weight) == (Quota(cpus=8, gpus=2), Quota(cpus=8, gpus=6), 3)


def test_new_nodes_have_names_and_gpus_of_their_own() -> None:
    world = world_of(machine("n1", gpus=2))

    nodes = apply_changes(
        world, Changes(add_nodes=(MoreNodes(like="n1", count=2, gpus=3), MoreNodes(like="n1")))
    ).nodes

    assert [node.name for node in nodes] == ["n1", "n1-more-1", "n1-more-2", "n1-more-3"]
    assert [len(node.gpus) for node in nodes] == [2, 3, 3, 2]
    ids = [gpu.id for node in nodes for gpu in node.gpus]
    assert len(set(ids)) == len(ids)


def test_all_invalid_changes_are_named_at_once() -> None:
    wrong = Changes(
        quotas=(gpus("rsk", 1),),
        weights=(NewWeight(queue="nobody", weight=2),),
        add_nodes=(MoreNodes(like="n7"),),
        remove_nodes=("n8",),
    )

    with pytest.raises(InvalidInput) as refused:
        what_if(RISK, FOUR, wrong)

    given = [(fault.where, fault.given) for fault in refused.value.faults]
    assert given == [
        ("changes.quotas", "rsk"),
        ("changes.weights", "nobody"),
        ("changes.add_nodes", "n7"),
        ("changes.remove_nodes", "n8"),
    ]
    assert refused.value.faults[0].allowed == "a queue: research, risk"


def test_a_quota_beyond_the_limit_and_the_last_node_are_refused() -> None:
    world = world_of(queues=[team("risk", 1, limit=Quota(gpus=4))])

    with pytest.raises(InvalidInput, match=r"risk: limit\.gpus\n  given    4, with a quota of 8"):
        apply_changes(world, Changes(quotas=(gpus("risk", 8),)))
    with pytest.raises(InvalidInput, match="at least one node must remain"):
        apply_changes(world, Changes(remove_nodes=("n1",)))
    assert apply_changes(world, Changes(quotas=(gpus("risk", 8),), limits=(gpus("risk", 8),)))


def test_progress_goes_through_both_replays() -> None:
    reports: list[tuple[int, int]] = []

    what_if(RISK, FOUR, Changes(), progress=lambda done, of: reports.append((done, of)))

    assert reports == [(number, 8) for number in range(1, 9)]
