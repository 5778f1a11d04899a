"""Metering of attempts: real processes on this machine, and energy from recorded counters."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.processes.metering import process_tree
from falaj.drivers.processes.metering.energy import CpuEnergy, GpuEnergy
from falaj.drivers.processes.metering.meter import ResourceMeter
from falaj.ports.launcher import AttemptUsage, Launch
from polling import PATIENCE_S
from recorded_machines import ReplayedNvml, recording, unpack

MIB = 2**20
LAUNCH = Launch("job_1/1", Path("/jobs/1"), ["python"])
BUSY = "import time\nwhile time.process_time() < 0.5: pass"
HOLDING = f"held = bytearray({200 * MIB})\nfor at in range(0, len(held), 4096): held[at] = 1\n"


SHIM = """
import json, subprocess, sys, time
from dataclasses import asdict
from pathlib import Path
from falaj.drivers.processes.metering.meter import ResourceMeter
from falaj.ports.launcher import Launch

before, code, group = sys.argv[1:]
subprocess.run([sys.executable, "-c", before], check=True)
meter = ResourceMeter(Launch("job_1/1", Path("/jobs/1"), ["python"]), group=Path(group) if group else None)
with subprocess.Popen([sys.executable, "-c", code]) as process:
    while process.poll() is None:
        meter.sample()
        meter.used()  # looks in any case
        time.sleep(0.02)
print(json.dumps(asdict(meter.used())))
"""


def finished(code: str, *, before: str = "", group: Path | str = "") -> AttemptUsage:
    """Return what a meter measures in a process without other descendants, as in the supervisor."""
    words = [sys.executable, "-c", SHIM, before, code, str(group)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    return AttemptUsage(**json.loads(done.stdout))


# ------------------------------------------------------------------------------------------- CPUs and memory


@pytest.mark.slow
def test_cpu_time_includes_child_processes() -> None:
    code = f"import subprocess, sys; [subprocess.run([sys.executable, '-c', {BUSY!r}]) for _ in range(2)]"

    used = finished(code)

    assert used.cpu_s is not None
    assert 1.0 <= used.cpu_s < 10.0


def test_usage_before_the_meter_does_not_count() -> None:
    used = finished("pass", before=BUSY)

    assert used.cpu_s is not None
    assert used.cpu_s < 0.5


@pytest.mark.slow
def test_cpu_time_of_an_unreaped_child_counts_as_sampled() -> None:
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {BUSY!r} + "\\ntime.sleep(0.5)"])
while os.path.exists(f"/proc/{{child.pid}}"): time.sleep(0.05)
"""

    used = finished(code)

    assert used.cpu_s is not None
    assert used.cpu_s >= 0.45


def test_the_memory_peak_is_recorded() -> None:
    used = finished(HOLDING)

    assert used.peak_memory_bytes is not None
    assert 200 * MIB <= used.peak_memory_bytes < 400 * MIB


def test_memory_that_processes_share_counts_once() -> None:
    code = (
        HOLDING
        + "import os, time\nfor _ in range(3):\n    if not os.fork():\n        time.sleep(1); os._exit(0)\n"
    )
    code += "for _ in range(3): os.wait()"

    used = finished(code)

    assert used.peak_memory_bytes is not None
    assert used.peak_memory_bytes < 400 * MIB


def test_a_cgroup_counts_exactly(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 12500000\nuser_usec 12000000\nsystem_usec 500000\n")
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "memory.peak").write_text("123456\n")

    used = ResourceMeter(LAUNCH, group=tmp_path).used()

    assert (used.cpu_s, used.peak_memory_bytes) == (12.5, 123456)


def test_a_cgroup_without_the_memory_controller_still_counts_cpu_time(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 12500000\n")

    used = finished(HOLDING, group=tmp_path)

    assert used.cpu_s == 12.5
    assert used.peak_memory_bytes is not None
    assert used.peak_memory_bytes >= 200 * MIB


def test_a_job_without_gpus_takes_none_of_their_energy() -> None:
    assert ResourceMeter(LAUNCH).used().gpu_energy_j == 0.0


# ----------------------------------------------------------------------------------------- energy of the CPUs


def rapl(root: Path, **microjoules: int) -> None:
    for zone, value in microjoules.items():
        (
            root / f"sys/class/powercap/{zone.replace('_', ':').replace('rapl', 'intel-rapl')}/energy_uj"
        ).write_text(f"{value}\n")


@pytest.fixture
def dgx(tmp_path: Path) -> Path:
    return unpack(recording("dgx-h200"), tmp_path)


def test_packages_and_memory_are_counted_once(dgx: Path) -> None:
    energy = CpuEnergy(dgx)

    rapl(dgx, rapl_0=3_000_000, rapl_0_0=6_500_000, rapl_2=99_000_000)

    assert energy.is_available
    assert energy.read_j() == pytest.approx(2.0 + 1.5)
    assert energy.read_j() == 0.0


def test_wrapped_counter_continues(dgx: Path) -> None:
    energy = CpuEnergy(dgx)

    rapl(dgx, rapl_1=1_000_000)  # the counter was at 262,000 J, and wraps at 262,143.32885 J

    assert energy.read_j() == pytest.approx(143.32885 + 1.0)


def test_energy_is_unknown_when_counters_cannot_be_read(dgx: Path) -> None:
    (dgx / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()

    assert not CpuEnergy(dgx).is_available
    assert not CpuEnergy(dgx / "nowhere").is_available


def processes(root: Path, *, busy: int) -> None:
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 999 99 0 0 0 0 0\n")


def test_an_attempt_is_charged_with_its_share_of_busy_cpu_time(dgx: Path, tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.current").write_text("1\n")
    processes(dgx, busy=1000)
    (group / "cpu.stat").write_text("usage_usec 0\n")
    meter = ResourceMeter(LAUNCH, group=group, root=dgx)

    processes(dgx, busy=1000 + 40 * process_tree.TICKS)
    (group / "cpu.stat").write_text("usage_usec 10000000\n")
    rapl(dgx, rapl_0=1_000_000 + 200_000_000)

    assert meter.used().cpu_energy_j == pytest.approx(200 * 10 / 40)


# ----------------------------------------------------------------------------------------- energy of the GPUs


class Metered:
    """A recorded machine whose GPUs use energy while the test runs."""

    def __init__(self, name: str) -> None:
        self.recorded: dict[str, Any] = recording(name)["nvml"]
        self.energy = partial(GpuEnergy, load=lambda: ReplayedNvml(self.recorded))

    def uuid(self, handle: str) -> str:
        return str(self.recorded["calls"][f"nvmlDeviceGetUUID({handle})"])

    def acquire(self, joules: int, handle: str) -> None:
        self.recorded["calls"][f"nvmlDeviceGetTotalEnergyConsumption({handle})"] += joules * 1000


def test_the_energy_of_an_attempts_gpus_is_summed() -> None:
    machine = Metered("dgx-h200")
    meter = ResourceMeter(
        replace(LAUNCH, gpus=(machine.uuid("gpu1"), machine.uuid("gpu5"))), gpu_energy=machine.energy
    )
    meter.sample()

    for handle in ("gpu0", "gpu1", "gpu5"):
        machine.acquire(500, handle)

    assert meter.used().gpu_energy_j == pytest.approx(1000)


def test_a_gpu_fraction_is_charged_with_that_fraction() -> None:
    machine = Metered("dgx-h200")
    launch = replace(LAUNCH, gpus=(machine.uuid("gpu0"),), gpu_milli=300)
    meter = ResourceMeter(launch, gpu_energy=machine.energy)
    meter.sample()

    machine.acquire(1000, "gpu0")

    assert meter.used().gpu_energy_j == pytest.approx(300)


def test_a_mig_slice_is_charged_with_its_share_of_the_memory() -> None:
    machine = Metered("h200-mig")
    meter = ResourceMeter(replace(LAUNCH, gpus=(machine.uuid("slice0"),)), gpu_energy=machine.energy)
    meter.sample()

    machine.acquire(1000, "gpu0")

    assert meter.used().gpu_energy_j == pytest.approx(1000 * 17_171_480_576 / 150_754_820_096, abs=0.01)


def test_a_counter_reset_by_the_driver_counts_from_the_reset() -> None:
    machine = Metered("dgx-h200")
    meter = ResourceMeter(replace(LAUNCH, gpus=(machine.uuid("gpu0"),)), gpu_energy=machine.energy)
    meter.sample()

    machine.recorded["calls"]["nvmlDeviceGetTotalEnergyConsumption(gpu0)"] = 7000

    assert meter.used().gpu_energy_j == pytest.approx(7)


@pytest.mark.parametrize("name", ["broken-driver", "half-broken"])
def test_the_energy_of_a_gpu_without_a_counter_is_unknown(name: str) -> None:
    meter = ResourceMeter(replace(LAUNCH, gpus=("GPU-which-is-not-there",)), gpu_energy=Metered(name).energy)

    assert meter.used().gpu_energy_j is None
    meter.close()
