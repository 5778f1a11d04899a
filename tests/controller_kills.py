"""Runs rounds of short jobs under controllers that are killed at random: every job must end exactly once."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controller_processes import run_controllers
from falaj.records.training.jobs import Job, JobState
from falaj.training.tables import attempts
from platforms import OwnPlatform, make_platform
from polling import eventually, let_pass

SCRIPT = """
import falaj as fj
fj.job.log(step=fj.job.attempt, ran=1)
fj.job.flush()
print("ran", fj.job.id, fj.job.attempt, flush=True)
(fj.job.outputs / "result.txt").write_text(f"attempt {fj.job.attempt}")
"""

LONGEST_BREATH_S = 1.0


@dataclass(frozen=True)
class KillOutcome:
    """The outcome of a round: `ran` counts executions of each attempt, `begun` are the recorded attempts."""

    seconds: float
    kills: int
    begun: int
    ran: Counter[int]
    faults: list[str]


def run_kills(platform: OwnPlatform, folder: Path, *, jobs: int, kills: int, seed: int) -> KillOutcome:
    """Submit `jobs`, kill one controller after the other until `kills` is reached, then let the jobs end."""
    luck, started = random.Random(seed), time.monotonic()
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "train.py").write_text(SCRIPT)
    submitted = [platform.train(folder / "code" / "train.py", name=f"short-{each}") for each in range(jobs)]
    with run_controllers(platform, folder) as controllers:
        for _ in range(kills):
            controller = controllers.start_controller()
            let_pass(luck.uniform(0, LONGEST_BREATH_S + startup_s(platform)))
            controller.kill()
            controller.wait()
        controllers.start_controller()
        await_ends(platform)
    return judge(platform, submitted, kills=kills, seconds=time.monotonic() - started)


_startup: list[float] = []


def startup_s(platform: OwnPlatform) -> float:
    """Return how long a controller takes to get the lease on this machine; measured once."""
    if not _startup:
        began = time.monotonic()
        fence = platform.rows_of("SELECT fence FROM control_leases")
        eventually(lambda: platform.rows_of("SELECT fence FROM control_leases") != fence)
        _startup.append(time.monotonic() - began)
    return _startup[0]


def await_ends(platform: OwnPlatform) -> None:
    waiting = "SELECT COUNT(*) FROM training_jobs WHERE state IN ('queued', 'running')"
    with suppress(AssertionError):  # the judge says which have not ended
        eventually(lambda: platform.rows_of(waiting) == [0])


def judge(platform: OwnPlatform, submitted: list[Job], *, kills: int, seconds: float) -> KillOutcome:
    begun = [row for row in platform.rows(attempts) if row["job"] in {job.id for job in submitted}]
    ran, faults = Counter[int](), []
    for job in submitted:
        found = platform.jobs.show(job.id)
        numbers = [row["number"] for row in begun if row["job"] == job.id]
        metrics = {each.key: each.points for each in platform.runs.show(job.run).metrics}
        times = metrics.get("ran", 0)
        ran[times] += 1
        lines = b"".join(platform.jobs.logs(job.id)).decode().splitlines()
        expected = [f"ran {job.id} {number}" for number in numbers]
        if found.state is not JobState.DONE:
            faults.append(f"{job.id} is {found.state}: {found.reason}")
        if times != len(numbers) or lines != expected[-1:]:
            faults.append(f"{job.id}: attempts {numbers}, {times} times logged, printed {lines}")
        if [each.path for each in found.outputs] != ["result.txt"]:
            faults.append(f"{job.id} left {found.outputs}")
    open_ends = [row for row in begun if row["verdict"] is None]
    faults += [f"attempt {row['number']} at {row['job']} has no end" for row in open_ends]
    left = [path.name for path in (platform.home.path / "launches").iterdir()]
    faults += [f"{name} was left behind" for name in left]
    return KillOutcome(seconds, kills, len(begun), ran, faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rounds", 20), ("jobs", 50), ("kills", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    faults = 0
    for number in range(options.rounds):
        seed = options.seed + number
        with tempfile.TemporaryDirectory() as folder, make_platform(Path(folder)) as platform:
            played = run_kills(platform, Path(folder), jobs=options.jobs, kills=options.kills, seed=seed)
        faults += len(played.faults)
        print(
            f"round {number + 1} (seed {seed}): {options.jobs} jobs, {played.kills} kills, {played.begun} attempts, "
            f"ran by times {dict(played.ran)}, {played.seconds:.1f} s, {len(played.faults)} faults",
            flush=True,
        )
        for fault in played.faults:
            print(f"  {fault}", flush=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
