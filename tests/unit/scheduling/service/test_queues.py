"""Queues: valid settings, current and past usage, and who may see and change them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from falaj.errors import Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.scheduling.accounting import Amounts, QueueSettings
from falaj.records.scheduling.snapshot import Queue, Quota

if TYPE_CHECKING:
    from conftest import SchedulingServices


def gpus(count: int) -> Quota:
    return Quota(gpus=count)


def faults(call: Callable[[], Any]) -> dict[str, str]:
    """Return the faults of a refused call: the field, and its message."""
    with pytest.raises(InvalidInput) as refused:
        call()
    return {fault.where: f"{fault.given} / {fault.allowed}" for fault in refused.value.faults}


# ------------------------------------------------------------------------------------------- setting


def test_the_default_queue_is_there_and_unbounded(services: SchedulingServices) -> None:
    shown = services.queues.show("default")

    assert shown.settings == QueueSettings(name="default")
    assert [each.name for each in services.queues.list().items] == ["default"]


def test_a_queue_is_set_and_shown(services: SchedulingServices) -> None:
    services.workspace("risk")
    services.queues.set("bank", quota=Quota(cpus=32, gpus=6))

    made = services.queues.set(
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
    assert services.queues.show("risk").settings == wanted
    assert services.queues.show("bank").children == ("risk",)


def test_setting_again_replaces_and_returns_the_previous_settings(services: SchedulingServices) -> None:
    services.queues.set("risk", quota=gpus(4), weight=3.0)

    changed = services.queues.set("risk", quota=gpus(2))

    assert changed.before == QueueSettings(name="risk", quota=gpus(4), weight=3.0, version=1)
    assert changed.queue == QueueSettings(name="risk", quota=gpus(2), version=2)
    assert services.jobs.changes == 2


def test_the_default_queue_can_be_set(services: SchedulingServices) -> None:
    services.queues.set("default", quota=gpus(1))

    with services.platform.database.read() as tx:
        found = services.accounts.queues(tx, now=services.clock())

    assert found == (Queue(name="default", quota=gpus(1)),)


def test_an_unknown_parent_is_refused(services: SchedulingServices) -> None:
    with pytest.raises(NotFound, match="no queue 'nowhere'"):
        services.queues.set("risk", parent="nowhere")


@pytest.mark.parametrize("middle", [False, True])
def test_a_cycle_is_refused(services: SchedulingServices, middle: bool) -> None:
    services.queues.set("a")
    services.queues.set("b", parent="a")
    if middle:
        services.queues.set("c", parent="b")

    refusals = faults(lambda: services.queues.set("a", parent="c" if middle else "b"))

    path = "a under c under b under a" if middle else "a under b under a"
    assert refusals == {"parent": f"{path} / a queue that is not below this one"}


def test_a_queue_under_itself_is_refused(services: SchedulingServices) -> None:
    services.queues.set("a")

    assert "parent" in faults(lambda: services.queues.set("a", parent="a"))


def test_a_limit_below_the_quota_is_refused(services: SchedulingServices) -> None:
    refusals = faults(
        lambda: services.queues.set("risk", quota=Quota(gpus=4, cpus=8), limit=Quota(gpus=3, cpus=8))
    )

    assert refusals == {"limit.gpus": "3, with a quota of 4 / at least the quota, 4"}


def test_a_limit_on_a_resource_without_a_quota_is_refused(services: SchedulingServices) -> None:
    refusals = faults(lambda: services.queues.set("risk", quota=gpus(4), limit=Quota(gpus=8, cpus=8)))

    assert list(refusals) == ["limit.cpus"]


def test_child_quotas_cannot_exceed_the_parent_quota(services: SchedulingServices) -> None:
    services.queues.set("bank", quota=gpus(8))
    services.queues.set("risk", quota=gpus(5), parent="bank")

    refusals = faults(lambda: services.queues.set("cards", quota=gpus(4), parent="bank"))

    assert refusals == {"quota.gpus": "4; total 9 (cards 4 + risk 5) / at most 3: bank has 8"}
    assert services.queues.set("cards", quota=gpus(3), parent="bank").queue is not None


@pytest.mark.slow
def test_a_parent_quota_cannot_shrink_below_its_children(services: SchedulingServices) -> None:
    services.queues.set("bank", quota=gpus(8))
    services.queues.set("risk", quota=gpus(5), parent="bank")

    refusals = faults(lambda: services.queues.set("bank", quota=gpus(4)))

    assert refusals == {"quota.gpus": "4 / at least 5, the total of its children"}


def test_a_queue_can_be_made_larger_where_it_is(services: SchedulingServices) -> None:
    services.queues.set("bank", quota=gpus(8))
    services.queues.set("risk", quota=gpus(5), parent="bank")

    assert services.queues.set("risk", quota=gpus(8), parent="bank").queue is not None


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
def test_invalid_settings_are_refused(light_services: SchedulingServices, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        light_services.queues.set("risk", **wrong)

    assert [each.name for each in light_services.queues.list().items] == ["default"]


def test_an_invalid_name_is_refused(light_services: SchedulingServices) -> None:
    with pytest.raises(InvalidInput):
        light_services.queues.set("Risk Team")


# ---------------------------------------------------------------------------------- concurrent changes


def test_the_second_change_based_on_one_version_conflicts(services: SchedulingServices) -> None:
    seen = services.queues.set("risk", quota=gpus(4)).queue
    assert seen is not None
    services.queues.set("risk", quota=gpus(5), version=seen.version)

    with pytest.raises(Conflict, match="at version 2, not 1"):
        services.queues.set("risk", quota=gpus(6), version=seen.version)

    assert services.queues.show("risk").settings.quota == gpus(5)


def test_concurrent_changes_do_not_exceed_the_parent_quota(services: SchedulingServices) -> None:
    services.queues.set("bank", quota=gpus(8))
    together = threading.Barrier(2)

    def add(name: str) -> FalajError | None:
        together.wait()
        try:
            services.queues.set(name, quota=gpus(5), parent="bank")
        except FalajError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        refused = [error for error in pool.map(add, ["risk", "cards"]) if error is not None]

    assert [type(error) for error in refused] == [InvalidInput]
    assert len(services.queues.show("bank").children) == 1


# ------------------------------------------------------------------------------------------- removing


def test_a_removed_queue_is_gone_and_its_settings_are_returned(services: SchedulingServices) -> None:
    services.queues.set("risk", quota=gpus(4), weight=2.0)

    removed = services.queues.remove("risk")

    assert removed.queue is None
    assert removed.before == QueueSettings(name="risk", quota=gpus(4), weight=2.0, version=1)
    with pytest.raises(NotFound):
        services.queues.show("risk")
    assert services.queues.set("risk").before is None


def test_the_default_queue_cannot_be_removed(services: SchedulingServices) -> None:
    with pytest.raises(Conflict, match="default cannot be removed"):
        services.queues.remove("default")


def test_a_queue_with_children_cannot_be_removed(services: SchedulingServices) -> None:
    services.queues.set("bank")
    services.queues.set("risk", parent="bank")

    with pytest.raises(Conflict, match="bank is the parent of risk"):
        services.queues.remove("bank")


@pytest.mark.slow
@pytest.mark.parametrize("unfinished", [(1, 0), (0, 2)])
def test_a_queue_with_jobs_cannot_be_removed(
    services: SchedulingServices, unfinished: tuple[int, int]
) -> None:
    services.queues.set("risk")
    services.jobs.unfinished["risk"] = unfinished

    with pytest.raises(
        Conflict, match=f"queue risk has {unfinished[0]} running and {unfinished[1]} waiting jobs"
    ):
        services.queues.remove("risk")


# --------------------------------------------------------------------------------------------- figures


def test_held_and_borrowed_resources_are_counted_up_the_tree(services: SchedulingServices) -> None:
    services.queues.set("bank", quota=gpus(4), limit=gpus(8))
    services.queues.set("risk", quota=gpus(2), limit=gpus(8), parent="bank")
    services.begin(services.submit(queue="risk", gpus=2, cpus=4, memory_bytes=1 << 30, replicas=2))
    services.begin(services.submit(queue="bank", gpus=1, gpu_milli=500))
    services.jobs.unfinished |= {"risk": (1, 3), "bank": (1, 1)}

    risk, bank = services.queues.show("risk"), services.queues.show("bank")

    assert risk.held == Amounts(cpus=8, gpus=4.0, memory_bytes=2 << 30)
    assert risk.borrowed == Amounts(gpus=2.0)
    assert (risk.running, risk.waiting) == (1, 3)
    assert risk.share == 4 / 8
    assert bank.held == Amounts(cpus=9, gpus=4.5, memory_bytes=2 << 30)
    assert bank.borrowed == Amounts(gpus=0.5)
    assert (bank.running, bank.waiting) == (2, 4)


def test_history_decays_by_half_lives(services: SchedulingServices) -> None:
    services.queues.set("risk", weight=2.0)
    services.ran(queue="risk", gpus=8, hours=7 * 24)

    just_now = services.queues.show("risk")
    services.clock.advance(timedelta(days=7))
    later = services.queues.show("risk")

    assert just_now.share == 0.0
    assert just_now.history == pytest.approx(0.5, abs=1e-12)
    assert just_now.score == pytest.approx(0.25, abs=1e-12)
    assert later.history == pytest.approx(0.25, abs=1e-12)


def test_running_attempts_count_over_time(services: SchedulingServices) -> None:
    services.queues.set("bank")
    services.queues.set("risk", parent="bank")
    services.begin(services.submit(queue="risk", gpus=4))
    services.clock.advance(timedelta(days=14))

    with services.platform.database.read() as tx:
        found = {each.name: each.history for each in services.accounts.queues(tx, now=services.clock())}

    assert found == pytest.approx({"risk": 0.5 * 0.75, "bank": 0.5 * 0.75, "default": 0.0}, abs=1e-12)


def test_kept_history_equals_the_sum_over_all_attempts(services: SchedulingServices) -> None:
    for hours in (3, 30, 300, 0.5):
        services.ran(gpus=2, cpus=16, hours=hours)
        services.clock.advance(timedelta(hours=hours / 2))
    kept = services.queues.show("default").history

    services.platform.sql("DELETE FROM scheduling_history")
    services.platform.sql(
        "INSERT INTO scheduling_history (queue, half_life_s, as_of, cpus, gpus, memory_bytes) "
        "VALUES ('default', 1, 0, 0, 0, 0)"
    )

    assert kept > 0.1
    assert services.queues.show("default").history == pytest.approx(kept, abs=1e-12)


def test_a_clock_that_goes_back_adds_no_usage(services: SchedulingServices) -> None:
    request = services.submit(gpus=1)
    services.begin(request)
    services.clock.advance(timedelta(hours=-2))

    services.end(request)

    assert services.usage.show().total.gpu_hours == 0.0
    assert services.queues.show("default").history == 0.0


# ---------------------------------------------------------------------------------------- permissions


def test_only_platform_operators_and_admins_may_set_queues(services: SchedulingServices) -> None:
    for number, role in enumerate((Role.OPERATOR, Role.ADMIN)):
        with services.acting(f"chief-{number}", role, workspace="platform"):
            assert services.queues.set(f"made-{number}").queue is not None
    for number, (role, where) in enumerate(
        [
            (Role.ADMIN, "default"),
            (Role.OPERATOR, "default"),
            (Role.DEVELOPER, "platform"),
            (Role.AUDITOR, "platform"),
        ]
    ):
        caller = services.join(f"other-{number}", role, workspace=where)
        with acting_as(caller), pytest.raises(Denied):
            services.queues.set("made")
        with (
            acting_as(caller),
            pytest.raises((Denied, NotFound)),
        ):  # as a stored object it is hidden from them
            services.queues.remove("made-0")
    assert {each.name for each in services.queues.list().items} == {"default", "made-0", "made-1"}


def test_members_of_a_workspace_see_queues_but_not_other_workspaces(
    services: SchedulingServices,
) -> None:
    services.workspace("risk")
    services.workspace("cards")
    services.queues.set("both", workspaces=("risk", "cards"))

    with services.acting("dana", Role.DEVELOPER, workspace="risk"):
        seen = services.queues.show("both")

    assert seen.settings.workspaces == ("risk",)
    assert seen.unseen == 1


def test_a_user_without_a_role_sees_no_queue(services: SchedulingServices) -> None:
    with services.acting("sam"):
        assert services.queues.list().items == ()
        with pytest.raises(NotFound):
            services.queues.show("default")


def test_queues_come_in_pages(services: SchedulingServices) -> None:
    for name in ("a", "b", "c"):
        services.queues.set(name)

    first = services.queues.list(limit=2)
    second = services.queues.list(limit=2, after=first.next or "")

    assert [each.name for each in (*first.items, *second.items)] == ["a", "b", "c", "default"]
    assert second.next is None


def test_only_the_named_workspaces_may_submit(services: SchedulingServices) -> None:
    risk, cards = services.workspace("risk"), services.workspace("cards")
    services.queues.set("risk", workspaces=("risk",))

    with services.platform.database.read() as tx:
        services.accounts.require_open(tx, "risk", risk)
        services.accounts.require_open(tx, "default", cards)
        with pytest.raises(Denied, match="workspace cards may not submit into queue risk"):
            services.accounts.require_open(tx, "risk", cards)
        with pytest.raises(NotFound, match="queue 'nowhere' does not exist; the queues are: default"):
            services.accounts.require_open(tx, "nowhere", cards)


def test_a_removed_workspace_is_still_shown_by_its_name(services: SchedulingServices) -> None:
    risk = services.workspace("risk")
    services.queues.set("risk", workspaces=("risk",))
    with services.platform.database.write() as tx:
        objects.delete(tx, risk, at=services.clock())

    removed = services.queues.remove("risk")

    assert removed.before is not None
    assert removed.before.workspaces == ("risk",)
