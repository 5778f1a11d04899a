"""The Launcher contract for jobs of several nodes: on one machine, and on two whose processes find each other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from falaj.errors import InvalidInput
from falaj.ports.launcher import Launch
from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed, processes_mentioning
from machine_networks import ADDRESSES, MachineNetworks, two_machines
from polling import eventually

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
PACKAGES = Path(__file__).parents[2] / "src"

pytestmark = STRONGEST_SANDBOX

TELL = """
import json, os
names = "FALAJ_RANK", "FALAJ_WORLD_SIZE", "FALAJ_NODE_RANK", "FALAJ_LOCAL_RANK", "FALAJ_MASTER_ADDR"
os.write(1, json.dumps({name: os.environ.get(name) for name in names}).encode() + b"\\n")
"""
"""In one write: lines of several processes must not mix."""


@pytest.fixture
def machines(testbed: LauncherTestbed) -> Iterator[MachineNetworks]:
    with two_machines(testbed) as networks:
        yield networks


def told(*logs: bytes | str) -> list[dict[str, str]]:
    lines = [line for log in logs for line in log.splitlines()]
    return sorted(map(json.loads, lines), key=lambda each: int(each["FALAJ_RANK"]))


# -------------------------------------------------------------------------------------------- one machine


@pytest.mark.slow
def test_one_machine_runs_the_processes_of_all_nodes(testbed: LauncherTestbed) -> None:
    state = testbed.run(TELL, nodes=2, processes=2)

    ranks = told(testbed.log())
    assert state.exit_code == 0
    assert [each["FALAJ_RANK"] for each in ranks] == ["0", "1", "2", "3"]
    assert {each["FALAJ_WORLD_SIZE"] for each in ranks} == {"4"}
    assert {each["FALAJ_NODE_RANK"] for each in ranks} == {"0"}
    assert [each["FALAJ_LOCAL_RANK"] for each in ranks] == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_one_machine_has_the_memory_of_all_nodes(testbed: LauncherTestbed) -> None:
    state = testbed.run("held = bytearray(300 << 20)", nodes=3, memory_bytes=200 << 20)

    assert state.exit_code is not None
    assert any("600" in line for line in state.limits), state.limits


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 3, "peers": ADDRESSES}, "peers"),
        ({"nodes": 2, "node_rank": 2, "peers": ADDRESSES}, "node_rank"),
        ({"nodes": 2, "node_rank": 1}, "node_rank"),
        ({"nodes": 2, "peers": ADDRESSES, "framework": "horovod"}, "framework"),
    ],
)
def test_impossible_nodes_are_refused(testbed: LauncherTestbed, options: dict[str, Any], where: str) -> None:
    launch = testbed.launch("", **options)

    with pytest.raises(InvalidInput) as refused:
        testbed.launcher().start(launch)

    assert refused.value.faults[0].where == where
    assert testbed.launcher().state(ATTEMPT).phase == "unknown"


# ------------------------------------------------------------------------------------------ late machines


@pytest.mark.slow
def test_node_whose_peers_are_unknown_waits_and_can_be_stopped(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(TELL, nodes=2, peers=("localhost", "nowhere.invalid"))
    testbed.launcher().start(launch)
    eventually(lambda: testbed.supervisors())
    assert testbed.launcher().state(ATTEMPT).phase == "starting"

    testbed.launcher().stop(ATTEMPT, grace_s=5)

    state = testbed.end()
    assert (state.exit_code, state.stopped) == (None, True)
    assert testbed.log() == b""


@pytest.mark.slow
def test_names_of_peers_become_addresses(testbed: LauncherTestbed) -> None:
    state = testbed.run(TELL, nodes=2, node_rank=1, peers=("localhost", "127.0.0.3"))

    (only,) = told(testbed.log())
    assert state.exit_code == 0
    assert only["FALAJ_MASTER_ADDR"] in ("127.0.0.1", "::1")
    assert only["FALAJ_RANK"] == "1"


# ------------------------------------------------------------------------------------------- two machines


MEET = """
import os, socket, time
rank, size = int(os.environ["FALAJ_RANK"]), int(os.environ["FALAJ_WORLD_SIZE"])
place = os.environ["FALAJ_MASTER_ADDR"], int(os.environ["FALAJ_MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        met = sorted(int(server.accept()[0].recv(10)) for _ in range(size - 1))
    print("met", met, flush=True)
else:
    while True:
        try:
            with socket.create_connection(place) as connection:
                connection.sendall(b"%d" % rank)
            break
        except OSError:
            time.sleep(0.05)
"""


@pytest.mark.slow
def test_plain_processes_of_two_machines_meet_at_rank_0(machines: MachineNetworks) -> None:
    launches = machines.start(MEET, processes=2)

    states = machines.end(launches)

    assert [state.exit_code for state in states] == [0, 0], states
    assert machines.log(launches[0]) == "met [1, 2, 3]\n"


def learn(machines: MachineNetworks, example: str, *arguments: str, **options: Any) -> list[Launch]:
    variables = {"PYTHONPATH": str(PACKAGES), "FALAJ_OUTPUTS": "../outputs", "HOME": "."}
    given = {"environment": variables, "readable": [PACKAGES], **options}
    return machines.start((EXAMPLES / example).read_text(), *arguments, **given)


def learned(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    found = [path for launch in launches for path in (launch.directory / "outputs").glob("*.json")]
    return [json.loads(path.read_text()) for path in sorted(found, key=lambda path: path.name)]


@pytest.mark.slow
def test_torch_trains_one_model_on_two_machines(machines: MachineNetworks) -> None:
    launches = learn(machines, "torch_ddp.py", framework="torch", processes=2)

    states = machines.end(launches)

    assert [state.exit_code for state in states] == [0, 0], [machines.log(each) for each in launches]
    ranks = learned(launches)
    assert [each["world"] for each in ranks] == [4] * 4
    assert ranks[0]["weights"] == ranks[3]["weights"] == pytest.approx([1, 2, 3, 4], abs=0.05)
    names = [sorted(path.name for path in (each.directory / "outputs").iterdir()) for each in launches]
    assert names == [["rank-0.json", "rank-1.json"], ["rank-2.json", "rank-3.json"]]


FIT = """
import json, os
import torch
import falaj as fj

torch.set_num_threads(1)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
torch.manual_seed(int(os.environ["RANK"]))  # each process begins with another model: that of rank 0 counts
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
result = fj.fit(model, torch.nn.functional.mse_loss, (rows, rows.sum(1, keepdim=True)), steps=12, batch_size=16,
                parallel="ddp", exact=True, device="cpu", seed=3)
if os.environ["RANK"] == "0":
    (fj.job.outputs / "losses.json").write_text(json.dumps(result.losses))
"""


@pytest.mark.slow
def test_fit_has_the_same_losses_on_two_machines_as_on_one(machines: MachineNetworks) -> None:
    variables = {"PYTHONPATH": str(PACKAGES), "FALAJ_OUTPUTS": "../outputs", "HOME": "."}
    given: dict[str, Any] = {"environment": variables, "readable": [PACKAGES], "framework": "torch"}
    launches = machines.start(FIT, processes=2, **given)
    states = machines.end(launches)
    assert [state.exit_code for state in states] == [0, 0], [machines.log(each) for each in launches]

    alone = machines.testbed.launch(FIT, attempt="job_1/alone", nodes=2, processes=2, **given)
    machines.testbed.launcher().start(alone)

    assert machines.end_of(alone).exit_code == 0, machines.log(alone)
    together, apart = (
        json.loads((launch.directory / "outputs" / "losses.json").read_text())
        for launch in (alone, launches[0])
    )
    assert len(together) == 12
    assert apart == together  # to the bit


SUM_OFTEN = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, b"world %d\\n" % dist.get_world_size())
for _ in range(300):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_continues_when_an_agent_of_a_machine_is_lost(machines: MachineNetworks) -> None:
    mark = f"elastic-{machines.testbed.root.name}"
    launches = machines.start(SUM_OFTEN, mark, framework="torch", processes=2, processes_min=1)
    logs = lambda: "".join(map(machines.log, launches))  # noqa: E731

    def all_met() -> bool:
        assert logs().count("world 4\n") == 4, logs()
        return True

    eventually(all_met)
    agents = [pid for pid in processes_mentioning(mark) if is_agent(pid)]

    os.kill(agents[-1], signal.SIGKILL)

    states = machines.end(launches)
    assert [state.exit_code for state in states] == [0, 0], logs()
    assert len(agents) == 4
    assert logs().count("was lost (signal 9); the others continue") == 1
    assert logs().count("world 3\n") == 3


def is_agent(pid: int) -> bool:
    return b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.slow
def test_xgboost_boosts_over_the_rows_of_two_machines(machines: MachineNetworks) -> None:
    launches = learn(machines, "xgboost_workers.py", framework="xgboost", processes=1)

    states = machines.end(launches)

    assert [state.exit_code for state in states] == [0, 0], [machines.log(each) for each in launches]
    first, second = learned(launches)
    assert (first["world"], second["world"]) == (2, 2)
    assert first["losses"][-1] < first["losses"][0] / 3
    assert first["model"] == second["model"]


@pytest.mark.slow
def test_failed_node_is_seen_at_once_and_the_others_end_when_they_are_stopped(
    machines: MachineNetworks,
) -> None:
    script = "import os, sys, time; os.environ['FALAJ_RANK'] == '1' and sys.exit(3); time.sleep(600)"
    first, second = machines.start(script, processes=1)

    failed = machines.end_of(second)
    assert failed.reason == "Rank 1: exit code 3"
    machines.testbed.launcher().stop(first.attempt, grace_s=5)  # what the platform does then

    stopped = machines.end_of(first)
    assert (stopped.exit_code, stopped.stopped) == (None, True)


SERVED = """
import json, os, sys, time
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
os.write(1, f"{role} up\\n".encode())
while role != "chief":
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_machine_with_servers_alone_serves_until_it_is_stopped(machines: MachineNetworks) -> None:
    roles = {"chief": 1, "worker": 2, "ps": 1}
    launches = machines.start(SERVED, framework="tensorflow", processes=2, roles=roles)
    first, second = launches
    assert machines.end_of(first).exit_code == 0
    eventually(lambda: machines.log(second).count(" up\n") == 2)
    assert machines.testbed.launcher().state(second.attempt).phase == "running"

    machines.testbed.launcher().stop(second.attempt, grace_s=0)

    assert machines.end_of(second).stopped is True
