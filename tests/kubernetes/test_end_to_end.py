"""The demonstration's training on two nodes under Kueue: interrupted in every way, and exact to the end."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import falaj as fj
from cluster_testbed import ClusterTestbed
from command_line import CommandLine, command_line
from falaj.assembly.images.build import ImageRequest, build_image
from falaj.assembly.images.context import constraints
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.images import ImageBuild
from falaj.records.training.jobs import Job, JobState
from falaj.training.tables import attempts
from pod_jobs import PodJobs, pod_jobs
from polling import eventually
from worker_image import kept_base, lacks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

FLIGHTS = Path(__file__).parents[2] / "examples" / "flights"
NEEDS = ("numpy", "pandas", "python-dateutil", "six")
"""What the training needs besides the packages of a worker."""
EPOCHS, BATCH = 12, 512
HELD = """
import os, select, signal
import torch
import train_torch

woken, waker = os.pipe()
os.set_blocking(waker, False)
signal.set_wakeup_fd(waker)
calls = 0

class HeldLoss(torch.nn.BCEWithLogitsLoss):
    def forward(self, out, target):
        global calls
        calls += 1
        if calls == 60:  # it must not end before it is stopped, or told to go on
            print("held", flush=True)
            while not os.path.exists("/tmp/go") and not select.select([woken], [], [], 0.1)[0]:
                pass
        return super().forward(out, target)

torch.nn.BCEWithLogitsLoss = HeldLoss
train_torch.main()
"""
WAITS = """
import os, time
print("up", flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.1)
"""
TOUCH = ("python3", "-c", "open('/tmp/go', 'w')")


@dataclass
class Flights:
    """A platform with a queue of two GPUs in Kueue, the training set of the flights, and its command line."""

    jobs: PodJobs
    falaj: CommandLine
    folder: Path

    def train(self, script: str, *options: str, args: tuple[str, ...] = ()) -> Job:
        """Submit a script beside the demonstration's by `falaj train`."""
        small = ("--queue", "lab", "--gpus", "1", "--memory", "1GiB", "--detach", "--json")
        made = self.falaj.done("train", *small, *options, self.folder / script, "--", *args).json
        return self.show(made["id"])

    def fit(self, script: str, *options: str) -> Job:
        given = ("--dataset", "training=january", "--environment", "flights", "--framework", "torch")
        return self.train(
            script, *given, *options, "--priority", "low", args=("--exact", "--epochs", str(EPOCHS))
        )

    def show(self, job: str) -> Job:
        return self.jobs.platform.jobs.show(job)

    def is_held(self, job: Job, *, after: int = 0) -> int:
        """Wait until an attempt that follows `after` has trained for some steps, and holds; return its number."""

        def held() -> bool:
            now = self.show(job.id)
            assert not now.state.ended, (now.reason, self.jobs.log(job))
            log = self.jobs.log(job) if now.attempt > after and now.state is JobState.RUNNING else ""
            return log.count("held") == now.spec.nodes

        eventually(held)
        return self.show(job.id).attempt

    def running_pods(self, job: Job) -> list[Any]:
        return [each for each in self.jobs.pods(job) if each["status"]["phase"] == "Running"]

    def let_go(self, job: Job) -> None:
        for pod in self.running_pods(job):
            name = pod["metadata"]["name"]
            eventually(lambda name=name: self._touches(name))  # type: ignore[misc]

    def _touches(self, pod: str) -> bool:
        try:
            return self.jobs.kubectl("exec", pod, "--", *TOUCH) == ""
        except AssertionError:  # its kubelet was killed
            return False

    def endings(self, job: Job) -> list[tuple[str, str]]:
        """Return how each attempt ended, and why."""
        rows = [row for row in self.jobs.platform.rows(attempts) if row["job"] == job.id]
        return [(row["verdict"], row["reason"] or "") for row in sorted(rows, key=lambda row: row["number"])]


@pytest.fixture(scope="session")
def flights_image(cluster: ClusterTestbed, tmp_path_factory: pytest.TempPathFactory) -> ImageBuild:
    """Return the image of the worker with torch and what the flights need, on every node."""
    if cluster.program is None or (missing := lacks()) is not None:
        pytest.skip(f"needs a cluster whose nodes load images, and {missing or 'mmdebstrap'}")
    folder = tmp_path_factory.mktemp("flights-image")
    lock = folder / "flights.txt"
    lock.write_text("".join(f"{each.pin}\n" for each in constraints() if each.name in NEEDS))
    request = ImageRequest("worker", environment=lock, builder="none", output=folder / "image.tar")
    made = build_image(request, print, make_base=kept_base)
    cluster.load_images(folder / "image.tar")
    (folder / "image.tar").unlink()
    return made


@pytest.fixture
def flights(
    addons: ClusterTestbed, flights_image: ImageBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Flights]:
    prefix = f"e{uuid.uuid4().hex[:8]}"
    options = {
        "image": flights_image.pinned,
        "environments": {"flights": flights_image.pinned},
        "objects": "auto",
        "grace": "60s",
        "settings": 'scheduler = "kueue"',
    }
    shutil.copytree(FLIGHTS, tmp_path / "flights", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "flights" / "held.py").write_text(HELD)
    (tmp_path / "flights" / "waits.py").write_text(WAITS)
    try:
        with pod_jobs(addons, prefix, tmp_path, **options) as jobs, command_line(tmp_path, capsys) as falaj:  # type: ignore[arg-type]
            jobs.platform.queues.set("lab", quota=Quota(gpus=2))
            make_training_set(jobs.platform)
            yield Flights(jobs, falaj, tmp_path / "flights")
    finally:
        for name in ("node-0", "node-1"):
            addons.kubectl("uncordon", name)
            addons.kubectl("annotate", "node", name, f"cordon.falaj.dev/{prefix}-")
        kinds = "clusterqueue,cohort,resourceflavor,workloadpriorityclass"
        addons.kubectl("delete", kinds, "-l", f"falaj.dev/platform={prefix}", "--wait=false")


def make_training_set(platform: fj.Platform) -> None:
    """Ingest each tenth flight of January, and join what was known when it left."""
    sys.path.insert(0, str(FLIGHTS))
    try:
        import definitions

        import data
    finally:
        sys.path.remove(str(FLIGHTS))
    platform.apply(FLIGHTS / "definitions.py")
    names = [view.name for view in definitions.VIEWS]
    rows, weather = data.load_flights(range(1, 2), every=10), data.load_weather(range(1, 2))
    for name in ("flights", *names):
        platform.ingest(name, weather if name == "weather" else rows)
    platform.training_set("january", spine="flights", views=names)


def test_the_demonstrations_training_survives_everything_and_is_exact(
    flights: Flights, tmp_path: Path
) -> None:
    jobs, cluster, falaj = flights.jobs, flights.jobs.cluster, flights.falaj
    assert cluster is not None
    job = flights.fit("held.py", "--nodes", "2", "--spread")
    began = flights.is_held(job)
    assert {each["spec"]["nodeName"] for each in flights.running_pods(job)} == {"node-0", "node-1"}

    # Another job of higher priority takes one of its two GPUs, and it waits for both.
    urgent = flights.train("waits.py", "--priority", "high")
    eventually(lambda: flights.show(job.id).state is JobState.QUEUED)
    eventually(lambda: jobs.log(urgent) == "up\n")
    assert flights.show(job.id).preemptions == 1

    # It goes on in one pod, beside the other job, which then ends: one node has no room for both.
    falaj.done("jobs", "move", job.id, "--nodes", "1")
    alone = flights.is_held(job, after=began)
    flights.let_go(urgent)
    assert jobs.ends(urgent).state is JobState.DONE

    # The node of this pod is drained, and it moves to the other.
    (pod,) = flights.running_pods(job)
    falaj.done("nodes", "drain", pod["spec"]["nodeName"], "--reason", "a fan", "--yes")
    elsewhere = flights.is_held(job, after=alone)
    (moved,) = flights.running_pods(job)
    assert moved["spec"]["nodeName"] != pod["spec"]["nodeName"]
    falaj.done("nodes", "uncordon", pod["spec"]["nodeName"])

    # Two pods again, while the API server and a kubelet are killed.
    falaj.done("jobs", "move", job.id, "--nodes", "2")
    last = flights.is_held(job, after=elsewhere)
    before = {each["metadata"]["uid"] for each in flights.running_pods(job)}
    assert len(before) == 2
    cluster.restart("kube-apiserver")
    cluster.restart("kubelet-1")
    eventually(lambda: uids(flights, job) == before)
    flights.let_go(job)
    done = jobs.ends(job)

    assert (done.state, done.reason, done.attempt) == (JobState.DONE, None, last), jobs.log(job)
    endings = flights.endings(job)  # those between waited in Kueue, and were moved
    assert [endings[number - 1][0] for number in (began, alone, elsewhere, last)] == [
        *("preempted", "moved", "moved", "done")
    ], endings
    assert "Kueue preempted it" in endings[0][1]
    eventually(lambda: not jobs.objects("pods,trainjobs,jobsets,jobs,secrets,workloads"))

    undisturbed = jobs.ends(flights.fit("train_torch.py", "--nodes", "1"))
    assert (undisturbed.state, undisturbed.attempt) == (JobState.DONE, 1), jobs.log(undisturbed)
    expected = jobs.losses(undisturbed)
    assert len(expected) > 4 * 4
    assert all(len(values) == 1 for values in expected.values())
    assert jobs.losses(job) == expected
    assert jobs.points(job)["loss"] == len(expected)  # no step was computed twice
    assert_certified(flights, done, steps=max(expected), folder=tmp_path)


def uids(flights: Flights, job: Job) -> set[str]:
    try:
        return {each["metadata"]["uid"] for each in flights.running_pods(job)}
    except AssertionError:  # the API server is not there yet
        return set()


def assert_certified(flights: Flights, job: Job, *, steps: int, folder: Path) -> None:
    """Assert that the certificate of the run holds, and says on how many pods it was resumed."""
    platform = flights.jobs.platform
    found = {each.path: each.blob for each in platform.runs.show(job.run).artifacts}
    assert {"certificate.json", "model/model.onnx", "model.json"} <= found.keys()
    path = folder / "certificate.json"
    path.write_bytes(platform.get(found["certificate.json"]))
    rows = platform.features.load("january").read_all().num_rows
    samples = -(-rows * 9 // 10)
    certificate = fj.verify_certificate(path, samples=samples, batch_size=BATCH, seed=0, steps=steps)
    assert certificate.exact
    assert [(each.layout_before, each.layout) for each in certificate.resumes] == [
        ("ddp 2", "one process"),
        ("one process", "one process"),
        ("one process", "ddp 2"),
    ]
