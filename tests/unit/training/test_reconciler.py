"""The job reconciler, killed between any two of its steps: every job ends exactly once, no attempt runs twice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import model_files
from crash_points import CrashPoint, Killed
from falaj.control.jobs import attempts as attempting
from falaj.control.jobs import reconciler as reconciling
from falaj.control.jobs.agent_server import AgentServer, is_owner
from falaj.governance.operations.caller import acting_as
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.governance.identity import Role
from falaj.records.training.jobs import Job, JobState
from falaj.training.runtime.agent.agents import MetricValue
from falaj.training.runtime.agent.protocol import SECRET_VARIABLE, SocketAgent, receive, send_head
from falaj.training.runtime.checkpointing.storage.store import Retention, SaveId
from falaj.training.runtime.errors import AgentLost, CheckpointDamaged, InvalidTraining
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.tables import attempts
from job_harness import DONE, FAILED, JobHarness
from polling import PATIENCE_S, eventually


@pytest.fixture
def harness(light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    """Attempts run in the reconciler's own thread, so that a test controls the order of events."""

    def at_once(target: Callable[[], None], **_: Any) -> threading.Thread:
        target()
        return threading.Thread()

    monkeypatch.setattr(reconciling, "start_thread", at_once)
    monkeypatch.setattr(reconciling, "FIRST_BACKOFF_S", 0.0)
    return light_harness


def ended(harness: JobHarness, job: Job) -> Job:
    found = harness.jobs.show(job.id)
    assert found.state.ended, found
    return found


def leave_output(launch: Launch) -> AttemptState:
    (launch.directory / "outputs" / "model").mkdir()
    (launch.directory / "outputs" / "model" / "m.bin").write_bytes(b"weights")
    (launch.directory / "outputs" / "passwd").symlink_to("/etc/passwd")
    return DONE


# -------------------------------------------------------------------------------------------- running jobs


@pytest.mark.slow
def test_a_job_that_names_no_limits_has_its_share_of_the_machine(harness: JobHarness) -> None:
    seen: list[Launch] = []
    enforced = ("memory: 4 GiB by cgroup", "disk: 1 GiB, measured")

    def program(launch: Launch) -> AttemptState:
        seen.append(launch)
        return replace(DONE, limits=enforced)

    harness.launcher.program = program
    jobs = [harness.submit(cpus=2), harness.submit(memory_bytes=1 << 20, disk_bytes=1 << 30)]
    harness.reconciler().tick()

    unnamed, named = seen
    assert unnamed.memory_bytes == 4 << 30  # half of 8 GiB for half of the CPUs, at least 4 GiB for a process
    assert unnamed.disk_bytes is not None
    assert (named.memory_bytes, named.disk_bytes) == (1 << 20, 1 << 30)
    assert [harness.jobs.show(job.id).limits for job in jobs] == [enforced, enforced]


@pytest.mark.slow
def test_defaults_of_the_configuration_hold_for_a_job_that_names_no_limits(harness: JobHarness) -> None:
    seen: list[Launch] = []
    harness.host = replace(harness.host, memory_default_bytes=1 << 29, disk_default_bytes=1 << 28)
    harness.launcher.program = lambda launch: seen.append(launch) or DONE
    harness.submit()

    harness.reconciler().tick()

    assert [(each.memory_bytes, each.disk_bytes) for each in seen] == [(1 << 29, 1 << 28)]


@pytest.mark.slow
def test_a_job_runs_with_its_inputs_and_leaves_its_outputs(harness: JobHarness) -> None:
    seen: dict[str, Any] = {}

    def program(launch: Launch) -> AttemptState:
        inputs = Path(launch.environment["FALAJ_INPUTS"])
        seen["inputs"] = {path.name: path.read_bytes() for path in inputs.iterdir()}
        seen["launch"] = launch
        seen["mode"] = launch.directory.stat().st_mode & 0o777
        return leave_output(launch)

    harness.launcher.program = program
    harness.platform.put("flights.csv", b"a,b\n")
    job = harness.submit(inputs={"f": "flights.csv"}, args=["--lr", "1"], env={"SEED": "7"})

    harness.reconciler().tick()

    done = ended(harness, job)
    launch = seen["launch"]
    assert (done.state, [each.path for each in done.outputs]) == (JobState.DONE, ["model/m.bin"])
    assert harness.platform.get(done.outputs[0].blob) == b"weights"
    assert seen["inputs"] == {"f.csv": b"a,b\n"}
    assert seen["mode"] == 0o700
    assert list(launch.command[2:]) == ["train.py", "--lr", "1"]
    assert (launch.environment["SEED"], launch.environment["FALAJ_ATTEMPT"]) == ("7", "1")
    assert b"".join(harness.jobs.logs(job.id)) == b"what it printed\n"
    artifacts = {each.path for each in harness.platform.runs.show(job.run).artifacts}
    assert artifacts == {"model/m.bin", "log.txt", "environment.txt"}
    assert list(harness.host.folder.iterdir()) == []
    up = {node.id for node in harness.platform.lineage.graph(done.outputs[0].blob, direction="up")}
    assert {job.id, job.run} <= up


@pytest.mark.slow
def test_a_model_version_is_a_folder_of_its_files(harness: JobHarness) -> None:
    platform, seen = harness.platform, {}
    blobs = [platform.blobs.upload(iter([data])).id for data in (model_files.onnx(), b'{"a": 1}')]
    made = platform.models.register("churn", files=(blobs[0],), paths=("deep/model.onnx",))

    def program(launch: Launch) -> AttemptState:
        inputs = launch.directory / "inputs"
        seen.update(
            {p.relative_to(inputs).as_posix(): p.read_bytes() for p in inputs.rglob("*") if p.is_file()}
        )
        return DONE

    harness.launcher.program = program
    job = harness.submit(inputs={"champion": "churn@1", "same": made.id})

    harness.reconciler().tick()

    assert ended(harness, job).state is JobState.DONE
    assert seen == dict.fromkeys(("champion/deep/model.onnx", "same/deep/model.onnx"), model_files.onnx())


@pytest.mark.slow
def test_jobs_that_do_not_fit_together_run_one_after_the_other(light_harness: JobHarness) -> None:
    light_harness.launcher.program = lambda _: AttemptState("running")
    first, second = light_harness.submit(cpus=3), light_harness.submit(cpus=3)
    reconciler = light_harness.reconciler()

    reconciler.tick()

    eventually(lambda: light_harness.launcher.runs)
    assert [light_harness.jobs.show(job.id).state for job in (first, second)] == ["running", "queued"]
    light_harness.launcher.known[f"{first.id}/1"] = DONE
    eventually(lambda: light_harness.jobs.show(first.id).state is JobState.DONE)
    reconciler.tick()
    assert light_harness.jobs.show(second.id).state is JobState.RUNNING
    reconciler.stop()


@pytest.mark.slow
def test_a_failure_is_tried_again_after_its_pause(harness: JobHarness) -> None:
    outcomes = iter([FAILED, DONE])
    harness.launcher.program = lambda _: next(outcomes)
    job = harness.submit(retries=1)
    reconciler = harness.reconciler()

    reconciler.tick()
    reconciler.tick()

    assert harness.jobs.show(job.id).state is JobState.QUEUED  # it is in backoff
    harness.platform.clock.advance(timedelta(seconds=2))
    reconciler.tick()
    done = ended(harness, job)
    assert (done.state, done.attempt) == (JobState.DONE, 2)
    paths = {each.path for each in harness.platform.runs.show(job.run).artifacts}
    assert paths == {"log.1.txt", "log.txt", "environment.txt"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (FAILED, "Exit code 1: ValueError: no"),
        (AttemptState("lost", reason="what watched over it was killed"), "what watched over it was killed"),
        (AttemptState("ended", signal=9, reason="Killed by SIGKILL"), "Killed by SIGKILL"),
    ],
)
def test_a_failed_attempt_is_reported_with_its_reason(
    harness: JobHarness, state: AttemptState, reason: str
) -> None:
    harness.launcher.program = lambda _: state
    job = harness.submit()

    harness.reconciler().tick()

    failed = ended(harness, job)
    assert (failed.state, failed.reason, failed.exit_code) == (JobState.FAILED, reason, state.exit_code)
    assert failed.outputs == ()


@pytest.mark.slow
def test_code_without_the_script_fails_before_it_starts(harness: JobHarness) -> None:
    job = harness.submit(files={"other.py": ""}, retries=3)

    harness.reconciler().tick()

    assert "which has other.py" in (harness.jobs.show(job.id).reason or "")
    assert harness.launcher.runs == {}


def test_a_job_whose_owner_was_disabled_does_not_run(harness: JobHarness) -> None:
    worker = harness.platform.join("worker", Role.DEVELOPER)
    with acting_as(worker):
        job = harness.submit()
    harness.platform.users.disable("worker")

    harness.reconciler().tick()

    failed = ended(harness, job)
    assert failed.state is JobState.FAILED
    assert "may no longer act" in (failed.reason or "")
    assert harness.launcher.runs == {}


@pytest.mark.slow
def test_an_output_with_an_invalid_name_fails_the_job(harness: JobHarness) -> None:
    def program(launch: Launch) -> AttemptState:
        (launch.directory / "outputs" / "a\\b").write_text("x")
        return DONE

    harness.launcher.program = program
    job = harness.submit()

    harness.reconciler().tick()

    failed = ended(harness, job)
    assert failed.state is JobState.FAILED
    assert "could not be stored" in (failed.reason or "")


# ---------------------------------------------------------------------------------------- cancel and stop


@pytest.mark.slow
def test_a_running_job_is_cancelled(light_harness: JobHarness) -> None:
    light_harness.launcher.program = lambda _: AttemptState("running")
    job = light_harness.submit(retries=5)
    reconciler = light_harness.reconciler()
    reconciler.tick()
    eventually(lambda: light_harness.launcher.runs)

    light_harness.jobs.cancel(job.id)
    reconciler.tick()

    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.CANCELLED)
    assert light_harness.launcher.stopped == [f"{job.id}/1"]


@pytest.mark.slow
def test_a_reconciler_that_stops_requeues_its_jobs(light_harness: JobHarness) -> None:
    light_harness.launcher.program = lambda _: AttemptState("running")
    job = light_harness.submit()
    reconciler = light_harness.reconciler()
    reconciler.tick()
    eventually(lambda: light_harness.launcher.runs)

    reconciler.stop()

    back = light_harness.jobs.show(job.id)
    assert (back.state, back.reason) == (JobState.QUEUED, "interrupted: the platform stopped")
    light_harness.launcher.program = lambda _: DONE
    light_harness.reconciler().tick()
    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    assert light_harness.launcher.runs == {f"{job.id}/1": 1, f"{job.id}/2": 1}


def test_a_job_that_was_being_interrupted_when_its_reconciler_was_killed_is_not_counted_as_failed(
    harness: JobHarness,
) -> None:
    job = harness.begin(harness.submit())
    harness.platform.sql("UPDATE training_jobs SET interrupting = true")
    harness.launcher.known[f"{job.id}/1"] = AttemptState("ended", signal=15, reason="Killed by SIGTERM")

    harness.reconciler().tick()

    assert ended(harness, job).state is JobState.DONE
    assert [row["verdict"] for row in harness.platform.rows(attempts)] == ["interrupted", "done"]
    assert harness.launcher.runs == {f"{job.id}/2": 1}


# --------------------------------------------------------------------------------------- killed at any step


@pytest.mark.slow
def test_a_kill_at_any_step_loses_nothing_and_runs_nothing_twice(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.launcher.program = leave_output
    trap, step, was_killed = CrashPoint(harness, monkeypatch), 0, True
    while was_killed:
        job = harness.submit()
        trap.left = step
        was_killed = False
        try:
            harness.reconciler().tick()
        except Killed:
            was_killed = True
        trap.left = None
        harness.reconciler().tick()

        done = ended(harness, job)
        assert (done.state, done.attempt) == (JobState.DONE, 1), step
        assert harness.launcher.runs[f"{job.id}/1"] == 1, step
        assert [each.path for each in done.outputs] == ["model/m.bin"]
        assert harness.launcher.known == {}
        assert list(harness.host.folder.iterdir()) == [], step
        step += 1

    assert step > 15
    settled = [entry for entry in harness.platform.entries() if entry["action"] == "jobs.finish"]
    assert len([entry for entry in settled if entry["outcome"] == "done"]) == step


@pytest.mark.slow
def test_a_kill_at_any_step_gives_a_failing_job_no_extra_attempt(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.launcher.program = lambda _: FAILED
    trap = CrashPoint(harness, monkeypatch)
    for step in range(0, 40, 3):
        job = harness.submit(retries=1)
        trap.left = step
        for _ in range(3):
            with suppress(Killed):
                harness.reconciler().tick()  # each moves the clock past the backoff
        trap.left = None
        for _ in range(3):
            harness.reconciler().tick()

        assert (ended(harness, job).state, ended(harness, job).attempt) == (JobState.FAILED, 2), step
        assert [harness.launcher.runs[f"{job.id}/{number}"] for number in (1, 2)] == [1, 1], step


# ----------------------------------------------------------------------------------------------- the agent


class RunningAgent(NamedTuple):
    harness: JobHarness
    job: Job
    reconciler: reconciling.JobReconciler
    connect: Callable[..., SocketAgent]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[AgentServer]:
    """The sockets that were opened, for tests that close one as a killed process would."""
    servers: list[AgentServer] = []

    def open_server(*args: Any, **options: Any) -> AgentServer:
        servers.append(AgentServer(*args, **options))
        return servers[-1]

    monkeypatch.setattr(attempting, "AgentServer", open_server)
    return servers


@pytest.fixture
def agent(
    light_harness: JobHarness, opened: list[AgentServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningAgent]:
    """A running attempt, and a function that connects to its agent."""
    light_harness.launcher.program = lambda _: AttemptState("running")
    job = light_harness.submit()
    reconciler = light_harness.reconciler()
    reconciler.tick()
    variables = light_harness.agent_variables(job)
    path = Path(variables["FALAJ_AGENT"])
    monkeypatch.setenv(SECRET_VARIABLE, variables[SECRET_VARIABLE])
    eventually(path.exists)
    with ExitStack() as stack:

        def connect(patience_s: float = PATIENCE_S) -> SocketAgent:
            near = SocketAgent.connect(str(path), patience_s=patience_s)
            stack.callback(near.close)
            return near

        yield RunningAgent(light_harness, job, reconciler, connect)
    reconciler.stop()


@pytest.mark.slow
def test_another_job_cannot_speak_to_the_agent(agent: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = agent.connect()
    other = agent.harness.submit(name="other")

    for secret in ("", agent.harness.agent_variables(other)[SECRET_VARIABLE], "é" * 64):
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        with pytest.raises(AgentLost):
            agent.connect(patience_s=0.2).checkpoints().steps()

    assert mine.heartbeat()


@pytest.mark.slow
def test_a_run_logs_through_its_agent(agent: RunningAgent) -> None:
    harness, job, near = agent.harness, agent.job, agent.connect()

    near.log([MetricValue(1, "loss", 0.5), MetricValue(2, "loss", float("nan"))])
    near.params({"lr": 0.1, "layers": [1, 2]})
    near.params({"lr": 0.2, "seed": 3})
    near.progress(2, 10)

    run = harness.platform.runs.show(job.run)
    assert [(each.key, each.points, each.last_step) for each in run.metrics] == [("loss", 2, 2)]
    kept = {each.key: each.value for each in run.params if not each.key.startswith("job.")}
    assert kept == {"lr": "0.1", "layers": "[1, 2]", "seed": "3"}
    far = harness.jobs.show(job.id).progress
    assert far is not None
    assert (far.step, far.total) == (2, 10)
    assert near.heartbeat()


@pytest.mark.slow
def test_checkpoints_are_stored_encrypted_with_the_job(agent: RunningAgent) -> None:
    harness, job, near = agent.harness, agent.job, agent.connect().checkpoints()
    large = bytes(range(256)) * 10_000

    for step in range(5):
        mark = SaveId(step, f"{step:032x}")
        for number in range(2):
            near.save_part(mark, number, [large, bytes([step, number])])
        near.commit(mark, [len(large) + 2] * 2, b"manifest", Retention(2, best=1))

    assert near.steps() == [4, 3, 1]
    assert near.load_part(4, 1, offset=len(large) - 1, length=100) == b"\xff\4\1"
    assert near.load_manifest(4) == b"manifest"
    kept = harness.jobs.checkpoints(job.id)
    assert [(each.step, len(each.parts)) for each in kept] == [(4, 2), (3, 2), (1, 2)]
    for wrong in (lambda: near.load_manifest(0), lambda: near.load_part(4, 2, offset=0, length=1)):
        with pytest.raises(CheckpointDamaged):
            wrong()
    near.close()


@pytest.mark.slow
def test_a_checkpoint_is_committed_whole_or_not_at_all(agent: RunningAgent) -> None:
    near, other = agent.connect().checkpoints(), agent.connect().checkpoints()
    mark = SaveId(7, "7" * 32)
    near.save_part(mark, 0, [b"mine"])

    with pytest.raises(InvalidTraining, match="1 of its 2 parts"):
        near.commit(mark, [4, 4], b"manifest", Retention())
    other.save_part(mark, 1, [b"ours"])
    for _ in range(2):  # a call whose answer was lost is sent again
        near.commit(mark, [4, 4], b"manifest", Retention())

    assert near.steps() == [7]
    assert near.load_part(7, 1, offset=0, length=4) == b"ours"
    near.close()
    other.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("save_part", {"step": -1, "save": "0" * 32, "number": 0}),
        ("save_part", {"step": 1, "save": "../../etc", "number": 0}),
        ("save_part", {"step": 1, "save": "0" * 32, "number": 1 << 40}),
        ("save_part", {"step": 1, "save": "0" * 50_000, "number": 0}),
        ("commit_checkpoint", {"step": 1, "save": "0" * 32, "sizes": [], "keep": 10**9}),
        ("commit_checkpoint", {"step": 1, "save": "0" * 32, "sizes": 3, "keep": 3}),
        ("load_part", {"step": 1, "number": 0, "offset": -1, "length": 1}),
    ],
)
def test_an_invalid_part_is_refused(agent: RunningAgent, call: str, values: dict[str, Any]) -> None:
    near = agent.connect()

    with pytest.raises(InvalidTraining):
        near.call(call, **values)

    assert near.heartbeat()


@pytest.mark.slow
def test_a_fit_resumes_from_checkpoints_of_the_platform(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))

    def train(steps: int, *, kept: bool = True) -> FitResult:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
        options: dict[str, Any] = {"batch_size": 8, "checkpoint_every": 2, "device": "cpu", "tune": "off"}
        run = agent.connect() if kept else None
        return fit(model, nn.functional.mse_loss, rows, steps=steps, run=run, **options)

    straight = train(12, kept=False)
    first = train(6)
    newest = agent.harness.jobs.checkpoints(agent.job.id)[0]
    (stored,) = agent.harness.platform.home.path.glob(f"**/{newest.parts[0].blob}")
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    again = train(12)

    assert newest.step == 6
    assert "skipped the checkpoint of step 6" in capsys.readouterr().err
    assert again.resumed_from == 4
    assert first.losses[:4] + again.losses == straight.losses
    assert [each.step for each in agent.harness.jobs.checkpoints(agent.job.id)] == [12, 10, 8]


@pytest.mark.slow
def test_each_process_of_a_job_saves_its_own_part(agent: RunningAgent, tmp_path: Path) -> None:
    script = Path(__file__).with_name("saving_fit.py")
    lives = [
        {"processes": 2, "parallel": "fsdp", "steps": 4, "checkpoint_every": 2},
        {"processes": 1, "steps": 6, "checkpoint_every": 2},
    ]
    without_folder = [life | {"kept": False, "plain": True, "accumulate": 2} for life in lives]

    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), json.dumps(without_folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | agent.harness.agent_variables(agent.job),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert None not in found, done.stderr
    assert [life["from"] for life in found] == [0, 4]
    parts = {each.step: len(each.parts) for each in agent.harness.jobs.checkpoints(agent.job.id)}
    assert parts == {6: 1, 4: 2, 2: 2}


@pytest.mark.slow
def test_malformed_calls_are_refused_and_the_agent_stays(agent: RunningAgent) -> None:
    near = agent.connect(patience_s=0.5)

    with pytest.raises(InvalidTraining):
        near.log([MetricValue(1, "a\0b", 1.0)])
    with pytest.raises(InvalidTraining):
        near.call("drop_tables")
    with pytest.raises(AgentLost, match=r"closed the connection|reset|closed|pipe"):
        near.call("heartbeat", [bytes(2 << 20)])
    assert agent.connect().heartbeat()


@pytest.mark.slow
def test_a_number_that_is_too_large_is_refused_and_the_connection_stays(agent: RunningAgent) -> None:
    """If it were disconnected, a run would retry for a minute and then end without a reason."""
    near = agent.connect()
    send_head(near._stream, {"call": "log", "metrics": [[1, "a", 10**400]]}, 0)
    near._stream.flush()

    head, _ = receive(near._stream) or ({}, b"")

    assert head.get("error") == InvalidTraining.code
    assert near.heartbeat()


@pytest.mark.slow
def test_a_declared_body_size_does_not_allocate_memory(
    agent: RunningAgent,
) -> None:
    near = agent.connect()
    send_head(near._stream, {"call": "log", "metrics": []}, 1 << 50)
    near._stream.flush()

    assert receive(near._stream) is None  # it disconnected
    assert agent.connect().heartbeat()


@pytest.mark.slow
def test_a_run_survives_a_restart_of_its_agent(agent: RunningAgent, opened: list[AgentServer]) -> None:
    near = agent.connect(patience_s=PATIENCE_S)
    near.log([MetricValue(1, "loss", 1.0)])
    opened[0].close()
    (kept,) = agent.reconciler._attempts.values()

    with ExitStack() as again:
        late = threading.Timer(0.3, again.enter_context, [kept.attempt._agent()])
        late.start()
        near.log([MetricValue(2, "loss", 0.5)])
        late.join()

    (metric,) = agent.harness.platform.runs.show(agent.job.run).metrics
    assert (metric.points, metric.last) == (2, 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_header_is_freed_while_its_body_arrives_slowly(agent: RunningAgent) -> None:
    junk = [[[]]] * 150_000
    near = agent.connect()
    send_head(near._stream, {"call": "save_part", "step": 1, "save": "0" * 32, "number": 0, "junk": junk}, 10)
    near._stream.flush()
    del junk

    eventually(lambda: tracemalloc.get_traced_memory()[1] > 10 << 20)
    eventually(lambda: tracemalloc.get_traced_memory()[0] < 4 << 20)
    assert agent.connect().heartbeat()


@pytest.mark.slow
def test_a_job_that_disconnects_during_a_checkpoint_is_not_an_internal_error(
    agent: RunningAgent, caplog: pytest.LogCaptureFixture
) -> None:
    near = agent.connect()
    send_head(near._stream, {"call": "save_part", "step": 1, "save": "0" * 32, "number": 0}, 10)
    near._stream.flush()
    caplog.set_level("DEBUG", logger="falaj.controller")

    near.close()

    eventually(lambda: "ended" in caplog.text)
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [-1, 10**30])
def test_progress_is_a_count(agent: RunningAgent, step: int) -> None:
    with pytest.raises(InvalidTraining, match="62 bits"):
        agent.connect().progress(step, 10)

    assert agent.harness.jobs.show(agent.job.id).progress is None


def test_only_the_uid_of_a_job_reaches_its_agent(tmp_path: Path) -> None:
    class Home:
        """A directory of another user."""

        def stat(self) -> Any:
            return SimpleNamespace(st_uid=os.getuid() + 1)

    near, far = socket.socketpair()

    with near, far:
        assert is_owner(near, tmp_path)
        assert not is_owner(near, Home())  # type: ignore[arg-type]
        assert not is_owner(near, tmp_path / "gone")
