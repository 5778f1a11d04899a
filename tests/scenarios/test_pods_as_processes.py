"""Jobs in pods, with a real controller and real workers over TLS; each pod is a process of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.drivers.kubernetes import cluster as cluster_module
from falaj.drivers.kubernetes import nodes as nodes_module
from falaj.drivers.kubernetes.isolation import namespaces as namespaces_module
from falaj.records.training.jobs import JobState
from platforms import make_platform
from pod_processes import FOLDER_VARIABLE, ProcessCluster, ProcessNamespaces, ProcessNodes
from polling import eventually

pytestmark = pytest.mark.slow

CONTROLLER = """
import sys
from datetime import timedelta
from falaj.apps.controller.process import main
from falaj.control.controller import ControllerTiming
from falaj.drivers.kubernetes import cluster, nodes
from falaj.drivers.kubernetes.isolation import namespaces
from pod_processes import ProcessCluster, ProcessNamespaces, ProcessNodes
cluster.ApiCluster, nodes.KubernetesNodes = ProcessCluster, ProcessNodes
namespaces.KubernetesNamespaces = ProcessNamespaces
main(timing=ControllerTiming(lease=timedelta(seconds=float(sys.argv[1])), every_s=0.03))
"""
VISION = f"localhost/vision:1@sha256:{'1' * 64}"
TALK = """
import falaj as fj, time, os, sys
print("hello", fj.job.attempt, flush=True)
fj.job.log(step=1, loss=0.5)
fj.job.flush()
print(sorted(fj.job.inputs), flush=True)
while os.environ.get("WAITS") and not os.path.exists(os.environ["WAITS"]):
    time.sleep(0.05)
fj.job.log(step=2, loss=0.25)
(fj.job.outputs / "result.txt").write_text("made")
print("done", flush=True)
"""


@dataclass
class PodControllers(ControllerProcesses):
    """Controllers whose jobs run in pods that are processes."""

    def start_controller(self, home: object = None) -> subprocess.Popen[bytes]:
        places = {
            "FALAJ_HOME": str(self.platform.home.path),
            "FALAJ_CONFIG_DIR": str(self.platform.home.config_dir),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(self.lease_s)],
            env=os.environ | places,
            stdin=subprocess.PIPE,
        )
        self.running.append(process)
        return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodControllers]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(FOLDER_VARIABLE, folder)
        monkeypatch.setattr(cluster_module, "ApiCluster", ProcessCluster)
        monkeypatch.setattr(nodes_module, "KubernetesNodes", ProcessNodes)
        monkeypatch.setattr(namespaces_module, "KubernetesNamespaces", ProcessNamespaces)
        port = free_port()
        toml = f"""
[jobs]
launcher = "kubernetes"
fence_after = "10s"

[kubernetes]
image = "worker:1"
agent = "127.0.0.1:{port}"
agent_url = "tls://127.0.0.1:{port}"

[kubernetes.environments]
vision = "{VISION}"
"""
        with make_platform(tmp_path, toml=toml) as platform, run_controllers(platform, tmp_path) as plain:
            yield PodControllers(plain.platform, plain.folder, plain.lease_s, plain.running)


def test_a_job_runs_in_a_pod_and_reports_everything(controllers: PodControllers) -> None:
    controllers.start_controller()

    job = controllers.ends(controllers.submit(TALK, memory_bytes=512 << 20))

    assert (job.state, job.reason) == (JobState.DONE, None), controllers.log(job)
    assert controllers.log(job) == "hello 1\n[]\ndone\n"
    assert controllers.points(job)["loss"] == 2
    assert [each.path for each in controllers.platform.jobs.show(job.id).outputs] == ["result.txt"]


def test_a_run_says_in_which_image_and_with_which_packages_it_ran(controllers: PodControllers) -> None:
    controllers.start_controller()
    ran = {}
    for environment in (None, "vision"):
        job = controllers.ends(controllers.submit("print('hello')", environment=environment))
        details = controllers.platform.runs.show(job.run)
        blob = next(each.blob for each in details.artifacts if each.path == "environment.txt")
        listed = b"".join(controllers.platform.blobs.read(blob)).decode().splitlines()
        ran[environment] = {each.key: each.value for each in details.tags}["falaj.image"], listed

    assert ran[None][0] == f"worker@sha256:{'5' * 64}"
    assert ran[None][1][:2] == ["# image worker:1", f"# ran worker@sha256:{'5' * 64}"]
    assert ran["vision"][1][0] == f"# image {VISION}"
    assert any(line.startswith("pydantic==") for line in ran["vision"][1])


def test_a_killed_controller_costs_a_running_pod_nothing(controllers: PodControllers, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = controllers.start_controller()
    job = controllers.submit(TALK, env={"WAITS": str(go)})
    eventually(lambda: "hello" in controllers.log(job))

    first.kill()
    first.wait()
    controllers.start_controller()
    eventually(controllers.is_led_by_the_newest)
    go.touch()
    ended = controllers.ends(job)

    assert (ended.state, ended.reason, ended.attempt) == (JobState.DONE, None, 1), controllers.log(job)
    assert controllers.log(job) == "hello 1\n[]\ndone\n"
    assert controllers.losses(job) == {1: {0.5}, 2: {0.25}}
    assert len(ProcessCluster().pod_folders()) == 1


def test_a_second_pod_of_a_node_is_refused_and_runs_nothing(
    controllers: PodControllers, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    controllers.start_controller()
    job = controllers.submit(TALK, env={"WAITS": str(go)})
    eventually(lambda: "hello" in controllers.log(job))
    cluster = ProcessCluster()
    (job_object,) = (
        found.name for found in cluster.list_objects("batch/v1", "Job", namespace="falaj-default")
    )

    second = cluster.start_pod(job_object)

    eventually(
        lambda: json.loads((second / "pod.json").read_text())["status"]["phase"] == "Failed",
    )
    assert "is run by another pod" in (second / "log").read_text()
    go.touch()
    assert controllers.ends(job).state is JobState.DONE
    assert controllers.log(job).count("hello") == 1


def test_a_failing_script_has_its_exit_code_and_its_exception(controllers: PodControllers) -> None:
    controllers.start_controller()

    job = controllers.ends(controllers.submit("raise ValueError('bad column')"))

    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert job.reason == "Exit code 1: ValueError: bad column"


def test_outputs_that_are_too_large_fail_the_job_with_a_sentence(controllers: PodControllers) -> None:
    script = "import falaj as fj\n(fj.job.outputs / 'a.bin').write_bytes(bytes(900 << 10))\n"
    script += "(fj.job.outputs / 'b.bin').write_bytes(bytes(900 << 10))"
    controllers.start_controller()

    job = controllers.ends(controllers.submit(script, disk_bytes=1 << 20))

    assert job.state is JobState.FAILED
    assert job.reason is not None
    assert "disk" in job.reason or "could not be stored" in job.reason


SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("hello", flush=True)
time.sleep(600)
"""


def test_a_cancelled_job_may_save_itself(controllers: PodControllers) -> None:
    controllers.start_controller()
    job = controllers.submit(SAVES)
    eventually(lambda: "hello" in controllers.log(job))

    controllers.platform.jobs.cancel(job.id)

    assert controllers.ends(job).state is JobState.CANCELLED
    assert controllers.log(job) == "hello\nsaved\n"


def test_a_pod_that_the_cluster_ends_saves_itself_and_its_job_is_queued_again(
    controllers: PodControllers,
) -> None:
    controllers.start_controller()
    job = controllers.submit(SAVES)
    eventually(lambda: "hello" in controllers.log(job))
    cluster = ProcessCluster()
    (pod,) = cluster.pod_folders()

    cluster.delete_pod(pod)

    eventually(lambda: controllers.platform.jobs.show(job.id).attempt == 2)
    assert (pod / "log").read_text() == "hello\nsaved\n"
    controllers.platform.jobs.cancel(job.id)
    controllers.ends(job)


def test_a_pod_without_a_controller_stops_when_its_lease_has_run_out(controllers: PodControllers) -> None:
    controller = controllers.start_controller()
    job = controllers.submit(SAVES)
    eventually(lambda: "hello" in controllers.log(job))
    (pod,) = ProcessCluster().pod_folders()

    controller.kill()
    controller.wait()

    eventually(lambda: "saved" in (pod / "log").read_text())
    controllers.start_controller()
    eventually(lambda: controllers.platform.jobs.show(job.id).attempt == 2)
    controllers.platform.jobs.cancel(job.id)
    controllers.ends(job)


WRONG_CLOCK = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {ahead_s}
time.time_ns = lambda: _time_ns() + {ahead_s} * 10**9
"""
TELLS_THE_TIME = """
import falaj as fj, time
print(time.time(), flush=True)
time.sleep(12)
fj.job.log(step=1, loss=0.5)
"""


@pytest.mark.parametrize("ahead_s", [-600, 600])
def test_a_node_whose_clock_is_wrong_keeps_its_lease_and_reports_the_platforms_times(
    controllers: PodControllers, ahead_s: int
) -> None:
    python = Path(os.environ[FOLDER_VARIABLE]) / "python"
    python.mkdir()
    (python / "sitecustomize.py").write_text(WRONG_CLOCK.format(ahead_s=ahead_s))
    controllers.start_controller()
    before = datetime.now(UTC)

    job = controllers.ends(controllers.submit(TELLS_THE_TIME))  # longer than its lease

    after = datetime.now(UTC)
    assert (job.state, job.reason, job.attempt) == (JobState.DONE, None, 1), controllers.log(job)
    told = datetime.fromtimestamp(float(controllers.log(job)), UTC)
    assert abs((told - before).total_seconds() - ahead_s) < 300
    assert job.started_at is not None
    assert job.ended_at is not None
    assert before <= job.started_at <= job.ended_at <= after
    (batch,) = controllers.platform.runs.metrics(job.run, "loss")
    assert before <= batch.column("timestamp").to_pylist()[0] <= after
