"""Images on a real cluster: a job runs in the one that was built for its environment, and its run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.assembly.images.build import ImageRequest, build_image
from falaj.errors import InvalidInput
from falaj.records.training.jobs import JobState
from offline_index import offline_index
from pod_jobs import pod_jobs
from worker_image import kept_base

SHOW = """
import demo, os, sys
print(demo.VALUE, sys.prefix, os.getuid(), flush=True)
try:
    open("/opt/falaj/x", "w")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.slow
def test_a_job_runs_in_the_image_that_was_built_for_its_environment(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_index(tmp_path / "index", monkeypatch, demo="")
    (tmp_path / "my lock.txt").write_text("demo==1.0\n")
    request = ImageRequest(
        "worker",
        bare=True,
        environment=tmp_path / "my lock.txt",
        builder="none",
        output=tmp_path / "image.tar",
    )
    made = build_image(request, print, make_base=kept_base)
    worker_image.load_images(tmp_path / "image.tar")

    with pod_jobs(worker_image, namespace, tmp_path, environments={"demo": made.pinned}) as jobs:
        with pytest.raises(InvalidInput, match=r"kubernetes.environments"):
            jobs.submit(SHOW, environment="other")
        job = jobs.ends(jobs.submit(SHOW, environment="demo"))

        assert job.state is JobState.DONE, jobs.log(job)
        assert jobs.log(job) == "1 /opt/falaj 65532\nRead-only file system\n"
        run = jobs.platform.runs.show(job.run)
        assert {each.key: each.value for each in run.tags}["falaj.image"] == made.pinned
        listed = next(each.blob for each in run.artifacts if each.path == "environment.txt")
        text = b"".join(jobs.platform.blobs.read(listed)).decode().splitlines()
        assert text[:2] == [f"# image {made.pinned}", f"# ran {made.pinned}"]
        assert "demo==1.0" in [line.partition("  #")[0] for line in text]
