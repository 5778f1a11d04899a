"""The Launcher contract for frameworks: which process decides the end, which may be lost, and that training works."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from falaj.ports.launcher import AttemptState, Launch
from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed, processes_mentioning
from polling import eventually

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
PACKAGES = Path(__file__).parents[2] / "src"

pytestmark = pytest.mark.slow

SERVED = {"framework": "tensorflow", "processes": 3, "roles": {"chief": 1, "worker": 1, "ps": 1}}

# The chief ends when the file exists; the others serve forever, and ignore a stop.
CLUSTER = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role = config["task"]["type"]
os.write(1, role.encode() + b" up\\n")
if role != "chief":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not os.path.exists(f"{role}-fails"):
        time.sleep(0.01)
    sys.exit(3)
def goodbye(*_):
    print("saved while they served", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, goodbye)
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(int(open("go").read()))
"""


def start(testbed: LauncherTestbed, script: str, *arguments: str, up: int, **options: Any) -> Launch:
    """Start an attempt, and wait until `up` processes have reported."""
    launch = testbed.launch(script, *arguments, **options)
    testbed.launcher().start(launch)
    eventually(lambda: testbed.log().count(b" up\n") == up)
    return launch


def end(testbed: LauncherTestbed) -> AttemptState:
    return eventually(lambda: ended(testbed))


def ended(testbed: LauncherTestbed) -> AttemptState:
    state = testbed.launcher().state(ATTEMPT)
    assert state.phase in ("ended", "lost")
    return state


def test_servers_are_killed_once_the_chief_has_succeeded(testbed: LauncherTestbed) -> None:
    launch = start(testbed, CLUSTER, "servers-of-one", up=3, grace_s=60, **SERVED)

    (launch.directory / "code" / "go").write_text("0")

    state = end(testbed)
    assert (state.exit_code, state.reason) == (0, None)
    assert not processes_mentioning("servers-of-one")


@STRONGEST_SANDBOX
def test_chief_that_fails_fails_the_attempt_at_once(testbed: LauncherTestbed) -> None:
    launch = start(testbed, CLUSTER, up=3, grace_s=60, **SERVED)

    (launch.directory / "code" / "go").write_text("5")

    state = end(testbed)
    assert state.exit_code == 5
    assert state.reason is not None
    assert state.reason.startswith("Chief 0: exit code 5")


@STRONGEST_SANDBOX
def test_server_that_fails_fails_the_attempt_by_its_name(testbed: LauncherTestbed) -> None:
    launch = start(testbed, CLUSTER, up=3, **SERVED)

    (launch.directory / "code" / "ps-fails").touch()

    state = end(testbed)
    assert state.exit_code == 3
    assert state.reason is not None
    assert state.reason.startswith("Ps 0: exit code 3")


@STRONGEST_SANDBOX
def test_stop_lets_the_chief_save_while_the_servers_still_serve(testbed: LauncherTestbed) -> None:
    start(testbed, CLUSTER, up=3, **SERVED)

    testbed.launcher().stop(ATTEMPT, grace_s=60)

    assert end(testbed).exit_code == 0
    assert b"saved while they served" in testbed.log()


AGENT = """
import os, time
os.write(1, b"agent up\\n")
while not os.path.exists("go"):
    time.sleep(0.01)
"""
"""Replaces torchrun's: the folder of the code comes first in Python's module search path."""

ELASTIC = {"framework": "torch", "processes": 3, "processes_min": 2}


def start_agents(testbed: LauncherTestbed) -> tuple[Launch, list[int]]:
    launch = testbed.launch("", **ELASTIC)
    package = launch.directory / "code" / "torch" / "distributed"
    package.mkdir(parents=True)
    for file, text in {
        package / "run.py": AGENT,
        package / "__init__.py": "",
        package.parent / "__init__.py": "",
    }.items():
        file.write_text(text)
    testbed.launcher().start(launch)
    eventually(lambda: testbed.log().count(b"agent up\n") == 3)
    return launch, [pid for pid in processes_mentioning(str(launch.directory)) if is_agent(pid)]


@STRONGEST_SANDBOX
def test_attempt_succeeds_with_the_minimum_of_processes(testbed: LauncherTestbed) -> None:
    launch, agents = start_agents(testbed)

    os.kill(agents[0], signal.SIGKILL)
    testbed.wait_for(b"was lost (signal 9); the others continue")
    (launch.directory / "code" / "go").touch()

    assert end(testbed).exit_code == 0


@STRONGEST_SANDBOX
def test_fewer_than_the_minimum_fails_instead_of_hanging(testbed: LauncherTestbed) -> None:
    _, agents = start_agents(testbed)

    for agent in agents[:2]:
        os.kill(agent, signal.SIGKILL)

    state = end(testbed)
    assert (state.phase, state.signal) == ("ended", signal.SIGKILL), state
    assert state.reason is not None
    assert "killed by SIGKILL" in state.reason
    assert not [pid for pid in agents if Path(f"/proc/{pid}").exists()]


@STRONGEST_SANDBOX
def test_every_rank_can_listen_on_a_port_of_its_own(testbed: LauncherTestbed) -> None:
    script = """
import os, socket
machines = os.environ["LIGHTGBM_MACHINES"].split(",")
own = socket.create_server(("127.0.0.1", int(os.environ["LIGHTGBM_LOCAL_LISTEN_PORT"])))
os.write(1, b"%d up\\n" % len(machines))
"""

    state = testbed.run(script, framework="lightgbm", processes=3)

    assert state.exit_code == 0, testbed.log()
    assert testbed.log().count(b"3 up") == 3


# --------------------------------------------------------------------------------------- training results


def learn(testbed: LauncherTestbed, example: str, *arguments: str, **options: Any) -> Launch:
    """Run one of the examples, with the runtime that it imports."""
    variables = {"PYTHONPATH": str(PACKAGES), "FALAJ_OUTPUTS": "../outputs", "HOME": "."}
    given = {"environment": variables, "readable": [PACKAGES], "cpus": 2, **options}
    launch = testbed.launch((EXAMPLES / example).read_text(), *arguments, **given)
    testbed.launcher().start(launch)
    return launch


def learned(launch: Launch) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((launch.directory / "outputs").glob("*.json"))]


@STRONGEST_SANDBOX
def test_two_torch_ranks_train_one_model(testbed: LauncherTestbed) -> None:
    launch = learn(testbed, "torch_ddp.py", framework="torch", processes=2)

    assert end(testbed).exit_code == 0, testbed.log()
    first, second = learned(launch)
    assert (first["world"], second["world"]) == (2, 2)
    assert first["losses"][-1] < first["losses"][0] / 100
    assert first["weights"] == second["weights"] == pytest.approx([1, 2, 3, 4], abs=0.05)


@STRONGEST_SANDBOX
def test_torch_continues_with_fewer_when_an_agent_is_lost(testbed: LauncherTestbed) -> None:
    launch = learn(testbed, "torch_elastic.py", "1000", framework="torch", processes=2, processes_min=1)
    eventually((launch.directory / "code" / "saved.pt").exists)
    agents = [pid for pid in processes_mentioning(str(launch.directory)) if is_agent(pid)]

    os.kill(agents[0], signal.SIGKILL)

    assert end(testbed).exit_code == 0, testbed.log()
    assert len(agents) == 2
    assert testbed.log().count(b"was lost (signal 9); the others continue") == 1
    (only,) = learned(launch)
    assert (only["world"], only["began"] > 0) == (1, True)
    assert only["weights"] == pytest.approx([1, 2, 3, 4], abs=0.05)


def is_agent(pid: int) -> bool:
    return b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@STRONGEST_SANDBOX
def test_scikit_learn_fills_the_jobs_cores(testbed: LauncherTestbed) -> None:
    launch = learn(testbed, "sklearn_search.py", cpus=2)

    assert end(testbed).exit_code == 0, testbed.log()
    (found,) = learned(launch)
    assert found["world"] == 2
    assert found["losses"][-1] < found["losses"][0] / 3
