"""The Launcher contract in pods of a real cluster: the tests of tests/contracts, collected again.

All of them run as Indexed Jobs, but for those that do not apply to pods (`NOT_IN_PODS`); the core as JobSets and as
TrainJobs too. Those are slow but for the first, as those about what the supervisor does in a pod as on one machine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.certificate import ensure_certificate
from falaj.drivers.kubernetes.pods import PodSettings, object_name
from falaj.drivers.kubernetes.remote_attempt import Objects
from falaj.drivers.processes.attempt_spec import SandboxSpec
from falaj.ports.sandbox import MachineFacts
from launcher_testbed import ATTEMPT, processes_mentioning
from pod_jobs import address_of_this_machine
from pod_testbed import NOT_IN_PODS, PodTestbed, agent_server, api_cluster
from polling import eventually
from worker_image import IMAGE

CONTRACTS = Path(__file__).parents[1] / "contracts"
MODULES = (
    "test_launcher",
    "test_launcher_bad_input",
    "test_launcher_isolation",
    "test_launcher_limits",
    "test_launcher_nodes",
    "test_launcher_secrets",
)
FIRST = "test_code_runs_in_its_folder_and_succeeds"
CORE = {
    FIRST,
    "test_both_outputs_reach_the_log_and_the_exit_code_the_state",
    "test_starters_that_race_run_it_once",
    "test_stop_lets_the_script_finish_its_signal_handler",
    "test_forgotten_attempt_is_killed_and_gone",
}
"""What depends on the kind of object: that pods are made once, found, told to stop, and deleted."""
QUICK = CORE | {
    "test_second_start_changes_nothing_while_it_runs_and_after",
    "test_attempt_continues_when_its_starter_is_killed",
    "test_starter_killed_at_any_moment_leaves_an_attempt_that_runs_once",
    "test_killed_supervisor_ends_the_code_and_the_attempt_is_lost",
    "test_stop_right_after_start_is_honoured",
    "test_time_limit_stops_it",
    "test_unknown_attempt_is_not_an_error",
    "test_name_that_is_not_a_valid_folder_name_is_refused",
    "test_attempt_stops_when_its_lease_has_run_out",
    "test_attempt_without_a_valid_lease_never_runs",
    "test_launch_without_code_is_refused",
    "test_many_long_arguments_arrive",
    "test_one_rank_that_fails_is_named_with_its_cause",
    "test_log_is_capped_and_keeps_its_end",
    "test_secrets_reach_the_code_and_nothing_else",
    "test_impossible_nodes_are_refused",
}
"""What depends on launcher and worker. The others are about the supervisor, which is that of one machine, and slow."""


@dataclass(frozen=True)
class ClusterPodTestbed(PodTestbed):
    """Attempts in pods of the cluster of the tests, whose nodes are this machine."""

    testbed: ClusterTestbed = field(kw_only=True)

    def code_folder(self, attempt: str = ATTEMPT) -> Path:
        return Path("/falaj/job/code")

    def tell(self, name: str, attempt: str = ATTEMPT) -> None:
        (pod,) = self.pods(attempt)
        create = f"open({str(self.code_folder() / name)!r}, 'w')"
        self.kubectl("exec", pod["metadata"]["name"], "--", "python3", "-c", create)

    def supervisors(self) -> list[int]:
        uids = [pod["metadata"]["uid"] for pod in self.pods(ATTEMPT)]
        found = processes_mentioning("falaj.drivers.processes.supervisor")
        return [pid for pid in found if any(is_of_pod(pid, uid) for uid in uids)]

    def assert_nothing_is_left(self, attempt: str = ATTEMPT) -> None:
        super().assert_nothing_is_left(attempt)
        eventually(lambda: not self.pods(attempt))

    def pods(self, attempt: str) -> list[Any]:
        selected = ("--selector", f"app.kubernetes.io/name={object_name(attempt)}")
        found: list[Any] = self.testbed.get("pods", "--namespace", self.namespace, *selected)["items"]
        return found

    def kubectl(self, *words: str) -> str:
        return self.testbed.kubectl("--namespace", self.namespace, *words)


def is_of_pod(pid: int, uid: str) -> bool:
    with suppress(OSError):
        groups = Path(f"/proc/{pid}/cgroup").read_text()
        return uid in groups or uid.replace("-", "_") in groups
    return False


# ---------------------------------------------------------------------------------------------- collection


def loaded(name: str) -> ModuleType:
    """Return a module of tests/contracts, whose assertions explain themselves as there."""
    if str(CONTRACTS) not in sys.path:
        sys.path.append(str(CONTRACTS))
    pytest.register_assert_rewrite(name)
    return __import__(name)


def for_pods(test: FunctionType) -> FunctionType:
    """Return a test of the contract without the sandboxes over which it runs there."""
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    marks = [each for each in getattr(test, "pytestmark", ()) if each.args[:1] != ("testbed",)]
    marks = [first(each) if each.name == "parametrize" else each for each in marks if each.name != "slow"]
    copy.pytestmark = marks if test.__name__ in QUICK else [*marks, pytest.mark.slow.mark]  # type: ignore[attr-defined]
    return copy


def first(mark: pytest.Mark) -> pytest.Mark:
    """Return a mark with the first of its parameters: they differ in what the supervisor makes of them."""
    names, values, *others = mark.args
    return pytest.mark.parametrize(names, list(values)[:1], *others).mark


def contract() -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}
    for name in MODULES:
        found |= {each: made for each, made in vars(loaded(name)).items() if each.startswith("test_")}
    unknown = sorted(set(NOT_IN_PODS) - set(found))
    assert not unknown, f"NOT_IN_PODS names tests that are not there: {unknown}"
    several = {name for name, test in found.items() if "machines" in test.__code__.co_varnames}
    return {name: for_pods(test) for name, test in found.items() if name not in {*NOT_IN_PODS, *several}}


globals().update(contract())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    rarer = [] if name == FIRST else [pytest.mark.slow]
    others = [pytest.param(each, marks=rarer) for each in ("jobset", "trainjob")] if name in CORE else []
    metafunc.parametrize("objects", ["job", *others])


# ------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture
def testbed(
    request: pytest.FixtureRequest, objects: Objects, worker_image: ClusterTestbed, namespace: str
) -> Iterator[ClusterPodTestbed]:
    """Return a testbed in a namespace of its own: all tests call their attempt by the same name."""
    if objects != "job":
        request.getfixturevalue("addons")
    label = "pod-security.kubernetes.io/enforce=restricted"
    worker_image.kubectl("label", "namespace", namespace, label, "--overwrite")
    host = address_of_this_machine(worker_image)
    with tempfile.TemporaryDirectory(prefix="falaj-launcher-") as folder:
        pem = ensure_certificate(Path(folder) / "agent.pem")
        with agent_server(host, pem) as (server, served):
            url = f"tls://{host}:{server.port}"
            prefix, _, workspace = namespace.partition("-")
            settings = PodSettings(IMAGE, prefix, url, home=namespace, grace_s=5)
            cluster = api_cluster(worker_image.kubeconfig, settings)
            served.callback(cluster.close)
            made = ClusterPodTestbed(
                Path(folder),
                SandboxSpec("same-uid", MachineFacts(is_root=False, python="python3")),
                cluster=cluster,
                settings=settings,
                objects=objects,
                kubeconfig=worker_image.kubeconfig,
                server=server,
                pem=pem,
                served=served,
                testbed=worker_image,
                workspace=workspace,
            )
            yield made
            for each in made.control.glob("*"):
                made.launcher().delete(each.name.replace("%2F", "/"))
