"""The launch contracts: the processes of each framework, their variables, and whose end decides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from falaj.drivers.processes.diagnosis.reasons import AttemptOutcome, explain_failure
from falaj.drivers.processes.frameworks.contracts import (
    CONTRACTS,
    plan_processes,
    process_name,
    tolerated_losses,
)
from falaj.drivers.processes.frameworks.process import PlannedProcess
from falaj.drivers.processes.supervisor.init_plan import free_ports, plan_ranks, shared_environment
from falaj.ports.launcher import Launch
from falaj.records.training.jobs import Framework, JobSpec

LAUNCH = Launch("job_1/1", Path("/jobs/1"), ["python", "-u", "train.py", "--rows", "3"], processes=2)


def planned(framework: Framework, **options: Any) -> Sequence[PlannedProcess]:
    return plan_processes(
        replace(LAUNCH, framework=framework, **options), lambda count: range(4001, 4001 + count)
    )


def values(processes: Sequence[PlannedProcess], variable: str) -> list[str | None]:
    return [each.environment.get(variable) for each in processes]


def test_every_framework_has_a_contract() -> None:
    assert set(CONTRACTS) == set(get_args(Framework))


@pytest.mark.parametrize("framework", get_args(Framework))
def test_plan_is_json_and_marks_essential_processes(framework: Framework) -> None:
    ranks = plan_ranks(replace(LAUNCH, framework=framework))

    assert json.loads(json.dumps(ranks)) == ranks
    assert any(each["is_essential"] for each in ranks)


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(20))) == 20


# --------------------------------------------------------------------------------------------------- torch


def test_elastic_torch_has_an_agent_for_each_process_and_a_rendezvous_that_outlives_all_of_them() -> None:
    agents = planned("torch", processes=3, processes_min=2)

    assert len(agents) == 3
    command = list(agents[0].command)
    assert command[:4] == ["python", "-u", "-m", "torch.distributed.run"]
    assert {"--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=1"} <= set(command)
    assert "--rdzv-endpoint=/jobs/1/.falaj-rendezvous" in command
    assert any("store_type=file" in word and "keep_alive_interval=1" in word for word in command)
    assert command[-3:] == ["train.py", "--rows", "3"]


def test_only_elastic_torch_tolerates_lost_processes() -> None:
    assert tolerated_losses(replace(LAUNCH, framework="torch", processes=4, processes_min=1)) == 3
    assert tolerated_losses(replace(LAUNCH, framework="torch", processes=4, processes_min=4)) == 0
    assert tolerated_losses(replace(LAUNCH, framework="torch", processes=4)) == 0
    assert len(planned("torch", processes=4, processes_min=4)) == 1


def test_the_store_of_the_rendezvous_is_not_shared_and_loopback_is_the_default() -> None:
    own = shared_environment(replace(LAUNCH, framework="torch"))

    assert own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert own["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in shared_environment(replace(LAUNCH, framework="torch", network=True))


# ---------------------------------------------------------------------------------------------- tensorflow


def test_tensorflow_workers_know_the_cluster_and_themselves() -> None:
    workers = planned("tensorflow")

    configs = [json.loads(each.environment["TF_CONFIG"]) for each in workers]
    assert configs[0]["cluster"] == configs[1]["cluster"] == {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
    assert [each["task"] for each in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert all(each.is_essential for each in workers)


def test_the_chief_decides_where_there_are_parameter_servers() -> None:
    roles = {"ps": 1, "worker": 2, "chief": 1}

    tasks = planned("tensorflow", processes=4, roles=roles)

    assert [each.name for each in tasks] == ["chief 0", "worker 0", "worker 1", "ps 0"]
    assert [each.is_essential for each in tasks] == [True, False, False, False]
    cluster = json.loads(tasks[0].environment["TF_CONFIG"])["cluster"]
    assert {role: len(where) for role, where in cluster.items()} == roles
    assert values(tasks, "FALAJ_RANK") == ["0", "1", "2", "3"]


def test_workers_decide_without_a_chief() -> None:
    tasks = planned("tensorflow", processes=3, roles={"ps": 1, "worker": 2})

    assert [each.is_essential for each in tasks] == [True, True, False]


def test_chief_and_workers_decide_together_without_servers() -> None:
    assert all(each.is_essential for each in planned("tensorflow", roles={"chief": 1, "worker": 1}))


def test_gpus_go_to_computing_tasks() -> None:
    gpus = ("GPU-a", "GPU-b")

    alone = planned("tensorflow", gpus=gpus)
    served = planned("tensorflow", processes=4, roles={"chief": 1, "worker": 2, "ps": 1}, gpus=gpus)

    assert values(alone, "CUDA_VISIBLE_DEVICES") == ["GPU-a", "GPU-b"]
    assert values(served, "CUDA_VISIBLE_DEVICES") == ["", "GPU-a", "GPU-b", ""]


# ---------------------------------------------------------------------------------------------- the others


def test_jax_processes_share_a_coordinator_that_listens_on_loopback_only() -> None:
    ranks = planned("jax")

    assert values(ranks, "JAX_COORDINATOR_ADDRESS") == ["127.0.0.1:4001"] * 2
    assert values(ranks, "JAX_COORDINATOR_BIND_ADDRESS") == ["127.0.0.1:4001"] * 2
    assert values(ranks, "JAX_NUM_PROCESSES") == ["2", "2"]
    assert values(ranks, "JAX_PROCESS_ID") == ["0", "1"]
    assert shared_environment(replace(LAUNCH, framework="jax"))["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in shared_environment(replace(LAUNCH, framework="jax", gpus=("GPU-a",)))


def test_mpi_and_horovod_start_their_ranks_themselves() -> None:
    (mpi,), (horovod,) = planned("mpi"), planned("horovod")

    assert mpi.command == ["mpiexec", "-n", "2", *LAUNCH.command]
    assert horovod.command[:6] == ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"]
    assert horovod.command[6:8] == ["--network-interfaces", "lo"]
    assert list(horovod.command[-len(LAUNCH.command) :]) == LAUNCH.command
    (open_horovod,) = planned("horovod", network=True)
    assert "lo" not in open_horovod.command


def test_mpi_variables_cover_both_implementations_and_the_job_may_override_them() -> None:
    own = shared_environment(replace(LAUNCH, framework="mpi", environment={"HYDRA_IFACE": "eth0"}))

    assert (own["HYDRA_IFACE"], own["HYDRA_LAUNCHER"]) == ("eth0", "fork")
    assert own["OMPI_ALLOW_RUN_AS_ROOT"] == own["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_xgboosts_tracker_runs_beside_the_workers_and_does_not_decide() -> None:
    first, second, tracker = planned("xgboost")

    assert values([first, second], "DMLC_TASK_ID") == ["0", "1"]
    assert values([first, second], "DMLC_TRACKER_PORT") == ["4001", "4001"]
    assert (first.is_essential, second.is_essential, tracker.is_essential) == (True, True, False)
    assert tracker.command[:3] == ["python", "-u", "-c"]
    assert list(tracker.command[-3:]) == ["2", "127.0.0.1", "4001"]


def test_lightgbm_has_a_port_for_each_rank() -> None:
    ranks = planned("lightgbm")

    assert values(ranks, "LIGHTGBM_MACHINES") == ["127.0.0.1:4001,127.0.0.1:4002"] * 2
    assert values(ranks, "LIGHTGBM_LOCAL_LISTEN_PORT") == ["4001", "4002"]


def test_mxnet_workers_decide_and_servers_and_the_scheduler_only_import_it() -> None:
    tasks = planned("mxnet", processes=3, roles={"worker": 2, "server": 1})

    assert [each.name for each in tasks] == ["worker 0", "worker 1", "server 0", "scheduler"]
    assert values(tasks, "DMLC_ROLE") == ["worker", "worker", "server", "scheduler"]
    assert [each.is_essential for each in tasks] == [True, True, False, False]
    assert tasks[2].command == tasks[3].command == ["python", "-u", "-c", "import mxnet"]
    assert len(planned("mxnet")) == 4


def test_joblib_counts_the_jobs_cores_and_not_the_machines() -> None:
    assert shared_environment(replace(LAUNCH, cpus=6))["LOKY_MAX_CPU_COUNT"] == "3"


def test_processes_are_named_by_role_and_rank() -> None:
    served = replace(LAUNCH, framework="tensorflow", processes=3, roles={"chief": 1, "worker": 1, "ps": 1})

    assert [process_name(served, rank) for rank in range(4)] == ["chief 0", "worker 0", "ps 0", "rank 3"]
    assert process_name(replace(LAUNCH, framework="mpi"), 0) == ""


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processes_min": 2, "processes": 2}, "processes_min is for the framework torch"),
        ({"framework": "torch", "processes": 2, "processes_min": 3}, "it can be at most that"),
        ({"framework": "torch", "roles": {"worker": 1}}, "roles are for the frameworks tensorflow and mxnet"),
        ({"framework": "tensorflow", "roles": {"boss": 1}}, "its roles are chief, worker, ps"),
        ({"framework": "mxnet", "roles": {"scheduler": 1}}, "its roles are worker, server"),
        ({"framework": "tensorflow", "roles": {"worker": 3}}, "the roles add up to 3, but processes is 1"),
        (
            {"framework": "tensorflow", "processes": 3, "roles": {"chief": 2, "worker": 1}},
            "one chief at most",
        ),
        ({"framework": "tensorflow", "processes": 2, "roles": {"chief": 1, "ps": 1}}, "also needs a worker"),
        ({"framework": "mxnet", "processes": 2, "roles": {"worker": 2}}, "also needs a server"),
        ({"framework": "pytorch"}, "framework"),
    ],
)
def test_invalid_process_counts_are_refused_with_a_fix(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate({"name": "x", "script": "train.py", **given})


@pytest.mark.parametrize(
    "given",
    [
        {"framework": "torch", "processes": 4, "processes_min": 2},
        {"framework": "tensorflow", "processes": 4, "roles": {"chief": 1, "worker": 2, "ps": 1}},
        {"framework": "tensorflow", "processes": 2, "roles": {"chief": 1, "worker": 1, "ps": 0}},
        {"framework": "mxnet", "processes": 3, "roles": {"worker": 2, "server": 1}},
    ],
)
def test_valid_process_counts_are_accepted(given: dict[str, Any]) -> None:
    JobSpec.model_validate({"name": "x", "script": "train.py", **given})


# ------------------------------------------------------------------------------------------------ reasons


HOROVOD_SAYS = b"""\
[0]<stdout>:step 3
[1]<stderr>:Traceback (most recent call last):
[1]<stderr>:  File "train.py", line 9, in <module>
[1]<stderr>:    raise ValueError("no such column")
[1]<stderr>:ValueError: no such column
[0]<stderr>:Terminated
Traceback (most recent call last):
  File "horovod/runner/gloo_run.py", line 284, in launch_gloo
RuntimeError: Horovod detected that one or more processes exited with non-zero status. The first process to do so was:
Process name: 1
Exit code: %d
"""


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (1, "Rank 1: exit code 1: ValueError: no such column"),
        (137, "Rank 1: killed by SIGKILL: ValueError: no such column"),
    ],
)
def test_horovod_failure_names_the_rank_and_not_horovods_own_traceback(status: int, message: str) -> None:
    ended = AttemptOutcome(rank=0, exit_code=1)

    assert explain_failure(ended, replace(LAUNCH, framework="horovod"), HOROVOD_SAYS % status) == message


def test_mpi_failure_without_a_rank_blames_none() -> None:
    text = b"Traceback (most recent call last):\n  File 'x'\nValueError: no such column\n"

    assert explain_failure(AttemptOutcome(rank=0, exit_code=1), replace(LAUNCH, framework="mpi"), text) == (
        "Exit code 1: ValueError: no such column"
    )
