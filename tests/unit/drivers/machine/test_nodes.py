"""Nodes and their free resources, as the service, the command line and the doctor show them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from command_line import command_line, make_template
from falaj.apps.cli.commands import nodes, nodes_gpus
from falaj.apps.cli.session import Session
from falaj.assembly.doctor import hardware
from falaj.control.nodes import free_capacity, machine_record
from falaj.governance.operations.caller import acting_as
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.governance.identity import Role
from falaj.records.governance.residency import Zone
from falaj.records.names import ObjectId
from falaj.records.scheduling.hardware import ClusterStatus, Cordon, Machine, NodeDrain, NodePod
from falaj.records.scheduling.mig import CardLayout, MigPlan, ProfileDemand
from falaj.records.scheduling.snapshot import Node, Placement
from falaj.records.training.jobs import JobSpec
from falaj.scheduling import node_from
from platforms import TWO_ZONES, OwnPlatform, make_platform
from recorded_machines import machine

GIB = 2**30


def recorded(name: str, root: Path) -> tuple[NodeFacts, Node]:
    (facts,) = machine(name, root).nodes()
    return facts, node_from(facts, zone=Zone(name="local", jurisdiction="AE"))


def running(node: Node, *gpus: int, where: str | None = None, **spec: Any) -> Any:
    """Return the row of a job that runs on some GPUs of `node`, or elsewhere."""
    placed = Placement(replica=0, node=where or node.name, gpus=tuple(node.gpus[at].id for at in gpus))
    job_spec = JobSpec(name="job", script="train.py", gpus=len(gpus), **spec)
    return SimpleNamespace(spec=job_spec, placements=(placed,))


# ---------------------------------------------------------------------------------------------- free resources


def test_an_idle_node_is_completely_free(tmp_path: Path) -> None:
    _, node = recorded("dgx-h200", tmp_path)

    free = free_capacity(node, [])

    assert (free.cpus, free.memory_bytes, free.gpus) == (node.cpus, node.memory_bytes, 8)
    assert free.gpu_milli == (1000,) * 8


def test_resources_of_running_jobs_are_not_free_including_gpu_fractions(tmp_path: Path) -> None:
    _, node = recorded("dgx-h200", tmp_path)
    rows = [
        running(node, 0, 1, cpus=16, memory_bytes=64 * GIB),
        running(node, 7, cpus=2, gpu_milli=300),
        running(node, 7, cpus=2, gpu_milli=500),
        running(node, 3, where="elsewhere"),
    ]

    free = free_capacity(node, rows)

    assert (free.cpus, free.memory_bytes) == (node.cpus - 20, node.memory_bytes - 64 * GIB)
    assert free.gpu_milli == (0, 0, 1000, 1000, 1000, 1000, 1000, 200)
    assert free.gpus == 5


# ------------------------------------------------------------------------------------------------ the service


def test_every_authenticated_user_sees_the_nodes(light_platform: OwnPlatform) -> None:
    worker = light_platform.join("worker", Role.DEVELOPER)

    with acting_as(worker):
        (found,) = light_platform.parts.services.nodes.list()

    assert found.node.zone == "local"
    assert found.free.cpus == found.node.cpus >= 1
    assert found.cards or found.gpu_fault


def test_falaj_toml_sets_the_pool_and_the_labels(tmp_path: Path) -> None:
    toml = TWO_ZONES + '\npool = "cpu-only"\nlabels = ["rack-7"]\n'

    with make_platform(tmp_path, toml=toml) as platform:
        (found,) = platform.nodes.list()

    assert found.node.pool == "cpu-only"
    assert "rack-7" in found.node.labels
    assert {f"isa-{each}" for each in found.isa} <= found.node.labels


# ------------------------------------------------------------------------------------------- the command line


def shown(name: str, root: Path, *rows: dict[str, Any]) -> Machine:
    return machine_record(*recorded(name, root), rows)


def test_a_list_has_a_line_for_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes._print_all([shown("dgx-h200", tmp_path / "a"), shown("h200-mig", tmp_path / "b")])

    _, dgx, mig = capsys.readouterr().out.splitlines()
    assert "8 of 8" in dgx
    assert "8 NVIDIA H200" in dgx
    assert "ib-fe80000000000001" in dgx
    assert "8 NVIDIA H200 1g.18gb, 1 NVIDIA H200 3g.71gb" in mig


def test_a_node_out_of_service_is_shown_with_who_took_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cordon = Cordon(since=datetime(2026, 3, 1, tzinfo=UTC), by="dana", reason="a fan is replaced")
    machine = shown("dgx-h200", tmp_path).model_copy(
        update={"cordon": cordon.model_copy(update={"drained": True})}
    )

    nodes._print_all([machine, machine.model_copy(update={"jobs": 2})])
    nodes._print_each([machine])

    _, empty, busy, *facts = capsys.readouterr().out.splitlines()
    assert "drained" in empty
    assert "draining" in busy
    assert any("drained since" in line and "by dana: a fan is replaced" in line for line in facts)


def test_what_a_cluster_says_of_a_node_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = ClusterStatus(
        state="lost",
        reason="not ready: Kubelet stopped posting node status.",
        since=datetime(2026, 3, 1, tzinfo=UTC),
        taints=("dedicated=vision:NoSchedule",),
        spot=True,
        autoscaling=("NodePool gpu-spot", "Karpenter removes it"),
    )
    machine = shown("dgx-h200", tmp_path).model_copy(update={"cluster": lost})

    nodes._print_all([machine])
    nodes._print_each([machine])

    _, row, *facts = capsys.readouterr().out.splitlines()
    assert " lost " in row
    assert "8 of 8" not in row
    text = "\n".join(facts)
    for words in ("lost since 2026-03-01", "stopped posting", "dedicated=vision", "NodePool gpu-spot"):
        assert words in text


def test_the_pods_of_others_are_listed_after_a_drain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = NodePod(namespace="kube-system", name="proxy-x", owner="DaemonSet/proxy")

    nodes._print_others(NodeDrain(machine=shown("dgx-h200", tmp_path), others=(proxy,)))
    nodes._print_others(NodeDrain(machine=shown("dgx-h200", tmp_path), unseen="falaj may not list pods"))

    printed = capsys.readouterr().out
    assert "1 pod of others stay there" in printed
    assert "DaemonSet/proxy" in printed
    assert "what else runs there is not known: falaj may not list pods" in printed


def test_layouts_and_ways_to_share_are_printed_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = make_template(tmp_path / "template")
    with command_line(tmp_path / "own", capsys, template=template) as falaj:
        name = falaj.json("nodes", "list")[0]["node"]["name"]

        assert "0 jobs could start with these layouts" in falaj.done("nodes", "plan-mig").out
        layouts = yaml.safe_load(falaj.done("nodes", "render-gpus").out)
        assert "all-disabled" in yaml.safe_load(layouts["data"]["config.yaml"])["mig-configs"]
        shared = yaml.safe_load(falaj.done("nodes", "render-gpus", "--to", "device-plugin").out)
        assert "replicas: 4" in shared["data"]["mps-4"]
        assert "mig-manager or device-plugin" in falaj("nodes", "render-gpus", "--to", "x").err

        refused = falaj("nodes", "configure-gpus", name, "--card", "0=1g.18gb:7", "--yes")
        assert f"falaj nodes drain {name}" in refused.err
        assert "0=whole" in falaj("nodes", "configure-gpus", name, "--card", "zero", "--yes").err


def test_a_plan_ends_with_the_command_that_carries_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    layout = CardLayout(node="gpu-07", card=1, model="NVIDIA H200", then=("1g.18gb", "1g.18gb", "3g.71gb"))
    plan = MigPlan(
        demand=(ProfileDemand(profile="3g.71gb", waiting=1),),
        cards=(layout,),
        helped=(ObjectId("job_1"),),
        unserved=(ObjectId("job_2"),),
        in_the_way=(ObjectId("job_3"),),
    )
    session = Session()

    nodes_gpus._print_plan(session, plan, on_cluster=False)
    on_machine = capsys.readouterr().out
    nodes_gpus._print_plan(session, plan, on_cluster=True)

    assert "2 × 1g.18gb, 1 × 3g.71gb" in on_machine
    assert "1 job would still wait: job_2; in the way: job_3" in on_machine
    assert "falaj nodes configure-gpus gpu-07 --card 1=1g.18gb:2,3g.71gb:1" in on_machine
    assert "falaj nodes render-gpus --to mig-manager" in capsys.readouterr().out


def test_a_node_is_cordoned_drained_and_put_back_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = make_template(tmp_path / "template")
    with command_line(tmp_path / "own", capsys, template=template) as falaj:
        (found,) = falaj.json("nodes", "list")
        name = found["node"]["name"]

        assert f"node {name} starts no further jobs" in falaj.done("nodes", "cordon", name).out
        drained = falaj.done("nodes", "drain", name, "--reason", "a fan", "--yes").out
        assert f"node {name} is empty" in drained
        assert f"undo   falaj nodes uncordon {name}" in drained
        assert falaj.json("nodes", "list")[0]["cordon"]["reason"] == "a fan"
        assert falaj.json("nodes", "drain", name, "--yes")["machine"]["jobs"] == 0
        assert f"node {name} starts jobs again" in falaj.done("nodes", "uncordon", name).out

        refused = falaj("nodes", "drain", name, "--yes", "--timeout", "soon")
        assert refused.status != 0
        assert "--timeout 30m" in refused.err
        assert "the nodes are" in falaj("nodes", "drain", "gpu-9", "--yes").err


def test_a_node_is_shown_with_its_gpus_and_network_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes._print_each([shown("dgx-h200", tmp_path)])

    out = capsys.readouterr().out
    assert "2 sockets, 2 NUMA nodes" in out
    assert "0000:1b:00.0 gen 5 x16" in out
    assert out.count("NVIDIA H200  140 GiB") == 8
    assert out.count("infiniband") == 8
    assert "400" in out


# ------------------------------------------------------------------------------------------------- the doctor


def test_the_doctor_reports_gpus_islands_and_mps(tmp_path: Path) -> None:
    facts, _ = recorded("dgx-h200", tmp_path)

    (finding,) = hardware.check_gpus(facts, Path("/run/mps"))

    assert finding.status == "ok"
    assert finding.words.startswith("8 NVIDIA H200, in 1 NVLink island")
    assert "no MPS in /run/mps" in finding.words


def test_the_doctor_warns_of_a_lost_gpu(tmp_path: Path) -> None:
    facts, _ = recorded("half-broken", tmp_path)

    found = list(hardware.check_gpus(facts, Path("/run/mps")))

    assert [finding.status for finding in found] == ["ok", "warn"]
    assert found[1].words == "GPU 0: GPU is lost"


def test_the_doctor_warns_of_a_broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, _ = recorded("broken-driver", tmp_path)
    monkeypatch.setattr(hardware, "has_device", lambda: True)

    (finding,) = hardware.check_gpus(facts, Path("/run/mps"))

    assert finding.status == "warn"


def test_the_doctor_reports_which_energy_is_counted(tmp_path: Path) -> None:
    facts, _ = recorded("half-broken", tmp_path)

    assert hardware.check_energy(facts, counts_cpus=False).words == "counted of 1 of 2 GPUs (NVML)"
    assert "RAPL" in hardware.check_energy(facts, counts_cpus=True).words
