"""The most that a workspace can hold, from the limits of the queues that it may use."""

from __future__ import annotations

from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling.store import StoredQueue
from falaj.scheduling.workspace_limits import workspace_limits

RISK, FRAUD = ObjectId("workspace_risk"), ObjectId("workspace_fraud")


def stored(queue: Queue, *workspaces: ObjectId) -> StoredQueue:
    return StoredQueue(ObjectId(f"queue_{queue.name}"), queue, workspaces, 1)


def test_a_queue_without_a_limit_bounds_nothing() -> None:
    bounded = stored(Queue(name="risk", quota=Quota(gpus=4)), RISK)

    assert workspace_limits(RISK, {"risk": bounded}) == Quota()  # the queue `default` is open to everyone


def test_limits_of_all_usable_queues_add_up_and_those_above_count() -> None:
    known = {
        "default": stored(Queue(name="default", quota=Quota(gpus=1, cpus=8))),
        "bank": stored(Queue(name="bank", quota=Quota(gpus=2), limit=Quota(gpus=3)), FRAUD),
        "risk": stored(Queue(name="risk", parent="bank", quota=Quota(gpus=2), limit=Quota(gpus=9)), RISK),
    }

    assert workspace_limits(RISK, known) == Quota(gpus=4)  # 1, and 3 of the queue above
    assert workspace_limits(FRAUD, known) == Quota(gpus=4)
