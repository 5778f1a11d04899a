"""Admission to the queue, and refusals with the figures."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from falaj import scheduling
from falaj.errors import Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.names import ObjectId, new_id
from falaj.records.scheduling.snapshot import Gpu, Queue, Quota
from falaj.records.training.jobs import JobSpec, JobState
from falaj.training.admission import require_admissible
from falaj.training.queue import request_for
from job_harness import NODE, JobHarness
from platforms import make_platform

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SLICES = NODE.model_copy(
    update={
        "gpus": (
            *(
                Gpu(id=f"MIG-{each}", model="H200", memory_bytes=18 << 30, profile="1g.18gb")
                for each in range(2)
            ),
            *(Gpu(id=f"GPU-{each}", model="H200", memory_bytes=141 << 30, island=each) for each in range(2)),
        ),
        "labels": frozenset({"fast"}),
    }
)


@pytest.fixture
def harness(light_harness: JobHarness) -> JobHarness:
    light_harness.machine.node = SLICES
    return light_harness


@pytest.mark.parametrize(
    ("spec", "where", "allowed"),
    [
        ({"gpus": 1, "gpu_profile": "3g.71gb"}, "spec.gpu_profile", "1g.18gb"),
        ({"gpus": 3, "gpu_profile": "1g.18gb"}, "spec.gpus", "at most 2"),
        ({"gpus": 3}, "spec.gpus", "at most 2"),
        ({"gpus": 1, "gpu_models": ["B200"]}, "spec.gpu_models", "H200"),
        ({"gpus": 1, "gpu_milli": 500}, "spec.gpu_milli", "no node here shares"),
        ({"gpus": 1, "gpu_memory_bytes": 1 << 40}, "spec.gpu_memory_bytes", "at most 151397597184"),
        ({"affinity": {"pools": ["batch"]}}, "spec.affinity.pools", "default"),
        ({"affinity": {"labels": ["quiet"]}}, "spec.affinity.labels", "fast"),
    ],
)
def test_requests_beyond_every_node_are_refused(
    harness: JobHarness, spec: dict[str, Any], where: str, allowed: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        harness.submit(**spec)

    (fault,) = refused.value.faults
    assert fault.where == where
    assert allowed in (fault.allowed or "")


def test_requests_that_a_node_can_meet_are_admitted(harness: JobHarness) -> None:
    for spec in ({"gpus": 2, "gpu_profile": "1g.18gb"}, {"gpus": 2}, {"gpus": 1, "gpu_models": ["H200"]}):
        assert harness.submit(**spec).state is JobState.QUEUED


def test_two_gpus_without_nvlink_are_no_island(harness: JobHarness) -> None:
    with pytest.raises(InvalidInput, match="never start"):
        harness.submit(gpus=2, affinity={"island": "nvlink"})


@pytest.mark.parametrize(
    "spec",
    [
        {"gpus": 2, "gpu_milli": 500},
        {"gpu_models": ["H200"]},
        {"gpus": 1, "gpu_milli": 5, "gpu_profile": "a"},
    ],
)
def test_kinds_of_gpu_that_exclude_each_other_are_refused_by_the_spec(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="GPU"):
        JobSpec(name="x", script="a.py", **spec)


# ------------------------------------------------------------------------------------------------- queues


def test_an_unknown_queue_is_refused_with_the_known_ones(light_harness: JobHarness) -> None:
    light_harness.platform.queues.set("risk")

    with pytest.raises(FalajError, match=r"queue 'rsik' does not exist.*risk"):
        light_harness.submit(queue="rsik")

    assert light_harness.submit(queue="risk").spec.queue == "risk"


def test_a_workspace_submits_only_into_queues_that_are_open_to_it(light_harness: JobHarness) -> None:
    light_harness.platform.workspaces.create("risk-team")
    light_harness.platform.queues.set("risk", workspaces=("risk-team",))

    with pytest.raises(Denied, match="may not submit into queue risk"):
        light_harness.submit(queue="risk")


def test_a_job_that_is_larger_than_its_queue_may_ever_hold_is_refused_with_the_figures(
    light_harness: JobHarness,
) -> None:
    light_harness.platform.queues.set("small", quota=Quota(cpus=2))

    with pytest.raises(InvalidInput, match="never start") as refused:
        light_harness.submit(queue="small", cpus=3)

    assert "3 CPUs" in str(refused.value.faults)
    assert light_harness.submit(queue="small", cpus=2).state is JobState.QUEUED


def test_a_job_is_scheduled_in_its_queue(light_harness: JobHarness) -> None:
    light_harness.platform.queues.set("small", quota=Quota(cpus=1))
    first, second = (light_harness.submit(queue="small") for _ in range(2))
    light_harness.begin(first)

    assert light_harness.jobs.explain(second.id).reason == "quota"
    used = light_harness.platform.rows_of("SELECT job FROM scheduling_usage WHERE ended_at IS NULL")
    assert used == [first.id]
    light_harness.finish(first, "done", used={"cpu_s": 1.5})
    assert light_harness.platform.rows_of("SELECT cpu_s FROM scheduling_usage") == [1.5]


# ------------------------------------------------------------------------------------------- limits and retries


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[JobHarness]:
    with make_platform(tmp_path, toml="[jobs]\nunfinished_limit = 2") as platform:
        harness = JobHarness(platform, tmp_path)
        harness.jobs._unfinished_limit = platform.jobs._unfinished_limit
        yield harness


def test_unfinished_jobs_of_a_workspace_are_limited(strict: JobHarness) -> None:
    first, _ = strict.submit(), strict.submit()

    with pytest.raises(Conflict, match="has 2 jobs that wait or run"):
        strict.submit()

    strict.jobs.cancel(first.id)
    strict.submit()
    with pytest.raises(Conflict, match="has 2 jobs"):
        strict.jobs.retry(first.id)
    strict.platform.workspaces.create("elsewhere")
    code = strict.platform.blobs.upload(iter([b"x"]), workspace="elsewhere")
    spec = JobSpec(name="x", script="a.py")
    assert strict.jobs.submit(spec, code=code.id, workspace="elsewhere").state is JobState.QUEUED


def test_a_retry_needs_read_access_to_the_code(light_harness: JobHarness) -> None:
    platform = light_harness.platform
    worker = platform.join("worker", Role.DEVELOPER)
    platform.workspaces.create("other")
    code = platform.blobs.upload(iter([b"x"]), workspace="other")
    job = light_harness.jobs.submit(JobSpec(name="x", script="a.py"), code=code.id)
    light_harness.jobs.cancel(job.id)

    with acting_as(worker), pytest.raises(NotFound, match="there is no blob"):
        light_harness.jobs.retry(job.id)

    assert light_harness.jobs.retry(job.id).state is JobState.QUEUED


def test_a_job_whose_code_was_deleted_is_not_retried(light_harness: JobHarness) -> None:
    job = light_harness.submit()
    light_harness.jobs.cancel(job.id)
    light_harness.platform.sql(
        "UPDATE governance_objects SET deleted_at = 1 WHERE id = :id", {"id": job.code}
    )

    with pytest.raises((Conflict, NotFound), match="code"):
        light_harness.jobs.retry(job.id)


def test_a_gang_may_ask_for_more_nodes_than_there_are_where_autoscalers_add_them(harness: JobHarness) -> None:
    node = harness.machine.node
    spec = JobSpec(name="gang", script="train.py", nodes=4, cpus=node.cpus)
    queues = (Queue(name="default"),)
    request = request_for(new_id("job"), spec, workspace=ObjectId("workspace"), submitted_at=NOON)

    with pytest.raises(InvalidInput, match="this job could never start"):
        require_admissible(scheduling, spec, request, [node], queues)
    require_admissible(scheduling, spec, request, [node], queues, can_grow=True)
    limited = (Queue(name="default", quota=Quota(cpus=node.cpus)),)
    with pytest.raises(InvalidInput, match="this job could never start"):
        require_admissible(scheduling, spec, request, [node], limited, can_grow=True)
    large = spec.model_copy(update={"cpus": node.cpus + 1})
    with pytest.raises(InvalidInput, match="no machine here can ever run this job"):
        require_admissible(scheduling, large, request, [node], queues, can_grow=True)
