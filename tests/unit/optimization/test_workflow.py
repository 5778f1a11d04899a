"""The optimization workflow: a job, its report, and accepted variants as versions, each once despite kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import falaj as fj
from falaj.control.pipelines.optimization import optimize
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
from falaj.records.names import new_id
from falaj.records.optimization import OptimizationVerdict
from falaj.records.registry import FileFormat
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
        self.fails = ""

    def submit(self, spec: JobSpec, *, code: str | None = None, workspace: str | None = None) -> Job:
        if self.submitted:  # the key of the step has been seen
            return next(iter(self.submitted.values()))
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
            ended = {"state": JobState.FAILED, "reason": self.fails} if self.fails else self._run(found)
            self.submitted[job] = found.model_copy(update=ended)
            return found
        return self.submitted[job]

    def _run(self, job: Job) -> dict[str, Any]:
        inputs, outputs = self._folder / "in", self._folder / "out"
        (inputs / "model").mkdir(parents=True)
        version = self._platform.models.version(job.spec.inputs["model"])
        for file in version.files:
            content = b"".join(self._platform.models.read(version.id, file.path))
            (inputs / "model" / file.path).write_bytes(content)
        pq.write_table(
            self._platform.features.load(job.spec.inputs["data"]).read_all(), inputs / "data.parquet"
        )
        optimization_job.optimize(
            parse_settings(job.spec.args), inputs=inputs, outputs=outputs, log=lambda _: None
        )
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
    stage.jobs.fails = "exit status 1"

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
        (job,) = eventually(lambda: platform.jobs.list().items, within=60)

        platform.workflows.cancel(work.id)
        *_, ended = platform.workflows.watch(work.id)
        *_, stopped = platform.jobs.wait(job.id)

        assert (ended.state, stopped.state) == (WorkflowState.CANCELLED, JobState.CANCELLED)
