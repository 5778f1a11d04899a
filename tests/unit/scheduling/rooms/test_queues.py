"""Queues: what may be set, what they hold and have held, and who may see and change them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from falaj.drivers import sql
from falaj.errors import Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.scheduling.accounting import Amounts, QueueSettings
from falaj.records.scheduling.snapshot import Queue, Quota

if TYPE_CHECKING:
    from conftest import Ground


def gpus(count: int) -> Quota:
    return Quota(gpus=count)


def faults(call: Callable[[], Any]) -> dict[str, str]:
    """What was refused: where, and what is said about it."""
    with pytest.raises(InvalidInput) as refused:
        call()
    return {fault.where: f"{fault.given} / {fault.allowed}" for fault in refused.value.faults}


# ------------------------------------------------------------------------------------------- setting


def test_the_default_queue_is_there_and_unbounded(ground: Ground) -> None:
    shown = ground.queues.show("default")

    assert shown.settings == QueueSettings(name="default")
    assert [each.name for each in ground.queues.list().items] == ["default"]


def test_a_queue_is_set_and_shown(ground: Ground) -> None:
    ground.workspace("risk")
    ground.queues.set("bank", quota=Quota(cpus=32, gpus=6))

    made = ground.queues.set(
        "risk", quota=gpus(4), limit=gpus(6), parent="bank", weight=2.0, workspaces=("risk",)
    )

    wanted = QueueSettings(
        name="risk",
        quota=gpus(4),
        limit=gpus(6),
        parent="bank",
        weight=2.0,
        workspaces=("risk",),
        version=1,
    )
    assert made.queue == wanted
    assert made.before is None
    assert ground.queues.show("risk").settings == wanted
    assert ground.queues.show("bank").children == ("risk",)


def test_setting_again_replaces_and_says_what_was(ground: Ground) -> None:
    ground.queues.set("risk", quota=gpus(4), weight=3.0)

    changed = ground.queues.set("risk", quota=gpus(2))

    assert changed.before == QueueSettings(name="risk", quota=gpus(4), weight=3.0, version=1)
    assert changed.queue == QueueSettings(name="risk", quota=gpus(2), version=2)
    assert ground.jobs.changes == 2


def test_the_default_queue_can_be_set(ground: Ground) -> None:
    ground.queues.set("default", quota=gpus(1))

    with ground.platform.database.read() as tx:
        found = ground.accounts.queues(tx, now=ground.clock())

    assert found == (Queue(name="default", quota=gpus(1)),)


def test_an_unknown_parent_is_refused(ground: Ground) -> None:
    with pytest.raises(NotFound, match="no queue 'nowhere'"):
        ground.queues.set("risk", parent="nowhere")


@pytest.mark.parametrize("middle", [False, True])
def test_a_cycle_is_refused(ground: Ground, middle: bool) -> None:
    ground.queues.set("a")
    ground.queues.set("b", parent="a")
    if middle:
        ground.queues.set("c", parent="b")

    said = faults(lambda: ground.queues.set("a", parent="c" if middle else "b"))

    path = "a under c under b under a" if middle else "a under b under a"
    assert said == {"parent": f"{path} / a queue that is not below this one"}


def test_a_queue_under_itself_is_refused(ground: Ground) -> None:
    ground.queues.set("a")

    assert "parent" in faults(lambda: ground.queues.set("a", parent="a"))


def test_a_limit_below_the_quota_is_refused(ground: Ground) -> None:
    said = faults(lambda: ground.queues.set("risk", quota=Quota(gpus=4, cpus=8), limit=Quota(gpus=3, cpus=8)))

    assert said == {"limit.gpus": "3, with a quota of 4 / at least the quota, 4"}


def test_a_limit_on_what_has_no_quota_is_refused(ground: Ground) -> None:
    said = faults(lambda: ground.queues.set("risk", quota=gpus(4), limit=Quota(gpus=8, cpus=8)))

    assert list(said) == ["limit.cpus"]


def test_children_get_no_more_than_their_parent_has(ground: Ground) -> None:
    ground.queues.set("bank", quota=gpus(8))
    ground.queues.set("risk", quota=gpus(5), parent="bank")

    said = faults(lambda: ground.queues.set("cards", quota=gpus(4), parent="bank"))

    assert said == {"quota.gpus": "4; together 9 (cards 4 + risk 5) / at most 3: bank has 8"}
    assert ground.queues.set("cards", quota=gpus(3), parent="bank").queue is not None


def test_a_parent_keeps_what_its_children_have(ground: Ground) -> None:
    ground.queues.set("bank", quota=gpus(8))
    ground.queues.set("risk", quota=gpus(5), parent="bank")

    said = faults(lambda: ground.queues.set("bank", quota=gpus(4)))

    assert said == {"quota.gpus": "4 / at least 5, what its children have"}


def test_a_queue_can_be_made_larger_where_it_is(ground: Ground) -> None:
    ground.queues.set("bank", quota=gpus(8))
    ground.queues.set("risk", quota=gpus(5), parent="bank")

    assert ground.queues.set("risk", quota=gpus(8), parent="bank").queue is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0},
        {"weight": float("nan")},
        {"quota": {"gpus": -1}},
        {"quota": {"tpus": 1}},
        {"workspaces": ("../etc",)},
        {"version": -1},
    ],
)
def test_what_is_not_valid_is_refused(light_ground: Ground, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        light_ground.queues.set("risk", **wrong)

    assert [each.name for each in light_ground.queues.list().items] == ["default"]


def test_a_name_that_is_none_is_refused(light_ground: Ground) -> None:
    with pytest.raises(InvalidInput):
        light_ground.queues.set("Risk Team")


# --------------------------------------------------------------------------------------------- at once


def test_of_two_administrators_who_saw_the_same_one_is_told(ground: Ground) -> None:
    seen = ground.queues.set("risk", quota=gpus(4)).queue
    assert seen is not None
    ground.queues.set("risk", quota=gpus(5), version=seen.version)

    with pytest.raises(Conflict, match="at version 2, not 1"):
        ground.queues.set("risk", quota=gpus(6), version=seen.version)

    assert ground.queues.show("risk").settings.quota == gpus(5)


def test_two_administrators_at_once_do_not_share_out_more_than_there_is(ground: Ground) -> None:
    ground.queues.set("bank", quota=gpus(8))
    together = threading.Barrier(2)

    def add(name: str) -> FalajError | None:
        together.wait()
        try:
            ground.queues.set(name, quota=gpus(5), parent="bank")
        except FalajError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        refused = [error for error in pool.map(add, ["risk", "cards"]) if error is not None]

    assert [type(error) for error in refused] == [InvalidInput]
    assert len(ground.queues.show("bank").children) == 1


# ------------------------------------------------------------------------------------------- removing


def test_a_removed_queue_is_gone_and_its_settings_are_told(ground: Ground) -> None:
    ground.queues.set("risk", quota=gpus(4), weight=2.0)

    removed = ground.queues.remove("risk")

    assert removed.queue is None
    assert removed.before == QueueSettings(name="risk", quota=gpus(4), weight=2.0, version=1)
    with pytest.raises(NotFound):
        ground.queues.show("risk")
    assert ground.queues.set("risk").before is None


def test_the_default_queue_stays(ground: Ground) -> None:
    with pytest.raises(Conflict, match="default cannot be removed"):
        ground.queues.remove("default")


def test_a_queue_with_queues_below_it_stays(ground: Ground) -> None:
    ground.queues.set("bank")
    ground.queues.set("risk", parent="bank")

    with pytest.raises(Conflict, match="bank is the parent of risk"):
        ground.queues.remove("bank")


@pytest.mark.parametrize("unfinished", [(1, 0), (0, 2)])
def test_a_queue_with_jobs_stays(ground: Ground, unfinished: tuple[int, int]) -> None:
    ground.queues.set("risk")
    ground.jobs.unfinished["risk"] = unfinished

    with pytest.raises(Conflict, match=f"in queue risk {unfinished[0]} jobs run and {unfinished[1]} wait"):
        ground.queues.remove("risk")


# --------------------------------------------------------------------------------------------- figures


def test_what_is_held_and_borrowed_is_counted_up_the_tree(ground: Ground) -> None:
    ground.queues.set("bank", quota=gpus(4), limit=gpus(8))
    ground.queues.set("risk", quota=gpus(2), limit=gpus(8), parent="bank")
    ground.begin(ground.submit(queue="risk", gpus=2, cpus=4, memory_bytes=1 << 30, replicas=2))
    ground.begin(ground.submit(queue="bank", gpus=1, gpu_milli=500))
    ground.jobs.unfinished |= {"risk": (1, 3), "bank": (1, 1)}

    risk, bank = ground.queues.show("risk"), ground.queues.show("bank")

    assert risk.held == Amounts(cpus=8, gpus=4.0, memory_bytes=2 << 30)
    assert risk.borrowed == Amounts(gpus=2.0)
    assert (risk.running, risk.waiting) == (1, 3)
    assert risk.share == 4 / 8
    assert bank.held == Amounts(cpus=9, gpus=4.5, memory_bytes=2 << 30)
    assert bank.borrowed == Amounts(gpus=0.5)
    assert (bank.running, bank.waiting) == (2, 4)


def test_what_was_held_fades_by_half_lives(ground: Ground) -> None:
    ground.queues.set("risk", weight=2.0)
    ground.ran(queue="risk", gpus=8, hours=7 * 24)

    just_now = ground.queues.show("risk")
    ground.clock.advance(timedelta(days=7))
    later = ground.queues.show("risk")

    assert just_now.share == 0.0
    assert just_now.history == pytest.approx(0.5, abs=1e-12)
    assert just_now.score == pytest.approx(0.25, abs=1e-12)
    assert later.history == pytest.approx(0.25, abs=1e-12)


def test_what_runs_counts_as_it_goes_on(ground: Ground) -> None:
    ground.queues.set("bank")
    ground.queues.set("risk", parent="bank")
    ground.begin(ground.submit(queue="risk", gpus=4))
    ground.clock.advance(timedelta(days=14))

    with ground.platform.database.read() as tx:
        found = {each.name: each.history for each in ground.accounts.queues(tx, now=ground.clock())}

    assert found == pytest.approx({"risk": 0.5 * 0.75, "bank": 0.5 * 0.75, "default": 0.0}, abs=1e-12)


def test_kept_history_is_what_adding_up_every_attempt_gives(ground: Ground) -> None:
    for hours in (3, 30, 300, 0.5):
        ground.ran(gpus=2, cpus=16, hours=hours)
        ground.clock.advance(timedelta(hours=hours / 2))
    kept = ground.queues.show("default").history

    ground.platform.sql("DELETE FROM scheduling_history")
    ground.platform.sql(
        "INSERT INTO scheduling_history (queue, half_life_s, as_of, cpus, gpus, memory_bytes) "
        "VALUES ('default', 1, 0, 0, 0, 0)"
    )

    assert kept > 0.1
    assert ground.queues.show("default").history == pytest.approx(kept, abs=1e-12)


def test_a_clock_that_goes_back_makes_no_time(ground: Ground) -> None:
    request = ground.submit(gpus=1)
    ground.begin(request)
    ground.clock.advance(timedelta(hours=-2))

    ground.end(request)

    assert ground.usage.show().total.gpu_hours == 0.0
    assert ground.queues.show("default").history == 0.0


# ------------------------------------------------------------------------------------------------ who


def test_who_may_set_queues(ground: Ground) -> None:
    for number, role in enumerate((Role.OPERATOR, Role.ADMIN)):
        with ground.acting(f"chief-{number}", role, workspace="platform"):
            assert ground.queues.set(f"made-{number}").queue is not None
    for number, (role, where) in enumerate(
        [
            (Role.ADMIN, "default"),
            (Role.OPERATOR, "default"),
            (Role.DEVELOPER, "platform"),
            (Role.AUDITOR, "platform"),
        ]
    ):
        caller = ground.join(f"other-{number}", role, workspace=where)
        with acting_as(caller), pytest.raises(Denied):
            ground.queues.set("made")
        with (
            acting_as(caller),
            pytest.raises((Denied, NotFound)),
        ):  # as a stored object it is not theirs to see
            ground.queues.remove("made-0")
    assert {each.name for each in ground.queues.list().items} == {"default", "made-0", "made-1"}


def test_who_is_in_a_workspace_sees_the_queues_but_not_others_workspaces(ground: Ground) -> None:
    ground.workspace("risk")
    ground.workspace("cards")
    ground.queues.set("both", workspaces=("risk", "cards"))

    with ground.acting("dana", Role.DEVELOPER, workspace="risk"):
        seen = ground.queues.show("both")

    assert seen.settings.workspaces == ("risk",)
    assert seen.unseen == 1


def test_a_stranger_sees_no_queue(ground: Ground) -> None:
    with ground.acting("sam"):
        assert ground.queues.list().items == ()
        with pytest.raises(NotFound):
            ground.queues.show("default")


def test_queues_come_in_pages(ground: Ground) -> None:
    for name in ("a", "b", "c"):
        ground.queues.set(name)

    first = ground.queues.list(limit=2)
    second = ground.queues.list(limit=2, after=first.next or "")

    assert [each.name for each in (*first.items, *second.items)] == ["a", "b", "c", "default"]
    assert second.next is None


def test_only_the_named_workspaces_may_submit(ground: Ground) -> None:
    risk, cards = ground.workspace("risk"), ground.workspace("cards")
    ground.queues.set("risk", workspaces=("risk",))

    with ground.platform.database.read() as tx:
        ground.accounts.require_open(tx, "risk", risk)
        ground.accounts.require_open(tx, "default", cards)
        with pytest.raises(Denied, match="workspace cards may not submit into queue risk"):
            ground.accounts.require_open(tx, "risk", cards)
        with pytest.raises(NotFound, match="no queue 'nowhere'; there is default"):
            ground.accounts.require_open(tx, "nowhere", cards)


def test_a_removed_workspace_is_still_told_by_its_name(ground: Ground) -> None:
    risk = ground.workspace("risk")
    ground.queues.set("risk", workspaces=("risk",))
    with ground.platform.database.write() as tx:
        objects.delete(tx, risk, at=ground.clock())

    removed = ground.queues.remove("risk")

    assert removed.before is not None
    assert removed.before.workspaces == ("risk",)


def test_a_platform_from_before_queues_gets_its_default_one(ground: Ground) -> None:
    migration = next((Path(sql.__file__).parent / "migrations" / "versions").glob("0010_*.py"))
    spec = importlib.util.spec_from_file_location("queues_migration", migration)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ground.platform.sql("DELETE FROM governance_objects WHERE kind = 'queue'")
    with ground.platform.database.read() as tx:
        without = ground.accounts.queues(tx, now=ground.clock())

    ground.platform.sql(module._ADD_DEFAULT)

    assert without == (Queue(name="default"),)
    assert ground.queues.show("default").settings == QueueSettings(name="default")
