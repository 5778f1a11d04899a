"""Jobs on Kubernetes: the first line of code against a bare object, requests for 200 jobs, and the cost of watching.

It needs a cluster with JobSet, Kueue and Kubeflow Trainer: that of KUBECONFIG, with the worker image on its nodes, or
one that the folder FALAJ_TEST_CLUSTER starts. Requests and watching are measured on invented nodes and pods.
"""

# ruff: noqa: E402 - the testbeds of the cluster are those of the tests

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / each) for each in ("", "kubernetes")]

from cluster_testbed import ADDONS, ClusterTestbed
from falaj.assembly.home import Home, open_home
from falaj.assembly.platform import LocalPlatform, assemble
from falaj.drivers.kubernetes.pods import HOME_LABEL, MANAGED_BY
from falaj.records.training.jobs import JobSpec
from harness import (
    Result,
    Rule,
    cpu_seconds,
    environment,
    free_port,
    report,
    running,
    say,
    wait_until_ready,
)
from invented_nodes import apply, invented_nodes
from pod_jobs import address_of_this_machine
from worker_image import IMAGE, build_worker_image

ROUNDS = 5
JOBS, PODS, NODES = 200, 1000, 4
WATCHED_S = 30.0
NAMESPACE = "falaj-bench"
"""Of bare objects. It is also the prefix of the platform, whose jobs are in OURS."""
OURS = f"{NAMESPACE}-default"
MARK = "first line at "
SCRIPT = f"import time\nprint({MARK!r} + repr(time.time()), flush=True)\n"
KINDS = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob under Kueue"}
KUEUE = "kueue.x-k8s.io/v1beta2"
COUNTED = """
import os, sys, time
from falaj.apps.controller.process import main
from falaj.drivers.kubernetes.client import WatchableTransport
counted = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(os.pipe()[0], 0)  # a controller ends with its standard input
plain = WatchableTransport.handle_request
def handle(self, request):
    os.write(counted, f"{time.time()} {request.method} {request.url.path}\\n".encode())
    return plain(self, request)
WatchableTransport.handle_request = handle
main()
"""
"""A controller that records each request that it makes to the API server."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=["start", "requests", "watch"], help="measure one part, store nothing"
    )
    only = parser.parse_args().only
    results: list[Result] = []
    if only in (None, "start"):
        with cluster(nodes=2) as found:
            prepare(found)
            open_queue(found)
            results += [first_line_result(found, kind) for kind in KINDS]
    if only in (None, "requests", "watch"):
        with cluster(nodes=0) as found, invented_nodes(found, NODES):
            results += [requests_result(found)] if only != "watch" else []
            results += [watch_result(found)] if only != "requests" else []
    if only is None:
        report("cluster_jobs", results)
    else:
        say("\n".join(json.dumps(each.line(), ensure_ascii=False) for each in results))


@contextmanager
def cluster(*, nodes: int) -> Iterator[ClusterTestbed]:
    """Yield the cluster of KUBECONFIG, or a new one with so many nodes, and with the namespace of the benchmark."""
    named, folder = os.environ.get("KUBECONFIG"), os.environ.get("FALAJ_TEST_CLUSTER")
    with ExitStack() as stack:
        directory = Path(named).parent if named else Path(tempfile.mkdtemp(prefix="cluster-jobs-"))
        program = Path(folder) / "cluster" if folder else None
        if not named:
            if program is None:
                raise SystemExit("set KUBECONFIG, or FALAJ_TEST_CLUSTER to a folder that starts a cluster")
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            start = [program, "start", directory, "--nodes", str(nodes)]
            subprocess.run(start, check=True, stdout=subprocess.DEVNULL)
            stack.callback(
                subprocess.run, [program, "stop", directory], check=False, stdout=subprocess.DEVNULL
            )
        is_ours = (directory / "state.json").exists()
        found = ClusterTestbed(
            Path(named) if named else directory / "kubeconfig",
            directory=directory if is_ours else None,
            program=program if is_ours else None,
        )
        found.kubectl("create", "namespace", NAMESPACE)
        stack.callback(
            found.kubectl, "delete", "namespace", NAMESPACE, OURS, "--ignore-not-found", "--wait=false"
        )
        yield found


def prepare(found: ClusterTestbed) -> None:
    """Install what the first part needs, where the cluster is one that may be changed."""
    if found.program is None:
        return
    if not all(map(found.serves, ADDONS)):
        found.install_addons()
    with tempfile.TemporaryDirectory(prefix="cluster-jobs-") as scratch:
        found.load_images(build_worker_image(Path(scratch) / "worker.tar"))


def open_queue(found: ClusterTestbed) -> None:
    """Make the queue of the bare TrainJobs in Kueue."""
    within = {"name": "bare", "namespace": NAMESPACE}
    room = {"name": "bare", "resources": [{"name": "cpu", "nominalQuota": "1000"}]}
    specs = {
        "ResourceFlavor": {},
        "ClusterQueue": {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [room]}],
        },
        "LocalQueue": {"clusterQueue": "bare"},
    }
    apply(
        found,
        [
            {
                "apiVersion": KUEUE,
                "kind": kind,
                "metadata": within if kind == "LocalQueue" else {"name": "bare"},
                "spec": spec,
            }
            for kind, spec in specs.items()
        ],
    )


def settings(found: ClusterTestbed, *, objects: str) -> str:
    host, port = address_of_this_machine(found), free_port()
    return f"""
[jobs]
launcher = "kubernetes"

[kubernetes]
kubeconfig = "{found.kubeconfig}"
prefix = "{NAMESPACE}"
scheduler = "{"kueue" if objects == "trainjob" else "falaj"}"
image = "{IMAGE}"
objects = "{objects}"
agent = "{host}:{port}"
agent_url = "tls://{host}:{port}"
"""


# ----------------------------------------------------------------------------------------- the first line


def first_line_result(found: ClusterTestbed, kind: str) -> Result:
    """Return the seconds from `falaj train` to the first line of code, and those from `kubectl create`, in turns."""
    program = Path(sys.executable).with_name("falaj")
    with tempfile.TemporaryDirectory(prefix="cluster-jobs-") as folder:
        home, script = Path(folder), Path(folder) / "train.py"
        script.write_text(SCRIPT)
        places = environment(FALAJ_HOME=str(home / "home"), FALAJ_CONFIG_DIR=str(home / "config"))
        open_home(home / "home", home / "config").toml.write_text(settings(found, objects=kind))
        port = free_port()
        with running([program, "up", "--port", str(port)], cwd=home, env=places) as pid:
            wait_until_ready(f"http://127.0.0.1:{port}/readyz", pid=pid)
            train = [program, "train", script]
            pairs = [
                (trained(train, home, places), bare(found, kind, number)) for number in range(ROUNDS + 1)
            ][1:]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    for name, times in zip(("falaj train", "kubectl create"), zip(*pairs, strict=True), strict=True):
        say(f"{KINDS[kind]}, {name}: " + ", ".join(f"{each:.2f}" for each in times) + " s")
    what = f"s from falaj train to the first line of code in a {KINDS[kind]}, over a bare {KINDS[kind]}"
    return Result(what, ours, theirs, round(1.5 * theirs + 2, 2), Rule.FALAJ_AT_MOST)


def trained(command: list[str | Path], folder: Path, variables: dict[str, str]) -> float:
    started = time.time()
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return first_line(done.stdout + done.stderr) - started


def bare(found: ClusterTestbed, kind: str, number: int) -> float:
    """Return the seconds until the first line of the same code in an object of the same kind."""
    name = f"bare-{kind}-{number}"
    manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": bare_objects(kind, name)})
    started = time.time()
    found.kubectl("create", "--filename", "-", stdin=manifests)
    try:
        while True:
            pods = found.get("pods", "-n", NAMESPACE, "-l", f"bench={name}")["items"]
            if pods and pods[0]["status"]["phase"] == "Succeeded":
                said = found.kubectl("logs", "-n", NAMESPACE, pods[0]["metadata"]["name"])
                return first_line(said) - started
            time.sleep(0.2)
    finally:
        found.kubectl("delete", "--filename", "-", "--wait=false", stdin=manifests)


def bare_objects(kind: str, name: str) -> list[dict[str, Any]]:
    container = {
        "name": "node",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", SCRIPT],
        "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}},
    }
    pod = {
        "metadata": {"labels": {"bench": name}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]},
    }
    named = {"name": name, "namespace": NAMESPACE}
    job = {"backoffLimit": 0, "template": pod}
    if kind == "job":
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": named, "spec": job}]
    replicated = {"name": "node", "template": {"spec": job}}
    if kind == "jobset":
        spec = {"replicatedJobs": [replicated]}
        return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": named, "spec": spec}]
    replicated["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    api = "trainer.kubeflow.org/v1alpha1"
    runtime = {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": [replicated]}}}
    asked = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    return [
        {"apiVersion": api, "kind": "TrainingRuntime", "metadata": named, "spec": runtime},
        {
            "apiVersion": api,
            "kind": "TrainJob",
            "metadata": named | {"labels": {"kueue.x-k8s.io/queue-name": "bare"}},
            "spec": {"runtimeRef": asked, "suspend": True},
        },
    ]


def first_line(said: str) -> float:
    found = [line for line in said.splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError(f"no first line in {said!r}")
    return float(found[0].removeprefix(MARK))


# ------------------------------------------------------------------------------ requests, and watching


@contextmanager
def counted_controller(found: ClusterTestbed) -> Iterator[tuple[LocalPlatform, int, Path]]:
    """Yield a platform, its controller's process, and the file with the requests of that."""
    with tempfile.TemporaryDirectory(prefix="cluster-jobs-") as folder:
        home = open_home(Path(folder) / "home", Path(folder) / "config")
        home.toml.write_text(settings(found, objects="job"))
        platform = assemble(home, as_owner=True)
        requests = Path(folder) / "requests"
        requests.touch()
        places = environment(FALAJ_HOME=str(home.path), FALAJ_CONFIG_DIR=str(home.config_dir))
        command = [sys.executable, "-c", COUNTED, str(requests)]
        with running(command, cwd=Path(folder), env=places) as pid:
            yield platform, pid, requests
        platform.close()


def requests_result(found: ClusterTestbed) -> Result:
    """Return the requests per job and second of 200 jobs that are queued at once, and all have pods that wait."""
    with counted_controller(found) as (platform, _, requests):
        code = platform.services.blobs.upload(iter([packed()])).id
        began = time.time()
        for number in range(JOBS):
            platform.services.jobs.submit(JobSpec(name=f"many-{number}", script="train.py"), code=code)
        submitted = time.time()
        while len(pods_of(found, platform.home)) < JOBS:
            time.sleep(2)
        started = time.time()
        time.sleep(WATCHED_S)
        ended = time.time()
        times = [float(line.split()[0]) for line in requests.read_text().splitlines()]
        found.kubectl(
            "delete", "jobs,pods", "--all", "-n", OURS, "--grace-period=0", "--force", "--wait=false"
        )
    starting = sum(began <= each <= started for each in times)
    waiting = sum(started < each <= ended for each in times)
    say(
        f"{JOBS} jobs: submitted in {submitted - began:.1f} s, all have pods after {started - began:.1f} s with "
        f"{starting} requests ({starting / JOBS:.1f} a job); {waiting} requests in the {WATCHED_S:.0f} s after"
    )
    rate = max(starting / (started - began), waiting / WATCHED_S) / JOBS
    return Result(f"API requests per job and second, {JOBS} jobs at once", rate, 1, 1, Rule.FALAJ_AT_MOST)


def watch_result(found: ClusterTestbed) -> Result:
    """Return the percentage of a core that an idle controller uses while it watches 1,000 pods."""
    with counted_controller(found) as (platform, pid, _):
        for first in range(0, PODS, 250):
            pods = [invented_pod(platform.home, number) for number in range(first, first + 250)]
            apply(found, pods)
            apply(found, pods, "--subresource=status")
        while len(pods_of(found, platform.home)) < PODS:
            time.sleep(1)
        time.sleep(10)
        before, began = cpu_seconds(pid), time.monotonic()
        time.sleep(WATCHED_S)
        percent = 100 * (cpu_seconds(pid) - before) / (time.monotonic() - began)
        found.kubectl(
            "delete", "pods", "--all", "-n", NAMESPACE, "--grace-period=0", "--force", "--wait=false"
        )
    return Result(
        f"% of a core of an idle controller, {PODS} pods watched", percent, 1, 1, Rule.FALAJ_AT_MOST
    )


def invented_pod(home: Home, number: int) -> dict[str, Any]:
    notes = {"falaj.dev/attempt-name": f"job_{number}/1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"pod-{number}",
            "namespace": NAMESPACE,
            "labels": MANAGED_BY | {HOME_LABEL: home.ident},
            "annotations": notes,
        },
        "spec": {
            "nodeName": f"invented-{number % NODES}",
            "automountServiceAccountToken": False,
            "containers": [{"name": "node", "image": IMAGE}],
        },
        "status": {"phase": "Running"},
    }


def pods_of(found: ClusterTestbed, home: Home) -> list[str]:
    named = ("--all-namespaces", "-l", f"{HOME_LABEL}={home.ident}", "--output", "name")
    return found.kubectl("get", "pods", *named).splitlines()


def packed() -> bytes:
    raw, text = io.BytesIO(), SCRIPT.encode()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return raw.getvalue()


if __name__ == "__main__":
    main()
