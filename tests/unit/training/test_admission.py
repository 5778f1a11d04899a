"""What is let into the queue, and what is refused at once with the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from falaj.errors import Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.scheduling.snapshot import Gpu, Quota
from falaj.records.training.jobs import JobSpec, JobState
from job_ground import NODE, JobGround
from platforms import make_platform

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
def ground(light_ground: JobGround) -> JobGround:
    light_ground.machine.node = SLICES
    return light_ground


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
def test_what_no_machine_has_is_refused(
    ground: JobGround, spec: dict[str, Any], where: str, allowed: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        ground.submit(**spec)

    (fault,) = refused.value.faults
    assert fault.where == where
    assert allowed in (fault.allowed or "")


def test_what_these_machines_have_is_let_in(ground: JobGround) -> None:
    for spec in ({"gpus": 2, "gpu_profile": "1g.18gb"}, {"gpus": 2}, {"gpus": 1, "gpu_models": ["H200"]}):
        assert ground.submit(**spec).state is JobState.QUEUED


def test_two_cards_that_no_nvlink_joins_are_no_island(ground: JobGround) -> None:
    with pytest.raises(InvalidInput, match="never start"):
        ground.submit(gpus=2, affinity={"island": "nvlink"})


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


def test_an_unknown_queue_is_refused_with_those_that_there_are(light_ground: JobGround) -> None:
    light_ground.platform.queues.set("risk")

    with pytest.raises(FalajError, match=r"no queue 'rsik'.*risk"):
        light_ground.submit(queue="rsik")

    assert light_ground.submit(queue="risk").spec.queue == "risk"


def test_a_workspace_submits_only_into_queues_that_are_open_to_it(light_ground: JobGround) -> None:
    light_ground.platform.workspaces.create("risk-team")
    light_ground.platform.queues.set("risk", workspaces=("risk-team",))

    with pytest.raises(Denied, match="may not submit into queue risk"):
        light_ground.submit(queue="risk")


def test_a_job_that_is_larger_than_its_queue_may_ever_hold_is_refused_with_the_figures(
    light_ground: JobGround,
) -> None:
    light_ground.platform.queues.set("small", quota=Quota(cpus=2))

    with pytest.raises(InvalidInput, match="never start") as refused:
        light_ground.submit(queue="small", cpus=3)

    assert "3 CPUs" in str(refused.value.faults)
    assert light_ground.submit(queue="small", cpus=2).state is JobState.QUEUED


def test_a_job_is_decided_about_in_its_queue(light_ground: JobGround) -> None:
    light_ground.platform.queues.set("small", quota=Quota(cpus=1))
    first, second = (light_ground.submit(queue="small") for _ in range(2))
    light_ground.begin(first)

    assert light_ground.jobs.explain(second.id).reason == "quota"
    used = light_ground.platform.rows_of("SELECT job FROM scheduling_usage WHERE ended_at IS NULL")
    assert used == [first.id]
    light_ground.settle(first, "done", used={"cpu_s": 1.5})
    assert light_ground.platform.rows_of("SELECT cpu_s FROM scheduling_usage") == [1.5]


# ------------------------------------------------------------------------------------------ how many, and again


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[JobGround]:
    with make_platform(tmp_path, toml="[jobs]\nunfinished_limit = 2") as platform:
        ground = JobGround(platform, tmp_path)
        ground.jobs._unfinished_limit = platform.jobs._unfinished_limit
        yield ground


def test_a_workspace_has_no_more_unfinished_jobs_than_it_may(strict: JobGround) -> None:
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


def test_who_may_not_read_the_code_may_not_have_it_tried_again(light_ground: JobGround) -> None:
    platform = light_ground.platform
    worker = platform.join("worker", Role.DEVELOPER)
    platform.workspaces.create("vault")
    code = platform.blobs.upload(iter([b"x"]), workspace="vault")
    job = light_ground.jobs.submit(JobSpec(name="x", script="a.py"), code=code.id)
    light_ground.jobs.cancel(job.id)

    with acting_as(worker), pytest.raises(FalajError, match=r"blobs\.read"):
        light_ground.jobs.retry(job.id)

    assert light_ground.jobs.retry(job.id).state is JobState.QUEUED


def test_a_job_whose_code_was_deleted_is_not_tried_again(light_ground: JobGround) -> None:
    job = light_ground.submit()
    light_ground.jobs.cancel(job.id)
    light_ground.platform.sql("UPDATE governance_objects SET deleted_at = 1 WHERE id = :id", {"id": job.code})

    with pytest.raises((Conflict, NotFound), match="code"):
        light_ground.jobs.retry(job.id)
