"""The optimization workflow: a job, its report, and accepted variants as versions, each once despite kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import falaj as fj
from falaj.assembly.distillation.__main__ import train_student
from falaj.control.pipelines.optimization import PROGRAM, STUDENT_PROGRAM, optimize
from falaj.control.workflows.builtin import WORKFLOWS
from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.lineage.graph import walk as relatives
from falaj.governance.operations.caller import on_terms
from falaj.optimization import hardware
from falaj.optimization.runtime import job as optimization_job
from falaj.optimization.runtime import latency
from falaj.optimization.settings import parse_settings
from falaj.records.control.workflows import WorkflowState
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId, new_id
from falaj.records.optimization import OptimizationVerdict
from falaj.records.registry import FileFormat
from falaj.records.scheduling.snapshot import Explanation, Reason
from falaj.records.training.jobs import Job, JobOutput, JobSpec, JobState
from polling import eventually

if TYPE_CHECKING:
    from conftest import OptimizationEnv  # type: ignore[attr-defined]


class Killed(BaseException):
    """The controller is gone."""


class KillableSteps:
    """Steps whose results are kept, as the engine does; the controller dies before or after the step `dies`."""

    workflow = "work_1"

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.dies: str | None = None
        self.after = False

    def run(self, name: str, body: Callable[[], Any]) -> Any:
        if name not in self.kept:
            if name == self.dies and not self.after:
                raise Killed
            with on_terms(key=f"{self.workflow}:{name}"):
                found = body()
            if name == self.dies:
                raise Killed  # it took effect, but the engine does not know
            self.kept[name] = found
        return self.kept[name]

    def wait(
        self, name: str, poll: Callable[[], Any], *, every_s: float = 1.0, longest_s: float = 10.0
    ) -> Any:
        def until() -> Any:
            while (found := poll()) is None:
                pass
            return found

        return self.run(name, until)

    def undo(self, name: str, body: Callable[[], Any]) -> Any:
        return self.run(name, body)

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None: ...


class Jobs:
    """The jobs service as the workflow sees it: a job runs in this process when it is shown."""

    def __init__(self, env: OptimizationEnv, folder: Path) -> None:
        self._platform = env.platform
        self._author = env.version.author
        self._folder = folder
        self.submitted: dict[str, Job] = {}
        self.fails: dict[str, tuple[JobState, str]] = {}
        """How jobs of a module end, and why."""
        self.refuses: dict[str, str] = {}
        self.waits_for: Reason | None = None
        self.cancelled: list[str] = []

    def submit(self, spec: JobSpec, *, code: str | None = None, workspace: str | None = None) -> Job:
        for known in self.submitted.values():
            if known.spec.module == spec.module:  # the key of the step has been seen
                return known
        if spec.module in self.refuses:
            raise Conflict(self.refuses[spec.module])
        run = self._platform.runs.start("optimization")
        ident = new_id("job")
        stored = StoredObject(
            id=ident,
            workspace=str(workspace),
            kind="job",
            name=ident,
            owner=self._author,
            created_at=self._platform.clock.now,
        )
        with self._platform.database.write() as tx:
            objects.create(tx, stored)
        job = Job(
            id=ident,
            workspace=stored.workspace,
            name=spec.name,
            state=JobState.QUEUED,
            run=run.id,
            submitted_at=stored.created_at,
            owner="owner",
            spec=spec,
        )
        self.submitted[ident] = job
        return job

    def show(self, job: str) -> Job:
        found = self.submitted[job]
        if found.state is JobState.QUEUED:
            if self.waits_for is not None and found.spec.module == STUDENT_PROGRAM:
                return found
            self.submitted[job] = found.model_copy(update=self._end(found))
            return found
        return self.submitted[job]

    def explain(self, job: str) -> Explanation:
        return Explanation(
            job=ObjectId(job), state="waiting", reason=self.waits_for, words="it waits for money", of=1
        )

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)

    def _end(self, job: Job) -> dict[str, Any]:
        if (failed := self.fails.get(str(job.spec.module))) is not None:
            return {"state": failed[0], "reason": failed[1]}
        return self._run(job)

    def _run(self, job: Job) -> dict[str, Any]:
        folder = self._folder / job.id
        inputs, outputs = folder / "in", folder / "out"
        (inputs / "model").mkdir(parents=True)
        version = self._platform.models.version(job.spec.inputs["model"])
        for file in version.files:
            content = b"".join(self._platform.models.read(version.id, file.path))
            (inputs / "model" / file.path).write_bytes(content)
        pq.write_table(
            self._platform.features.load(job.spec.inputs["data"]).read_all(), inputs / "data.parquet"
        )
        if (student := job.spec.inputs.get("student")) is not None:
            (inputs / "student").write_bytes(b"".join(self._platform.blobs.read(student)))
        work = train_student if job.spec.module == STUDENT_PROGRAM else optimization_job.optimize
        work(parse_settings(job.spec.args), inputs=inputs, outputs=outputs, log=lambda _: None)
        found = [
            JobOutput(path=path.relative_to(outputs).as_posix(), blob=self._put(path, job))
            for path in sorted(outputs.rglob("*"))
            if path.is_file()
        ]
        return {"state": JobState.DONE, "outputs": tuple(found)}

    def _put(self, path: Path, job: Job) -> Any:
        with on_terms():
            return self._platform.blobs.upload(iter([path.read_bytes()]), sources=(job.run,)).id


class Stage:
    def __init__(self, env: OptimizationEnv, folder: Path) -> None:
        self.env = env
        self.jobs = Jobs(env, folder)
        self.services: Any = SimpleNamespace(**vars(env.platform.parts.services) | {"jobs": self.jobs})
        self.given = {
            "model": env.version.id,
            "workspace": env.version.workspace,
            "data": env.data,
            "target": "late",
            "features": [*env.start["features"]],
            "recipes": ["onnx", "int8"],
            "budget": {"speedup": 1.1, "worse": 0.01},
        }


@pytest.fixture
def stage(light_env: OptimizationEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(latency, "BLOCK_S", 0.001)
    monkeypatch.setattr(latency, "SEARCH_S", 0.002)
    monkeypatch.setattr(optimization_job, "measure_memory", lambda path, batch: 1 << 20)
    return Stage(light_env, tmp_path / "job")


def test_the_controller_has_the_workflow() -> None:
    assert WORKFLOWS["optimization.start"] is optimize


@pytest.mark.slow
def test_accepted_variants_become_versions_and_refused_ones_keep_their_reason(stage: Stage) -> None:
    result = optimize(stage.services, KillableSteps(), stage.given)

    platform, original = stage.env.platform, stage.env.version
    made = platform.models.version("late@2")
    assert result["versions"] == [made.id]
    assert (made.format, made.sources, made.training_set) == (
        FileFormat.ONNX,
        (original.id,),
        original.training_set,
    )
    assert made.inputs[0].features == stage.env.start["features"]
    assert made.outputs[0].name == "probability"
    assert made.metrics["auc"] == 0.8
    assert made.metrics["optimization.loss"] > 0
    assert made.card.startswith("The onnx variant of late@1: faster")
    assert made.environment["optimization.recipe"] == "onnx"
    assert made.environment["optimization.instruction_set"].split() == [*hardware.instruction_set()]
    kept = platform.optimization.show(result["id"])
    onnx, int8 = kept.report.variants
    assert (onnx.verdict, onnx.version) == (OptimizationVerdict.ACCEPTED, "late@2")
    assert (int8.verdict, int8.version) == (OptimizationVerdict.REFUSED, None)
    assert "nothing to quantize" in int8.reason
    with platform.database.read() as tx:
        assert {original.id, stage.env.data} <= set(relatives(tx, made.id, up=True, depth=None))


STEPS = ["submit", "measure variants", "read the report", "register onnx", "record"]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_no_step_takes_effect_twice_after_a_kill(stage: Stage, step: str) -> None:
    steps = KillableSteps()
    for after in (False, True):
        steps.dies, steps.after = step, after
        with pytest.raises(Killed):
            optimize(stage.services, steps, stage.given)
    steps.dies = None

    result = optimize(stage.services, steps, stage.given)

    assert [*steps.kept] == STEPS
    assert len(stage.jobs.submitted) == 1
    assert stage.env.platform.models.show("late").versions == 2
    assert [each.id for each in stage.env.platform.optimization.list().items] == [result["id"]]


@pytest.mark.slow
def test_cancelling_the_workflow_cancels_its_job(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []
    steps = KillableSteps()

    def broken_off(name: str, poll: Callable[[], Any], *, every_s: float = 1.0) -> Any:
        raise Conflict("cancelled before its next step")

    monkeypatch.setattr(steps, "wait", broken_off)
    monkeypatch.setattr(stage.jobs, "cancel", cancelled.append, raising=False)

    with pytest.raises(Conflict, match="cancelled"):
        optimize(stage.services, steps, stage.given)

    assert cancelled == [*stage.jobs.submitted]


def test_a_failed_job_fails_the_workflow(stage: Stage) -> None:
    stage.jobs.fails[PROGRAM] = JobState.FAILED, "exit status 1"

    with pytest.raises(Conflict, match=r"failed: exit status 1; see falaj jobs logs job_"):
        optimize(stage.services, KillableSteps(), stage.given)

    assert stage.env.platform.models.show("late").versions == 1
    assert stage.env.platform.optimization.list().items == ()


@pytest.mark.slow
def test_an_unreadable_report_fails_the_workflow(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = optimization_job.optimize

    def spoiled(*given: Any, outputs: Path, **more: Any) -> Any:
        made = real(*given, outputs=outputs, **more)
        (outputs / "report.json").write_text('{"rows": "many"}')
        return made

    monkeypatch.setattr(optimization_job, "optimize", spoiled)

    with pytest.raises(Conflict, match=r"report\.json of the job job_\w+ cannot be read"):
        optimize(stage.services, KillableSteps(), stage.given)


# ----------------------------------------------------------------------------------------------- a student

STUDENT_STEPS = ["submit the student", "train the student", "take the student"]


@pytest.fixture
def taught(stage: Stage) -> Stage:
    """With a student whose budget is wide."""
    stage.given |= {
        "recipes": ["onnx", "distill"],
        "budget": {"worse": 0.3, "metric": "auc", "relative": False},
    }
    return stage


@pytest.mark.slow
def test_a_student_is_trained_by_a_job_of_its_own_and_measured_with_the_others(taught: Stage) -> None:
    result = optimize(taught.services, KillableSteps(), taught.given)

    trained, measured = taught.jobs.submitted.values()
    assert [job.spec.module for job in (trained, measured)] == [STUDENT_PROGRAM, PROGRAM]
    assert trained.spec.experiment == "optimization"
    assert "held_out" not in trained.spec.inputs
    assert measured.spec.inputs["student"] in [each.blob for each in trained.outputs]
    kept = taught.env.platform.optimization.show(result["id"])
    assert kept.student == trained.id
    _, student = kept.report.variants
    assert student.recipe == "distill"
    assert student.measured is not None
    assert student.worse is not None
    with taught.env.platform.database.read() as tx:
        above = set(relatives(tx, kept.id, up=True, depth=None))
    assert {trained.id, measured.id, taught.env.data} <= above


@pytest.mark.slow
@pytest.mark.parametrize("step", [*STUDENT_STEPS, "submit", "record"])
def test_no_job_is_submitted_twice_after_a_kill_beside_a_student(taught: Stage, step: str) -> None:
    steps = KillableSteps()
    for after in (False, True):
        steps.dies, steps.after = step, after
        with pytest.raises(Killed):
            optimize(taught.services, steps, taught.given)
    steps.dies = None

    result = optimize(taught.services, steps, taught.given)

    assert [*steps.kept][:4] == [*STUDENT_STEPS, "submit"]
    assert len(taught.jobs.submitted) == 2
    assert [each.id for each in taught.env.platform.optimization.list().items] == [result["id"]]


def failed(stage: Stage) -> None:
    stage.jobs.fails[STUDENT_PROGRAM] = JobState.FAILED, "it ran longer than its limit of an hour"


def cancelled(stage: Stage) -> None:
    stage.jobs.fails[STUDENT_PROGRAM] = JobState.CANCELLED, "cancelled by dana"


def not_accepted(stage: Stage) -> None:
    stage.jobs.refuses[STUDENT_PROGRAM] = "the workspace has 1000 unfinished jobs"


def over_budget(stage: Stage) -> None:
    stage.jobs.waits_for = Reason.BUDGET


def out_of_reach(stage: Stage) -> None:
    stage.given["budget"] = {"worse": 0.0, "metric": "auc", "relative": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (failed, "failed: it ran longer than its limit of an hour; see falaj jobs logs job_"),
        (cancelled, "cancelled: cancelled by dana"),
        (not_accepted, "the job was not accepted: the workspace has 1000 unfinished jobs"),
        (over_budget, "was cancelled, as it could not start: it waits for money"),
        (out_of_reach, "no student reaches the budget; the best one's auc is"),
    ],
    ids=["failed", "cancelled", "not accepted", "over budget", "never within its quality budget"],
)
def test_without_a_student_the_variant_is_refused_and_the_others_go_on(
    taught: Stage, spoil: Callable[[Stage], None], words: str
) -> None:
    spoil(taught)

    result = optimize(taught.services, KillableSteps(), taught.given)

    onnx, student = taught.env.platform.optimization.show(result["id"]).report.variants
    assert onnx.measured is not None
    assert (student.recipe, student.verdict) == ("distill", OptimizationVerdict.REFUSED)
    assert words in student.reason
    assert student.measured is None
    assert len(taught.jobs.cancelled) == (1 if spoil is over_budget else 0)


@pytest.mark.slow
def test_a_report_of_a_student_that_lies_is_refused(taught: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    put = taught.jobs._put

    def lie(path: Path, job: Job) -> Any:
        if path.name == "student.json":
            path.write_text('{"width": "wide"}')
        return put(path, job)

    monkeypatch.setattr(taught.jobs, "_put", lie)

    result = optimize(taught.services, KillableSteps(), taught.given)

    _, student = taught.env.platform.optimization.show(result["id"]).report.variants
    assert "student.json of the job" in student.reason
    assert "cannot be read: 1 faults" in student.reason


# ------------------------------------------------------------------------------------------- real processes


@pytest.mark.slow
def test_a_real_job_measures_under_the_controller(
    tmp_path: Path, populated: Callable[[Any], OptimizationEnv]
) -> None:
    """Embedded, with the controller, the queue and the job's process of a running platform."""
    with fj.open(tmp_path / "home") as platform:
        env = populated(platform)

        work = platform.optimization.start("late@1", recipes=("onnx", "int8"), target="late")
        *_, ended = platform.workflows.watch(work.id)

        assert (ended.state, ended.error) == (WorkflowState.DONE, None)
        result = ended.result or {}
        kept = platform.optimization.show(result["id"])
        assert [each.recipe for each in kept.report.variants] == ["onnx", "int8"]
        assert [platform.models.version(each).sources for each in result["versions"]] == [(env.version.id,)]
        assert "evaluating log_loss" in b"".join(platform.jobs.logs(kept.job)).decode()


@pytest.mark.slow
def test_cancelling_it_under_the_controller_cancels_its_job(
    tmp_path: Path, populated: Callable[[Any], OptimizationEnv]
) -> None:
    with fj.open(tmp_path / "home") as platform:
        env = populated(platform)
        work = platform.optimization.start("late@1", data=env.data, target="late")
        (job,) = eventually(lambda: platform.jobs.list().items)

        platform.workflows.cancel(work.id)
        *_, ended = platform.workflows.watch(work.id)
        *_, stopped = platform.jobs.wait(job.id)

        assert (ended.state, stopped.state) == (WorkflowState.CANCELLED, JobState.CANCELLED)
