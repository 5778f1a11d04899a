"""The hardware driver on a real NVIDIA GPU: discovery, energy, and jobs that share the GPU by MPS.

Needs torch, pydantic, nvidia-ml-py, a GPU, and permission to start nvidia-cuda-mps-control: `PYTHONPATH=src python
benchmarks/hardware_gpu.py`. A transcript is in results/hardware_h200.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from falaj.drivers.processes.launcher import ProcessLauncher
    from falaj.ports.launcher import Launch

GIB = 2**30
SIDE = 8192
PART = {"gpu_milli": 300, "gpu_memory_bytes": 16 * GIB}
LARGER = {"gpu_milli": 600, "gpu_memory_bytes": 40 * GIB}


def main() -> None:
    if sys.argv[1:2] == ["job"]:
        name, within, beyond, seconds = sys.argv[2:]
        return work(name, [float(within), float(beyond)], float(seconds))
    uuid = discover()
    measure_energy(uuid)
    share(uuid)


def say(*words: object) -> None:
    print(*words, flush=True)


# ---------------------------------------------------------------------------------------------------- the job


def work(name: str, sizes_gib: list[float], seconds: float) -> None:
    """Print the visible devices, the allocatable memory, and the speed of multiplication; needs nothing of Falaj."""
    import torch

    seen = torch.cuda.get_device_properties(0).multi_processor_count
    free = torch.cuda.mem_get_info()[0] / GIB
    say(f"{name}: {torch.cuda.device_count()} card, {seen} multiprocessors, {free:.2f} GiB free")
    for size in filter(None, sizes_gib):
        try:
            torch.empty(int(size * GIB), dtype=torch.uint8, device="cuda").fill_(1)
            torch.cuda.synchronize()
            say(f"{name}: {size:g} GiB allocated")
        except torch.cuda.OutOfMemoryError as error:
            say(f"{name}: {size:g} GiB refused: {type(error).__name__}")
        torch.cuda.empty_cache()
    left = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn_like(left)
    left @ right
    torch.cuda.synchronize()
    began, count = time.monotonic(), 0
    while (took := time.monotonic() - began) < seconds:
        for _ in range(10):
            left @ right
        torch.cuda.synchronize()
        count += 10
    say(f"{name}: {2 * SIDE**3 * count / took / 1e12:.0f} TFLOP/s (bf16, {SIDE}^3) over {took:.1f} s")


# --------------------------------------------------------------------------------------- discovery and energy


def discover() -> str:
    from falaj.drivers.machine.inventory import LocalMachine
    from falaj.records.governance.residency import Zone
    from falaj.scheduling.nodes import node_from

    say("## discovery")
    began = time.monotonic()
    (facts,) = LocalMachine(name="this").nodes()
    say(f"took {time.monotonic() - began:.3f} s")
    if not facts.gpus:
        raise SystemExit(f"there is no GPU here: {facts.gpu_fault}")
    uuid = facts.gpus[0].id
    for field in fields(facts):
        say(f"  {field.name}: {getattr(facts, field.name)}".replace(uuid, "GPU-…"))
    node = node_from(facts, zone=Zone(name="local", jurisdiction="AE"))
    say(f"  labels: {', '.join(sorted(node.labels))}")
    return uuid


def measure_energy(uuid: str) -> None:
    """Compare NVML's energy counter with the integral of NVML's power readings."""
    say("\n## energy of one job on the whole card, idle and loaded")
    idle = [sys.executable, "-c", "import time; time.sleep(6)"]
    for words in (idle, [sys.executable, __file__, "job", "loaded", "0", "0", "10"]):
        metered(words, uuid)


def metered(words: list[str], uuid: str) -> None:
    from falaj.drivers.processes.metering.meter import ResourceMeter
    from falaj.ports.launcher import Launch

    meter = ResourceMeter(Launch("job/1", Path.cwd(), words, gpus=(uuid,)))
    meter.sample()
    began = time.monotonic()
    with power_readings() as readings, subprocess.Popen(words) as process:
        while process.poll() is None:
            meter.sample()
            time.sleep(0.05)
    took, used = time.monotonic() - began, meter.used()
    meter.close()
    integral = sum(
        (after[0] - before[0]) * (after[1] + before[1]) / 2 for before, after in pairwise(readings)
    )
    memory = (used.peak_memory_bytes or 0) / 2**20
    say(f"  {took:.1f} s: counter {used.gpu_energy_j:.0f} J, integral of power {integral:.0f} J")
    say(f"  {used.cpu_s:.1f} CPU s, peak memory {memory:.0f} MiB, energy of the CPUs {used.cpu_energy_j}")


@contextmanager
def power_readings() -> Iterator[list[tuple[float, float]]]:
    """Record times and watts from NVML until the end of the block."""
    pynvml = import_module("pynvml")
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    found: list[tuple[float, float]] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(0.05):
            found.append((time.monotonic(), pynvml.nvmlDeviceGetPowerUsage(card) / 1000))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield found
    finally:
        is_over.set()
        reader.join()
        pynvml.nvmlShutdown()


# --------------------------------------------------------------------------------------------------- sharing


def share(uuid: str) -> None:
    from falaj.drivers.processes.attempt_spec import SandboxSpec
    from falaj.drivers.processes.launcher import ProcessLauncher
    from falaj.drivers.sandbox import probe
    from falaj.errors import Unavailable

    say("\n## jobs that share the card by MPS, started by the launcher")
    facts = probe()
    how: Any = "bubblewrap" if facts.bubblewrap_works else "uid" if facts.uid_works else "same-uid"
    say(f"user code is kept apart by: {how}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        pipes = Path(folder) / "mps"
        pipes.mkdir()
        launcher = ProcessLauncher(Path(folder) / "launches", sandbox=lambda: SandboxSpec(how, facts))
        testbed = JobTestbed(Path(folder), launcher, uuid, pipes)
        try:
            launcher.start(testbed.job("early", 1, 0, 1, **PART))
            say("a part of a card was started without a daemon: that must not be")
        except Unavailable as error:
            say(f"without a daemon: {str(error).replace(folder, '…')}")
        with daemon(pipes):
            run_pairs(testbed)


@contextmanager
def daemon(pipes: Path) -> Iterator[None]:
    from falaj.drivers.machine import mps

    environment = os.environ | {
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_LOG_DIRECTORY": str(pipes),
    }
    command = ["nvidia-cuda-mps-control", "-d", "--multiuser-server"]
    ended = subprocess.run(command, env=environment, check=False).returncode
    time.sleep(1)
    say(f"{' '.join(command)}: exit code {ended}; it answers: {mps.is_running(pipes)}")
    try:
        yield
    finally:
        subprocess.run(command[:1], input="quit\n", text=True, env=environment, check=False)
        time.sleep(1)
        say(f"sent quit; it answers: {mps.is_running(pipes)}")


class JobTestbed:
    """The environment in which the jobs of this benchmark run."""

    def __init__(self, folder: Path, launcher: ProcessLauncher, uuid: str, pipes: Path) -> None:
        self._folder, self._launcher, self._uuid, self._pipes = folder, launcher, uuid, pipes

    def job(self, name: str, within: float, beyond: float, seconds: float, **part: Any) -> Launch:
        from falaj.ports.launcher import Launch

        directory = self._folder / name
        for each in ("code", "inputs", "outputs"):
            (directory / each).mkdir(parents=True)
        shutil.copy(__file__, directory / "code" / "job.py")
        kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
        words = [sys.executable, "-u", "job.py", "job", name, str(within), str(beyond), str(seconds)]
        return Launch(
            f"{name}/1",
            directory,
            words,
            environment=kept | {"HOME": str(directory)},
            cpus=4,
            gpus=(self._uuid,),
            mps_directory=str(self._pipes),
            timeout_s=60,
            **part,
        )

    def run(self, words: str, *launches: Launch) -> None:
        say(f"-- {words}")
        for launch in launches:
            self._launcher.start(launch)
        for launch in launches:
            while (state := self._launcher.state(launch.attempt)).phase not in ("ended", "lost"):
                time.sleep(0.1)
            say(self._launcher.log(launch.attempt, offset=0, limit=1 << 20).decode().rstrip())
            say(f"   exit code {state.exit_code}, {state.reason or 'no complaint'}; {state.used}")


def run_pairs(testbed: JobTestbed) -> None:
    testbed.run("alone: 300 thousandths, 16 GiB", testbed.job("a", 12, 20, 5, **PART))
    testbed.run(
        "at once: 300 thousandths with 16 GiB, and 600 with 40 GiB",
        testbed.job("b", 12, 20, 8, **PART),
        testbed.job("c", 30, 45, 8, **LARGER),
    )
    testbed.run(
        "two processes of one job: 300 thousandths, 16 GiB", testbed.job("d", 5, 10, 4, processes=2, **PART)
    )
    testbed.run("a whole card beside the daemon", testbed.job("e", 50, 0, 3))
    whole = testbed.job("f", 50, 0, 3)
    wanted = {**whole.environment, "CUDA_MPS_PIPE_DIRECTORY": whole.mps_directory}
    testbed.run("a whole card whose job asks for the daemon by itself", replace(whole, environment=wanted))


if __name__ == "__main__":
    main()
