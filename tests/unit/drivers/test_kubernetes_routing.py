"""Attempts and nodes of several clusters reach their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from falaj.drivers.kubernetes.launcher import KubernetesLauncher
from falaj.drivers.kubernetes.maintenance import KubernetesMaintenance
from falaj.drivers.kubernetes.routing import RoutedLauncher, RoutedMaintenance
from falaj.errors import InvalidInput, NotFound, Unavailable
from falaj.ports.launcher import AttemptState, Launch


class RecordedCluster:
    """Notes what it is asked, in place of the launcher of one cluster."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.is_away = False

    def start(self, launch: Launch) -> None:
        self.asked.append(("start", launch.attempt, launch.hosts))

    def state(self, attempt: str) -> AttemptState:
        self.asked.append(("state", attempt))
        return AttemptState("running")

    def stop(self, attempt: str, *, grace_s: float) -> None:
        self.asked.append(("stop", attempt))

    def delete(self, attempt: str) -> None:
        self.asked.append(("delete", attempt))

    def pods(self, node: str) -> list[Any]:
        self.asked.append(("pods", node))
        return []

    def sweep(self, keep: Callable[[str], bool]) -> list[str]:
        if self.is_away:
            raise Unavailable("it does not answer")
        self.asked.append(("sweep",))
        return ["job_1/1"]


def launcher(root: Path, **clusters: RecordedCluster) -> RoutedLauncher:
    made = {name: lambda each=each: cast(KubernetesLauncher, each) for name, each in clusters.items()}
    return RoutedLauncher(root, made)


def launch(root: Path, *hosts: str) -> Launch:
    return Launch(attempt="job_1/1", directory=root, command=["python3"], hosts=hosts)


def test_an_attempt_is_started_where_it_was_placed_and_found_there_again(tmp_path: Path) -> None:
    home, cloud = RecordedCluster(), RecordedCluster()

    launcher(tmp_path, home=home, cloud=cloud).start(launch(tmp_path, "cloud.n1.example", "cloud.n2"))
    after = launcher(tmp_path, home=home, cloud=cloud)  # of the next controller
    after.state("job_1/1")
    after.stop("job_1/1", grace_s=1)
    after.delete("job_1/1")

    assert home.asked == []
    assert cloud.asked == [
        ("start", "job_1/1", ("n1.example", "n2")),
        ("state", "job_1/1"),
        ("stop", "job_1/1"),
        ("delete", "job_1/1"),
    ]


@pytest.mark.parametrize("hosts", [("home.a", "cloud.b"), ("elsewhere.a",), ()])
def test_nodes_that_are_not_in_one_cluster_are_refused(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    routed = launcher(tmp_path, home=RecordedCluster(), cloud=RecordedCluster())

    with pytest.raises(InvalidInput, match="nodes of one cluster: home, cloud"):
        routed.start(launch(tmp_path, *hosts))


def test_an_attempt_of_a_cluster_that_is_not_configured_any_more_is_left_to_the_first(tmp_path: Path) -> None:
    home, cloud = RecordedCluster(), RecordedCluster()
    launcher(tmp_path, home=home, cloud=cloud).start(launch(tmp_path, "cloud.n1"))

    launcher(tmp_path, home=home).state("job_1/1")
    launcher(tmp_path, home=home).state("job_2/1")

    assert home.asked == [("state", "job_1/1"), ("state", "job_2/1")]


def test_a_cluster_that_is_away_keeps_no_other_from_being_swept(tmp_path: Path) -> None:
    home, cloud = RecordedCluster(), RecordedCluster()
    routed = launcher(tmp_path, home=home, cloud=cloud)
    home.is_away = True

    with pytest.raises(Unavailable, match="does not answer"):
        routed.sweep(lambda attempt: False)
    assert cloud.asked == [("sweep",)]
    home.is_away = False
    assert routed.sweep(lambda attempt: False) == ["job_1/1"]


def test_nodes_are_maintained_in_their_cluster() -> None:
    home, cloud = RecordedCluster(), RecordedCluster()
    routed = RoutedMaintenance(
        {"home": cast(KubernetesMaintenance, home), "cloud": cast(KubernetesMaintenance, cloud)}
    )

    routed.pods("cloud.n1.example")

    assert (home.asked, cloud.asked) == ([], [("pods", "n1.example")])
    with pytest.raises(NotFound, match=r"elsewhere\.n1 is in none of the clusters home, cloud"):
        routed.pods("elsewhere.n1")
