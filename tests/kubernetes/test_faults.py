"""Jobs in pods while the cluster goes away, its objects are deleted, and it refuses: said, and repaired once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster_testbed import ClusterTestbed
from falaj.errors import InvalidInput
from falaj.records.training.jobs import Job, JobState
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

WAITS = """
import falaj as fj, os, time
print("hello", flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
fj.job.log(step=1, loss=0.5)
print("done", flush=True)
"""
TOUCH = ("python3", "-c", "open('/tmp/go', 'w')")
"""A start that was refused several times is repeated only once a minute."""


@pytest.fixture
def jobs(worker_image: ClusterTestbed, namespace: str, tmp_path: Path) -> Iterator[PodJobs]:
    with pod_jobs(worker_image, namespace, tmp_path) as made:
        yield made


def begins(jobs: PodJobs, job: Job, *, attempt: int = 1) -> None:
    """Wait until the code of an attempt runs."""
    eventually(
        lambda: jobs.platform.jobs.show(job.id).attempt == attempt and "hello" in jobs.log(job),
    )


def says(jobs: PodJobs, job: Job, *words: str) -> str:
    """Wait until the reason of a job has one of these words, and return it."""

    def found() -> str | None:
        reason = jobs.platform.jobs.show(job.id).reason or ""
        return reason if any(each in reason for each in words) else None

    return str(eventually(found))


def let_go(jobs: PodJobs, job: Job) -> None:
    (pod,) = jobs.pods(job)
    eventually(lambda: jobs.kubectl("exec", pod["metadata"]["name"], "--", *TOUCH) == "")


def assert_done_once(jobs: PodJobs, job: Job, *, attempt: int = 1) -> None:
    ended = jobs.ends(job)
    assert (ended.state, ended.reason, ended.attempt) == (JobState.DONE, None, attempt), jobs.log(job)
    assert jobs.log(job) == "hello\ndone\n"
    assert jobs.points(job)["loss"] == 1


def test_an_api_server_and_a_kubelet_that_are_away_end_nothing_and_start_nothing_twice(jobs: PodJobs) -> None:
    assert jobs.cluster is not None
    if jobs.cluster.program is None:
        pytest.skip("needs a cluster whose components the tests may kill")
    running = jobs.submit(WAITS)
    begins(jobs, running)
    (pod,) = jobs.pods(running)

    jobs.cluster.signal("kube-apiserver", signal.SIGSTOP)
    late = jobs.submit(WAITS)
    try:
        reason = says(jobs, late, "does not answer")
    finally:
        jobs.cluster.signal("kube-apiserver", signal.SIGCONT)
    jobs.cluster.restart("kube-apiserver")
    jobs.cluster.restart(f"kubelet-{pod['spec']['nodeName'].rpartition('-')[2]}")

    assert "cannot create Secret falaj-" in reason
    begins(jobs, late)
    for job in (running, late):
        let_go(jobs, job)
        assert_done_once(jobs, job)


@pytest.mark.slow
def test_revoked_credentials_are_named_while_running_jobs_go_on(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    with (
        account_of_an_administrator(worker_image, namespace, kubeconfig),
        pod_jobs(worker_image, namespace, tmp_path, kubeconfig=kubeconfig) as jobs,
    ):
        running = jobs.submit(WAITS)
        begins(jobs, running)

        worker_image.kubectl("delete", "serviceaccount", "platform", "--namespace", namespace)
        eventually(lambda: is_refused(replace(worker_image, kubeconfig=kubeconfig)))
        late = jobs.submit(WAITS)
        says(jobs, late, "does not accept the credentials of the platform; they have expired or were revoked")
        let_go(jobs, running)
        assert_done_once_but_left(jobs, running)

        kubeconfig.write_text(worker_image.kubeconfig.read_text())
        begins(jobs, late)
        let_go(jobs, late)
        assert_done_once(jobs, late)
        eventually(lambda: not jobs.objects("pods,jobs,secrets"))  # also those of the first


def assert_done_once_but_left(jobs: PodJobs, job: Job) -> None:
    """Check that a job ended although the cluster does not let its objects be deleted."""
    eventually(lambda: "done" in jobs.log(job))
    assert jobs.platform.jobs.show(job.id).attempt == 1


def is_refused(cluster: ClusterTestbed) -> bool:
    """Return whether credentials are refused; the API server remembers for a while that it has accepted them."""
    try:
        cluster.kubectl("get", "--raw", "/api")
    except AssertionError as error:
        return "Unauthorized" in str(error) or "provide credentials" in str(error)
    return False


@contextmanager
def account_of_an_administrator(cluster: ClusterTestbed, namespace: str, path: Path) -> Iterator[None]:
    """Write a kubeconfig with the token of a service account that may do everything."""
    cluster.kubectl("create", "serviceaccount", "platform", "-n", namespace)
    account = f"--serviceaccount={namespace}:platform"
    cluster.kubectl("create", "clusterrolebinding", namespace, "--clusterrole=cluster-admin", account)
    try:
        token = cluster.kubectl("create", "token", "platform", "-n", namespace).strip()
        found = yaml.safe_load(cluster.kubeconfig.read_text())
        found["users"] = [{"name": each["name"], "user": {"token": token}} for each in found["users"]]
        path.write_text(json.dumps(found))
        yield
    finally:
        cluster.kubectl("delete", "clusterrolebinding", namespace)


def test_what_someone_deletes_is_made_again_once(jobs: PodJobs) -> None:
    forced, orphaned = jobs.submit(WAITS), jobs.submit(WAITS)
    for job in (forced, orphaned):
        begins(jobs, job)

    jobs.kubectl(
        "delete",
        "pod",
        jobs.pods(forced)[0]["metadata"]["name"],
        "--force",
        "--grace-period=0",
        "--wait=false",
    )
    jobs.kubectl("delete", "job", "--selector", f"falaj.dev/job={orphaned.id}", "--wait=false")
    for job in (forced, orphaned):
        begins(jobs, job, attempt=2)
        explained = jobs.platform.jobs.explain(job.id).words
        assert ("its Job falaj-" in explained) == (job is orphaned)
        assert len([pod for pod in jobs.pods(job) if "deletionTimestamp" not in pod["metadata"]]) == 1

    jobs.kubectl("delete", "namespace", jobs.namespace, "--wait=false")
    for job in (forced, orphaned):  # the platform makes it again
        begins(jobs, job, attempt=3)
        let_go(jobs, job)
        assert_done_once(jobs, job, attempt=3)
    eventually(lambda: not jobs.objects("pods,jobs,secrets"))


def test_a_quota_that_refuses_is_named_and_long_names_are_shortened_in_labels(jobs: PodJobs) -> None:
    for name in ("x" * 201, "запуск", "Quarterly"):
        with pytest.raises(InvalidInput):
            jobs.submit(WAITS, name=name)
    jobs.platform.clusters.apply()  # makes the namespace
    jobs.kubectl("create", "quota", "nothing", "--hard=count/jobs.batch=0")
    name = "quarterly.risk_" + "x" * 100
    job = jobs.submit(WAITS, name=name)

    says(jobs, job, "exceeded quota: nothing, requested: count/jobs.batch=1")

    jobs.kubectl("delete", "quota", "nothing")
    begins(jobs, job)
    (pod,) = jobs.pods(job)
    assert pod["metadata"]["labels"]["falaj.dev/name"] == name[:63]
    assert pod["metadata"]["annotations"]["falaj.dev/name"] == name
    let_go(jobs, job)
    assert_done_once(jobs, job)


@pytest.mark.parametrize(("objects", "kind"), [("jobset", "JobSet"), ("trainjob", "TrainJob")])
def test_an_object_that_someone_deletes_is_named_and_the_job_goes_on_once(
    addons: ClusterTestbed,
    worker_image: ClusterTestbed,
    namespace: str,
    tmp_path: Path,
    objects: str,
    kind: str,
) -> None:
    with pod_jobs(addons, namespace, tmp_path, objects=objects) as jobs:
        job = jobs.submit(WAITS)
        begins(jobs, job)

        jobs.kubectl("delete", kind.lower(), "--selector", f"falaj.dev/job={job.id}", "--wait=false")
        begins(jobs, job, attempt=2)

        assert f"its {kind} falaj-" in jobs.platform.jobs.explain(job.id).words
        assert len([pod for pod in jobs.pods(job) if "deletionTimestamp" not in pod["metadata"]]) == 1
        eventually(lambda: len(jobs.pods(job)) == 1)
        let_go(jobs, job)
        assert_done_once(jobs, job, attempt=2)
        eventually(lambda: not jobs.objects(f"pods,jobs,secrets,{kind.lower()}s"))
