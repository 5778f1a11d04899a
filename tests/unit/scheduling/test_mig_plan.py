"""Layouts for the queue: what waits, what is idle, and who stands in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.mig import MigPlan
from falaj.records.scheduling.snapshot import Node, Placement, Request, RunningJob
from falaj.scheduling import node_from
from falaj.scheduling.mig.cards import MigCard, mig_cards
from falaj.scheduling.mig.plan import plan_layouts
from falaj.scheduling.mig.profiles import places
from falaj.scheduling.mig.render import mig_parted, sharing_configurations
from recorded_machines import machine
from recorded_nodes import DGX_H100, MIG_MIXED, MIG_SINGLE, TIME_SLICED
from workloads import NOON, job

HERE = Zone(name="local", jurisdiction="AE")


def seen(*recorded: dict[str, Any]) -> list[tuple[NodeFacts, Node]]:
    facts = [facts_of(each, KubernetesConfig()) for each in recorded]
    return [(each, node_from(each, zone=HERE)) for each in facts]


def asks(name: str, profile: str | None = None, gpus: int = 1, **other: Any) -> Request:
    return job(name, gpus=gpus, gpu=None if profile is None else {"gpu_profile": profile}, **other)


def holds(name: str, node: Node, *gpus: str) -> RunningJob:
    placed = Placement(replica=0, node=node.name, gpus=gpus)
    return RunningJob(request=asks(name), placements=(placed,), started_at=NOON)


def plan(
    machines: list[tuple[NodeFacts, Node]],
    *pending: Request,
    running: tuple[RunningJob, ...] = (),
    **recent: int,
) -> MigPlan:
    known = {name.replace("_", "."): count for name, count in recent.items()}
    return plan_layouts(mig_cards(machines, running), [node for _, node in machines], pending, known)


def layouts(cards: list[MigCard]) -> list[tuple[str, ...]]:
    return [card.slices for card in cards]


# ------------------------------------------------------------------------------------------- what is there


def test_the_cards_of_a_cluster_are_counted_from_its_slices() -> None:
    mixed, single = mig_cards(seen(MIG_MIXED), ()), mig_cards(seen(MIG_SINGLE), ())

    assert layouts(mixed) == [*[()] * 6, ("1g.10gb",) * 7, ("3g.40gb",) * 2]
    assert layouts(single) == [("1g.18gb",) * 7] * 2
    assert {card.geometry.name for card in (*mixed, *single)} == {"A100-80GB", "H200-141GB"}
    assert mig_cards(seen(TIME_SLICED), ()) == []


def test_the_cards_of_a_machine_are_those_of_its_driver(tmp_path: Path) -> None:
    (facts,) = machine("h200-mig", tmp_path).nodes()
    node = node_from(facts, zone=HERE)
    held = facts.cards[0].slices[0].id

    cards = mig_cards([(facts, node)], [holds("runs", node, held)])

    assert [card.index for card in cards] == [0, 1, 2, 3]
    assert cards[0].slices == ("1g.18gb",) * 7
    assert cards[0].free == {"1g.18gb": 6}
    assert [bool(card.jobs) for card in cards] == [True, False, False, False]
    assert (cards[2].slices, cards[2].free) == ((), {})  # in MIG mode, and without slices
    assert (cards[3].slices, cards[3].free) == ((), {None: 1})


# ----------------------------------------------------------------------------------------------- the plan


def test_one_card_is_cut_for_all_that_wait_and_filled_with_what_is_asked_for() -> None:
    waiting = [asks("a", "3g.40gb", age=3), asks("b", "1g.10gb", age=2), asks("c", "1g.10gb", age=1)]

    made = plan(seen(DGX_H100), *waiting)

    assert made.helped == ("a", "b", "c")
    assert [(each.node, each.now, each.then) for each in made.cards] == [
        ("dgx-01", (), ("1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "3g.40gb"))
    ]
    assert [(each.profile, each.waiting, each.free) for each in made.demand] == [
        (None, 0, 8),
        ("1g.10gb", 2, 0),
        ("3g.40gb", 1, 0),
    ]


def test_what_recent_jobs_used_fills_the_rest() -> None:
    made = plan(seen(DGX_H100), asks("a", "3g.40gb"), **{"2g_20gb": 40, "1g_10gb": 3})

    assert made.cards[0].then == ("2g.20gb", "2g.20gb", "3g.40gb")


def test_nothing_is_cut_for_jobs_that_have_free_slices() -> None:
    made = plan(seen(MIG_MIXED), *(asks(f"j{i}", "1g.10gb") for i in range(7)), asks("w", gpus=6))

    assert (made.cards, made.helped, made.unserved) == ((), (), ())


def test_a_card_that_is_cut_and_idle_is_made_whole_for_a_job_that_needs_it() -> None:
    made = plan(seen(MIG_SINGLE), asks("whole", gpus=1))

    assert made.helped == ("whole",)
    assert [each.then for each in made.cards] == [()]


def test_a_job_is_served_whole_or_not_at_all() -> None:
    many = asks("many", "1g.10gb", gpus=57, age=9)

    made = plan(seen(DGX_H100), many, asks("one", "7g.80gb", gpus=8))

    assert made.unserved == ("many",)
    assert made.helped == ("one",)
    assert len(made.cards) == 8


def test_running_jobs_stand_in_the_way_of_the_whole_node() -> None:
    machines = seen(DGX_H100)
    ((_, node),) = machines
    running = holds("runs", node, node.gpus[0].id)

    made = plan(machines, asks("waits", "1g.10gb"), asks("odd", "1g.5gb"), running=(running,))

    assert made.cards == ()
    assert set(made.unserved) == {"waits", "odd"}
    assert made.in_the_way == ("runs",)


def test_a_card_promised_to_a_job_that_needs_no_change_is_not_cut() -> None:
    made = plan(seen(DGX_H100), asks("first", gpus=8, age=5), asks("second", "1g.10gb"))

    assert (made.cards, made.unserved) == ((), ("second",))


def test_jobs_stay_where_their_data_may_be() -> None:
    made = plan(seen(DGX_H100), asks("abroad", "1g.10gb", only=("DE",)))

    assert (made.cards, made.unserved, made.in_the_way) == ((), ("abroad",), ())


def test_a_share_is_told_the_profile_that_would_hold_it() -> None:
    share = job("share", gpus=1, gpu={"gpu_milli": 300, "gpu_memory_bytes": 30 << 30})

    made = plan(seen(DGX_H100), share)

    assert [(each.job, each.profile) for each in made.shares] == [("share", "3g.40gb")]


# -------------------------------------------------------------------------------------------- as configured


def test_the_layouts_of_nodes_are_rendered_for_mig_parted() -> None:
    made = plan(seen(DGX_H100), asks("a", "3g.40gb", gpus=2))
    (name,) = made.configurations

    document = yaml.safe_load(yaml.safe_dump(mig_parted(made.configurations)))

    assert made.nodes == {"dgx-01": name}
    assert document["version"] == "v1"
    assert document["mig-configs"]["all-disabled"] == [{"devices": "all", "mig-enabled": False}]
    assert document["mig-configs"][name] == [
        {"devices": [0], "mig-enabled": True, "mig-devices": {"3g.40gb": 2}},
        {"devices": [1, 2, 3, 4, 5, 6, 7], "mig-enabled": False},
    ]
    assert plan(seen(DGX_H100), asks("b", "3g.40gb", gpus=2)).nodes == made.nodes


def test_every_layout_of_a_plan_is_possible() -> None:
    machines = seen(DGX_H100, MIG_MIXED)
    for profile in ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"):
        made = plan(machines, *(asks(f"{profile}-{i}", profile) for i in range(9)))

        geometry = mig_cards(machines, ())[0].geometry
        assert len(made.unserved) == 0
        assert all(each.now != each.then and places(each.then, geometry) for each in made.cards)


def test_shared_gpus_are_rendered_for_the_device_plugin() -> None:
    made = sharing_configurations()

    assert set(made) == {"whole"} | {f"{way}-{n}" for way in ("mps", "time-slicing") for n in (2, 4, 8)}
    assert "sharing" not in made["whole"]
    assert made["time-slicing-4"]["sharing"]["timeSlicing"]["resources"] == [
        {"name": "nvidia.com/gpu", "replicas": 4}
    ]
    assert made["mps-2"]["sharing"]["mps"]["resources"] == [{"name": "nvidia.com/gpu", "replicas": 2}]
