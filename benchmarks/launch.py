"""Time from `falaj train` to the first line of its code, against plain Python; and jobs per second of the queue.

The first is measured with a running platform and embedded. The second uses a fake launcher whose attempts succeed at
once, with the real job service, reconciler, scheduler, database and encrypted logs.
"""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform, assemble
from falaj.control import lease
from falaj.control.jobs.context import JobHost
from falaj.control.jobs.reconciler import JobReconciler
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.scheduling.snapshot import Node
from falaj.records.training.jobs import JobSpec
from falaj.training import store
from harness import Result, Rule, environment, free_port, report, running, say, wait_until_ready

QUICK = True
ROUNDS = 7
JOBS = 300
WIDE = Node(name="wide", zone="local", jurisdiction="AE", cpus=16, memory_bytes=1 << 40)
MARK = "first line at "
SCRIPT = f"import time\nprint({MARK!r} + repr(time.time()), flush=True)\n"


def main() -> None:
    plain, alone, beside = first_lines()
    rate = bookkeeping()
    what = "s from falaj train to the first line of code, over plain python"
    report(
        "launch",
        [
            Result(f"{what}, platform running", beside - plain, plain, 1.5, Rule.FALAJ_AT_MOST),
            Result(f"{what}, no platform running", alone - plain, plain, 1.5, Rule.FALAJ_AT_MOST),
            Result("jobs/s through the queue, no process started", rate, 20, 20, Rule.FALAJ_AT_LEAST),
        ],
    )


# ---------------------------------------------------------------------------------------- the first line


def first_lines() -> tuple[float, float, float]:
    """Return seconds to the first line at the median: plain Python, embedded, and with a running platform."""
    program = Path(sys.executable).with_name("falaj")
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        home, script = Path(folder), Path(folder) / "train.py"
        script.write_text(SCRIPT)
        places = environment(FALAJ_HOME=str(home / "home"), FALAJ_CONFIG_DIR=str(home / "config"))
        train: list[str | Path] = [program, "train", script]
        plain = typical("plain python", [Path(sys.executable), script], home, places)
        alone = typical("falaj train, no platform running", train, home, places)
        port = free_port()
        with running([program, "up", "--port", str(port)], cwd=home, env=places) as pid:
            wait_until_ready(f"http://127.0.0.1:{port}/readyz", pid=pid)
            beside = typical("falaj train, platform running", train, home, places)
    return plain, alone, beside


def typical(name: str, command: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> float:
    first_line(command, folder, variables)
    times = [first_line(command, folder, variables) for _ in range(ROUNDS)]
    say(f"{name}: " + ", ".join(f"{each:.2f}" for each in times) + " s")
    return statistics.median(times)


def first_line(command: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> float:
    started = time.time()
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError(f"{command} printed {done.stdout!r} {done.stderr!r}")
    return float(found[0].removeprefix(MARK)) - started


# ---------------------------------------------------------------------------------------- bookkeeping


class NoProcesses:
    """Implements the launcher without processes: every attempt has succeeded as soon as it is started."""

    def __init__(self) -> None:
        self._ended: set[str] = set()

    def start(self, launch: Launch) -> None:
        self._ended.add(launch.attempt)

    def state(self, attempt: str) -> AttemptState:
        return AttemptState("ended", exit_code=0) if attempt in self._ended else AttemptState("unknown")

    def stop(self, attempt: str, *, grace_s: float) -> None:
        pass

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return b"it ran\n"[offset : offset + limit]

    def delete(self, attempt: str) -> None:
        self._ended.discard(attempt)


def bookkeeping() -> float:
    """Return jobs per second that are submitted, admitted, staged, settled with their log, and cleaned up."""
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        platform = assemble(open_home(Path(folder) / "home", Path(folder) / "config"), as_owner=True)
        reconciler = reconciler_for(platform, Path(folder))
        code = platform.services.blobs.upload(iter([packed()])).id
        spec = JobSpec(name="short", script="train.py")
        started = time.monotonic()
        for _ in range(JOBS):
            platform.services.jobs.submit(spec, code=code)
            reconciler.tick()
        submitted = time.monotonic()
        while waiting(platform):
            reconciler.tick()
            time.sleep(0.005)
        ended = time.monotonic()
        reconciler.stop()
        platform.close()
    say(
        f"{JOBS} jobs: {submitted - started:.2f} s until the last was submitted, {ended - started:.2f} s in all"
    )
    return JOBS / (ended - started)


def reconciler_for(platform: LocalPlatform, folder: Path) -> JobReconciler:
    clock = platform.gate.clock
    fence = lease.acquire(platform.database, "bench", now=clock(), lasts=timedelta(hours=1))
    host = JobHost(folder / "jobs", NoProcesses(), lambda: (WIDE,))
    return JobReconciler(platform.gate, platform.services, host, fence=fence or 0, on_lost=lost)


def waiting(platform: LocalPlatform) -> bool:
    with platform.database.read() as tx:
        return bool(store.queue(tx))


def packed() -> bytes:
    raw, text = io.BytesIO(), SCRIPT.encode()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return raw.getvalue()


def lost() -> NoReturn:
    raise RuntimeError("the lease was lost")


if __name__ == "__main__":
    main()
