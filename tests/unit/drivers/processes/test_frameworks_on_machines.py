"""The launch contracts on several machines: who runs where, and at which addresses they meet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from falaj.drivers.processes.diagnosis.reasons import AttemptOutcome, explain_failure
from falaj.drivers.processes.frameworks import mpi_nodes
from falaj.drivers.processes.frameworks.contracts import (
    deciding_nodes,
    machine_fault,
    plan_processes,
    process_name,
    tolerated_losses,
)
from falaj.drivers.processes.frameworks.process import FIRST_PORT, RENDEZVOUS_PORT, PlannedProcess
from falaj.drivers.processes.launcher import share_machine
from falaj.drivers.processes.supervisor.init_plan import shared_environment
from falaj.ports.launcher import Launch
from falaj.records.training.frameworks import MOST_PROCESSES
from falaj.records.training.jobs import Framework

PEERS = ("10.0.0.1", "10.0.0.2")
COMMAND = ["python", "-u", "train.py", "--rows", "3"]
LAUNCH = Launch("job_1/1", Path("/jobs/1"), COMMAND, nodes=2, processes=2, peers=PEERS)


def refuse_ports(count: int) -> Sequence[int]:
    raise AssertionError("nodes cannot ask each other for free ports")


def planned(framework: Framework, node: int, **options: Any) -> Sequence[PlannedProcess]:
    return plan_processes(replace(LAUNCH, framework=framework, node_rank=node, **options), refuse_ports)


def values(processes: Sequence[PlannedProcess], variable: str) -> list[str | None]:
    return [each.environment.get(variable) for each in processes]


@pytest.mark.parametrize("framework", sorted(set(get_args(Framework)) - {"horovod"}))
def test_every_node_can_be_planned_without_asking_for_ports(framework: Framework) -> None:
    for node in range(2):
        assert planned(framework, node)
        assert machine_fault(replace(LAUNCH, framework=framework)) is None


def test_last_port_is_below_those_that_systems_hand_out() -> None:
    assert FIRST_PORT + MOST_PROCESSES <= 32_768


def test_plain_ranks_count_over_all_nodes_and_know_where_to_meet() -> None:
    here, there = planned("plain", 0), planned("plain", 1)

    assert [each.name for each in (*here, *there)] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert values(there, "FALAJ_RANK") == ["2", "3"]
    assert values(there, "FALAJ_LOCAL_RANK") == ["0", "1"]
    assert values(there, "FALAJ_NODE_RANK") == ["1", "1"]
    assert values([*here, *there], "FALAJ_WORLD_SIZE") == ["4"] * 4
    assert values([*here, *there], "FALAJ_MASTER_ADDR") == ["10.0.0.1"] * 4
    assert values([*here, *there], "FALAJ_MASTER_PORT") == [str(RENDEZVOUS_PORT)] * 4


def test_single_process_of_each_node_has_a_rank() -> None:
    (only,) = planned("plain", 1, processes=1)

    assert (only.environment["FALAJ_RANK"], only.environment["FALAJ_WORLD_SIZE"]) == ("1", "2")


def test_torchrun_numbers_ranks_by_node() -> None:
    (agent,) = planned("torch", 1)

    command = list(agent.command)
    assert {"--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--rdzv-backend=static"} <= set(command)
    assert {f"--rdzv-endpoint=10.0.0.1:{RENDEZVOUS_PORT}", "--local-addr=10.0.0.2"} <= set(command)
    assert command[-3:] == ["train.py", "--rows", "3"]


def test_elastic_agents_meet_at_a_store_of_the_first_node() -> None:
    here, there = planned("torch", 0, processes_min=1), planned("torch", 1, processes_min=1)

    assert [each.name for each in here] == ["agent 0", "agent 1", "rendezvous"]
    assert [each.is_essential for each in here] == [True, True, False]
    assert [each.name for each in there] == ["agent 2", "agent 3"]
    command = list(there[0].command)
    assert {"--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=2"} <= set(command)
    assert f"--rdzv-endpoint=10.0.0.1:{RENDEZVOUS_PORT}" in command
    assert any("is_host=false" in word and "keep_alive_interval=1" in word for word in command)
    assert tolerated_losses(replace(LAUNCH, framework="torch", processes_min=1)) == 1


def test_torch_of_several_machines_does_not_prefer_loopback() -> None:
    assert "GLOO_SOCKET_IFNAME" not in shared_environment(replace(LAUNCH, framework="torch"))


def test_tensorflow_roles_are_dealt_out_over_the_nodes() -> None:
    roles = {"chief": 1, "worker": 2, "ps": 1}

    here, there = planned("tensorflow", 0, roles=roles), planned("tensorflow", 1, roles=roles)

    assert [each.name for each in here] == ["chief 0", "worker 0"]
    assert [each.name for each in there] == ["worker 1", "ps 0"]
    configs = [json.loads(each.environment["TF_CONFIG"]) for each in (*here, *there)]
    assert configs[0]["cluster"] == {
        "chief": [f"10.0.0.1:{FIRST_PORT}"],
        "worker": [f"10.0.0.1:{FIRST_PORT + 1}", f"10.0.0.2:{FIRST_PORT + 2}"],
        "ps": [f"10.0.0.2:{FIRST_PORT + 3}"],
    }
    assert all(each["cluster"] == configs[0]["cluster"] for each in configs)


def test_gpus_of_a_node_go_to_its_own_tasks() -> None:
    gpus, roles = ("GPU-a", "GPU-b"), {"worker": 3, "ps": 1}

    assert values(planned("jax", 1, gpus=gpus), "CUDA_VISIBLE_DEVICES") == ["GPU-a", "GPU-b"]
    assert values(planned("tensorflow", 1, gpus=gpus, roles=roles), "CUDA_VISIBLE_DEVICES") == [
        "GPU-a,GPU-b",
        "",
    ]


def test_jax_coordinator_is_at_the_first_node() -> None:
    there = planned("jax", 1)

    assert values(there, "JAX_COORDINATOR_ADDRESS") == [f"10.0.0.1:{RENDEZVOUS_PORT}"] * 2
    assert values(there, "JAX_PROCESS_ID") == ["2", "3"]
    assert values(there, "JAX_NUM_PROCESSES") == ["4", "4"]


def test_tracker_of_xgboost_runs_on_the_first_node_alone() -> None:
    here, there = planned("xgboost", 0), planned("xgboost", 1)

    assert [each.name for each in here] == ["rank 0", "rank 1", "tracker"]
    assert [each.name for each in there] == ["rank 2", "rank 3"]
    assert list(here[2].command[-3:]) == ["4", "10.0.0.1", str(RENDEZVOUS_PORT)]
    assert values(there, "DMLC_TRACKER_URI") == ["10.0.0.1"] * 2
    assert values(there, "DMLC_TASK_ID") == ["2", "3"]


def test_lightgbm_lists_every_rank_of_all_nodes() -> None:
    there = planned("lightgbm", 1)

    machines = [f"10.0.0.{1 + rank // 2}:{FIRST_PORT + rank}" for rank in range(4)]
    assert values(there, "LIGHTGBM_MACHINES") == [",".join(machines)] * 2
    assert values(there, "LIGHTGBM_LOCAL_LISTEN_PORT") == [str(FIRST_PORT + 2), str(FIRST_PORT + 3)]


def test_mxnet_has_one_scheduler_and_servers_after_the_workers() -> None:
    roles = {"worker": 3, "server": 1}

    here, there = planned("mxnet", 0, roles=roles), planned("mxnet", 1, roles=roles)

    assert [each.name for each in here] == ["worker 0", "worker 1", "scheduler"]
    assert [each.name for each in there] == ["worker 2", "server 0"]
    assert values(there, "DMLC_PS_ROOT_URI") == ["10.0.0.1"] * 2
    assert shared_environment(replace(LAUNCH, framework="mxnet", node_rank=1))["DMLC_NODE_HOST"] == "10.0.0.2"


def test_addresses_of_ipv6_are_in_brackets() -> None:
    there = planned("jax", 1, peers=("fd00::1", "fd00::2"))

    assert values(there, "JAX_COORDINATOR_ADDRESS") == [f"[fd00::1]:{RENDEZVOUS_PORT}"] * 2


def test_only_nodes_with_a_deciding_process_decide() -> None:
    roles = {"chief": 1, "worker": 2, "ps": 1}

    assert deciding_nodes(replace(LAUNCH, framework="tensorflow", roles=roles)) == [0]
    assert deciding_nodes(replace(LAUNCH, framework="tensorflow")) == [0, 1]
    assert deciding_nodes(replace(LAUNCH, framework="torch")) == [0, 1]


def test_a_framework_that_needs_ssh_stays_on_one_machine() -> None:
    assert "ssh" in str(machine_fault(replace(LAUNCH, framework="horovod")))
    assert machine_fault(replace(LAUNCH, framework="horovod", peers=())) is None


def test_mpi_starts_on_the_first_node_and_the_others_wait_for_it() -> None:
    (here,), (there,) = planned("mpi", 0), planned("mpi", 1)

    assert list(here.command[3:]) == ["start", "10.0.0.1,10.0.0.2", "2", *COMMAND]
    assert list(there.command[3:]) == ["serve", "10.0.0.2", str(FIRST_PORT + 1)]
    assert mpi_nodes.FIRST_PORT == FIRST_PORT


def test_failure_names_the_rank_and_not_its_place_on_the_node() -> None:
    second = replace(LAUNCH, node_rank=1)

    assert process_name(second, 1) == "rank 3"
    assert explain_failure(AttemptOutcome(rank=1, exit_code=3), second, b"") == "Rank 3: exit code 3"


# -------------------------------------------------------------------------------------------- one machine


def test_one_machine_runs_all_nodes_with_the_resources_of_all() -> None:
    alone = replace(
        LAUNCH, peers=(), cpus=4, memory_bytes=10, disk_bytes=20, processes_min=1, gpus=("GPU-a", "GPU-b")
    )

    shared = share_machine(alone)

    assert (shared.nodes, shared.processes, shared.processes_min) == (1, 4, 2)
    assert (shared.cpus, shared.memory_bytes, shared.disk_bytes) == (8, 20, 40)
    assert shared.gpus == alone.gpus
    assert share_machine(LAUNCH) is LAUNCH
    assert share_machine(replace(alone, memory_bytes=None)).memory_bytes is None
