"""A moved job is saved, stopped and resumed elsewhere with its place in the queue, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from crash_points import CrashPoint, Killed
from falaj.control.jobs import reconciler as reconciling
from falaj.control.jobs.reconciler import JobReconciler
from falaj.errors import Conflict, FalajError, InvalidInput
from falaj.governance.operations.caller import on_terms, once
from falaj.ports.launcher import AttemptState
from falaj.records.scheduling.snapshot import Gpu, Node
from falaj.records.training.jobs import Job, JobSpec, JobState, RequestedResources
from falaj.training.moves import MoveTarget, describe_request, moved_spec, restore_held
from falaj.training.queue import request_for
from falaj.training.tables import attempts, jobs
from job_harness import DONE, NODE, JobHarness
from polling import eventually

GPUS = tuple(Gpu(id=f"GPU-{number}", model="H200", memory_bytes=1 << 37) for number in range(4))
WITH_GPUS = NODE.model_copy(update={"name": "fast", "pool": "cards", "gpus": GPUS, "shares": True})
WITHOUT = NODE.model_copy(update={"name": "plain", "pool": "frugal"})
NODES: tuple[Node, ...] = (WITH_GPUS, WITHOUT)


@pytest.fixture
def harness(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    return with_pools(harness, monkeypatch)


@pytest.fixture
def lone(light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    return with_pools(light_harness, monkeypatch)


def with_pools(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    """Two pools, one with GPUs, and jobs that run until they are stopped."""
    monkeypatch.setattr(harness.machine, "nodes", lambda: NODES)
    harness.host = replace(harness.host, nodes=lambda: NODES)
    harness.launcher.program = lambda _: AttemptState("running")
    return harness


def row(harness: JobHarness, job: Job) -> dict[str, Any]:
    return next(each for each in harness.platform.rows(jobs) if each["id"] == job.id)


def runs_at(harness: JobHarness, job: Job, node: str, number: int) -> None:
    eventually(lambda: harness.launcher.state(f"{job.id}/{number}").phase == "running")
    assert harness.jobs.show(job.id).node == node


def waits_again(harness: JobHarness, job: Job) -> Job:
    eventually(lambda: harness.jobs.show(job.id).state is JobState.QUEUED)
    return harness.jobs.show(job.id)


# -------------------------------------------------------------------------------------------------- moving


@pytest.mark.slow
def test_a_running_job_is_preempted_and_resumes_in_the_other_pool(harness: JobHarness) -> None:
    job, reconciler = harness.submit(gpus=2, cpus=2), harness.reconciler()
    reconciler.tick()
    runs_at(harness, job, "fast", 1)

    moved = harness.jobs.move(job.id, to="cpu")

    assert (moved.job.state, moved.job.moving, moved.step) == (JobState.RUNNING, True, None)
    assert moved.words == (
        "it is asked to save a checkpoint and stop, and resumes from the checkpoint that it saves, or starts over if "
        "it saves none with 2 CPUs, no GPU, in pool frugal"
    )
    assert row(harness, job)["request"]["each"]["gpus"] == 2  # it holds its GPUs until it has stopped
    reconciler.tick()
    back = waits_again(harness, job)
    assert back.reason == "moved: it continues with 2 CPUs, no GPU, in pool frugal"
    assert (back.submitted_at, back.preemptions, back.moving) == (job.submitted_at, 0, False)
    assert "gpus" not in row(harness, job)["request"]["each"]
    assert harness.launcher.graces == [60.0]
    reconciler.tick()
    runs_at(harness, job, "plain", 2)
    again = harness.jobs.show(job.id)
    assert (again.attempt, row(harness, job)["failures"]) == (2, 0)
    assert (again.spec.gpus, again.spec.asked) == (0, RequestedResources(cpus=2, gpus=2))
    verdicts = [each["verdict"] for each in harness.platform.rows(attempts) if each["job"] == job.id]
    assert verdicts == ["moved", None]
    assert [each for each in harness.platform.entries() if each["action"] == "jobs.move"]
    reconciler.stop()


@pytest.mark.slow
def test_moving_a_waiting_job_changes_its_request(lone: JobHarness) -> None:
    first, second = lone.submit(gpus=4), lone.submit(gpus=4)
    reconciler = lone.reconciler()
    reconciler.tick()
    runs_at(lone, first, "fast", 1)

    moved = lone.jobs.move(second.id, to="cpu")

    assert moved.words == "it is queued, and starts with 1 CPU, no GPU, in pool frugal"
    reconciler.tick()
    runs_at(lone, second, "plain", 1)
    assert lone.jobs.show(second.id).submitted_at == second.submitted_at
    assert lone.launcher.stopped == []
    reconciler.stop()


def test_a_job_moved_there_and_back_requests_its_original_resources(lone: JobHarness) -> None:
    job = lone.submit(gpus=1, gpu_milli=250, gpu_memory_bytes=1 << 30, affinity={"pools": ["cards"]})

    away = lone.jobs.move(job.id, to="cpu").job.spec
    back = lone.jobs.move(job.id, to="gpu", pool="cards").job.spec

    assert (away.gpus, away.gpu_milli, away.gpu_memory_bytes, away.affinity.pools) == (
        *(0, 1000, None),
        {"frugal"},
    )
    assert back == job.spec


def test_a_job_on_other_numbers_of_nodes_remembers_how_many_it_asked_for(lone: JobHarness) -> None:
    job = lone.begin(lone.submit(gpus=1, nodes=2))

    fewer = lone.jobs.move(job.id, nodes=1)

    assert "with 1 CPU, 1 GPU" in fewer.words
    assert (fewer.job.spec.nodes, fewer.job.spec.asked) == (1, RequestedResources(nodes=2, gpus=1))
    assert row(lone, job)["request"]["replicas"] == 2  # it holds both until it has stopped
    assert lone.jobs.move(job.id, nodes=2).job.spec == job.spec


def test_a_start_that_was_decided_for_another_number_of_nodes_is_refused(lone: JobHarness) -> None:
    job = lone.submit(nodes=2)
    decided = request_for(
        job.id, job.spec, workspace=job.workspace, submitted_at=job.submitted_at, label=job.label
    )
    lone.jobs.move(job.id, nodes=1)

    with lone.as_controller(), on_terms(fence=lone.fence), pytest.raises(Conflict, match="was moved"):
        lone.jobs.hand_over(job.id, attempt=1, decided=decided)


def test_roles_that_do_not_suit_a_number_of_nodes_are_named(lone: JobHarness) -> None:
    job = lone.submit(framework="tensorflow", nodes=2, processes=2, roles={"chief": 1, "worker": 1, "ps": 2})

    with pytest.raises(InvalidInput, match="cannot be moved there") as refusal:
        lone.jobs.move(job.id, nodes=3)

    assert "the roles add up to 4, but 3 nodes of 2 processes are 6" in str(refusal.value)


def test_a_repeated_call_moves_once(lone: JobHarness) -> None:
    job = lone.submit(gpus=1)

    with once("k-1"):
        first = lone.jobs.move(job.id, to="cpu")
    with once("k-1"):
        second = lone.jobs.move(job.id, to="cpu")

    assert first == second


def test_the_result_names_the_checkpoint_to_resume_from(lone: JobHarness) -> None:
    job = lone.begin(lone.submit(gpus=1))
    manifest, part = (lone.platform.blobs.upload(iter([data])).id for data in (b"{}", b"weights"))
    with lone.as_controller(), on_terms(fence=lone.fence):
        lone.jobs.save_checkpoint(job.id, attempt=1, step=40, save="0" * 32, manifest=manifest, parts=(part,))

    moved = lone.jobs.move(job.id, to="cpu")

    assert moved.step == 40
    assert "resumes from step 40 or later with 1 CPU, no GPU" in moved.words


# ---------------------------------------------------------------------------------------- concurrent events


@pytest.mark.slow
def test_a_job_that_ends_before_the_stop_signal_keeps_the_resources_it_ran_with(lone: JobHarness) -> None:
    job, reconciler = lone.submit(gpus=2), lone.reconciler()
    reconciler.tick()
    runs_at(lone, job, "fast", 1)
    lone.jobs.move(job.id, to="cpu")

    lone.launcher.known[f"{job.id}/1"] = DONE

    eventually(lambda: lone.jobs.show(job.id).state.ended)
    done = lone.jobs.show(job.id)
    assert (done.state, done.moving) == (JobState.DONE, False)
    assert done.spec == job.spec
    reconciler.stop()


@pytest.mark.slow
def test_a_job_cancelled_during_a_move_is_cancelled(lone: JobHarness) -> None:
    job, reconciler = lone.submit(gpus=2), lone.reconciler()
    reconciler.tick()
    runs_at(lone, job, "fast", 1)
    lone.jobs.move(job.id, to="cpu")

    lone.jobs.cancel(job.id)

    reconciler.tick()
    eventually(lambda: lone.jobs.show(job.id).state is JobState.CANCELLED)
    assert lone.jobs.show(job.id).spec == job.spec
    reconciler.stop()


@pytest.mark.slow
def test_a_job_moved_again_during_a_move_goes_to_the_last_target(lone: JobHarness) -> None:
    job, reconciler = lone.submit(gpus=2), lone.reconciler()
    reconciler.tick()
    runs_at(lone, job, "fast", 1)
    lone.jobs.move(job.id, to="cpu")

    lone.jobs.move(job.id, to="gpu", gpus=1)

    reconciler.tick()
    back = waits_again(lone, job)
    assert (back.spec.gpus, back.spec.asked) == (1, RequestedResources(gpus=2))
    reconciler.stop()


@pytest.mark.slow
def test_a_moved_running_job_can_be_moved_back_to_its_original_resources(harness: JobHarness) -> None:
    job, reconciler = harness.submit(gpus=2), harness.reconciler()
    harness.jobs.move(job.id, to="cpu")
    reconciler.tick()
    runs_at(harness, job, "plain", 1)

    harness.jobs.move(job.id, to="gpu")

    reconciler.tick()
    assert waits_again(harness, job).spec == job.spec
    reconciler.tick()
    runs_at(harness, job, "fast", 2)
    reconciler.stop()


@pytest.mark.slow
def test_a_job_that_ends_before_it_is_moved_back_keeps_the_resources_it_ran_with(lone: JobHarness) -> None:
    job, reconciler = lone.submit(gpus=2), lone.reconciler()
    away = lone.jobs.move(job.id, to="cpu").job.spec
    reconciler.tick()
    runs_at(lone, job, "plain", 1)
    lone.jobs.move(job.id, to="gpu")

    lone.launcher.known[f"{job.id}/1"] = DONE

    eventually(lambda: lone.jobs.show(job.id).state.ended)
    assert lone.jobs.show(job.id).spec == away
    reconciler.stop()


@pytest.mark.slow
def test_a_job_moved_after_its_start_was_decided_starts_at_the_new_place(
    lone: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, reconciler = lone.submit(gpus=2), lone.reconciler()
    real = JobReconciler._carry_out

    def carry_out(self: JobReconciler, *decided: Any) -> None:
        if lone.jobs.show(job.id).spec.gpus:
            lone.jobs.move(job.id, to="cpu")
        real(self, *decided)

    monkeypatch.setattr(JobReconciler, "_carry_out", carry_out)

    reconciler.tick()
    reconciler.tick()

    runs_at(lone, job, "plain", 1)
    reconciler.stop()


class Parked(threading.Thread):
    """The thread of an attempt that keeps running until the reconciler is gone."""

    def is_alive(self) -> bool:
        return True


@pytest.mark.slow
def test_a_move_interrupted_by_kills_happens_once(lone: JobHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(target: Callable[[], None], **_: Any) -> threading.Thread:
        attempt = target.__self__  # type: ignore[attr-defined]
        if lone.launcher.state(attempt.name).phase == "running" and attempt._requested is None:
            return Parked()
        target()
        return threading.Thread()

    lone.launcher.program = lambda _: DONE
    monkeypatch.setattr(reconciling, "start_thread", at_once)
    trap = CrashPoint(lone, monkeypatch, launcher=("start", "stop", "delete"))
    step, was_killed = 0, True
    while was_killed:
        job = lone.begin(lone.submit(gpus=1))
        lone.launcher.known[f"{job.id}/1"] = AttemptState("running")
        lone.launcher.runs[f"{job.id}/1"] = 1
        lone.jobs.move(job.id, to="cpu")
        trap.left, was_killed = step, False
        for _ in range(8):
            if (ended := lone.jobs.show(job.id)).state.ended:
                break
            try:
                lone.reconciler().tick()
            except Killed:
                was_killed = True

        assert (ended.state, ended.attempt, ended.preemptions, ended.spec.gpus) == (JobState.DONE, 2, 0, 0), (
            step
        )
        assert set(lone.launcher.runs.values()) == {1}, step
        assert [each["verdict"] for each in lone.platform.rows(attempts) if each["job"] == job.id] == [
            "moved",
            "done",
        ], step
        step += 1

    assert step > 10, step


# ------------------------------------------------------------------------------------------------- refusals


def test_a_job_that_has_ended_or_is_being_cancelled_is_not_moved(lone: JobHarness) -> None:
    done, stopping = lone.submit(gpus=1), lone.begin(lone.submit(gpus=1))
    lone.jobs.cancel(done.id)
    lone.jobs.cancel(stopping.id)

    with pytest.raises(Conflict, match="has ended: cancelled; only one that waits or runs is moved"):
        lone.jobs.move(done.id, to="cpu")
    with pytest.raises(Conflict, match="is being cancelled"):
        lone.jobs.move(stopping.id, to="cpu")


@pytest.mark.slow
def test_a_move_that_changes_nothing_is_refused(lone: JobHarness) -> None:
    job = lone.submit(affinity={"pools": ["frugal"]})

    with pytest.raises(Conflict, match="asks for just that already: 1 CPU, no GPU, in pool frugal"):
        lone.jobs.move(job.id, to="cpu")


@pytest.mark.parametrize(
    ("target", "where", "words"),
    [
        ({"to": "moon"}, ["to"], "cpu, gpu, or a pool: cards, frugal"),
        ({"to": "cpu", "gpus": 2}, ["gpus"], "0, or none said, to move to cpu"),
        ({"to": "gpu", "gpus": 0, "pool": "moon"}, ["pool", "gpus"], "at least 1, to move to gpu"),
        ({"to": "gpu", "gpus": 5}, ["spec.gpus"], "at most 4 on one machine here"),
        ({"to": "frugal", "gpus": 1}, ["spec.gpus"], "at most 0 on one machine here"),
        ({"to": "cpu", "cpus": 99}, ["spec.cpus"], "at most 4 on one machine here"),
        ({}, ["to"], "cpu, gpu or a pool; or a number of nodes, CPUs or GPUs"),
        ({"nodes": 99}, ["to"], "99"),
    ],
    ids=str,
)
def test_a_move_to_where_the_job_could_never_run_is_refused(
    lone: JobHarness, target: dict[str, Any], where: list[str], words: str
) -> None:
    job = lone.begin(lone.submit(gpus=1))

    with pytest.raises(InvalidInput) as refusal:
        lone.jobs.move(job.id, **target)

    assert [fault.where for fault in refusal.value.faults] == where
    assert words in str(refusal.value)
    assert lone.jobs.show(job.id).spec == job.spec
    assert not lone.jobs.show(job.id).leaving


def test_the_original_request_cannot_be_set_by_the_submitter(lone: JobHarness) -> None:
    with pytest.raises(FalajError, match="filled in when a job is moved"):
        lone.submit(asked={"gpus": 8})


# ------------------------------------------------------------------------------------------------- the rule


def spec(**values: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "fitting", "script": "train.py", **values})


@pytest.mark.parametrize(
    ("before", "move", "after"),
    [
        ({"gpus": 2}, MoveTarget("cpu"), "1 CPU, no GPU, in pool frugal"),
        ({"gpus": 2}, MoveTarget("cpu", cpus=4), "4 CPUs, no GPU, in pool frugal"),
        ({"gpus": 2}, MoveTarget("cpu", pool="cards"), "1 CPU, no GPU, in pool cards"),
        ({}, MoveTarget("gpu"), "1 CPU, 1 GPU"),
        ({"framework": "torch", "processes": 4}, MoveTarget("gpu"), "1 CPU, 4 GPUs"),
        ({}, MoveTarget("gpu", gpus=2), "1 CPU, 2 GPUs"),
        ({"affinity": {"pools": ["frugal"]}}, MoveTarget("gpu"), "1 CPU, 1 GPU"),
        ({"gpus": 2}, MoveTarget("frugal"), "1 CPU, no GPU, in pool frugal"),
        ({"gpus": 2}, MoveTarget("cards"), "1 CPU, 2 GPUs, in pool cards"),
        ({}, MoveTarget("cards"), "1 CPU, no GPU, in pool cards"),
        ({"gpus": 2, "nodes": 2}, MoveTarget(nodes=1), "1 CPU, 2 GPUs"),
        (
            {"gpus": 1, "affinity": {"pools": ["cards"]}},
            MoveTarget(nodes=3),
            "3 nodes of 1 CPU, 1 GPU, in pool cards",
        ),
        ({"nodes": 2}, MoveTarget("cpu", nodes=1), "1 CPU, no GPU, in pool frugal"),
        ({"gpus": 2}, MoveTarget(gpus=1), "1 CPU, 1 GPU"),
        ({"gpus": 2}, MoveTarget(pool="cards", cpus=3), "3 CPUs, 2 GPUs, in pool cards"),
    ],
    ids=str,
)
def test_resources_requested_after_a_move(before: dict[str, Any], move: MoveTarget, after: str) -> None:
    moved = moved_spec(spec(**before), move, NODES)

    assert describe_request(moved) == after
    held = request_for(
        "job_1",  # type: ignore[arg-type]
        spec(**before),
        workspace="wsp_1",  # type: ignore[arg-type]
        submitted_at="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
    )
    assert restore_held(moved, held) == spec(**before)


def test_a_single_node_without_pools_suffices() -> None:
    only = NODE.model_copy(update={"gpus": GPUS})

    moved = moved_spec(spec(gpus=2), MoveTarget("cpu"), [only])

    assert describe_request(moved) == "1 CPU, no GPU"
