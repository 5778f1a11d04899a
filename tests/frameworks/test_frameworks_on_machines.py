"""The frameworks train one model on two machines: networks of their own, connected by a cable."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from falaj.control.jobs.environments import JobPython
from falaj.drivers.processes.attempt_spec import SandboxSpec
from framework_testbed import EXAMPLES
from launcher_testbed import LauncherTestbed
from machine_networks import MachineNetworks, two_machines
from sandbox_testbed import machine
from virtualenvs import environment

pytestmark = pytest.mark.timeout(1800)  # the first run installs the framework


@pytest.fixture
def machines() -> Iterator[MachineNetworks]:
    root = Path(tempfile.mkdtemp(prefix="falaj-machines-"))
    root.chmod(0o755)
    testbed = LauncherTestbed(root, SandboxSpec("bubblewrap", machine("bubblewrap")))
    with two_machines(testbed) as networks:
        yield networks
    for attempt in testbed.control.glob("*"):
        testbed.launcher().delete(attempt.name.replace("%2F", "/"))
    shutil.rmtree(root)


def train(machines: MachineNetworks, name: str, example: str, **options: Any) -> list[dict[str, Any]]:
    """Train one of the examples in the environment `name`, and return what each rank learned."""
    python = JobPython(environment(name))
    variables = {
        "HOME": ".",
        "FALAJ_OUTPUTS": "../outputs",
        "FALAJ_AGENT_SECRET": "known to both machines",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "PATH": f"{python.programs}:/usr/bin:/bin",
        **python.variables(machines.testbed.root, {}),
    }
    launches = machines.start(
        (EXAMPLES / example).read_text(),
        command=[python.executable, "-u", "script.py"],
        environment=variables,
        readable=[machines.testbed.root / "runtime", *python.readable],
        **options,
    )
    states = machines.end(launches)
    logs = [machines.log(launch)[-4000:] for launch in launches]
    assert [state.exit_code for state in states] == [0, 0], logs
    found = [path for launch in launches for path in (launch.directory / "outputs").glob("*.json")]
    return [json.loads(path.read_text()) for path in sorted(found, key=lambda path: path.name)]


@pytest.mark.parametrize(
    ("name", "example", "framework"),
    [
        ("jax", "jax_psum.py", "jax"),
        ("tensorflow", "tensorflow_mirrored.py", "tensorflow"),
        ("mxnet", "mxnet_servers.py", "mxnet"),
        ("mpi", "mpi_torch.py", "mpi"),
        ("openmpi", "mpi_torch.py", "mpi"),
    ],
)
def test_two_machines_train_one_model(
    machines: MachineNetworks, name: str, example: str, framework: str
) -> None:
    first, second = train(machines, name, example, framework=framework)

    assert (first["world"], second["world"]) == (2, 2)
    assert first["losses"][-1] < first["losses"][0] / 100
    assert first["weights"] == pytest.approx([1, 2, 3, 4], abs=0.05)
    assert second["weights"] == pytest.approx(first["weights"], abs=1e-6)


def test_lightgbm_boosts_over_the_rows_of_two_machines(machines: MachineNetworks) -> None:
    first, second = train(machines, "trees", "lightgbm_machines.py", framework="lightgbm")

    assert (first["world"], second["world"]) == (2, 2)
    assert first["losses"][-1] < first["losses"][0] / 3
    assert first["model"] == second["model"]
