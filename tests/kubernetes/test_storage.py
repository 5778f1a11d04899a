"""Storage of jobs in pods of a real cluster: claims that an administrator made, and disk space from a class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster_testbed import ClusterTestbed
from falaj.assembly.images.build import ImageRequest, build_image
from falaj.assembly.images.context import constraints
from falaj.errors import InvalidInput
from falaj.records.training.jobs import JobState
from pod_jobs import PodJobs, address_of_this_machine, pod_jobs
from polling import eventually
from worker_image import kept_base

READS = """
import falaj as fj, os
print((fj.job.volumes["images"] / "1.txt").read_text(), flush=True)
for name in ("images", "results"):
    try:
        (fj.job.volumes[name] / "made.txt").write_text("by a job")
        print(name, "was written", flush=True)
    except OSError as error:
        print(name, os.strerror(error.errno), flush=True)
(fj.job.outputs / "large").write_bytes(bytes(1 << 20))
"""


@pytest.fixture
def jobs(worker_image: ClusterTestbed, namespace: str, tmp_path: Path) -> Iterator[PodJobs]:
    volumes = f"""
[kubernetes.volumes.images]
claim = "images"
path = "vision/raw"
workspaces = ["default"]

[kubernetes.volumes.results]
claim = "results"
workspaces = ["default"]
read_only = false

[kubernetes.volumes.risk]
claim = "images"
workspaces = ["risk"]

[kubernetes.scratch]
size = "64MiB"
storage_class = "{namespace}-scratch"
"""
    names = [f"{namespace}-{each}" for each in ("images", "results", "scratch")]
    with pod_jobs(worker_image, namespace, tmp_path, settings=volumes) as made:
        try:
            yield made
        finally:
            worker_image.kubectl("delete", "pv", *names, "--ignore-not-found", "--wait=false")


def add_volume(jobs: PodJobs, name: str, folder: Path, *, namespace: str) -> None:
    """Make a PersistentVolume of a folder of the nodes, as an administrator."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    spec = {
        "capacity": {"storage": "64Mi"},
        "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
        "storageClassName": f"{namespace}-{name}",
        "hostPath": {"path": str(folder)},
    }
    jobs.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": spec,
        }
    )


def add_claim(jobs: PodJobs, name: str, *, namespace: str) -> None:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": f"{namespace}-{name}",
        "resources": {"requests": {"storage": "1Mi"}},
    }
    jobs.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    )


def test_a_job_mounts_what_an_administrator_lists_and_nothing_else(
    jobs: PodJobs, namespace: str, tmp_path: Path
) -> None:
    jobs.platform.clusters.apply()
    for name in ("images", "results", "scratch"):
        add_volume(jobs, name, tmp_path / name, namespace=namespace)
    (tmp_path / "images" / "vision" / "raw").mkdir(parents=True)
    (tmp_path / "images" / "vision" / "raw" / "1.txt").write_text("pixels")
    with pytest.raises(InvalidInput) as missing:
        jobs.submit(READS, volumes=["images"])
    for name in ("images", "results"):
        add_claim(jobs, name, namespace=namespace)
    for refused in ({"volumes": ["risk"]}, {"volumes": ["nothing"]}, {"disk": "65MiB"}):
        with pytest.raises(InvalidInput):
            jobs.submit(READS, **refused)

    job = jobs.submit(READS, volumes=["images", "results"])
    done = jobs.ends(job)

    assert f"PersistentVolumeClaim images in namespace {namespace}-default does not exist" in str(
        missing.value
    )
    assert (done.state, done.reason) == (JobState.DONE, None), jobs.log(job)
    assert jobs.log(job).splitlines() == [
        "pixels",
        "images Read-only file system",
        "results was written",
    ]
    assert (tmp_path / "results" / "made.txt").read_text() == "by a job"
    assert (tmp_path / "scratch" / "job" / "outputs" / "large").stat().st_size == 1 << 20
    eventually(
        lambda: {each["metadata"]["name"] for each in jobs.objects("pvc")} == {"images", "results"},
    )  # that of its disk space has gone with the pod


def test_a_claim_without_a_volume_is_named_while_the_job_waits(jobs: PodJobs, namespace: str) -> None:
    jobs.platform.clusters.apply()
    add_claim(jobs, "results", namespace=namespace)

    job = jobs.submit(READS, volumes=["results"])

    def reason() -> str:
        return jobs.platform.jobs.show(job.id).reason or ""

    eventually(lambda: "unbound" in reason() and "PersistentVolumeClaim" in reason())
    jobs.platform.jobs.cancel(job.id)
    assert jobs.ends(job).state is JobState.CANCELLED


SAVES = """
import falaj as fj
from falaj.training.runtime.checkpointing.storage.store import Retention, SaveId
kept, this, part = fj.job._connected().checkpoints(), SaveId(7, "a" * 32), bytes(range(256)) * 8192
kept.save_part(this, 0, [part])
kept.commit(this, [len(part)], b"manifest", Retention())
print(kept._is_store_open, bytes(kept.load_part(7, 0, offset=0, length=len(part))) == part, flush=True)
"""


@pytest.mark.slow
def test_a_pod_uploads_its_checkpoint_to_the_store_itself(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto = pytest.importorskip("moto.server")
    monkeypatch.setenv("FALAJ_TEST_S3", "test")
    lock = tmp_path / "lock.txt"
    needs = ("cryptography", "cffi", "pycparser")
    lock.write_text("".join(f"{each.pin}\n" for each in constraints() if each.name in needs))
    request = ImageRequest(
        "worker", bare=True, environment=lock, builder="none", output=tmp_path / "image.tar"
    )
    made = build_image(request, print, make_base=kept_base)
    worker_image.load_images(tmp_path / "image.tar")
    host = address_of_this_machine(worker_image)
    server = moto.ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    address = f"{host}:{server.get_host_and_port()[1]}"
    httpx.put(f"http://{address}/checkpoints").raise_for_status()
    settings = f"""store = ["{address}"]
[zones.local]
jurisdiction = "AE"
[zones.local.blobs]
driver = "s3"
bucket = "checkpoints"
endpoint = "http://{address}"
access_key = "env:FALAJ_TEST_S3"
secret_key = "env:FALAJ_TEST_S3"
"""
    try:
        with pod_jobs(worker_image, namespace, tmp_path, image=made.pinned, settings=settings) as jobs:
            job = jobs.ends(jobs.submit(SAVES))

            assert (job.state, jobs.log(job)) == (JobState.DONE, "True True\n")
            assert [each.step for each in jobs.platform.jobs.checkpoints(job.id)] == [7]
    finally:
        server.stop()
