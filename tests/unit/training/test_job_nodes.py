"""Jobs of several nodes: what they request, where they are placed, what they are charged, and what they launch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from falaj.errors import InvalidInput
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.scheduling.snapshot import Affinity, Gpu, Node, Quota, Reason
from falaj.records.training.jobs import JobSpec, JobState
from falaj.training.moves import describe_request
from falaj.training.queue import affinity_of, request_for
from falaj.training.tables import jobs
from job_harness import DONE, NODE, JobHarness
from polling import eventually

CARDS = tuple(Gpu(id=f"GPU-{number}", model="H200", memory_bytes=1 << 37) for number in range(4))
WITH_CARDS = NODE.model_copy(update={"gpus": CARDS})
OTHER = NODE.model_copy(update={"name": "there"})


def use_nodes(harness: JobHarness, monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> None:
    monkeypatch.setattr(harness.machine, "nodes", lambda: nodes)
    harness.host.__dict__["nodes"] = lambda: nodes


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "x", "script": "train.py", **fields})


# ------------------------------------------------------------------------------------------------- records


def test_job_has_one_node_unless_it_asks_for_more() -> None:
    assert (spec().nodes, spec(processes=3).world_size) == (1, 3)
    assert spec(nodes=4, processes=8).world_size == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 1001}, "nodes"),
        ({"nodes": 1000, "processes": 11}, "11000 processes: 10000 at most"),
        ({"nodes": 2, "gpus": 1, "gpu_milli": 500}, "a part of a GPU is for a job of 1 node"),
        (
            {"framework": "tensorflow", "nodes": 2, "processes": 2, "roles": {"worker": 3}},
            "roles count the processes of all nodes",
        ),
    ],
)
def test_impossible_nodes_are_refused_by_the_spec(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**fields)


def test_roles_count_the_processes_of_all_nodes() -> None:
    roles = {"chief": 1, "worker": 2, "ps": 1}

    assert spec(framework="tensorflow", nodes=2, processes=2, roles=roles).roles == roles


# ------------------------------------------------------------------------------------------------- queue


def test_request_has_a_replica_for_each_node(light_harness: JobHarness) -> None:
    job = light_harness.submit(nodes=2, cpus=2)

    request = request_for(job.id, job.spec, workspace=job.workspace, submitted_at=job.submitted_at)
    assert (request.replicas, request.each.cpus) == (2, 2)


def test_a_job_that_cannot_be_preempted_is_kept_off_spot_nodes_unless_it_asks_for_them() -> None:
    asks = Affinity(labels=frozenset({"spot"}))

    assert affinity_of(spec(preemptible=True)).avoid == frozenset()
    assert affinity_of(spec(preemptible=False)).avoid == {"spot"}
    assert affinity_of(spec(preemptible=False, affinity=asks)) == asks


def test_job_that_was_stored_before_there_were_nodes_opens_as_before(light_harness: JobHarness) -> None:
    job = light_harness.submit(cpus=2)
    (stored,) = (each["spec"] for each in light_harness.platform.rows(jobs))
    text = stored if isinstance(stored, str) else json.dumps(stored)

    known = {name: value for name, value in json.loads(text).items() if name != "nodes"}

    assert JobSpec.model_validate(known) == job.spec


@pytest.mark.slow
def test_nodes_of_a_job_count_against_quota_and_usage(light_harness: JobHarness) -> None:
    light_harness.platform.queues.set("small", quota=Quota(cpus=3))

    with pytest.raises(InvalidInput, match="never start") as refused:
        light_harness.submit(queue="small", nodes=2, cpus=2)
    job = light_harness.submit(queue="small", nodes=3)
    light_harness.reconciler().tick()

    assert "4 CPUs requested" in str(refused.value.faults)
    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    assert light_harness.platform.rows_of("SELECT cpus FROM scheduling_usage") == [3]


def test_nodes_that_fit_on_no_cluster_are_refused_with_how_many_do(light_harness: JobHarness) -> None:
    with pytest.raises(InvalidInput, match="never start") as refused:
        light_harness.submit(nodes=3, cpus=2)

    (fault,) = refused.value.faults
    assert "2 of 3 replicas fit" in (fault.allowed or "")
    assert "at most 2 replicas" in (fault.fix or "")


def test_nodes_that_are_to_spread_wait_for_enough_machines(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = light_harness.submit(nodes=2, affinity={"spread": True})

    found = light_harness.jobs.explain(job.id)

    assert (found.state, found.reason) == ("waiting", Reason.AFFINITY)
    assert found.words.endswith("on nodes with one replica each: 2 nodes are needed, there is 1")
    assert "no node affinity" in found.would_start
    use_nodes(light_harness, monkeypatch, NODE, OTHER)
    assert light_harness.jobs.explain(job.id).words == "starts now on here, there"


# ------------------------------------------------------------------------------------------------ attempts


def test_one_machine_launches_all_nodes_with_the_gpus_of_all(light_harness: JobHarness) -> None:
    seen: list[Launch] = []

    def program(launch: Launch) -> AttemptState:
        seen.append(launch)
        return DONE

    light_harness.machine.node = WITH_CARDS
    light_harness.launcher.program = program
    job = light_harness.submit(framework="torch", nodes=2, processes=2, gpus=2, cpus=2, memory_bytes=1 << 30)

    light_harness.reconciler().tick()

    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    (launch,) = seen
    assert (launch.nodes, launch.processes, launch.peers, launch.node_rank) == (2, 2, (), 0)
    assert (launch.cpus, launch.memory_bytes) == (2, 1 << 30)  # of one node
    assert launch.gpus == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def test_default_memory_of_nodes_that_share_a_machine_is_no_more_than_of_one_job(
    light_harness: JobHarness,
) -> None:
    seen: list[Launch] = []
    light_harness.launcher.program = lambda launch: seen.append(launch) or DONE  # type: ignore[func-returns-value]
    job = light_harness.submit(nodes=4)

    light_harness.reconciler().tick()

    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    assert [each.memory_bytes for each in seen] == [int((8 << 30) * 0.9) // 4]


def test_words_for_a_request_count_its_nodes() -> None:
    assert describe_request(spec(nodes=2, cpus=4)) == "2 nodes of 4 CPUs, no GPU"
    assert describe_request(spec(cpus=4)) == "4 CPUs, no GPU"
