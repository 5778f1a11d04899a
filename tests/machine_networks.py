"""Two network namespaces that are connected by a cable: machines, as far as frameworks can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.ports.launcher import AttemptState, Launch
from launcher_testbed import LauncherTestbed
from polling import eventually

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "falaj0"

START = """
import json, sys
from pathlib import Path
from falaj.drivers.processes.launcher import ProcessLauncher
from falaj.drivers.processes.attempt_spec import AttemptSpec
spec = AttemptSpec.from_json(json.loads(sys.argv[2]))
ProcessLauncher(Path(sys.argv[1]), sandbox=lambda: spec.sandbox).start(spec.launch)
"""


@dataclass(frozen=True)
class MachineNetworks:
    """The attempts of one testbed on two machines; `holders` are processes that keep their networks."""

    testbed: LauncherTestbed
    holders: Sequence[int]

    def start(self, script: str, *arguments: str, **options: Any) -> list[Launch]:
        """Start a node of the job on each machine, the last one first."""
        launches = [
            self.testbed.launch(
                script,
                *arguments,
                **{
                    "attempt": f"job_1/{rank}",
                    "nodes": len(ADDRESSES),
                    "node_rank": rank,
                    "peers": ADDRESSES,
                    **options,
                },
            )
            for rank in range(len(ADDRESSES))
        ]
        for launch in reversed(launches):
            self.start_node(launch)
        return launches

    def start_node(self, launch: Launch) -> None:
        spec = AttemptSpec(replace(launch, secrets={}), self.testbed.sandbox, 1 << 20)
        command = [sys.executable, "-c", START, str(self.testbed.control), json.dumps(spec.to_json())]
        run(*within(self.holders[launch.node_rank]), *command)

    def end(self, launches: Sequence[Launch]) -> list[AttemptState]:
        """Wait until all nodes have ended by themselves."""
        return [self.end_of(launch) for launch in launches]

    def end_of(self, launch: Launch) -> AttemptState:
        def ended() -> AttemptState:
            state = self.testbed.launcher().state(launch.attempt)
            assert state.phase in ("ended", "lost"), self.log(launch)
            return state

        return eventually(ended)

    def log(self, launch: Launch) -> str:
        return self.testbed.log(launch.attempt).decode(errors="replace")


@contextmanager
def two_machines(testbed: LauncherTestbed) -> Iterator[MachineNetworks]:
    if os.geteuid() != 0:
        pytest.skip("networks of their own: only root may make them")
    with ExitStack() as stack:
        holders = [stack.enter_context(network_holder(address)) for address in ADDRESSES]
        first, second = holders
        run(
            *within(first),
            "ip",
            "link",
            "add",
            DEVICE,
            "type",
            "veth",
            "peer",
            "name",
            DEVICE,
            "netns",
            second,
        )
        for holder, address in zip(holders, ADDRESSES, strict=True):
            run(*within(holder), "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                run(*within(holder), "ip", "link", "set", device, "up")
        yield MachineNetworks(testbed, [int(holder) for holder in holders])


@contextmanager
def network_holder(hostname: str) -> Iterator[str]:
    """Start a process that keeps a network. The name of the host is its address, to which it resolves, as in a pod."""
    command = ["unshare", "--net", "--uts", "sh", "-c", 'hostname "$0" && echo ready && exec cat', hostname]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield str(process.pid)
        finally:
            process.kill()


def within(holder: str | int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--net", "--uts"]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
