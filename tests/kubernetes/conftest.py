"""A real cluster for the tests: the one that KUBECONFIG names, or one started from the folder FALAJ_TEST_CLUSTER."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_testbed import ADDONS, ClusterTestbed
from falaj.errors import Unavailable
from polling import PATIENCE_S
from worker_image import build_worker_image, ensure_base, lacks

PROGRAMS = ("ip", "nsenter", "openssl")
"""What starts a cluster calls them."""
START_S = 240


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterTestbed]:
    """Return a cluster with two nodes and eight invented GPUs each. Its addons are installed by `addons`."""
    named, folder = os.environ.get("KUBECONFIG"), os.environ.get("FALAJ_TEST_CLUSTER")
    if named:
        started = Path(named).parent if folder and (Path(named).parent / "state.json").exists() else None
        program = Path(folder) / "cluster" if folder and started else None
        yield ClusterTestbed(Path(named), directory=started, program=program)
        return
    if not folder:
        pytest.skip(
            "needs a Kubernetes cluster: set KUBECONFIG, or FALAJ_TEST_CLUSTER to a folder that starts one"
        )
    program, directory = Path(folder) / "cluster", tmp_path_factory.mktemp("cluster")
    if (missing := lacks_for_a_cluster()) is not None:
        pytest.skip(f"needs {missing}, to start the cluster of FALAJ_TEST_CLUSTER")
    try:
        began = subprocess.run(
            [program, "start", directory, "--nodes", "2", "--gpus", "8"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
        if began.returncode != 0:
            pytest.skip(
                f"needs a machine on which {program} starts; here it ends with: {last_line(began.stdout)}"
            )
        yield ClusterTestbed(directory / "kubeconfig", directory=directory, program=program)
    finally:
        subprocess.run([program, "stop", directory], capture_output=True, timeout=PATIENCE_S)


def lacks_for_a_cluster() -> str | None:
    """Return what this machine lacks to start a cluster; none if it has all that is known to be needed."""
    if os.geteuid() != 0:
        return "root"
    if not Path("/sys/fs/cgroup/pids").is_dir():
        return "cgroups of version 1 (/sys/fs/cgroup/pids)"
    return next((each for each in PROGRAMS if shutil.which(each) is None), None)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


@pytest.fixture(scope="session")
def addons(cluster: ClusterTestbed) -> ClusterTestbed:
    """Return the cluster with JobSet, Kueue and Kubeflow Trainer."""
    missing = [name for name in ADDONS if not cluster.serves(name)]
    if cluster.program is not None and missing:
        cluster.install_addons()
        missing = []
    if missing:
        pytest.skip(f"needs a cluster with {', '.join(missing)}")
    return cluster


@pytest.fixture(scope="session")
def worker_image(cluster: ClusterTestbed, tmp_path_factory: pytest.TempPathFactory) -> ClusterTestbed:
    """Return the cluster with the image of the worker on every node."""
    if cluster.program is not None:
        if (missing := lacks()) is not None:
            pytest.skip(f"needs {missing}, for the base of the worker's image")
        try:
            ensure_base(print)
        except Unavailable as error:  # no mirror of Debian can be reached
            pytest.skip(f"needs the base of the worker's image: {error.message}")
        cluster.load_images(build_worker_image(tmp_path_factory.mktemp("image") / "worker.tar"))
    return cluster


@pytest.fixture(scope="session")
def second_cluster(
    cluster: ClusterTestbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterTestbed]:
    """Return another cluster with one node, which has the image of the worker."""
    if cluster.program is None:
        pytest.skip("needs a second cluster: set FALAJ_TEST_CLUSTER to a folder that starts one")
    if (missing := lacks()) is not None:
        pytest.skip(f"needs {missing}, for the base of the worker's image")
    directory = tmp_path_factory.mktemp("second")
    began = subprocess.run(
        [cluster.program, "start", directory, "--nodes", "1", "--gpus", "8"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert began.returncode == 0, began.stdout + began.stderr
    made = ClusterTestbed(directory / "kubeconfig", directory=directory, program=cluster.program)
    try:
        made.load_images(build_worker_image(tmp_path_factory.mktemp("image") / "worker.tar"))
        yield made
    finally:
        subprocess.run([cluster.program, "stop", directory], capture_output=True, timeout=PATIENCE_S)


@pytest.fixture
def namespace(cluster: ClusterTestbed) -> Iterator[str]:
    """Return a new namespace, which is deleted afterwards."""
    name = f"falaj-test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
