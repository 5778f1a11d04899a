"""What Kueue says about a Workload, as recorded from real ones, in sentences."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.drivers.kubernetes.workloads import workload_facts

NO_RESERVATION = ("Admitted", "False", "NoReservation", "The workload has no reservation")
ADMITTED = [
    ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue falaj-risk"),
    ("Admitted", "True", "Admitted", "The workload is admitted"),
]
PREEMPTION = (
    "Preempted to accommodate a workload (UID: 40399c9c-0000-4000-8000-000000000000, JobUID: x) due to "
    "prioritization in the ClusterQueue; preemptor path: /falaj/falaj-risk"
)
SHORT = "insufficient unused quota for nvidia.com/gpu in flavor falaj-gpu, 1 more needed"


def workload(*conditions: tuple[str, str, str, str], **other: Any) -> dict[str, Any]:
    named = [
        {"type": kind, "status": status, "reason": reason, "message": message}
        for kind, status, reason, message in conditions
    ]
    owner = {"kind": "Job", "name": "falaj-abc-1", "controller": True}
    status = {"conditions": named, **other.pop("status", {})}
    return {
        "metadata": {"name": "job-falaj-abc-1-0e015", "uid": "u-1", "ownerReferences": [owner]},
        "spec": {"queueName": "risk", "active": True, **other},
        "status": status,
    }


def reserved(reason: str, message: str) -> tuple[str, str, str, str]:
    return ("QuotaReserved", "False", reason, message)


@pytest.mark.parametrize(
    ("reason", "message", "sentence", "is_blocked"),
    [
        (
            "WaitingForQuota",
            f"couldn't assign flavors to pod set main: {SHORT}",
            f"Kueue waits for quota: {SHORT}",
            False,
        ),
        (
            "Pending",
            f"couldn't assign flavors to pod set node: {SHORT}",
            f"Kueue waits for quota: {SHORT}",
            False,
        ),
        (
            "ExceedsMaxQuota",
            "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor x, 3 > maximum capacity (1)",
            "Kueue has too little quota for it even when all is idle: insufficient quota for cpu in flavor x, "
            "3 > maximum capacity (1)",
            False,
        ),
        (
            "Suspended",
            "ClusterQueue risk is inactive",
            "Kueue cannot admit it: ClusterQueue risk is inactive",
            True,
        ),
        (
            "Misconfigured",
            "LocalQueue a doesn't exist",
            "Kueue cannot admit it: LocalQueue a doesn't exist",
            True,
        ),
        (
            "Inadmissible",
            "ClusterQueue a doesn't exist",
            "Kueue cannot admit it: ClusterQueue a doesn't exist",
            True,
        ),
    ],
)
def test_why_it_waits(reason: str, message: str, sentence: str, is_blocked: bool) -> None:
    facts = workload_facts(workload(reserved(reason, message), NO_RESERVATION))

    assert (facts.waits_for, facts.is_blocked, facts.is_admitted) == (sentence, is_blocked, False)
    assert (facts.owner, facts.queue, facts.evicted) == ("falaj-abc-1", "risk", None)


def test_a_new_workload_and_one_that_is_deactivated() -> None:
    over = ("Evicted", "True", "Deactivated", "The workload is deactivated by an administrator")

    assert workload_facts(workload()).waits_for == "Kueue has not considered it yet"
    assert workload_facts(workload(over, active=False)).waits_for == (
        "Kueue does not start it: its Workload job-falaj-abc-1-0e015 was deactivated: "
        "The workload is deactivated by an administrator"
    )


def test_admission_checks_and_a_pause_after_evictions_are_named() -> None:
    check = {"name": "provisioning", "state": "Pending", "message": "no nodes yet"}
    facts = workload_facts(workload(ADMITTED[0], status={"admissionChecks": [check]}))
    assert facts.waits_for == (
        "Kueue has reserved quota for it, and waits for the admission check provisioning (no nodes yet)"
    )

    state = {"count": 2, "requeueAt": "2026-11-16T12:00:00Z"}
    facts = workload_facts(workload(reserved("Pending", SHORT), status={"requeueState": state}))
    assert facts.waits_for is not None
    assert facts.waits_for.endswith("; after 2 evictions it is tried again at 2026-11-16T12:00:00Z")


def test_an_admitted_one_waits_for_nothing_and_a_preempted_one_names_the_preemptor() -> None:
    assert workload_facts(workload(*ADMITTED)).is_admitted

    evicted = ("Evicted", "True", "Preempted", PREEMPTION)
    preempted = ("Preempted", "True", "InClusterQueue", PREEMPTION)
    facts = workload_facts(workload(*ADMITTED, evicted, preempted))
    assert facts.is_preempted
    assert facts.preemptor == "40399c9c-0000-4000-8000-000000000000"
    assert facts.evicted == f"Kueue preempted it: {PREEMPTION}"

    again = ("Evicted", "False", "QuotaReserved", "Previously: Preempted")
    assert workload_facts(workload(*ADMITTED, again)).evicted is None


def test_an_eviction_for_another_reason_is_no_preemption() -> None:
    late = ("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout")

    facts = workload_facts(workload(*ADMITTED, late))

    assert (facts.evicted, facts.is_preempted) == ("Kueue evicted it: Exceeded the PodsReady timeout", False)
