"""The student of an optimization as a real job: under controllers that are killed, preempted, and beyond a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.control.pipelines.optimization import PROGRAM, STUDENT_PROGRAM
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.optimization import AcceptanceBudget, OptimizationVerdict
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job, JobState
from platforms import make_platform
from polling import eventually, let_pass

if TYPE_CHECKING:
    from conftest import Learnable, OptimizationEnv  # type: ignore[attr-defined]

pytestmark = pytest.mark.slow

BUDGET = AcceptanceBudget(metric="auc", worse=0.3, relative=False)
PRICES = '[prices]\ncurrency = "AED"\ncpu_hour = 1.0\n'


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    with make_platform(tmp_path, toml=PRICES) as platform, run_controllers(platform, tmp_path) as made:
        yield made


def start(env: OptimizationEnv, **options: Any) -> WorkflowRun:
    given = {"recipes": ("onnx", "distill"), "target": "late", "budget": BUDGET, **options}
    work: WorkflowRun = env.platform.optimization.start("late@1", **given)
    return work


def jobs_of(env: OptimizationEnv, module: str) -> list[Job]:
    return [job for job in env.platform.jobs.list().items if job.spec.module == module]


def in_training(env: OptimizationEnv) -> bool:
    return any(job.progress is not None and job.progress.step > 0 for job in jobs_of(env, STUDENT_PROGRAM))


def ended(env: OptimizationEnv, work: WorkflowRun) -> dict[str, Any]:
    eventually(lambda: env.platform.workflows.show(work.id).state.ended)
    found = env.platform.workflows.show(work.id)
    assert (found.state, found.error) == (WorkflowState.DONE, None)
    return found.result or {}


def test_controllers_killed_while_a_student_trains_lose_nothing_and_do_nothing_twice(
    controllers: ControllerProcesses, populated: Callable[[Any], OptimizationEnv]
) -> None:
    env = populated(controllers.platform)
    controller = controllers.start_controller()
    work = start(env)
    eventually(lambda: in_training(env))
    for pause_s in (0.0, 1.5):  # once in the training, and once somewhere behind it
        controller.kill()
        controller.wait()
        controller = controllers.start_controller()
        let_pass(pause_s)

    result = ended(env, work)

    (student,), (measured,) = jobs_of(env, STUDENT_PROGRAM), jobs_of(env, PROGRAM)
    kept = env.platform.optimization.show(result["id"])
    assert (kept.student, kept.job) == (student.id, measured.id)
    assert [each.recipe for each in kept.report.variants] == ["onnx", "distill"]
    assert kept.report.variants[1].measured is not None
    assert len(env.platform.optimization.list().items) == 1
    run = env.platform.runs.show(student.run)
    points = {each.key: each.points for each in run.metrics}
    assert points["loss"] > 100
    assert points["evaluation"] >= 10
    assert env.platform.jobs.checkpoints(student.id)
    assert sorted(each.path for each in env.platform.jobs.show(student.id).outputs)[-2:] == [
        "student.json",
        "student.onnx",
    ]


def test_a_student_beyond_the_budget_of_its_workspace_is_refused_and_the_others_go_on(
    controllers: ControllerProcesses, populated: Callable[[Any], OptimizationEnv]
) -> None:
    env = populated(controllers.platform)
    # It is charged up to its limit: half an hour of measuring fits, an hour of training does not.
    env.platform.queues.set_budget(env.version.workspace, money=0.7)
    controllers.start_controller()

    result = ended(env, start(env))

    onnx, student = env.platform.optimization.show(result["id"]).report.variants
    assert onnx.measured is not None
    assert student.verdict is OptimizationVerdict.REFUSED
    assert "was cancelled, as it could not start" in student.reason
    assert "budget" in student.reason
    assert [job.state for job in jobs_of(env, STUDENT_PROGRAM)] == [JobState.CANCELLED]


def test_a_preempted_student_resumes_and_is_measured(
    controllers: ControllerProcesses, populated: Callable[..., OptimizationEnv], rows: Learnable
) -> None:
    many = {name: np.repeat(values, 8, axis=0) for name, values in vars(rows).items()}
    env = populated(
        controllers.platform, rows=replace(rows, **many)
    )  # it must not end before it is preempted
    (node,) = controllers.platform.parts.compute.nodes()
    env.platform.queues.set("risk", quota=Quota(cpus=node.cpus))
    env.platform.queues.set("lab", quota=Quota(cpus=0), limit=Quota(cpus=node.cpus))
    controllers.start_controller()
    work = start(env, queue="lab")
    eventually(lambda: in_training(env))
    (student,) = jobs_of(env, STUDENT_PROGRAM)

    urgent = controllers.submit("print('at last')", name="urgent", queue="risk", cpus=node.cpus)
    done = controllers.ends(urgent)
    result = ended(env, work)

    assert done.state is JobState.DONE
    again = env.platform.jobs.show(student.id)
    assert (again.state, again.attempt, again.preemptions) == (JobState.DONE, 2, 1), again.reason
    assert "resuming after step" in controllers.log(again)
    assert env.platform.optimization.show(result["id"]).report.variants[1].measured is not None
