"""The testbed of the launcher tests over pods: a real launcher and real workers, in pods that are processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from falaj.control.jobs.agent_server import RemoteAgentServer
from falaj.control.jobs.worker_calls import WorkerCalls
from falaj.drivers.kubernetes.certificate import ensure_certificate, public_part
from falaj.drivers.kubernetes.cluster import ApiCluster, PodCluster
from falaj.drivers.kubernetes.launcher import KubernetesLauncher
from falaj.drivers.kubernetes.pods import PodSettings, object_name
from falaj.drivers.kubernetes.remote_attempt import Objects
from falaj.drivers.processes.attempt_lease import AttemptLease
from falaj.drivers.processes.attempt_spec import AttemptSpec, SandboxSpec
from falaj.ports.launcher import Launch, Launcher
from falaj.ports.sandbox import MachineFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.cluster_names import namespace_of
from launcher_testbed import ATTEMPT, LauncherTestbed, processes_mentioning
from pod_processes import FOLDER_VARIABLE, ProcessCluster, ProcessNamespaces
from polling import eventually

OTHER_LIMITS = "memory, shared memory and processes are limited by the pod, not by the supervisor"
NO_TORCH = "torch is not in the image of the tests"
OF_THE_MACHINE = "it prepares or looks at the machine that the supervisor runs on"
SEVERAL_MACHINES = "several machines are one attempt there: tests/kubernetes/test_job_nodes.py"

NOT_IN_PODS = {
    "test_more_memory_than_allowed_is_an_error_of_the_script": OTHER_LIMITS,
    "test_memory_is_for_all_processes_together": OTHER_LIMITS,
    "test_private_scratch_space_is_bounded_too": OTHER_LIMITS,
    "test_shared_memory_that_no_process_limit_refuses_is_counted": OTHER_LIMITS,
    "test_mapped_files_do_not_count_as_memory": OTHER_LIMITS,
    "test_fork_bomb_is_bounded_and_ended": OTHER_LIMITS,
    "test_state_reports_how_limits_are_enforced": OTHER_LIMITS,
    "test_ranks_start_in_cgroups_of_their_own_and_oom_kills_are_reported_by_rank": OTHER_LIMITS,
    "test_ranks_that_torchrun_terminated_are_not_blamed": NO_TORCH,
    "test_rank_that_the_others_wait_for_is_the_one_that_hung": NO_TORCH,
    "test_torch_processes_reduce_together_without_a_network": NO_TORCH,
    "test_torch_reason_names_the_rank_that_failed": NO_TORCH,
    "test_device_files_of_the_output_can_be_written": "there is no shell in the image of the tests",
    "test_hang_of_a_program_without_python_shows_the_kernel_stack": "there is no `sleep` in the image of the tests",
    "test_killed_init_process_ends_the_code_too": OF_THE_MACHINE,
    "test_script_that_kills_all_it_can_reach_ends": OF_THE_MACHINE,  # where pods are processes, the tests are too
    "test_a_gigabyte_of_output_costs_neither_memory_nor_much_time": OF_THE_MACHINE,
    "test_full_volume_stops_the_attempt_that_uses_most": OF_THE_MACHINE,
    "test_platform_inputs_do_not_count_when_choosing_the_attempt_to_stop": OF_THE_MACHINE,
    "test_sandbox_that_cannot_be_built_ends_the_attempt_with_the_reason": OF_THE_MACHINE,
    "test_refused_start_leaves_nothing_and_may_be_tried_again": OF_THE_MACHINE,
    "test_secrets_are_in_no_command_line_and_no_platform_environment": OF_THE_MACHINE,
    "test_shim_with_truncated_secrets_starts_nothing_and_a_second_start_works": OF_THE_MACHINE,
    "test_one_file_cannot_outgrow_the_quota": "files of a pod that failed stay in it",
    "test_deeply_nested_folders_are_removed": "a worker delivers the outputs, and fails where it cannot read them",
    "test_script_that_removes_its_own_directory_continues": "its outputs were in it, and cannot be delivered",
    "test_environment_has_the_given_and_the_launchers_variables_only": "code in a pod also gets its agent",
    "test_localhost_resolves_without_a_network": "a pod has the network that the cluster gives it",
    "test_values_are_hidden_where_the_whole_environment_is_printed": "code in a pod also gets its agent",
    "test_one_machine_runs_the_processes_of_all_nodes": SEVERAL_MACHINES,
    "test_one_machine_has_the_memory_of_all_nodes": SEVERAL_MACHINES,
    "test_node_whose_peers_are_unknown_waits_and_can_be_stopped": SEVERAL_MACHINES,
    "test_names_of_peers_become_addresses": SEVERAL_MACHINES,
}
"""The tests of the contract that do not apply to attempts in pods, and why. All others do."""

IN_PROCESS_PODS = frozenset(
    {
        "test_both_outputs_reach_the_log_and_the_exit_code_the_state",
        "test_reason_names_the_signal",
        "test_stop_lets_the_script_finish_its_signal_handler",
        "test_stop_ends_a_script_without_a_signal_handler",
        "test_script_that_ignores_the_stop_is_killed_after_the_grace",
        "test_stop_right_after_start_is_honoured",
        "test_time_limit_stops_it",
        "test_children_end_with_the_script",
        "test_many_long_arguments_arrive",
        "test_secrets_reach_the_code_and_nothing_else",
        "test_daemon_ends_with_the_script_that_left_it",
        "test_closed_output_does_not_end_the_attempt",
    }
)
"""The tests of the contract that need nothing of a pod but its worker: they run where pods are processes, too."""

STARTER = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:0] = given["path"]
from pod_testbed import launcher_of, launch_of
launcher, launch = launcher_of(given), launch_of(given)
print("ready", flush=True)
sys.stdin.readline()
launcher.start(launch)
print("started", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class PodTestbed(LauncherTestbed):
    """Attempts in pods of `cluster`. Their workers are let in from the start on, as the controller does."""

    cluster: PodCluster = field(kw_only=True)
    settings: PodSettings = field(kw_only=True)
    objects: Objects = field(kw_only=True, default="job")
    kubeconfig: Path | None = field(kw_only=True, default=None)
    server: RemoteAgentServer = field(kw_only=True)
    pem: Path = field(kw_only=True)
    served: ExitStack = field(kw_only=True)
    workspace: str = field(default="default", kw_only=True)

    @property
    def namespace(self) -> str:
        return namespace_of(self.workspace, prefix=self.settings.prefix)

    def launch(self, script: str, *arguments: str, attempt: str = ATTEMPT, **options: Any) -> Launch:
        made = super().launch(script, *arguments, attempt=attempt, **options)
        return replace(made, labels={"workspace": self.workspace, **made.labels})

    def launcher(self, *, lease: Path | None = None, **options: Any) -> Launcher:
        left_s = (lambda: 60.0) if lease is None else AttemptLease(lease, 0.0).left_s
        made = pod_launcher(
            self.control,
            self.cluster,
            self.settings,
            self.objects,
            public_part(self.pem),
            left_s=left_s,
            **options,
        )
        return ServedLauncher(made, self)

    def serve(self, launch: Launch, launcher: KubernetesLauncher) -> None:
        """Let the workers of an attempt in."""
        calls = WorkerCalls(
            launcher.worker_host(launch.attempt),
            NoRanks(),
            secrets=lambda: launch.secrets,
            require_lease=lambda: None,
        )
        self.served.enter_context(self.server.serving(launch.attempt, calls))

    @contextmanager
    def starter(self, launch: Launch) -> Iterator[subprocess.Popen[str]]:
        made = self.launcher()
        assert isinstance(made, ServedLauncher)
        self.serve(launch, made.inner)
        given = {
            "path": [str(Path(__file__).parent)],
            "root": str(self.control),
            "settings": asdict(self.settings),
            "objects": self.objects,
            "kubeconfig": None if self.kubeconfig is None else str(self.kubeconfig),
            "certificate": public_part(self.pem),
            "launch": AttemptSpec(launch, self.sandbox, 1 << 20).to_json(),
        }
        command, pipe = [sys.executable, "-c", STARTER, json.dumps(given)], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                process.kill()

    def log_file(self, attempt: str = ATTEMPT) -> Path:
        return self.control / attempt.replace("/", "%2F") / "log.0"

    def assert_ended(self, word: str) -> None:
        eventually(lambda: not processes_mentioning(word))  # a cluster takes its time


@dataclass(frozen=True)
class ProcessPodTestbed(PodTestbed):
    """Attempts in pods that are processes of this machine."""

    def code_folder(self, attempt: str = ATTEMPT) -> Path:
        (pod,) = (self.root / "pods").glob(f"pod-{object_name(attempt)}-0-*")
        return pod / "falaj" / "job" / "code"

    def supervisors(self) -> list[int]:
        ours = set(processes_mentioning(f"{self.root}/pods/"))
        return sorted(ours & set(processes_mentioning("falaj.drivers.processes.supervisor")))


@dataclass(frozen=True)
class ServedLauncher:
    """A launcher whose attempts are served from their start on."""

    inner: KubernetesLauncher
    testbed: PodTestbed

    def start(self, launch: Launch) -> None:
        self.testbed.serve(launch, self.inner)
        self.inner.start(launch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class NoRanks:
    """Answers no calls of ranks."""

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> Any:
        raise ValueError(f"unknown call {head.get('call')!r}")


def secret_of(attempt: str) -> str:
    return f"secret-of-{attempt}"


def pod_launcher(
    root: Path,
    cluster: PodCluster,
    settings: PodSettings,
    objects: Objects,
    certificate: str,
    *,
    left_s: Callable[[], float] = lambda: 60.0,
) -> KubernetesLauncher:
    return KubernetesLauncher(
        root,
        cluster,
        settings,
        namespaces=ProcessNamespaces(),
        objects=objects,
        secret_of=secret_of,
        certificate=lambda: certificate,
        lease_left_s=left_s,
        fence_s=60.0,
    )


def launcher_of(given: dict[str, Any]) -> KubernetesLauncher:
    """Return the launcher of a testbed in another process."""
    settings = PodSettings(**given["settings"])
    cluster: PodCluster = (
        ProcessCluster() if given["kubeconfig"] is None else api_cluster(Path(given["kubeconfig"]), settings)
    )
    return pod_launcher(Path(given["root"]), cluster, settings, given["objects"], given["certificate"])


def launch_of(given: dict[str, Any]) -> Launch:
    return AttemptSpec.from_json(given["launch"]).launch


def api_cluster(kubeconfig: Path, settings: PodSettings) -> ApiCluster:
    from falaj.drivers.kubernetes.client import connect

    config = KubernetesConfig(kubeconfig=kubeconfig)
    return ApiCluster(lambda: connect(config), home=settings.home)


@contextmanager
def agent_server(host: str, pem: Path) -> Iterator[tuple[RemoteAgentServer, ExitStack]]:
    """Yield the server for the workers of a testbed, and what is closed with it."""
    server = RemoteAgentServer(
        (host, 0),
        certificate=pem,
        key=pem,
        secret_of=secret_of,
        is_current=lambda _attempt: True,
        on_fenced=lambda: None,
    )
    with ExitStack() as served:
        served.callback(server.close)
        yield server, served


@contextmanager
def pod_testbed(root: Path) -> Iterator[PodTestbed]:
    """Yield a testbed in `root`; its pods end with it."""
    os.environ[FOLDER_VARIABLE] = str(root / "pods")
    pem = ensure_certificate(root / "agent.pem")
    sandbox = SandboxSpec("same-uid", MachineFacts(is_root=False, python=sys.executable))
    with agent_server("127.0.0.1", pem) as (server, served):
        url, cluster = f"tls://127.0.0.1:{server.port}", ProcessCluster()
        settings = PodSettings("worker:1", "test", url, "home_1", grace_s=5)
        yield ProcessPodTestbed(
            root, sandbox, cluster=cluster, settings=settings, server=server, pem=pem, served=served
        )
        namespace = namespace_of("default", prefix="test")
        for found in cluster.list_objects("batch/v1", "Job", namespace=namespace):
            cluster.delete("batch/v1", "Job", found.name, namespace=namespace)
    del os.environ[FOLDER_VARIABLE]
